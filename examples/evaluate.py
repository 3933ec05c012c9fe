"""Measure the loss and perplexity of a causal language model on a text, without gradients.

python examples/evaluate.py --model path/to/model --data text.txt
python examples/evaluate.py --tiny
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder with a model and its tokenizer")
parser.add_argument("--data", help="text file")
parser.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence")
parser.add_argument("--batch", type=int, default=16, help="sequences per call")
parser.add_argument("--tiny", action="store_true", help="use a tiny random model and a toy text")
args = parser.parse_args()
if not args.tiny and not (args.model and args.data):
    parser.error("give --model and --data, or --tiny")
if args.tiny:
    import tiny

    folder = tempfile.TemporaryDirectory()
    parser.set_defaults(**tiny.causal_lm(Path(folder.name), "text.txt"), seq_len=64)
    args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
tokens = torch.tensor(tokenizer(Path(args.data).read_text())["input_ids"])
rows = tokens[: len(tokens) // args.seq_len * args.seq_len].view(-1, args.seq_len)

network = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval().requires_grad_(False)
config = RoundPipeRunConfig(keep_logits=False)  # head and loss run in chunks of tokens, so logits take little memory
total = 0.0
with wrap_model_to_roundpipe(network, model_run_config=config) as model, torch.no_grad():
    for ids in rows.split(args.batch):
        total += model(input_ids=ids, labels=ids).loss.item() * len(ids)  # rows are equally long
loss = total / len(rows)
print(f"{len(rows)} sequences of {args.seq_len} tokens: loss {loss:.4f}, perplexity {math.exp(loss):.1f}")
