"""Memory for the state of optimizers: checked before it is allocated, and prepared ahead of the first step.

[Note: memory for state] A check that the moments fit into host memory runs before any moment is allocated. The system
creates fresh memory pages slowly, and the moments of a large model have many pages. So a Reserve creates these pages in
the background while the first call still computes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roundpipe.monitor import THREAD_PREFIX, start_thread
from roundpipe.optim.native.kernel import usable_cores
from roundpipe.store import OptimizerCopy
from roundpipe.store.host_memory import (
    HUGE_PAGE_BYTES,
    HostBuffer,
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
# For each optimizer, the ids of parameters whose memory for state was checked before.
_checked: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()


def require_state_memory(optimizer: Optimizer, reserved: Container[int] = (), *, in_one_pass: bool = False) -> None:
    """Raise HostMemoryError if the state that this step will allocate does not fit into host memory.

    A parameter that was part of an earlier check is not checked again. `reserved`: ids of parameters whose state has
    memory already. `in_one_pass`: the kernel updates masters without memory for their full values and
    gradients.
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
            needs["optimizer state"] += _num_moments(optimizer, group) * _state_bytes(param, in_one_pass)
            if isinstance(param, OptimizerCopy):
                needs["optimizer copies"] += param.bytes_to_come(in_one_pass=in_one_pass)
                if param.has_only_low_gradient and not in_one_pass:
                    needs["gradients in the copies' precision"] += param.nbytes
    if found:
        require_host_memory(needs, f"a step of {type(optimizer).__name__}", _ADVICE)
        checked.update(found)


def _state_bytes(param: Tensor, in_one_pass: bool) -> int:
    """Bytes of one moment of a parameter. Several machines divide those of a master between them."""
    is_divided = in_one_pass and isinstance(param, OptimizerCopy) and param.share is not None
    return moment_count(param) * param.element_size() if is_divided else param.nbytes


def moment_count(copy: Any) -> int:
    """The number of elements of a moment that this machine has."""
    count: int = copy.numel() if copy.share is None else copy.share.count_of(copy.numel())
    return count


def new_moment(copy: OptimizerCopy) -> Tensor:
    """A moment of zeros: in the form of the copy, or flat if several machines divide it between them."""
    if copy.share is None:
        return host_zeros_like(copy)
    num_bytes = moment_count(copy) * copy.element_size()
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(moment_count(copy), dtype=copy.dtype)
    return HostBuffer(num_bytes, None).tensor.view(copy.dtype)


def _num_moments(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size its state contains; 0 if the kind of optimizer is unknown."""
    if isinstance(optimizer, _WITH_TWO_MOMENTS):
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return 0


_MOST_THREADS = 4
_CORES_PER_THREAD = 4  # with fewer cores no thread starts: the first call needs all cores


class Reserve:
    """Zero-filled moments, allocated ahead of the first step; see [Note: memory for state]."""

    def __init__(self) -> None:
        self._moments: dict[int, list[torch.Tensor]] = {}  # by id of the copy

    def fill(self, copies: Sequence[OptimizerCopy], num_moments: int) -> None:
        """Allocate moments for all large copies, and start threads that create their pages.

        Begins with the last copy, because its gradient lands first. Does nothing if there are too few cores or too
        little memory; the first step then allocates the moments.
        """
        num_threads = min(_MOST_THREADS, usable_cores() // _CORES_PER_THREAD)
        worthwhile = [copy for copy in reversed(copies) if _state_bytes(copy, True) >= HUGE_PAGE_BYTES]
        available = available_host_bytes()
        needed = sum(
            (num_moments + 1) * _state_bytes(copy, True) for copy in worthwhile
        )  # + 1: gradients and low halves
        if not num_threads or (available is not None and needed > available):
            return
        memory: list[torch.Tensor] = []
        for copy in worthwhile:
            self._moments[id(copy)] = [new_moment(copy) for _ in range(num_moments)]
            memory += [*self._moments[id(copy)], *copy.memory_of_step()]
        for first in range(num_threads if memory else 0):
            name = f"{THREAD_PREFIX}pages-{first}"
            thread = threading.Thread(target=_make_ready, args=(memory[first::num_threads],), name=name, daemon=True)
            try:
                start_thread(thread)
            except RuntimeError:  # the system has no more threads: the first step creates pages as it writes to them
                return

    def __contains__(self, copy_id: object) -> bool:
        return copy_id in self._moments

    def moment_for(self, copy: OptimizerCopy) -> torch.Tensor:
        """A moment of zeros: from the reserve, or newly allocated."""
        mine = self._moments.get(id(copy))
        return mine.pop() if mine else new_moment(copy)


def _make_ready(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        make_pages_ready(tensor)
