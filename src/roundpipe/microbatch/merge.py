"""Merges the outputs of the microbatches: immediately, as packed data, or late.

`merge_outputs` reads the values, so they must have arrived. `pack_outputs` returns the values with their events and
does not wait. Knows no devices, and does not know how the inputs were split.

A `LateMerge` is a tensor that is merged from its microbatches at the first read. Inside the forward of an
AutoRoundPipe, each RoundPipe passes its outputs to the next RoundPipe as microbatches, so the next one need not wait.
The user's code between two RoundPipes expects tensors: it may add a skip connection, pool, or read a shape. The user's
code can use a LateMerge as a tensor, and the next RoundPipe can take the microbatches from it.

[Note: one path for gradients] A LateMerge is the output of `_Join`, whose inputs are the microbatches. The first torch
function that needs values gets `merged()`, an ordinary tensor that `_Materialise` computes from the LateMerge. All
later torch functions get the same tensor, so they see in-place writes and hooks. Operators that bypass
`__torch_function__`, such as in the apply() of an autograd function, reach `__torch_dispatch__` instead.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.errors import MergeError
from roundpipe.microbatch.specs import (
    ArrivalEvent,
    Node,
    RoundPipePackedData,
    check_merge_output,
    children_as_spec,
    children_if_alike,
    is_chunk,
    is_custom_function,
    is_reducer,
    is_replicate,
    noting_function,
    open_node,
    outline,
    shown,
)
from roundpipe.microbatch.split import LossShares, weighted

if TYPE_CHECKING:
    from roundpipe.microbatch.specs import Reducer

LeafMerge = Callable[[Sequence[Any], str], Any]  # takes a leaf's value in each microbatch and the leaf's path
ROOT = "output"  # the path of the whole output in messages
# Paths of further losses in the output, such as the aux_loss of a router. Like the loss, they are means over rows.
_OTHER_LOSS = re.compile(rf"{ROOT}\['\w+_loss'\]")


def merge_outputs(outputs: Sequence[Any], merge_output: Any = None, shares: LossShares = LossShares()) -> Any:
    """Merge the outputs of all microbatches, in order, as `merge_output` says. None and True mean automatic.

    shares: the factors of the losses in an automatic merge. The caller must have checked `merge_output`.
    """
    if not outputs:
        raise MergeError("there are no microbatch outputs to merge; a call has at least one microbatch")
    if is_custom_function(merge_output):
        with noting_function("merge_output", merge_output):
            return merge_output(list(outputs))
    if merge_output is False:  # the values have arrived already, so no value needs an event
        return pack_outputs(outputs, [None] * len(outputs))
    return _merge(outputs, None if merge_output is True else merge_output, ROOT, _AutomaticMerge(shares))


def pack_outputs(outputs: Sequence[Any], events: Sequence[ArrivalEvent | None]) -> Any:
    """Return the structure of one output with RoundPipePackedData leaves; `events` has one entry per microbatch."""
    assert len(outputs) == len(events) > 0, (len(outputs), len(events))
    return _merge_alike(outputs, ROOT, lambda values, _path: RoundPipePackedData(values, events))


class _AutomaticMerge:
    """Merges one leaf without a spec.

    Tensors are concatenated along dim 0, 0-dim tensors are averaged, losses are added with their shares, and all other
    values must be equal.
    """

    def __init__(self, shares: LossShares) -> None:
        self._shares = shares

    def __call__(self, values: Sequence[Any], path: str) -> Any:
        if not any(isinstance(value, torch.Tensor) for value in values):
            return _first_if_equal(values, path)
        _check_all_tensors(values, path)
        if any(value.dim() > 0 for value in values):
            return _concatenate(values, 0, path)
        if not all(value.is_floating_point() for value in values):  # integers, bools and complex numbers are no losses
            return _mean(values, path)
        if path == f"{ROOT}[{self._shares.place!r}]":  # the model's own loss
            shares = self._shares.of_merged(len(values))
        else:
            shares = self._shares.rows if _OTHER_LOSS.fullmatch(path) else None
        if shares is None and self._shares.averaged is not None and any(value.requires_grad for value in values):
            self._shares.averaged(path)
        return _mean(values, path) if shares is None else _sum(values, shares)


def merges_automatically(merge_output: Any, place: str | int) -> bool:
    """Whether `merge_output` leaves the number at `place` of the outputs, such as a loss, to the automatic merge."""
    if merge_output is None or merge_output is True or is_chunk(merge_output):
        return True
    if merge_output is False or is_replicate(merge_output) or is_reducer(merge_output):
        return False
    if isinstance(merge_output, Mapping):
        return merge_output.get(place) is None
    if isinstance(merge_output, tuple | list) and isinstance(place, int):
        return place < len(merge_output) and merge_output[place] is None
    return False


def _loss_places(merged: Any, shares: LossShares, merge_output: Any) -> list[int]:
    """The positions of losses among the parts of a merged output: those that were added with shares."""
    node = open_node(merged)
    if node is None:
        return []
    own = f"[{shares.place!r}]" if shares.merged is not None else None
    keys: Sequence[Any] = list(merged) if isinstance(merged, Mapping) else range(len(node.children))
    places = []
    for position, (name, child) in enumerate(zip(node.names, node.children, strict=True)):
        is_number = isinstance(child, torch.Tensor) and child.dim() == 0 and child.is_floating_point()
        is_other = shares.rows is not None and _OTHER_LOSS.fullmatch(ROOT + name) is not None
        if is_number and (name == own or is_other) and merges_automatically(merge_output, keys[position]):
            places.append(position)
    return places


def losses_in(merged: Any, shares: LossShares, merge_output: Any) -> list[torch.Tensor]:
    """The losses of the batch in a merged output: the model's own loss and further ones such as a router's.

    Not those that a spec or function of the user has merged.
    """
    node = open_node(merged)
    places = _loss_places(merged, shares, merge_output)
    return [] if node is None else [node.children[position] for position in places]


def with_losses(merged: Any, shares: LossShares, merge_output: Any, losses: Sequence[torch.Tensor]) -> Any:
    """A merged output with other values in place of those that `losses_in` returns."""
    node = open_node(merged)
    assert node is not None
    children = list(node.children)
    for position, loss in zip(_loss_places(merged, shares, merge_output), losses, strict=True):
        children[position] = loss
    return node.rebuild(children)


def _merge(values: Sequence[Any], spec: Any, path: str, automatic: LeafMerge) -> Any:
    """Merge one value per microbatch as `spec` says; `automatic` merges leaves without a spec."""
    if spec is None:
        return _merge_alike(values, path, automatic, joins_items=True)
    if is_replicate(spec):
        return _merge_alike(values, path, _first_if_equal)
    if is_chunk(spec):
        return _merge_chunked(values, spec.split_dim, path, automatic)
    if is_reducer(spec):
        return _reduce(values, spec, path)
    return _merge_with_tree(values, spec, path, automatic)


def _merge_with_tree(values: Sequence[Any], spec: Any, path: str, automatic: LeafMerge) -> Any:
    """Merge nested values with a spec tree of the same structure."""
    node = open_node(values[0])
    parts = None if node is None else children_as_spec(node, spec)
    if node is None or parts is None:
        check_merge_output(spec)  # if the spec is invalid, this raises a clearer message than the one below
        raise MergeError(
            f"the merge spec for {path} does not match it: the spec is {outline(spec)}, the output is "
            f"{outline(values[0])}. Give every entry its own Chunk(dim), Replicate or Reducer, or None for automatic"
        )
    columns = _columns(node, values, path)
    places = zip(columns, parts, node.names, strict=True)
    return node.rebuild([_merge(column, part, path + name, automatic) for column, part, name in places])


def _merge_alike(values: Sequence[Any], path: str, merge_leaf: LeafMerge, *, joins_items: bool = False) -> Any:
    """Walk the outputs of all microbatches in parallel and merge each leaf with `merge_leaf`.

    joins_items: lists of tensors of different lengths are joined instead of refused; see `_are_items`.
    """
    if joins_items and _are_items(values):
        return type(values[0])(item for value in values for item in value)
    node = open_node(values[0])
    if node is None:
        for index, value in enumerate(values):
            if open_node(value) is not None:
                raise _structure_error(values[0], value, index, path)
        return merge_leaf(values, path)
    places = zip(_columns(node, values, path), node.names, strict=True)
    return node.rebuild(
        [_merge_alike(column, path + name, merge_leaf, joins_items=joins_items) for column, name in places]
    )


def _are_items(values: Sequence[Any]) -> bool:
    """Whether the microbatches return lists with one tensor for each item of their part of the batch, such as an image.

    Shown by different lengths: a list with one entry per layer has the same length in all microbatches.
    """
    is_list = all(type(value) in (list, tuple) and type(value) is type(values[0]) for value in values)
    if not is_list or len({len(value) for value in values}) == 1:
        return False
    return all(isinstance(item, torch.Tensor) for value in values for item in value)


def _columns(node: Node, values: Sequence[Any], path: str) -> list[tuple[Any, ...]]:
    """Return, for each child of `node`, the child's values in all microbatches.

    node: the opened value of the first microbatch. values: the same place in the output of each microbatch.
    """
    rows = []
    for index, value in enumerate(values):
        row = children_if_alike(node, value)
        if row is None:
            raise _structure_error(node.value, value, index, path)
        rows.append(row)
    return list(zip(*rows, strict=True))


def _structure_error(first: Any, other: Any, index: int, path: str) -> MergeError:
    return MergeError(
        f"the microbatches return different structures at {path}: microbatch 0 {outline(first)}, microbatch {index} "
        f"{outline(other)}. Return the same structure every time, or merge with a function (merge_output=fn)"
    )


def _merge_chunked(values: Sequence[Any], dim: int, path: str, automatic: LeafMerge) -> Any:
    """Merge values whose spec is Chunk(dim).

    A single leaf must be a tensor. In a subtree, tensors with dimensions are concatenated along `dim`, and `automatic`
    merges all other leaves.
    """

    def merge_leaf(leaves: Sequence[Any], place: str) -> Any:
        has_dims = isinstance(leaves[0], torch.Tensor) and leaves[0].dim() > 0
        return _concatenate(leaves, dim, place) if has_dims else automatic(leaves, place)

    if open_node(values[0]) is not None:
        return _merge_alike(values, path, merge_leaf)
    if not isinstance(values[0], torch.Tensor):
        raise MergeError(f"Chunk({dim}) for {path}, which is no tensor but {type(values[0]).__name__}; use Replicate")
    return _merge_alike(values, path, lambda leaves, place: _concatenate(leaves, dim, place))


def _concatenate(values: Sequence[Any], dim: int, path: str) -> torch.Tensor:
    """Return the tensors concatenated along `dim`, or raise if a shape does not allow it."""
    _check_all_tensors(values, path)
    first: torch.Tensor = values[0]
    if not -first.dim() <= dim < first.dim():
        raise MergeError(
            f"{path} cannot be concatenated along dim {dim}: its shape {tuple(first.shape)} has {first.dim()} "
            "dimension(s); choose one of them, or use Reducer(init_value, fn)"
        )
    dim = dim % first.dim()  # make dim non-negative: a negative dim depends on the rank of the tensor
    # All dimensions but `dim` must be equal; None marks a tensor of a different rank.
    rests = {(*value.shape[:dim], *value.shape[dim + 1 :]) if value.dim() == first.dim() else None for value in values}
    if len(rests) > 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise MergeError(
            f"{path} cannot be concatenated along dim {dim}: the microbatches have shapes {shapes}. Pad them alike, "
            "choose another dimension with Chunk(dim), or merge with a function (merge_output=fn)"
        )
    return first if len(values) == 1 else torch.cat(list(values), dim=dim)  # a single value needs no copy


def _mean(values: Sequence[torch.Tensor], path: str) -> torch.Tensor:
    """Return the mean of 0-dim tensors; integers and bools cannot be averaged and must be equal."""
    if all(value.is_floating_point() or value.is_complex() for value in values):
        return torch.stack(list(values)).mean()
    first: torch.Tensor = _first_if_equal(values, path)
    return first


def _sum(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Return the weighted sum. Adds in the order of the microbatches, so that it is rounded as in forward_backward."""
    pairs = zip(values, shares, strict=True)
    return reduce(torch.add, [value if share == 1 else weighted(value, share) for value, share in pairs])


def _reduce(values: Sequence[Any], reducer: Reducer, path: str) -> Any:
    """Apply the reduce_fn of a Reducer to its init_value and the values, in the order of the microbatches."""
    # A reduce_fn may write in place, and the spec's init_value must stay unchanged for the next call.
    start = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, reducer.init_value)
    with noting_function(f"Reducer for {path}", reducer.reduce_fn):
        return reduce(reducer.reduce_fn, values, start)


def _check_all_tensors(values: Sequence[Any], path: str) -> None:
    """Raise if some microbatches returned a tensor and others did not."""
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) is not isinstance(values[0], torch.Tensor):
            raise _structure_error(values[0], value, index, path)


def _first_if_equal(values: Sequence[Any], path: str) -> Any:
    """Return the first value, or raise if the values are not all equal."""
    for index, value in enumerate(values):
        if not _equal(values[0], value):
            raise MergeError(
                f"{path} must be equal in all microbatches but is {shown(values[0])} in microbatch 0 and "
                f"{shown(value)} in microbatch {index}. Merge it with Reducer(init_value, fn) or a function "
                "(merge_output=fn)"
            )
    return values[0]


def _equal(left: Any, right: Any) -> bool:
    """Return whether two values are equal. NaN equals NaN. Supports values whose == returns a tensor or an array."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) != isinstance(right, torch.Tensor):
        return False
    if getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    return _all_true(lambda: left == right) or _all_true(lambda: (left == right) | ((left != left) & (right != right)))


def _all_true(compare: Callable[[], Any]) -> bool:
    """Return whether the result of `compare` is true for all elements; False if `compare` raises."""
    try:
        answer = compare()
        return bool(answer.all()) if hasattr(answer, "all") else bool(answer)
    except Exception:
        return False


_is_merging_late: ContextVar[bool] = ContextVar("roundpipe_is_merging_late", default=False)
_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_sparse")
_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "__hash__")
# Attributes and functions that need no values, so a LateMerge is not merged when they are used.
_WITHOUT_VALUES = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in ("numel", "is_floating_point", "is_complex")),
    ]
)


@contextlib.contextmanager
def merging_late() -> Iterator[None]:
    """While entered, RoundPipes that pack their outputs return LateMerge tensors to the user's code."""
    token = _is_merging_late.set(True)
    try:
        yield
    finally:
        _is_merging_late.reset(token)


def is_merging_late() -> bool:
    """Return whether this thread is inside `merging_late`."""
    return _is_merging_late.get()


def merge_late(outputs: Any) -> Any:
    """Return the outputs with a LateMerge in place of each packed leaf of tensors with rows.

    All other packed leaves are merged immediately.
    """
    return pytree.tree_map(_merge_leaf_late, outputs, is_leaf=lambda node: isinstance(node, RoundPipePackedData))


def merged_now(value: Any) -> Any:
    """Return a nested value with an ordinary tensor in place of each LateMerge."""
    return pytree.tree_map(lambda leaf: leaf.merged() if isinstance(leaf, LateMerge) else leaf, value)


def as_microbatches(value: Any, num_microbatch: int) -> Any:
    """Return a RoundPipe's inputs with packed data or an ordinary tensor in place of each LateMerge.

    A LateMerge is replaced by packed data if it was not read yet and has `num_microbatch` microbatches. Otherwise it is
    replaced by its merged tensor.
    """
    return pytree.tree_map(
        lambda leaf: leaf.microbatches(num_microbatch) if isinstance(leaf, LateMerge) else leaf, value
    )


def _merge_leaf_late(leaf: Any) -> Any:
    """Return a LateMerge of packed data, or the merged value if a late merge is not possible. Keeps other leaves."""
    if not isinstance(leaf, RoundPipePackedData):
        return leaf
    if not _have_rows(leaf):  # a LateMerge must know the shape of the merged tensor, so a late merge is not possible
        leaf.synchronize()
        return merge_outputs(list(leaf))
    late: LateMerge = _Join.apply(leaf, *leaf)
    return late


def _have_rows(values: Sequence[Any]) -> bool:
    """Return whether the values are ordinary tensors that can be concatenated along their first dimension."""
    if not all(type(value) is torch.Tensor and value.dim() and value.layout is torch.strided for value in values):
        return False
    return len({(value.shape[1:], value.dtype, value.device) for value in values}) == 1


class LateMerge(torch.Tensor):
    """A tensor that is merged from its microbatches at the first read. See [Note: one path for gradients]."""

    _packed: RoundPipePackedData | None  # the microbatches, until they are merged
    _merged: torch.Tensor | None  # the merged tensor with autograd history; None until `merged()` is called
    _whole: torch.Tensor | None  # the merged values without autograd history; None until `whole()` is called

    @staticmethod
    def __new__(cls, packed: RoundPipePackedData) -> LateMerge:
        # A wrapper subclass has a shape and no storage, so nothing is copied yet.
        first: torch.Tensor = packed[0]
        shape = (sum(len(value) for value in packed), *first.shape[1:])
        late: LateMerge = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        late._packed, late._merged, late._whole = packed, None, None
        return late

    def merged(self) -> torch.Tensor:
        """Return the merged tensor as an ordinary tensor; the first call waits for the microbatches."""
        if self._merged is None:
            # The result keeps the autograd history even if the first read is inside no_grad or inference_mode.
            with torch.inference_mode(False), torch.set_grad_enabled(True):
                self._merged = _Materialise.apply(self)
        assert self._merged is not None
        return self._merged

    def microbatches(self, num_microbatch: int) -> RoundPipePackedData | torch.Tensor:
        """Return the microbatches if there are `num_microbatch` and they are not merged yet; else the merged tensor."""
        packed = self._packed
        return packed if packed is not None and len(packed) == num_microbatch else self.merged()

    def whole(self) -> torch.Tensor:
        """Return the values of `merged()` without autograd history."""
        if self._whole is None:
            assert self._packed is not None
            self._packed.synchronize()
            with torch.inference_mode(False), torch.no_grad():
                self._whole = torch.cat(
                    list(self._packed)
                )  # cat copies even a single microbatch, so in-place writes do not change it
            self._packed = None
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function on the merged tensors. A function that needs no values does not cause the merge."""
        kwargs = kwargs or {}
        # After the merge, in-place operations may have changed the merged tensor, so attributes are read from it.
        # The hash is always that of the LateMerge, because the LateMerge may be a key in a dict of the user.
        own = args[0] if args and func in _WITHOUT_VALUES else None
        if isinstance(own, LateMerge) and (own._merged is None or func is torch.Tensor.__hash__):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*merged_now(args), **merged_now(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator that bypassed `__torch_function__` on the merged values.

        The values need no autograd history, because autograd has recorded the operator already.
        """
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.whole() if isinstance(leaf, LateMerge) else leaf, (args, kwargs or {})
        )
        return func(*args, **kwargs)


class _Join(torch.autograd.Function):
    """Joins microbatches to a LateMerge without computing anything; backward splits the gradient."""

    @staticmethod
    def forward(ctx: Any, packed: RoundPipePackedData, *values: torch.Tensor) -> LateMerge:
        ctx.sizes = [len(value) for value in values]
        return LateMerge(packed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *gradient.split(ctx.sizes))


class _Materialise(torch.autograd.Function):
    """Turns a LateMerge into the merged tensor; backward passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, late: LateMerge) -> torch.Tensor:
        return late.whole()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
