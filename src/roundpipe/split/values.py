"""Walks and compares nested values that modules pass to each other, and makes templates of them.

Values are nests of tuples, lists, dicts and other pytree containers. Tensors and all other objects are leaves. A
template is a value whose tensors are stored separately, under keys.
The common containers are walked by code in this file, because values are walked for every layer and microbatch and
torch's pytree is several times slower. All other containers are walked by torch's pytree.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

Key = tuple[Any, ...]  # names a tensor of a split model; the kinds of keys are listed in split/plan.py
_ATOMS = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})  # types that are leaves
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_MUTABLE = (dict, list, OrderedDict, defaultdict)
_MAPPINGS = (dict, UserDict)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Replaces a tensor in a template. The tensor itself is stored elsewhere, under `key`."""

    key: Key


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """The shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outline:
        return cls(tensor.shape, tensor.dtype)


def placeholder(outline: Outline, device: torch.device) -> torch.Tensor:
    """Return a tensor that replaces one whose values are not used. All its elements are NaN, or 0 for integers.

    If the values are used nevertheless, NaN shows in the results. The tensor is one number expanded to the shape, so it
    takes no memory.
    """
    unused = math.nan if outline.dtype.is_floating_point or outline.dtype.is_complex else 0
    return torch.full((), unused, dtype=outline.dtype, device=device).expand(outline.shape)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value of the same structure with `change` applied to each leaf. Containers are copied."""
    kind = type(value)
    if kind in _ATOMS or kind is Held or kind is Outline:
        return change(value)
    if kind is tuple:
        return tuple([map_leaves(change, item) for item in value])
    if kind is list:
        return [map_leaves(change, item) for item in value]
    if kind is dict:
        return {name: map_leaves(change, item) for name, item in value.items()}
    if isinstance(value, UserDict):  # pytree treats a UserDict as a leaf
        changed = copy.copy(value)
        changed.data = map_leaves(change, value.data)
        return changed
    return tree_map(change, value)


def filled_in(template: Any, tensors: Mapping[Key, torch.Tensor]) -> Any:
    """Return the value of a template: each Held is replaced by the tensor with its key in `tensors`."""
    # Does not use map_leaves for common types: this function runs for every layer and microbatch, and a function call
    # for each leaf would take most of its time.
    kind = type(template)
    if kind is Held:
        return tensors[template.key]
    if kind in _ATOMS:
        return template
    if kind is tuple:
        return tuple([tensors[item.key] if type(item) is Held else filled_in(item, tensors) for item in template])
    if kind is dict:
        return {
            name: item
            if type(item) in _ATOMS
            else tensors[item.key]
            if type(item) is Held
            else filled_in(item, tensors)
            for name, item in template.items()
        }
    return map_leaves(lambda leaf: tensors[leaf.key] if type(leaf) is Held else leaf, template)


def outlined(value: Any) -> Any:
    """Return the value with an Outline in place of each tensor."""
    return map_leaves(lambda leaf: Outline.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def leaves_of(value: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def structure_of(value: Any) -> Any:
    """Return the pytree structure of a value, without its leaves."""
    return tree_flatten(map_leaves(lambda leaf: 0, value))[1]


def equal(left: Any, right: Any) -> bool:
    """Whether two leaves are equal. Tensors are compared bit by bit, except that NaN equals NaN.

    Two objects of an unknown class are equal if they have the same type: most such classes define no comparison.
    """
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _equal_tensors(left.detach(), right.detach())
    if type(left) is not type(right):
        return False
    return bool(left == right) if isinstance(left, _PLAIN) else True


def _equal_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    # torch.equal is False for NaN.
    same = (left == right) | (left.isnan() & right.isnan())
    return bool(same.all())


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is immutable and refers to no tensor, for example a number, a string or a dtype."""
    return isinstance(leaf, _PLAIN)


# Dicts and lists among the arguments of a module. The module may change them.


def may_hold_containers(value: Any) -> bool:
    """Whether a value may contain a dict or list. A fast test that returns True for types it does not know."""
    kind = type(value)
    return kind not in _ATOMS and (kind is not tuple or any(map(may_hold_containers, value)))


def containers_in(value: Any) -> list[Any]:
    """Return all dicts and lists in a value, which a module could change, outermost first."""
    found: list[Any] = []

    def walk(part: Any) -> None:
        if type(part) in _MUTABLE or isinstance(part, UserDict):  # other subclasses of dict may be outputs of models
            found.append(part)
        if isinstance(part, _MAPPINGS):
            for item in part.values():
                walk(item)
        elif isinstance(part, list | tuple):
            for item in part:
                walk(item)

    walk(value)
    return found


def content_of(container: Any) -> Any:
    """Return a shallow copy of a container's items, as a dict or list."""
    return dict(container) if isinstance(container, _MAPPINGS) else list(container)


def is_changed(container: Any, before: Any) -> bool:
    """Whether a container's items changed. before: the result of an earlier `content_of`."""
    if len(container) != len(before):
        return True
    if isinstance(container, _MAPPINGS):
        pairs = zip(container.items(), before.items(), strict=True)
        return any(key != old_key or item is not old for (key, item), (old_key, old) in pairs)
    return any(item is not old for item, old in zip(container, before, strict=True))


def fill(container: Any, content: Any) -> None:
    """Replace the items of a container by `content`, which `content_of` returned."""
    if isinstance(container, _MAPPINGS):
        container.clear()
        container.update(content)
    else:
        container[:] = content
