"""DPO with two models in your own loop: a policy that is trained and a frozen reference, both larger than GPU memory.

python examples/dpo.py --model path/to/model --data preferences.jsonl --out runs/dpo
python examples/dpo.py --tiny
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe import RoundPipeRunConfig, checkpoint, optim, wrap_model_to_roundpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder with a model and its tokenizer")
parser.add_argument("--data", help='file with lines {"prompt": ..., "chosen": ..., "rejected": ...}')
parser.add_argument("--out", default="runs/dpo", help="folder for the trained model")
parser.add_argument("--batch", type=int, default=8, help="pairs per step")
parser.add_argument("--lr", type=float, default=5e-7)
parser.add_argument("--beta", type=float, default=0.1)
parser.add_argument("--tiny", action="store_true", help="use a tiny random model and toy preferences")
args = parser.parse_args()
if not args.tiny and not (args.model and args.data):
    parser.error("give --model and --data, or --tiny")
if args.tiny:
    import tiny

    parser.set_defaults(**tiny.causal_lm(Path(args.out) / "tiny", "preferences.jsonl"), lr=3e-3)
    args = parser.parse_args()

# 1. Data: two rows per pair, chosen and rejected, one after the other. Tokens of the prompt have no label (-100).
tokenizer = AutoTokenizer.from_pretrained(args.model)


def encode(prompt: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    prompt_ids = tokenizer(prompt)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return torch.tensor(prompt_ids + answer_ids), torch.tensor([-100] * len(prompt_ids) + answer_ids)


pairs = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
rows = [encode(pair["prompt"], pair[answer]) for pair in pairs for answer in ("chosen", "rejected")]
batches = [rows[place : place + 2 * args.batch] for place in range(0, len(rows), 2 * args.batch)]

# 2. Two models. The reference needs host memory for its weights only.
network = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
frozen = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").requires_grad_(False).eval()
policy, reference = wrap_model_to_roundpipe(network, optim_dtype=torch.float32), wrap_model_to_roundpipe(frozen)
optimizer = optim.AdamW(policy.optim_parameters(), lr=args.lr)


def loss_fn(outputs, label):  # runs on the device, for one pair
    tokens = label["tokens"][:, 1:]  # the logits of a token predict the next one
    scores = outputs.logits[:, :-1].float().log_softmax(-1).gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    chosen, rejected = (scores * (tokens != -100)).sum(-1) - label["reference"]
    return -logsigmoid(args.beta * (chosen - rejected))


# 3. Train. The reference returns the mean over the labels of each row, and no logits, which are large.
losses = []
for step, batch in enumerate(batches):
    ids = pad_sequence([row for row, _ in batch], batch_first=True)
    labels = pad_sequence([label for _, label in batch], batch_first=True, padding_value=-100)
    inputs = {"input_ids": ids, "attention_mask": pad_sequence([torch.ones_like(row) for row, _ in batch], True)}
    by_row = RoundPipeRunConfig(num_microbatch=len(ids), merge_output=False, whole_batch_loss=False, keep_logits=False)
    with torch.no_grad():
        means = reference(**inputs, labels=labels, roundpipe_run_config=by_row).loss
    means.synchronize()  # one loss per microbatch, which is one row here
    scores = -torch.stack(means) * (labels[:, 1:] != -100).sum(-1)
    by_pair = RoundPipeRunConfig(num_microbatch=len(ids) // 2, loss_reduction="mean")  # a microbatch is one pair
    label = {"tokens": labels, "reference": scores}
    losses.append(policy.forward_backward((), inputs, label, loss_fn, run_config=by_pair).item())
    policy.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    print(f"step {step + 1:5} of {len(batches)}  loss {losses[-1]:.4f}")
checkpoint.save(f"{args.out}/policy", policy, tokenizer=tokenizer).wait()  # loads with AutoModelForCausalLM
