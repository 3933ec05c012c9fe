"""Claim: wrapping a model and its first step together take no longer than a few later steps.

    python benchmarks/bench_startup.py [--micro 4] [--warm 4] [--steps 4]

Full training of the 1.7b shape, 16 sequences of 4096 tokens a step, exact. The model is in host memory before the clock
starts. Wrapping pins its weights and makes the optimizer's copies. The first step allocates the optimizer's state and
runs every kernel for the first time. Ratios are to a later step: the mean of --steps steps after --warm others.
"""

from __future__ import annotations

import itertools
import time

from measuring import Table, begin, options_parser
from workload import Work, build, roundpipe_training, sized


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--micro", type=int, default=4, help="number of microbatches")
    options = parser.parse_args()
    work = sized(Work("1.7b", num_sequences=16))
    begin(f"full training, {work.shape_name} shape, {work}, exact", "how long pinning memory and first kernels take")
    model, ids = build(work), work.batch()
    times = [time.perf_counter()]
    with roundpipe_training(model) as training:
        times.append(time.perf_counter())
        for _ in range(1 + options.warm + options.steps):
            training.step(ids, options.micro, is_async=False)
            times.append(time.perf_counter())
    wrapping_s, first_step_s, *_ = (end - start for start, end in itertools.pairwise(times))
    later_step_s = (times[-1] - times[-1 - options.steps]) / options.steps
    rows = {
        "wrapping, optimizer made": wrapping_s,
        "first step": first_step_s,
        "from wrapping to the end of the first step": wrapping_s + first_step_s,
        "a later step": later_step_s,
    }
    table = Table("seconds", "later steps")
    for name, seconds in rows.items():
        table.add(name, f"{seconds:.2f}", f"{seconds / later_step_s:.2f}")


if __name__ == "__main__":
    main()
