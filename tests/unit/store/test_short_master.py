"""Masters of 24 bits: how values are rounded, and that a weight and a byte determine them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roundpipe.optim.native.kernel import Kernel, KernelParameter, StepNumbers, one_pass_kernel
from roundpipe.store import values as store_values
from roundpipe.store.values import HalvedMaster, Rounding, ShortMaster

HALVES = torch.arange(0, 0x10000, dtype=torch.int64)  # every high half, or every low half
LOWERS = (0x0000, 0x0001, 0x00FF, 0x7EFF, 0x7F01, 0x7FFF, 0x8000, 0x8001, 0x80FF, 0x8101, 0xFF01, 0xFFFF)
STAND_STILL = StepNumbers(Kernel.SGD, (0.0, -1.0, 0.0, 1.0))  # with a gradient of 0


def from_bits(bits: Tensor) -> Tensor:
    """float32 values from 64-bit integers in the range of 32 unsigned bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32).long() & 0xFFFFFFFF


@pytest.fixture(params=range(3), ids=["portable", "AVX2", "AVX-512"])
def update(request: pytest.FixtureRequest) -> object:
    """The kernel with one kind of instructions; a kind that this processor lacks is replaced by the best it has."""
    kernel = one_pass_kernel()
    assert kernel is not None, "the tests need a C compiler"
    kernel._use_processor(request.param)
    yield lambda *args, **options: kernel.update([KernelParameter(*args, **options)])
    kernel.instruction_set()


@pytest.mark.parametrize("lower", LOWERS, ids=hex)
def test_the_kernel_rounds_and_stores_as_the_code_in_python(lower: int, update: object) -> None:
    """Normal and subnormal numbers, zeros and infinities of both signs, NaNs."""
    values = from_bits((HALVES << 16) | lower)
    expected = values.clone()
    Rounding(6).round(expected, first=5)
    found, weight = values.clone(), torch.zeros(len(values), dtype=torch.bfloat16)
    update(found, torch.zeros_like(values), [], weight, STAND_STILL, first=5, rounding=Rounding(6))  # type: ignore[operator]
    assert torch.equal(bits_of(found), bits_of(expected))
    is_number = ~expected.isnan()  # torch has several bits for NaN
    nearest = expected.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(weight.view(torch.int16)[is_number], nearest[is_number])
    assert weight[~is_number].isnan().all()
    # From the weight and its byte, and back: nothing is left to round.
    short = ShortMaster(weight)
    assert short.take(expected)
    assert torch.equal(bits_of(short.joined()), bits_of(expected))
    low = short.low.clone()
    assert -128 not in low
    update(short, torch.zeros_like(values), [], weight, STAND_STILL, rounding=Rounding(9))  # type: ignore[operator]
    assert torch.equal(short.low, low)
    assert torch.equal(bits_of(short.joined()), bits_of(expected))


@pytest.mark.parametrize("upper", [0x0000, 0xBF81])
def test_rounding_keeps_the_mean_exactly(upper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over all random bits that count, for every low half."""
    values = from_bits((upper << 16) | HALVES)
    total, neighbours = torch.zeros(len(values), dtype=torch.int64), torch.zeros(len(values), dtype=torch.bool)
    for draw in range(512):
        draws = torch.full((len(values),), (draw << 23) | 0x7FFFFF)
        monkeypatch.setattr(store_values, "random_bits", lambda *_, draws=draws: draws)
        rounded = values.clone()
        Rounding().round(rounded)
        assert not (bits_of(rounded) & 0xFF).any()
        assert not ((bits_of(rounded) & 0xFFFF) == 0x8000).any(), "no value is half way between two weights"
        total += bits_of(rounded) - bits_of(values)
        neighbours |= bits_of(rounded) != bits_of(values)
    assert not total.any()
    assert int((~neighbours).sum()) == 255, "values of 24 bits stay as they are, but for the half way point"


def test_values_that_do_not_fit_are_not_taken() -> None:
    weight = torch.ones(3).bfloat16()
    short = ShortMaster(weight)
    assert short.low_bytes_to_come == 3
    inexact = torch.tensor([1.0, 1.0 + 2**-16, 1.0])
    other_weight = torch.tensor([1.0, 1.0 + 2**-7, 1.0])
    half_way = torch.tensor([1.0, 1.0, 1.0 + 2**-8])
    for values in (inexact, other_weight, half_way):
        assert not short.take(values)
        assert short.low_bytes_to_come == 3, "nothing has changed"
    assert not short.take(other_weight, rounds=True)
    assert short.take(inexact, rounds=True)
    assert short.joined().tolist() == [1.0, 1.0 + 2**-15, 1.0]
    assert short.take(half_way, rounds=True)
    assert short.joined().tolist() == [1.0, 1.0, 1.0 + 2**-8 - 2**-15]
    short.become(weight)
    assert short.joined().tolist() == [1.0, 1.0, 1.0]


def test_the_kernel_takes_no_bytes_for_low_halves() -> None:
    kernel = one_pass_kernel()
    assert kernel is not None, "the tests need a C compiler"
    short, values = ShortMaster(torch.zeros(4).bfloat16()), torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"needs low in torch\.int16"):
        kernel.join(short, values)
    with pytest.raises(RuntimeError, match=r"needs low in torch\.int16"):
        kernel.halve(values, short)
    with pytest.raises(RuntimeError, match="needs the rounding of a master of 24 bits"):
        kernel.update([KernelParameter(short, values, [], short.weight, STAND_STILL)])
    wrong = ShortMaster(short.weight, torch.zeros(4, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=r"needs low in torch\.int8"):
        kernel.update([KernelParameter(wrong, values, [], short.weight, STAND_STILL, rounding=Rounding())])
    assert isinstance(short, HalvedMaster)
