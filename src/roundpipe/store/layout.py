"""Where each tensor of a layer lies in one flat byte buffer, so that the layer moves in one copy.

Used for host weights, gradients and their images on a device. Knows sizes and strides only, neither parameters nor
devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 256  # as device allocators align, so kernels take the same path as for a separate tensor


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
    """The places of several tensors in one buffer. Compared by identity; `lay_out` returns equal ones as one object."""

    places: tuple[TensorPlace, ...]
    total_bytes: int

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors at all places of a flat uint8 buffer."""
        return [place.view(buffer) for place in self.places]


def lay_out(tensors: Sequence[torch.Tensor]) -> Layout:
    """Aligned places for `tensors`, one after the other."""
    places, offset = [], 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.itemsize
        places.append(TensorPlace(offset, num_bytes, tuple(tensor.shape), dense_stride(tensor), tensor.dtype))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return _layout_of(tuple(places), offset)


@functools.lru_cache(maxsize=256)  # layers of one kind share a layout, and so the views that buffers keep for it
def _layout_of(places: tuple[TensorPlace, ...], total_bytes: int) -> Layout:
    return Layout(places, total_bytes)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor that fills its memory without gaps (channels-last, say); contiguous ones for others."""
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


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements between the first and the last one that a strided view touches, both included."""
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
