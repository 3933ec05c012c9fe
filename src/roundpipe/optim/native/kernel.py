"""Python interface of the one-pass Adam kernel in C, which updates the tensors of a layer.

Knows tensors, addresses and dtypes; the caller decides which tensors belong together and when they may be written.
Checks every tensor before C gets its address. A KernelParameter that is used again with tensors of the same form is not
checked again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.optim.native import library
from roundpipe.store.host_memory import dense_stride
from roundpipe.store.values import HalvedMaster

MAX_FACTORS = 4
_PRECISIONS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_INSTRUCTION_SETS = ("portable", "AVX2", "AVX-512")  # in the order of `enum processor` in one_pass_adam.c
_THREADS_VARIABLE = "ROUNDPIPE_OPTIMIZER_THREADS"
_CORES_FOR_LAUNCHES = 2  # cores left free for device threads, which launch kernels, on a machine with many cores


class _Rule(ctypes.Structure):
    """The same fields as `struct adam_rule` in one_pass_adam.c."""

    _fields_ = (
        ("factors", ctypes.c_float * MAX_FACTORS),
        ("num_factors", ctypes.c_int32),
        ("shrink", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("beta1_rest", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("beta2_rest", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("correction", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class _Parameter(ctypes.Structure):
    """The same fields as `struct adam_parameter` in one_pass_adam.c."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("old_weight", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("more_gradients", ctypes.c_void_p),
        ("num_more_gradients", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("weight_precision", ctypes.c_int32),
        ("gradient_precision", ctypes.c_int32),
        ("rule", _Rule),
    )


@dataclasses.dataclass(frozen=True)
class AdamRule:
    """The hyperparameters of one parameter group in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool  # True for the weight decay of AdamW, False for that of Adam
    step: int  # counted from 1
    gradient_factors: tuple[float, ...] = ()  # the gradient is first multiplied by each of these, in order

    @functools.cached_property
    def packed(self) -> _Rule:
        """The rule as a C struct for the kernel."""
        return _Rule(
            factors=self.gradient_factors,
            num_factors=len(self.gradient_factors),
            shrink=1 - self.lr * self.weight_decay if self.is_decoupled else 1.0,
            decay=0.0 if self.is_decoupled else self.weight_decay,
            beta1_rest=1 - self.beta1,
            beta2=self.beta2,
            beta2_rest=1 - self.beta2,
            step_size=self.lr / (1 - self.beta1**self.step),
            correction=math.sqrt(1 - self.beta2**self.step),
            eps=self.eps,
        )


_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # dtype, shape, strides
_Forms = tuple[_Form, _Form, _Form | None]  # the forms of master, gradient and weight


@dataclasses.dataclass
class KernelParameter:
    """The tensors of one parameter for the kernel: dense, of the same shape, with the same order of elements in memory.

    Can be used for several steps: after a step `forget_memory` drops all tensors but the moments, and before the next
    step `renew` sets the new tensors without another check.
    """

    master: torch.Tensor | HalvedMaster | None
    gradient: torch.Tensor | None
    first: torch.Tensor  # the first moment
    second: torch.Tensor  # the second moment
    largest: torch.Tensor | None  # the maximum of the second moment over all steps; only for amsgrad
    weight: torch.Tensor | None  # receives the updated values, rounded to its dtype; None if only the master is updated
    rule: AdamRule
    more_gradients: Sequence[torch.Tensor] = ()  # of the form of `gradient`; the sum of all, in order, counts
    _packed: _Parameter | None = dataclasses.field(default=None, init=False, repr=False, compare=False)
    _addresses: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)  # of `more_gradients`
    _forms: _Forms | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def packed(self) -> _Parameter:
        """The parameter as a C struct. The first call raises RuntimeError if the tensors do not match."""
        if self._packed is None:
            _check(self)
            assert self.master is not None
            assert self.gradient is not None
            packed = _Parameter(
                first=self.first.data_ptr(),
                second=self.second.data_ptr(),
                largest=None if self.largest is None else self.largest.data_ptr(),
                count=self.gradient.numel(),
                weight_precision=0 if self.weight is None else _PRECISIONS[self.weight.dtype],
                gradient_precision=_PRECISIONS[self.gradient.dtype],
            )
            self._forms = _forms(self.master, self.gradient, self.weight)
            self._pack(packed, self.master, self.gradient, self.weight, self.rule)
        assert self._packed is not None
        return self._packed

    def renew(
        self,
        master: torch.Tensor | HalvedMaster,
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
        rule: AdamRule,
        more_gradients: Sequence[torch.Tensor] = (),
    ) -> bool:
        """Set the tensors of another step with the same moments.

        Returns False and changes nothing if the dtype, shape or strides of a tensor differ from the step before: then
        the caller needs a new KernelParameter. The tensors may lie in other memory than before.
        """
        if self._packed is None or self._forms != _forms(master, gradient, weight):
            return False
        if any(more.dtype is not gradient.dtype or more.shape != gradient.shape for more in more_gradients):
            return False
        self.master, self.gradient, self.weight, self.rule = master, gradient, weight, rule
        self.more_gradients = more_gradients
        self._pack(self._packed, master, gradient, weight, rule)
        return True

    def forget_memory(self) -> None:
        """Drop the references to the model's memory, so that an object kept for later steps does not keep it alive."""
        self.master = self.gradient = self.weight = None
        self.more_gradients = ()

    def _pack(
        self,
        packed: _Parameter,
        master: torch.Tensor | HalvedMaster,
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
        rule: AdamRule,
    ) -> None:
        """Write the addresses and the rule, which differ between two steps, into the C struct."""
        if isinstance(master, HalvedMaster):
            packed.old_weight = master.weight.data_ptr()
            packed.low, packed.ties = master.low.data_ptr(), master.ties.data_ptr()
        else:
            packed.master = master.data_ptr()
        packed.gradient, packed.rule = gradient.data_ptr(), rule.packed
        packed.weight = None if weight is None else weight.data_ptr()
        packed.num_more_gradients = len(self.more_gradients)
        self._addresses = (ctypes.c_void_p * len(self.more_gradients))(*[g.data_ptr() for g in self.more_gradients])
        packed.more_gradients = ctypes.addressof(self._addresses) if self.more_gradients else None
        self._packed = packed


def _forms(master: torch.Tensor | HalvedMaster, gradient: torch.Tensor, weight: torch.Tensor | None) -> _Forms:
    """The forms of master, gradient and weight.

    A halved master has the form of its bfloat16 weight, so its dtype differs from that of a float32 master.
    """
    whole = master.weight if isinstance(master, HalvedMaster) else master
    return (
        (whole.dtype, whole.shape, whole.stride()),
        (gradient.dtype, gradient.shape, gradient.stride()),
        None if weight is None else (weight.dtype, weight.shape, weight.stride()),
    )


def can_read(tensor: torch.Tensor) -> bool:
    """Whether the kernel supports the dtype of a gradient or weight."""
    return tensor.dtype in _PRECISIONS


class OnePassKernel:
    """The C kernel, with the team of threads on which it runs."""

    def __init__(self, loaded: ctypes.CDLL, num_threads: int) -> None:
        self.num_threads = num_threads
        self._adam, self._join, self._halve = loaded.roundpipe_adam, loaded.roundpipe_join, loaded.roundpipe_halve
        self._adam.argtypes, self._adam.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
        self._join.argtypes, self._join.restype = (*[ctypes.c_void_p] * 4, ctypes.c_int64), None
        self._halve.argtypes, self._halve.restype = (*[ctypes.c_void_p] * 4, ctypes.c_int64), None
        loaded.roundpipe_team.restype = ctypes.c_void_p
        self._team = loaded.roundpipe_team(num_threads)
        if not self._team:
            raise MemoryError("no memory for the optimizer's threads")
        self.is_built_with_the_package = library.is_built_with_the_package(loaded)
        self._use_processor = loaded.roundpipe_use_processor

    def adam(self, parameters: Sequence[KernelParameter]) -> None:
        """Update all parameters in one call. If tensors do not match, raises RuntimeError and updates none."""
        packed = (_Parameter * len(parameters))(*[parameter.packed() for parameter in parameters])
        # ctypes releases the interpreter lock during the call; `packed` and the tensors stay alive until it returns.
        start_s = time.perf_counter()
        self._adam(self._team, packed, len(parameters))
        _rate.note(sum(struct.count for struct in packed), time.perf_counter() - start_s)

    def instruction_set(self) -> str:
        """The instructions that the kernel uses on this processor. Must not be called during an update."""
        return _INSTRUCTION_SETS[self._use_processor(len(_INSTRUCTION_SETS) - 1)]

    def join(self, halves: HalvedMaster, to: torch.Tensor) -> None:
        """Write the values of `halves` into a float32 tensor."""
        _check_halves(halves, to)
        self._join(to.data_ptr(), halves.weight.data_ptr(), halves.low.data_ptr(), halves.ties.data_ptr(), to.numel())

    def halve(self, values: torch.Tensor, to: HalvedMaster) -> None:
        """Write float32 `values` into both halves of `to`. The weight of `to` becomes `values` rounded."""
        _check_halves(to, values)
        self._halve(to.weight.data_ptr(), to.low.data_ptr(), to.ties.data_ptr(), values.data_ptr(), values.numel())


# Checks of tensors before C gets their addresses.


def share_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether strided tensors have one shape, no gaps, and their elements in the same order in memory."""
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    order = _memory_order(tensors[0])
    is_dense = dense_stride(tensors[0]) == tuple(tensors[0].stride())
    return is_dense and all(_memory_order(tensor) == order for tensor in tensors)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The strides of dimensions larger than 1. Only these strides decide where elements lie in memory."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _check(parameter: KernelParameter) -> None:
    master = parameter.master
    if isinstance(master, HalvedMaster):
        _require("weight", parameter.weight, torch.bfloat16)
        _check_halves(master, parameter.gradient, tuple(_PRECISIONS))
        whole = master.weight
    else:
        whole = _require("master", master, torch.float32)
    tensors = [whole, _require("gradient", parameter.gradient, *_PRECISIONS)]
    tensors += [_require("gradient", more, tensors[1].dtype) for more in parameter.more_gradients]
    tensors += [_require("moment", moment, torch.float32) for moment in (parameter.first, parameter.second)]
    if parameter.largest is not None:
        tensors.append(_require("moment", parameter.largest, torch.float32))
    if parameter.weight is not None:
        tensors.append(_require("weight", parameter.weight, *_PRECISIONS))
    _require_one_layout(tensors)


def _check_halves(
    halves: HalvedMaster, values: torch.Tensor | None, precisions: Sequence[torch.dtype] = (torch.float32,)
) -> None:
    """Raise RuntimeError unless `values` and the halves describe the same elements."""
    values = _require("values", values, *precisions)
    _require("weight", halves.weight, torch.bfloat16)
    _require("low", halves.low, torch.int16, torch.uint16)
    _require("ties", halves.ties, torch.uint8)
    _require_one_layout([values, halves.weight])
    count = values.numel()
    for name, flat, needed in (("low", halves.low, count), ("ties", halves.ties, -(-count // 8))):
        if not flat.is_contiguous() or flat.numel() < needed:
            raise RuntimeError(f"{name} of a halved master needs {needed} elements, got {_described(flat)}.")


def _require(name: str, tensor: torch.Tensor | None, *precisions: torch.dtype) -> torch.Tensor:
    """Return `tensor`; raises RuntimeError unless it is a strided tensor in host memory with one of the dtypes."""
    if tensor is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise RuntimeError(f"the Adam kernel needs a strided CPU tensor as {name}, got {_described(tensor)}.")
    if tensor.dtype not in precisions:
        names = " or ".join(str(precision) for precision in precisions)
        raise RuntimeError(f"the Adam kernel needs {name} in {names}, got {_described(tensor)}.")
    return tensor


def _require_one_layout(tensors: Sequence[torch.Tensor]) -> None:
    if not share_layout(tensors):
        listed = "; ".join(f"{tuple(tensor.shape)} with strides {tensor.stride()}" for tensor in tensors)
        raise RuntimeError(f"the Adam kernel needs dense tensors of one shape and memory order, got {listed}.")


def _described(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} ({tensor.layout}, {tensor.device})"


# Speed of the kernel.


class _Rate:
    """A moving average of the number of elements that the kernel updates per second."""

    SMOOTHING = 0.02  # weight of a new measurement; small, because it covers one layer, a small part of a step
    ENOUGH = 10_000  # elements; calls with fewer are not measured, because their time is mostly overhead

    def __init__(self) -> None:
        self.per_second: float | None = None

    def note(self, count: int, seconds: float) -> None:
        if count < self.ENOUGH or seconds <= 0:
            return
        new = count / seconds
        self.per_second = new if self.per_second is None else self.per_second + self.SMOOTHING * (new - self.per_second)


_rate = _Rate()


def measured_rate() -> float | None:
    """Average number of elements that this process's kernel updates per second; None before the first measurement."""
    return _rate.per_second


# The kernel of this process.


def one_pass_kernel() -> OnePassKernel | None:
    """The kernel of this process; None if it cannot be built. A forked child gets a separate team of threads."""
    return _kernel_of(os.getpid())


@functools.cache
def _kernel_of(pid: int) -> OnePassKernel | None:
    loaded = library.load()
    return None if loaded is None else OnePassKernel(loaded, _num_threads())


def _num_threads() -> int:
    asked = os.environ.get(_THREADS_VARIABLE)
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(f"{_THREADS_VARIABLE}={asked!r} is not a number of threads; give 1 or more, or unset it.")
        return int(asked)
    cores = usable_cores()
    return cores - _CORES_FOR_LAUNCHES if cores > 2 * _CORES_FOR_LAUNCHES else cores


def usable_cores() -> int:
    """The number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
