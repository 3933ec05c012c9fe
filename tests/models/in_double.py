"""Runs a model in float64 throughout, also where its code asks for float32.

Used by default_road to tell rounding from errors: rounding shrinks with the precision, an error does not. Models
convert to float32 for precision (norms, softmax, rotary embeddings, losses), which in float64 would lose it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


@contextlib.contextmanager
def without_float32() -> Iterator[None]:
    """Whatever code converts to float32 becomes float64 while entered, on all threads; so does what it makes anew."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
            for place, name in ((torch.Tensor, "to"), (torch.nn.functional, "softmax"), (torch, "softmax")):
                stack.enter_context(patch.object(place, name, _in_double(getattr(place, name))))
            yield
    finally:
        torch.set_default_dtype(before)


def _in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with float64 in place of an argument that is the dtype float32."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_wider, args), **{name: _wider(value) for name, value in kwargs.items()})

    return called


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def model_in_double(model: nn.Module) -> nn.Module:
    """The model itself, changed. The kernels for groups of experts take no float64; batched ones compute the same."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model.double()


def in_double(values: Any) -> Any:
    """The same nest of values with all tensors of float32 in float64."""
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.dtype is torch.float32 else leaf, values
    )
