"""Python interface of the one-pass kernel in C, which carries out an optimizer's update of the tensors of a layer.

Knows tensors, addresses and dtypes; the caller decides which tensors belong together and when they may be written. The
rules of `optim.rules` say what to compute: a function of the C code and its numbers (StepNumbers). Checks every tensor
before C gets its address. A KernelParameter that is used again with tensors of the same form is not checked again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.host_facts import usable_cores
from roundpipe.optim.native import library
from roundpipe.store.forms import num_scales, seed_of
from roundpipe.store.host_memory import dense_stride
from roundpipe.store.values import HalvedMaster, Rounding, StoredMaster, WholeMaster

MAX_FACTORS = 4
MAX_STATES = 3
_CHUNK = 65536  # CHUNK in one_pass.c
_MAX_NUMBERS = 8
_PRECISIONS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
# How states are stored: `enum storage` in one_pass.c. States with codes have scales, too.
_STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
_CODES = (torch.int8, torch.uint8)
_INSTRUCTION_SETS = ("portable", "AVX2", "AVX-512")  # in the order of `enum processor` in one_pass.c
_THREADS_VARIABLE = "ROUNDPIPE_OPTIMIZER_THREADS"
_CORES_FOR_LAUNCHES = 2  # cores left free for device threads, which launch kernels, on a machine with many cores


class Kernel(enum.IntEnum):
    """The functions in rules.h, each the arithmetic of one optimizer; in the order of `enum rule` in one_pass.c."""

    ADAM = 0
    AMSGRAD = 1
    LION = 2
    SGD = 3
    SGD_FIRST = 4
    SGD_NEXT = 5
    SGD_FIRST_NESTEROV = 6
    SGD_NEXT_NESTEROV = 7


_NUM_STATES = dict.fromkeys(Kernel, 1) | {Kernel.ADAM: 2, Kernel.AMSGRAD: 3, Kernel.SGD: 0}


class _Parameter(ctypes.Structure):
    """The same fields as `struct parameter` in one_pass.c."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("old_weight", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("more_gradients", ctypes.c_void_p),
        ("num_more_gradients", ctypes.c_int64),
        ("states", ctypes.c_void_p * MAX_STATES),
        ("scales", ctypes.c_void_p * MAX_STATES),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("weight_precision", ctypes.c_int32),
        ("gradient_precision", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("num_factors", ctypes.c_int32),
        ("factors", ctypes.c_float * MAX_FACTORS),
        ("numbers", ctypes.c_float * _MAX_NUMBERS),
        ("storage", ctypes.c_int32 * MAX_STATES),
        ("seeds", ctypes.c_uint32 * MAX_STATES),
        ("rounds_master", ctypes.c_int32),
        ("master_seed", ctypes.c_uint32),
    )


class _GradientSum(ctypes.Structure):
    """The same fields as `struct gradient_sum` in one_pass.c."""

    _fields_ = (
        ("gradients", ctypes.c_void_p),
        ("num_gradients", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("precision", ctypes.c_int32),
        ("of_chunks", ctypes.c_void_p),
    )


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """What one step of an optimizer does with the parameters of a group, as its rule gives it to the kernel."""

    kernel: Kernel
    numbers: tuple[float, ...]  # in the order in which the function in rules.h reads them
    gradient_factors: tuple[float, ...] = ()  # the gradient is first multiplied by each of these, in order
    step: int = 0  # the number of the step, by which states in low bits are rounded; 0 if there are none

    @functools.cached_property
    def packed(self) -> tuple[Any, Any, Any]:
        """Factors, numbers and seeds as arrays for the kernel."""
        seeds = [seed_of(self.step, index) for index in range(MAX_STATES)] if self.step else ()
        return (
            (ctypes.c_float * MAX_FACTORS)(*self.gradient_factors),
            (ctypes.c_float * _MAX_NUMBERS)(*self.numbers),
            (ctypes.c_uint32 * MAX_STATES)(*seeds),
        )


_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]  # dtype, shape, strides
_Forms = tuple[_Form, _Form, _Form | None]  # the forms of master, gradient and weight


@dataclasses.dataclass
class KernelParameter:
    """The tensors of one parameter for the kernel: dense, of the same shape, with the same order of elements in memory.

    Can be used for several steps: after a step `forget_memory` drops all tensors but the states, and before the next
    step `renew` sets the new tensors without another check.
    """

    master: StoredMaster | None  # may be given as a tensor
    gradient: torch.Tensor | None
    states: Sequence[torch.Tensor]  # such as moments, in the order in which the function in rules.h takes them
    weight: torch.Tensor | None  # receives the updated values, rounded to its dtype; None if only the master is updated
    numbers: StepNumbers
    more_gradients: Sequence[torch.Tensor] = ()  # of the form of `gradient`; the sum of all, in order, counts
    scales: Sequence[torch.Tensor] = ()  # of the states of 8 bits, in the order of `states`
    first: int = 0  # number of the first element in the whole parameter, of which the tensors may be a range
    rounding: Rounding | None = None  # that of a master of 24 bits
    _packed: _Parameter | None = dataclasses.field(default=None, init=False, repr=False, compare=False)
    _addresses: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)  # of `more_gradients`
    _forms: _Forms | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given: Any = self.master
        if isinstance(given, torch.Tensor):
            self.master = WholeMaster(given)

    def packed(self) -> _Parameter:
        """The parameter as a C struct. The first call raises RuntimeError if the tensors do not match."""
        packed = self._packed
        if packed is None:
            _check(self)
        master, gradient, weight, numbers = self.master, self.gradient, self.weight, self.numbers
        assert master is not None
        assert gradient is not None
        if packed is None:
            scales = iter(self.scales)
            of_states = [next(scales).data_ptr() if state.dtype in _CODES else None for state in self.states]
            packed = _Parameter(
                states=(ctypes.c_void_p * MAX_STATES)(*[state.data_ptr() for state in self.states]),
                scales=(ctypes.c_void_p * MAX_STATES)(*of_states),
                storage=(ctypes.c_int32 * MAX_STATES)(*[_STORAGE[state.dtype] for state in self.states]),
                first=self.first,
                count=gradient.numel(),
                weight_precision=0 if weight is None else _PRECISIONS[weight.dtype],
                gradient_precision=_PRECISIONS[gradient.dtype],
            )
            self._forms = _forms(master, gradient, weight)
        # What differs between two steps.
        for name, part in master.parts().items():
            setattr(packed, name, part.data_ptr())
        packed.gradient = gradient.data_ptr()
        packed.rule, packed.num_factors = numbers.kernel, len(numbers.gradient_factors)
        packed.factors, packed.numbers, packed.seeds = numbers.packed
        packed.rounds_master = self.rounding is not None
        packed.master_seed = 0 if self.rounding is None else self.rounding.seed
        packed.weight = None if weight is None else weight.data_ptr()
        packed.num_more_gradients = len(self.more_gradients)
        self._addresses = (ctypes.c_void_p * len(self.more_gradients))(*[g.data_ptr() for g in self.more_gradients])
        packed.more_gradients = ctypes.addressof(self._addresses) if self.more_gradients else None
        self._packed = packed
        return packed

    def renew(
        self,
        master: StoredMaster,
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
        numbers: StepNumbers,
        more_gradients: Sequence[torch.Tensor] = (),
    ) -> bool:
        """Set the tensors of another step with the same states.

        Returns False and changes nothing if the dtype, shape or strides of a tensor differ from the step before: then
        the caller needs a new KernelParameter. The tensors may lie in other memory than before.
        """
        if self._packed is None or self._forms != _forms(master, gradient, weight):
            return False
        if len(self.states) != _NUM_STATES[numbers.kernel]:
            return False
        if any(more.dtype is not gradient.dtype or more.shape != gradient.shape for more in more_gradients):
            return False
        self.master, self.gradient, self.weight, self.numbers = master, gradient, weight, numbers
        self.more_gradients = more_gradients
        return True

    def forget_memory(self) -> None:
        """Drop the references to the model's memory, so that an object kept for later steps does not keep it alive."""
        self.master = self.gradient = self.weight = None
        self.more_gradients = ()


def _forms(master: StoredMaster, gradient: torch.Tensor, weight: torch.Tensor | None) -> _Forms:
    """The forms of master, gradient and weight.

    A halved master has the form of its bfloat16 weight, so its dtype differs from that of a float32 master.
    """
    whole, *_ = master.parts().values()
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
        self._update, self._join, self._halve = loaded.roundpipe_update, loaded.roundpipe_join, loaded.roundpipe_halve
        self._update.argtypes, self._update.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
        self._join.argtypes, self._join.restype = (*[ctypes.c_void_p] * 4, ctypes.c_int64), None
        self._halve.argtypes, self._halve.restype = (*[ctypes.c_void_p] * 4, ctypes.c_int64), None
        self._squares = loaded.roundpipe_squares
        self._squares.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._squares.restype = None
        loaded.roundpipe_team.restype = ctypes.c_void_p
        self._team = loaded.roundpipe_team(num_threads)
        if not self._team:
            raise MemoryError("no memory for the optimizer's threads")
        self.is_built_with_the_package = library.is_built_with_the_package(loaded)
        self._use_processor = loaded.roundpipe_use_processor

    def update(self, parameters: Sequence[KernelParameter]) -> None:
        """Update all parameters in one call. If tensors do not match, raises RuntimeError and updates none."""
        packed = (_Parameter * len(parameters))(*[parameter.packed() for parameter in parameters])
        # ctypes releases the interpreter lock during the call; `packed` and the tensors stay alive until it returns.
        start_s = time.perf_counter()
        self._update(self._team, packed, len(parameters))
        _rate.note(sum(struct.count for struct in packed), time.perf_counter() - start_s)
        for parameter in parameters:
            if parameter.rounding is not None:
                parameter.rounding.count += 1

    def squares(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[float]:
        """The sum of the squares of each gradient, in double precision, in one call.

        A gradient is the sum of one or several dense tensors of one dtype and shape, added in float32 as `update` adds
        them. The result depends neither on the number of threads nor on the instruction set.
        """
        addresses = [(ctypes.c_void_p * len(parts))(*[part.data_ptr() for part in parts]) for parts in gradients]
        packed = (_GradientSum * len(gradients))()
        num_chunks = 0
        for struct, parts, of_parts in zip(packed, gradients, addresses, strict=True):
            _check_gradient(parts)
            struct.gradients, struct.num_gradients = ctypes.addressof(of_parts), len(parts)
            struct.count, struct.precision = parts[0].numel(), _PRECISIONS[parts[0].dtype]
            num_chunks += -(-struct.count // _CHUNK)
        of_chunks, sums = (ctypes.c_double * max(num_chunks, 1))(), (ctypes.c_double * len(gradients))()
        if gradients:
            packed[0].of_chunks = ctypes.addressof(of_chunks)
            self._squares(self._team, packed, len(gradients), sums)
        return list(sums)

    def instruction_set(self) -> str:
        """The instructions that the kernel uses on this processor. Must not be called during an update."""
        return _INSTRUCTION_SETS[self._use_processor(len(_INSTRUCTION_SETS) - 1)]

    def join(self, halves: HalvedMaster, to: torch.Tensor) -> None:
        """Write the values of `halves` into a float32 tensor."""
        _check_halves(halves, to)
        low = _require("low", halves.low, torch.int16, torch.uint16)
        self._join(to.data_ptr(), halves.weight.data_ptr(), low.data_ptr(), halves.ties.data_ptr(), to.numel())

    def halve(self, values: torch.Tensor, to: HalvedMaster) -> None:
        """Write float32 `values` into both halves of `to`. The weight of `to` becomes `values` rounded."""
        _check_halves(to, values)
        low = _require("low", to.low, torch.int16, torch.uint16)
        self._halve(to.weight.data_ptr(), low.data_ptr(), to.ties.data_ptr(), values.data_ptr(), values.numel())


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
    needed = _NUM_STATES[parameter.numbers.kernel]
    if len(parameter.states) != needed:
        name = parameter.numbers.kernel.name
        raise RuntimeError(f"the optimizer kernel needs {needed} states for {name}, got {len(parameter.states)}.")
    master = parameter.master
    if isinstance(master, HalvedMaster):
        if not master.has_ties and parameter.rounding is None:
            raise RuntimeError("the optimizer kernel needs the rounding of a master of 24 bits.")
        _require("weight", parameter.weight, torch.bfloat16)
        _check_halves(master, parameter.gradient, tuple(_PRECISIONS))
        whole = master.weight
    else:
        whole = _require("master", None if master is None else master.joined(), torch.float32)
    tensors = [whole, _require("gradient", parameter.gradient, *_PRECISIONS)]
    tensors += [_require("gradient", more, tensors[1].dtype) for more in parameter.more_gradients]
    tensors += [_require("state", state, *_STORAGE) for state in parameter.states]
    _check_scales(parameter)
    if parameter.weight is not None:
        tensors.append(_require("weight", parameter.weight, *_PRECISIONS))
    _require_one_layout(tensors)


def _check_scales(parameter: KernelParameter) -> None:
    """Raise RuntimeError unless each state of 8 bits has the scales of its blocks."""
    with_codes = [state for state in parameter.states if state.dtype in _CODES]
    needed = [num_scales(state.numel()) for state in with_codes]
    scales = [_require("scale", scale, torch.float32) for scale in parameter.scales]
    if [scale.numel() for scale in scales] != needed or not all(scale.is_contiguous() for scale in scales):
        listed = "; ".join(_described(scale) for scale in scales) or "none"
        raise RuntimeError(f"the optimizer kernel needs scales of {needed} elements for 8-bit states, got {listed}.")
    if with_codes and not all(state.is_contiguous() for state in with_codes):
        raise RuntimeError("the optimizer kernel needs contiguous 8-bit states: their blocks follow row-major order.")


def _check_gradient(parts: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError unless the parts of a gradient are dense tensors of one form."""
    tensors = [_require("gradient", part, *([parts[0].dtype] if at else _PRECISIONS)) for at, part in enumerate(parts)]
    _require_one_layout(tensors)


def _check_halves(
    halves: HalvedMaster, values: torch.Tensor | None, precisions: Sequence[torch.dtype] = (torch.float32,)
) -> None:
    """Raise RuntimeError unless `values` and the halves describe the same elements."""
    values = _require("values", values, *precisions)
    _require("weight", halves.weight, torch.bfloat16)
    _require_one_layout([values, halves.weight])
    count = values.numel()
    if not halves.has_ties:
        parts = [("low", _require("low", halves.low, torch.int8), count)]
    else:
        low, ties = _require("low", halves.low, torch.int16, torch.uint16), _require("ties", halves.ties, torch.uint8)
        parts = [("low", low, count), ("ties", ties, -(-count // 8))]
    for name, flat, needed in parts:
        if not flat.is_contiguous() or flat.numel() < needed:
            raise RuntimeError(f"{name} of a halved master needs {needed} elements, got {_described(flat)}.")


def _require(name: str, tensor: torch.Tensor | None, *precisions: torch.dtype) -> torch.Tensor:
    """Return `tensor`; raises RuntimeError unless it is a strided tensor in host memory with one of the dtypes."""
    if tensor is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise RuntimeError(f"the optimizer kernel needs a strided CPU tensor as {name}, got {_described(tensor)}.")
    if tensor.dtype not in precisions:
        names = " or ".join(str(precision) for precision in precisions)
        raise RuntimeError(f"the optimizer kernel needs {name} in {names}, got {_described(tensor)}.")
    return tensor


def _require_one_layout(tensors: Sequence[torch.Tensor]) -> None:
    if not share_layout(tensors):
        listed = "; ".join(f"{tuple(tensor.shape)} with strides {tensor.stride()}" for tensor in tensors)
        raise RuntimeError(f"the optimizer kernel needs dense tensors of one shape and memory order, got {listed}.")


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
