"""Which tensors together are one quantised weight, by the names that each format gives them in files and modules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.packed.taken import NestedScales, Taken, four_bits, fp8_tiles, int8_rows, mxfp4

Settings = Mapping[str, Any]  # the quantization_config of a model


@dataclasses.dataclass(frozen=True)
class Source:
    """The names of the tensors that are one quantised weight. `take`: makes it of their values, in the same order."""

    names: tuple[str, ...]
    take: Callable[[Sequence[torch.Tensor], torch.dtype], Taken]


def _fp8(shapes: Mapping[str, torch.Tensor], settings: Settings) -> Iterator[tuple[str, Source]]:
    block = settings.get("weight_block_size")
    tile = (int(block[0]), int(block[1])) if block else None

    def take(values: Sequence[torch.Tensor], dtype: torch.dtype) -> Taken:
        codes, scales = values
        return fp8_tiles(codes, scales, tile, dtype)

    for scales in shapes:
        name = scales.removesuffix("_scale_inv")
        if scales.endswith(".scale"):
            name = f"{scales.removesuffix('scale')}weight"
        if name != scales:
            yield name, Source((name, scales), take)


def _mxfp4(shapes: Mapping[str, torch.Tensor], settings: Settings) -> Iterator[tuple[str, Source]]:
    for scales in shapes:
        name = scales.removesuffix("_scales")
        if name != scales:
            yield name, Source((f"{name}_blocks", scales), lambda values, dtype: mxfp4(values[0], values[1], dtype))


_STATE = ".quant_state.bitsandbytes__"


def _bitsandbytes(shapes: Mapping[str, torch.Tensor], settings: Settings) -> Iterator[tuple[str, Source]]:
    for tensor in shapes:
        name, found, _ = tensor.partition(_STATE)
        if found:
            names = [name, tensor, f"{name}.absmax", f"{name}.quant_map"]
            nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
            yield name, Source((*names, *(nested if nested[0] in shapes else ())), _of_four_bits)
        elif tensor.rpartition(".")[2] == "SCB":
            path = tensor.removesuffix("SCB")
            layout = f"{path}weight_format"
            yield f"{path}weight", Source((f"{path}weight", tensor, *([layout] if layout in shapes else ())), _of_int8)


def _of_int8(values: Sequence[torch.Tensor], dtype: torch.dtype) -> Taken:
    codes, scales, *layout = values
    if layout and layout[0].item() != 0:
        raise ConfigError(f"its codes have the order {layout[0].item()} of old GPU kernels, not that of rows (0)")
    return int8_rows(codes, scales, dtype)


def _of_four_bits(values: Sequence[torch.Tensor], dtype: torch.dtype) -> Taken:
    codes, written, scales, levels, *nested = values
    try:
        state = json.loads(bytes(written.tolist()))
        given = {
            "levels": state["quant_type"],
            "shape": tuple(state["shape"]),
            "block": state["blocksize"],
            "rounds_to": getattr(torch, state["dtype"]),
        }
        outer = None
        if nested:
            outer = NestedScales(nested[0], nested[1], state["nested_blocksize"], state["nested_offset"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"its quant_state is damaged: {error!r}") from error
    return four_bits(codes, scales, outer, table=levels, dtype=dtype, **given)


# By the name of the format: the quantised weights among named tensors.
SOURCES: Mapping[str, Callable[[Mapping[str, torch.Tensor], Settings], Iterator[tuple[str, Source]]]] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
