"""The forms of packed weights: how values become codes and scales, and how a range of them becomes values again.

Knows flat tensors, never modules. A packed weight is one flat tensor of bytes: the parts of its form, such as codes and
scales, one after the other. So the store, the links and checkpoints carry it like any frozen parameter. The elements of
a weight, in their order in memory, are rows of equal length; a form expands whole rows. Here are the forms into which
plain weights are packed; `taken` has those of weights that come quantised.

[Note: one rounding] Values are the float32 product of a decoded code and its scale, rounded once to the weight's dtype.
No order of operations can change a bit of it, on any device, in any chunk.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from roundpipe.errors import ConfigError
from roundpipe.store.host_memory import host_zeros_like

_SCALE_DTYPE = torch.bfloat16  # codes are chosen with the rounded scale, so its rounding costs next to nothing
_MOVE = 16  # elements between the matrices of a stand-in: kernels want addresses that are multiples of 16 bytes
# Elements that are packed or expanded at a time, so that intermediate results stay small: a few MB on the host. On a
# GPU every chunk costs launches of kernels.
_CHUNK_ELEMENTS, _DEVICE_CHUNK_ELEMENTS = 1 << 18, 1 << 26

Shape = tuple[int, ...]
Parts = Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the tensors that a packed weight consists of."""

    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Form(abc.ABC):
    """How weights are stored.

    name: in names of parameters, in logs and in `print(model)`.
    rounds_to: the dtype to which values are rounded before they get the dtype of the weight; None for that alone.
    """

    name: str
    rounds_to: torch.dtype | None = None

    @abc.abstractmethod
    def row_elements(self, shape: Shape) -> int:
        """The elements of a row of a weight with this shape. The last row may be incomplete."""

    @abc.abstractmethod
    def parts(self, shape: Shape) -> list[Part]:
        """The parts of a weight with this shape."""

    @abc.abstractmethod
    def values(self, parts: Parts, shape: Shape, first: int, last: int) -> torch.Tensor:
        """The float32 values of the rows from `first` to `last`, which is not included."""


class FourBits:
    """Codes of four bits: the values of all sixteen. A byte holds two codes, the first one in its high half."""

    def __init__(self, *levels: float) -> None:
        self.levels = levels
        # By device. Dicts instead of functools.cache, which a compiler looks through: it would make a table in each
        # graph.
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._pairs: dict[torch.device, torch.Tensor] = {}

    def table(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = torch.tensor(self.levels, dtype=torch.float32, device=device)
        return self._tables[device]

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The float32 values, [rows, 2 n], of bytes [rows, n]."""
        if codes.device not in self._pairs:
            table, bytes_ = self.table(codes.device), torch.arange(256, device=codes.device)
            self._pairs[codes.device] = torch.stack([table[bytes_ >> 4], table[bytes_ & 15]], 1)
        return self._pairs[codes.device][codes.int()].flatten(1)


NF4 = FourBits(
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class BlockForm(Form):
    """A form with one scale for each block of elements, into which weights are packed. The last block is filled with
    zeros. `largest`: the value of the largest code."""

    block: int  # elements
    block_bytes: int  # of the codes of a block
    largest: float

    @abc.abstractmethod
    def encode(self, scaled: torch.Tensor) -> torch.Tensor:
        """The codes, [blocks, block_bytes] of uint8, of values [blocks, block] that were divided by their scales."""

    @abc.abstractmethod
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The float32 values, [blocks, block], of codes."""

    def row_elements(self, shape: Shape) -> int:
        return self.block

    def parts(self, shape: Shape) -> list[Part]:
        num_blocks = -(-math.prod(shape) // self.block)
        return [Part(torch.uint8, (num_blocks, self.block_bytes)), Part(_SCALE_DTYPE, (num_blocks,))]

    def values(self, parts: Parts, shape: Shape, first: int, last: int) -> torch.Tensor:
        codes, scales = parts
        return self.decode(codes[first:last]) * scales[first:last].float().unsqueeze(1)

    @torch.no_grad()
    def pack(self, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The packed bytes of a weight, on its device. A weight of another dtype is rounded to `dtype` first.

        Raises ConfigError if a value is infinite or NaN, or so large that its scale would be.
        """
        described = PackedWeight(self, tuple(weight.shape), dtype or weight.dtype)
        packed = described.empty("meta" if weight.is_cpu else weight.device)
        if weight.is_meta:
            return packed
        if weight.is_cpu:
            packed = host_zeros_like(packed)
        codes, scales = described.parts_of(packed)
        flat, block = weight.detach().reshape(-1), self.block
        per_chunk = _chunk_elements(packed) // block
        for first in range(0, len(scales), per_chunk):
            values = flat[first * block : (first + per_chunk) * block].to(described.dtype).float()
            if values.numel() % block:
                values = torch.nn.functional.pad(values, (0, -values.numel() % block))
            values = values.view(-1, block)
            most = values.abs().amax(1)
            scale = (most / self.largest).to(_SCALE_DTYPE)
            if not bool(scale.isfinite().all()):
                why = "too large for a scale in bfloat16" if bool(most.isfinite().all()) else "infinite or NaN"
                raise ConfigError(f"it has values that are {why}")
            scales[first : first + per_chunk] = scale
            # A scale that is zero after rounding stands for zeros, whatever the codes are.
            scaled = values / torch.where(scale == 0, 1.0, scale.float()).unsqueeze(1)
            codes[first : first + per_chunk] = self.encode(scaled)
        return packed


class NormalFloat4(BlockForm):
    """Four bits: the sixteen quantiles of a normal distribution that QLoRA published, from -1 to 1."""

    name, block, block_bytes, largest = "nf4", 64, 32, 1.0

    def encode(self, scaled: torch.Tensor) -> torch.Tensor:
        levels = NF4.table(scaled.device)
        codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        return (codes[:, ::2] << 4) | codes[:, 1::2]

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return NF4.decode(codes)


class Int8(BlockForm):
    """Eight bits: whole numbers from -127 to 127."""

    name, block, block_bytes, largest = "int8", 128, 128, 127.0

    def encode(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.round().clamp(-self.largest, self.largest).to(torch.int8).view(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


class Float8(BlockForm):
    """Eight bits: floating point with four bits of exponent and three of mantissa (e4m3)."""

    name, block, block_bytes, largest = "fp8", 128, 128, 448.0

    def encode(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()


FORMS: Mapping[str, BlockForm] = {form.name: form for form in (NormalFloat4(), Int8(), Float8())}


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """How one weight is packed: its form, and the shape and dtype that it has when it is expanded."""

    form: Form
    shape: Shape
    dtype: torch.dtype

    @classmethod
    def of(cls, form: Form, weight: torch.Tensor) -> PackedWeight:
        return cls(form, tuple(weight.shape), weight.dtype)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        *_, (part, start) = self._starts()
        return start + part.num_bytes

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def parts_of(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Views of the parts in packed bytes."""
        return [
            packed[start : start + part.num_bytes].view(part.dtype).view(part.shape) for part, start in self._starts()
        ]

    def _starts(self) -> list[tuple[Part, int]]:
        """The parts, and where each one starts in the bytes."""
        starts, stop = [], 0
        for part in self.form.parts(self.shape):
            start = -(-stop // part.dtype.itemsize) * part.dtype.itemsize
            starts.append((part, start))
            stop = start + part.num_bytes
        return starts

    @torch.no_grad()
    def expand(self, packed: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The elements from `start` to `stop`, in their order in memory, as one flat tensor. See [Note: one rounding].

        The result has its own storage, even if it is only a part of the rows that contain it.
        """
        stop = self.num_elements if stop is None else stop
        parts, row, rounds_to = self.parts_of(packed), self.form.row_elements(self.shape), self.form.rounds_to
        values = torch.empty(stop - start, dtype=self.dtype, device=packed.device)
        end = -(-stop // row)
        # A compiler gets one expression, of which it makes one kernel.
        per_chunk = end if torch.compiler.is_compiling() else max(1, _chunk_elements(packed) // row)
        for first in range(start // row, end, max(1, per_chunk)):
            last = min(first + per_chunk, end)
            found = self.form.values(parts, self.shape, first, last).view(-1)
            if rounds_to is not None:
                found = found.to(rounds_to)
            begin, low, high = first * row, max(first * row, start), min(last * row, stop)
            values[low - start : high - start] = found[low - begin : high - begin]
        return values

    def stand_in(self, packed: torch.Tensor) -> torch.Tensor:
        """A tensor with the shape and dtype of the weight that takes little time and memory to make, for reading only.

        Its elements are those of the weight, in another order. Of a matrix each row is the row before it, moved by one;
        the matrices of experts are moved by `_MOVE`, and each is dense, as kernels for groups of matrices want them.
        """
        num_leading = len(self.shape) - 2
        stride = (1,) * len(self.shape) if num_leading <= 0 else (*[_MOVE] * num_leading, self.shape[-1], 1)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, stride, strict=True))
        if span >= self.num_elements:
            return self.expand(packed).view(self.shape)
        return self.expand(packed, 0, span).as_strided(self.shape, stride)


def _chunk_elements(packed: torch.Tensor) -> int:
    return _CHUNK_ELEMENTS if packed.is_cpu else _DEVICE_CHUNK_ELEMENTS
