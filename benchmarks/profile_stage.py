"""Profiles the device thread in a launch-bound model: the host's time per layer and microbatch, by function.

    python benchmarks/profile_stage.py [--warm 10] [--steps 10] [--top 25]

With a GPU: the 0.6b shape, 4 sequences of 256 tokens in 4 microbatches. Without one: as many layers of a small shape on
one virtual device. A step is forward and backward; no optimizer runs.

Step times are medians without the profiler; plain PyTorch and RoundPipe take turns. Then cProfile records
`StageRunner.run` in --steps further steps of RoundPipe. The profiler slows every call, so compare its times with each
other and not with the step times. On Python 3.12 and newer cProfile also records other threads while the device thread
runs: autograd's (hooks, custom backward functions) and those that wait.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import Table, begin, has_gpu, options_parser
from torch import nn
from workload import Work, build, compute_device, mean_loss

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.runtime.stage import StageRunner

NUM_MICROBATCH = 4
PACKAGE = str(Path(roundpipe.__file__).parent)

Stats = dict[tuple[str, int, str], tuple[int, int, float, float, Any]]
"""pstats: (file, line, function) -> (primitive calls, calls, own seconds, cumulative seconds, callers)."""


def launch_bound_work() -> Work:
    if has_gpu():
        return Work("0.6b", num_sequences=4, sequence_length=256)
    return Work("small", num_sequences=4, sequence_length=8)


def plain_step(model: nn.Sequential, ids: torch.Tensor) -> None:
    for part in ids.to(compute_device()).chunk(NUM_MICROBATCH):
        (mean_loss(model(part), part) / NUM_MICROBATCH).backward()
    model.zero_grad()
    if has_gpu():
        torch.cuda.synchronize()


def piped_step(model: RoundPipe, ids: torch.Tensor) -> None:
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, loss_reduction="mean")
    model.forward_backward(input_args=(ids,), label=ids, loss_fn=mean_loss, run_config=config)
    model.synchronize()
    model.zero_grad()


def milliseconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


@contextlib.contextmanager
def profiled_stages() -> Iterator[cProfile.Profile]:
    """Record every `StageRunner.run` inside the block. One device only: a profile belongs to one thread."""
    profile, run = cProfile.Profile(), StageRunner.run

    def profiled_run(self: StageRunner, *args: Any) -> None:
        profile.enable()
        try:
            run(self, *args)
        finally:
            profile.disable()

    StageRunner.run = profiled_run  # type: ignore[method-assign]
    try:
        yield profile
    finally:
        StageRunner.run = run  # type: ignore[method-assign]


def short_name(file: str, line: int, function: str) -> str:
    if file == "~":
        return function
    place = Path(file)
    place = place.relative_to(PACKAGE) if file.startswith(PACKAGE) else Path(*place.parts[-2:])
    return f"{place}:{line} {function}"


def print_profile(stats: Stats, num_units: int, num_top: int) -> None:
    """`num_units`: layers times microbatches times steps; all figures are per unit."""
    ours = {where: row for where, row in stats.items() if where[0].startswith(PACKAGE)}
    own_us = {where: 1e6 * row[2] / num_units for where, row in stats.items()}
    our_us, total_us = sum(own_us[where] for where in ours), sum(own_us.values())
    our_calls = sum(row[1] for row in ours.values()) / num_units
    dispatched = sum(row[1] for where, row in ours.items() if where[2] == "__torch_dispatch__") / num_units
    print("\nper layer and microbatch, under cProfile:")
    print(f"  {our_calls - dispatched:.1f} calls of our functions, and {dispatched:.1f} of __torch_dispatch__")
    print(f"  {our_us:.0f} us own time in our functions, {total_us:.0f} us in all functions\n")
    table = Table("own us", "cumulative us", "calls")
    for where in sorted(stats, key=lambda where: own_us[where], reverse=True)[:num_top]:
        _, calls, _, cumulative_s, _ = stats[where]
        cumulative_us = 1e6 * cumulative_s / num_units
        table.add(short_name(*where)[-49:], f"{own_us[where]:.1f}", f"{cumulative_us:.1f}", f"{calls / num_units:.2f}")


def main() -> None:
    parser = options_parser(__doc__)
    parser.set_defaults(warm=10, steps=10)
    parser.add_argument("--top", type=int, default=25, help="functions to print")
    options = parser.parse_args()
    work = launch_bound_work()
    ids, num_layers = work.batch(), work.shape.num_blocks + 2
    begin(
        f"{work.shape_name} shape, {num_layers} layers, {work}, {NUM_MICROBATCH} microbatches, no optimizer step",
        "the gap on a GPU; virtual devices intercept every torch operation (__torch_dispatch__), a GPU does not",
    )
    plain_model = build(work, compute_device())
    with RoundPipe(build(work), optim_dtype=torch.float32, devices=[compute_device()]) as model:
        times = []
        for _ in range(options.warm + options.steps):
            plain_ms = milliseconds(lambda: plain_step(plain_model, ids))
            times.append((plain_ms, milliseconds(lambda: piped_step(model, ids))))
        plain_ms, piped_ms = (statistics.median(each) for each in zip(*times[options.warm :], strict=True))
        gap_us = 1e3 * (piped_ms - plain_ms) / (num_layers * NUM_MICROBATCH)
        print(f"step: plain {plain_ms:.2f} ms, RoundPipe {piped_ms:.2f} ms, ratio {piped_ms / plain_ms:.2f}")
        print(f"gap: {gap_us:.0f} us per layer and microbatch")
        with profiled_stages() as profile:
            for _ in range(options.steps):
                piped_step(model, ids)
    stats: Stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    print_profile(stats, num_layers * NUM_MICROBATCH * options.steps, options.top)


if __name__ == "__main__":
    main()
