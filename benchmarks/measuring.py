"""Shared code of the benchmarks: times steps, reads memory peaks and prints tables.

Knows no model and no training. Without a GPU the benchmarks run small models, and `begin` prints what they cannot show.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

_NAME_WIDTH, _CELL_WIDTH = 50, 15
_CHUNK_BYTES = 4 << 20
_SAMPLE_S = 0.002
MEMORY_KINDS = ("RssAnon", "RssShmem")
T = TypeVar("T")


def has_gpu() -> bool:
    return torch.cuda.is_available()


@dataclasses.dataclass(frozen=True)
class Pace:
    """Number of warm-up steps and of timed steps."""

    num_warm: int
    num_timed: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """Speed and memory peaks of one timed training."""

    tokens_per_s: float
    gpu_peak_bytes: int
    host_peak_bytes: int


def measured(
    step: Callable[[], object], num_tokens: int, pace: Pace, finish: Callable[[], object] = lambda: None
) -> Measured | None:
    """Warm up, then time steps; None if memory does not suffice. `finish` waits for work that the last step started.

    The clock runs from the end of one step to the end of another: work that overlaps the start of the timed steps
    balances work that overlaps their end, as in a long training.
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
    """Peak of GPU memory since `reset_gpu_peak`; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if has_gpu() else 0


def reset_gpu_peak() -> None:
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()


def host_peak_bytes() -> int:
    """Peak of host memory since the process began; it never falls."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class HostMemoryPeak:
    """Samples the anonymous memory of this process until it is closed. `kinds`: see `anonymous_bytes`."""

    def __init__(self, kinds: Sequence[str] = MEMORY_KINDS) -> None:
        self._kinds = kinds
        self.before_bytes = self.peak_bytes = anonymous_bytes(kinds)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self._kinds))

    def close(self) -> int:
        """End sampling; returns the bytes that were added at most."""
        self._is_over.set()
        self._thread.join()
        return self.peak_bytes - self.before_bytes


def anonymous_bytes(kinds: Sequence[str] = MEMORY_KINDS) -> int:
    """Memory of this process that no file backs: the sum of some fields of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in kinds if name in fields)


def free_gpu() -> None:
    """Collect garbage and empty torch's cache, so that the next training starts with free GPU memory."""
    gc.collect()
    if has_gpu():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# Disk.


def plain_write_s(path: Path, num_bytes: int) -> float:
    """Seconds to write so many bytes to a file and flush them, without anything else."""
    chunk = memoryview(os.urandom(_CHUNK_BYTES))
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for left in range(num_bytes, 0, -_CHUNK_BYTES):
            file.write(chunk[:left])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """The result of an action and the seconds it took."""
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


# Options and output.


def options_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=4 if has_gpu() else 1, help="warm-up steps")
    parser.add_argument("--steps", type=int, default=4 if has_gpu() else 2, help="timed steps")
    return parser


def counts(text: str) -> list[int]:
    """Parse an option such as 2,4,8."""
    return [int(part) for part in text.split(",")]


def pace_of(options: argparse.Namespace) -> Pace:
    return Pace(options.warm, options.steps)


def begin(workload: str, cannot_show: str) -> None:
    """Print workload and machine and, without a GPU, what the figures cannot show."""
    where = torch.cuda.get_device_name(0) if has_gpu() else "virtual devices"
    print(f"{workload}; {where}, torch {torch.__version__}", flush=True)
    if not has_gpu():
        print(f"No GPU here and the model is tiny: this cannot show {cannot_show}.", flush=True)
    spare_threads()


def spare_threads() -> None:
    """Use one thread without a GPU: tiny operations on several threads mostly measure other load on the machine."""
    if not has_gpu():
        torch.set_num_threads(1)


class Table:
    """A text table that prints each row at once, because rows may be minutes apart."""

    def __init__(self, *columns: str) -> None:
        self.add("", *columns)

    def add(self, name: str, *cells: str) -> None:
        print(f"{name:<{_NAME_WIDTH}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells), flush=True)


class SpeedTable:
    """A table of tokens per second, each with its ratio to a reference."""

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
