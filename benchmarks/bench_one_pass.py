"""Claim: one pass over the parameters is faster than cast, torch's fused Adam and cast, with equal thread counts.

    python benchmarks/bench_one_pass.py [--parameters N] [--rounds N]

Both read a bfloat16 gradient, update a float32 master and its moments, and write a bfloat16 weight. They take turns,
and the best of several rounds counts. The float32 gradient is allocated before, so the times exclude allocation.
"halves" is one pass over a master that is stored as its bfloat16 weight and a low half, "bfloat16" and "8bit" are the
same with moments in these forms; "short" and "short 8" have masters of 24 bits, with moments in float32 and in 8 bits.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch

from roundpipe.host_facts import usable_cores
from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel
from roundpipe.optim.rules import ADAMW
from roundpipe.store import HalvedMaster
from roundpipe.store.forms import MOMENTS, form_of
from roundpipe.store.values import Rounding, ShortMaster

LR, BETAS, EPS, DECAY = 1e-5, (0.9, 0.999), 1e-8, 0.01


def zeros(moments: str, length: int, is_square: bool) -> list[torch.Tensor]:
    """The parts of a moment."""
    form = form_of(moments, is_square=is_square)
    pairs = zip(form.counts(length), form.dtypes(torch.float32), strict=True)
    return [torch.zeros(count, dtype=dtype) for count, dtype in pairs]


class Work:
    """The tensors of one update, and the three ways to compute it."""

    def __init__(self, length: int) -> None:
        self.gradient = torch.randn(length).bfloat16()
        self.master = torch.randn(length)
        self.weight = self.master.bfloat16()
        self.first, self.second = torch.zeros(length), torch.zeros(length)
        self.wide_gradient = torch.zeros(length)
        self.low = torch.zeros(length, dtype=torch.int16)
        self.low_byte = torch.zeros(length, dtype=torch.int8)
        self.ties = torch.zeros(-(-length // 8), dtype=torch.uint8)
        options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "amsgrad": False, "maximize": False}
        self.numbers = ADAMW.step_numbers(options, 10, ())
        self.states = [self.first, self.second]
        self.stored = {
            moments: [zeros(moments, length, is_square) for is_square in (False, True)] for moments in MOMENTS
        }
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
        kernel.update([KernelParameter(self.master, self.gradient, self.states, self.weight, self.numbers)])

    def one_pass_halves(self, kernel: OnePassKernel, moments: str = "float32", bits: int = 32) -> None:
        master, rounding = HalvedMaster(self.weight, self.low, self.ties), None
        if bits == 24:
            master, rounding = ShortMaster(self.weight, self.low_byte), Rounding()
        states, scales = (
            [parts[0] for parts in self.stored[moments]],
            [parts[1] for parts in self.stored[moments] if parts[1:]],
        )
        numbers, weight = self.numbers, self.weight
        kernel.update([KernelParameter(master, self.gradient, states, weight, numbers, (), scales, rounding=rounding)])


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(work: Work, kernel: OnePassKernel, num_threads: int, num_rounds: int) -> list[float]:
    torch.set_num_threads(num_threads)
    runs = [work.three_passes, lambda: work.one_pass(kernel)]
    runs += [functools.partial(work.one_pass_halves, kernel, moments) for moments in MOMENTS]
    runs += [functools.partial(work.one_pass_halves, kernel, moments, 24) for moments in ("float32", "8bit")]
    for run in runs:
        run()
    rounds = [[seconds(run) for run in runs] for _ in range(num_rounds)]
    return [min(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=0, help="default: 20 million per core")
    parser.add_argument("--rounds", type=int, default=5, help="more where other programs run, too; default 5")
    options = parser.parse_args()
    loaded = library.load()
    if loaded is None:
        print("no C compiler found, so there is no one-pass kernel to measure")
        return
    cores = usable_cores()
    length = options.parameters or 20_000_000 * cores
    work = Work(length)
    print(f"{length / 1e6:.0f} million parameters, {cores} cores, torch {torch.__version__}; billions of parameters/s")
    names = ("one pass", "halves", "bfloat16", "8bit", "short", "short 8")
    print(f"{'threads':>8} {'three passes':>13}" + "".join(f" {name:>9} {'ratio':>6}" for name in names))
    for num_threads in sorted({1, max(cores // 2, 1), cores}):
        three, *others = measure(work, OnePassKernel(loaded, num_threads), num_threads, options.rounds)
        cells = "".join(f" {length / 1e9 / taken:>9.2f} {three / taken:>6.2f}" for taken in others)
        print(f"{num_threads:>8} {length / 1e9 / three:>13.2f}{cells}")


if __name__ == "__main__":
    main()
