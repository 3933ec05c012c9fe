"""Folders with quantised weights, written by the public description of each format, and the values that they stand for.

The reference is plain torch, element by element where that is what the description says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = dict[str, Tensor]  # tensors of a folder by name


def fp8_tiles(name: str, weight: Tensor, tile: int = 128) -> tuple[Written, Tensor]:
    """DeepSeek's and Qwen's: e4m3 codes, and the inverse scale of each tile in float32."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // tile), -(-columns // tile))
    values = torch.empty(rows, columns)
    for down in range(scales.shape[0]):
        for right in range(scales.shape[1]):
            place = slice(down * tile, (down + 1) * tile), slice(right * tile, (right + 1) * tile)
            scales[down, right] = weight[place].abs().max() / 448
            codes[place] = (weight[place].float() / scales[down, right]).to(torch.float8_e4m3fn)
            values[place] = codes[place].float() * scales[down, right]
    return {name: codes, f"{name}_scale_inv": scales}, values.to(weight.dtype)


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(name: str, weight: Tensor) -> tuple[Written, Tensor]:
    """Experts of gpt-oss, [experts, in, out]: codes e2m1 in groups of 32 along `in`, a power of two for each group."""
    experts, width, out = weight.shape
    groups = weight.transpose(1, 2).reshape(experts, out, width // 32, 32).float()
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    values = _E2M1[codes] * scaled.sign() * exponents.exp2().unsqueeze(-1)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    written = {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}
    return written, values.reshape(experts, out, width).transpose(1, 2).to(weight.dtype).contiguous()


_NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
_FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def four_bits(name: str, weight: Tensor, levels: str = "nf4", *, is_nested: bool = True) -> tuple[Written, Tensor]:
    """bitsandbytes: blocks of 64 in memory order, the first of two codes in the high half of a byte. Nested scales are
    codes of a table with 256 values, in blocks of 256, with one offset for all."""
    table = _NF4 if levels == "nf4" else _FP4
    flat = weight.flatten().float()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scales = blocks.abs().amax(1)
    codes = ((blocks / scales.unsqueeze(1)).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
    packed = (codes.view(-1)[::2] << 4 | codes.view(-1)[1::2])[: -(-len(flat) // 2)].unsqueeze(1)
    state = {"quant_type": levels, "blocksize": 64, "dtype": f"{weight.dtype}"[6:], "shape": list(weight.shape)}
    written = {name: packed, f"{name}.absmax": scales, f"{name}.quant_map": table}
    if is_nested:
        offset = float(scales.mean())
        outer_blocks = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        outer, inner_table = outer_blocks.abs().amax(1), torch.linspace(-1, 1, 256).pow(3)
        inner = ((outer_blocks / outer.unsqueeze(1)).view(-1, 1) - inner_table).abs().argmin(1)[: len(scales)]
        scales = inner_table[inner] * outer.repeat_interleave(256)[: len(scales)] + torch.tensor(offset)
        written[f"{name}.absmax"] = inner.to(torch.uint8)
        written |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": inner_table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    written[f"{name}.quant_state.bitsandbytes__{levels}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    values = (table[codes.int()] * scales.unsqueeze(1)).view(-1)[: len(flat)]
    return written, values.view(weight.shape).to(weight.dtype)


def state_of(written: Written) -> dict[str, Any]:
    """The settings beside a weight in four bits."""
    (state,) = (tensor for name, tensor in written.items() if ".quant_state." in name)
    found: dict[str, Any] = json.loads(bytes(state.tolist()))
    return found


def int8_rows(name: str, weight: Tensor) -> tuple[Written, Tensor]:
    """LLM.int8() of bitsandbytes: whole numbers, and the largest value of each row."""
    largest = weight.float().abs().amax(1)
    codes = (weight.float() / largest.unsqueeze(1) * 127).round().to(torch.int8)
    path = name.removesuffix("weight")
    written = {name: codes, f"{path}SCB": largest, f"{path}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return written, (codes.float() * largest.unsqueeze(1) * 7.874015718698502e-3).to(weight.dtype)


Quantise = Callable[[str, Tensor], tuple[Written, Tensor]]
FORMATS: dict[str, tuple[dict[str, object], Quantise]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, lambda name, value: fp8_tiles(name, value, 16)),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, four_bits),
    "fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda name, value: four_bits(name, value, "fp4", is_nested=False),
    ),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_rows),
}


def quantised_copy(plain: Path, quantised: Path, rounded: Path, kind: str) -> list[str]:
    """Quantise the matrices of a model's folder. `rounded` gets the plain model with the same values.

    Returns the names of the quantised matrices, as `plain` has them.
    """
    settings, quantise = FORMATS[kind]
    for folder in (quantised, rounded):
        shutil.copytree(plain, folder)
    names = []
    for file in sorted(plain.glob("*.safetensors")):
        written, values = dict[str, Tensor](), dict[str, Tensor]()
        for name, value in load_file(file).items():
            is_expert = name.endswith(("gate_up_proj", "down_proj")) and value.dim() == 3
            is_linear = name.endswith("proj.weight") or (".experts." in name and value.dim() == 2)
            if is_expert if kind == "mxfp4" else is_linear:
                tensors, values[name] = quantise(name, value)
                written |= {each: tensor.clone().contiguous() for each, tensor in tensors.items()}
                names.append(name)
            else:
                written[name] = values[name] = value
        save_file(written, quantised / file.name, {"format": "pt"})
        save_file(values, rounded / file.name, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return names
