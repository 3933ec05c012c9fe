"""One value with a rule on each of its leaves: cut, replicated, or packed as microbatches already.

Used by split only. Knows one value and its spec; what args, kwargs and label are to each other is split's business,
and so are the user's own functions.

How many rows of the batch each microbatch has, told from how its values were cut.

Used by split. A loss that is a mean over rows is weighed by these numbers, so they are never guessed: values that
disagree, or that show no dimension along which they were cut, yield no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never

import torch
from torch.utils import _pytree as pytree

from roundpipe.errors import SplitError
from roundpipe.microbatch.packed import Arriving, RoundPipePackedData
from roundpipe.microbatch.specs import is_chunk, is_marker
from roundpipe.microbatch.tree import children_as_spec, flatten_structure, leaves_with_path, open_node, outline

NUM_NAMED_LEAVES = 8  # a message names at most this many tensors


class Rule(Enum):
    """What becomes of a leaf."""

    CHUNK = "cut, because the spec says so"
    AUTO = "cut along dim 0, or replicated when it has one element there beside larger batches"
    REPLICATE = "given to every microbatch as it is"
    PACKED = "its elements are the microbatches"


@dataclass(frozen=True)
class RuledLeaf:
    """One leaf of the call, where it is and what becomes of it."""

    path: str
    value: Any
    rule: Rule
    dim: int = 0

    @property
    def size(self) -> int:
        """Elements along the dimension to cut."""
        return int(self.value.shape[self.dim])

    def cut(self, num_microbatch: int) -> Sequence[Any]:
        """The value of this leaf in each microbatch. Cuts are differentiable views of the tensor."""
        match self.rule:
            case Rule.PACKED:
                return self.value.as_microbatches()  # type: ignore[no-any-return]
            case Rule.REPLICATE:
                return [self.value] * num_microbatch
            case Rule.AUTO if self.size == 1:
                return [self.value] * num_microbatch
            case Rule.CHUNK | Rule.AUTO:
                return torch.tensor_split(self.value, num_microbatch, dim=self.dim)
            case _:
                assert_never(self.rule)


@dataclass(frozen=True)
class RuledTree:
    """A value of the call with its rules."""

    leaves: tuple[RuledLeaf, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any, spec: Any, root: str) -> RuledTree:
        """Lay `spec` (checked before; None: automatic) over `value`; `root` is its name in messages."""
        return cls(tuple(_rule_leaves(value, spec, root)), flatten_structure(value))

    def cut(self, num_microbatch: int) -> list[Any]:
        """One value of the same structure per microbatch."""
        columns = [leaf.cut(num_microbatch) for leaf in self.leaves]
        return [
            pytree.tree_unflatten([column[index] for column in columns], self.structure)
            for index in range(num_microbatch)
        ]


def even_sizes(size: int, count: int) -> tuple[int, ...]:
    """The sizes that `torch.tensor_split` makes of `size` elements."""
    return tuple(size // count + (index < size % count) for index in range(count))


def batch_size(leaves: Iterable[RuledLeaf]) -> int | None:
    """Elements along the cut dimension that all cut tensors share; None when no tensor fixes it.

    Automatically cut tensors of one element fix nothing: beside a larger batch they are replicated.
    """
    counted = [leaf for leaf in leaves if leaf.rule is Rule.CHUNK or (leaf.rule is Rule.AUTO and leaf.size != 1)]
    if not counted:
        return None
    if len({leaf.size for leaf in counted}) > 1:
        raise SplitError(
            f"the tensors of this call differ in batch size: {named(counted)}. Make them agree, or say how to cut "
            "each with split_input and split_label (Chunk(dim) to cut, Replicate to give it to every microbatch)"
        )
    if counted[0].size == 0:
        raise SplitError(f"there is nothing to split: {named(counted)}. Skip empty batches before calling the model")
    return counted[0].size


def packed_length(leaves: Iterable[RuledLeaf]) -> int | None:
    """The number of microbatches that packed data brings along; None without packed data."""
    packed = [leaf for leaf in leaves if leaf.rule is Rule.PACKED]
    if not packed:
        return None
    if len({len(leaf.value) for leaf in packed}) > 1:
        raise SplitError(
            f"packed data with different numbers of microbatches in one call: {named(packed)}. Produce them with the "
            "same num_microbatch, or synchronize and merge them first"
        )
    if not packed[0].value:
        raise SplitError(f"packed data without any microbatch: {named(packed)}. Pass the output of a model call")
    return len(packed[0].value)


def named(leaves: Sequence[RuledLeaf]) -> str:
    """The leaves in a message, each with what makes it differ."""
    parts = [_name(leaf) for leaf in leaves[:NUM_NAMED_LEAVES]]
    if len(leaves) > NUM_NAMED_LEAVES:
        parts.append(f"and {len(leaves) - NUM_NAMED_LEAVES} more")
    return ", ".join(parts)


def _name(leaf: RuledLeaf) -> str:
    if leaf.rule is Rule.PACKED:
        return f"{leaf.path} has {len(leaf.value)} microbatches"
    return f"{leaf.path} of shape {tuple(leaf.value.shape)} has {leaf.size} along dim {leaf.dim}"


def _rule_leaves(value: Any, spec: Any, path: str) -> list[RuledLeaf]:
    if is_chunk(spec):
        return _rule_chunked(value, spec.split_dim, path)
    if spec is None or is_marker(spec):
        return [_rule_leaf(leaf, place, automatic=spec is None) for place, leaf in leaves_with_path(value, path)]
    node = open_node(value)
    parts = None if node is None else children_as_spec(node, spec)
    if node is None or parts is None:
        raise SplitError(
            f"the spec for {path} does not match it: the spec is {outline(spec)}, the value is {outline(value)}. Give "
            "every entry its own Chunk(dim) or Replicate, or None for automatic"
        )
    children = zip(node.children, parts, node.names, strict=True)
    return [leaf for child, part, name in children for leaf in _rule_leaves(child, part, path + name)]


def _rule_leaf(value: Any, path: str, *, automatic: bool) -> RuledLeaf:
    if isinstance(value, RoundPipePackedData):
        return RuledLeaf(path, value, Rule.PACKED)
    can_cut = isinstance(value, torch.Tensor) and value.dim() > 0
    return RuledLeaf(path, value, Rule.AUTO if automatic and can_cut else Rule.REPLICATE)


def _rule_chunked(value: Any, dim: int, path: str) -> list[RuledLeaf]:
    """Chunk on a leaf needs a tensor; over a whole subtree it cuts what has a dimension and replicates the rest."""
    if open_node(value) is None:
        return [_rule_chunked_leaf(value, dim, path)]
    leaves = [_rule_leaf(leaf, place, automatic=True) for place, leaf in leaves_with_path(value, path)]
    ruled = [_rule_chunked_leaf(leaf.value, dim, leaf.path) if leaf.rule is Rule.AUTO else leaf for leaf in leaves]
    if all(leaf.rule is Rule.REPLICATE for leaf in ruled):
        raise SplitError(f"Chunk({dim}) for {path}, but {outline(value)} holds no tensor to cut; use Replicate")
    return ruled


def _rule_chunked_leaf(value: Any, dim: int, path: str) -> RuledLeaf:
    if isinstance(value, RoundPipePackedData):
        return RuledLeaf(path, value, Rule.PACKED)
    if not isinstance(value, torch.Tensor):
        raise SplitError(f"Chunk({dim}) for {path}, which is no tensor but {type(value).__name__}; use Replicate")
    if not -value.dim() <= dim < value.dim():
        raise SplitError(
            f"Chunk({dim}) for {path}, but its shape {tuple(value.shape)} has {value.dim()} dimension(s); choose one "
            "of them or use Replicate"
        )
    return RuledLeaf(path, value, Rule.CHUNK, dim)


Rows = tuple[int, ...]


def rows_of_leaves(leaves: Iterable[RuledLeaf], count: int) -> set[Rows]:
    """What each cut or packed leaf says: its sizes along the dimension that was cut, one per microbatch."""
    found = set()
    for leaf in leaves:
        if leaf.rule is Rule.CHUNK or (leaf.rule is Rule.AUTO and (leaf.size != 1 or count == 1)):
            found.add(even_sizes(leaf.size, count))
        elif leaf.rule is Rule.PACKED:
            found |= _sizes(list(leaf.value))
    return found


def rows_of_pieces(pieces: Sequence[Any]) -> set[Rows]:
    """What the tensors say that a split function returned, one value per microbatch: their sizes along dim 0."""
    by_path: dict[str, list[Any]] = {}
    for piece in pieces:
        for path, leaf in leaves_with_path(piece, ""):
            by_path.setdefault(path, []).append(leaf)
    return {rows for values in by_path.values() if len(values) == len(pieces) for rows in _sizes(values)}


def _sizes(values: Sequence[Any]) -> set[Rows]:
    """The sizes of one leaf in all microbatches; none if it is no tensor, or the same one everywhere."""
    tensors = [value.value if isinstance(value, Arriving) else value for value in values]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() > 0 for tensor in tensors):
        return set()
    if len(tensors) > 1 and all(tensor is tensors[0] for tensor in tensors):
        return set()
    return {tuple(len(tensor) for tensor in tensors)}
