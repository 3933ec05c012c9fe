"""Train all weights of a causal language model on a text. Started again after a crash, the run goes on exactly.

python examples/finetune_full.py --model path/to/model --data text.txt --out runs/full
python examples/finetune_full.py --tiny
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from roundpipe import checkpoint, clip_grad_norm_, optim, wrap_model_to_roundpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder with a model and its tokenizer")
parser.add_argument("--data", help="text file")
parser.add_argument("--out", default="runs/full", help="folder for checkpoints")
parser.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence")
parser.add_argument("--batch", type=int, default=16, help="sequences per step")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--tiny", action="store_true", help="use a tiny random model and a toy text")
args = parser.parse_args()
if not args.tiny and not (args.model and args.data):
    parser.error("give --model and --data, or --tiny")
if args.tiny:
    import tiny

    paths = tiny.causal_lm(Path(args.out) / "tiny", "text.txt")
    parser.set_defaults(**paths, seq_len=16, batch=8, steps=20, save_every=5, lr=3e-3)
    args = parser.parse_args()

# 1. Data: the text as one row of tokens, cut into sequences of equal length.
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokens = torch.tensor(tokenizer(Path(args.data).read_text())["input_ids"])
rows = tokens[: len(tokens) // args.seq_len * args.seq_len].view(-1, args.seq_len)
if len(rows) < args.batch:
    parser.error(f"the text has {len(rows)} sequences of {args.seq_len} tokens, fewer than --batch {args.batch}")


def batch(step: int) -> torch.Tensor:
    """Return the sequences of a step. They depend on its number alone, so a resumed run sees the same data."""
    epoch, place = divmod(step - 1, len(rows) // args.batch)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
    return rows[order[place * args.batch : (place + 1) * args.batch]]


# 2. Model: weights have the precision of the folder, usually bfloat16; the optimizer computes in float32.
network = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
model = wrap_model_to_roundpipe(network, optim_dtype=torch.float32)
optimizer = optim.AdamW(model.optim_parameters(), lr=args.lr, weight_decay=0.1)
schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)


def step_fn() -> None:
    clip_grad_norm_(model, max_norm=1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


# 3. Resume and train. AutoModelForCausalLM.from_pretrained(folder) loads the folder of a checkpoint.
newest = checkpoint.latest(args.out)
first = checkpoint.load(newest, model, optimizer, scheduler=schedule)["step"] if newest is not None else 0
print(f"{first} steps are done, {args.steps - first} are left")
losses = []
for step in range(first + 1, args.steps + 1):
    ids = batch(step)
    loss = model.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})  # the mean over all tokens
    model.step(step_fn, is_async=False)  # is_async=True is faster; weights are then one update old
    losses.append(loss.item())
    print(f"step {step:5}  loss {losses[-1]:.4f}  {model.stats().tokens_per_s:.0f} tokens/s")
    if step % args.save_every == 0 or step == args.steps:
        folder, extra = f"{args.out}/step-{step}", {"step": step}
        checkpoint.save(folder, model, optimizer, scheduler=schedule, extra=extra, tokenizer=tokenizer, keep=2)
model.close()  # waits for the last checkpoint
