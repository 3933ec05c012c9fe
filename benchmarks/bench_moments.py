"""Claim: moments in 8 bits and in bfloat16 train as float32 moments do.

    python benchmarks/bench_moments.py [--steps N] [--seeds N] [--lr RATE]

Trains the model of the demo (4 blocks of width 96) on its chats with `optim.AdamW`, once for each form of the moments
and each seed; a seed gives the first weights and the order of the chats. Prints the loss on the chats that are held
out and the mean loss of the last 16 steps, each with its difference to float32 moments of the same seed. Compare the
differences with the spread over the seeds. Runs on the CPU; ordinary tensors are updated as masters are.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.chats import read_chats, save_model, training_and_held_out_pairs, write_chats
from demo.plain_loop import IGNORED, Recipe, tokens_and_labels

from roundpipe import optim
from roundpipe.store.forms import MOMENTS

BATCH, LAST = 16, 16
Row = tuple[list[int], list[int]]


def batch_of(rows: list[Row], padding: int) -> tuple[Tensor, Tensor]:
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = [tokens + [padding] * (longest - len(tokens)) for tokens, _ in rows]
    labels = [labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]
    return torch.tensor(tokens), torch.tensor(labels)


def train(model: Any, rows: list[Row], held_out: list[Row], recipe: Recipe, moments: str) -> tuple[float, float]:
    """The loss on the rows that are held out after the training, and the mean loss of its last steps."""
    padding = model.config.pad_token_id
    optimizer = optim.AdamW(model.parameters(), lr=recipe.peak_lr, weight_decay=0.0, moments=moments)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    losses = []
    for step in range(recipe.steps):
        tokens, labels = batch_of(rows[step * recipe.batch : (step + 1) * recipe.batch], padding)
        loss = model(tokens, attention_mask=tokens != padding, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        tokens, labels = batch_of(held_out, padding)
        final = model(tokens, attention_mask=tokens != padding, labels=labels).loss.item()
    return final, statistics.mean(losses[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    options = parser.parse_args()
    recipe = Recipe(options.steps, BATCH, options.lr, warmup_steps=10)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training, held_out = training_and_held_out_pairs()
        num_parameters = save_model(folder, training)
        write_chats(folder / "chats.jsonl", training, options.steps * BATCH)
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
        rows = [tokens_and_labels(tokenizer, chat) for chat in read_chats(folder / "chats.jsonl")]
        others = [tokens_and_labels(tokenizer, chat) for chat in held_out]
        print(f"{num_parameters:,} parameters, {options.steps} steps of {BATCH} chats, AdamW, lr {options.lr:g}")
        print(f"{'seed':>4} {'moments':>9} {'held out':>9} {'':>9} {'training':>9} {'':>9}")
        found: dict[str, list[tuple[float, float]]] = {moments: [] for moments in MOMENTS}
        for seed in range(options.seeds):
            random.Random(seed).shuffle(rows)
            for moments in MOMENTS:
                set_seed(seed)
                model = AutoModelForCausalLM.from_config(config).train()
                found[moments].append(train(model, rows, others, recipe, moments))
                of_float32 = found["float32"][-1]
                cells = [
                    f"{one:>9.4f} {one - same:>+9.4f}" for one, same in zip(found[moments][-1], of_float32, strict=True)
                ]
                print(f"{seed:>4} {moments:>9} {' '.join(cells)}", flush=True)
    for moments, results in found.items():
        held, last = (statistics.mean(column) for column in zip(*results, strict=True))
        print(f"mean {moments:>9} {held:>9.4f} {'':>9} {last:>9.4f}")
    if options.seeds > 1:
        print(f"standard deviation of float32 over seeds: {statistics.stdev(held for held, _ in found['float32']):.4f}")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
