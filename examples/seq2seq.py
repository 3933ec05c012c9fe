"""Train an encoder-decoder model such as T5 on pairs of texts, then translate one.

python examples/seq2seq.py --model path/to/model --data pairs.jsonl --out runs/seq2seq
python examples/seq2seq.py --tiny
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from roundpipe import checkpoint, optim, wrap_model_to_roundpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder with a model and its tokenizer")
parser.add_argument("--data", help='file with lines {"source": ..., "target": ...}')
parser.add_argument("--out", default="runs/seq2seq", help="folder for the trained model")
parser.add_argument("--batch", type=int, default=32, help="pairs per step")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--tiny", action="store_true", help="use a tiny random T5 and toy pairs")
args = parser.parse_args()
if not args.tiny and not (args.model and args.data):
    parser.error("give --model and --data, or --tiny")
if args.tiny:
    import tiny

    parser.set_defaults(**tiny.seq2seq(Path(args.out) / "tiny"), batch=10, epochs=4, lr=1e-2)
    args = parser.parse_args()

# 1. Data: encoder and decoder have lengths of their own. Padding of the target has no label (-100).
tokenizer = AutoTokenizer.from_pretrained(args.model)
pairs = [json.loads(line) for line in Path(args.data).read_text().splitlines()]


def batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    chosen = [pairs[row] for row in rows.tolist()]
    sources = tokenizer([pair["source"] for pair in chosen], padding=True, return_tensors="pt")
    targets = tokenizer([pair["target"] for pair in chosen], padding=True, return_tensors="pt")
    labels = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
    return {"input_ids": sources["input_ids"], "attention_mask": sources["attention_mask"], "labels": labels}


# 2. Model: blocks of encoder and decoder become layers of one pipeline; the encoder's output travels along.
network = AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype="auto")
model = wrap_model_to_roundpipe(network, optim_dtype=torch.float32)
optimizer = optim.AdamW(model.optim_parameters(), lr=args.lr)

# 3. Train.
losses, generator = [], torch.Generator().manual_seed(0)
for epoch in range(args.epochs):
    for rows in torch.randperm(len(pairs), generator=generator).split(args.batch):
        loss = model.forward_backward(input_kwargs=batch(rows))  # the mean over all labels of the batch
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        losses.append(loss.item())
    print(f"epoch {epoch + 1:3}  loss {losses[-1]:.4f}")

# 4. Use it. All weights are uploaded for every token, so generate samples here, and serve the saved model elsewhere.
model.eval()
source = tokenizer(pairs[0]["source"], return_tensors="pt")
reply = model.generate(input_ids=source["input_ids"], attention_mask=source["attention_mask"], max_new_tokens=8)
print(f"{pairs[0]['source']!r} -> {tokenizer.decode(reply[0], skip_special_tokens=True)!r}")
checkpoint.save(f"{args.out}/model", model, tokenizer=tokenizer).wait()  # loads with AutoModelForSeq2SeqLM
