"""Claim: adapters on a packed base reach the loss of adapters on the base in bfloat16.

    python benchmarks/bench_frozen_quality.py [--base-steps N] [--steps N] [--seeds N] [--rank R] [--lr RATE]

For each seed, trains the model of the demo (4 blocks of width 96) on its chats in plain PyTorch. Then all that is known
of the crew changes: everyone has what the next person had. A LoRA adapter on all linear layers learns that through
RoundPipe, on the same base in bfloat16, nf4, int8 and fp8, with the same chats and the same first adapter. Prints
the loss of the base on the chats that its training held out, before the adapter; the loss on the new chats that the
adapter's training held out, and the mean of its last 16 steps; and the ratios to bfloat16. Compare them with the spread
over the seeds. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_moments import BATCH, LAST, Row, batch_of, train
from demo.chats import Chat, read_chats, save_model, training_and_held_out_pairs, write_chats
from demo.plain_loop import Recipe, tokens_and_labels

from roundpipe import RoundPipeRunConfig, optim, wrap_model_to_roundpipe
from roundpipe.packed import FORMS

BASES = ("bfloat16", *FORMS)
MICROBATCHES = RoundPipeRunConfig(num_microbatch=2)


def facts_of_the_next_person() -> dict[str, dict[str, str]]:
    import demo.chats

    names = {topic: list(values) for topic, values in demo.chats.FACTS.items()}
    return {
        topic: dict(zip(names[topic], [*list(values.values())[1:], next(iter(values.values()))], strict=True))
        for topic, values in demo.chats.FACTS.items()
    }


def changed_pairs() -> tuple[list[Chat], list[Chat]]:
    """The pairs of the demo after the change."""
    import demo.chats

    before, demo.chats.FACTS = demo.chats.FACTS, facts_of_the_next_person()
    try:
        return training_and_held_out_pairs()
    finally:
        demo.chats.FACTS = before


def loss_on(model: Any, rows: list[Row], padding: int) -> float:
    tokens, labels = batch_of(rows, padding)
    with torch.no_grad():
        return float(model(input_ids=tokens, attention_mask=tokens != padding, labels=labels).loss)


def adapt(base: Any, form: str, rows: dict[str, list[Row]], recipe: Recipe, rank: int) -> tuple[float, float, float]:
    """Train an adapter. The loss of the base before, on new chats that are held out after, and of the last steps."""
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    padding = base.config.pad_token_id
    model = wrap_model_to_roundpipe(
        get_peft_model(copy.deepcopy(base).to(torch.bfloat16), adapter),
        devices=["cpu"] * 2,
        optim_dtype=torch.float32,
        frozen_weights=None if form == "bfloat16" else form,
        model_run_config=MICROBATCHES,
    )
    with model:
        before = loss_on(model, rows["known"], padding)
        optimizer = optim.AdamW(model.optim_parameters(), lr=recipe.peak_lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)

        def step() -> None:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        losses = []
        for at in range(recipe.steps):
            tokens, labels = batch_of(rows["new"][at * recipe.batch : (at + 1) * recipe.batch], padding)
            given = {"input_ids": tokens, "attention_mask": tokens != padding, "labels": labels}
            losses.append(float(model.forward_backward(input_kwargs=given)))
            model.step(step, is_async=False)
        return before, loss_on(model, rows["held out"], padding), statistics.mean(losses[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=120)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    of_base = Recipe(options.base_steps, BATCH, 1.5e-3, warmup_steps=10)
    of_adapter = Recipe(options.steps, BATCH, options.lr, warmup_steps=5)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training, known = training_and_held_out_pairs()
        changed, held_out = changed_pairs()
        num_parameters = save_model(folder, training + changed)
        write_chats(folder / "chats.jsonl", training, options.base_steps * BATCH)
        write_chats(folder / "changed.jsonl", changed, options.steps * BATCH)
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
        chats = {"base": read_chats(folder / "chats.jsonl"), "new": read_chats(folder / "changed.jsonl")}
        chats |= {"known": known, "held out": held_out}
        rows = {which: [tokens_and_labels(tokenizer, chat) for chat in each] for which, each in chats.items()}
        print(f"{num_parameters:,} parameters, {options.base_steps} steps of the base, {options.steps} of the adapter")
        print(f"{'seed':>4} {'base':>9} {'before':>9} {'':>7} {'held out':>9} {'':>7} {'training':>9} {'':>7}")
        found: dict[str, list[tuple[float, float, float]]] = {form: [] for form in BASES}
        for seed in range(options.seeds):
            for which in ("base", "new"):
                random.Random(seed).shuffle(rows[which])
            set_seed(seed)
            base = AutoModelForCausalLM.from_config(config).train()
            train(base, rows["base"], rows["known"], of_base, "float32")
            base.requires_grad_(False)
            for form in BASES:
                set_seed(seed)
                found[form].append(adapt(base, form, rows, of_adapter, options.rank))
                print(f"{seed:>4} {form:>9} {_cells(found[form][-1], found['bfloat16'][-1])}", flush=True)
    means = {form: [statistics.mean(column) for column in zip(*each, strict=True)] for form, each in found.items()}
    for form, each in means.items():
        print(f"mean {form:>9} {_cells(each, means['bfloat16'])}")
    if options.seeds > 1:
        spread = [statistics.stdev(column) for column in zip(*found["bfloat16"], strict=True)]
        print("standard deviation of bfloat16 over seeds: " + ", ".join(f"{each:.4f}" for each in spread))
    print(f"{time.perf_counter() - start:.0f} s, {time.process_time():.0f} s of cores")


def _cells(losses: Any, of_bfloat16: Any) -> str:
    return " ".join(f"{one:>9.4f} {one / same:>7.3f}" for one, same in zip(losses, of_bfloat16, strict=True))


if __name__ == "__main__":
    main()
