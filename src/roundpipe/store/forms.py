"""Forms: how a tensor of an optimizer's state is stored, as named parts, and how its values are read and written.

A state such as `exp_avg` is stored as it is (PLAIN), in bfloat16, or in 8 bits: codes, and one float32 scale for each
block of BLOCK elements. The parts of a state are ordinary tensors in the optimizer's state, under the state's name
and a suffix. Everything else speaks of parts and bytes. Knows no optimizer. native/blocks.h computes the same bits.

[Note: codes of 8 bits] A signed state m is companded, which makes codes near 0 finer: with scale s, the largest
magnitude of the block, its code is 254 m / (s + |m|), between -127 and 127. A squared state v is stored by its root,
whose code is 255 sqrt(v) / s with s the largest root; a root above 0 never gets code 0. Codes and bfloat16 numbers are
rounded up or down at random, with probabilities that keep the mean: `random_bits` of the element's number in the whole
parameter and of a seed, which stands for the step and the state. So the bits of a step depend neither on the number of
threads nor on the instruction set, and ranges of machines, which begin at multiples of blocks, have the same bits.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

BLOCK = 256  # elements with one scale; the ranges of machines begin at multiples of it
SMALLEST = 4096  # parameters with fewer elements keep plain states
MOMENTS = ("float32", "bfloat16", "8bit")
_CHUNK = 1 << 20  # elements converted at a time, so that intermediate results stay small; a multiple of BLOCK
_MASK = 0xFFFFFFFF

NewTensor = Callable[[int, torch.dtype], Tensor]  # makes a part from its number of elements and its dtype


def num_scales(count: int) -> int:
    """The number of blocks of a state with `count` elements."""
    return -(-count // BLOCK)


class Form(abc.ABC):
    """One way to store a state. `dtype` below is that of the parameter."""

    name: ClassVar[str]  # as users say it
    suffixes: ClassVar[tuple[str, ...]] = ("",)  # of the names of the parts; the first part has an entry per element

    def part_names(self, state: str) -> tuple[str, ...]:
        """The names of the parts of a state in the optimizer's state of a parameter."""
        return tuple(state + suffix for suffix in self.suffixes)

    @abc.abstractmethod
    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The dtypes of the parts."""

    def counts(self, count: int) -> tuple[int, ...]:
        """The numbers of elements of the parts, for a state with `count` elements."""
        return (count,)

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """The bytes of all parts of a state with `count` elements."""
        return sum(n * part.itemsize for n, part in zip(self.counts(count), self.dtypes(dtype), strict=True))

    def fits(self, parts: Sequence[Any], shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether `parts` are tensors that store a state of this shape."""
        shapes = [tuple(shape), *((count,) for count in self.counts(torch.Size(shape).numel())[1:])]
        return all(
            isinstance(part, Tensor) and tuple(part.shape) == wanted and part.dtype is kind
            for part, wanted, kind in zip(parts, shapes, self.dtypes(dtype), strict=True)
        )

    @abc.abstractmethod
    def expanded(self, parts: Sequence[Tensor]) -> Tensor:
        """The values, in the shape of the first part."""

    @abc.abstractmethod
    def pack(self, values: Tensor, parts: Sequence[Tensor], seed: int, first: int = 0) -> None:
        """Write values into parts. `first`: the number of the first element in the whole parameter."""


class _Plain(Form):
    """The values in the dtype of the parameter."""

    name = "float32"

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (dtype,)

    def expanded(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def pack(self, values: Tensor, parts: Sequence[Tensor], seed: int, first: int = 0) -> None:
        parts[0].copy_(values)


class _Bfloat16(Form):
    """The values in bfloat16, rounded stochastically."""

    name = "bfloat16"

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,)

    def expanded(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].float()

    def pack(self, values: Tensor, parts: Sequence[Tensor], seed: int, first: int = 0) -> None:
        to = parts[0].view(-1).view(torch.int16)
        for piece, chunk in _chunks(values):
            bits = chunk.view(torch.int32).long() & _MASK
            rounded = (bits + (random_bits(seed, first + piece.start, len(chunk), chunk.device) >> 16)) >> 16
            to[piece] = torch.where(chunk.isnan(), 0x7FC0, rounded).to(torch.int16)


class _Codes(Form):
    """Codes of 8 bits and a scale for each block; see [Note: codes of 8 bits]."""

    name = "8bit"
    suffixes = ("_8bit", "_scale")
    code_dtype: ClassVar[torch.dtype]

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return self.code_dtype, torch.float32

    def counts(self, count: int) -> tuple[int, ...]:
        return count, num_scales(count)

    def expanded(self, parts: Sequence[Tensor]) -> Tensor:
        codes, scales = parts
        values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for piece, chunk in _chunks(codes, torch.float32):
            mine = scales[piece.start // BLOCK : num_scales(piece.stop)].repeat_interleave(BLOCK)[: len(chunk)]
            values.view(-1)[piece] = self._values(chunk, mine)
        return values

    def pack(self, values: Tensor, parts: Sequence[Tensor], seed: int, first: int = 0) -> None:
        codes, scales = parts
        for piece, chunk in _chunks(values):
            numbers = self._numbers(chunk)
            magnitudes = torch.zeros(num_scales(len(chunk)) * BLOCK, device=chunk.device)
            magnitudes[: len(chunk)] = numbers.abs()
            top = magnitudes.view(torch.int32).view(-1, BLOCK).amax(1).view(torch.float32)  # NaN is above infinity
            top = torch.where(top.isnan(), torch.nan, top)
            scales[piece.start // BLOCK : num_scales(piece.stop)] = top
            exact = self._exact(numbers.abs(), top.repeat_interleave(BLOCK)[: len(chunk)])
            exact = torch.where(exact > 0, exact, 0)  # 0 for NaN, too
            draws = (random_bits(seed, first + piece.start, len(chunk), chunk.device) >> 16).float() * 2**-16
            codes.view(-1)[piece] = self._codes((exact + draws).to(torch.int32), numbers).to(self.code_dtype)

    @abc.abstractmethod
    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values of codes, which are given as float32 numbers."""

    def _numbers(self, values: Tensor) -> Tensor:
        """What the codes describe."""
        return values

    @abc.abstractmethod
    def _exact(self, magnitudes: Tensor, scales: Tensor) -> Tensor:
        """The magnitudes of the codes before rounding."""

    @abc.abstractmethod
    def _codes(self, magnitudes: Tensor, numbers: Tensor) -> Tensor:
        """The codes, from their rounded magnitudes."""


class _Signed(_Codes):
    """A state with positive and negative values."""

    code_dtype = torch.int8

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes / (254 - codes.abs()) * scales

    def _exact(self, magnitudes: Tensor, scales: Tensor) -> Tensor:
        return magnitudes / (scales + magnitudes) * 254

    def _codes(self, magnitudes: Tensor, numbers: Tensor) -> Tensor:
        return torch.where(numbers < 0, -magnitudes, magnitudes)


class _Squared(_Codes):
    """A state that is a mean of squares.

    Divides tensors by tensors: torch computes a quotient with a number by its reciprocal, which rounds twice.
    """

    code_dtype = torch.uint8

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes * (scales / torch.full_like(scales, 255))).square()

    def _numbers(self, values: Tensor) -> Tensor:
        return values.double().sqrt().float()  # rounded correctly, which torch's float32 root is not everywhere

    def _exact(self, magnitudes: Tensor, scales: Tensor) -> Tensor:
        return (magnitudes * torch.where(scales > 0, torch.full_like(scales, 255) / scales, 0)).clamp(max=255)

    def _codes(self, magnitudes: Tensor, numbers: Tensor) -> Tensor:
        return torch.maximum(magnitudes, (numbers > 0).to(magnitudes.dtype))


PLAIN: Form = _Plain()
_OF_MOMENTS: Mapping[str, tuple[Form, Form]] = {  # for signed and for squared states
    "float32": (PLAIN, PLAIN),
    "bfloat16": (_Bfloat16(), _Bfloat16()),
    "8bit": (_Signed(), _Squared()),
}


def form_of(moments: str, *, is_square: bool) -> Form:
    """The form that an option `moments` chooses for a state of a large parameter."""
    return _OF_MOMENTS[moments][is_square]


def is_low_part(part: str, dtype: torch.dtype, of_param: torch.dtype) -> bool:
    """Whether a tensor of a parameter's state is part of a form of low bits, by its name and its dtype."""
    is_bfloat16 = dtype is torch.bfloat16 and of_param is not torch.bfloat16
    return is_bfloat16 or part.endswith(("_8bit", "_scale"))


def stored_form(state: Mapping[str, Any], name: str, dtype: torch.dtype, *, is_square: bool) -> Form | None:
    """The form in which the state of a parameter in `dtype` has a state with this name; None if it is not there."""
    if name + "_8bit" in state:
        return form_of("8bit", is_square=is_square)
    if name not in state:
        return None
    is_low = isinstance(state[name], Tensor) and is_low_part(name, state[name].dtype, dtype)
    return form_of("bfloat16", is_square=is_square) if is_low else PLAIN


# Parts by name, as checkpoints know them.


def part_shape(part: str, of_param: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part of a whole state, by the name of the part and the shape of the parameter."""
    return (num_scales(torch.Size(of_param).numel()),) if part.endswith("_scale") else of_param


def part_dtypes(part: str, of_param: torch.dtype, squares: Container[str]) -> tuple[torch.dtype, ...]:
    """The dtypes that a part may have, by the name of the part and the dtype of the parameter.

    `squares`: the states that are means of squares.
    """
    if part.endswith("_8bit"):
        return form_of("8bit", is_square=part.removesuffix("_8bit") in squares).dtypes(of_param)[:1]
    return (torch.float32,) if part.endswith("_scale") else (of_param, torch.bfloat16)


def missing_part(part: str) -> str | None:
    """The part without which a part has no meaning; None if it stands alone."""
    for one, other in (("_8bit", "_scale"), ("_scale", "_8bit")):
        if part.endswith(one):
            return part.removesuffix(one) + other
    return None


def elements_per_entry(part: str) -> int:
    """How many elements of a parameter one entry of a part describes, by the name of the part."""
    return BLOCK if part.endswith("_scale") else 1


# Random numbers.


def seed_of(step: int, state: int) -> int:
    """The seed for rounding a state, given by its position, in a step."""
    return _mixed(_mixed(step & _MASK) ^ (state + 1) * 0x9E3779B9 & _MASK)


def random_bits(seed: int, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """32 random bits for each of `count` elements from number `first` on, as int64 numbers."""
    bits = (torch.arange(first, first + count, device=device) & _MASK) ^ seed
    bits = (bits ^ bits >> 16) * 0x7FEB352D & _MASK
    bits = (bits ^ bits >> 15) * 0x846CA68B & _MASK
    return bits ^ bits >> 16


def _mixed(bits: int) -> int:
    bits = (bits ^ bits >> 16) * 0x7FEB352D & _MASK
    bits = (bits ^ bits >> 15) * 0x846CA68B & _MASK
    return bits ^ bits >> 16


def _chunks(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of a contiguous tensor, flat, and its elements there, in `dtype` if it is given."""
    whole = tensor.reshape(-1)
    for start in range(0, len(whole), _CHUNK):
        piece = slice(start, min(start + _CHUNK, len(whole)))
        yield piece, whole[piece] if dtype is None else whole[piece].to(dtype)
