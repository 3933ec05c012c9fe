"""A nested value as a flat list of distinct tensors and the structure of the nest.

Layers exchange values in this form. A tensor that occurs twice in a value occurs once in the bundle. This keeps
aliasing, and the order in which autograd sums the tensor's gradients, as in the plain model. Knows no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from roundpipe.errors import ArgumentTypeError
from roundpipe.store.layout import span_elements


@dataclasses.dataclass(frozen=True)
class _TensorAt:
    """A leaf of the nest: the tensor at this position of the bundle."""

    position: int


_ALONE: tuple[Any, ...] = (_TensorAt(0),)  # the leaves of a value that is one tensor, the common case
_LEAF = tree_structure(0)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A nested value taken apart: `tensors` can be copied or replaced one by one, `unpack` restores the nest."""

    tensors: tuple[torch.Tensor, ...]
    _leaves: tuple[Any, ...]
    _spec: TreeSpec
    sharing_memory: frozenset[int] = frozenset()  # positions of tensors that overlapped in memory when packed

    @classmethod
    def pack(cls, value: Any) -> Bundle:
        """Take a nested value apart. Raises ArgumentTypeError for an object that hides a tensor with a graph."""
        if isinstance(value, torch.Tensor):
            return cls((value,), _ALONE, _LEAF)
        leaves, spec = tree_flatten(value)
        # By identity: two views of the same memory are two tensors, and autograd treats them so.
        position_of: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        packed = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                _refuse_hidden_graph(leaf)
                packed.append(leaf)
                continue
            if id(leaf) not in position_of:
                position_of[id(leaf)] = len(tensors)
                tensors.append(leaf)
            packed.append(_TensorAt(position_of[id(leaf)]))
        return cls(tuple(tensors), tuple(packed), spec, _sharing_memory(tensors))

    def unpack(self) -> Any:
        if self._leaves is _ALONE:
            return self.tensors[0]
        leaves = [self.tensors[leaf.position] if isinstance(leaf, _TensorAt) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Bundle:
        assert len(tensors) == len(self.tensors)
        return Bundle(tuple(tensors), self._leaves, self._spec, self.sharing_memory)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Bundle:
        return self.with_tensors([change(tensor) for tensor in self.tensors])

    def detached(self) -> Bundle:
        return self.map(torch.Tensor.detach)

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        return tuple(tensor.requires_grad for tensor in self.tensors)


def _sharing_memory(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Positions of strided tensors whose memory range overlaps that of another tensor."""
    spans = sorted(
        (
            tensor.data_ptr(),
            tensor.data_ptr() + span_elements(tensor.shape, tensor.stride()) * tensor.itemsize,
            position,
        )
        for position, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and tensor.numel()
    )
    # Sorted by start: a range overlaps an earlier one if it starts before the furthest end so far.
    sharing: set[int] = set()
    last_end, last_position = 0, -1
    for start, end, position in spans:
        if start < last_end:
            sharing |= {position, last_position}
        if end > last_end:
            last_end, last_position = end, position
    return frozenset(sharing)


def _refuse_hidden_graph(leaf: Any) -> None:
    """Raise for an object that holds a tensor which requires grad: pytree does not flatten the object, so the
    tensor's gradient would be lost without notice."""
    if isinstance(leaf, torch.nn.Module) or not hasattr(leaf, "__dict__"):
        return
    if any(isinstance(held, torch.Tensor) and held.requires_grad for held in tree_leaves(vars(leaf))):
        raise ArgumentTypeError(
            f"a {type(leaf).__qualname__} holds a tensor that requires grad; gradients cannot be tracked through it: "
            "pass tuples, lists and dicts between layers, or register the class with torch.utils._pytree "
            "(register_dataclass, register_pytree_node)."
        )
