"""Folded products: every input counts, only the first columns of a weight are read, other products are unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe.split import folded
from roundpipe.split.folded import FoldedProducts

WIDE = folded._LEAST * folded._WIDTH


def test_each_input_counts_and_only_the_first_columns_are_read() -> None:
    weight = torch.full((3, WIDE), torch.nan)
    weight[:, : folded._WIDTH] = torch.randn(3, folded._WIDTH)
    given = torch.randn(2, 5, WIDE, requires_grad=True)
    with FoldedProducts():
        found = F.linear(given, weight, torch.ones(3))
    assert found.shape == (2, 5, 3)
    assert torch.isfinite(found).all()
    (gradient,) = torch.autograd.grad(found.square().sum(), given)
    assert (gradient != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_stay_as_large_as_they_were(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, given = torch.randn(256, 4 * WIDE, dtype=dtype), torch.randn(64, 4 * WIDE, dtype=dtype)
    with FoldedProducts():
        found = F.linear(given, weight)
    assert found.dtype == dtype
    assert float(found.float().std() / F.linear(given, weight).float().std()) == pytest.approx(1, abs=0.1)


class _Packed(nn.Parameter):
    """A class of weights of which only its own code knows what they hold."""


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        (torch.randn(2, WIDE - folded._WIDTH), torch.randn(3, WIDE - folded._WIDTH)),
        (torch.randn(2, WIDE + 1), torch.randn(3, WIDE + 1)),
        (torch.randn(2, WIDE, dtype=torch.float64), torch.randn(3, WIDE, dtype=torch.float64)),
        (torch.randn(2, WIDE), _Packed(torch.randn(3, WIDE))),
    ],
    ids=["narrow", "no multiple of the width", "float64", "a class of its own"],
)
def test_other_products_are_unchanged(given: torch.Tensor, weight: torch.Tensor) -> None:
    expected = F.linear(given, weight)
    with FoldedProducts():
        assert torch.equal(F.linear(given, weight), expected)
