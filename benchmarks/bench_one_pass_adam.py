"""Claim: one pass over the parameters is faster than cast, torch's fused Adam and cast, with equal thread counts.

    python benchmarks/bench_one_pass_adam.py [--parameters N]

Both read a bfloat16 gradient, update a float32 master and its moments, and write a bfloat16 weight. They take turns,
and the best of several rounds counts. The float32 gradient is allocated before, so the times exclude allocation.
"halves" is one pass over a master that is stored as its bfloat16 weight and a low half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import AdamRule, KernelParameter, OnePassKernel, usable_cores
from roundpipe.store import HalvedMaster

ROUNDS = 5
LR, BETAS, EPS, DECAY = 1e-5, (0.9, 0.999), 1e-8, 0.01


class Work:
    """The tensors of one update, and the three ways to compute it."""

    def __init__(self, length: int) -> None:
        self.gradient = torch.randn(length).bfloat16()
        self.master = torch.randn(length)
        self.weight = self.master.bfloat16()
        self.first, self.second = torch.zeros(length), torch.zeros(length)
        self.wide_gradient = torch.zeros(length)
        self.low = torch.zeros(length, dtype=torch.int16)
        self.ties = torch.zeros(-(-length // 8), dtype=torch.uint8)
        self.rule = AdamRule(LR, *BETAS, EPS, DECAY, is_decoupled=True, step=10)
        self.step = torch.tensor(9.0)

    def three_passes(self) -> None:
        self.wide_gradient.copy_(self.gradient)
        torch._fused_adamw_(
            [self.master],
            [self.wide_gradient],
            [self.first],
            [self.second],
            [],
            [self.step],
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=DECAY,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )
        self.weight.copy_(self.master)

    def one_pass(self, kernel: OnePassKernel) -> None:
        kernel.adam(
            [KernelParameter(self.master, self.gradient, self.first, self.second, None, self.weight, self.rule)]
        )

    def one_pass_split(self, kernel: OnePassKernel) -> None:
        master = HalvedMaster(self.weight, self.low, self.ties)
        kernel.adam([KernelParameter(master, self.gradient, self.first, self.second, None, self.weight, self.rule)])


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(work: Work, kernel: OnePassKernel, num_threads: int) -> list[float]:
    torch.set_num_threads(num_threads)
    runs = [work.three_passes, lambda: work.one_pass(kernel), lambda: work.one_pass_halves(kernel)]
    for run in runs:
        run()
    rounds = [[seconds(run) for run in runs] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=0, help="default: 20 million per core")
    options = parser.parse_args()
    loaded = library.load()
    if loaded is None:
        print("no C compiler found, so there is no one-pass kernel to measure")
        return
    cores = usable_cores()
    length = options.parameters or 20_000_000 * cores
    work = Work(length)
    print(f"{length / 1e6:.0f} million parameters, {cores} cores, torch {torch.__version__}; billions of parameters/s")
    print(f"{'threads':>8} {'three passes':>13} {'one pass':>9} {'ratio':>6} {'halves':>7} {'ratio':>6}")
    for num_threads in sorted({1, max(cores // 2, 1), cores}):
        three, one, halves = measure(work, OnePassKernel(loaded, num_threads), num_threads)
        rates = [length / 1e9 / taken for taken in (three, one, halves)]
        print(
            f"{num_threads:>8} {rates[0]:>13.2f} {rates[1]:>9.2f} {three / one:>6.2f} {rates[2]:>7.2f} "
            f"{three / halves:>6.2f}"
        )


if __name__ == "__main__":
    main()
