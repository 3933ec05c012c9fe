"""Device memory by exact size, used again.

Owned by a worker, called on its thread only. A buffer comes with the events after which it may be written again. Where
there is room a new one is taken rather than waiting for those: then uploads for the next call start while this one
still uses its weights.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from roundpipe.devices import Device, Event, StreamKind


class DeviceBuffers:
    """`writer` is the stream that writes a buffer first; `reader` the one that uses it afterwards."""

    def __init__(self, device: Device, writer: StreamKind, reader: StreamKind) -> None:
        self._device = device
        self._writer, self._reader = writer, reader
        self._free: dict[int, deque[tuple[torch.Tensor, Sequence[Event]]]] = defaultdict(deque)
        self._total_bytes = 0

    def take(self, num_bytes: int, room_bytes: int = 0) -> torch.Tensor:
        """A buffer that the writer may write from now on. `room_bytes`: what all of them may take, if need be."""
        free = self._free[num_bytes]
        may_grow = self._total_bytes + num_bytes <= room_bytes
        if not free or (may_grow and not all(event.done() for event in free[0][1])):
            try:
                return self._allocate(num_bytes)
            except torch.OutOfMemoryError:
                self.release_unused()
                return self._allocate(num_bytes)
        buffer, free_after = free.popleft()
        for event in free_after:
            self._device.stream_wait(self._writer, event)
        self._device.poison(buffer, self._writer)
        return buffer

    def has_one(self, num_bytes: int, room_bytes: int) -> bool:
        """Whether `take` needs no memory beyond what there is, or what there is room for."""
        return bool(self._free[num_bytes]) or self._total_bytes + num_bytes <= room_bytes

    def give(self, buffer: torch.Tensor, free_after: Sequence[Event]) -> None:
        self._free[buffer.numel()].append((buffer, free_after))

    def release_unused(self) -> None:
        """Free buffers go back to the allocator."""
        self._total_bytes -= sum(size * len(buffers) for size, buffers in self._free.items())
        self._free.clear()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        buffer = self._device.device_empty_strided((num_bytes,), (1,), torch.uint8, self._writer)
        self._device.lend(buffer, self._reader)
        self._total_bytes += num_bytes
        return buffer
