"""Checks, before an optimizer makes the first of its state, that all of it fits into host memory.

Called by optim.adam at the beginning of a step, and by optim.stepper for optimizers of torch.

Memory for an optimizer's moments, made ready while the first call still computes.

A system makes fresh pages slowly, and a large model's moments are many of them. Used by optim.adam: once a model begins
to train, the pages of all moments that do not exist yet are made in the background; the first step finds them ready.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from roundpipe.monitor import THREAD_PREFIX, start_thread
from roundpipe.optim.native.kernel import usable_cores
from roundpipe.store import OptimizerCopy
from roundpipe.store.host_memory import (
    HUGE_PAGE_BYTES,
    available_host_bytes,
    host_zeros_like,
    make_pages_ready,
    require_host_memory,
)

_MOST_THREADS = 4
_CORES_PER_THREAD = 4  # where there are few, the first call needs them itself


class Reserve:
    def __init__(self) -> None:
        self._moments: dict[int, list[torch.Tensor]] = {}  # by the id of the copy they are for

    def fill(self, copies: Sequence[OptimizerCopy], num_moments: int) -> None:
        """For those that are worth it, in the order in which gradients come: from the last copy to the first."""
        num_threads = min(_MOST_THREADS, usable_cores() // _CORES_PER_THREAD)
        worthwhile = [copy for copy in reversed(copies) if copy.nbytes >= HUGE_PAGE_BYTES]
        available = available_host_bytes()
        needed = sum((num_moments + 1) * copy.nbytes for copy in worthwhile)  # gradients and lower halves, too
        if not num_threads or (available is not None and needed > available):
            return  # memory is taken by the first step, if it comes to one
        memory: list[torch.Tensor] = []
        for copy in worthwhile:
            self._moments[id(copy)] = [host_zeros_like(copy) for _ in range(num_moments)]
            memory += [*self._moments[id(copy)], *copy.memory_of_step()]
        for first in range(num_threads if memory else 0):
            name = f"{THREAD_PREFIX}pages-{first}"
            thread = threading.Thread(target=_make_ready, args=(memory[first::num_threads],), name=name, daemon=True)
            try:
                start_thread(thread)
            except RuntimeError:  # no more threads can be started: the first step makes the pages
                return

    def __contains__(self, copy_id: object) -> bool:
        return copy_id in self._moments

    def moment_for(self, copy: OptimizerCopy) -> torch.Tensor:
        """Zeros like the copy, each time others."""
        mine = self._moments.get(id(copy))
        return mine.pop() if mine else host_zeros_like(copy)


def _make_ready(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        make_pages_ready(tensor)


_WITH_TWO_MOMENTS = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta),
)
_ADVICE = (
    "None of it was made, and no weight was changed. Free memory, train fewer parameters (requires_grad_(False) before "
    "wrapping), or use an optimizer with less state, such as torch.optim.SGD."
)
_checked: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()  # ids of its parameters


def require_state_memory(optimizer: Optimizer, reserved: Container[int] = (), *, in_one_pass: bool = False) -> None:
    """Raise HostMemoryError if state that this step will make does not fit. Each parameter is counted once.

    reserved: ids of parameters whose state has memory already.
    in_one_pass: whether optimizer copies are updated without memory for their full values and gradients.
    """
    checked = _checked.setdefault(optimizer, set())
    needs = {"optimizer state": 0, "optimizer copies": 0, "gradients in the copies' precision": 0}
    found: list[int] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            is_new = id(param) not in checked and id(param) not in reserved and not optimizer.state.get(param)
            if not is_new or param.device.type != "cpu":
                continue
            found.append(id(param))
            needs["optimizer state"] += _num_moments(optimizer, group) * param.nbytes
            if isinstance(param, OptimizerCopy):
                needs["optimizer copies"] += param.bytes_to_come(in_one_pass=in_one_pass)
                if param.has_only_low_gradient and not in_one_pass:
                    needs["gradients in the copies' precision"] += param.nbytes
    if found:
        require_host_memory(needs, f"a step of {type(optimizer).__name__}", _ADVICE)
        checked.update(found)


def _num_moments(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Tensors of a parameter's size that its state holds; 0 for kinds of optimizer that are not known."""
    if isinstance(optimizer, _WITH_TWO_MOMENTS):
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return 0
