"""The C kernel gives the same bits for every size, dtype, instruction set and number of threads."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers_adam import NumpyAdam, NumpyAdamW
from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import AdamRule, KernelParameter, OnePassKernel, one_pass_kernel
from roundpipe.store import HalvedMaster

LENGTH = 3 * 65536 + 64  # several pieces for threads; torch's own kernel treats a remainder of a vector differently
LOW = (torch.bfloat16, torch.float16)
PROCESSORS = {"any": 0, "avx2": 1, "avx512": 2}
# Every remainder of vectors of 4, 8 and 16 elements and of their unrolled loops; blocks of 1024, chunks of 65536.
SIZES = (*range(0, 70), *range(127, 131), *range(1020, 1030), 2047, 65535, 65537, 2 * 65536 + 13)


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


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    loaded = library.load()
    assert loaded is not None, "the tests need a C compiler"
    try:
        if loaded.roundpipe_use_processor(PROCESSORS[request.param]) != PROCESSORS[request.param]:
            pytest.skip(f"this processor has no {request.param}")
        yield request.param
    finally:
        loaded.roundpipe_use_processor(max(PROCESSORS.values()))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_every_size_has_the_same_arithmetic(processor: str, num_threads: int, is_decoupled: bool) -> None:
    loaded = library.load()
    assert loaded is not None
    team = OnePassKernel(loaded, num_threads)
    amsgrad = not is_decoupled
    plain = [randn(size)[:size].clone().requires_grad_() for size in SIZES]
    masters = [param.detach().clone() for param in plain]
    kind = NumpyAdamW if is_decoupled else NumpyAdam
    reference = kind(plain, lr=1e-3, weight_decay=0.1, amsgrad=amsgrad)
    moments = [[torch.zeros(size) for _ in range(3)] for size in SIZES]
    for step in (1, 2, 3):
        given = []
        for param, master, (first, second, largest) in zip(plain, masters, moments, strict=True):
            param.grad = randn(step + len(param))[: len(param)].clone()
            numbers = rule(step, is_decoupled=is_decoupled)
            given.append(
                KernelParameter(master, param.grad, first, second, largest if amsgrad else None, None, numbers)
            )
        team.adam(given)
        reference.step()
    for param, master, (first, second, largest) in zip(plain, masters, moments, strict=True):
        state = reference.state[param]
        assert torch.equal(master, param), f"{len(param)} elements"
        assert torch.equal(first, state["exp_avg"])
        assert torch.equal(second, state["exp_avg_sq"])
        assert not amsgrad or torch.equal(largest, state["max_exp_avg_sq"])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_size_and_processor_rounds_weights_and_gradients_alike(
    processor: str, kernel: OnePassKernel, dtype: torch.dtype
) -> None:
    for size in SIZES:
        gradient, master, weight = randn(1, dtype)[:size], randn(0)[:size].clone(), torch.empty(size, dtype=dtype)
        param = master.clone().requires_grad_()
        param.grad = gradient.float()
        NumpyAdamW([param], lr=1e-3, weight_decay=0.1).step()
        kernel.adam([KernelParameter(master, gradient, torch.zeros(size), torch.zeros(size), None, weight, rule(1))])
        assert torch.equal(master, param)
        assert torch.equal(weight, param.detach().to(dtype))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_denormal_numbers_are_flushed_by_all_threads_or_by_none(num_threads: int) -> None:
    """Threads that were started before the setting changed must use the setting of the calling thread."""
    loaded = library.load()
    assert loaded is not None
    team = OnePassKernel(loaded, num_threads)
    for flush in (False, True, False):
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor cannot flush denormal numbers")
        try:
            first, second = torch.zeros(LENGTH), torch.zeros(LENGTH)
            gradient = torch.full((LENGTH,), 1e-39)
            team.adam([KernelParameter(torch.zeros(LENGTH), gradient, first, second, None, None, rule(1))])
        finally:
            torch.set_flush_denormal(False)
        assert len(first.unique()) == 1
        assert (first[0] == 0) == flush


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="without FMA instructions torch's kernel rounds twice"
)
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
        parameter = KernelParameter(
            ours, gradient, first, second, largest, weight, rule(step, is_decoupled=is_decoupled)
        )
        kernel.adam([parameter])
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
        kernel.adam([KernelParameter(master, given, first, second, None, None, rule(1, gradient_factors=applied))])
        results.append(torch.stack([master, first, second]))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_low_precision_number_is_read_and_written_right(kernel: OnePassKernel, dtype: torch.dtype) -> None:
    """With beta1 = 0 the first moment is the gradient. With lr = 0 the weight is the rounded master."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    between = torch.cat([every.float(), torch.nextafter(every.float(), torch.tensor(float("inf")))])
    between = torch.cat([between, (between + between.roll(1)) / 2])
    master, weight = between.clone(), torch.empty_like(between, dtype=dtype)
    gradient = every.repeat(len(between) // len(every))
    first, second = torch.zeros_like(between), torch.zeros_like(between)
    options = {"lr": 0.0, "beta1": 0.0, "weight_decay": 0.0}
    kernel.adam([KernelParameter(master, gradient, first, second, None, weight, rule(1, **options))])
    finite = gradient.float().isfinite()
    assert torch.equal(first[finite], gradient.float()[finite])
    assert first[~finite].isnan().all() or not first[~finite].isfinite().any()
    kept = finite & between.isfinite()
    assert torch.equal(weight[kept].view(torch.int16), between.to(dtype)[kept].view(torch.int16))


def test_a_halved_master_is_the_whole_one(kernel: OnePassKernel) -> None:
    whole, weight = randn(0, torch.bfloat16).float(), randn(0, torch.bfloat16)
    low, ties = torch.zeros(LENGTH, dtype=torch.uint16), torch.zeros(LENGTH // 8, dtype=torch.uint8)
    old, new = weight.clone(), torch.empty_like(weight)
    moments = [[torch.zeros(LENGTH) for _ in range(2)] for _ in range(2)]
    for step in range(1, 20):
        gradient = randn(step, torch.bfloat16)
        kernel.adam([KernelParameter(whole, gradient, *moments[0], None, weight, rule(step))])
        kernel.adam([KernelParameter(HalvedMaster(old, low, ties), gradient, *moments[1], None, new, rule(step))])
        joined = torch.empty(LENGTH)
        kernel.join(HalvedMaster(new, low, ties), joined)
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
    kernel.halve(values, HalvedMaster(weight, low, ties))
    assert torch.equal(weight, values.to(torch.bfloat16))
    joined = torch.empty_like(values)
    kernel.join(HalvedMaster(weight, low, ties), joined)
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_threads_change_nothing(kernel: OnePassKernel, num_threads: int) -> None:
    loaded = library.load()
    assert loaded is not None
    results = []
    for team in (kernel, OnePassKernel(loaded, num_threads)):
        tensors = [[randn(seed)[:n] for seed in range(2)] + [torch.zeros(n)] * 0 for n in (5, 70000, LENGTH)]
        moments = [[torch.zeros(len(pair[0])) for _ in range(2)] for pair in tensors]
        given = [
            KernelParameter(pair[0], pair[1], *both, None, None, rule(1))
            for pair, both in zip(tensors, moments, strict=True)
        ]
        for _ in range(3):
            team.adam(given)
        results.append(torch.cat([pair[0] for pair in tensors]))
    assert torch.equal(*results)


def good_parameter() -> KernelParameter:
    return KernelParameter(*(torch.zeros(4, 6) for _ in range(5)), torch.zeros(4, 6, dtype=torch.bfloat16), rule(1))


def good_halves(**others: Tensor) -> HalvedMaster:
    low, ties = torch.zeros(24, dtype=torch.int16), torch.zeros(3, dtype=torch.uint8)
    return HalvedMaster(**{"weight": torch.zeros(4, 6, dtype=torch.bfloat16), "low": low, "ties": ties, **others})


WRONG: dict[str, Callable[[], Tensor]] = {
    "fewer elements": lambda: torch.zeros(4, 5),
    "more elements": lambda: torch.zeros(4, 7),
    "another shape": lambda: torch.zeros(6, 4),
    "flat": lambda: torch.zeros(24),
    "another memory order": lambda: torch.zeros(6, 4).t(),
    "gaps": lambda: torch.zeros(4, 12)[:, ::2],
    "expanded": lambda: torch.zeros(4, 1).expand(4, 6),
    "float64": lambda: torch.zeros(4, 6, dtype=torch.float64),
    "another device": lambda: torch.zeros(4, 6, device="meta"),
    "sparse": lambda: torch.zeros(4, 6).to_sparse(),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("field", ["master", "gradient", "first", "second", "largest", "weight"])
def test_a_tensor_that_does_not_match_is_refused_before_any_update(
    kernel: OnePassKernel, field: str, wrong: str
) -> None:
    good = good_parameter()
    untouched = copy.deepcopy(good)
    bad = dataclasses.replace(good_parameter(), **{field: WRONG[wrong]()})
    with pytest.raises(RuntimeError, match="Adam kernel"):
        kernel.adam([good, bad])
    for name in ("master", "first", "second", "largest", "weight"):
        assert torch.equal(getattr(good, name), getattr(untouched, name))


@pytest.mark.parametrize("field", ["master", "first", "second", "largest"])
def test_moments_in_low_precision_are_refused(kernel: OnePassKernel, field: str) -> None:
    bad = dataclasses.replace(good_parameter(), **{field: torch.zeros(4, 6, dtype=torch.bfloat16)})
    with pytest.raises(RuntimeError, match=r"torch\.float32, got torch\.bfloat16"):
        kernel.adam([bad])


BAD_HALVES: dict[str, dict[str, Tensor]] = {
    "low-short": {"low": torch.zeros(23, dtype=torch.int16)},
    "low-wide": {"low": torch.zeros(24, dtype=torch.int32)},
    "low-gaps": {"low": torch.zeros(48, dtype=torch.int16)[::2]},
    "ties-short": {"ties": torch.zeros(2, dtype=torch.uint8)},
    "weight-shape": {"weight": torch.zeros(6, 4, dtype=torch.bfloat16)},
    "weight-dtype": {"weight": torch.zeros(4, 6, dtype=torch.float16)},
}


@pytest.mark.parametrize("bad", BAD_HALVES)
def test_parts_of_a_halved_master_that_do_not_match_are_refused(kernel: OnePassKernel, bad: str) -> None:
    master = good_halves(**BAD_HALVES[bad])
    with pytest.raises(RuntimeError):
        kernel.join(master, torch.zeros(4, 6))
    with pytest.raises(RuntimeError):
        kernel.halve(torch.zeros(4, 6), master)
    with pytest.raises(RuntimeError):
        kernel.adam([dataclasses.replace(good_parameter(), master=master)])


def test_a_halved_master_needs_somewhere_to_put_its_weight(kernel: OnePassKernel) -> None:
    with pytest.raises(RuntimeError, match="weight"):
        kernel.adam([dataclasses.replace(good_parameter(), master=good_halves(), weight=None)])


@pytest.mark.parametrize("values", [torch.zeros(4, 5), torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4).t()])
def test_values_that_do_not_match_a_halved_master_are_refused(kernel: OnePassKernel, values: Tensor) -> None:
    with pytest.raises(RuntimeError):
        kernel.join(good_halves(), values)
    with pytest.raises(RuntimeError):
        kernel.halve(values, good_halves())


def test_strides_of_single_elements_do_not_matter(kernel: OnePassKernel) -> None:
    master = torch.randn(5, 1, 3, generator=torch.Generator().manual_seed(0)).transpose(0, 2)
    gradient = torch.ones(3, 1, 5).as_strided((3, 1, 5), (1, 77, 3))
    moments = [torch.zeros_like(master, memory_format=torch.preserve_format) for _ in range(2)]
    kernel.adam([KernelParameter(master, gradient, *moments, None, None, rule(1))])
    assert (moments[0] != 0).all()
