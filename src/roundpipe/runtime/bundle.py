"""A nested value as flat, distinct tensors plus the shape of the nest.

What travels between layers, devices and host. A tensor that occurs twice in a value is one tensor of the bundle, so
that aliasing, and the order in which autograd sums its gradients, survive every cut between layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclasses.dataclass(frozen=True)
class _TensorAt:
    position: int


@dataclasses.dataclass(frozen=True)
class Bundle:
    tensors: tuple[torch.Tensor, ...]
    _leaves: tuple[Any, ...]
    _spec: TreeSpec

    @classmethod
    def pack(cls, value: Any) -> Bundle:
        leaves, spec = tree_flatten(value)
        position_of: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        packed = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                packed.append(leaf)
                continue
            if id(leaf) not in position_of:
                position_of[id(leaf)] = len(tensors)
                tensors.append(leaf)
            packed.append(_TensorAt(position_of[id(leaf)]))
        return cls(tuple(tensors), tuple(packed), spec)

    def unpack(self) -> Any:
        leaves = [self.tensors[leaf.position] if isinstance(leaf, _TensorAt) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Bundle:
        assert len(tensors) == len(self.tensors)
        return dataclasses.replace(self, tensors=tuple(tensors))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Bundle:
        return self.with_tensors([change(tensor) for tensor in self.tensors])

    def detached(self) -> Bundle:
        return self.map(torch.Tensor.detach)

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        return tuple(tensor.requires_grad for tensor in self.tensors)
