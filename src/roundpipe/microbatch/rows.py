"""How many rows of the batch each microbatch has, told from how its values were cut.

Used by split. A loss that is a mean over rows is weighed by these numbers, so they are never guessed: values that
disagree, or that show no dimension along which they were cut, yield no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from roundpipe.microbatch.cut import Rule, RuledLeaf, even_sizes
from roundpipe.microbatch.packed import Arriving
from roundpipe.microbatch.tree import leaves_with_path

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
