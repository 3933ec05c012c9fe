"""The C kernel gives the same bits for every size, dtype, instruction set and number of threads."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers_adam import NumpyAdam, NumpyAdamW, adam_numbers
from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel, one_pass_kernel
from roundpipe.store import HalvedMaster
from roundpipe.store.values import WholeMaster

LENGTH = 3 * 65536 + 64  # several pieces for threads; torch's own kernel treats a remainder of a vector differently
LOW = (torch.bfloat16, torch.float16)
# Every remainder of vectors of 4, 8 and 16 elements and of their unrolled loops; blocks of 1024, chunks of 65536.
SIZES = (*range(0, 70), *range(127, 131), *range(1020, 1030), 2047, 65535, 65537, 2 * 65536 + 13)


@pytest.fixture
def kernel() -> OnePassKernel:
    made = one_pass_kernel()
    assert made is not None, "the tests need a C compiler"
    return made


def randn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
            numbers = adam_numbers(step, is_decoupled=is_decoupled, amsgrad=amsgrad)
            states = [first, second, largest] if amsgrad else [first, second]
            given.append(KernelParameter(master, param.grad, states, None, numbers))
        team.update(given)
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
        kernel.update(
            [KernelParameter(master, gradient, [torch.zeros(size), torch.zeros(size)], weight, adam_numbers(1))]
        )
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
            team.update([KernelParameter(torch.zeros(LENGTH), gradient, [first, second], None, adam_numbers(1))])
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
    states = [first, second, torch.zeros(LENGTH)] if amsgrad else [first, second]
    for step in range(1, 6):
        gradient = randn(step, dtype)
        numbers = adam_numbers(step, is_decoupled=is_decoupled, amsgrad=amsgrad)
        parameter = KernelParameter(ours, gradient, states, weight, numbers)
        kernel.update([parameter])
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
        kernel.update([KernelParameter(master, given, [first, second], None, adam_numbers(1, factors=applied))])
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
    numbers = adam_numbers(1, lr=0.0, betas=(0.0, 0.999), weight_decay=0.0)
    kernel.update([KernelParameter(master, gradient, [first, second], weight, numbers)])
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
        kernel.update([KernelParameter(whole, gradient, moments[0], weight, adam_numbers(step))])
        kernel.update([KernelParameter(HalvedMaster(old, low, ties), gradient, moments[1], new, adam_numbers(step))])
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
            KernelParameter(pair[0], pair[1], both, None, adam_numbers(1))
            for pair, both in zip(tensors, moments, strict=True)
        ]
        for _ in range(3):
            team.update(given)
        results.append(torch.cat([pair[0] for pair in tensors]))
    assert torch.equal(*results)


def good_parameter() -> KernelParameter:
    master, gradient, *states = (torch.zeros(4, 6) for _ in range(5))
    weight = torch.zeros(4, 6, dtype=torch.bfloat16)
    return KernelParameter(master, gradient, states, weight, adam_numbers(1, amsgrad=True))


def with_wrong(field: str, wrong: Tensor) -> KernelParameter:
    """A good parameter with one wrong tensor; "state 1" is the second state."""
    good = good_parameter()
    if not field.startswith("state"):
        return dataclasses.replace(good, **{field: wrong})  # type: ignore[arg-type]
    states = list(good.states)
    states[int(field[-1])] = wrong
    return dataclasses.replace(good, states=states)


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
@pytest.mark.parametrize("field", ["master", "gradient", "state 0", "state 1", "state 2", "weight"])
def test_a_tensor_that_does_not_match_is_refused_before_any_update(
    kernel: OnePassKernel, field: str, wrong: str
) -> None:
    good = good_parameter()
    untouched = copy.deepcopy(good)
    bad = with_wrong(field, WRONG[wrong]())
    with pytest.raises(RuntimeError, match="optimizer kernel"):
        kernel.update([good, bad])
    for one, before in zip(tensors_of(good), tensors_of(untouched), strict=True):
        assert torch.equal(one, before)


def tensors_of(parameter: KernelParameter) -> list[Tensor]:
    assert isinstance(parameter.master, WholeMaster)
    assert parameter.weight is not None
    return [parameter.master.values, *parameter.states, parameter.weight]


def test_another_number_of_states_is_refused(kernel: OnePassKernel) -> None:
    good = good_parameter()
    with pytest.raises(RuntimeError, match="needs 3 states for AMSGRAD, got 2"):
        kernel.update([dataclasses.replace(good, states=good.states[:2])])


@pytest.mark.parametrize("field", ["master", "state 0", "state 1", "state 2"])
def test_masters_and_moments_in_half_precision_are_refused(kernel: OnePassKernel, field: str) -> None:
    bad = with_wrong(field, torch.zeros(4, 6, dtype=torch.float16))
    with pytest.raises(RuntimeError, match=r"torch\.float32.*, got torch\.float16"):
        kernel.update([bad])


@pytest.mark.parametrize("scales", [[], [torch.zeros(2)], [torch.zeros(1, dtype=torch.float64)]], ids=str)
def test_codes_without_their_scales_are_refused(kernel: OnePassKernel, scales: list[Tensor]) -> None:
    bad = dataclasses.replace(with_wrong("state 0", torch.zeros(4, 6, dtype=torch.int8)), scales=scales)
    with pytest.raises(RuntimeError, match="optimizer kernel needs scale"):
        kernel.update([bad])


def test_codes_in_another_memory_order_are_refused(kernel: OnePassKernel) -> None:
    turned, codes = torch.zeros(6, 4).t(), torch.zeros(6, 4, dtype=torch.uint8).t()
    bad = KernelParameter(turned, turned.clone(), [turned.clone(), codes], None, adam_numbers(1), (), [torch.zeros(1)])
    with pytest.raises(RuntimeError, match="row-major order"):
        kernel.update([bad])


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
        kernel.update([dataclasses.replace(good_parameter(), master=master)])


def test_a_halved_master_needs_somewhere_to_put_its_weight(kernel: OnePassKernel) -> None:
    with pytest.raises(RuntimeError, match="weight"):
        kernel.update([dataclasses.replace(good_parameter(), master=good_halves(), weight=None)])


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
    kernel.update([KernelParameter(master, gradient, moments, None, adam_numbers(1))])
    assert (moments[0] != 0).all()


# Sums of squares.


def in_fixed_order(values: Tensor) -> float:
    """The order of additions that the kernel promises: lanes of 16 in blocks of 1024, in chunks of 65536."""
    total = 0.0
    for chunk in values.double().split(65536):
        of_chunk = 0.0
        for block in chunk.split(1024):
            lanes = torch.zeros(16, dtype=torch.float64)
            for row in block.square().split(16):
                lanes[: len(row)] += row
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            of_chunk += float(lanes)
        total += of_chunk
    return total


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_sums_of_squares_have_one_order(processor: str, num_threads: int, dtype: torch.dtype) -> None:
    loaded = library.load()
    assert loaded is not None
    gradients = [randn(size, dtype)[:size] for size in SIZES]
    sums = OnePassKernel(loaded, num_threads).squares([[gradient] for gradient in gradients])
    assert sums == [in_fixed_order(gradient) for gradient in gradients]


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_sums_of_squares_of_several_machines_add_as_the_update_does(kernel: OnePassKernel, dtype: torch.dtype) -> None:
    parts = [randn(seed, dtype) for seed in range(3)]
    added = (parts[0].float() + parts[1].float()) + parts[2].float()
    assert kernel.squares([parts, parts[:1]]) == [in_fixed_order(added), in_fixed_order(parts[0])]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("at", [0, 1023, 65536, LENGTH - 1])
def test_a_sum_of_squares_is_finite_if_every_element_is(
    kernel: OnePassKernel, value: float, dtype: torch.dtype, at: int
) -> None:
    largest = torch.full((LENGTH,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(kernel.squares([[largest]])[0])
    largest[at] = value
    assert not math.isfinite(kernel.squares([[largest]])[0])


def test_sums_of_squares_refuse_what_they_cannot_read(kernel: OnePassKernel) -> None:
    assert kernel.squares([]) == []
    for parts in ([torch.zeros(3, dtype=torch.float64)], [torch.zeros(4)[::2]], [torch.zeros(3), torch.zeros(4)]):
        with pytest.raises(RuntimeError, match="the optimizer kernel needs"):
            kernel.squares([parts])
