"""Halved masters: joining the halves restores every bit of a float32 value, in the kernel and in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roundpipe.optim.native.kernel import OnePassKernel, one_pass_kernel
from roundpipe.store import values as store_values
from roundpipe.store.values import HalvedMaster

UPPERS = torch.arange(0, 0x10000, dtype=torch.int64)  # all high halves: every sign, exponent and leading bits
LOWERS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def kernel() -> OnePassKernel:
    made = one_pass_kernel()
    assert made is not None, "the tests need a C compiler"
    return made


def from_bits(bits: Tensor) -> Tensor:
    """float32 values from 64-bit integers in the range of 32 unsigned bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def halved(values: Tensor, ties: int = 0) -> HalvedMaster:
    """`values` as a halved master. `ties` fills the tie bits beforehand, which must not matter."""
    made = HalvedMaster(torch.empty_like(values, dtype=torch.bfloat16))
    made.ties.fill_(ties)
    kernel().halve(values, made)
    return made


def joined_by_kernel(made: HalvedMaster) -> Tensor:
    to = torch.empty_like(made.weight, dtype=torch.float32)
    kernel().join(made, to)
    return to


def assert_comes_back(values: Tensor, ties: int = 0) -> None:
    made = halved(values, ties)
    not_nan = ~values.isnan()
    assert torch.equal(made.weight[not_nan].view(torch.int16), values.to(torch.bfloat16)[not_nan].view(torch.int16))
    for joined in (joined_by_kernel(made), made.joined()):
        assert torch.equal(bits_of(joined)[not_nan], bits_of(values)[not_nan])
        assert joined[~not_nan].isnan().all()


@pytest.mark.parametrize("ties", [0x00, 0xFF, 0x5A])
@pytest.mark.parametrize("lower", LOWERS, ids=hex)
def test_every_upper_half_comes_back(lower: int, ties: int) -> None:
    """Normal and subnormal numbers, zeros and infinities of both signs, NaNs; rounded down, ties, rounded up."""
    assert_comes_back(from_bits((UPPERS << 16) | lower), ties)


@pytest.mark.parametrize("upper", [0x0000, 0x8000, 0x3F80, 0x3F81, 0xBF80, 0x7F7F, 0xFF7F, 0x0001, 0x007F, 0x0080])
def test_every_lower_half_comes_back(upper: int) -> None:
    """For zero and minus zero, one, the smallest numbers, and the largest ones, which round to infinity."""
    assert_comes_back(from_bits((upper << 16) | UPPERS))


def test_numbers_by_name() -> None:
    names = [0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 1 / 3]
    assert_comes_back(torch.tensor(names))


def assert_taken(values: Tensor) -> None:
    """Values are halved again without the kernel, with a weight that holds them rounded."""
    made = HalvedMaster(halved(values).weight)
    weight = made.weight.clone()
    assert made.take(values)
    for joined in (joined_by_kernel(made), made.joined()):
        assert torch.equal(bits_of(joined), bits_of(values))
    assert torch.equal(made.weight.view(torch.int16), weight.view(torch.int16)), "devices may be reading it"


@pytest.mark.parametrize("chunk", [16, 4096, 1 << 20])
@pytest.mark.parametrize("lower", LOWERS, ids=hex)
def test_what_was_joined_is_split_again(lower: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_values, "_CHUNK", chunk)
    values = from_bits((UPPERS << 16) | lower)
    values = values[~values.isnan()]
    assert_taken(values if chunk > 16 else values[::61].contiguous())


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
def test_any_numbers_are_split_again(patterns: list[int]) -> None:
    values = from_bits(torch.tensor(patterns))
    assert_taken(values[~values.isnan()])


def test_another_weight_than_the_rounded_value_is_noticed() -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(3))
    for change in (-1, 1):
        made = HalvedMaster(values.to(torch.bfloat16))
        made.weight.view(torch.int16)[99] += change
        before = dict(vars(made))
        assert not made.take(values)
        assert vars(made).keys() == before.keys()
        assert all(vars(made)[name] is before[name] for name in before), "nothing has changed"


def test_a_nan_is_not_halved_again() -> None:
    """It would come back as a NaN with other bits."""
    values = torch.tensor([1.0, float("nan")])
    assert not HalvedMaster(values.to(torch.bfloat16)).take(from_bits(torch.tensor([0x3F800000, 0x7F800001])))


def test_a_nan_stays_one() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC08000, 0xFFFFFFFF, 0x7F808000])
    made = halved(from_bits(patterns))
    assert made.weight.isnan().all()
    assert joined_by_kernel(made).isnan().all()
    assert made.joined().isnan().all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70), st.integers(0, 255))
def test_any_numbers_come_back(patterns: list[int], ties: int) -> None:
    """Also if their count is not a multiple of 8 or of a vector's length."""
    assert_comes_back(from_bits(torch.tensor(patterns)), ties)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1023, 1024, 1025, 70_001])
def test_ties_at_the_ends_of_bytes_and_blocks(count: int) -> None:
    bits = (torch.arange(count) % 0x7F00 << 16) | 0x8000
    bits[1::5] += 1
    assert_comes_back(from_bits(bits), 0xFF)


def test_the_two_ways_to_join_agree_on_anything() -> None:
    """Also on bits that halving never produces."""
    made = HalvedMaster(torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16))
    generator = torch.Generator().manual_seed(1)
    made.low.copy_(torch.randint(-32768, 32768, (65536,), generator=generator))
    made.low[::3] = -32768  # ties
    made.low[1::7] = 0
    made.ties.copy_(torch.randint(0, 256, (8192,), generator=generator))
    assert torch.equal(bits_of(joined_by_kernel(made)), bits_of(made.joined()))


def test_before_the_lower_bits_are_needed_the_value_is_the_weight() -> None:
    weight = torch.randn(3, 5).to(torch.bfloat16)
    made = HalvedMaster(weight)
    assert torch.equal(made.joined(), weight.float())
    assert "low" not in vars(made)
    assert "ties" not in vars(made), "no memory was allocated"
    assert int(made.low.count_nonzero()) == int(made.ties.count_nonzero()) == 0
    assert torch.equal(made.joined(), weight.float()), "new low halves give the same values"


def test_what_it_becomes_has_nothing_of_what_it_was() -> None:
    made = halved(torch.full((9,), 1 / 3))
    weight = torch.ones(9, dtype=torch.bfloat16)
    made.become(weight)
    assert made.weight is weight
    assert torch.equal(made.joined(), torch.ones(9))


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_bits_lie_as_the_weight_lies(dims: tuple[int, int, int]) -> None:
    values = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(2)).permute(dims)
    made = HalvedMaster(torch.empty_like(values, dtype=torch.bfloat16))
    assert made.weight.stride() == values.stride()
    kernel().halve(values, made)
    joined = made.joined()
    assert joined.stride() == values.stride()
    assert torch.equal(joined, values)
    assert torch.equal(made.weight, values.to(torch.bfloat16))
