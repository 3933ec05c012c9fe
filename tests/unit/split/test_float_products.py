"""FloatProducts gives half-precision products on the host computed in float32 and rounded once."""

from __future__ import annotations

import pytest
import torch

from roundpipe.split import verify as float_products
from roundpipe.split.verify import FloatProducts

SHAPES = [(3, 50, 7), (1, 1, 1), (4, 64, 64), (2, 9, 0), (0, 9, 2), (3, 0, 5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", [1, 100, 2**24])
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_products_are_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, part: int, rows: int, inner: int, columns: int
) -> None:
    monkeypatch.setattr(float_products, "_PART", part)
    left = torch.randint(-8, 8, (rows, inner)).to(dtype)  # products and sums of small integers are exact
    right = torch.randint(-8, 8, (inner, columns)).to(dtype)
    with FloatProducts():
        found = left @ right
    assert found.dtype == dtype
    assert torch.equal(found, (left.float() @ right.float()).to(dtype))


def test_products_of_other_dtypes_are_unchanged() -> None:
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    with FloatProducts():
        assert torch.equal(left @ right, torch.mm(left, right))
        assert (left.double() @ right.double()).dtype == torch.float64


def test_a_backward_pass_uses_float_products(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    product = float_products._product

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append(right.shape)
        return product(left, right)

    monkeypatch.setattr(float_products, "_product", watched)
    weight = torch.randn(6, 4, dtype=torch.bfloat16, requires_grad=True)
    given = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = torch.nn.functional.linear(given, weight).float().square().sum()
    with FloatProducts():
        loss.backward()
    assert torch.Size([6, 4]) in seen, "the gradient of the input"
    assert weight.grad is not None
    assert given.grad is not None
