"""Kinds of pytree nodes, and fake events, for the microbatch tests."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Batch:
    """A dataclass registered with pytree."""

    tokens: Any
    scale: Any


torch.export.register_dataclass(Batch)


class Box:
    """A node registered with pytree without names for its children, and with a static part."""

    def __init__(self, content: Any, tag: str = "box") -> None:
        self.content = content
        self.tag = tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.tag == other.tag and self.content is other.content

    __hash__ = None  # type: ignore[assignment]


pytree.register_pytree_node(Box, lambda box: ([box.content], box.tag), lambda children, tag: Box(*children, tag))


class FakeModelOutput(OrderedDict):
    """Like a ModelOutput of transformers: a registered subclass of OrderedDict that omits fields that are None."""


pytree.register_pytree_node(
    FakeModelOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: FakeModelOutput(zip(keys, values, strict=True)),
)


@dataclass
class FakeEvent:
    """An event that counts how often it was waited for."""

    waits: int = field(default=0)

    def wait(self) -> None:
        self.waits += 1


class FailingEvent:
    def wait(self) -> None:
        raise RuntimeError("copy failed")
