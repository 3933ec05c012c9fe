"""Host memory: whether it suffices, buffers of exact size, the layout of tensors in a buffer, pinned pages.

Knows byte sizes and layouts, never layers or optimizers. The code that allocates a
buffer or registers pages must also close them. Closing only unpins, because tensors may still use the memory.

[Note: one storage per tensor] A layer's weights lie in one buffer, so that one copy moves all of them. Each tensor of
the buffer nevertheless has a separate storage object for its part of the memory, for two reasons: torch.save writes the
whole storage of a tensor, and other libraries treat tensors that share a storage as tied weights.

[Note: registered pages] CUDA refuses a copy that begins in registered memory and ends outside of it. A page may hold
several tensors, so only pages that one tensor fills are registered. Unless a tensor consists of whole pages, the page
of its first byte is left out too: then a copy of the whole tensor that the user makes begins in unregistered memory and
works. RoundPipe divides its own copies where registered memory begins and ends.

A Layout says where each tensor of a layer lies in one flat byte buffer, so that one copy moves the whole layer. Host
weights, gradients and their images on a device use layouts.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import functools
import logging
import mmap
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe.devices import HostPinner
from roundpipe.errors import ConfigError, HostMemoryError
from roundpipe.host_facts import available_host_bytes
from roundpipe.monitor import THREAD_PREFIX, start_thread

ALIGNMENT_BYTES = 256  # the alignment of device allocators: kernels take the same path as for a separate tensor


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """The place of one tensor in a flat byte buffer."""

    offset_bytes: int
    num_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor at this place of a flat uint8 buffer."""
        return self.shaped(buffer[self.offset_bytes : self.offset_bytes + self.num_bytes])

    def shaped(self, piece: torch.Tensor) -> torch.Tensor:
        """A flat uint8 tensor of exactly `num_bytes` bytes, viewed with the dtype, shape and strides of this place."""
        piece = piece.view(self.dtype)
        return piece.as_strided(self.shape, self.stride, piece.storage_offset())


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The places of several tensors in one buffer.

    Layouts are compared by identity: `lay_out` returns the same object for equal layouts.
    """

    places: tuple[TensorPlace, ...]
    total_bytes: int

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors at all places of a flat uint8 buffer."""
        return [place.view(buffer) for place in self.places]


def lay_out(tensors: Sequence[torch.Tensor]) -> Layout:
    """A layout that places `tensors` one after the other, each aligned to ALIGNMENT_BYTES."""
    places, offset = [], 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.itemsize
        places.append(TensorPlace(offset, num_bytes, tuple(tensor.shape), dense_stride(tensor), tensor.dtype))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return _layout_of(tuple(places), offset)


@functools.lru_cache(maxsize=256)  # equal layers share one Layout object, and so the views that buffers cache for it
def _layout_of(places: tuple[TensorPlace, ...], total_bytes: int) -> Layout:
    return Layout(places, total_bytes)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if it fills its memory without gaps, as channels-last does; else contiguous strides."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return contiguous_stride(tensor.shape)
        expected *= size
    return tuple(tensor.stride())


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


logger = logging.getLogger("roundpipe")
CHECK_VARIABLE = "ROUNDPIPE_HOST_MEMORY_CHECK"
_REFUSE, _WARN, _OFF = _POLICIES = ("refuse", "warn", "off")


# Whether memory suffices.


def require_host_memory(
    needs: Mapping[str, int],
    what: str,
    advice: str,
    *,
    async_needs: Mapping[str, int] = {},
    async_advice: str = "",
    available: int | None = None,
) -> None:
    """Raise HostMemoryError with a table if the sum of `needs` (bytes by name) exceeds the available memory.

    `available`: the bytes of another machine, which the environment variable does not concern; by default, what this
    process can still allocate. `async_needs` is the memory that asynchronous steps need in addition. If `needs` fit but
    the total with `async_needs` does not, the table is logged as a warning. ROUNDPIPE_HOST_MEMORY_CHECK=warn turns the
    error into a warning; =off disables the check.
    """
    policy = _policy()  # first, so that a wrong value of the variable is reported even if everything fits
    if available is not None:
        policy = _REFUSE
    elif policy != _OFF:
        available = available_host_bytes()
    total = sum(needs.values())
    total_async = total + sum(async_needs.values())
    if available is None or total_async <= available:
        return
    rows = {name: value for name, value in needs.items() if value} | {"needed in all": total}
    if async_needs:
        rows |= {**async_needs, "needed in all, asynchronous steps": total_async}
    if total <= available:
        table = memory_table({**rows, "available": available, "missing": total_async - available})
        logger.warning("%s with asynchronous steps does not fit into host memory:\n%s\n%s", what, table, async_advice)
        return
    table = memory_table({**rows, "available": available, "missing": total - available})
    message = f"{what} does not fit into host memory:\n{table}\n{advice}"
    if policy == _WARN:
        logger.warning("%s", message)
        return
    raise HostMemoryError(
        f"{message} If this counts memory that you do not need, set {CHECK_VARIABLE}=warn (or off) in the environment."
    )


def memory_table(rows: Mapping[str, int]) -> str:
    """A text table of names and sizes in GB, one row per line."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value / 1e9:12.3f} GB" for name, value in rows.items())


def _policy() -> str:
    policy = os.environ.get(CHECK_VARIABLE) or _REFUSE
    if policy not in _POLICIES:
        raise ConfigError(f"{CHECK_VARIABLE}={policy!r} is unknown; give one of {', '.join(_POLICIES)}, or unset it.")
    return policy


# Buffers in host memory.

HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; older systems reject the call and create pages at the first write


class HostBuffer:
    """Zero-filled host memory of an exact size, pinned if a pinner is given and can pin it.

    `tensor` is the whole memory as a flat uint8 tensor. Views keep the memory alive; `close` only unpins it.
    """

    def __init__(self, num_bytes: int, pinner: HostPinner | None) -> None:
        self._pages = _map_pages(num_bytes) if num_bytes else None
        self.num_bytes = num_bytes
        self.tensor = self._piece(0, num_bytes)
        self._pinner = pinner
        self._pinned = bool(num_bytes and pinner and pinner.pin(self.tensor.data_ptr(), num_bytes))

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """Return one tensor for each entry of `layout`, each with its own storage: [Note: one storage per tensor]."""
        return [place.shaped(self._piece(place.offset_bytes, place.num_bytes)) for place in layout.places]

    def _piece(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes, offset=offset_bytes)

    def close(self) -> None:
        """Unpin the memory. A second call does nothing."""
        if self._pinned and self._pinner is not None:
            self._pinner.unpin(self.tensor.data_ptr())
        self._pinned = False


def host_zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros in host memory with the shape, dtype and strides of a dense tensor.

    Large tensors use huge pages if the system has any, which reduces TLB misses, and their memory goes back to the
    system when they are freed: malloc may keep it.
    """
    if tensor.nbytes < HUGE_PAGE_BYTES:
        return torch.zeros_like(tensor, memory_format=torch.preserve_format, device="cpu")
    flat = HostBuffer(tensor.nbytes, None).tensor.view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def make_pages_ready(tensor: torch.Tensor) -> None:
    """Create the memory pages of a dense tensor now. Values do not change, and other threads may use the tensor."""
    _advise(tensor, _MADV_POPULATE_WRITE)


def read_pages_ahead(tensor: torch.Tensor) -> None:
    """Let the system read a dense tensor that lies in a mapped file. Values do not change."""
    _advise(tensor, getattr(mmap, "MADV_WILLNEED", None))


def read_ahead(tensors: Sequence[torch.Tensor]) -> None:
    """Begin to read dense tensors that lie in mapped files. Does not wait."""

    def read() -> None:
        for tensor in tensors:
            read_pages_ahead(tensor)

    if tensors:
        # On another thread: the system may wait for the disk before it takes more requests.
        thread = threading.Thread(target=read, name=f"{THREAD_PREFIX}read-ahead", daemon=True)
        with contextlib.suppress(RuntimeError):  # the system has no more threads: who needs the tensors reads them
            start_thread(thread)


def _advise(tensor: torch.Tensor, advice: int | None) -> None:
    """Tell the system how the memory of a dense tensor will be used. It may ignore it."""
    if sys.platform != "linux" or not tensor.nbytes or advice is None:
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def forget_file_pages(tensor: torch.Tensor) -> None:
    """Give the pages of a tensor over a mapped file back to the system. Its values are read from the file when needed.

    Pages that the tensor does not fill stay: other tensors may lie in them.
    """
    if sys.platform != "linux":
        return
    pages = _pages_inside(tensor)
    if pages:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), _MADV_DONTNEED)


def forget_freed_memory() -> None:
    """Give memory that malloc keeps of freed tensors back to the system.

    Temporary tensors leave gaps between small objects that stay; without this they add up to half of what is loaded.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # of glibc alone
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _map_pages(num_bytes: int) -> Any:
    """Map anonymous memory. Requests huge pages if the memory is large enough and the system supports them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class LandingBuffer:
    """Host memory into which the gradients of one layer are downloaded. Reused once all of them are released."""

    def __init__(self, owner: LandingBuffers, host: HostBuffer) -> None:
        self.memory = host.tensor
        self._owner, self._host = owner, host
        # By id of the layout. The entry keeps the layout alive, so that no other layout can get the same id.
        self._views: dict[int, tuple[Layout, list[torch.Tensor]]] = {}
        self.holders = 0  # number of gradients that are not released yet; guarded by the owner's lock

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """A tensor for each place of a layout. Cached, because making a tensor takes microseconds."""
        found = self._views.get(id(layout))
        if found is None:
            found = self._views[id(layout)] = (layout, self._host.views(layout))
        return found[1]

    def release(self) -> None:
        """Release one of the gradients. When all are released, the buffer is free."""
        with self._owner.lock:
            self.holders -= 1
            if not self.holders:
                self._owner.free[self._host.num_bytes].append(self)

    def close(self) -> None:
        self._host.close()


class LandingBuffers:
    """All landing buffers of one model. `free` has the unused buffers, by size in bytes."""

    def __init__(self, pinner: HostPinner | None) -> None:
        self.lock = threading.Lock()
        self.free: dict[int, list[LandingBuffer]] = defaultdict(list)
        self._pinner = pinner
        self._all: list[LandingBuffer] = []

    def take(self, layout: Layout, num_gradients: int) -> tuple[LandingBuffer, list[torch.Tensor]]:
        """Return a buffer that is not in use, and a tensor in it for each place of a layout.

        The buffer is free again after `release` was called `num_gradients` times.
        """
        with self.lock:
            free = self.free[layout.total_bytes]
            buffer = free.pop() if free else None
        if buffer is None:
            buffer = LandingBuffer(self, HostBuffer(layout.total_bytes, self._pinner))
            with self.lock:
                self._all.append(buffer)
        buffer.holders = num_gradients  # needs no lock: no other thread has this buffer now
        return buffer, buffer.views(layout)

    def close(self) -> None:
        """Unpin all buffers. Gradients may still use them."""
        for buffer in self._all:
            buffer.close()


# Pinning of memory that the user has allocated.


class RegisteredPages:
    """The pages of the user's tensors that are pinned where they lie; see [Note: registered pages]."""

    def __init__(self, tensors: Sequence[torch.Tensor], pinner: HostPinner) -> None:
        self._pinner = pinner
        self._pinned: list[range] = []  # address ranges, ascending and disjoint
        # Sorted by address, so that a new range can overlap only with the last one.
        for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
            pages = _pages_inside(tensor)
            overlaps = self._pinned and pages.start < self._pinned[-1].stop
            if pages and not overlaps and pinner.pin(pages.start, len(pages)):
                self._pinned.append(pages)
        self._edges = sorted({edge for pages in self._pinned for edge in (pages.start, pages.stop)})

    def cuts(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The byte offsets in a tensor at which a copy of it must be divided, ascending."""
        if not _is_dense(tensor):
            return ()  # a tensor with gaps is packed into other memory before it is copied
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = self._edges[bisect.bisect_right(self._edges, start) : bisect.bisect_left(self._edges, end)]
        return tuple(edge - start for edge in inside)

    def close(self) -> None:
        """Unpin all pages."""
        for pages in self._pinned:
            self._pinner.unpin(pages.start)
        self._pinned = []


def _pages_inside(tensor: torch.Tensor) -> range:
    """The range of addresses to register for a tensor, in whole pages; empty for a tensor with gaps."""
    if not _is_dense(tensor):
        return range(0)
    page = mmap.PAGESIZE
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-start // page) * page, end // page * page
    if first == start and last != end:
        first += page
    return range(first, max(first, last))


def _is_dense(tensor: torch.Tensor) -> bool:
    return dense_stride(tensor) == tuple(tensor.stride())


# The memory of tensors.


def without_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, dtype and strides whose storage has no bytes."""
    made = torch.empty_like(like, requires_grad=False, memory_format=torch.preserve_format)
    made.untyped_storage().resize_(0)
    return made


def memory_users(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Two reference counts that grow with the tensors, arrays and storages that share a tensor's memory.

    None if this version of torch does not provide them.
    """
    storage = tensor.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else (count(storage._cdata), sys.getrefcount(storage))


# Memory-mapped files.


class MappedFiles:
    """The address ranges of mapped files. Tensors in mapped files take no memory until they are copied or written."""

    def __init__(self) -> None:
        ranges = sorted(_mapped_files())
        self._starts, self._ends = [start for start, _ in ranges], [end for _, end in ranges]

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a mapped file."""
        if tensor.is_meta or tensor.device.type != "cpu" or not tensor.nbytes:
            return False
        place = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        return place >= 0 and tensor.data_ptr() < self._ends[place]


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Yield (start, end) addresses of every mapped file of this process; nothing if the system does not list them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path and not path[0].startswith(("/dev/", "/memfd:")):
            start, end = addresses.split("-")
            yield int(start, 16), int(end, 16)
