"""The master of a parameter, a tensor subclass that users get from `optim_parameters()`.

The gradient of a copy stays in host memory in the dtype in which a device computed it; reading `.grad` converts it, and
inside a step first waits until it has landed. A copy gets it from a GradientSource and knows neither steps nor layers.
With several machines, the copy starts as a ShardedMaster, which stores one range of the values.

[Note: values without memory] A float32 copy of a bfloat16 weight begins as a HalvedMaster: the weight is the high half
of each value, and only the low halves take memory. An operation that needs the values makes the copy allocate memory
and join the halves in it; an operation that asks only for shape or dtype does not. The one-pass optimizer works on the
two halves and holds `lock`, so that no other thread joins them at the same time. A copy with a Rounding has values of
24 bits ([Note: masters of 24 bits] in values) and begins as a ShortMaster. Other code than the one-pass optimizer may
write any values; they are rounded when they are published.

[Note: giving memory back] A copy gives its memory back by becoming a HalvedMaster again. It can do so only when no
operation runs on it, no other tensor or array shares its memory, and its weight equals its rounded values, so that no
bit is lost. Converting costs time, so a copy whose values are read in every step, as by an optimizer of torch, keeps
its memory. An interval reaches from the end of one step to the end of the next. Memory is given back
- between steps and when a step begins, if values were read since the last step, unless values were read in each of the
  last `_HABIT` intervals;
- when a step ends, if values were not read in this interval.
An autograd graph refers to the tensor, not to its memory, and so is no user of the memory. After an operation that
autograd records, the memory is therefore kept until the end of a later interval. A backward pass through an older graph
raises, as after an in-place update.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from roundpipe.context import current_iteration
from roundpipe.errors import UsageError
from roundpipe.monitor import process_rlock
from roundpipe.param_groups import optimizer_that_adds
from roundpipe.store.host_memory import dense_stride, host_zeros_like, memory_users, without_memory
from roundpipe.store.surroundings import CopyHome, GradientOwner, GradientSource
from roundpipe.store.values import (
    HalvedMaster,
    Rounding,
    ShardedMaster,
    Share,
    StoredMaster,
    WholeMaster,
    can_be_sharded,
    master_of,
)

_HABIT = 8  # a copy keeps its memory after this many consecutive intervals in which its values were read
# The attributes of torch.Tensor as descriptors. OptimizerCopy overrides them by properties that use these.
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_IS_LEAF: Any = torch.Tensor.is_leaf
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad_fn"),
    *("is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested", "_version", "retains_grad"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "storage_offset", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "requires_grad_", "__hash__", "__len__"),
)
_FUNCTIONS = ("zeros_like", "empty_like", "ones_like", "full_like", "numel", "is_floating_point", "is_complex")
# Functions that use only the shape, dtype or gradient of a tensor and so can run on a copy without memory for values.
_NEED_NO_VALUES = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in (*_ATTRIBUTES, "grad")),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
    ]
)


class OptimizerCopy(nn.Parameter):
    """A master: an nn.Parameter with the values of one of the model's parameters, in the optimizer's dtype."""

    # State of the gradient.
    home: Callable[[], CopyHome | None] | None = None  # weak reference: an optimizer must not keep a model alive
    source: GradientSource | None = None  # the latest step or the host's sums, while their gradient may be needed
    record: Any = None  # set together with `source`: identifies this copy in calls of the source
    is_pending = False  # whether the gradient of `source` still has to be added to `.grad`
    factors: tuple[float, ...] = ()  # numbers by which the pending gradient is still to be multiplied, in order
    _is_viewed = False  # whether `source` is the host's sums, which copies show outside steps
    _is_shown = False  # while `_is_viewed`: whether `.grad` was made from the host's sum; the user may change it
    # State of the values.
    # Holds the values while the copy has no memory for all of them, else None.
    halves: HalvedMaster | ShardedMaster | None = None
    share: Share | None = None  # the range of this machine; None if it is alone or the copy cannot be divided
    rounding: Rounding | None = None  # given if the values have 24 bits, however they are stored
    lock = process_rlock()  # guards `halves` and the memory; each copy that can be halved has its own lock
    _weight: torch.Tensor | None = None  # the weight last written from the values; None if the copy cannot be halved
    _uses: list[None]  # one entry for each operation that runs on the memory; only if the copy can be halved
    # An interval lasts from one optimizer step to the next; see [Note: giving memory back].
    _was_read = False  # whether user code has read the values in this interval
    _reads_in_a_row = 0  # number of consecutive intervals before this one in which user code has read the values
    _may_be_in_graph = False  # whether autograd may have recorded an operation on the copy in this interval
    _address_is_known = False  # whether data_ptr() was called: native code may use the memory, so it must stay
    _seen_version = 0  # `_version` when `forget_touches` was last called
    _own_versions = 0  # by how much giving memory back has changed `_version`
    _data_was_handed_out = False  # whether code may write values without changing `_version`
    is_wider = False  # whether the copy is in float32 and its gradients land in half precision
    may_be_ahead = False  # whether a step that failed may have changed the values; the next step publishes them
    when_training: Callable[[], None] | None = None  # called once, when the model begins to train

    @classmethod
    def of_weight(
        cls, weight: torch.Tensor, dtype: torch.dtype, share: Share | None = None, bits: int = 32
    ) -> OptimizerCopy:
        """Make a copy of `weight` in `dtype`. A float32 copy of a dense bfloat16 weight starts without memory.

        `share`: given if several machines divide the copy between them; it then starts without memory, too.
        bits: 24 for values of 24 bits, if the copy starts without memory and the weight is bfloat16.
        """
        is_halved = weight.dtype is torch.bfloat16 and dtype is torch.float32 and weight.numel() > 0
        is_halved = is_halved and dense_stride(weight) == tuple(weight.stride())
        is_sharded = share is not None and can_be_sharded(weight, dtype)
        memory = torch.empty_like(weight, dtype=dtype, memory_format=torch.preserve_format)
        copy = cls(without_memory(memory) if is_halved or is_sharded else memory.copy_(weight))
        copy.rounding = Rounding() if is_halved and bits == 24 else None
        if share is not None and is_sharded:
            copy.share, copy.halves = share, ShardedMaster(weight, share, copy.rounding)
        elif is_halved:
            copy.halves = master_of(weight, copy.rounding)
        if copy.halves is not None:
            copy.lock, copy._weight, copy._uses = process_rlock(), weight, []
        copy.is_wider = dtype is torch.float32 and weight.dtype in (torch.bfloat16, torch.float16)
        copy.forget_touches()
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on copies; torch calls this. First allocates memory if the operation needs their values."""
        if func in _NEED_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        copies = [value for value in tree_leaves((args, kwargs)) if isinstance(value, OptimizerCopy)]
        _announce_use(copies)
        used: list[OptimizerCopy] = []
        try:
            for copy in copies:
                copy._begin_use()
                used.append(copy)
                copy.mark_touched()  # not every kernel that writes changes the version counter
                copy._address_is_known |= func is torch.Tensor.data_ptr
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            results = tree_leaves(result) if torch.is_grad_enabled() else []
            if any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in results):
                for copy in copies:
                    copy._may_be_in_graph = True
            return result
        finally:
            for copy in used:
                copy._end_use()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain nn.Parameter: sources and locks belong to this process."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)

    # Memory for values. See [Note: giving memory back].

    def take_memory(self) -> None:
        """Allocate memory for the values and join the halves in it, so that the copy is an ordinary tensor."""
        with self.lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.halves is not None:  # checked under the lock: another thread may have joined the halves
                value = host_zeros_like(self)
                self.halves.join_into(value)
                _DATA.__set__(self, value)
                self.halves = None

    def rest_between_steps(self) -> None:
        """Give memory back if values were read in this interval, unless `_HABIT` or an autograd graph keep it."""
        if self._was_read and self._reads_in_a_row < _HABIT and not self._may_be_in_graph:
            self._give_memory_back()

    def rest_after_step(self) -> None:
        """End an interval. Give memory back if no values were read in the interval."""
        if self._was_read:
            self._reads_in_a_row += 1
        else:
            self._reads_in_a_row = 0
            if self.halves is None and self._weight is not None:
                self._give_memory_back()
        self._was_read = self._may_be_in_graph = False

    def _begin_use(self) -> None:
        """Allocate memory if there is none, and keep it until `_end_use`.

        `_end_use` may come as soon as the operation has returned: a result that still needs the memory shares it.
        Waits for a checkpoint that reads the values: the operation may write them.
        """
        if self.home is not None and (home := self.home()) is not None:
            home.wait_until_written(self)
        if self._weight is not None:
            with self.lock:
                self.take_memory()
                self._uses.append(None)
                self._was_read = True

    def _end_use(self) -> None:
        if self._weight is not None:
            self._uses.pop()

    def _give_memory_back(self) -> None:
        # Does not wait for the lock: a thread that holds the lock uses the values, so the memory must stay.
        is_possible = self._weight is not None and self.halves is None and self.share is None
        if not is_possible or not self.lock.acquire(blocking=False):
            return
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                assert self._weight is not None
                if self.halves is None and not self._uses and self._could_be_halved(self._weight):
                    halves = master_of(self._weight, self.rounding)
                    if halves.take(_DATA.__get__(self)):
                        self._become_halved(halves)
        finally:
            self.lock.release()

    def _could_be_halved(self, weight: torch.Tensor) -> bool:
        fits = self.dtype is torch.float32 and self.shape == weight.shape and self.stride() == weight.stride()
        return fits and not self._address_is_known and memory_users(self) == _memory_users_of_one_tensor()

    def _sharded(self) -> ShardedMaster:
        """The values as this machine's range of them; the caller holds `lock`.

        If the copy has memory for all values, it gives the memory up: other machines will change most of them.
        """
        if isinstance(self.halves, ShardedMaster):
            return self.halves
        assert self.share is not None
        assert self._weight is not None
        if self._uses or memory_users(self) not in (_memory_users_of_one_tensor(), None):
            raise UsageError(
                f"another tensor or array shares the memory of an optimizer's copy of shape {tuple(self.shape)}. The "
                f"{self.share.size} machines of the process group divide the copies between them, so the tensor would "
                "not follow the training any more. Delete it before the step, or clone what you need."
            )
        mine = ShardedMaster(self._weight, self.share, self.rounding)
        mine.take(_DATA.__get__(self))
        self._become_halved(mine)
        return mine

    def _become_halved(self, halves: HalvedMaster | ShardedMaster) -> None:
        was_touched = self.was_touched()
        self.halves = halves
        _DATA.__set__(self, without_memory(self))
        # If an autograd graph has saved the values, its backward pass must raise instead of reading freed memory.
        torch.autograd.graph.increment_version(self)
        self._own_versions += 1
        if not was_touched:
            self.forget_touches()

    # The weight that is written from the values.

    def write_weight(self, to: torch.Tensor) -> None:
        """Write the values, rounded, into the weight `to`."""
        with self.lock, torch.no_grad():
            if self.halves is None:
                if self._round_values() and self.rounding is not None:
                    self.rounding.count += 1
                to.copy_(self.values())
            elif to is not self.halves.weight:
                to.copy_(self.halves.weight)
            self.weight_was_written(to)

    def round_update(self) -> None:
        """Round the values to 24 bits, if the copy has so many, after an update that the one-pass kernel has not made.

        Counts as one rounding, as the kernel's do, even if no value has changed.
        """
        if self.rounding is not None:
            with self.lock, torch.no_grad():
                self._round_values()
                self.rounding.count += 1

    def _round_values(self) -> bool:
        """Round values in memory to 24 bits, if the copy has so many. Returns whether one has changed."""
        if self.rounding is None or self._weight is None:
            return False
        return self.rounding.round_like(self._weight, self.values())

    def weight_was_written(self, weight: torch.Tensor) -> None:
        """Record that `weight` holds the rounded values now. The caller holds `lock`."""
        self.may_be_ahead = False
        if self._weight is not None:
            self._weight = weight
        if self.halves is not None:
            self.halves.weight = weight

    def lies_in(self, memory: torch.Tensor) -> bool:
        """Whether `memory` holds the high halves of the values."""
        return self.halves is not None and self.halves.weight is memory

    def weights_swapped(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Record that the contents of two memories of the weight were exchanged."""
        with self.lock:
            if self._weight is not None:
                self.weight_was_written(other if self._weight is one else one)

    def follow_weight(self, weight: torch.Tensor) -> None:
        """Set the values to those of `weight`, which the user has written."""
        with self.lock, torch.no_grad():
            if self.halves is None:
                self.copy_(weight)
            else:
                self.halves.become(weight)
            self.weight_was_written(weight)

    # The gradient inside steps.

    def begin_step(self, source: GradientSource, record: Any = None) -> None:
        """Take the gradient from `source` from now on. If `.grad` is left from an earlier step, add the gradient to it.

        Changes that the user made to `.grad` before the step, while `.grad` showed the sum, count in the step.
        """
        if self._is_shown:
            source.release(record)  # `.grad` already contains the sum, with the user's changes
        elif self.is_pending and not self._is_viewed:
            self._materialise()
        # Factors set while `.grad` showed the sum count in this step. Those of an earlier step were already applied.
        is_pending, factors = not self._is_shown, self.factors if self._is_viewed else ()
        self._is_viewed = self._is_shown = False
        self.source, self.record, self.is_pending, self.factors = source, record, is_pending, factors

    def end_step(self, *, keeps_source: bool = False) -> None:
        """If the gradient was not cleared, convert it to a tensor in `.grad`. As in torch, the next step adds to it.

        `keeps_source`: leave the gradient unconverted in host memory until `.grad` is read. For a user's own loop,
        which clears gradients only after the step.
        """
        if keeps_source:
            return
        if self.is_pending:
            self._materialise()
        self.source = self.record = None

    # The gradient outside steps.

    def begin_view(self, sums: GradientSource, record: Any, *, drops_earlier: bool = False) -> None:
        """Show the host's sum of gradients in `.grad`, until `end_view`.

        If an earlier step's gradient was not cleared, the sum is added to it, unless `drops_earlier`.
        """
        if self.is_pending and drops_earlier:
            self.drop_pending()
        elif self.is_pending:
            self._materialise()
        self.source, self.record, self.is_pending, self._is_viewed = sums, record, True, True

    def end_view(self) -> None:
        """Stop showing the sum. If the user has changed it, it stays in `.grad` and the host's sum is dropped.

        Otherwise the host keeps the sum, and `.grad` does not include it any more.
        """
        if not self._is_viewed:
            return
        # With several machines, comparing would need another exchange: what was shown counts as changed.
        if self._is_shown and self.source is not None and self.source.exchange is None and self._shows_sum():
            _GRAD.__set__(self, None)
            self._is_shown = False
        if self.is_pending and self.factors:
            self._materialise()
        if self.is_pending:
            self.is_pending = False
        else:
            self.drop_pending()
        self.source, self.record, self._is_viewed = None, None, False

    def _shows_sum(self) -> bool:
        """Whether `.grad` still equals the sum. Compares values, as not every write changes the version counter."""
        assert self.source is not None
        shown, total = _GRAD.__get__(self), self.source.gradient_of(self.record)
        return shown is not None and total is not None and torch.equal(shown, total.to(self.dtype))

    def drop_gradient(self) -> None:
        """Set `.grad` to None like the setter, but without calling `see_gradients`; the caller calls it if needed."""
        self.drop_pending()
        _GRAD.__set__(self, None)

    # Access to pending gradients and to values, for clipping, unscaling and the one-pass optimizer.

    @property
    def has_own_gradient(self) -> bool:
        """Whether `.grad` holds a tensor, besides a pending gradient. Converts nothing."""
        return _GRAD.__get__(self) is not None

    @property
    def has_only_low_gradient(self) -> bool:
        """Whether the whole gradient is pending: `.grad` holds no tensor to which it would be added."""
        self.see_gradients()
        return self.is_pending and _GRAD.__get__(self) is None

    def gradient_sources(self, *, whole: bool = False) -> list[torch.Tensor] | None:
        """The tensors whose sum, still to be multiplied by `factors`, is the pending gradient; see GradientSource.

        None if there is no gradient, or if `.grad` is already a tensor. `whole`: one tensor for the whole parameter,
        also with several machines.
        """
        if not self.is_pending or self.source is None or _GRAD.__get__(self) is not None:
            return None
        if not whole:
            return self.source.sources_of(self.record)
        gradient = self.source.gradient_of(self.record)
        return None if gradient is None else [gradient]

    def scale_gradient(self, factor: float) -> None:
        """Multiply the pending gradient by `factor` when it is used."""
        self.factors += (factor,)

    def values_for_kernel(self, *, writes_weight: bool) -> StoredMaster:
        """The values that the kernel updates: halves if possible, of this machine's range. The caller holds `lock`.

        `writes_weight`: the kernel also writes the weight, with the high halves; otherwise it needs memory for values.
        """
        halves = self.halves if self.share is None else self._sharded()
        return halves.own_values() if halves is not None and writes_weight else WholeMaster(self.values())

    def memory_of_step(self) -> list[torch.Tensor]:
        """The memory of this copy that a one-pass step will write: the low halves, if the copy is halved."""
        with self.lock:
            return [] if self.halves is None else self.halves.own_values().memory_to_come()

    def bytes_to_come(self, *, in_one_pass: bool) -> int:
        """Bytes that the next step will allocate for values. `in_one_pass`: the step works on the halves."""
        with self.lock:
            if self.halves is None:
                return 0
            return self.halves.low_bytes_to_come if in_one_pass else self.nbytes

    def values(self) -> torch.Tensor:
        """The values as a plain tensor that shares the copy's memory.

        The access does not count as a read, and writes to the tensor are not noticed by `was_touched`.
        """
        with self.lock, torch._C.DisableTorchFunctionSubclass():
            if self.halves is not None:
                self.take_memory()
            plain: torch.Tensor = _DATA.__get__(self)
            return plain

    # Writes to the values by code that RoundPipe does not control.

    @property
    def version(self) -> int:
        """The version counter, which most writes to the values change, but not the one-pass optimizer.

        Reading does not change it, although memory that was given to a reader is taken back afterwards.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self._version - self._own_versions

    def was_touched(self) -> bool:
        """Whether values may have been written since `forget_touches`."""
        if self._data_was_handed_out:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            return self._version != self._seen_version

    def forget_touches(self) -> None:
        """Treat the current values as known: `was_touched` reports only writes after this call."""
        self._data_was_handed_out, self._seen_version = False, self._version

    def is_ahead_of(self, weight: torch.Tensor) -> bool:
        """Whether the rounded values differ from `weight`."""
        with self.lock, torch.no_grad():
            if self.halves is not None:
                return False
            rounded = self.values().to(weight.dtype)
            # The second comparison takes NaN for equal, and more memory.
            return not (torch.equal(rounded, weight) or torch.allclose(rounded, weight, 0.0, 0.0, equal_nan=True))

    @property
    def has_other_users(self) -> bool:
        """Whether another tensor or array, which code may write later, shares the memory of the values."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.halves is None and memory_users(self) not in (_memory_users_of_one_tensor(), None)

    def mark_touched(self) -> None:
        """Make `was_touched` return True, because code that RoundPipe does not control may have written values."""
        self._data_was_handed_out = True

    # Attributes of torch.Tensor that a copy overrides.

    @property
    def data(self) -> torch.Tensor:
        """As in torch. The returned tensor shares the copy's memory, which therefore stays while the tensor lives."""
        _announce_use([self])
        self._data_was_handed_out = True  # writes to the returned tensor do not change the copy's version counter
        self._begin_use()
        try:
            data: torch.Tensor = _DATA.__get__(self)
            return data
        finally:
            self._end_use()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _announce_use([self])
        self._data_was_handed_out = True
        self._begin_use()
        try:
            _DATA.__set__(self, value)
        finally:
            self._end_use()

    @property
    def grad(self) -> torch.Tensor | None:
        """As in torch. If the calling thread may use a pending gradient, waits until it has landed and converts it."""
        self.see_gradients()
        if self.is_pending and self.source is not None and self.source.is_usable():
            self._materialise()
        grad: torch.Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.see_gradients()  # so that the assignment also replaces the gradients gathered since the last step
        self.drop_pending()
        _GRAD.__set__(self, value)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """As in torch. Optimizers that are given a master ask this: see [Note: settings of a step] in param_groups."""
        optimizer, home = optimizer_that_adds(sys._getframe(1)), None if self.home is None else self.home()
        if optimizer is not None and home is not None:
            home.note_optimizer(optimizer)
        with torch._C.DisableTorchFunctionSubclass():
            return bool(_IS_LEAF.__get__(self))

    def see_gradients(self, dropped: Container[int] = ()) -> None:
        """Outside steps, make all copies of the model show the gradients gathered so far.

        `dropped`: see `GradientOwner.gradients_wanted`.
        """
        if current_iteration() is not None:  # inside step_fn, where the step provides the gradients
            return
        home = None if self.home is None else self.home()
        if home is not None and home.gradient_owner is not None:
            home.gradient_owner.gradients_wanted(dropped)

    def _materialise(self) -> None:
        """Add the pending gradient to `.grad`, in the dtype of the copy."""
        assert self.source is not None
        low, own = self.source.gradient_of(self.record), _GRAD.__get__(self)
        # Does not use no_grad(), which is not needed here: a Ctrl-C in its exit would leave gradients disabled.
        if low is not None:
            value = low.to(self.dtype, copy=True)
            for factor in self.factors:
                value.mul_(factor)
            if own is None:
                _GRAD.__set__(self, value)
            else:
                own.detach().add_(value)
        if self._is_viewed and low is not None and own is None and not self.factors:
            self.is_pending, self._is_shown = False, True
        else:
            self.drop_pending()

    def drop_pending(self) -> None:
        """Release the source's gradient without adding it to `.grad`, which stays as it is."""
        was_needed = self.is_pending or self._is_shown
        self.is_pending, self._is_shown, self.factors = False, False, ()
        if was_needed and self.source is not None:
            self.source.release(self.record)


def _announce_use(masters: Sequence[OptimizerCopy]) -> None:
    """Tell the models that code may be about to read or write the values of masters; see GradientOwner."""
    for owner, own in owners_outside_steps(masters):
        owner.values_wanted(own)


def owners_outside_steps(masters: Sequence[OptimizerCopy]) -> Iterator[tuple[GradientOwner, Sequence[OptimizerCopy]]]:
    """The models of masters, with their masters, unless this is code of a step."""
    for home in {master.home for master in masters}:
        store = None if home is None else home()
        if store is None or store.gradient_owner is None:
            continue
        step = store.open_step
        # An optimizer's step() on this thread: nothing of ours may run between its operations, where a Ctrl-C may come.
        is_inside = step is not None and step.is_open and step.thread == threading.get_ident()
        if not is_inside and current_iteration() is None:  # in step_fn masters may be used, too
            yield store.gradient_owner, [master for master in masters if master.home is home]


@functools.cache
def _memory_users_of_one_tensor() -> tuple[int, int] | str:
    """The result of `memory_users` for memory of one tensor; "unknown" without counts, so no copy gives it back."""
    with torch._C.DisableTorchFunctionSubclass():
        alone = OptimizerCopy(torch.empty(1))
        # The first access may create a Python object that torch keeps and counts: only later results are comparable.
        memory_users(alone)
        return memory_users(alone) or "unknown"
