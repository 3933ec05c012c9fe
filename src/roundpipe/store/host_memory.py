"""Pins tensors in the memory they have.

Owned by LayerStore when a model is wrapped with pin_model="register".

[Note: whose pages] CUDA refuses a copy that begins in registered memory and ends outside of it. Memory that is not ours
alone has neighbours, so a page is registered only when one tensor fills it; and unless a tensor is whole pages, the
page of its first byte is left out, so that the user can go on copying it as a whole. Our own copies are cut where
registration begins and ends.

How much host memory there is, and whether what is asked for fits.

Asked by the store and by optimizers before they take memory. Reads /proc and the control group; takes nothing itself.

One exact-size piece of host memory, pinned or not.

Allocated by the store. Rounded up to whole pages and no further; whoever allocates it closes it.

[Note: one storage per tensor] A layer's weights lie in one buffer, so that they move in one copy. The tensors handed to
the user must not show that: torch.save writes the whole storage of a tensor, and other libraries take tensors of one
storage for tied weights. So each tensor of a buffer has a storage of its own, over its part of the same memory.

Host memory that gradients come down into, one piece per layer, used again.

Owned by LayerStore; workers take, whoever has used the last gradient of a piece gives it back. Pieces are exactly as
large as the gradients, and pinned where weights are.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe.devices import HostPinner
from roundpipe.errors import ConfigError, HostMemoryError
from roundpipe.store.layout import Layout, dense_stride

logger = logging.getLogger("roundpipe")
CHECK_VARIABLE = "ROUNDPIPE_HOST_MEMORY_CHECK"
_REFUSE, _WARN, _OFF = _POLICIES = ("refuse", "warn", "off")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """What this process can still take without being killed; None where the system does not tell."""
    limits = [value for value in (_meminfo_available(), _cgroup_available()) if value is not None]
    return min(limits) if limits else None


def require_host_memory(
    needs: Mapping[str, int], what: str, advice: str, *, async_needs: Mapping[str, int] = {}, async_advice: str = ""
) -> None:
    """Refuse with a table when the sum of `needs` (bytes) exceeds what is available.

    async_needs: what asynchronous steps take on top. If only that does not fit, the table is logged as a warning.
    """
    policy = _policy()
    available = None if policy == _OFF else available_host_bytes()
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
    """Names and bytes, one pair a line."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value / 1e9:12.3f} GB" for name, value in rows.items())


def _policy() -> str:
    policy = os.environ.get(CHECK_VARIABLE) or _REFUSE
    if policy not in _POLICIES:
        raise ConfigError(f"{CHECK_VARIABLE}={policy!r} is unknown; give one of {', '.join(_POLICIES)}, or unset it.")
    return policy


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_available() -> int | None:
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (_CGROUP / limit_name).read_text().strip()
            if limit == "max":
                return None
            return max(int(limit) - int((_CGROUP / usage_name).read_text()) + _reclaimable_bytes(), 0)
        except (OSError, ValueError):
            continue
    return None


def _reclaimable_bytes() -> int:
    """File pages the kernel gives back under pressure; they count as used in the control group."""
    for name in ("memory.stat", "memory/memory.stat"):
        try:
            pairs = dict(line.split() for line in (_CGROUP / name).read_text().splitlines())
            return int(pairs.get("inactive_file", 0)) + int(pairs.get("active_file", 0))
        except (OSError, ValueError):
            continue
    return 0


HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; others refuse it, and pages are made when they are first written


class HostBuffer:
    """`tensor` is the memory as flat bytes, zero-filled. Views keep the memory alive; `close` only unpins it."""

    def __init__(self, num_bytes: int, pinner: HostPinner | None) -> None:
        self._pages = _map_pages(num_bytes) if num_bytes else None
        self.tensor = self._piece(0, num_bytes)
        self._pinner = pinner
        self._pinned = bool(num_bytes and pinner and pinner.pin(self.tensor.data_ptr(), num_bytes))

    def __len__(self) -> int:
        return self.tensor.numel()

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """The tensors of a layout in this memory: see [Note: one storage per tensor]."""
        return [place.shaped(self._piece(place.offset_bytes, place.num_bytes)) for place in layout.places]

    def _piece(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes, offset=offset_bytes)

    def close(self) -> None:
        if self._pinned and self._pinner is not None:
            self._pinner.unpin(self.tensor.data_ptr())
        self._pinned = False


def host_zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of a dense tensor's shape, type and layout, in huge pages where there are any: long loops run faster."""
    if tensor.nbytes < HUGE_PAGE_BYTES:
        return torch.zeros_like(tensor, memory_format=torch.preserve_format)
    flat = HostBuffer(tensor.nbytes, None).tensor.view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def make_pages_ready(tensor: torch.Tensor) -> None:
    """Have the system make the pages of a dense tensor now, values untouched; it may be in use meanwhile."""
    if sys.platform != "linux" or not tensor.nbytes:
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def _map_pages(num_bytes: int) -> Any:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


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


class RegisteredPages:
    def __init__(self, tensors: Sequence[torch.Tensor], pinner: HostPinner) -> None:
        self._pinner = pinner
        self._pinned: list[range] = []  # ascending, apart
        for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
            pages = _pages_inside(tensor)
            overlaps = self._pinned and pages.start < self._pinned[-1].stop
            if pages and not overlaps and pinner.pin(pages.start, len(pages)):
                self._pinned.append(pages)
        self._edges = sorted({edge for pages in self._pinned for edge in (pages.start, pages.stop)})

    def cuts(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The bytes of a tensor before which a copy of it must be cut, in ascending order."""
        if not _is_dense(tensor):
            return ()  # it is packed before it is copied
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = self._edges[bisect.bisect_right(self._edges, start) : bisect.bisect_left(self._edges, end)]
        return tuple(edge - start for edge in inside)

    def close(self) -> None:
        for pages in self._pinned:
            self._pinner.unpin(pages.start)
        self._pinned = []


def _pages_inside(tensor: torch.Tensor) -> range:
    """Addresses of the pages to register; none for a tensor with gaps."""
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
