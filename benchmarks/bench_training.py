"""Claim: training with weights and optimizer in host memory is close to training with everything in GPU memory.

    python benchmarks/bench_training.py [--micro 4,8] [--warm 4] [--steps 4]

Full training of the 1.7b shape, with 16 and with 4 sequences of 4096 tokens a step. Ratios are to plain PyTorch on the
same batches, with the first number of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Measured, Pace, SpeedTable, begin, counts, options_parser, pace_of
from workload import PlainTraining, Work, build, roundpipe_training, sized

RECOMPUTE = {"plain": False, "plain, blocks recomputed": True}


def add_plain_rows(table: SpeedTable, works: Sequence[Work], micro: Sequence[int], pace: Pace) -> dict[Work, Measured]:
    """Returns the first row of each work, the reference for its other rows. All rows use one model."""
    training = PlainTraining(works[0])
    first: dict[Work, Measured] = {}
    for work in works:
        for num_microbatch in possible(micro, work):
            for name, recompute in RECOMPUTE.items():
                row = training.measured(work, num_microbatch, pace, recompute=recompute)
                if row is not None:
                    first.setdefault(work, row)
                table.add(f"{work}, {num_microbatch} microbatches: {name}", row, first.get(work))
    return first


def possible(micro: Sequence[int], work: Work) -> list[int]:
    """The numbers of microbatches that the batch can be split into."""
    return [num_microbatch for num_microbatch in micro if num_microbatch <= work.num_sequences]


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--micro", type=counts, default="4,8", help="numbers of microbatches")
    options = parser.parse_args()
    pace = pace_of(options)
    works = [sized(Work("1.7b", num_sequences)) for num_sequences in (16, 4)]
    begin(f"full training, {works[0].shape_name} shape", "how close this comes to training in GPU memory")
    table = SpeedTable("plain")
    plain = add_plain_rows(table, works, options.micro, pace)
    model = build(works[0])
    for work in works:
        with roundpipe_training(model) as training:  # again for each work, because plans depend on earlier batches
            for num_microbatch in possible(options.micro, work):
                name = f"{work}, {num_microbatch} microbatches"
                training.add_rows(table, name, work, num_microbatch, pace, plain.get(work))


if __name__ == "__main__":
    main()
