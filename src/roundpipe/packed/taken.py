"""Forms of weights that come quantised: their own codes and scales, and how these become bytes of a packed weight.

Knows tensors, neither files nor modules. Values are those that the format's own code gives, to the last bit: float32
products of a code and its scale, rounded as that code rounds them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from roundpipe.errors import ConfigError
from roundpipe.packed.forms import NF4, Form, FourBits, PackedWeight, Part, Parts, Shape
from roundpipe.store.host_memory import host_zeros_like

_FP4 = FourBits(
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
    *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
)
_E2M1 = FourBits(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_DECODE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3": lambda codes: codes.view(torch.float8_e4m3fn).float(),
    "int8": lambda codes: codes.view(torch.int8).float(),
    "e2m1": _E2M1.decode,
}
_FOUR_BITS: Mapping[str, FourBits] = {"nf4": NF4, "fp4": _FP4}
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_SCALE_CODES = 256  # of bitsandbytes, for scales that are quantised
_CHECKED_ELEMENTS = 1 << 17  # at a time


@dataclasses.dataclass(frozen=True)
class TiledForm(Form):
    """A scale for each tile of a matrix, and perhaps a code that stands for zero.

    code: how codes become values, a name in `_DECODE`.
    tile: rows and columns of a tile. Tiles at the end of a matrix may be smaller.
    matrix_rows: a weight of several matrices has separate tiles in each.
    factor: by which every value is multiplied after its scale.
    """

    name: str
    code: str
    tile: tuple[int, int]
    matrix_rows: int
    scale_dtype: torch.dtype
    has_zeros: bool = False
    factor: float = 1.0
    rounds_to: torch.dtype | None = None

    def row_elements(self, shape: Shape) -> int:
        return shape[-1]

    def parts(self, shape: Shape) -> list[Part]:
        num_rows, columns = math.prod(shape[:-1]), shape[-1]
        row_bytes = columns // 2 if self.code == "e2m1" else columns
        tiles = num_rows // self.matrix_rows * -(-self.matrix_rows // self.tile[0]), -(-columns // self.tile[1])
        zeros = [Part(torch.int8, tiles)] if self.has_zeros else []
        return [Part(torch.uint8, (num_rows, row_bytes)), Part(self.scale_dtype, tiles), *zeros]

    def values(self, parts: Parts, shape: Shape, first: int, last: int) -> torch.Tensor:
        codes, *of_tiles = parts
        columns, width = shape[-1], self.tile[1]
        rows = torch.arange(first, last, device=codes.device)
        per_matrix = -(-self.matrix_rows // self.tile[0])
        tiles = rows // self.matrix_rows * per_matrix + rows % self.matrix_rows // self.tile[0]
        scales, *zeros = (part.float()[tiles] for part in of_tiles)
        if columns % width:  # the last tile is smaller: a scale for each element instead of one for each tile
            scales, *zeros = (each.repeat_interleave(width, 1)[:, :columns] for each in (scales, *zeros))
            width = 1
        found = _DECODE[self.code](codes[first:last]).view(last - first, -1, width)
        if zeros:
            found = found - zeros[0].unsqueeze(2)
        found = found * scales.unsqueeze(2)
        return found if self.factor == 1.0 else found * self.factor


@dataclasses.dataclass(frozen=True)
class FourBitForm(Form):
    """Four bits of bitsandbytes: a scale for each block of elements, in their order in memory.

    levels: "nf4" or "fp4".
    nested_block: the scales are codes, too, of a table, with a scale for each block of this many, and an offset.
    """

    name: str
    levels: str
    block: int
    nested_block: int | None = None
    rounds_to: torch.dtype | None = None

    def row_elements(self, shape: Shape) -> int:
        return self.block

    def parts(self, shape: Shape) -> list[Part]:
        num_blocks = -(-math.prod(shape) // self.block)
        codes = Part(torch.uint8, (num_blocks, self.block // 2))
        if self.nested_block is None:
            return [codes, Part(torch.float32, (num_blocks,))]
        outer = Part(torch.float32, (-(-num_blocks // self.nested_block),))
        table, offset = Part(torch.float32, (_SCALE_CODES,)), Part(torch.float32, (1,))
        return [codes, Part(torch.uint8, (num_blocks,)), outer, table, offset]

    def values(self, parts: Parts, shape: Shape, first: int, last: int) -> torch.Tensor:
        return _FOUR_BITS[self.levels].decode(parts[0][first:last]) * self.scales(parts, first, last).unsqueeze(1)

    def scales(self, parts: Parts, first: int, last: int) -> torch.Tensor:
        """The scales of these blocks.

        The product is rounded to float32 from float64, in which it is exact, so that no compiler can join it with the
        addition, which would round once instead of twice.
        """
        if self.nested_block is None:
            return parts[1][first:last]
        _, codes, outer, table, offset = parts
        blocks = torch.arange(first, last, device=codes.device) // self.nested_block
        product = table.double()[codes[first:last].int()] * outer.double()[blocks]
        return product.float() + offset


@dataclasses.dataclass(frozen=True)
class Taken:
    """A weight that comes quantised.

    pieces: for each part of the form the tensors that follow each other in it. They are read once, one by one.
    """

    described: PackedWeight
    pieces: tuple[Iterable[torch.Tensor], ...]

    @torch.no_grad()
    def packed(self) -> torch.Tensor:
        """The bytes, in host memory. Raises ConfigError for scales that are infinite or NaN."""
        packed = host_zeros_like(self.described.empty("meta"))
        for part, pieces in zip(self.described.parts_of(packed), self.pieces, strict=True):
            flat, start = part.view(-1), 0
            for piece in pieces:
                flat[start : start + piece.numel()].copy_(piece.reshape(-1).view(flat.dtype))
                start += piece.numel()
        _refuse_not_finite(self.described, packed)
        return packed

    def expanded(self) -> torch.Tensor:
        """The weight itself."""
        return self.described.expand(self.packed()).view(self.described.shape)


def _refuse_not_finite(described: PackedWeight, packed: torch.Tensor) -> None:
    codes, *others = described.parts_of(packed)
    for part in others:
        if part.dtype in _SCALE_DTYPES and not bool(part.float().isfinite().all()):
            raise ConfigError("it has scales that are infinite or NaN")
    if getattr(described.form, "code", None) == "e4m3":
        for part in codes.view(-1).split(_CHECKED_ELEMENTS):
            if bool(((part & 127) == 127).any()):
                raise ConfigError("it has values that are NaN")


def joined(taken: Sequence[Taken], shape: Shape) -> Taken:
    """The weight of this shape that consists of matrices, each of which comes quantised, in their order in memory."""
    forms = {each.described.form for each in taken}
    if len(forms) > 1:
        raise ConfigError(f"its matrices are quantised in different ways: {', '.join(sorted(map(str, forms)))}")
    form = forms.pop()
    if isinstance(form, FourBitForm):
        if taken[0].described.num_elements % form.block:
            raise ConfigError(f"its matrices of shape {taken[0].described.shape} do not consist of whole blocks")
        # Each matrix has its own offset and incomplete last block of scales, so the scales are expanded.
        return Taken(
            PackedWeight(dataclasses.replace(form, nested_block=None), shape, taken[0].described.dtype),
            (_of_all(taken, 0), (_expanded_scales(form, each) for each in taken)),
        )
    return Taken(
        PackedWeight(form, shape, taken[0].described.dtype),
        tuple(_of_all(taken, part) for part in range(len(taken[0].pieces))),
    )


def _of_all(taken: Sequence[Taken], part: int) -> Iterator[torch.Tensor]:
    for each in taken:
        yield from each.pieces[part]


def _expanded_scales(form: FourBitForm, taken: Taken) -> torch.Tensor:
    parts = [torch.cat([piece.reshape(-1) for piece in pieces]) for pieces in taken.pieces[1:]]
    return form.scales([parts[0], *parts], 0, len(parts[0]))


# What comes in which tensors.


def fp8_tiles(codes: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int] | None, dtype: torch.dtype) -> Taken:
    """Floating point in 8 bits (e4m3), with a scale for each tile of a matrix, or one for all of it.

    tile: rows and columns of a tile; None for tiles of equal sizes, as many as there are scales.
    """
    if codes.dtype is not torch.float8_e4m3fn:
        raise ConfigError(f"its codes are {codes.dtype}, not torch.float8_e4m3fn")
    rows, columns = codes.shape[-2:]
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
    if scales.dtype is torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dim() != codes.dim() or scales.shape[:-2] != codes.shape[:-2] or scales.dtype not in _SCALE_DTYPES:
        raise _scales_do_not_fit(codes, scales)
    grid = tuple(scales.shape[-2:])
    given = (None, None) if tile is None else tile
    tile = _edge(rows, grid[0], given[0]), _edge(columns, grid[1], given[1])
    if not all(tile):
        raise _scales_do_not_fit(codes, scales)
    form = TiledForm("fp8_tiles", "e4m3", tile, rows, scales.dtype)
    return Taken(PackedWeight(form, tuple(codes.shape), dtype), ((codes.view(torch.uint8),), (scales,)))


def _edge(size: int, count: int, given: int | None) -> int:
    """The length of a tile where `count` of them are `size` long; 0 if they do not fit. `given`: that of the format.

    Where the given length does not fit, there is one tile for all, or tiles are parts of the given ones, or they are
    the two halves of a matrix that consists of two short ones.
    """
    if given and -(-size // given) == count:
        return given
    edge = size // count if count and size % count == 0 else 0
    fits = given is None or count == 1 or (edge and given % edge == 0) or (count == 2 and edge < given)
    return edge if fits else 0


def int8_tiles(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    tile: tuple[int, int],
    dtype: torch.dtype,
) -> Taken:
    """Whole numbers with a scale for each tile of a matrix, and perhaps the number that stands for zero there."""
    if codes.dim() != 2 or codes.dtype is not torch.int8 or scales.dtype not in _SCALE_DTYPES:
        raise ConfigError(f"its codes are {codes.dtype} of shape {tuple(codes.shape)}, its scales {scales.dtype}")
    form = TiledForm("int8_tiles", "int8", tile, len(codes), scales.dtype, has_zeros=zeros is not None)
    pieces = [codes.view(torch.uint8), scales] if zeros is None else [codes.view(torch.uint8), scales, zeros]
    for part, piece in zip(form.parts(tuple(codes.shape))[1:], pieces[1:], strict=True):
        if piece.numel() != math.prod(part.shape) or piece.dtype is not part.dtype:
            raise _scales_do_not_fit(codes, piece)
    return Taken(PackedWeight(form, tuple(codes.shape), dtype), tuple((piece,) for piece in pieces))


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Taken:
    """Experts of gpt-oss: [experts, out, groups, 16] of bytes with two codes, the first one in the low half; a scale
    for each group of 32, [experts, out, groups]. The weight is [experts, 32 groups, out]."""
    if blocks.dim() != 4 or blocks.shape[3] != 16 or blocks.dtype is not torch.uint8 or blocks.shape[1] % 2:
        raise ConfigError(
            f"its codes are {blocks.dtype} of shape {tuple(blocks.shape)}, not [experts, out, groups, 16]"
        )
    if scales.shape != blocks.shape[:3] or scales.dtype is not torch.uint8:
        raise _scales_do_not_fit(blocks, scales)
    num_experts, out, groups, _ = blocks.shape
    form = TiledForm("mxfp4", "e2m1", (32, 1), 32 * groups, torch.float8_e8m0fnu)

    def codes() -> Iterator[torch.Tensor]:
        for expert in blocks:
            each = torch.stack([expert & 15, expert >> 4], -1).view(out, -1).t()
            yield (each[:, ::2] << 4) | each[:, 1::2]

    described = PackedWeight(form, (num_experts, 32 * groups, out), dtype)
    return Taken(described, (codes(), (each.t().view(torch.float8_e8m0fnu) for each in scales)))


def int8_rows(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Taken:
    """Whole numbers of bitsandbytes; the scale of a row is the value of its code 127."""
    if codes.dim() != 2 or codes.dtype is not torch.int8:
        raise ConfigError(f"its codes are {codes.dtype} of shape {tuple(codes.shape)}, not a matrix of torch.int8")
    if scales.numel() != len(codes) or scales.dtype is not torch.float32:
        raise _scales_do_not_fit(codes, scales)
    form = TiledForm("bnb_int8", "int8", (1, codes.shape[1]), len(codes), torch.float32, factor=7.874015718698502e-3)
    return Taken(PackedWeight(form, tuple(codes.shape), dtype), ((codes.view(torch.uint8),), (scales,)))


@dataclasses.dataclass(frozen=True)
class NestedScales:
    """Scales that are quantised: `table[code] * outer + offset`, with one `outer` for each block of codes."""

    outer: torch.Tensor
    table: torch.Tensor
    block: int
    offset: float


def four_bits(
    codes: torch.Tensor,
    scales: torch.Tensor,
    nested: NestedScales | None,
    *,
    table: torch.Tensor,
    levels: str,
    shape: Shape,
    block: int,
    rounds_to: torch.dtype,
    dtype: torch.dtype,
) -> Taken:
    """Four bits of bitsandbytes.

    scales: float32, or codes if they are nested.
    table: the values of the codes; bitsandbytes ignores them and uses those of `levels`, so they must be equal.
    rounds_to: the dtype of its dequantisation.
    """
    known = _FOUR_BITS.get(levels)
    if known is None or not torch.allclose(table.float(), known.table(table.device), rtol=0, atol=1e-6):
        raise ConfigError(f"its sixteen levels are not those of {' or '.join(_FOUR_BITS)}")
    if block <= 0 or block % 2 or (nested is not None and nested.block <= 0):
        raise ConfigError(f"its blocks have {block} elements")
    nested_block = None if nested is None else nested.block
    form = FourBitForm(f"bnb_{levels}", levels, block, nested_block, None if rounds_to is dtype else rounds_to)
    described = PackedWeight(form, shape, dtype)
    pieces = [codes.reshape(-1).view(torch.uint8), scales]
    if nested is not None:
        pieces += [nested.outer, nested.table, torch.tensor([nested.offset], device=codes.device)]
    wanted = form.parts(shape)
    # The codes of an incomplete last block end with it.
    fits = pieces[0].numel() in (-(-described.num_elements // 2), wanted[0].num_bytes)
    for part, piece in zip(wanted[1:], pieces[1:], strict=True):
        fits = fits and piece.numel() == math.prod(part.shape) and piece.dtype is part.dtype
    if not fits:
        raise ConfigError(
            f"its codes and scales, {', '.join(f'{tuple(each.shape)} {each.dtype}' for each in pieces[:3])}, are not "
            f"those of a weight of shape {shape} in blocks of {block}"
        )
    return Taken(described, tuple((piece,) for piece in pieces))


def _scales_do_not_fit(codes: torch.Tensor, scales: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"its scales are {scales.dtype} of shape {tuple(scales.shape)}, which does not fit codes of shape "
        f"{tuple(codes.shape)}"
    )
