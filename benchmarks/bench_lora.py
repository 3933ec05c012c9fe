"""Claim: training adapters of a model in host memory is as fast as with the model in GPU memory.

    python benchmarks/bench_lora.py [--rank 16] [--micro 4] [--warm 4] [--steps 4]

LoRA on every matrix of the blocks of the 8b shape, 8 sequences of 4096 tokens a step. Ratios are to plain PyTorch that
recomputes every block.
"""

from __future__ import annotations

from measuring import Measured, Pace, SpeedTable, begin, options_parser, pace_of
from workload import PlainTraining, Work, build, roundpipe_training, sized


def add_plain_rows(table: SpeedTable, work: Work, num_microbatch: int, pace: Pace) -> Measured | None:
    """Returns the row with recomputed blocks, the reference for all others."""
    training = PlainTraining(work)
    recomputed = training.measured(work, num_microbatch, pace, recompute=True)
    table.add("plain, blocks recomputed", recomputed, recomputed)
    table.add("plain", training.measured(work, num_microbatch, pace, recompute=False), recomputed)
    return recomputed


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--micro", type=int, default=4, help="number of microbatches")
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    pace = pace_of(options)
    work = sized(Work("8b", num_sequences=8, lora_rank=options.rank))
    begin(
        f"LoRA of rank {work.lora_rank}, {work.shape_name} shape, {work}, {options.micro} microbatches",
        "how well weight uploads overlap with a GPU's work",
    )
    table = SpeedTable("recomputed")
    plain = add_plain_rows(table, work, options.micro, pace)
    with roundpipe_training(build(work)) as training:
        training.add_rows(table, f"rank {work.lora_rank}", work, options.micro, pace, plain)


if __name__ == "__main__":
    main()
