"""Claim: training takes less host memory than the same weights, gradients and optimizer state in plain PyTorch.

    python benchmarks/bench_host_memory.py [--micro 4] [--steps 4]

Full training of the 1.7b shape, 16 sequences of 4096 tokens a step. Every row runs in a separate process, because a
peak never falls. Bytes per parameter exclude the memory of the process before it builds the model. The plain row holds
bfloat16 weights and gradients, float32 masters and gradients, and both moments of torch's Adam, all in host memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys

import torch
from measuring import Table, begin, gigabytes, host_peak_bytes, options_parser, spare_threads
from workload import LEARNING_RATE, MODES, Work, build, compute_device, num_parameters, roundpipe_training, sized

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class HostMemory:
    num_parameters: int
    before_bytes: int
    peak_bytes: int

    @property
    def bytes_per_parameter(self) -> float:
        return (self.peak_bytes - self.before_bytes) / self.num_parameters


def measured_here(row: str, work: Work, options: argparse.Namespace) -> HostMemory:
    spare_threads()
    use_compute_device()
    before_bytes = host_peak_bytes()
    model = build(work)
    if row == PLAIN:
        keep_plain_state(model)
    else:
        with roundpipe_training(model) as training:
            for _ in range(options.steps):
                training.step(work.batch(), options.micro, is_async=MODES[row])
    return HostMemory(num_parameters(model), before_bytes, host_peak_bytes())


def use_compute_device() -> None:
    """Run one matrix product, so that the libraries it loads count as memory before the training."""
    ones = torch.ones(8, 8, device=compute_device(), dtype=torch.bfloat16)
    (ones @ ones).cpu()


def keep_plain_state(model: torch.nn.Module) -> None:
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    for weight, master in zip(weights, masters, strict=True):
        weight.grad = torch.ones_like(weight)
        master.grad = weight.grad.float()
    torch.optim.Adam(masters, lr=LEARNING_RATE, fused=True).step()


def measured_in_a_child(row: str) -> HostMemory:
    command = [sys.executable, *sys.argv, "--row", row]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return HostMemory(**json.loads(done.stdout))


def add_row(table: Table, name: str, row: HostMemory, plain: HostMemory) -> None:
    ratio = row.bytes_per_parameter / plain.bytes_per_parameter
    sizes = (gigabytes(row.peak_bytes), gigabytes(row.before_bytes))
    table.add(name, f"{row.bytes_per_parameter:.1f}", f"{ratio:.2f}", *sizes)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--micro", type=int, default=4, help="number of microbatches")
    parser.add_argument("--row", choices=[PLAIN, *MODES], help="measure only this row, in this process, and print JSON")
    options = parser.parse_args()
    work = sized(Work("1.7b", num_sequences=16))
    if options.row:
        print(json.dumps(dataclasses.asdict(measured_here(options.row, work, options))))
        return
    begin(
        f"full training, {work.shape_name} shape, {work}",
        "bytes per parameter, because the process is larger than the model",
    )
    table = Table("bytes/param.", "of plain", "peak", "before")
    plain = measured_in_a_child(PLAIN)
    add_row(table, "the same state in plain PyTorch", plain, plain)
    for mode in MODES:
        add_row(table, f"RoundPipe, {mode}", measured_in_a_child(mode), plain)


if __name__ == "__main__":
    main()
