"""Claim: more microbatches need less GPU memory and cost little speed.

    python benchmarks/bench_microbatches.py [--micro 2,4,8,16,32] [--warm 4] [--steps 4]

Full training of the 1.7b shape with 32 sequences of 2048 tokens a step. Ratios are to plain PyTorch with 4 microbatches
and everything in GPU memory.
"""

from __future__ import annotations

from measuring import SpeedTable, begin, counts, options_parser, pace_of
from workload import PlainTraining, Work, build, roundpipe_training, sized

PLAIN_MICROBATCHES = 4


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--micro", type=counts, default="2,4,8,16,32", help="numbers of microbatches")
    options = parser.parse_args()
    pace = pace_of(options)
    work = sized(Work("1.7b", num_sequences=32, sequence_length=2048))
    begin(f"full training, {work.shape_name} shape, {work}", "GPU memory and the cost of small microbatches on a GPU")
    table = SpeedTable("plain")
    plain = PlainTraining(work).measured(work, PLAIN_MICROBATCHES, pace, recompute=False)
    table.add(f"{PLAIN_MICROBATCHES} microbatches: plain", plain, plain)
    with roundpipe_training(build(work)) as training:
        for num_microbatch in options.micro:
            training.add_rows(table, f"{num_microbatch} microbatches", work, num_microbatch, pace, plain)


if __name__ == "__main__":
    main()
