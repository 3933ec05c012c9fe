"""Train a LoRA adapter of a causal language model on chats. Started again after a crash, the run goes on exactly.

python examples/finetune_lora.py --model path/to/model --data chats.jsonl --out runs/lora
python examples/finetune_lora.py --tiny
"""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe import checkpoint, optim, wrap_model_to_roundpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder with a model and a tokenizer that has a chat template")
parser.add_argument("--data", help='file with lines {"messages": [{"role": ..., "content": ...}, ...]}')
parser.add_argument("--out", default="runs/lora", help="folder for checkpoints")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--batch", type=int, default=16, help="chats per step")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--tiny", action="store_true", help="use a tiny random model and toy chats")
args = parser.parse_args()
if not args.tiny and not (args.model and args.data):
    parser.error("give --model and --data, or --tiny")
if args.tiny:
    import tiny

    paths = tiny.causal_lm(Path(args.out) / "tiny", "chats.jsonl")
    parser.set_defaults(**paths, batch=8, epochs=3, save_every=5, lr=1e-2)
    args = parser.parse_args()

# 1. Data: the last message of each chat is learned; all tokens before it have no label (-100).
tokenizer = AutoTokenizer.from_pretrained(args.model)


def encode(messages: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    ids = torch.tensor(tokenizer.apply_chat_template(messages, return_dict=False))
    return ids, ids.masked_fill(torch.arange(len(ids)) < len(prompt), -100)


rows = [encode(json.loads(line)["messages"]) for line in Path(args.data).read_text().splitlines()]


def batch(chats: list[int]) -> dict[str, torch.Tensor]:
    ids, labels = zip(*(rows[chat] for chat in chats), strict=True)
    mask = pad_sequence([torch.ones_like(row) for row in ids], True)
    return {"input_ids": pad_sequence(ids, True), "attention_mask": mask, "labels": pad_sequence(labels, True, -100)}


torch.manual_seed(0)  # the same order of chats in every run, so a resumed run sees the same data
order = torch.cat([torch.randperm(len(rows)) for _ in range(args.epochs)])
batches = [chats.tolist() for chats in order.split(args.batch)]

# 2. Model: base weights are frozen in host memory and take no gradients and no optimizer state.
base = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
network = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
model = wrap_model_to_roundpipe(network, optim_dtype=torch.float32)
optimizer = optim.AdamW(model.optim_parameters(), lr=args.lr)

# 3. Resume and train. A checkpoint holds the adapter: PeftModel.from_pretrained(base, folder) loads it.
newest = checkpoint.latest(args.out)
first = checkpoint.load(newest, model, optimizer)["step"] if newest is not None else 0
print(f"{first} steps are done, {len(batches) - first} are left")
losses = []
for step, chats in enumerate(batches[first:], start=first + 1):
    loss = model.forward_backward(input_kwargs=batch(chats))  # the mean over all labels of the batch
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    losses.append(loss.item())
    print(f"step {step:5}  loss {losses[-1]:.4f}")
    if step % args.save_every == 0 or step == len(batches):
        checkpoint.save(f"{args.out}/step-{step}", model, optimizer, extra={"step": step}, tokenizer=tokenizer, keep=2)
model.close()  # waits for the last checkpoint
