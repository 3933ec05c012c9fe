"""Device memory by exact size, used again.

Owned by a worker, called on its thread only. A buffer comes with the events after which it may be written again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from roundpipe.devices import Device, Event, StreamKind


class DeviceBuffers:
    """`writer` is the stream that writes a buffer first; `reader` the one that uses it afterwards."""

    def __init__(self, device: Device, writer: StreamKind, reader: StreamKind) -> None:
        self._device = device
        self._writer, self._reader = writer, reader
        self._free: dict[int, list[tuple[torch.Tensor, Sequence[Event]]]] = defaultdict(list)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer that the writer may write from now on."""
        if not self._free[num_bytes]:
            try:
                return self._allocate(num_bytes)
            except torch.OutOfMemoryError:
                self.release_unused()
                return self._allocate(num_bytes)
        buffer, free_after = self._free[num_bytes].pop()
        for event in free_after:
            self._device.stream_wait(self._writer, event)
        self._device.poison(buffer, self._writer)
        return buffer

    def give(self, buffer: torch.Tensor, free_after: Sequence[Event]) -> None:
        self._free[buffer.numel()].append((buffer, free_after))

    def release_unused(self) -> None:
        """Free buffers go back to the allocator."""
        self._free.clear()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        buffer = self._device.device_empty_strided((num_bytes,), (1,), torch.uint8, self._writer)
        self._device.lend(buffer, self._reader)
        return buffer
