"""Claim: a group of one machine costs nothing, and two processes that share a GPU train one model over loopback.

    python benchmarks/bench_machines_gpu.py [--shape 1.7b] [--batch 16] [--warm 4] [--steps 3] [--parts one,two]

Full training, sequences of 4096 tokens. one: without a process group, and with a group of this process alone. two: two
processes with half of the batch each. They divide one GPU, its link and the cores, so their speed says nothing about
two machines; their bytes, memory and losses do. Without a GPU the model is tiny.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable

import torch
from measuring import Table, begin, gigabytes, has_gpu, host_peak_bytes, options_parser
from torch import distributed as dist
from workload import MODES, RoundPipeTraining, Work, build, build_on_meta, sized

TIMEOUT = datetime.timedelta(seconds=300)


def timed_steps(step: Callable[[], float], options: argparse.Namespace) -> tuple[float, list[float]]:
    """Mean seconds of the timed steps, and the losses of all steps."""
    losses = [step() for _ in range(options.warm)]
    start_s = time.perf_counter()
    losses += [step() for _ in range(options.steps)]
    return (time.perf_counter() - start_s) / options.steps, losses


def join_group(rank: int, size: int, place: str) -> dist.ProcessGroup:
    store = dist.FileStore(place, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def measure_one(work: Work, options: argparse.Namespace, table: Table) -> None:
    """Alternate between no group and a group of one, so that changes of the machine's speed meet both."""
    group = join_group(0, 1, tempfile.mkstemp()[1])
    ids = work.batch()
    for mode, is_async in MODES.items():
        seconds: dict[str, list[float]] = {"none": [], "one": []}
        for _ in range(2):
            for name, given in (("none", None), ("one", group)):
                training = RoundPipeTraining(build(work), process_group=given)
                step = functools.partial(training.step, ids, options.micro, is_async=is_async)
                seconds[name].append(timed_steps(step, options)[0])
                training.model.close()
        alone, one = (min(seconds[name]) for name in ("none", "one"))
        table.add(f"no group, {mode}", f"{alone:.3f} s", "1.00")
        table.add(f"a group of one, {mode}", f"{one:.3f} s", f"{one / alone:.3f}")
    dist.destroy_process_group()


def _run_rank(rank: int, place: str, work: Work, options: argparse.Namespace, results: multiprocessing.Queue) -> None:
    if has_gpu():
        torch.cuda.set_per_process_memory_fraction(0.47)
    group = join_group(rank, 2, place)
    ids = work.batch().chunk(2)[rank]
    found = {}
    for mode, is_async in MODES.items():
        training = RoundPipeTraining(build(work), process_group=group)
        step = functools.partial(training.step, ids, options.micro // 2, is_async=is_async)
        seconds, losses = timed_steps(step, options)
        training.model.synchronize()
        machines = training.model._engine.group.machines
        sent = machines.sent_bytes / (options.warm + options.steps)
        stats = training.model.stats()
        found[mode] = (seconds, losses, sent, host_peak_bytes(), stats.optimizer_wait_s, dict(stats.device_share))
        training.model.close()
    results.put((rank, found))
    dist.destroy_process_group()


def measure_two(work: Work, options: argparse.Namespace, table: Table) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    place = os.path.join(tempfile.mkdtemp(), "store")
    processes = [
        context.Process(target=_run_rank, args=(rank, place, work, options, results), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=TIMEOUT.total_seconds()) for _ in processes)
    for process in processes:
        process.join()
    num_parameters = sum(param.numel() for param in build_on_meta(work).parameters())
    for mode in MODES:
        seconds, losses, sent, peak, wait_s, shares = found[0][mode]
        assert losses == found[1][mode][1], "the two processes returned different losses"
        table.add(
            f"two processes, {mode}",
            f"{seconds:.3f} s",
            "-",
            gigabytes(sent),
            f"{sent / (2 * num_parameters):.3f}",
            gigabytes(peak),
        )
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"  losses {shown}; waits {wait_s:.3f} s for the optimizer; device computes {shares}", flush=True)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--shape", default="1.7b")
    parser.add_argument("--batch", type=int, default=16, help="sequences in all")
    parser.add_argument("--micro", type=int, default=8, help="microbatches in all")
    parser.add_argument("--parts", default="one,two")
    options = parser.parse_args()
    work = sized(Work(options.shape, options.batch))
    begin(f"full training, {work.shape_name} shape, {work}", "speed")
    table = Table("step", "of no group", "sent a step", "of 2 bytes", "host peak")
    for part, measure in (("one", measure_one), ("two", measure_two)):
        if part in options.parts.split(","):
            measure(work, options, table)


if __name__ == "__main__":
    main()
