"""What a plan of a split depends on: the form of a call's inputs, and only where that misleads, more of them."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from roundpipe.models.library_state import is_cache, is_filled

_SMALL = 64
_COUNTS = frozenset(("num_items_in_batch",))  # numbers that are never a choice


class Detail(enum.IntEnum):
    """What of a call's tensors counts beside their dtype and number of dimensions."""

    FORMS = 0
    SIZES = 1
    VALUES = 2  # of small integer tensors, which may say how often something is done


def signature(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, detail: Detail = Detail.FORMS
) -> Hashable:
    """Equal for calls that one plan serves, as far as mode and inputs tell."""
    named = tuple((name, _named_form(name, kwargs[name], detail)) for name in sorted(kwargs))
    mode = (training, torch.is_grad_enabled())
    return (mode, tuple(_form(value, detail) for value in args), named)


def _named_form(name: str, value: Any, detail: Detail) -> Hashable:
    return "count" if name in _COUNTS and isinstance(value, int | float) else _form(value, detail)


def _form(value: Any, detail: Detail) -> Hashable:
    if isinstance(value, torch.Tensor):
        return _form_of_tensor(value, detail)
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int) and abs(value) <= _SMALL:  # more likely a choice than a size
        return ("int", value)
    if isinstance(value, int | float):
        return type(value).__name__
    if is_cache(value):
        return (type(value).__name__, is_filled(value))
    leaves, structure = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return type(value).__qualname__
    return (str(structure), tuple(_form(leaf, detail) for leaf in leaves))


def _form_of_tensor(tensor: torch.Tensor, detail: Detail) -> Hashable:
    if detail is Detail.FORMS:
        return (tensor.dtype, tensor.dim())
    if detail is Detail.VALUES and not tensor.is_floating_point() and tensor.numel() <= _SMALL:
        return (tensor.dtype, tuple(tensor.shape), tuple(tensor.flatten().tolist()))
    return (tensor.dtype, tuple(tensor.shape))
