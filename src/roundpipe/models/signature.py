"""What a plan of a split depends on: the form of a call's inputs, not their sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from roundpipe.models.library_state import is_cache, is_filled

_SMALL = 64


def signature(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, *, with_shapes: bool = False
) -> Hashable:
    """Equal for calls that one plan serves, as far as mode and inputs tell. `with_shapes`: of equal sizes, too."""
    named = tuple((name, _form(kwargs[name], with_shapes)) for name in sorted(kwargs))
    mode = (training, torch.is_grad_enabled())
    return (mode, tuple(_form(value, with_shapes) for value in args), named)


def _form(value: Any, with_shapes: bool) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape) if with_shapes else value.dim())
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
    return (str(structure), tuple(_form(leaf, with_shapes) for leaf in leaves))
