"""The optimizer's copy of a parameter, whose gradient comes down in low precision and is made a tensor on demand.

Made by Masters, handed to users by `optim_parameters()`. Inside a step its gradient may still be on its way: whoever
asks for `.grad` waits for it and gets it in the copy's own precision; an optimizer that can use it as it lies asks for
`low_gradient()`. Knows where its gradient comes from only by GradientSource.

[Note: values without memory] A float32 copy of a bfloat16 weight begins as a SplitValue and has no memory of its own.
An operation that needs its values gives it memory; only questions about shape and type do not. The one-pass optimizer
works on the split value under `lock`, so that no other thread joins it meanwhile.

[Note: giving memory back] A copy becomes a SplitValue again when no operation runs on it, no other tensor or array
shares its memory, and its weight still is its value rounded, so that no bit is lost. Splitting and joining cost time:
a copy that is looked at in every step, as by an optimizer of torch, keeps its memory. A look is an operation that needs
values; an interval reaches from the end of one step to the end of the next. Memory goes back
- between steps and when a step begins, if the copy was looked at since the last one, unless that has become a habit;
- when a step ends, if the copy was not looked at in this interval.
An autograd graph refers to the copy itself, not to its memory. After an operation with gradients the memory therefore
goes back at the end of a later interval only; backward through a graph that old raises, as after an update in place.

A float32 value kept as the bfloat16 number it rounds to, and the 16 bits which that one lacks.

What an optimizer's copy is while nobody looks at it: devices need the bfloat16 weight anyway, so the copy costs half of
what it would. Joining gives back every bit; the C source of the one-pass kernel explains how, and does the same.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from roundpipe.monitor import process_rlock
from roundpipe.store.host_memory import HostBuffer, host_zeros_like
from roundpipe.store.layout import dense_stride

_HALF = 0x8000
_CHUNK = 1 << 20  # elements that are converted at a time, so that intermediate results stay small


class SplitValue:
    def __init__(self, weight: torch.Tensor) -> None:
        """The value of `weight` itself; memory for the lower bits is taken when they are first needed."""
        self.weight = weight
        self._low: torch.Tensor | None = None
        self._ties: torch.Tensor | None = None

    @property
    def low(self) -> torch.Tensor:
        """The lower 16 bits, in the order in which the weight lies in memory."""
        if self._low is None:
            self._low = HostBuffer(2 * self.weight.numel(), None).tensor.view(torch.int16)
        return self._low

    @property
    def low_bytes_to_come(self) -> int:
        return 2 * self.weight.numel() if self._low is None else 0

    @property
    def ties(self) -> torch.Tensor:
        """A bit for each number; it counts where the lower bits are just half of the upper ones' last."""
        if self._ties is None:
            self._ties = HostBuffer(-(-self.weight.numel() // 8), None).tensor
        return self._ties

    def become(self, weight: torch.Tensor) -> None:
        """The value is that of `weight` from now on."""
        self.weight, self._low, self._ties = weight, None, None

    def joined(self) -> torch.Tensor:
        """The value as a tensor of its own, with the strides of the weight."""
        made = torch.empty_like(self.weight, dtype=torch.float32, memory_format=torch.preserve_format)
        self.join_into(made)
        return made

    def join_into(self, to: torch.Tensor) -> None:
        """Write the value into a float32 tensor of the weight's shape and strides."""
        if self._low is None:
            to.copy_(self.weight)
            return
        weight, bits = _flat(self.weight).view(torch.int16), _flat(to).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            lower = self._low[piece].to(torch.int32) & 0xFFFF
            went_up, is_tie = lower > _HALF, lower == _HALF
            if is_tie.any():
                went_up |= is_tie & _unpacked(self.ties[start // 8 : (start + _CHUNK) // 8])[: len(lower)]
            upper = (weight[piece].to(torch.int32) & 0xFFFF) - went_up.to(torch.int32)
            torch.bitwise_or(upper << 16, lower, out=bits[piece])

    def take(self, values: torch.Tensor) -> bool:
        """Be the value of `values`, float32 with the weight's shape and strides; reads the weight, never writes it.

        Returns False, with nothing changed, unless joining would give back every bit: the weight must be `values`
        rounded, and no NaN among them.
        """
        other = SplitValue(self.weight)
        weight, bits = _flat(self.weight).view(torch.int16), _flat(values).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            lower = other.low[piece].copy_(bits[piece])  # the lower half, as a signed number
            rise = weight[piece] - (bits[piece] >> 16).to(torch.int16)
            is_tie, went_up = lower == -_HALF, rise == 1
            if not torch.where(is_tie, went_up | (rise == 0), rise == (lower < 0)).all():
                return False
            if (is_tie & went_up).any():
                other.ties[start // 8 : (start + _CHUNK) // 8] = _packed(is_tie & went_up)
        self._low, self._ties = other._low, other._ties
        return True


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The bits of bytes, lowest first."""
    return ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """Bytes whose bits, lowest first, are `flags`."""
    whole = torch.zeros(-(-len(flags) // 8) * 8, dtype=torch.uint8)
    whole[: len(flags)] = flags
    return (whole.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,))


_HABIT = 8  # looks in a row after which a copy keeps its memory
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


class GradientOwner(Protocol):
    """The model whose gradients an optimizer's copies get outside of steps."""

    def gradients_wanted(self) -> None:
        """Give all copies a source for what was gathered since the last step, unless a step has done so."""


class CopyHome(Protocol):
    """The store that made a copy."""

    gradient_owner: GradientOwner | None


class OptimizerCopy(nn.Parameter):
    """A parameter like any other, until it has a gradient source."""

    home: Callable[[], CopyHome | None] | None = None  # weak, so that an optimizer does not keep a model alive
    source: GradientSource | None = None  # of the latest step, while its gradient may be needed
    is_pending = False  # whether its gradient is still the source's
    _is_viewed = False  # whether the source is what was gathered so far, looked at outside a step
    _is_shown = False  # while viewed: whether `.grad` is a tensor made from the source's gradient
    _factors: tuple[float, ...] = ()
    _seen_version = 0
    _data_was_handed_out = False
    split_value: SplitValue | None = None  # the value, while there is no memory for it
    lock = process_rlock()  # of each copy that can be split its own
    _weight: torch.Tensor | None = None  # of a copy that can be split: the weight that was last made of its value
    _uses: list[None]  # one entry for each operation that runs on the memory of a copy that can be split
    _was_looked_at = False  # in this interval
    _looks_in_a_row = 0  # intervals before this one, without a gap, in which it was looked at
    _may_be_in_graph = False  # an operation with gradients was applied to it in this interval
    _address_is_known = False  # outside of Python's sight: its memory stays where it is
    when_training: Callable[[], None] | None = None  # called once, when its model begins to train

    @classmethod
    def of_weight(cls, weight: torch.Tensor, dtype: torch.dtype) -> OptimizerCopy:
        """A copy of a dense weight; without memory of its own where that can be."""
        is_split = weight.dtype is torch.bfloat16 and dtype is torch.float32 and weight.numel() > 0
        is_split = is_split and dense_stride(weight) == tuple(weight.stride())
        memory = torch.empty_like(weight, dtype=dtype, memory_format=torch.preserve_format)
        copy = cls(_without_memory(memory) if is_split else memory.copy_(weight))
        if is_split:
            copy.split_value, copy.lock = SplitValue(weight), process_rlock()
            copy._weight, copy._uses = weight, []
        copy.forget_touches()
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT_SHAPE_AND_TYPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        copies = [value for value in tree_leaves((args, kwargs)) if isinstance(value, OptimizerCopy)]
        used: list[OptimizerCopy] = []
        try:
            for copy in copies:
                copy._begin_use()
                used.append(copy)
                copy.mark_touched()  # not every kernel that writes leaves a trace in version counters
                copy._address_is_known |= func is torch.Tensor.data_ptr
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if torch.is_grad_enabled() and _has_graph(result):
                for copy in copies:
                    copy._may_be_in_graph = True
            return result
        finally:
            for copy in used:
                copy._end_use()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain parameter it looks like: steps and locks are this process's."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)

    # Memory for its value. See [Note: giving memory back].

    def take_memory(self) -> None:
        """Be a tensor like any other."""
        with self.lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.split_value is not None:
                value = host_zeros_like(self)
                self.split_value.join_into(value)
                _DATA.__set__(self, value)
                self.split_value = None

    def rest_between_steps(self) -> None:
        """Give memory back that was taken since the last step, unless that is a habit."""
        if self._was_looked_at and self._looks_in_a_row < _HABIT and not self._may_be_in_graph:
            self._give_memory_back()

    def rest_after_step(self) -> None:
        if not self._was_looked_at:
            self._give_memory_back()
        self._looks_in_a_row = self._looks_in_a_row + 1 if self._was_looked_at else 0
        self._was_looked_at = self._may_be_in_graph = False

    def _begin_use(self) -> None:
        """Have memory until `_end_use`. What the operation returns shares the memory, or does not need it."""
        if self._weight is not None:
            with self.lock:
                self.take_memory()
                self._uses.append(None)
                self._was_looked_at = True

    def _end_use(self) -> None:
        if self._weight is not None:
            self._uses.pop()

    def _give_memory_back(self) -> None:
        if self._weight is None or self.split_value is not None or not self.lock.acquire(blocking=False):
            return
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                if self.split_value is None and not self._uses and self._could_be_split(self._weight):
                    value = SplitValue(self._weight)
                    if value.take(_DATA.__get__(self)):
                        self._become_split(value)
        finally:
            self.lock.release()

    def _could_be_split(self, weight: torch.Tensor) -> bool:
        fits = self.dtype is torch.float32 and self.shape == weight.shape and self.stride() == weight.stride()
        return fits and not self._address_is_known and _memory_users(self) == _memory_users_of_one_tensor()

    def _become_split(self, value: SplitValue) -> None:
        was_touched = self.was_touched()
        self.split_value = value
        _DATA.__set__(self, _without_memory(self))
        torch.autograd.graph.increment_version(self)  # a graph that needs the value must not read what is not there
        if not was_touched:
            self.forget_touches()

    # The weight.

    def write_weight(self, to: torch.Tensor) -> None:
        """Let `to` be the value, rounded."""
        with self.lock, torch.no_grad():
            if self.split_value is None:
                to.copy_(self.values())
            elif to is not self.split_value.weight:
                to.copy_(self.split_value.weight)
            self.weight_was_written(to)

    def weight_was_written(self, weight: torch.Tensor) -> None:
        """`weight` is the value, rounded."""
        with self.lock:
            if self._weight is not None:
                self._weight = weight
            if self.split_value is not None:
                self.split_value.weight = weight

    def lies_in(self, memory: torch.Tensor) -> bool:
        """Whether `memory` holds a part of the value."""
        return self.split_value is not None and self.split_value.weight is memory

    def weights_swapped(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """The contents of two memories have changed places."""
        with self.lock:
            if self._weight is not None:
                self.weight_was_written(other if self._weight is one else one)

    def follow_weight(self, weight: torch.Tensor) -> None:
        """The user has written into the weight: that is the value now."""
        with self.lock, torch.no_grad():
            if self.split_value is None:
                self.copy_(weight)
            else:
                self.split_value.become(weight)
            self.weight_was_written(weight)

    # What the step does.

    def begin_step(self, source: GradientSource) -> None:
        """From now on the gradient is that of `source`; one that was not cleared since an earlier step is added to.

        What the user did to the gradient before the step, while it was viewed, counts in the step.
        """
        if self._is_shown:
            source.release()  # the tensor in `.grad` stands for it
        elif self.is_pending and not self._is_viewed:
            self._materialise()
        is_pending, factors = not self._is_shown, self._factors if self._is_viewed else ()
        self._is_viewed = self._is_shown = False
        self.source, self.is_pending, self._factors = source, is_pending, factors

    def end_step(self, *, keeps_source: bool = False) -> None:
        """A gradient that was not cleared stays, as torch has it: the next step's is added to it.

        `keeps_source`: it stays as it came and is made a tensor only if that is asked for.
        """
        if keeps_source:
            return
        if self.is_pending:
            self._materialise()
        self.source = None

    # What the user does outside steps.

    def begin_view(self, gathered: GradientSource) -> None:
        """Let `.grad` show what was gathered since the last step, until the next call into the model."""
        if self.is_pending:  # of an earlier step, and not cleared since: it is added to
            self._materialise()
        self.source, self.is_pending, self._is_viewed = gathered, True, True

    def end_view(self) -> None:
        """What is gathered stays so unless the user has changed it; then it is this copy's own gradient."""
        if not self._is_viewed:
            return
        if self._is_shown and self._shows_source_gradient():
            _GRAD.__set__(self, None)
            self._is_shown = False
        if self.is_pending and self._factors:
            self._materialise()
        if self.is_pending:
            self.is_pending = False
        else:
            self._let_go()
        self.source, self._is_viewed = None, False

    def _shows_source_gradient(self) -> bool:
        """Whether `.grad` still has the value it was made with: writes leave no certain trace in version counters."""
        assert self.source is not None
        shown, tensor = _GRAD.__get__(self), self.source.get()
        if shown is None or tensor is None:
            return False
        return torch.equal(shown, LowGradient(tensor).materialised(self.dtype))

    def drop_gradient(self) -> None:
        """As `grad = None`, for the model itself, which has seen to what was gathered."""
        self._let_go()
        _GRAD.__set__(self, None)

    # What an optimizer does that works in one pass.

    @property
    def has_only_low_gradient(self) -> bool:
        """Whether its gradient lies in host memory as it came, and nothing from an earlier step is to be added to."""
        self._see_gradients()
        return self._is_low()

    def _is_low(self) -> bool:
        return self.is_pending and _GRAD.__get__(self) is None

    def memory_of_step(self) -> list[torch.Tensor]:
        """What it will need beside its weight once it is stepped."""
        with self.lock:
            return [] if self.split_value is None else [self.split_value.low]

    def bytes_to_come(self, *, in_one_pass: bool) -> int:
        """Memory that its value will take beyond what it has, once it is stepped."""
        with self.lock:
            if self.split_value is None:
                return 0
            return self.split_value.low_bytes_to_come if in_one_pass else self.nbytes

    def values(self) -> torch.Tensor:
        """Its memory as a plain tensor, for whoever needs no trace of what is written. Does not count as a look."""
        with self.lock, torch._C.DisableTorchFunctionSubclass():
            self.take_memory()
            plain: torch.Tensor = _DATA.__get__(self)
            return plain

    def low_gradient(self) -> LowGradient | None:
        """The gradient as it lies in host memory; None if there is none, or if `.grad` is a tensor by now."""
        if not self._is_low():
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
        self._begin_use()
        try:
            data: torch.Tensor = _DATA.__get__(self)
            return data
        finally:
            self._end_use()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._data_was_handed_out = True
        self._begin_use()
        try:
            _DATA.__set__(self, value)
        finally:
            self._end_use()

    @property
    def grad(self) -> torch.Tensor | None:
        self._see_gradients()
        if self.is_pending and self.source is not None and self.source.is_usable():
            self._materialise()
        grad: torch.Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._see_gradients()  # what was gathered before is replaced, too
        self._let_go()
        _GRAD.__set__(self, value)

    def _see_gradients(self) -> None:
        home = None if self.home is None else self.home()
        if home is not None and home.gradient_owner is not None:
            home.gradient_owner.gradients_wanted()

    def _materialise(self) -> None:
        assert self.source is not None
        tensor, own = self.source.get(), _GRAD.__get__(self)
        if tensor is not None:  # without no_grad(): a Ctrl-C while that is left would leave gradients off
            value = LowGradient(tensor, self._factors).materialised(self.dtype)
            if own is None:
                _GRAD.__set__(self, value)
            else:
                own.detach().add_(value)
        if self._is_viewed and tensor is not None and own is None and not self._factors:
            self.is_pending, self._is_shown = False, True
        else:
            self._let_go()

    def _let_go(self) -> None:
        was_held = self.is_pending or self._is_shown
        self.is_pending, self._is_shown, self._factors = False, False, ()
        if was_held and self.source is not None:
            self.source.release()


def _without_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, type and strides whose storage has no bytes yet."""
    made = torch.empty_like(like, requires_grad=False, memory_format=torch.preserve_format)
    made.untyped_storage().resize_(0)
    return made


def _has_graph(result: Any) -> bool:
    return any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in tree_leaves(result))


def _memory_users(tensor: torch.Tensor) -> tuple[int, int] | None:
    """A measure of how many tensors, arrays and storages share a tensor's memory; None where torch does not tell."""
    storage = tensor.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else (count(storage._cdata), sys.getrefcount(storage))


@functools.cache
def _memory_users_of_one_tensor() -> tuple[int, int] | str:
    """That measure for memory which one tensor alone has."""
    with torch._C.DisableTorchFunctionSubclass():
        alone = OptimizerCopy(torch.empty(1))
        _memory_users(alone)  # torch may keep the storage's Python object from the first look on
        return _memory_users(alone) or "unknown"
