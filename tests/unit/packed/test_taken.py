"""Weights that come quantised have the values that their formats describe, in whatever ranges they are expanded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import helpers_quantised as written
from helpers_slow import slow_except
from roundpipe.errors import ConfigError
from roundpipe.packed import forms
from roundpipe.packed.taken import NestedScales, Taken, four_bits, fp8_tiles, int8_rows, joined, mxfp4

Case = tuple[Taken, Tensor]  # what was taken, and its values


def weight_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_fp8(weight: Tensor) -> Case:
    tensors, values = written.fp8_tiles("w", weight, 16)
    return fp8_tiles(tensors["w"], tensors["w_scale_inv"], (16, 16), weight.dtype), values


def of_mxfp4(weight: Tensor) -> Case:
    tensors, values = written.mxfp4("w", weight)
    return mxfp4(tensors["w_blocks"], tensors["w_scales"], weight.dtype), values


def of_four_bits(weight: Tensor, levels: str = "nf4", *, is_nested: bool = True, **changes: Any) -> Case:
    tensors, values = written.four_bits("w", weight, levels, is_nested=is_nested)
    nested = None
    if is_nested:
        offset = written.state_of(tensors)["nested_offset"]
        nested = NestedScales(tensors["w.nested_absmax"], tensors["w.nested_quant_map"], 256, offset)
    given: dict[str, Any] = {"table": tensors["w.quant_map"], "levels": levels, "shape": tuple(weight.shape)}
    given |= {"block": 64, "rounds_to": weight.dtype, "dtype": weight.dtype, **changes}
    return four_bits(tensors["w"], tensors["w.absmax"], nested, **given), values


def of_int8(weight: Tensor) -> Case:
    tensors, values = written.int8_rows("w.weight", weight)
    return int8_rows(tensors["w.weight"], tensors["w.SCB"], weight.dtype), values


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "fp8": lambda dtype: of_fp8(weight_of(48, 64, dtype=dtype)),
    "fp8 with smaller tiles at the ends": lambda dtype: of_fp8(weight_of(41, 37, dtype=dtype)),
    "mxfp4": lambda dtype: of_mxfp4(weight_of(3, 64, 10, dtype=dtype)),
    "nf4": lambda dtype: of_four_bits(weight_of(150, 120, dtype=dtype)),
    "nf4 with an incomplete last block": lambda dtype: of_four_bits(weight_of(7, 9, dtype=dtype)),
    "fp4": lambda dtype: of_four_bits(weight_of(20, 32, dtype=dtype), "fp4", is_nested=False),
    "int8": lambda dtype: of_int8(weight_of(9, 20, dtype=dtype)),
}
EVERY = pytest.mark.parametrize("case", CASES)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_the_format(case: str, dtype: torch.dtype) -> None:
    taken, values = CASES[case](dtype)
    packed = taken.packed()
    assert packed.dtype is torch.uint8
    assert packed.numel() == taken.described.num_bytes == taken.described.empty("meta").numel()
    found = taken.described.expand(packed).view(taken.described.shape)
    assert found.dtype is dtype
    assert torch.equal(found, values)
    assert len(values.unique()) > 10


@EVERY
def test_a_range_is_that_part_of_the_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, values = CASES[case](torch.bfloat16)
    packed, flat = taken.packed(), values.flatten()
    monkeypatch.setattr(forms, "_CHUNK_ELEMENTS", 100)
    end = len(flat)
    for start, stop in [(0, 1), (0, end), (end - 1, end), (5, 5), (7, end - 3), (end // 2, end // 2 + 20)]:
        assert torch.equal(taken.described.expand(packed, start, stop), flat[start:stop])


@pytest.mark.parametrize("case", slow_except(("nf4",), CASES))
def test_compiled_code_gets_the_same_values(case: str) -> None:
    taken, values = CASES[case](torch.bfloat16)
    torch._dynamo.reset()
    expand = torch.compile(lambda packed: taken.described.expand(packed), fullgraph=True, backend="inductor")
    assert torch.equal(expand(taken.packed()).view(values.shape), values)


@pytest.mark.parametrize("make", [of_fp8, of_four_bits, of_int8])
def test_matrices_become_one_weight(make: Callable[[Tensor], Case]) -> None:
    cases = [make(weight_of(24, 40, seed=seed)) for seed in range(4)]
    whole = joined([taken for taken, _ in cases], (2, 48, 40))
    assert torch.equal(whole.expanded(), torch.cat([values for _, values in cases]).view(2, 48, 40))


def test_values_are_rounded_to_the_dtype_of_the_format_first() -> None:
    weight = weight_of(64, 64, dtype=torch.bfloat16)
    taken, values = of_four_bits(weight, dtype=torch.float32)
    assert torch.equal(taken.expanded(), values.float())
    exact, _ = of_four_bits(weight, dtype=torch.float32, rounds_to=torch.float32)
    assert not torch.equal(exact.expanded(), values.float())


def test_one_scale_and_scales_that_are_powers_of_two() -> None:
    codes = weight_of(6, 8).to(torch.float8_e4m3fn)
    for scales in (torch.tensor(0.3), torch.tensor([0.3]), torch.tensor([[0.3]])):
        assert torch.equal(fp8_tiles(codes, scales, None, torch.float32).expanded(), codes.float() * 0.3)
    powers = torch.tensor([[126, 130], [0, 127]], dtype=torch.uint8)
    expected = codes.float() * torch.tensor([[0.5, 8], [2.0**-127, 1]]).repeat_interleave(3, 0).repeat_interleave(4, 1)
    for scales in (powers, powers.view(torch.float8_e8m0fnu)):
        assert torch.equal(fp8_tiles(codes, scales, (128, 128), torch.float32).expanded(), expected)


def test_tiles_that_do_not_fit_one_way_keep_their_length_the_other_way() -> None:
    """Short gate and up matrices of experts have a scale each, also where both would fit into one tile."""
    codes, scales = weight_of(2, 24, 40).to(torch.float8_e4m3fn), weight_of(2, 2, 2, seed=4)
    of_rows = scales.repeat_interleave(12, 1)
    expected = codes.float() * torch.cat([of_rows[..., :1].expand(2, 24, 32), of_rows[..., 1:].expand(2, 24, 8)], 2)
    assert torch.equal(fp8_tiles(codes, scales, (32, 32), torch.float32).expanded(), expected)


NAN = torch.full((3, 4), torch.nan)
CODES = torch.zeros(6, 8).to(torch.float8_e4m3fn)
BAD: dict[str, Callable[[], object]] = {
    r"scales are torch.float32 of shape \(4, 3\)": lambda: fp8_tiles(CODES, torch.ones(4, 3), (2, 2), torch.float32),
    r"of shape \(2, 1\), which does not fit codes of shape \(6, 8\)": lambda: fp8_tiles(  # not halves
        CODES, torch.ones(2, 1), (2, 8), torch.float32
    ),
    "not torch.float8_e4m3fn": lambda: fp8_tiles(CODES.float(), torch.ones(3, 4), (2, 2), torch.float32),
    "scales that are infinite or NaN": lambda: fp8_tiles(CODES, NAN, (2, 2), torch.float32).packed(),
    "values that are NaN": lambda: fp8_tiles(NAN.to(CODES.dtype), torch.ones(1), None, torch.float32).packed(),
    "does not fit codes": lambda: int8_rows(torch.zeros(6, 8, dtype=torch.int8), torch.ones(8), torch.float32),
    "sixteen levels": lambda: of_four_bits(weight_of(8, 8), table=torch.linspace(-1, 1, 16)),
    r"not those of a weight of shape \(8, 9\)": lambda: of_four_bits(weight_of(8, 8), shape=(8, 9)),
    r"not \[experts, out, groups, 16\]": lambda: mxfp4(CODES, torch.ones(1), torch.float32),
    "in different ways": lambda: joined([of_fp8(weight_of(size, 16))[0] for size in (16, 8)], (24, 16)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_together_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BAD[message]()
