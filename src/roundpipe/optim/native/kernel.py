"""The one-pass Adam kernel as seen from Python: what it needs to know of each tensor, and the threads it runs on.

Called by optim.one_pass. Knows pointers and precisions; the caller knows which tensors belong together and when they
may be touched. Every tensor is checked before its address is handed to C.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import time
from collections.abc import Sequence

import torch

from roundpipe.optim.native import library
from roundpipe.store.layout import dense_stride

MAX_FACTORS = 4
_PRECISIONS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
LOW_PRECISIONS = (torch.bfloat16, torch.float16)
_THREADS_VARIABLE = "ROUNDPIPE_OPTIMIZER_THREADS"
_CORES_FOR_LAUNCHES = 2  # on a machine that has them to spare: devices must never wait for their next kernel


@dataclasses.dataclass(frozen=True)
class AdamRule:
    """The numbers of one parameter group at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    step: int
    gradient_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class SplitMaster:
    """A float32 master as the upper half its bfloat16 weight is, and the rest. See the note in the C source."""

    weight: torch.Tensor
    low: torch.Tensor
    ties: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Segment:
    """One parameter: dense tensors of one shape and layout. `weight` is where the rounded result goes, if anywhere."""

    master: torch.Tensor | SplitMaster
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    largest: torch.Tensor | None
    weight: torch.Tensor | None
    rule: AdamRule


class _Rule(ctypes.Structure):
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


class _Segment(ctypes.Structure):
    _fields_ = (
        ("master", ctypes.c_void_p),
        ("old_weight", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("weight_precision", ctypes.c_int32),
        ("gradient_precision", ctypes.c_int32),
        ("rule", _Rule),
    )


class OnePassKernel:
    """The kernel with a team of threads of its own."""

    def __init__(self, loaded: ctypes.CDLL, num_threads: int) -> None:
        self.num_threads = num_threads
        self._adam, self._join, self._split = loaded.roundpipe_adam, loaded.roundpipe_join, loaded.roundpipe_split
        self._adam.argtypes, self._adam.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
        self._join.argtypes, self._join.restype = (*[ctypes.c_void_p] * 4, ctypes.c_int64), None
        self._split.argtypes, self._split.restype = (*[ctypes.c_void_p] * 4, ctypes.c_int64), None
        loaded.roundpipe_team.restype = ctypes.c_void_p
        self._team = loaded.roundpipe_team(num_threads)
        if not self._team:
            raise MemoryError("no memory for the optimizer's threads")

    def adam(self, segments: Sequence[Segment]) -> None:
        """Update all of them, in one go over the team. Raises RuntimeError, updating none, if tensors do not match."""
        for segment in segments:
            _check(segment)
        packed = (_Segment * len(segments))(*map(_packed, segments))
        start_s = time.perf_counter()
        self._adam(self._team, packed, len(segments))
        _rate.note(sum(segment.gradient.numel() for segment in segments), time.perf_counter() - start_s)

    def join(self, master: SplitMaster, to: torch.Tensor) -> None:
        _check_split(master, to)
        self._join(to.data_ptr(), master.weight.data_ptr(), master.low.data_ptr(), master.ties.data_ptr(), to.numel())

    def split(self, values: torch.Tensor, to: SplitMaster) -> None:
        """Also writes the weight: `values` rounded."""
        _check_split(to, values)
        self._split(to.weight.data_ptr(), to.low.data_ptr(), to.ties.data_ptr(), values.data_ptr(), values.numel())


def share_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether strided tensors have one shape, fill their memory without gaps and order their elements alike in it."""
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    order = _memory_order(tensors[0])
    is_dense = dense_stride(tensors[0]) == tuple(tensors[0].stride())
    return is_dense and all(_memory_order(tensor) == order for tensor in tensors)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The strides that decide where elements lie; that of a dimension of one element does not."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _check(segment: Segment) -> None:
    master = segment.master
    if isinstance(master, SplitMaster):
        _require("weight", segment.weight, torch.bfloat16)
        _check_split(master, segment.gradient, tuple(_PRECISIONS))
        whole = master.weight
    else:
        _require("master", master, torch.float32)
        whole = master
    _require("gradient", segment.gradient, *_PRECISIONS)
    moments = [segment.first, segment.second, *([] if segment.largest is None else [segment.largest])]
    for moment in moments:
        _require("moment", moment, torch.float32)
    if segment.weight is not None:
        _require("weight", segment.weight, *_PRECISIONS)
        moments.append(segment.weight)
    _require_one_layout([whole, segment.gradient, *moments])


def _check_split(
    master: SplitMaster, values: torch.Tensor, precisions: Sequence[torch.dtype] = (torch.float32,)
) -> None:
    """Raise unless `values` and the parts of `master` describe the same elements."""
    _require("values", values, *precisions)
    _require("weight", master.weight, torch.bfloat16)
    _require("low", master.low, torch.int16, torch.uint16)
    _require("ties", master.ties, torch.uint8)
    _require_one_layout([values, master.weight])
    count = values.numel()
    for name, flat, needed in (("low", master.low, count), ("ties", master.ties, -(-count // 8))):
        if not flat.is_contiguous() or flat.numel() < needed:
            raise RuntimeError(f"{name} of a split master needs {needed} elements, got {_described(flat)}.")


def _require(name: str, tensor: torch.Tensor | None, *precisions: torch.dtype) -> None:
    if tensor is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise RuntimeError(f"the Adam kernel needs a strided CPU tensor as {name}, got {_described(tensor)}.")
    if tensor.dtype not in precisions:
        names = " or ".join(str(precision) for precision in precisions)
        raise RuntimeError(f"the Adam kernel needs {name} in {names}, got {_described(tensor)}.")


def _require_one_layout(tensors: Sequence[torch.Tensor]) -> None:
    if not share_layout(tensors):
        listed = "; ".join(f"{tuple(tensor.shape)} with strides {tensor.stride()}" for tensor in tensors)
        raise RuntimeError(f"the Adam kernel needs dense tensors of one shape and memory order, got {listed}.")


def _described(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} ({tensor.layout}, {tensor.device})"


class _Rate:
    """How many parameters are updated in a second, by the most recent steps."""

    SMOOTHING = 0.02  # a layer is a small part of a step
    ENOUGH = 10_000  # parameters; fewer show nothing

    def __init__(self) -> None:
        self.per_second: float | None = None

    def note(self, count: int, seconds: float) -> None:
        if count < self.ENOUGH or seconds <= 0:
            return
        new = count / seconds
        self.per_second = new if self.per_second is None else self.per_second + self.SMOOTHING * (new - self.per_second)


_rate = _Rate()


def measured_rate() -> float | None:
    """Parameters per second of this process's one-pass updates so far; None if there were none."""
    return _rate.per_second


def one_pass_kernel() -> OnePassKernel | None:
    """This process's kernel; None where it cannot be built. A child after fork() has a team of its own."""
    return _kernel_of(os.getpid())


@functools.cache
def _kernel_of(pid: int) -> OnePassKernel | None:
    loaded = library.load()
    return None if loaded is None else OnePassKernel(loaded, _num_threads())


def _num_threads() -> int:
    asked = os.environ.get(_THREADS_VARIABLE)
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(f"{_THREADS_VARIABLE}={asked!r} is no number of threads; give 1 or more, or unset it.")
        return int(asked)
    cores = usable_cores()
    return cores - _CORES_FOR_LAUNCHES if cores > 2 * _CORES_FOR_LAUNCHES else cores


def usable_cores() -> int:
    """Those this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _packed(segment: Segment) -> _Segment:
    master, weight = segment.master, segment.weight
    split = master if isinstance(master, SplitMaster) else None
    return _Segment(
        master=_address(master) if isinstance(master, torch.Tensor) else None,
        old_weight=_address(split.weight) if split else None,
        low=_address(split.low) if split else None,
        ties=_address(split.ties) if split else None,
        weight=_address(weight),
        gradient=_address(segment.gradient),
        first=_address(segment.first),
        second=_address(segment.second),
        largest=_address(segment.largest),
        count=segment.gradient.numel(),
        weight_precision=0 if weight is None else _PRECISIONS[weight.dtype],
        gradient_precision=_PRECISIONS[segment.gradient.dtype],
        rule=_packed_rule(segment.rule),
    )


@functools.lru_cache(maxsize=16)  # most parameters of a step share one
def _packed_rule(rule: AdamRule) -> _Rule:
    return _Rule(
        factors=rule.gradient_factors,
        num_factors=len(rule.gradient_factors),
        shrink=1 - rule.lr * rule.weight_decay if rule.is_decoupled else 1.0,
        decay=0.0 if rule.is_decoupled else rule.weight_decay,
        beta1_rest=1 - rule.beta1,
        beta2=rule.beta2,
        beta2_rest=1 - rule.beta2,
        step_size=rule.lr / (1 - rule.beta1**rule.step),
        correction=math.sqrt(1 - rule.beta2**rule.step),
        eps=rule.eps,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
