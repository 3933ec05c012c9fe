"""The C kernel: torch's fused arithmetic bit for bit, in every precision, however it is cut into threads."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import AdamRule, OnePassKernel, Segment, SplitMaster, one_pass_kernel

LENGTH = 3 * 65536 + 64  # several pieces for threads; torch's own kernel treats a remainder of a vector differently
LOW = (torch.bfloat16, torch.float16)


@pytest.fixture
def kernel() -> OnePassKernel:
    made = one_pass_kernel()
    assert made is not None, "the tests need a C compiler"
    return made


def rule(step: int, **options: Any) -> AdamRule:
    defaults: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    return AdamRule(**{**defaults, "is_decoupled": True, **options}, step=step)


def randn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_results_are_torchs_fused_ones(
    kernel: OnePassKernel, dtype: torch.dtype, amsgrad: bool, is_decoupled: bool
) -> None:
    ours, theirs = randn(0), randn(0).requires_grad_()
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    reference = kind([theirs], lr=1e-3, weight_decay=0.1, amsgrad=amsgrad, fused=True)
    first, second, weight = torch.zeros(LENGTH), torch.zeros(LENGTH), torch.empty(LENGTH, dtype=dtype)
    largest = torch.zeros(LENGTH) if amsgrad else None
    for step in range(1, 6):
        gradient = randn(step, dtype)
        segment = Segment(ours, gradient, first, second, largest, weight, rule(step, is_decoupled=is_decoupled))
        kernel.adam([segment])
        theirs.grad = gradient.float()
        reference.step()
        assert torch.equal(ours, theirs)
        assert torch.equal(weight, theirs.detach().to(dtype))
    assert torch.equal(first, reference.state[theirs]["exp_avg"])
    assert torch.equal(second, reference.state[theirs]["exp_avg_sq"])


def test_factors_are_rounded_one_by_one(kernel: OnePassKernel) -> None:
    factors = (1 / 3, 0.7, -1.0)
    gradient = randn(1, torch.bfloat16)
    scaled = gradient.float()
    for factor in factors:
        scaled = scaled * torch.tensor(factor)
    results = []
    for given, applied in ((gradient, factors), (scaled, ())):
        master, first, second = randn(0), torch.zeros(LENGTH), torch.zeros(LENGTH)
        kernel.adam([Segment(master, given, first, second, None, None, rule(1, gradient_factors=applied))])
        results.append(torch.stack([master, first, second]))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_low_precision_number_is_read_and_written_right(kernel: OnePassKernel, dtype: torch.dtype) -> None:
    """With beta1 = 0 the first moment is the gradient; with lr = 0 the weight is the master, rounded."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    between = torch.cat([every.float(), torch.nextafter(every.float(), torch.tensor(float("inf")))])
    between = torch.cat([between, (between + between.roll(1)) / 2])
    master, weight = between.clone(), torch.empty_like(between, dtype=dtype)
    gradient = every.repeat(len(between) // len(every))
    first, second = torch.zeros_like(between), torch.zeros_like(between)
    options = {"lr": 0.0, "beta1": 0.0, "weight_decay": 0.0}
    kernel.adam([Segment(master, gradient, first, second, None, weight, rule(1, **options))])
    finite = gradient.float().isfinite()
    assert torch.equal(first[finite], gradient.float()[finite])
    assert first[~finite].isnan().all() or not first[~finite].isfinite().any()
    kept = finite & between.isfinite()
    assert torch.equal(weight[kept].view(torch.int16), between.to(dtype)[kept].view(torch.int16))


def test_a_split_master_is_the_whole_one(kernel: OnePassKernel) -> None:
    whole, weight = randn(0, torch.bfloat16).float(), randn(0, torch.bfloat16)
    low, ties = torch.zeros(LENGTH, dtype=torch.uint16), torch.zeros(LENGTH // 8, dtype=torch.uint8)
    old, new = weight.clone(), torch.empty_like(weight)
    moments = [[torch.zeros(LENGTH) for _ in range(2)] for _ in range(2)]
    for step in range(1, 20):
        gradient = randn(step, torch.bfloat16)
        kernel.adam([Segment(whole, gradient, *moments[0], None, weight, rule(step))])
        kernel.adam([Segment(SplitMaster(old, low, ties), gradient, *moments[1], None, new, rule(step))])
        joined = torch.empty(LENGTH)
        kernel.join(SplitMaster(new, low, ties), joined)
        assert torch.equal(joined, whole)
        assert torch.equal(new, weight)
        old, new = new, old


def test_ties_go_both_ways_and_come_back(kernel: OnePassKernel) -> None:
    upper = torch.arange(0, 0x7F80, dtype=torch.int32).repeat(2)[: 8 * 4000]
    values = ((upper << 16) | 0x8000).view(torch.float32)
    values[1::3] = ((upper[1::3] << 16) | 0x8001).view(torch.float32)
    weight = torch.empty(len(values), dtype=torch.bfloat16)
    low = torch.empty(len(values), dtype=torch.uint16)
    ties = torch.full((len(values) // 8,), 0x5A, dtype=torch.uint8)  # what was there before must not matter
    kernel.split(values, SplitMaster(weight, low, ties))
    assert torch.equal(weight, values.to(torch.bfloat16))
    joined = torch.empty_like(values)
    kernel.join(SplitMaster(weight, low, ties), joined)
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_threads_change_nothing(kernel: OnePassKernel, num_threads: int) -> None:
    loaded = library.load()
    assert loaded is not None
    results = []
    for team in (kernel, OnePassKernel(loaded, num_threads)):
        tensors = [[randn(seed)[:n] for seed in range(2)] + [torch.zeros(n)] * 0 for n in (5, 70000, LENGTH)]
        moments = [[torch.zeros(len(pair[0])) for _ in range(2)] for pair in tensors]
        segments = [
            Segment(pair[0], pair[1], *both, None, None, rule(1)) for pair, both in zip(tensors, moments, strict=True)
        ]
        for _ in range(3):
            team.adam(segments)
        results.append(torch.cat([pair[0] for pair in tensors]))
    assert torch.equal(*results)


def test_without_a_compiler_there_is_one_line_and_no_kernel(tmp_path: Path) -> None:
    script = """
import logging
logging.basicConfig(format="%(message)s")
from roundpipe.optim.native import library
library._built_with_the_package = lambda: iter(())
print(library.load(), library.load())
"""
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split() == ["None", "None"], done.stderr
    assert done.stderr.count("there is no C compiler") == 1


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_built_with_the_package", lambda: iter(()))
    made = library._compiled()
    assert ctypes.CDLL(str(made)).roundpipe_adam
    before = made.stat().st_mtime_ns
    assert library._compiled() == made
    assert made.stat().st_mtime_ns == before
    assert [path.name for path in made.parent.iterdir()] == [made.name]
