"""Pins tensors in the memory they have.

Owned by LayerStore when a model is wrapped with pin_model="register".

[Note: whose pages] CUDA refuses a copy that begins in registered memory and ends outside of it. Memory that is not ours
alone has neighbours, so a page is registered only when one tensor fills it; and unless a tensor is whole pages, the
page of its first byte is left out, so that the user can go on copying it as a whole. Our own copies are cut where
registration begins and ends.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Sequence

import torch

from roundpipe.devices import HostPinner
from roundpipe.store.layout import dense_stride


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
