"""Splits the arguments and the label of one call into microbatches, each with its share of the batch's loss.

Each leaf of the call (a tensor or any other value) gets a rule: split, replicated, or already packed as microbatches.
Knows no devices and never waits for values that are still in transfer.

The number of microbatches, by the first line that applies:

    a split function      as many as it returns
    packed data           as many as it holds
    tensors to split      min(batch size, num_microbatch)
    none of these         num_microbatch; every value is replicated

[Note: loss shares] A share is the factor of a microbatch's loss in the loss of the batch. Shares are applied in three
places: to the model's own loss in the output that loss_fn gets, to the result of loss_fn, and when outputs are merged
automatically. All three use `weighted`, so the loss of the batch is the same number in each place. A spec or function
of the user that merges outputs gets losses as the model returns them.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, assert_never

import torch
from torch.utils import _pytree as pytree

from roundpipe.errors import ConfigError, SplitError
from roundpipe.microbatch.specs import (
    Arriving,
    RoundPipePackedData,
    check_split_input,
    check_split_label,
    children_as_spec,
    is_chunk,
    is_custom_function,
    is_leaf_spec,
    leaves_with_path,
    noting_function,
    open_node,
    outline,
)

Shares = tuple[float, ...]  # one factor per microbatch
OwnShares = tuple[float | None, ...]  # as Shares; None if the factor is needed but unknown


@dataclass(frozen=True)
class LossShares:
    """The factors of the losses of a call. Each tuple has one entry per microbatch.

    own: factors of the loss that the model computes itself, in what loss_fn gets; None if all are 1.
    returned: factors of the result of loss_fn; None if all are 1.
    rows: each microbatch's share of the batch's rows; None if unknown.
    covers_own: whether the model's own losses, multiplied by their factors, add up to the loss of the batch.
    merged: finds the factors of the model's own loss when outputs are merged, None if all are 1. Called only if there
        is such a loss, because finding them may run the model. None: the loss is averaged like any other number.
    place: the key or position of the model's own loss in the model's output.
    averaged: called with the place of a number that has a gradient and is averaged, so it may be a loss.
    """

    own: OwnShares | None = None
    returned: Shares | None = None
    rows: Shares | None = None
    covers_own: bool = False
    merged: Callable[[], OwnShares | None] | None = None
    place: str | int = "loss"
    averaged: Callable[[str], None] | None = None

    def apply_to_output(self, value: Any, microbatch: int) -> Any:
        """Return a model's output with its own loss, if it has one, multiplied by the microbatch's share `own`."""
        assert self.own is not None
        # A loss tensor with dimensions has one loss per row. It is not a mean, so no share is applied.
        loss = own_loss(value, self.place)
        node = open_node(value)
        if loss is None or node is None or loss.dim() > 0 or not loss.is_floating_point():
            return value
        share = _known(self.own)[microbatch]
        changed = [weighted(loss, share) if child is loss else child for child in node.children]
        return node.rebuild(changed)  # a value of the same type as the output, such as ModelOutput

    def of_merged(self, num_microbatch: int) -> Shares | None:
        """Return the factors of the model's own loss when outputs are merged; None if it is averaged."""
        return None if self.merged is None else _known(self.merged() or (1.0,) * num_microbatch)

    def of_returned(self, microbatch: int, *, is_own: bool) -> float | None:
        """Return the factor of the result of loss_fn; None if it needs no factor.

        is_own: whether loss_fn returned the loss in the model's output.
        """
        # If the shares cover the model's own loss, `apply_to_output` has applied the factor already.
        return None if self.returned is None or (is_own and self.covers_own) else self.returned[microbatch]


def _known(shares: OwnShares) -> Shares:
    """Return the shares; raise if one of them is unknown."""
    known = tuple(share for share in shares if share is not None)
    if len(known) < len(shares):
        raise ConfigError(
            "the model returns a `loss`, but the number of rows of each microbatch cannot be told from how this call "
            "was split, so the losses cannot be averaged. Set whole_batch_loss=False to add them up, or split the call "
            "with split_input specs such as Chunk(0)."
        )
    return known


def own_loss(value: Any, place: str | int = "loss") -> torch.Tensor | None:
    """Return the loss in the output of a model that computes its own loss; None if there is none."""
    if isinstance(place, str):
        loss = value.get(place) if isinstance(value, Mapping) else None
    else:
        loss = value[place] if isinstance(value, tuple) and len(value) > place else None
    return loss if isinstance(loss, torch.Tensor) else None


def weighted(loss: torch.Tensor, share: float) -> torch.Tensor:
    """Return a loss times its share. If the share is 0, the result is 0 without gradients, even for a loss of NaN."""
    counted: torch.Tensor = _Zero.apply(loss) if share == 0 else loss * share
    return counted


class _Zero(torch.autograd.Function):
    """Replaces a loss by 0. A mean over no labels is NaN, and NaN times 0 is NaN, in the loss and in its gradients."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


__all__ = ["CountedSplit", "MicrobatchInputs", "Rule", "RuledTree", "even_sizes", "split_call"]

logger = logging.getLogger("roundpipe")

_MAX_NAMED_LEAVES = 8  # a message names at most this many tensors
_logged_small_batches: set[tuple[int, int]] = set()  # (batch size, num_microbatch) of warnings already logged

# How many rows of the batch each microbatch has.
Rows = tuple[int, ...]


@dataclass(frozen=True)
class MicrobatchInputs:
    """The inputs of every microbatch of a call. The tuples have one entry per microbatch.

    A leaf that came from packed data and may still be in transfer is an `Arriving`.
    rows: how many rows of the batch each microbatch has; None if this cannot be determined.
    shares: the factors of the microbatches' losses, see [Note: loss shares].
    """

    args: tuple[tuple[Any, ...], ...]
    kwargs: tuple[dict[str, Any], ...]
    labels: tuple[Any, ...]
    rows: Rows | None = None
    shares: LossShares = field(default_factory=LossShares)

    def __len__(self) -> int:
        return len(self.args)

    def with_kwargs(self, more: Mapping[str, Any]) -> MicrobatchInputs:
        """Return these inputs with the same additional keyword arguments in every microbatch."""
        return replace(self, kwargs=tuple({**kwargs, **more} for kwargs in self.kwargs)) if more else self

    def with_each_kwargs(self, more: Sequence[Mapping[str, Any]]) -> MicrobatchInputs:
        """Return these inputs with additional keyword arguments: one mapping per microbatch."""
        pairs = zip(self.kwargs, more, strict=True)
        return replace(self, kwargs=tuple({**kwargs, **added} for kwargs, added in pairs))

    def alone(self, microbatch: int) -> MicrobatchInputs:
        """Return one microbatch alone."""
        only = slice(microbatch, microbatch + 1)
        return replace(self, args=self.args[only], kwargs=self.kwargs[only], labels=self.labels[only])


class CountedSplit(abc.ABC):
    """A split function that also knows how many rows of the batch each microbatch gets."""

    @abc.abstractmethod
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any: ...

    @abc.abstractmethod
    def batch_tensor(self, kwargs: Mapping[str, Any]) -> tuple[str, torch.Tensor] | None:
        """Return the name and value of an argument with one entry per row of the batch; None if there is none.

        The label of the call must have as many rows.
        """

    @abc.abstractmethod
    def rows(self, kwargs: Mapping[str, Any], count: int) -> Rows:
        """Return how many rows each microbatch has if the call is split into `count` microbatches."""


def split_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    label: Any,
    *,
    num_microbatch: int,
    split_input: Any = None,
    split_label: Any = None,
) -> MicrobatchInputs:
    """Split one call into microbatches as `split_input` and `split_label` say. None means automatic.

    A split function receives the number of microbatches that the rest of the call would yield. It may return a
    different number; the rest of the call is then split into that number. A call without a label has `label=None`.
    """
    if isinstance(num_microbatch, bool) or not isinstance(num_microbatch, int) or num_microbatch < 1:
        raise ConfigError(f"num_microbatch must be an int of at least 1, got {num_microbatch!r}")
    # The specs are checked only here; None, the default, is valid. All code below relies on valid specs.
    if split_input is not None:
        check_split_input(split_input)
    if split_label is not None:
        check_split_label(split_label)

    values = {"args": tuple(args), "kwargs": dict(kwargs), "label": label}
    # The parts of the call that are not split by a function of the user, each with its spec.
    specs: dict[str, Any] = {}
    if split_input is None or not is_custom_function(split_input):
        specs["args"], specs["kwargs"] = (None, None) if split_input is None else split_input
    if split_label is None or not is_custom_function(split_label):
        specs["label"] = split_label
    trees = {part: RuledTree.of(values[part], spec, part) for part, spec in specs.items()}
    leaves = [leaf for tree in trees.values() for leaf in tree.leaves]
    if isinstance(split_input, CountedSplit) and (found := split_input.batch_tensor(values["kwargs"])) is not None:
        # Stands for all inputs: it is compared with the label, and says how many microbatches the inputs can fill.
        leaves.insert(0, RuledLeaf(f"kwargs[{found[0]!r}]", found[1], Rule.AUTO))

    count = _natural_count(leaves, num_microbatch)
    # Split functions take precedence: the other parts of the call are split into the number that the functions return.
    by_function: dict[str, Any] = {}
    if len(specs) < len(values):
        by_function = _call_split_functions(values, split_input, split_label, count)
        count = _agreed_count(by_function)
        _check_can_follow(leaves, count)
    elif count < num_microbatch:
        _log_small_batch(leaves, count, num_microbatch)
    columns = by_function | {part: tree.split(count) for part, tree in trees.items()}
    return MicrobatchInputs(
        tuple(columns["args"]),
        tuple(columns["kwargs"]),
        tuple(columns["label"]),
        _rows(by_function, trees, count, split_input, values["kwargs"]),
    )


# ---- leaves and their rules ------------------------------------------------------------------------------------------


class Rule(Enum):
    """What each microbatch gets of a leaf."""

    CHUNK = "a piece, because the spec says so"
    AUTO = "a piece along dim 0; the whole tensor if it has one element there beside larger batches"
    REPLICATE = "the whole value"
    PACKED = "one element of packed data"


@dataclass(frozen=True)
class RuledLeaf:
    """One leaf of the call with its path (for messages) and its rule."""

    path: str
    value: Any
    rule: Rule
    dim: int = 0

    @property
    def size(self) -> int:
        """The number of elements along the dimension to split."""
        return int(self.value.shape[self.dim])

    def split(self, num_microbatch: int) -> Sequence[Any]:
        """Return the value of this leaf in each microbatch. Pieces are differentiable views of the tensor."""
        match self.rule:
            case Rule.PACKED:
                return self.value.as_microbatches()  # type: ignore[no-any-return]
            case Rule.REPLICATE:
                return [self.value] * num_microbatch
            case Rule.AUTO if self.size == 1:  # a tensor with one row is replicated
                return [self.value] * num_microbatch
            case Rule.CHUNK | Rule.AUTO:
                return torch.tensor_split(self.value, num_microbatch, dim=self.dim)
            case _:
                assert_never(self.rule)


@dataclass(frozen=True)
class RuledTree:
    """A nested value of the call, such as its args, with a rule for each leaf."""

    leaves: tuple[RuledLeaf, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any, spec: Any, root: str) -> RuledTree:
        """Return the tree of `value` with the rules that follow from `spec`. None means automatic.

        The caller must have checked the spec. root: the name of `value` in messages.
        """
        structure = pytree.tree_flatten(value, is_leaf=lambda part: isinstance(part, RoundPipePackedData))[1]
        return cls(tuple(_rule_leaves(value, spec, root)), structure)

    def split(self, num_microbatch: int) -> list[Any]:
        """Return one value of the same structure per microbatch."""
        columns = [leaf.split(num_microbatch) for leaf in self.leaves]
        return [
            pytree.tree_unflatten([column[index] for column in columns], self.structure)
            for index in range(num_microbatch)
        ]


def _rule_leaves(value: Any, spec: Any, path: str) -> list[RuledLeaf]:
    """Return the leaves of `value` in pytree's order, each with its rule."""
    if spec is None:
        return [_rule_leaf(leaf, place, automatic=True) for place, leaf in leaves_with_path(value, path)]
    if is_chunk(spec):
        return _rule_chunked(value, spec.split_dim, path)
    if is_leaf_spec(spec):  # Replicate: `check_split_input` has refused Reducer
        return [_rule_leaf(leaf, place, automatic=False) for place, leaf in leaves_with_path(value, path)]
    # The spec is a tree, so it must have the structure of the value.
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
    can_split = isinstance(value, torch.Tensor) and value.dim() > 0
    return RuledLeaf(path, value, Rule.AUTO if automatic and can_split else Rule.REPLICATE)


def _rule_chunked(value: Any, dim: int, path: str) -> list[RuledLeaf]:
    """Return the leaves of a value whose spec is Chunk(dim).

    A single leaf must be a tensor or packed data. In a subtree, tensors are split along `dim`, and other leaves are
    replicated.
    """
    if open_node(value) is None:
        return [_rule_chunked_leaf(value, dim, path)]
    leaves = [_rule_leaf(leaf, place, automatic=True) for place, leaf in leaves_with_path(value, path)]
    ruled = [_rule_chunked_leaf(leaf.value, dim, leaf.path) if leaf.rule is Rule.AUTO else leaf for leaf in leaves]
    if all(leaf.rule is Rule.REPLICATE for leaf in ruled):
        raise SplitError(f"Chunk({dim}) for {path}, but {outline(value)} holds no tensor to split; use Replicate")
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


# ---- the number of microbatches --------------------------------------------------------------------------------------


def _natural_count(leaves: Sequence[RuledLeaf], num_microbatch: int) -> int:
    """Return how many microbatches the leaves yield if the call asks for `num_microbatch`."""
    batch = _batch_size(leaves)
    packed = _packed_length(leaves)
    if packed is not None:
        # Every microbatch needs at least one element of each tensor.
        if batch is not None and batch < packed:
            raise SplitError(_too_small(leaves, f"packed data brings {packed} microbatches"))
        return packed
    if batch is None and any(leaf.rule is Rule.AUTO for leaf in leaves):
        batch = 1  # every tensor has one element along dim 0
    return num_microbatch if batch is None else min(batch, num_microbatch)


def _batch_size(leaves: Iterable[RuledLeaf]) -> int | None:
    """Return the batch size: the common size of all tensors to split, along the dimension to split.

    Returns None if no tensor determines the batch size. Automatic tensors of size 1 do not determine it, because they
    are replicated if the batch is larger.
    """
    counted = [leaf for leaf in leaves if leaf.rule is Rule.CHUNK or (leaf.rule is Rule.AUTO and leaf.size != 1)]
    if not counted:
        return None
    if len({leaf.size for leaf in counted}) > 1:
        raise SplitError(
            f"the tensors of this call differ in batch size: {_named(counted)}. Make them agree, or say how to split "
            "each with split_input and split_label (Chunk(dim) to split, Replicate to give it to every microbatch)"
        )
    if counted[0].size == 0:
        raise SplitError(f"there is nothing to split: {_named(counted)}. Skip empty batches before calling the model")
    return counted[0].size


def _packed_length(leaves: Iterable[RuledLeaf]) -> int | None:
    """Return the number of microbatches of the packed data in the call; None without packed data."""
    packed = [leaf for leaf in leaves if leaf.rule is Rule.PACKED]
    if not packed:
        return None
    if len({len(leaf.value) for leaf in packed}) > 1:
        raise SplitError(
            f"packed data with different numbers of microbatches in one call: {_named(packed)}. Produce them with the "
            "same num_microbatch, or synchronize and merge them first"
        )
    if not packed[0].value:
        raise SplitError(f"packed data without any microbatch: {_named(packed)}. Pass the output of a model call")
    return len(packed[0].value)


def _named(leaves: Sequence[RuledLeaf]) -> str:
    """Return a text for messages that lists the leaves, each with its size."""
    parts = [
        f"{leaf.path} has {len(leaf.value)} microbatches"
        if leaf.rule is Rule.PACKED
        else f"{leaf.path} of shape {tuple(leaf.value.shape)} has {leaf.size} along dim {leaf.dim}"
        for leaf in leaves[:_MAX_NAMED_LEAVES]
    ]
    if len(leaves) > _MAX_NAMED_LEAVES:
        parts.append(f"and {len(leaves) - _MAX_NAMED_LEAVES} more")
    return ", ".join(parts)


def _too_small(leaves: Sequence[RuledLeaf], reason: str) -> str:
    to_split = [leaf for leaf in leaves if leaf.rule in (Rule.CHUNK, Rule.AUTO)]
    return (
        f"{reason}, but the batch is too small to be split into that many: {_named(to_split)}. Use fewer microbatches, "
        "or say what to do with these tensors in split_input and split_label (Replicate gives one to every microbatch)"
    )


def _log_small_batch(leaves: Sequence[RuledLeaf], batch: int, num_microbatch: int) -> None:
    """Warn that a batch has fewer elements than num_microbatch, once per process and pair of numbers."""
    if _packed_length(leaves) is None and (batch, num_microbatch) not in _logged_small_batches:
        _logged_small_batches.add((batch, num_microbatch))
        logger.warning(
            "a batch of %d cannot fill num_microbatch=%d; running %d microbatch(es) of one element each, which leaves "
            "devices idle. Use larger batches or a smaller num_microbatch.",
            batch,
            num_microbatch,
            batch,
        )


# ---- split functions of the user -------------------------------------------------------------------------------------


def _call_split_functions(values: dict[str, Any], split_input: Any, split_label: Any, count: int) -> dict[str, Any]:
    """Call the split functions and return their results: one list per part of the call.

    The label's function receives the number of microbatches that the input's function returned.
    """
    columns: dict[str, list[Any]] = {}
    if is_custom_function(split_input):
        with noting_function("split_input", split_input):
            result = split_input(values["args"], values["kwargs"], count)
        columns["args"], columns["kwargs"] = _checked_inputs(result)
        count = len(columns["args"]) or count  # an empty list is refused later, by `_agreed_count`
    if is_custom_function(split_label):
        with noting_function("split_label", split_label):
            result = split_label(values["label"], count)
        if not isinstance(result, tuple | list):
            raise SplitError(
                f"split_label must return a list with one label per microbatch; it returned {outline(result)}"
            )
        columns["label"] = result.as_microbatches() if isinstance(result, RoundPipePackedData) else list(result)
    return columns


def _checked_inputs(result: Any) -> tuple[list[Any], list[Any]]:
    """Return the lists of args and kwargs from a split_input function, or raise if they are malformed."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if not is_pair or not all(isinstance(column, tuple | list) for column in result):
        raise SplitError(
            f"split_input must return (args_list, kwargs_list), two lists with one entry per microbatch; it returned "
            f"{outline(result)}"
        )
    args_list, kwargs_list = result
    for index, args in enumerate(args_list):
        if not isinstance(args, tuple | list):
            raise SplitError(
                f"split_input returned args_list[{index}] = {outline(args)}; each entry must be the tuple of "
                "positional arguments of one microbatch, such as (tensor,)"
            )
    for index, kwargs in enumerate(kwargs_list):
        if not isinstance(kwargs, Mapping):
            raise SplitError(
                f"split_input returned kwargs_list[{index}] = {outline(kwargs)}; each entry must be the dict of "
                "keyword arguments of one microbatch, {} for none"
            )
    return [tuple(args) for args in args_list], [dict(kwargs) for kwargs in kwargs_list]


def _agreed_count(columns: Mapping[str, Sequence[Any]]) -> int:
    """Return the number of microbatches that the split functions returned, or raise if it differs between parts."""
    counts = {len(column) for column in columns.values()}
    if len(counts) > 1:
        told = ", ".join(
            f"{part}: {len(columns[part]) if part in columns else 'as many as the others'}"
            for part in ("args", "kwargs", "label")
        )
        raise SplitError(f"the split functions disagree on the number of microbatches ({told}); return equally many")
    (count,) = counts
    if count == 0:
        raise SplitError(f"the split of {', '.join(columns)} returned no microbatch at all; return at least one")
    return count


def _check_can_follow(leaves: Sequence[RuledLeaf], count: int) -> None:
    """Raise unless the rest of the call can be split into as many microbatches as the split function returned."""
    packed = _packed_length(leaves)
    if packed not in (None, count):
        raise SplitError(
            f"the split function returned {count} microbatches but packed data in the same call brings {packed}; "
            "return that many"
        )
    # Tensors with fewer than `count` elements yield fewer microbatches.
    if packed is None and _natural_count(leaves, count) < count:
        raise SplitError(_too_small(leaves, f"the split function returned {count} microbatches"))


# ---- rows per microbatch ---------------------------------------------------------------------------------------------


def even_sizes(size: int, count: int) -> tuple[int, ...]:
    """Return the sizes of the pieces that `torch.tensor_split` makes of `size` elements."""
    return tuple(size // count + (index < size % count) for index in range(count))


def _rows(
    by_function: Mapping[str, Sequence[Any]],
    trees: Mapping[str, RuledTree],
    count: int,
    split_input: Any,
    kwargs: Mapping[str, Any],
) -> Rows | None:
    """Return how many rows each microbatch has, judging by its label or, failing that, by its inputs.

    Losses that are means over rows are weighted by these numbers, so the numbers are never guessed. If the values of
    the call disagree, or if no value was split, the result is None.
    """
    # The label comes first: losses are means over the label's rows, and the rows of inputs may be something else, such
    # as patches of images.
    for parts in (("label",), ("args", "kwargs")):
        if isinstance(split_input, CountedSplit) and "kwargs" in parts:
            return split_input.rows(kwargs, count)
        found: set[Rows] = set()
        for part in parts:
            found |= _rows_of_leaves(trees[part].leaves, count) if part in trees else _rows_of_pieces(by_function[part])
        if len(found) == 1:
            return found.pop()
    return None


def _rows_of_leaves(leaves: Iterable[RuledLeaf], count: int) -> set[Rows]:
    """Return the row counts of all split and packed leaves, as a set. A row count has one entry per microbatch."""
    found = set()
    for leaf in leaves:
        # An automatic tensor of size 1 is replicated if there are several microbatches. It then shows no rows.
        if leaf.rule is Rule.CHUNK or (leaf.rule is Rule.AUTO and (leaf.size != 1 or count == 1)):
            found.add(even_sizes(leaf.size, count))
        elif leaf.rule is Rule.PACKED:
            found |= _rows_of_tensors(list(leaf.value))
    return found


def _rows_of_pieces(pieces: Sequence[Any]) -> set[Rows]:
    """Return the row counts of all tensors that a split function returned, as a set."""
    by_path: dict[str, list[Any]] = {}
    for piece in pieces:
        for path, leaf in leaves_with_path(piece, ""):
            by_path.setdefault(path, []).append(leaf)
    return {rows for values in by_path.values() if len(values) == len(pieces) for rows in _rows_of_tensors(values)}


def _rows_of_tensors(values: Sequence[Any]) -> set[Rows]:
    """Return a set with the row counts of one leaf, whose value in each microbatch is in `values`.

    The set is empty if the leaf is not a tensor, or if all microbatches have the same tensor.
    """
    tensors = [value.value if isinstance(value, Arriving) else value for value in values]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() > 0 for tensor in tensors):
        return set()
    if len(tensors) > 1 and all(tensor is tensors[0] for tensor in tensors):  # a replicated tensor shows no rows
        return set()
    return {tuple(len(tensor) for tensor in tensors)}
