"""Claim: one worker keeps a GPU busy; more workers on the same GPU gain nothing.

    python benchmarks/bench_workers.py [--workers 1,2,4] [--micro 8] [--warm 4] [--steps 4]

Full training of the 1.7b shape, 16 sequences of 4096 tokens a step. Workers of one GPU share its memory and run
different stages. Ratios are to the first row of the same mode.
"""

from __future__ import annotations

from measuring import Measured, SpeedTable, begin, counts, has_gpu, options_parser, pace_of
from workload import MODES, Work, build, roundpipe_training, sized


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--micro", type=int, default=8, help="number of microbatches")
    parser.add_argument("--workers", type=counts, default="1,2,4" if has_gpu() else "1,2", help="numbers of workers")
    options = parser.parse_args()
    pace = pace_of(options)
    work = sized(Work("1.7b", num_sequences=16))
    begin(f"full training, {work.shape_name} shape, {work}", "what several workers gain or lose on one GPU")
    table = SpeedTable(f"{options.workers[0]} worker(s)")
    model = build(work)
    first: dict[str, Measured | None] = {}
    for num_workers in options.workers:
        with roundpipe_training(model, num_workers) as training:
            for mode, is_async in MODES.items():
                row = training.measured(work, options.micro, pace, is_async=is_async)
                table.add(f"{num_workers} worker(s): RoundPipe, {mode}", row, first.setdefault(mode, row))


if __name__ == "__main__":
    main()
