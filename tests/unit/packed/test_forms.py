"""Codes and scales against slow references, element by element; ranges, chunks, dtypes; the bytes that a form takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.packed import FORMS, PackedWeight, checked_form, forms

# As QLoRA publishes them: quantiles of a normal distribution, to the precision of its paper.
NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
BLOCKS = {"nf4": 64, "int8": 128, "fp8": 128}
BITS = {"nf4": 4, "int8": 8, "fp8": 8}
EVERY_FORM = pytest.mark.parametrize("form", sorted(FORMS))


def weight_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def there_and_back(form: str, weight: Tensor) -> Tensor:
    described = PackedWeight.of(FORMS[form], weight)
    return described.expand(FORMS[form].pack(weight)).view(weight.shape)


def levels_of(form: str) -> list[float]:
    if form == "nf4":
        return list(forms.NF4.levels)
    if form == "int8":
        return [float(code) for code in range(-127, 128)]
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return sorted({float(value) for value in every if math.isfinite(value)})


def reference(form: str, weight: Tensor, *, ties_up: bool) -> Tensor:
    """For each element of each block the nearest level, by comparing with all of them."""
    levels = torch.tensor(levels_of(form)[:: -1 if ties_up else 1])
    largest = levels.max()
    flat = weight.detach().flatten().float()
    out = torch.empty_like(flat)
    for start in range(0, len(flat), BLOCKS[form]):
        block = flat[start : start + BLOCKS[form]]
        scale = (block.abs().max() / largest).to(torch.bfloat16).float()
        if scale == 0:
            out[start : start + BLOCKS[form]] = 0
            continue
        nearest = (block[:, None] / scale - levels).abs().argmin(1)
        out[start : start + BLOCKS[form]] = levels[nearest] * scale
    return out.view(weight.shape).to(weight.dtype)


def is_nearest(found: Tensor, form: str, weight: Tensor) -> bool:
    low, high = (reference(form, weight, ties_up=ties_up) for ties_up in (False, True))
    return bool(((found == low) | (found == high)).all())


def test_levels_of_nf4_are_the_published_ones() -> None:
    torch.testing.assert_close(torch.tensor(forms.NF4.levels), torch.tensor(NF4), rtol=0, atol=6e-8)


@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(6, 64), (5, 37), (3, 7, 50), (1, 1)])
def test_every_element_becomes_the_nearest_level_times_the_scale(
    form: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = weight_of(*shape, dtype=dtype)
    found = there_and_back(form, weight)
    assert found.dtype is dtype
    assert is_nearest(found, form, weight)
    assert not torch.equal(found, weight) or weight.numel() == 1


@EVERY_FORM
def test_zeros_large_and_tiny_values_keep_their_size(form: str) -> None:
    weight = torch.cat([torch.zeros(128), weight_of(128) * 1e30, weight_of(128) * 1e-30, torch.full((128,), -2.0)])
    found = there_and_back(form, weight)
    assert torch.equal(found[:128], torch.zeros(128))
    assert is_nearest(found, form, weight)
    for start in (128, 256):
        block, got = weight[start : start + 128], found[start : start + 128]
        assert (got - block).abs().max() <= 0.16 * block.abs().max()
    assert torch.allclose(found[384:], torch.tensor(-2.0), rtol=0.005)


@EVERY_FORM
def test_packing_again_changes_nothing(form: str) -> None:
    once = there_and_back(form, weight_of(9, 80))
    assert torch.equal(there_and_back(form, once), once)


@EVERY_FORM
@pytest.mark.parametrize("chunk", [256, 1 << 24])
def test_a_range_is_that_part_of_the_whole(form: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(11, 83, dtype=torch.bfloat16)
    described = PackedWeight.of(FORMS[form], weight)
    packed = described.form.pack(weight)
    whole = described.expand(packed)
    monkeypatch.setattr(forms, "_CHUNK_ELEMENTS", chunk)
    assert torch.equal(described.form.pack(weight), packed)
    for start, stop in [(0, 1), (0, 913), (63, 65), (128, 256), (200, 777), (912, 913), (5, 5), (257, 600)]:
        part = described.expand(packed, start, stop)
        assert torch.equal(part, whole[start:stop])
        assert part.untyped_storage().nbytes() == part.nbytes


@EVERY_FORM
def test_the_bytes_are_codes_and_a_scale_of_two_bytes_per_block(form: str) -> None:
    for num_elements in (1, 64, 65, 129, 100_000):
        described = PackedWeight(FORMS[form], (num_elements,), torch.bfloat16)
        blocks = math.ceil(num_elements / BLOCKS[form])
        assert described.num_bytes == blocks * (BLOCKS[form] * BITS[form] // 8 + 2)
        packed = described.form.pack(torch.ones(num_elements, dtype=torch.bfloat16))
        assert (packed.dtype, packed.shape) == (torch.uint8, (described.num_bytes,))
        assert described.form.pack(torch.ones(num_elements, device="meta")).shape == packed.shape


@EVERY_FORM
def test_weights_that_do_not_lie_in_order_are_packed_by_their_values(form: str) -> None:
    weight = weight_of(40, 30)
    assert torch.equal(there_and_back(form, weight.t().contiguous().t()), there_and_back(form, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_too_large_for_a_scale_are_refused(dtype: torch.dtype) -> None:
    weight = weight_of(3, 70).to(dtype)
    weight[2, 69] = 3.4e38
    with pytest.raises(ConfigError, match="too large for a scale in bfloat16"):
        FORMS["nf4"].pack(weight)
    assert FORMS["int8"].pack(weight).numel()  # its scales are smaller


@EVERY_FORM
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinite_values_and_nan_are_refused(form: str, bad: float) -> None:
    weight = weight_of(3, 70)
    weight[2, 69] = bad
    with pytest.raises(ConfigError, match="infinite or NaN"):
        there_and_back(form, weight)


def test_forms_are_known_by_name() -> None:
    assert checked_form(None) is None
    assert checked_form("int8") is FORMS["int8"]
    with pytest.raises(ConfigError, match=r"one of 'nf4', 'int8', 'fp8', got 'nf3'"):
        checked_form("nf3")
    with pytest.raises(ArgumentTypeError, match=r"got bool"):
        checked_form(True)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("shape", "stride"),
    [((5, 7), (1, 1)), ((9,), (1,)), ((1, 1), (1, 1)), ((3, 40, 6), (16, 6, 1)), ((3, 2, 3), (6, 3, 1))],
)
def test_a_stand_in_has_elements_of_the_weight(
    form: forms.BlockForm, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    weight = torch.randn(shape, dtype=torch.bfloat16)
    described = PackedWeight.of(form, weight)
    packed = described.form.pack(weight)
    found = described.stand_in(packed)
    assert (found.shape, found.dtype) == (weight.shape, weight.dtype)
    assert torch.equal(found, described.expand(packed).as_strided(shape, stride))
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    assert found.untyped_storage().nbytes() == span * weight.itemsize
