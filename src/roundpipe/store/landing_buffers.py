"""Host memory that gradients come down into, one piece per layer, used again.

Owned by LayerStore; workers take, whoever has used the last gradient of a piece gives it back. Pieces are exactly as
large as the gradients, and pinned where weights are.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

from roundpipe.devices import HostPinner
from roundpipe.store.host_buffer import HostBuffer
from roundpipe.store.layout import Layout


class LandingBuffer:
    """One piece. It goes back to the others when nobody holds it any more."""

    def __init__(self, owner: LandingBuffers, host: HostBuffer) -> None:
        self._owner, self._host = owner, host
        self._holders = 0

    @property
    def memory(self) -> torch.Tensor:
        return self._host.tensor

    def views(self, layout: Layout) -> list[torch.Tensor]:
        return self._host.views(layout)

    def hold(self) -> None:
        with self._owner.lock:
            self._holders += 1

    def let_go(self) -> None:
        with self._owner.lock:
            self._holders -= 1
            if not self._holders:
                self._owner.free[len(self._host)].append(self)

    def close(self) -> None:
        self._host.close()


class LandingBuffers:
    def __init__(self, pinner: HostPinner | None) -> None:
        self.lock = threading.Lock()
        self.free: dict[int, list[LandingBuffer]] = defaultdict(list)
        self._pinner = pinner
        self._all: list[LandingBuffer] = []

    def take(self, num_bytes: int) -> LandingBuffer:
        """A piece of this size that nobody uses, held once for the caller."""
        with self.lock:
            buffer = self.free[num_bytes].pop() if self.free[num_bytes] else None
        if buffer is None:
            buffer = LandingBuffer(self, HostBuffer(num_bytes, self._pinner))
            with self.lock:
                self._all.append(buffer)
        buffer.hold()
        return buffer

    def close(self) -> None:
        for buffer in self._all:
            buffer.close()
