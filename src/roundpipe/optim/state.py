"""Memory for an optimizer's state: checked before any of it is allocated, and prepared before the first step needs it.

The system creates fresh pages slowly, and the moments of a large model are many pages. So a Reserve creates them in the
background while the first call still computes.
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
    """Raise HostMemoryError if the state that this step will allocate does not fit. Counts each parameter once.

    `reserved`: ids of parameters whose state has memory already. `in_one_pass`: optimizer copies are updated without
    memory for their full values and gradients.
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
    """The number of tensors of a parameter's size in its state; 0 for unknown kinds of optimizer."""
    if isinstance(optimizer, _WITH_TWO_MOMENTS):
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return 0


_MOST_THREADS = 4
_CORES_PER_THREAD = 4  # with few cores there is no thread: the first call needs the cores itself


class Reserve:
    """Moments, filled with zeros, for the first step of optimizer copies."""

    def __init__(self) -> None:
        self._moments: dict[int, list[torch.Tensor]] = {}  # by id of the copy

    def fill(self, copies: Sequence[OptimizerCopy], num_moments: int) -> None:
        """Allocate moments for all large copies, and start threads that create their pages.

        From the last copy to the first, as gradients land. Does nothing if there are too few cores or too little
        memory; the first step then allocates the moments.
        """
        num_threads = min(_MOST_THREADS, usable_cores() // _CORES_PER_THREAD)
        worthwhile = [copy for copy in reversed(copies) if copy.nbytes >= HUGE_PAGE_BYTES]
        available = available_host_bytes()
        needed = sum((num_moments + 1) * copy.nbytes for copy in worthwhile)  # 1: for gradients and low halves
        if not num_threads or (available is not None and needed > available):
            return
        memory: list[torch.Tensor] = []
        for copy in worthwhile:
            self._moments[id(copy)] = [host_zeros_like(copy) for _ in range(num_moments)]
            memory += [*self._moments[id(copy)], *copy.memory_of_step()]
        for first in range(num_threads if memory else 0):
            name = f"{THREAD_PREFIX}pages-{first}"
            thread = threading.Thread(target=_make_ready, args=(memory[first::num_threads],), name=name, daemon=True)
            try:
                start_thread(thread)
            except RuntimeError:  # the system starts no more threads: pages are created when the first step writes
                return

    def __contains__(self, copy_id: object) -> bool:
        return copy_id in self._moments

    def moment_for(self, copy: OptimizerCopy) -> torch.Tensor:
        """A new tensor of zeros with the shape, dtype and strides of a copy; from the reserve if it has one."""
        mine = self._moments.get(id(copy))
        return mine.pop() if mine else host_zeros_like(copy)


def _make_ready(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        make_pages_ready(tensor)
