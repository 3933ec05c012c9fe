"""Claim: with the GPU memory of a consumer card, training is nearly as fast as with everything in GPU memory.

    python benchmarks/bench_memory_cap.py [--caps 24,12] [--micro 16] [--warm 4] [--steps 4]

Full training of the 1.7b shape, 16 sequences of 4096 tokens a step. --caps limits the GB of GPU memory of RoundPipe.
Ratios are to plain PyTorch without a limit, with the same number of microbatches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from measuring import SpeedTable, begin, counts, free_gpu, has_gpu, options_parser, pace_of
from workload import PlainTraining, Work, build, roundpipe_training, sized


@contextlib.contextmanager
def gpu_memory_of(cap_bytes: float) -> Iterator[None]:
    """Limit torch's GPU memory inside the block; does nothing without a GPU."""
    if not has_gpu():
        yield
        return
    free_gpu()
    torch.cuda.set_per_process_memory_fraction(min(cap_bytes / torch.cuda.get_device_properties(0).total_memory, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--micro", type=int, default=16, help="number of microbatches")
    parser.add_argument("--caps", type=counts, default="24,12", help="GB of GPU memory")
    options = parser.parse_args()
    pace = pace_of(options)
    work = sized(Work("1.7b", num_sequences=16))
    begin(f"full training, {work.shape_name} shape, {work}", "the effect of a limit, because no memory is limited")
    table = SpeedTable("plain")
    plain = PlainTraining(work).measured(work, options.micro, pace, recompute=False)
    table.add("all memory: plain", plain, plain)
    model = build(work)
    for cap in options.caps:
        # Wrap again for each cap: a plan that fits one cap may not fit the next.
        with gpu_memory_of(cap * 1e9), roundpipe_training(model) as training:
            training.add_rows(table, f"{cap} GB", work, options.micro, pace, plain)


if __name__ == "__main__":
    main()
