"""One exact-size piece of host memory, pinned or not.

Allocated by the store. Rounded up to whole pages and no further; whoever allocates it closes it.

[Note: one storage per tensor] A layer's weights lie in one buffer, so that they move in one copy. The tensors handed to
the user must not show that: torch.save writes the whole storage of a tensor, and other libraries take tensors of one
storage for tied weights. So each tensor of a buffer has a storage of its own, over its part of the same memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch

from roundpipe.devices import HostPinner
from roundpipe.store.layout import Layout

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
