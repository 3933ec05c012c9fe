"""A tensor that is put together from its microbatches only when something other than a RoundPipe reads it.

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
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._pytree import tree_map

from roundpipe.microbatch.merge import merge_outputs
from roundpipe.microbatch.packed import RoundPipePackedData

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
