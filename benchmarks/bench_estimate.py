"""Claim: `roundpipe estimate` predicts device memory within 10 % and the time of a step within 25 %, before any step.

    python benchmarks/bench_estimate.py [--parts W1,W3,cap] [--optimizer-rate 4] [--warm 6] [--steps 4]

W1: full training of the 1.7b shape, 16 sequences of 4096 tokens, 8 microbatches. W3: LoRA of rank 16 on the 8b shape, 8
sequences, 4 microbatches. cap: W1 inside 24 GB of GPU memory, 16 microbatches. All predictions are printed first.
Ratios are predicted to measured.
"""

from __future__ import annotations

import dataclasses

import torch
from bench_memory_cap import gpu_memory_of
from measuring import Pace, Table, begin, gigabytes, has_gpu, options_parser, pace_of
from workload import MODES, RoundPipeTraining, Work, build, build_on_meta, mean_loss, roundpipe_training, sized

from roundpipe.devices import gpu_facts
from roundpipe.estimate.estimate import CUDA_CONTEXT_BYTES, Estimate, Machine, estimate
from roundpipe.estimate.estimate import Work as PaperWork
from roundpipe.estimate.figures import GPUS, gpu_named
from roundpipe.estimate.layer_costs import sequential_on_paper


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload. `cap_bytes` limits the memory of the GPU; 0: no limit."""

    name: str
    work: Work
    num_microbatch: int
    cap_bytes: float = 0.0

    def machine(self, parameters_per_s: float) -> Machine:
        if has_gpu():
            facts = gpu_facts(0)
            gpu = gpu_named(facts.name, facts.memory_bytes)
        else:
            gpu = GPUS["H200"]
        if self.cap_bytes:
            # A limit of torch's allocator does not count what the driver takes.
            gpu = dataclasses.replace(gpu, memory_bytes=int(self.cap_bytes) + CUDA_CONTEXT_BYTES)
        return Machine(gpu, 1, None, parameters_per_s)

    def predicted(self, is_async: bool, parameters_per_s: float) -> Estimate:
        paper = sequential_on_paper(build_on_meta(self.work), mean_loss)
        work = PaperWork(
            self.work.num_sequences,
            self.work.sequence_length,
            is_exact=not is_async,
            num_microbatch=self.num_microbatch,
        )
        return estimate(paper, work, self.machine(parameters_per_s))


CASES = {
    "W1": Case("full, 1.7b shape", sized(Work("1.7b", 16)), 8),
    "W3": Case("LoRA, 8b shape", sized(Work("8b", 8, lora_rank=16)), 4),
    "cap": Case("full, 1.7b shape, 24 GB", sized(Work("1.7b", 16)), 16, 24e9),
}


def add_row(
    table: Table, name: str, case: Case, training: RoundPipeTraining, found: Estimate, pace: Pace, is_async: bool
) -> None:
    """Measure and print. The peak of the GPU is that of the timed steps: the first calls also probe and replan."""
    training.measured(case.work, case.num_microbatch, Pace(pace.num_warm, 0), is_async=is_async)
    row = training.measured(case.work, case.num_microbatch, Pace(0, pace.num_timed), is_async=is_async)
    if row is None:
        table.add(name, "out of memory")
        return
    seconds = case.work.num_tokens / row.tokens_per_s
    memory = (
        (gigabytes(found.device_bytes), gigabytes(row.gpu_peak_bytes), f"{found.device_bytes / row.gpu_peak_bytes:.2f}")
        if has_gpu()
        else ("-", "-", "-")
    )
    table.add(name, f"{found.step_s:.3f} s", f"{seconds:.3f} s", f"{found.step_s / seconds:.2f}", *memory)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--parts", default="W1,W3,cap", help="which cases")
    parser.add_argument("--optimizer-rate", type=float, default=4.0, help="billions of parameters per second")
    options = parser.parse_args()
    cases = {name: CASES[name] for name in options.parts.split(",")}
    begin("predicted and measured steps", "whether predictions for a GPU hold")
    predicted = {
        (name, mode): case.predicted(is_async, options.optimizer_rate * 1e9)
        for name, case in cases.items()
        for mode, is_async in MODES.items()
    }
    for (name, mode), found in predicted.items():
        parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in found.device.items())
        tail = found.forecast.tail
        print(
            f"predicted {name}, {mode}: {found.step_s:.3f} s, {parts}; {len(found.forecast.tasks)} stages, tail {tail}"
        )
    table = Table("predicted", "measured", "ratio", "predicted GPU", "measured GPU", "ratio")
    for name, case in cases.items():
        model = build(case.work)
        for mode, is_async in MODES.items():
            with gpu_memory_of(case.cap_bytes or float("inf")), roundpipe_training(model) as training:
                add_row(
                    table,
                    f"{name}: {case.name}, {mode}",
                    case,
                    training,
                    predicted[name, mode],
                    pace_of(options),
                    is_async,
                )
        del model


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
