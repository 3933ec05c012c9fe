"""Writes docs/what-fits.md: which models train on which GPUs with how much host memory, and how fast.

Every figure is a prediction of `roundpipe estimate`. `make what-fits` runs it; it takes some minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from roundpipe.cli.estimate import load_on_paper, parser
from roundpipe.estimate.estimate import Machine, Work, estimate
from roundpipe.estimate.figures import GIB, GPUS, SHAPES, DeviceFigures
from roundpipe.store.training_memory import PaperOptimizer

PAGE = Path(__file__).parents[1] / "docs" / "what-fits.md"
BATCH, LENGTH, RANK = 16, 2048, 16
# The GPU that stands for each size of memory, and how many there are.
MACHINES: tuple[tuple[str, str, int], ...] = (
    ("12 GB", "RTX3060", 1),
    ("16 GB", "RTX4060TI", 1),
    ("24 GB", "RTX4090", 1),
    ("2 x 24 GB", "RTX4090", 2),
)
# GiB of host memory that machines are sold with, and what the system and other programs keep of it.
RAM_SIZES = (16, 32, 64, 128, 256, 512)
SYSTEM_GIB = 6
METHODS: tuple[tuple[str, int | None], ...] = (("LoRA of rank 16", RANK), ("all weights", None))
MODELS = tuple(name for name in SHAPES if name not in ("qwen3-235b-a22b", "llama-3.1-70b"))

_HEAD = f"""# Your GPU, your RAM: what you can train

**All figures of this page are predicted** by [`roundpipe estimate`](estimate.md); `make what-fits` writes it. Of the
GPUs, none but an H200 was measured: [how good predictions were there](estimate.md#how-good-it-is). For your own model,
GPU and lengths, ask the command.

A step has {BATCH} sequences of {LENGTH} tokens, in {BATCH} microbatches, with exact steps, bfloat16 weights and AdamW
in float32. RAM is the smallest usual size in GiB with {SYSTEM_GIB} GiB left for the system. Columns of GPUs are tokens
per second with as much RAM as that; `-`: it does not fit into the device. The GPUs are

{{gpus}}

The optimizer is taken to update 4 billion parameters per second, as on a server; on a desktop with two memory channels
it is slower, which matters where all weights of a large model train.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one model needs. tokens_per_s: for each of MACHINES; None where it does not fit into the device."""

    model: str
    host_bytes: int
    ram_gib: int | None
    tokens_per_s: tuple[float | None, ...]

    def written(self) -> str:
        speeds = ("-" if speed is None else f"{speed:,.0f}" for speed in self.tokens_per_s)
        ram = f"more than {RAM_SIZES[-1]}" if self.ram_gib is None else str(self.ram_gib)
        return f"| {self.model} | {self.host_bytes / 1e9:.1f} GB | {ram} | {' | '.join(speeds)} |"


def row(model: str, rank: int | None) -> Row:
    """Estimate a step of a model on all machines. `rank`: of the adapters; None to train all weights."""
    paper = load_on_paper(model, torch.bfloat16, rank)
    work = Work(batch=BATCH, length=LENGTH, is_exact=True, num_microbatch=BATCH, optimizer=PaperOptimizer("Adam", 2))
    rate = parser().get_default("optimizer_rate") * 1e9
    found = [estimate(paper, work, Machine(GPUS[name], number, None, rate)) for _, name, number in MACHINES]
    host_bytes = max(sum(each.host.values()) for each in found)
    needed_gib = host_bytes / GIB + SYSTEM_GIB
    return Row(
        model,
        host_bytes,
        next((size for size in RAM_SIZES if needed_gib <= size), None),
        tuple(BATCH * LENGTH / each.step_s if each.fits else None for each in found),
    )


def table(rows: Iterable[Row]) -> Iterator[str]:
    titles = ["model", "host memory", "RAM", *(title for title, _, _ in MACHINES)]
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for each in rows:
        yield each.written()


def page_head() -> str:
    gpus = "\n".join(f"* {title}: {_in_words(GPUS[name])}" for title, name, number in MACHINES if number == 1)
    return _HEAD.format(gpus=gpus)


def page() -> str:
    lines = [page_head()]
    for title, rank in METHODS:
        lines += [f"## {title[0].upper()}{title[1:]}", "", *table(row(model, rank) for model in MODELS), ""]
    return "\n".join(itertools.chain(lines, [_FOOT]))


def _in_words(gpu: DeviceFigures) -> str:
    return f"{gpu.name} ({gpu.half_flops / 1e12:.0f} TFLOP/s, link {gpu.link_bytes_per_s / 1e9:.0f} GB/s)"


_FOOT = """## From a row to a run

* [Recipes](https://github.com/roundpipe/roundpipe/tree/main/recipes) are config files of `roundpipe train` for most of
  these rows, with the smallest machine of each:
  `roundpipe train --config recipes/qwen3-8b-lora.yaml --data chats.jsonl --out run`.
* Host memory bounds what trains, the GPU how fast. With more of both, nothing has to change: plans use what is there.
* Too slow where all weights train on a small GPU? The optimizer takes the same time for any number of tokens, so larger
  batches cost less per token: [tokens per step](batches.md#tokens-per-step).
* Longer sequences need more device memory:
  `roundpipe estimate qwen3-8b --lora 16 --batch 4 --seq-len 16384 --devices 1x24GiB --ram 58`.
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
