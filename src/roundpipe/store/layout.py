"""Where each tensor of a layer lies in one flat byte buffer.

Used for host weights, host gradients and their images on a device, so that a layer moves in one copy.
Knows sizes and strides only, neither parameters nor devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 256  # what device allocators give, so kernels take the same path as on a tensor of its own


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    offset_bytes: int
    num_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor at this place of a flat uint8 buffer."""
        return self.shaped(buffer[self.offset_bytes : self.offset_bytes + self.num_bytes])

    def shaped(self, piece: torch.Tensor) -> torch.Tensor:
        """The tensor in a flat uint8 tensor of exactly its bytes."""
        piece = piece.view(self.dtype)
        return piece.as_strided(self.shape, self.stride, piece.storage_offset())


@dataclasses.dataclass(frozen=True)
class Layout:
    places: tuple[TensorPlace, ...]
    total_bytes: int

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [place.view(buffer) for place in self.places]


def lay_out(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Layout:
    """Places for `tensors` one after the other, aligned; all of `dtype` where that is given."""
    places, offset = [], 0
    for tensor in tensors:
        element = dtype or tensor.dtype
        num_bytes = tensor.numel() * element.itemsize
        places.append(TensorPlace(offset, num_bytes, tuple(tensor.shape), dense_stride(tensor), element))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(tuple(places), offset)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it fills its memory without gaps (channels-last, say), else contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return contiguous_stride(tensor.shape)
        expected *= size
    return tuple(tensor.stride())


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a strided view touches."""
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
