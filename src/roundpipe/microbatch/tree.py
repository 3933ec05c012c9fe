"""Opens nested values (tuples, lists, dicts, nodes registered with torch's pytree) one level at a time.

This allows walking a value together with its spec and naming each place in messages. Knows no specs and no
microbatches, except that a RoundPipePackedData is a leaf although it is a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.microbatch.packed import RoundPipePackedData


@dataclass(frozen=True)
class Node:
    """An inner node of a nested value. `names` says how to reach each child: `[0]`, `['mask']` or `.loss`."""

    value: Any
    children: tuple[Any, ...]
    names: tuple[str, ...]
    structure: pytree.TreeSpec

    def rebuild(self, children: Sequence[Any]) -> Any:
        """Return a node of the same kind with the given children."""
        return pytree.tree_unflatten(list(children), self.structure)


def open_node(value: Any) -> Node | None:
    """Return the node of `value` with its direct children, or None if `value` is a leaf."""
    if isinstance(value, RoundPipePackedData):
        return None
    # Everything below `value` counts as a leaf, so pytree flattens one level only.
    children, structure = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if len(children) == 1 and children[0] is value:
        return None
    # Mappings such as ModelOutput may be registered without names, but their keys are names.
    if isinstance(value, Mapping) and len(value) == len(children):
        names = [f"[{key!r}]" for key in value]
    else:
        try:
            keyed, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
            names = [pytree.keystr(path) for path, _ in keyed]
        except ValueError:  # the node's type is registered without names for its children
            names = [f"[{index}]" for index in range(len(children))]
    return Node(value, tuple(children), tuple(names), structure)


def leaves_with_path(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf of `value` in pytree's order; paths begin with `path`."""
    node = open_node(value)
    if node is None:
        yield path, value
        return
    for name, child in zip(node.names, node.children, strict=True):
        yield from leaves_with_path(child, path + name)


def children_as_spec(node: Node, spec: Any) -> tuple[Any, ...] | None:
    """Return the parts of `spec` in the order of the node's children, or None if the structures differ.

    A tuple or list matches every tuple or list of that length, including named tuples. A mapping matches every mapping
    with the same keys. All other nodes match by type. A registered dataclass hides fields that are None; the spec of a
    hidden field is None.
    """
    spec_node = open_node(spec)
    if spec_node is None:
        return None
    if isinstance(node.value, Mapping) and isinstance(spec, Mapping):
        return _children_by_name(node, spec_node)
    if isinstance(node.value, tuple | list) and isinstance(spec, tuple | list):
        return spec_node.children if len(spec_node.children) == len(node.children) else None
    return _children_by_field(node, spec_node) if type(node.value) is type(spec) else None


def children_if_alike(node: Node, other: Any) -> tuple[Any, ...] | None:
    """Return the children of `other` in the order of the node's children, or None if the structures differ.

    Mappings with the same keys are alike, in any order of keys.
    """
    other_node = open_node(other)
    if other_node is None or type(node.value) is not type(other):
        return None
    if isinstance(node.value, Mapping):
        return _children_by_name(node, other_node)
    return other_node.children if node.structure == other_node.structure else None


def _children_by_name(node: Node, other: Node) -> tuple[Any, ...] | None:
    """Return the children of `other` in the order of the node's names, or None if the names differ."""
    by_name = dict(zip(other.names, other.children, strict=True))
    if by_name.keys() != set(node.names):
        return None
    return tuple(by_name[name] for name in node.names)


def _children_by_field(node: Node, spec: Node) -> tuple[Any, ...] | None:
    """As `_children_by_name`; fields that the spec hides because they are None (named `.field`) may be missing."""
    by_name = dict(zip(spec.names, spec.children, strict=True))
    hidden = set(node.names) - by_name.keys()  # fields of the value that are None in the spec
    if not by_name.keys() <= set(node.names) or not all(name.startswith(".") for name in hidden):
        return None
    return tuple(by_name.get(name) for name in node.names)


def outline(value: Any) -> str:
    """Return the structure of a value for messages, in one line: `(Tensor[4, 3], {'mask': bool})`."""
    node = open_node(value)
    if node is None:
        return _outline_leaf(value)
    parts = [outline(child) for child in node.children]
    if isinstance(value, Mapping):
        inner = ", ".join(f"{name[1:-1]}: {part}" for name, part in zip(node.names, parts, strict=True))
        return "{" + inner + "}"
    if type(value) is tuple:
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"
    if type(value) is list:
        return "[" + ", ".join(parts) + "]"
    inner = ", ".join(f"{name.lstrip('.')}={part}" for name, part in zip(node.names, parts, strict=True))
    return f"{type(value).__name__}({inner})"


def _outline_leaf(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, RoundPipePackedData):
        return f"RoundPipePackedData of {len(value)}"
    return type(value).__name__


def shown(value: Any) -> str:
    """Return the repr of a value for messages, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
