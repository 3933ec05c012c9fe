"""Cuts the arguments and the label of one call into microbatches.

Called by api once per call, before anything is scheduled. Joins what cut knows of each value with the user's own
split functions and settles on one number of microbatches. Knows nothing of devices; waits for nothing.

Who settles the number, the first that applies:

    a split function      as many as it returns
    packed data           as many as it holds
    tensors to cut        min(batch size, num_microbatch)
    none of these         num_microbatch, everything replicated
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from roundpipe.errors import ConfigError, SplitError
from roundpipe.microbatch.cut import (
    Rule,
    RuledLeaf,
    RuledTree,
    batch_size,
    named,
    packed_length,
    rows_of_leaves,
    rows_of_pieces,
)
from roundpipe.microbatch.hf_inputs import ModelInputSplit
from roundpipe.microbatch.loss_shares import LossShares
from roundpipe.microbatch.packed import Arriving, RoundPipePackedData
from roundpipe.microbatch.specs import check_split_input, check_split_label, is_custom_function, noting_function
from roundpipe.microbatch.tree import outline

__all__ = ["Arriving", "MicrobatchInputs", "split_call"]

logger = logging.getLogger("roundpipe")

_logged_small_batches: set[tuple[int, int]] = set()


@dataclass(frozen=True)
class MicrobatchInputs:
    """What each microbatch is called with; the tuples have one entry per microbatch.

    A leaf that came from packed data and may still be on its way is an `Arriving`. `rows`: how many rows of the batch
    each microbatch has, see `microbatch.rows`; None where that cannot be told. `shares`: how much the
    loss of each counts.
    """

    args: tuple[tuple[Any, ...], ...]
    kwargs: tuple[dict[str, Any], ...]
    labels: tuple[Any, ...]
    rows: tuple[int, ...] | None = None
    shares: LossShares = field(default_factory=LossShares)

    def __len__(self) -> int:
        return len(self.args)

    def first_numel(self) -> int:
        """How many numbers go into the first microbatch, labels not counted."""
        leaves = (getattr(leaf, "value", leaf) for leaf in tree_leaves((self.args[:1], self.kwargs[:1])))
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))

    def with_kwargs(self, more: Mapping[str, Any]) -> MicrobatchInputs:
        """Each microbatch with further keyword arguments."""
        return self.with_each_kwargs([more] * len(self))

    def with_each_kwargs(self, more: Sequence[Mapping[str, Any]]) -> MicrobatchInputs:
        """Each microbatch with the further keyword arguments that are given for it."""
        pairs = zip(self.kwargs, more, strict=True)
        return replace(self, kwargs=tuple({**kwargs, **added} for kwargs, added in pairs))

    def first(self) -> MicrobatchInputs:
        """The first microbatch alone."""
        return replace(self, args=self.args[:1], kwargs=self.kwargs[:1], labels=self.labels[:1])


def split_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    label: Any,
    *,
    num_microbatch: int,
    split_input: Any = None,
    split_label: Any = None,
) -> MicrobatchInputs:
    """Cut one call into microbatches, as `split_input` and `split_label` say.

    A split function is asked for the number that the other, automatic or spec'd part of the call would yield; it may
    return another, and that part then follows. A call without a label has `label=None` and no `split_label`.
    """
    _check_num_microbatch(num_microbatch)
    check_split_input(split_input)
    check_split_label(split_label)

    values = {"args": tuple(args), "kwargs": dict(kwargs), "label": label}
    specs = _specs(split_input, split_label)
    trees = {part: RuledTree.of(values[part], spec, part) for part, spec in specs.items()}
    leaves = [leaf for tree in trees.values() for leaf in tree.leaves]

    count = _natural_count(leaves, num_microbatch)
    columns = _call_split_functions(values, split_input, split_label, count)
    if columns:
        count = _agreed_count(columns)
        _check_can_follow(leaves, count)
    elif count < num_microbatch and packed_length(leaves) is None:
        _log_small_batch(count, num_microbatch)
    by_function = dict(columns)
    columns |= {part: tree.cut(count) for part, tree in trees.items()}
    return MicrobatchInputs(
        tuple(columns["args"]),
        tuple(columns["kwargs"]),
        tuple(columns["label"]),
        _rows(by_function, trees, count, split_input, values["kwargs"]),
    )


def _rows(
    by_function: Mapping[str, Sequence[Any]],
    trees: Mapping[str, RuledTree],
    count: int,
    split_input: Any,
    kwargs: Mapping[str, Any],
) -> tuple[int, ...] | None:
    """The rows of each microbatch: those of its label, or without a label that tells, those of its inputs."""
    for parts in (("label",), ("args", "kwargs")):
        if isinstance(split_input, ModelInputSplit) and "kwargs" in parts:
            return split_input.rows(kwargs, count)
        leaves = [leaf for part in parts if part in trees for leaf in trees[part].leaves]
        found = rows_of_leaves(leaves, count)
        found |= {rows for part in parts if part in by_function for rows in rows_of_pieces(by_function[part])}
        if len(found) == 1:
            return found.pop()
    return None


def _check_num_microbatch(num_microbatch: int) -> None:
    if isinstance(num_microbatch, bool) or not isinstance(num_microbatch, int) or num_microbatch < 1:
        raise ConfigError(f"num_microbatch must be an int of at least 1, got {num_microbatch!r}")


def _specs(split_input: Any, split_label: Any) -> dict[str, Any]:
    """The spec of each part of the call that no function splits; None is automatic."""
    specs: dict[str, Any] = {}
    if not is_custom_function(split_input):
        specs["args"], specs["kwargs"] = (None, None) if split_input is None else split_input
    if not is_custom_function(split_label):
        specs["label"] = split_label
    return specs


def _natural_count(leaves: Sequence[RuledLeaf], num_microbatch: int) -> int:
    """The number of microbatches the leaves themselves yield when `num_microbatch` are asked for."""
    batch = batch_size(leaves)
    packed = packed_length(leaves)
    if packed is not None:
        if batch is not None and batch < packed:
            raise SplitError(_too_small(leaves, f"packed data brings {packed} microbatches"))
        return packed
    if batch is None and any(leaf.rule is Rule.AUTO for leaf in leaves):
        batch = 1
    return num_microbatch if batch is None else min(batch, num_microbatch)


def _call_split_functions(values: dict[str, Any], split_input: Any, split_label: Any, count: int) -> dict[str, Any]:
    """What the user's functions return, one list per part of the call; empty without functions.

    The label's function is asked for as many microbatches as the input's function returned.
    """
    columns: dict[str, list[Any]] = {}
    if is_custom_function(split_input):
        with noting_function("split_input", split_input):
            result = split_input(values["args"], values["kwargs"], count)
        columns["args"], columns["kwargs"] = _checked_inputs(result)
        count = len(columns["args"]) or count
    if is_custom_function(split_label):
        with noting_function("split_label", split_label):
            result = split_label(values["label"], count)
        columns["label"] = _checked_labels(result)
    return columns


def _checked_inputs(result: Any) -> tuple[list[Any], list[Any]]:
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


def _checked_labels(result: Any) -> list[Any]:
    if isinstance(result, RoundPipePackedData):
        return result.as_microbatches()
    if not isinstance(result, tuple | list):
        raise SplitError(f"split_label must return a list with one label per microbatch; it returned {outline(result)}")
    return list(result)


def _agreed_count(columns: Mapping[str, Sequence[Any]]) -> int:
    counts = {len(column) for column in columns.values()}
    if len(counts) > 1:
        told = ", ".join(f"{part}: {_told_count(columns, part)}" for part in ("args", "kwargs", "label"))
        raise SplitError(f"the split functions disagree on the number of microbatches ({told}); return equally many")
    (count,) = counts
    if count == 0:
        raise SplitError(f"the split of {', '.join(columns)} returned no microbatch at all; return at least one")
    return count


def _told_count(columns: Mapping[str, Sequence[Any]], part: str) -> str:
    return str(len(columns[part])) if part in columns else "as many as the others"


def _check_can_follow(leaves: Sequence[RuledLeaf], count: int) -> None:
    """The part of the call without a function must yield as many microbatches as the function returned."""
    packed = packed_length(leaves)
    if packed not in (None, count):
        raise SplitError(
            f"the split function returned {count} microbatches but packed data in the same call brings {packed}; "
            "return that many"
        )
    if packed is None and _natural_count(leaves, count) < count:
        raise SplitError(_too_small(leaves, f"the split function returned {count} microbatches"))


def _too_small(leaves: Sequence[RuledLeaf], reason: str) -> str:
    cut = [leaf for leaf in leaves if leaf.rule in (Rule.CHUNK, Rule.AUTO)]
    return (
        f"{reason}, but the batch is too small to be cut into that many: {named(cut)}. Use fewer microbatches, or say "
        "what to do with these tensors in split_input and split_label (Replicate gives one to every microbatch)"
    )


def _log_small_batch(batch: int, num_microbatch: int) -> None:
    """Say once per process and pair of numbers that a batch has fewer elements than microbatches were asked for."""
    if (batch, num_microbatch) not in _logged_small_batches:
        _logged_small_batches.add((batch, num_microbatch))
        logger.warning(
            "a batch of %d cannot fill num_microbatch=%d; running %d microbatch(es) of one element each, which leaves "
            "devices idle. Use larger batches or a smaller num_microbatch.",
            batch,
            num_microbatch,
            batch,
        )
