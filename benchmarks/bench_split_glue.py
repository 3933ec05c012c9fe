"""Claim: splitting a transformers model into 32 layers costs the host less than 2 ms per microbatch.

    python benchmarks/bench_split_glue.py [--layers 32] [--repeats 200]

Runs the forward of the plain model and of its split layers in turn, on one CPU thread. After the split, modules that
return their input replace the blocks of both, so only the model's own code and ours remain. The glue is the difference
of the shortest times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.split.layers import BlockLayer
from roundpipe.split.splitter import ModelSplitter


def build(num_layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


class Passing(nn.Module):
    """Returns its input."""

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden


def exchange_blocks(model: Any, layers: Sequence[nn.Module]) -> None:
    """Replace the blocks of the model and of its layers with `Passing`."""
    for layer in layers:
        if isinstance(layer, BlockLayer):
            layer.block = Passing()
    model.model.layers = nn.ModuleList([Passing() for _ in model.model.layers])


def run_layers(layers: Sequence[nn.Module], inputs: dict[str, Any]) -> Any:
    value = layers[0](**inputs)
    for layer in layers[1:]:
        value = layer(value)
    return value


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build(options.layers)
    ids = torch.arange(8).view(1, 8)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "use_cache": False}
    splitter = ModelSplitter(model)
    splitter.learn((), inputs)
    exchange_blocks(model, splitter.layers)
    plain, split = [], []
    for _ in range(options.repeats):
        plain.append(milliseconds(lambda: model(**inputs)))
        split.append(milliseconds(lambda: run_layers(splitter.layers, inputs)))
    ours, theirs = min(split), min(plain)
    glue = ours - theirs
    times = f"the model's own code {theirs:.2f} ms, split {ours:.2f} ms, ratio {ours / theirs:.2f}"
    print(f"{options.layers} layers: {times}; {glue:.2f} ms of glue")


if __name__ == "__main__":
    main()
