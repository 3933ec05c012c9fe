"""Memory for an optimizer's moments, made ready while the first call still computes.

A system makes fresh pages slowly, and a large model's moments are many of them. Used by optim.adam: once a model begins
to train, the pages of all moments that do not exist yet are made in the background; the first step finds them ready.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from roundpipe.optim.native.kernel import usable_cores
from roundpipe.store import OptimizerCopy
from roundpipe.store.host_buffer import HUGE_PAGE_BYTES, host_zeros_like, make_pages_ready
from roundpipe.store.host_memory import available_host_bytes
from roundpipe.waiting import THREAD_PREFIX, start_thread

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
