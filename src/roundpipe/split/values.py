"""Nested values between a model's modules: walked, compared, and kept as templates whose tensors lie elsewhere.

Used by the splitter. The common containers are walked by hand, because this happens for every layer and microbatch;
all others through torch's pytree.
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

Key = tuple[Any, ...]
_ATOMS = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Stands for a tensor that is kept under `key`."""

    key: Key


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """Stands for a tensor of which only this is known."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outline:
        return cls(tensor.shape, tensor.dtype)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """A value of the same structure, each leaf changed; tuples, lists and dicts are made anew."""
    kind = type(value)
    if kind in _ATOMS or kind is Held or kind is Outline:
        return change(value)
    if kind is tuple:
        return tuple([map_leaves(change, item) for item in value])
    if kind is list:
        return [map_leaves(change, item) for item in value]
    if kind is dict:
        return {name: map_leaves(change, item) for name, item in value.items()}
    if isinstance(value, UserDict):
        changed = copy.copy(value)
        changed.data = map_leaves(change, value.data)
        return changed
    return tree_map(change, value)


def filled_in(template: Any, tensors: Mapping[Key, torch.Tensor]) -> Any:
    """A value from its template; written out, since it is made for every layer and microbatch."""
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


def leaves_of(value: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def structure_of(value: Any) -> Any:
    """What two values have in common whose leaves can be compared one by one."""
    return tree_flatten(map_leaves(lambda leaf: 0, value))[1]


def equal(left: Any, right: Any) -> bool:
    """Whether two leaves are the same to the bit, NaN being itself; of unknown objects only the type is compared."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _equal_tensors(left.detach(), right.detach())
    if type(left) is not type(right):
        return False
    return bool(left == right) if isinstance(left, _PLAIN) else True


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value that cannot be changed and has nothing to do with any tensor."""
    return isinstance(leaf, _PLAIN)


def _equal_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    same = (left == right) | (left.isnan() & right.isnan())
    return bool(same.all())


def placeholder(outline: Outline, device: torch.device) -> torch.Tensor:
    """A tensor for what is believed dead: NaN, so that a wrong belief is loud, and one number, to take no memory."""
    dead = math.nan if outline.dtype.is_floating_point or outline.dtype.is_complex else 0
    return torch.full((), dead, dtype=outline.dtype, device=device).expand(outline.shape)


def may_hold_containers(value: Any) -> bool:
    """Whether there may be a dict or list in a value; quick, and never wrong when it says no."""
    kind = type(value)
    return kind not in _ATOMS and (kind is not tuple or any(map(may_hold_containers, value)))


MUTABLE = (dict, list, OrderedDict, UserDict, defaultdict)
_MAPPINGS = (dict, UserDict)


def containers_in(value: Any) -> list[Any]:
    """Every dict and list in a value, outermost first: what a module can write into."""
    found: list[Any] = []

    def walk(part: Any) -> None:
        if type(part) in MUTABLE:
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
    return dict(container) if isinstance(container, _MAPPINGS) else list(container)


def is_changed(container: Any, before: Any) -> bool:
    """Whether a container holds other objects than it did."""
    if len(container) != len(before):
        return True
    if isinstance(container, _MAPPINGS):
        pairs = zip(container.items(), before.items(), strict=True)
        return any(key != old_key or item is not old for (key, item), (old_key, old) in pairs)
    return any(item is not old for item, old in zip(container, before, strict=True))


def fill(container: Any, content: Any) -> None:
    if isinstance(container, _MAPPINGS):
        container.clear()
        container.update(content)
    else:
        container[:] = content
