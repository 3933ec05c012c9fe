"""Claim: the time from wrapping a model to the end of its first call grows little with layers of one kind.

    python benchmarks/bench_wrapping.py [--layers 4 16 36] [--lora] [--hidden 64] [--vocab 1000] [--beside OTHER/src]

Wraps Qwen3 as a trainer does and makes one call with a batch as collators make it. Each round runs in a process of its
own, in turn with one over the source tree `--beside`, if given. Seconds are those of the processor, the least of all
rounds, with one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve()
NAMES = FINDING, COMPARING, REST, CALL, ALL = "finding", "comparing", "rest of wrapping", "rest of call", "in all"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 36])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora", action="store_true", help="put a LoRA adapter on all linear layers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--beside", type=Path, help="another source tree to measure in turn")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.child:
        print(json.dumps([seconds_of(options, number) for number in (2, *options.layers)][1:]))
        return
    trees = {"this tree": HERE.parents[1] / "src"} | ({"beside": options.beside} if options.beside else {})
    least: dict[tuple[str, int, str], float] = {}
    for _ in range(options.rounds):
        for tree, source in trees.items():
            for number, found in zip(options.layers, child(source), strict=True):
                for name, seconds in found.items():
                    least[tree, number, name] = min(seconds, least.get((tree, number, name), seconds))
    print(f"{'layers':>6}  {'tree':<10}" + "".join(f"{name:>18}" for name in NAMES))
    for number in options.layers:
        for tree in trees:
            cells = (f"{least[tree, number, name]:18.2f}" for name in NAMES)
            print(f"{number:6}  {tree:<10}" + "".join(cells))
        if options.beside:
            ratios = (least["this tree", number, name] / least["beside", number, name] for name in NAMES)
            print(f"{'':6}  {'ratio':<10}" + "".join(f"{ratio:18.2f}" for ratio in ratios))


def child(source: Path) -> Any:
    """Seconds by phase for each number of layers, measured with the library of a source tree."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE), *sys.argv[1:], "--child"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of(options: argparse.Namespace, num_layers: int) -> dict[str, float]:
    """Wrap a model and call it once; returns seconds of the processor by phase."""
    import torch

    from roundpipe import wrap_model_to_roundpipe
    from roundpipe.split import splitter

    logging.getLogger("roundpipe").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    model = built(options, num_layers)
    ids = torch.arange(4 * 16).remainder(options.vocab - 1).view(4, 16)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    batch["num_items_in_batch"] = torch.tensor(ids.numel())
    found = dict.fromkeys(NAMES, 0.0)
    plans = {FINDING: "calibrate", COMPARING: "verify"}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                found[name] += time.process_time() - start

        return run

    likely = getattr(splitter, "likely_inputs", lambda *names: contextlib.nullcontext())
    with contextlib.ExitStack() as stack:
        for name, function in plans.items():
            stack.enter_context(patch.object(splitter, function, timed(name, getattr(splitter, function))))
        start = time.process_time()
        with likely("attention_mask", "num_items_in_batch"):
            wrapper = wrap_model_to_roundpipe(model, devices=["cpu"])
        wrapped, plans_of_wrapping = time.process_time(), found[FINDING] + found[COMPARING]
        wrapper.forward_backward(input_kwargs=batch)
        end = time.process_time()
    plans_of_call = found[FINDING] + found[COMPARING] - plans_of_wrapping
    found |= {REST: wrapped - start - plans_of_wrapping, CALL: end - wrapped - plans_of_call, ALL: end - start}
    wrapper.close()
    return found


def built(options: argparse.Namespace, num_layers: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=max(options.hidden // 128, 2),
        num_key_value_heads=max(options.hidden // 256, 1),
        head_dim=min(128, options.hidden // 2),
        vocab_size=options.vocab,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    if options.lora:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


if __name__ == "__main__":
    main()
