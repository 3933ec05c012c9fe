"""The optimizer's copy of a parameter, whose gradient comes down in low precision and is made a tensor on demand.

Made by Masters, handed to users by `optim_parameters()`. Inside a step its gradient may still be on its way: whoever
asks for `.grad` waits for it and gets it in the copy's own precision; an optimizer that can use it as it lies asks for
`low_gradient()`. Knows where its gradient comes from only by GradientSource.

[Note: values without memory] A float32 copy of a bfloat16 weight begins as a SplitValue and has no memory of its own.
The first operation that needs its values, by whomever, gives it memory for good; only questions about shape and type do
not. The one-pass optimizer works on the split value under `lock`, so that nobody takes it away meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from roundpipe.store.split_value import SplitValue
from roundpipe.waiting import process_rlock

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested", "_version", "retains_grad"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "storage_offset", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "requires_grad_", "__hash__", "__len__"),
)
_FUNCTIONS = ("zeros_like", "empty_like", "ones_like", "full_like", "numel", "is_floating_point", "is_complex")
_ABOUT_SHAPE_AND_TYPE = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in (*_ATTRIBUTES, "grad")),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
    ]
)


@dataclasses.dataclass(frozen=True)
class LowGradient:
    """A gradient in host memory, in the precision it was computed in, and what it is still to be multiplied by."""

    tensor: torch.Tensor
    factors: tuple[float, ...] = ()

    def materialised(self, dtype: torch.dtype) -> torch.Tensor:
        value = self.tensor.to(dtype, copy=True)
        for factor in self.factors:
            value.mul_(factor)
        return value


class GradientSource(Protocol):
    """Where one step's gradient of one copy comes from."""

    def is_usable(self) -> bool:
        """Whether the calling thread carries the step out."""

    def get(self) -> torch.Tensor | None:
        """Wait for it; None if there is none. The memory stays valid until `release`."""

    def release(self) -> None:
        """It is not needed any more."""


class OptimizerCopy(nn.Parameter):
    """A parameter like any other, until it has a gradient source."""

    source: GradientSource | None = None  # of the step that is being carried out
    is_pending = False  # whether its gradient is still the source's
    _factors: tuple[float, ...] = ()
    _seen_version = 0
    _data_was_handed_out = False
    split_value: SplitValue | None = None  # the value, while there is no memory for it
    lock = process_rlock()  # of each split copy its own
    when_training: Callable[[], None] | None = None  # called once, when its model begins to train

    @classmethod
    def of_weight(cls, weight: torch.Tensor, dtype: torch.dtype) -> OptimizerCopy:
        """A copy of a dense weight; without memory of its own where that can be."""
        is_split = weight.dtype is torch.bfloat16 and dtype is torch.float32 and weight.numel() > 0
        memory = torch.empty_like(weight, dtype=dtype, memory_format=torch.preserve_format)
        if is_split:
            memory.untyped_storage().resize_(0)
        else:
            memory.copy_(weight)
        copy = cls(memory)
        if is_split:
            copy.split_value, copy.lock = SplitValue(weight), process_rlock()
        copy.forget_touches()
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ABOUT_SHAPE_AND_TYPE:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, OptimizerCopy):
                    value.take_memory()
                    value.mark_touched()  # not every kernel that writes leaves a trace in version counters
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain parameter it looks like: steps and locks are this process's."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)

    def take_memory(self) -> None:
        """Be a tensor like any other."""
        with self.lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.split_value is not None:
                value = self.split_value.joined()
                self.untyped_storage().resize_(value.nbytes)
                _DATA.__get__(self).copy_(value)
                self.split_value = None

    def write_weight(self, to: torch.Tensor) -> None:
        """Let `to` be the value, rounded."""
        with self.lock, torch.no_grad():
            if self.split_value is None:
                to.copy_(self)
            elif to is not self.split_value.weight:
                to.copy_(self.split_value.weight)
                self.split_value.weight = to

    def lies_in(self, memory: torch.Tensor) -> bool:
        """Whether `memory` holds a part of the value."""
        return self.split_value is not None and self.split_value.weight is memory

    def weights_swapped(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """The contents of two memories have changed places."""
        with self.lock:
            if self.split_value is not None:
                self.split_value.weight = other if self.split_value.weight is one else one

    def follow_weight(self, weight: torch.Tensor) -> None:
        """The user has written into the weight: that is the value now."""
        with self.lock, torch.no_grad():
            if self.split_value is None:
                self.copy_(weight)
            else:
                self.split_value.become(weight)

    # What the step does.

    def begin_step(self, source: GradientSource) -> None:
        self.source, self.is_pending, self._factors = source, True, ()

    def end_step(self) -> None:
        """A gradient that nobody has cleared stays, as torch has it: the next step's is added to it."""
        if self.is_pending:
            self._materialise()
        self.source = None

    # What an optimizer does that works in one pass.

    @property
    def has_only_low_gradient(self) -> bool:
        """Whether its gradient lies in host memory as it came, and nothing from an earlier step is to be added to."""
        return self.is_pending and _GRAD.__get__(self) is None

    def memory_of_step(self) -> list[torch.Tensor]:
        """What it will need beside its weight once it is stepped."""
        with self.lock:
            return [] if self.split_value is None else [self.split_value.low]

    def values(self) -> torch.Tensor:
        """Its memory as a plain tensor, for whoever needs no trace of what is written."""
        self.take_memory()
        with torch._C.DisableTorchFunctionSubclass():
            plain: torch.Tensor = _DATA.__get__(self)
            return plain

    def low_gradient(self) -> LowGradient | None:
        """The gradient as it lies in host memory; None if there is none, or if `.grad` is a tensor by now."""
        if not self.has_only_low_gradient:
            return None
        assert self.source is not None
        tensor = self.source.get()
        return None if tensor is None else LowGradient(tensor, self._factors)

    def scale_gradient(self, factor: float) -> None:
        """As `grad.mul_(factor)`, without making it a tensor."""
        self._factors += (factor,)

    # Whether somebody else may have written into it.

    def was_touched(self) -> bool:
        return self._data_was_handed_out or self._version != self._seen_version

    def forget_touches(self) -> None:
        self._data_was_handed_out, self._seen_version = False, self._version

    def mark_touched(self) -> None:
        self._data_was_handed_out = True

    @property
    def data(self) -> torch.Tensor:
        self._data_was_handed_out = True  # writes through it leave no trace
        self.take_memory()
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._data_was_handed_out = True
        self.take_memory()
        _DATA.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        if self.is_pending and self.source is not None and self.source.is_usable():
            self._materialise()
        grad: torch.Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._let_go()
        _GRAD.__set__(self, value)

    def _materialise(self) -> None:
        assert self.source is not None
        tensor, own = self.source.get(), _GRAD.__get__(self)
        if tensor is not None:
            with torch.no_grad():
                value = LowGradient(tensor, self._factors).materialised(self.dtype)
                _GRAD.__set__(self, value if own is None else own.add_(value))
        self._let_go()

    def _let_go(self) -> None:
        was_pending, self.is_pending, self._factors = self.is_pending, False, ()
        if was_pending and self.source is not None:
            self.source.release()
