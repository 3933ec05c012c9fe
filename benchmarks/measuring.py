"""Times steps, reads peaks of memory and prints tables: what the benchmarks have in common.

Knows no model and no training. Without a GPU everything runs too, small, and `begin` says what that cannot show.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import resource
import time
from collections.abc import Callable

import torch

_NAME_WIDTH, _CELL_WIDTH = 50, 15


def has_gpu() -> bool:
    return torch.cuda.is_available()


@dataclasses.dataclass(frozen=True)
class Pace:
    """How many steps run before the clock starts, and how many it counts."""

    num_warm: int
    num_timed: int


@dataclasses.dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    gpu_peak_bytes: int
    host_peak_bytes: int


def measured(
    step: Callable[[], object], num_tokens: int, pace: Pace, finish: Callable[[], object] = lambda: None
) -> Measured | None:
    """None where memory does not suffice. `finish` waits for what steps have left under way.

    The clock runs from the end of one step to the end of another: what is under way when it starts is so when it
    stops, as in a long training.
    """
    free_gpu()
    reset_gpu_peak()
    try:
        for _ in range(pace.num_warm):
            step()
        start = time.perf_counter()
        for _ in range(pace.num_timed):
            step()
        seconds = time.perf_counter() - start
        finish()
    except torch.OutOfMemoryError:
        return None
    return Measured(num_tokens * pace.num_timed / seconds, gpu_peak_bytes(), host_peak_bytes())


# Memory.


def gpu_peak_bytes() -> int:
    """Since `reset_gpu_peak`."""
    return torch.cuda.max_memory_allocated() if has_gpu() else 0


def reset_gpu_peak() -> None:
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()


def host_peak_bytes() -> int:
    """Of this process since it began; it never falls."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_gpu() -> None:
    """Give back what nobody holds any more, so that the next training finds the GPU empty."""
    gc.collect()
    if has_gpu():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# What is asked and what is shown.


def options_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=4 if has_gpu() else 1, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=4 if has_gpu() else 2, help="steps that are timed")
    return parser


def counts(text: str) -> list[int]:
    """The type of an option such as 2,4,8."""
    return [int(part) for part in text.split(",")]


def pace_of(options: argparse.Namespace) -> Pace:
    return Pace(options.warm, options.steps)


def begin(workload: str, cannot_show: str) -> None:
    """Say what runs where and, without a GPU, what the figures say nothing about."""
    where = torch.cuda.get_device_name(0) if has_gpu() else "virtual devices"
    print(f"{workload}; {where}, torch {torch.__version__}", flush=True)
    if not has_gpu():
        print(f"No GPU here and the model is tiny: this cannot show {cannot_show}.", flush=True)
    spare_threads()


def spare_threads() -> None:
    """Without a GPU: tiny operations on several threads would mostly measure who else is on the machine."""
    if not has_gpu():
        torch.set_num_threads(1)


class Table:
    """Prints its rows as they come, since they may be minutes apart."""

    def __init__(self, *columns: str) -> None:
        self.add("", *columns)

    def add(self, name: str, *cells: str) -> None:
        print(f"{name:<{_NAME_WIDTH}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells), flush=True)


class SpeedTable:
    """Rows of tokens per second, each with its ratio to another one."""

    def __init__(self, reference_name: str) -> None:
        self._table = Table("tokens/s", f"of {reference_name}", "GPU peak", "host so far")

    def add(self, name: str, row: Measured | None, reference: Measured | None) -> None:
        if row is None:
            self._table.add(name, "out of memory")
            return
        ratio = "-" if reference is None else f"{row.tokens_per_s / reference.tokens_per_s:.2f}"
        gpu_peak = gigabytes(row.gpu_peak_bytes) if has_gpu() else "-"
        self._table.add(name, f"{row.tokens_per_s:,.0f}", ratio, gpu_peak, gigabytes(row.host_peak_bytes))


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
