"""A nested value as flat, distinct tensors plus the shape of the nest.

What travels between layers, devices and host. A tensor that occurs twice in a value is one tensor of the bundle, so
that aliasing, and the order in which autograd sums its gradients, survive every cut between layers.
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
    position: int


_ALONE: tuple[Any, ...] = (_TensorAt(0),)  # the leaves of a value that is a tensor itself, as most are
_LEAF = tree_structure(0)


@dataclasses.dataclass(frozen=True)
class Bundle:
    tensors: tuple[torch.Tensor, ...]
    _leaves: tuple[Any, ...]
    _spec: TreeSpec
    sharing_memory: frozenset[int] = frozenset()  # positions of tensors that had memory in common when packed

    @classmethod
    def pack(cls, value: Any) -> Bundle:
        if isinstance(value, torch.Tensor):
            return cls((value,), _ALONE, _LEAF)
        leaves, spec = tree_flatten(value)
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
    """Positions of strided tensors that span memory another one spans too."""
    spans = sorted(
        (
            tensor.data_ptr(),
            tensor.data_ptr() + span_elements(tensor.shape, tensor.stride()) * tensor.itemsize,
            position,
        )
        for position, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and tensor.numel()
    )
    sharing: set[int] = set()
    last_end, last_position = 0, -1
    for start, end, position in spans:
        if start < last_end:
            sharing |= {position, last_position}
        if end > last_end:
            last_end, last_position = end, position
    return frozenset(sharing)


def _refuse_hidden_graph(leaf: Any) -> None:
    """Gradients are followed through tensors we can see; one inside an unknown object would lose its own, silently."""
    if isinstance(leaf, torch.nn.Module) or not hasattr(leaf, "__dict__"):
        return
    if any(isinstance(held, torch.Tensor) and held.requires_grad for held in tree_leaves(vars(leaf))):
        raise ArgumentTypeError(
            f"a {type(leaf).__qualname__} holds a tensor that requires grad, and gradients cannot be followed into it; "
            "pass tuples, lists and dicts between layers, or register the class with torch.utils._pytree "
            "(register_dataclass, register_pytree_node)."
        )
