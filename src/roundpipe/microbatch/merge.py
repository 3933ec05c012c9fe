"""Puts the outputs of the microbatches together, or packs them leaf by leaf.

Called by api once per call, after the pipeline. `merge_outputs` reads the values, so they must have arrived;
`pack_outputs` hands them on with their events. Knows nothing of devices and of how the inputs were split.

A tensor that is put together from its microbatches only when something other than a RoundPipe reads it.

Inside the forward of an AutoRoundPipe the elements of a list hand their outputs on as microbatches, so that the next
element need not wait. The code between the elements is the user's and expects tensors: it may add a skip connection,
pool, or look at a shape. So the outputs are tensors to that code and microbatches to the next RoundPipe.

[Note: one path for gradients] A LateMerge is the output of `_Join`, whose inputs are the microbatches. The first
torch function that needs values gets `merged()`, an ordinary tensor computed from the LateMerge by `_Materialise`; from
then on the LateMerge stands for that tensor everywhere, so that writes in place and hooks are seen by all later uses.
Code that torch functions do not see, such as the apply() of an autograd function, reaches `__torch_dispatch__` instead.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map

from roundpipe.errors import MergeError
from roundpipe.microbatch.loss_shares import LossShares, weighted
from roundpipe.microbatch.packed import ArrivalEvent, RoundPipePackedData
from roundpipe.microbatch.specs import (
    check_merge_output,
    is_chunk,
    is_custom_function,
    is_reducer,
    is_replicate,
    noting_function,
)
from roundpipe.microbatch.tree import Node, children_as_spec, children_if_alike, open_node, outline, shown

if TYPE_CHECKING:
    from roundpipe.microbatch.specs import Reducer

LeafMerge = Callable[[Sequence[Any], str], Any]
ROOT = "output"
_OTHER_LOSS = re.compile(rf"{ROOT}\['\w+_loss'\]")  # such as the aux_loss of a router, a mean like the model's loss


def merge_outputs(outputs: Sequence[Any], merge_output: Any = None, shares: LossShares = LossShares()) -> Any:
    """One output from those of all microbatches, in order, as `merge_output` says (None, True: automatic).

    `shares`: how much the losses of the microbatches count where they are merged automatically.
    """
    check_merge_output(merge_output)
    if not outputs:
        raise MergeError("there are no microbatch outputs to merge; a call has at least one microbatch")
    if is_custom_function(merge_output):
        with noting_function("merge_output", merge_output):
            return merge_output(list(outputs))
    if merge_output is False:
        return pack_outputs(outputs, [None] * len(outputs))
    return _merge(outputs, None if merge_output is True else merge_output, ROOT, _AutomaticMerge(shares))


def pack_outputs(outputs: Sequence[Any], events: Sequence[ArrivalEvent | None]) -> Any:
    """The structure of one output with RoundPipePackedData leaves; `events` has one entry per microbatch."""
    assert len(outputs) == len(events) > 0, (len(outputs), len(events))
    return _merge_alike(outputs, ROOT, lambda values, _path: RoundPipePackedData(values, events))


class _AutomaticMerge:
    """Tensors concatenated along dim 0, 0-dim tensors averaged, losses as their shares say, anything else equal."""

    def __init__(self, shares: LossShares) -> None:
        self._shares = shares

    def __call__(self, values: Sequence[Any], path: str) -> Any:
        if not any(isinstance(value, torch.Tensor) for value in values):
            return _first_if_equal(values, path)
        _check_all_tensors(values, path)
        if any(value.dim() > 0 for value in values):
            return _concatenate(values, 0, path)
        if not all(value.is_floating_point() for value in values):
            return _mean(values, path)
        if path == f"{ROOT}[{self._shares.place!r}]":  # the model's own loss
            shares = self._shares.merged
        else:
            shares = self._shares.rows if _OTHER_LOSS.fullmatch(path) else None
        return _mean(values, path) if shares is None else _sum(values, shares)


def _merge(values: Sequence[Any], spec: Any, path: str, automatic: LeafMerge) -> Any:
    if spec is None:
        return _merge_alike(values, path, automatic)
    if is_replicate(spec):
        return _merge_alike(values, path, _first_if_equal)
    if is_chunk(spec):
        return _merge_chunked(values, spec.split_dim, path, automatic)
    if is_reducer(spec):
        return _reduce(values, spec, path)
    return _merge_with_tree(values, spec, path, automatic)


def _merge_with_tree(values: Sequence[Any], spec: Any, path: str, automatic: LeafMerge) -> Any:
    node = open_node(values[0])
    parts = None if node is None else children_as_spec(node, spec)
    if node is None or parts is None:
        raise MergeError(
            f"the merge spec for {path} does not match it: the spec is {outline(spec)}, the output is "
            f"{outline(values[0])}. Give every entry its own Chunk(dim), Replicate or Reducer, or None for automatic"
        )
    columns = _columns(node, values, path)
    places = zip(columns, parts, node.names, strict=True)
    return node.rebuild([_merge(column, part, path + name, automatic) for column, part, name in places])


def _merge_alike(values: Sequence[Any], path: str, merge_leaf: LeafMerge) -> Any:
    """Walk the outputs side by side and merge each leaf with `merge_leaf`."""
    node = open_node(values[0])
    if node is None:
        for index, value in enumerate(values):
            if open_node(value) is not None:
                raise _structure_error(values[0], value, index, path)
        return merge_leaf(values, path)
    places = zip(_columns(node, values, path), node.names, strict=True)
    return node.rebuild([_merge_alike(column, path + name, merge_leaf) for column, name in places])


def _columns(node: Node, values: Sequence[Any], path: str) -> list[tuple[Any, ...]]:
    """For each child of `node`, the first of `values`, its values in all microbatches."""
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
    """Chunk on a leaf needs tensors; over a whole subtree it concatenates those with a dimension."""
    if open_node(values[0]) is not None:
        return _merge_alike(values, path, lambda leaves, place: _merge_covered_leaf(leaves, dim, place, automatic))
    if not isinstance(values[0], torch.Tensor):
        raise MergeError(f"Chunk({dim}) for {path}, which is no tensor but {type(values[0]).__name__}; use Replicate")
    return _merge_alike(values, path, lambda leaves, place: _concatenate(leaves, dim, place))


def _merge_covered_leaf(values: Sequence[Any], dim: int, path: str, automatic: LeafMerge) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].dim() > 0:
        return _concatenate(values, dim, path)
    return automatic(values, path)


def _concatenate(values: Sequence[Any], dim: int, path: str) -> torch.Tensor:
    _check_all_tensors(values, path)
    first: torch.Tensor = values[0]
    if not -first.dim() <= dim < first.dim():
        raise MergeError(
            f"{path} cannot be concatenated along dim {dim}: its shape {tuple(first.shape)} has {first.dim()} "
            "dimension(s); choose one of them, or use Reducer(init_value, fn)"
        )
    dim = dim % first.dim()
    rests = {(*value.shape[:dim], *value.shape[dim + 1 :]) if value.dim() == first.dim() else None for value in values}
    if len(rests) > 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise MergeError(
            f"{path} cannot be concatenated along dim {dim}: the microbatches have shapes {shapes}. Pad them alike, "
            "choose another dimension with Chunk(dim), or merge with a function (merge_output=fn)"
        )
    return first if len(values) == 1 else torch.cat(list(values), dim=dim)


def _mean(values: Sequence[torch.Tensor], path: str) -> torch.Tensor:
    if all(value.is_floating_point() or value.is_complex() for value in values):
        return torch.stack(list(values)).mean()
    first: torch.Tensor = _first_if_equal(values, path)
    return first


def _sum(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """In the order of the microbatches, as the losses of forward_backward are added."""
    pairs = zip(values, shares, strict=True)
    return reduce(torch.add, [value if share == 1 else weighted(value, share) for value, share in pairs])


def _reduce(values: Sequence[Any], reducer: Reducer, path: str) -> Any:
    # A reduce_fn may add in place; the marker's own start value must serve the next call unchanged.
    start = pytree.tree_map(_cloned, reducer.init_value)
    with noting_function(f"Reducer for {path}", reducer.reduce_fn):
        return reduce(reducer.reduce_fn, values, start)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _check_all_tensors(values: Sequence[Any], path: str) -> None:
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) is not isinstance(values[0], torch.Tensor):
            raise _structure_error(values[0], value, index, path)


def _first_if_equal(values: Sequence[Any], path: str) -> Any:
    for index, value in enumerate(values):
        if not _equal(values[0], value):
            raise MergeError(
                f"{path} must be equal in all microbatches but is {shown(values[0])} in microbatch 0 and "
                f"{shown(value)} in microbatch {index}. Merge it with Reducer(init_value, fn) or a function "
                "(merge_output=fn)"
            )
    return values[0]


def _equal(left: Any, right: Any) -> bool:
    """Equality that also takes NaN for itself and objects whose == answers with a tensor or array."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) != isinstance(right, torch.Tensor):
        return False
    if getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    return _all_true(lambda: left == right) or _all_true(lambda: (left == right) | ((left != left) & (right != right)))


def _all_true(compare: Callable[[], Any]) -> bool:
    """Whether a comparison holds everywhere; objects that cannot be compared are not equal."""
    try:
        answer = compare()
        return bool(answer.all()) if hasattr(answer, "all") else bool(answer)
    except Exception:
        return False


_is_merging_late: ContextVar[bool] = ContextVar("roundpipe_is_merging_late", default=False)
_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_sparse")
_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "__hash__")
_ABOUT_SHAPE_AND_TYPE = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in ("numel", "is_floating_point", "is_complex")),
    ]
)


@contextlib.contextmanager
def merging_late() -> Iterator[None]:
    """Around code of the user's that calls RoundPipes and expects tensors from them."""
    token = _is_merging_late.set(True)
    try:
        yield
    finally:
        _is_merging_late.reset(token)


def is_merging_late() -> bool:
    return _is_merging_late.get()


def merge_late(outputs: Any) -> Any:
    """Outputs with packed leaves as the user's code expects them: tensors with rows are merged late, the rest now."""
    return tree_map(_later, outputs, is_leaf=lambda node: isinstance(node, RoundPipePackedData))


def merged_now(value: Any) -> Any:
    """A value with an ordinary tensor for each LateMerge in it."""
    return tree_map(lambda leaf: leaf.merged() if isinstance(leaf, LateMerge) else leaf, value)


def as_microbatches(value: Any, num_microbatch: int) -> Any:
    """A RoundPipe's inputs, with packed data in place of each LateMerge that is unread and cut as wanted."""

    def opened(leaf: Any) -> Any:
        return leaf.microbatches(num_microbatch) if isinstance(leaf, LateMerge) else leaf

    return tree_map(opened, value)


def _later(leaf: Any) -> Any:
    if not isinstance(leaf, RoundPipePackedData):
        return leaf
    if not _have_rows(leaf):
        leaf.synchronize()
        return merge_outputs(list(leaf))
    late: LateMerge = _Join.apply(leaf, *leaf)
    return late


def _have_rows(values: Sequence[Any]) -> bool:
    """Whether the values are ordinary tensors that can be put together along their first dimension."""
    if not all(type(value) is torch.Tensor and value.dim() and value.layout is torch.strided for value in values):
        return False
    return len({(value.shape[1:], value.dtype, value.device) for value in values}) == 1


class LateMerge(torch.Tensor):
    _packed: RoundPipePackedData | None  # the microbatches, until they are merged
    _merged: torch.Tensor | None
    _whole: torch.Tensor | None  # what `_merged` shows, without history

    @staticmethod
    def __new__(cls, packed: RoundPipePackedData) -> LateMerge:
        first: torch.Tensor = packed[0]
        shape = (sum(len(value) for value in packed), *first.shape[1:])
        late: LateMerge = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        late._packed, late._merged, late._whole = packed, None, None
        return late

    def merged(self) -> torch.Tensor:
        """The ordinary tensor that this one stands for; waits for the microbatches the first time."""
        if self._merged is None:
            # With the history this tensor has, whatever mode it is first looked at in.
            with torch.inference_mode(False), torch.set_grad_enabled(True):
                self._merged = _Materialise.apply(self)
        assert self._merged is not None
        return self._merged

    def microbatches(self, num_microbatch: int) -> RoundPipePackedData | torch.Tensor:
        """The microbatches, if their number is right and the merged tensor is unread; else the merged tensor."""
        packed = self._packed
        return packed if packed is not None and len(packed) == num_microbatch else self.merged()

    def whole(self) -> torch.Tensor:
        """What `merged()` holds, without history."""
        if self._whole is None:
            assert self._packed is not None
            self._packed.synchronize()
            with torch.inference_mode(False), torch.no_grad():
                self._whole = torch.cat(list(self._packed))  # a copy also of a single microbatch
            self._packed = None
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args and func in _ABOUT_SHAPE_AND_TYPE else None
        if isinstance(own, LateMerge) and (own._merged is None or func is torch.Tensor.__hash__):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*merged_now(args), **merged_now(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """For operators that were reached past `__torch_function__`; autograd has noted them by now."""

        def plain(leaf: Any) -> Any:
            return leaf.whole() if isinstance(leaf, LateMerge) else leaf

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class _Join(torch.autograd.Function):
    """From microbatches to the LateMerge of them; nothing is computed."""

    @staticmethod
    def forward(ctx: Any, packed: RoundPipePackedData, *values: torch.Tensor) -> LateMerge:
        ctx.sizes = [len(value) for value in values]
        return LateMerge(packed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *gradient.split(ctx.sizes))


class _Materialise(torch.autograd.Function):
    """From a LateMerge to the tensor it stands for."""

    @staticmethod
    def forward(ctx: Any, late: LateMerge) -> torch.Tensor:
        return late.whole()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
