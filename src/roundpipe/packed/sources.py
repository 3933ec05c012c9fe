"""Which tensors together are one quantised weight, by the names that each format gives them in files and modules.

[Note: own checkpoints] A checkpoint of a packed model has its bytes, under names that transformers does not know. With
the config of the plain model from_pretrained() would put random values in their places, after a warning. The config
of such a folder therefore has a quantization_config without a method, which from_pretrained() refuses, and which says
for us how each weight is packed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.packed.forms import FORMS, PackedWeight
from roundpipe.packed.module import PackedModule, part_name
from roundpipe.packed.taken import NestedScales, Taken, four_bits, fp8_tiles, int8_rows, int8_tiles, mxfp4

Settings = Mapping[str, Any]  # the quantization_config of a model, and the metadata of its files
METADATA = "metadata"


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


TENSORS_OF_TORCHAO = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")  # others have the order of kernels
INPUTS_OF_TORCHAO = ("act_quant_kwargs", "activation_quantization", "act_pre_scale")  # set if inputs are quantised


def _torchao(shapes: Mapping[str, torch.Tensor], settings: Settings) -> Iterator[tuple[str, Source]]:
    """torchao describes each weight in the metadata of the file. The names of its parts begin with an underscore."""
    for name, text in sorted(settings[METADATA].items()):
        path, dot, leaf = name.rpartition(".")
        described = _json(text)
        kind, given = described.get("_type", "Tensor"), described.get("_data", {})
        if kind == "Tensor":
            continue
        parts = [part for part in ("qdata", "scale", "zero_point") if part in described.get("_tensor_data_names", ())]
        tile = given.get("block_size", ())
        others = [each for each in INPUTS_OF_TORCHAO if given.get(each)]
        if kind not in TENSORS_OF_TORCHAO or len(parts) < 2 or len(tile) != 2 or others:
            what = f" with {others[0]}" if others else ""
            raise ConfigError(
                f"{name} is a {kind} of torchao{what}, which cannot be taken; known are {', '.join(TENSORS_OF_TORCHAO)}"
                " of matrices, without quantised inputs. Give the model that it was made from, with frozen_weights."
            )
        names = tuple(f"{path}{dot}_{leaf}_{part}" for part in parts)
        yield name, Source(names, functools.partial(of_torchao, tuple(tile)))


def _json(text: str) -> dict[str, Any]:
    """The JSON object in a text; an empty dict if the text has none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def of_torchao(tile: tuple[int, int], values: Sequence[torch.Tensor], dtype: torch.dtype) -> Taken:
    """A weight of torchao, from its codes, scales and perhaps zeros."""
    codes, scales, *zeros = values
    if codes.dtype is torch.float8_e4m3fn:
        return fp8_tiles(codes, scales, tile, dtype)
    return int8_tiles(codes, scales, zeros[0] if zeros else None, tile, dtype)


OWN = "roundpipe"  # the name of the format of checkpoints of packed models
_SAYS = "packed_by"  # of its settings


def own_settings(model: nn.Module) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint of this model; None if nothing is packed. See [Note: own checkpoints]."""
    weights = {
        f"{path}.{name}".removeprefix("."): {
            "form": described.form.name,
            "shape": list(described.shape),
            "dtype": str(described.dtype).removeprefix("torch."),
        }
        for path, module in model.named_modules()
        if isinstance(module, PackedModule)
        for name, described in module._roundpipe_packed.items()
    }
    advice = "Load this folder with roundpipe.load(), or the model it was made from and then this checkpoint."
    return {_SAYS: OWN, "advice": advice, "weights": weights} if weights else None


def is_own(settings: Settings) -> bool:
    return settings.get(_SAYS) == OWN


def _own(shapes: Mapping[str, torch.Tensor], settings: Settings) -> Iterator[tuple[str, Source]]:
    for name, given in settings["weights"].items():
        form = FORMS.get(given["form"])
        if form is None:
            raise ConfigError(
                f"{name} came quantised, as {given['form']}. Load the model that was trained, with roundpipe.load, "
                "and then this checkpoint into it, with roundpipe.checkpoint.load."
            )
        described = PackedWeight(form, tuple(map(int, given["shape"])), getattr(torch, given["dtype"]))
        yield name, Source((part_name(name, described),), functools.partial(_of_own, described))


def _of_own(described: PackedWeight, values: Sequence[torch.Tensor], dtype: torch.dtype) -> Taken:
    (part,) = values
    if part.dtype is not torch.uint8 or part.shape != (described.num_bytes,):
        raise ConfigError(
            f"it has {part.dtype} of shape {tuple(part.shape)} instead of the {described.num_bytes} bytes of a weight "
            f"of shape {described.shape}"
        )
    described = dataclasses.replace(described, dtype=dtype)
    return Taken(described, tuple((piece,) for piece in described.parts_of(part)))


# By the name of the format: the quantised weights among named tensors.
SOURCES: Mapping[str, Callable[[Mapping[str, torch.Tensor], Settings], Iterator[tuple[str, Source]]]] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    OWN: _own,
}
