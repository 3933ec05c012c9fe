"""Copies activations, gradients and layer images between host memory and one device.

Called by runtime.stage on the device's worker thread. Knows streams and buffers, never schedules or models. Every copy
returns an event, or makes the compute stream wait for it where compute is the only reader.

Device memory by exact size, used again.

Owned by a worker, called on its thread only. A buffer comes with the events after which it may be written again. Where
there is room a new one is taken rather than waiting for those: then uploads for the next call start while this one
still uses its weights.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from roundpipe.devices import Device, Event, StreamKind
from roundpipe.errors import UsageError
from roundpipe.runtime.values import Bundle
from roundpipe.store import Layout
from roundpipe.store.layout import dense_stride, span_elements


class DeviceBuffers:
    """`writer` is the stream that writes a buffer first; `reader` the one that uses it afterwards."""

    def __init__(self, device: Device, writer: StreamKind, reader: StreamKind) -> None:
        self._device = device
        self._writer, self._reader = writer, reader
        self._free: dict[int, deque[tuple[torch.Tensor, Sequence[Event]]]] = defaultdict(deque)
        self._total_bytes = 0
        # By the ids of a buffer and of a layout, both of which exist as long as the entry.
        self._views: dict[int, dict[int, tuple[Layout, list[torch.Tensor]]]] = {}

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

    def views(self, buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """Return the tensors of `layout` in a buffer, those of an earlier call where there was one.

        Making views takes much longer than finding them, and so does hashing a layout: equal ones should be one object.
        """
        of_buffer = self._views.setdefault(id(buffer), {})
        known = of_buffer.get(id(layout))
        if known is None:
            known = of_buffer[id(layout)] = (layout, layout.views(buffer))
        return known[1]

    def release_unused(self) -> None:
        """Free buffers go back to the allocator."""
        for size, buffers in self._free.items():
            self._total_bytes -= size * len(buffers)
            for buffer, _ in buffers:
                self._views.pop(id(buffer), None)
        self._free.clear()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        buffer = self._device.device_empty_strided((num_bytes,), (1,), torch.uint8, self._writer)
        self._device.lend(buffer, self._reader)
        self._total_bytes += num_bytes
        return buffer


_ALIGNMENT_BYTES = 64  # what matrix kernels on the CPU look at; torch gives every tensor of its own at least this


class Transfer:
    def __init__(self, device: Device) -> None:
        self._device = device

    def up(self, tensors: Sequence[torch.Tensor], after: Sequence[Event]) -> list[torch.Tensor]:
        """Tensors on the device, ready for compute; `after` are the events that fill the sources."""
        device, stream = self._device, StreamKind.ACTIVATIONS_UP
        if not tensors:
            return []
        for event in after:
            device.stream_wait(stream, event)
        copies = [_copy_of(tensor, self._on_device(stream), self._copier(stream)) for tensor in tensors]
        device.stream_wait(StreamKind.COMPUTE, device.record(stream))
        for copy in copies:
            device.lend(copy, StreamKind.COMPUTE)
        return copies

    def down(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Host copies of what compute has made so far; they are filled once the event has passed."""
        device, stream = self._device, StreamKind.ACTIVATIONS_DOWN
        device.stream_wait(stream, device.record(StreamKind.COMPUTE))
        copies = [_copy_of(tensor.detach(), device.host_empty_strided, self._copier(stream)) for tensor in tensors]
        return copies, device.record(stream)

    def down_bundle(self, bundle: Bundle) -> tuple[Bundle, Event]:
        copies, event = self.down(bundle.tensors)
        return bundle.with_tensors(copies), event

    def gradients_down(self, host: torch.Tensor, gradients: torch.Tensor) -> Event:
        """Fill host memory with what compute has gathered so far."""
        device, stream = self._device, StreamKind.GRADS_DOWN
        device.poison(host, stream)
        device.stream_wait(stream, device.record(StreamKind.COMPUTE))
        device.copy(host, gradients, stream)
        return device.record(stream)

    def let_downloads_finish_first(self) -> None:
        """Compute queued from now on may overwrite what is being downloaded."""
        self._device.stream_wait(StreamKind.COMPUTE, self._device.record(StreamKind.ACTIVATIONS_DOWN))

    def _copier(self, stream: StreamKind) -> Callable[[torch.Tensor, torch.Tensor], None]:
        return lambda destination, source: self._device.copy(destination, source, stream)

    def _on_device(self, stream: StreamKind) -> Callable[..., torch.Tensor]:
        return lambda shape, stride, dtype: self._device.device_empty_strided(shape, stride, dtype, stream)


def check_movable(tensor: torch.Tensor) -> None:
    """Refuse what cannot travel, before a copy of it is queued."""
    kind = "nested" if tensor.is_nested else tensor.layout if tensor.layout is not torch.strided else tensor.device.type
    if kind not in ("cpu", "cuda"):
        shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
        raise UsageError(
            f"a tensor{shape} is {kind} and cannot travel between host and device; inputs, labels and what layers "
            "return must be dense tensors with values, on the CPU or on CUDA."
        )


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the tensor's own device, made by compute, outside any graph."""

    def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device)

    return _copy_of(tensor.detach(), allocate, torch.Tensor.copy_)


def _copy_of(
    tensor: torch.Tensor,
    allocate: Callable[..., torch.Tensor],
    copy: Callable[[torch.Tensor, torch.Tensor], object],
) -> torch.Tensor:
    """A copy with the very same strides and alignment: kernels choose their order of summation by them.

    A view with gaps or repeats (a slice, an expansion) is copied with the memory it spans, and viewed again.
    """
    check_movable(tensor)
    tensor = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    shape, stride, lead = tuple(tensor.shape), tuple(tensor.stride()), _misalignment_elements(tensor)
    is_dense = dense_stride(tensor) == stride
    if tensor.numel() == 0 or (is_dense and not lead):
        duplicate = allocate(shape, stride, tensor.dtype)
        copy(duplicate, tensor)
        return duplicate
    span = span_elements(shape, stride)
    memory = allocate((lead + span,), (1,), tensor.dtype)[lead:]
    duplicate = memory.as_strided(shape, stride, memory.storage_offset())
    if is_dense:
        copy(duplicate, tensor)
    else:
        copy(memory, tensor.as_strided((span,), (1,), tensor.storage_offset()))
    return duplicate


def _misalignment_elements(tensor: torch.Tensor) -> int:
    """How many elements the tensor starts behind a boundary that every allocator keeps."""
    misalignment_bytes = tensor.data_ptr() % _ALIGNMENT_BYTES
    return 0 if misalignment_bytes % tensor.itemsize else misalignment_bytes // tensor.itemsize
