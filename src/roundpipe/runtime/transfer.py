"""Bundles of the tensors in nested values, copies between host memory and one device, and reusable device buffers.

A Bundle is a nested value as a flat tuple of distinct tensors and the structure of the nest. A tensor that occurs twice
in a value occurs once in the bundle. This keeps aliasing, and the order in which autograd sums the tensor's gradients,
as in the plain model.

Knows streams and buffers, never schedules or models. `down` and `gradients_down` return an event that passes when the
copies are complete; `up` makes the compute stream wait instead.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from roundpipe.devices import Device, Event, StreamKind
from roundpipe.errors import ArgumentTypeError, UsageError
from roundpipe.store import Layout
from roundpipe.store.host_memory import dense_stride


@dataclasses.dataclass(frozen=True)
class _TensorAt:
    """A leaf of the nest: the tensor at this position of the bundle."""

    position: int


_ALONE: tuple[Any, ...] = (_TensorAt(0),)  # the leaves of a value that is one tensor, the common case
_LEAF = tree_structure(0)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A nested value taken apart: `tensors` can be copied or replaced one by one, `unpack` restores the nest."""

    tensors: tuple[torch.Tensor, ...]
    _leaves: tuple[Any, ...]
    _spec: TreeSpec
    sharing_memory: frozenset[int] = frozenset()  # positions of tensors that overlapped in memory when packed

    @classmethod
    def pack(cls, value: Any) -> Bundle:
        """Take a nested value apart. Raises ArgumentTypeError for an object that hides a tensor with a graph."""
        if isinstance(value, torch.Tensor):
            return cls((value,), _ALONE, _LEAF)
        leaves, spec = tree_flatten(value)
        # Tensors are compared by identity: like autograd, this treats two views of the same memory as two tensors.
        position_of: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        packed = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                _refuse_hidden_graph(leaf)
                packed.append(leaf)
                continue
            if id(leaf) not in position_of:
                position_of[id(leaf)] = len(tensors)
                tensors.append(leaf)
            packed.append(_TensorAt(position_of[id(leaf)]))
        return cls(tuple(tensors), tuple(packed), spec, _sharing_memory(tensors))

    def unpack(self) -> Any:
        if self._leaves is _ALONE:
            return self.tensors[0]
        leaves = [self.tensors[leaf.position] if isinstance(leaf, _TensorAt) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Bundle:
        assert len(tensors) == len(self.tensors)
        return Bundle(tuple(tensors), self._leaves, self._spec, self.sharing_memory)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Bundle:
        return self.with_tensors([change(tensor) for tensor in self.tensors])

    def detached(self) -> Bundle:
        return self.map(torch.Tensor.detach)

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        return tuple(tensor.requires_grad for tensor in self.tensors)


def _sharing_memory(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Positions of strided tensors whose memory range overlaps that of another tensor."""
    if len(tensors) < 2:
        return frozenset()
    spans = sorted(
        (
            tensor.data_ptr(),
            tensor.data_ptr() + span_elements(tensor.shape, tensor.stride()) * tensor.itemsize,
            position,
        )
        for position, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and tensor.numel()
    )
    # Sorted by start: a range overlaps an earlier one if it starts before the furthest end so far.
    sharing: set[int] = set()
    last_end, last_position = 0, -1
    for start, end, position in spans:
        if start < last_end:
            sharing |= {position, last_position}
        if end > last_end:
            last_end, last_position = end, position
    return frozenset(sharing)


def _refuse_hidden_graph(leaf: Any) -> None:
    """Raise for an object that holds a tensor which requires grad: pytree does not flatten the object, so the
    tensor's gradient would be lost without notice."""
    if isinstance(leaf, torch.nn.Module) or not hasattr(leaf, "__dict__"):
        return
    if any(isinstance(held, torch.Tensor) and held.requires_grad for held in tree_leaves(vars(leaf))):
        raise ArgumentTypeError(
            f"a {type(leaf).__qualname__} holds a tensor that requires grad; gradients cannot be tracked through it: "
            "pass tuples, lists and dicts between layers, or register the class with torch.utils._pytree "
            "(register_dataclass, register_pytree_node)."
        )


class DeviceBuffers:
    """Reusable device buffers, found by exact size.

    `writer` is the stream that fills a buffer, `reader` the stream that uses it afterwards. A free buffer carries the
    events after which it may be overwritten. `take` allocates instead of waiting for those events while all buffers
    together stay below a limit: then uploads for the next call start while this call still uses its weights.
    """

    def __init__(self, device: Device, writer: StreamKind, reader: StreamKind) -> None:
        self._device = device
        self._writer, self._reader = writer, reader
        self._free: dict[int, deque[tuple[torch.Tensor, Sequence[Event]]]] = defaultdict(deque)
        self._total_bytes = 0

    def take(self, num_bytes: int, room_bytes: int = 0) -> torch.Tensor:
        """A buffer that the writer stream may fill.

        room_bytes: while all buffers together stay within this size, allocate a new one instead of waiting for events.
        """
        free = self._free[num_bytes]
        may_grow = self._total_bytes + num_bytes <= room_bytes
        # free[0] was given back first, so its events are the first to pass.
        if not free or (may_grow and not all(event.done() for event in free[0][1])):
            try:
                return self._allocate(num_bytes)
            except torch.OutOfMemoryError:
                # Memory is short: releasing the free buffers of other sizes may be enough.
                self.release_unused()
                return self._allocate(num_bytes)
        buffer, free_after = free.popleft()
        for event in free_after:
            self._device.stream_wait(self._writer, event)
        self._device.poison(buffer, self._writer)
        return buffer

    def has_one(self, num_bytes: int, room_bytes: int) -> bool:
        """Whether `take` finds a free buffer of this size, or may allocate one within `room_bytes`."""
        return bool(self._free[num_bytes]) or self._total_bytes + num_bytes <= room_bytes

    def give(self, buffer: torch.Tensor, free_after: Sequence[Event]) -> None:
        """Return a buffer; it may be overwritten once all events of `free_after` have passed."""
        self._free[buffer.numel()].append((buffer, free_after))

    def part_with(self, buffer: torch.Tensor) -> None:
        """Leave a buffer that was taken to the caller: it no longer counts."""
        self._total_bytes -= buffer.numel()

    def take_back(self, buffer: torch.Tensor) -> None:
        """Count a buffer again that `part_with` has left to the caller, who then gives it back."""
        self._total_bytes += buffer.numel()

    def release_unused(self) -> None:
        """Return all free buffers to the allocator."""
        for size, buffers in self._free.items():
            self._total_bytes -= size * len(buffers)
        self._free.clear()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        buffer = self._device.device_empty_strided((num_bytes,), (1,), torch.uint8, self._writer)
        self._device.lend(buffer, self._reader)
        self._total_bytes += num_bytes
        return buffer


def views_of(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return a tensor for each place of `layout` in a device buffer, the same ones each time.

    Making views takes much longer than finding them. They are an attribute of the buffer and are freed together with
    it: a table by the buffer's id would give them to a later tensor with the same id.
    """
    cache: dict[int, tuple[Layout, list[torch.Tensor]]] = vars(buffer).setdefault("_roundpipe_views", {})
    found = cache.get(id(layout))
    if found is None:
        found = cache[id(layout)] = (layout, layout.views(buffer))  # keeps the layout alive, so its id stays valid
    return found[1]


@dataclasses.dataclass
class Traffic:
    """Bytes copied between host memory and a device, without weights."""

    activations_up: int = 0
    activations_down: int = 0
    gradients_down: int = 0


# CUDA sends copies of pageable memory up to this size with its commands. A copy of pinned memory waits for the copy
# engine, behind weights.
_MOST_BYTES_WITH_COMMANDS = 64 * 1024
_ALIGNMENT_BYTES = 64  # CPU matrix kernels depend on it; torch allocates every tensor with at least this alignment


class Transfer:
    """Copies of activations, buffers and gradients between host memory and one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.traffic = Traffic()  # of the present task

    def up(self, tensors: Sequence[torch.Tensor], after: Sequence[Event]) -> list[torch.Tensor]:
        """Copies of host tensors on the device. The compute stream waits for the copies.

        after: events that pass when the host tensors are filled.
        """
        device, stream = self._device, StreamKind.ACTIVATIONS_UP
        if not tensors:
            return []
        for event in after:  # an event may belong to another device, whose download fills a tensor
            device.stream_wait(stream, event)
        if not after:  # the caller's inputs and labels; what a download fills could not be read here yet
            tensors = [_off_the_queue(tensor) for tensor in tensors]
        copies = [
            _copy_of(
                tensor,
                lambda shape, stride, dtype: device.device_empty_strided(shape, stride, dtype, stream),
                lambda destination, source: device.copy(destination, source, stream),
            )
            for tensor in tensors
        ]
        self.traffic.activations_up += sum(copy.nbytes for copy in copies)
        device.stream_wait(StreamKind.COMPUTE, device.record(stream))
        for copy in copies:
            device.lend(copy, StreamKind.COMPUTE)  # allocated on the upload stream, read by compute
        return copies

    def down(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Host copies of device tensors as the compute issued so far leaves them, and the event that completes them."""
        device, stream = self._device, StreamKind.ACTIVATIONS_DOWN
        device.stream_wait(stream, device.record(StreamKind.COMPUTE))
        copies = [
            _copy_of(tensor.detach(), device.host_empty_strided, lambda new, old: device.copy(new, old, stream))
            for tensor in tensors
        ]
        self.traffic.activations_down += sum(copy.nbytes for copy in copies)
        return copies, device.record(stream)

    def down_bundle(self, bundle: Bundle) -> tuple[Bundle, Event]:
        """`down` for the tensors of a bundle."""
        copies, event = self.down(bundle.tensors)
        return bundle.with_tensors(copies), event

    def gradients_down(self, host: torch.Tensor, gradients: torch.Tensor) -> Event:
        """Copy a layer's flat gradient buffer into `host`, after the compute issued so far."""
        device, stream = self._device, StreamKind.GRADS_DOWN
        device.poison(host, stream)  # landing buffers are reused: old values would hide a missing wait
        device.stream_wait(stream, device.record(StreamKind.COMPUTE))
        device.copy(host, gradients, stream)
        self.traffic.gradients_down += gradients.nbytes
        return device.record(stream)

    def let_downloads_finish_first(self) -> None:
        """Make later compute wait for queued downloads, because it may overwrite their sources in place."""
        self._device.stream_wait(StreamKind.COMPUTE, self._device.record(StreamKind.ACTIVATIONS_DOWN))


def _off_the_queue(tensor: torch.Tensor) -> torch.Tensor:
    """A pageable copy of a small pinned host tensor, whose upload waits for no copy of weights; else the tensor."""
    is_small = tensor.device.type == "cpu" and 0 < tensor.nbytes <= _MOST_BYTES_WITH_COMMANDS
    return duplicate(tensor) if is_small and tensor.is_pinned() else tensor


def check_movable(tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that cannot be copied between host and device (nested, sparse, meta)."""
    kind = "nested" if tensor.is_nested else tensor.layout if tensor.layout is not torch.strided else tensor.device.type
    if kind not in ("cpu", "cuda"):
        shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
        raise UsageError(
            f"a tensor{shape} is {kind} and cannot travel between host and device; inputs, labels and what layers "
            "return must be dense tensors with values, on the CPU or on CUDA."
        )


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy on the tensor's device, made by the current stream."""

    def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device)

    return _copy_of(tensor.detach(), allocate, torch.Tensor.copy_)


def _copy_of(
    tensor: torch.Tensor,
    allocate: Callable[..., torch.Tensor],
    copy: Callable[[torch.Tensor, torch.Tensor], object],
) -> torch.Tensor:
    """A copy with the same strides and alignment, because kernels choose their order of summation by them.

    For a view with gaps or repeated elements (a slice, an expansion), copies the memory that the view spans and makes
    the same view of the copy.
    """
    check_movable(tensor)
    # Lazy conjugate and negative views have no values in memory that a byte copy could take.
    tensor = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
    shape, stride, lead = tuple(tensor.shape), tuple(tensor.stride()), _misalignment_elements(tensor)
    is_dense = tensor.is_contiguous() or dense_stride(tensor) == stride
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


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements in memory from the first to the last that a strided view touches, both included."""
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _misalignment_elements(tensor: torch.Tensor) -> int:
    """Offset of the tensor's first element from the last 64-byte boundary, in elements."""
    misalignment_bytes = tensor.data_ptr() % _ALIGNMENT_BYTES
    return 0 if misalignment_bytes % tensor.itemsize else misalignment_bytes // tensor.itemsize
