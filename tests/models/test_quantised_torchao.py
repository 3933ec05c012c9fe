"""Folders in the safetensors form of torchao, weights only, load without the library as the values they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import labelled, livened, plain_loss, small, train_call, wrapped
from torch import Tensor

import roundpipe
from helpers_packed import packed_places
from helpers_parity import assert_same
from roundpipe.errors import ConfigError
from roundpipe.packed import plain_state

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

GROUP = 16  # columns with one scale
Written = tuple[dict[str, Tensor], Tensor, dict[str, Any]]  # tensors by their part, values, and what the metadata say


def whole_numbers(weight: Tensor) -> Written:
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.amax(2) - groups.amin(2)) / 255
    zero = (-128 - groups.amin(2) / scale).round().to(torch.int8)
    codes = (groups / scale.unsqueeze(2) + zero.unsqueeze(2)).round().clamp(-128, 127).to(torch.int8)
    values = (codes.float() - zero.float().unsqueeze(2)) * scale.unsqueeze(2)
    parts = {"qdata": codes.flatten(1), "scale": scale, "zero_point": zero}
    return parts, values.flatten(1), {"act_quant_kwargs": None, "reduce_range": False}


def floats(weight: Tensor) -> Written:
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 448
    codes = (groups / scale.unsqueeze(2)).to(torch.float8_e4m3fn)
    return {"qdata": codes.flatten(1), "scale": scale}, (codes.float() * scale.unsqueeze(2)).flatten(1), {}


KINDS: dict[str, Any] = {"Int8Tensor": whole_numbers, "Float8Tensor": floats}


def folders(path: Path, kind: str, **changes: Any) -> tuple[Path, Path]:
    """A quantised model, as transformers writes it with torchao, and the plain model with the same values."""
    model: Any = small("llama")
    for name in ("quantised", "rounded"):
        model.save_pretrained(path / name)
    written, values = dict[str, Tensor](), load_file(path / "rounded" / "model.safetensors")
    metadata: dict[str, Any] = {}
    for name, weight in list(values.items()):
        if not name.endswith("proj.weight"):
            written[name], metadata[name] = weight, {"_type": "Tensor"}
            continue
        parts, found, settings = KINDS[kind](weight)
        values[name] = found.to(weight.dtype)
        written |= {f"{name.removesuffix('weight')}_weight_{part}": each for part, each in parts.items()}
        settings = {**settings, "block_size": [1, GROUP], "dtype": {"_type": "torch.dtype", "_data": "float32"}}
        metadata[name] = {"_type": kind, "_data": settings, "_tensor_data_names": [*parts][::-1], **changes}
    texts = {name: json.dumps(each) for name, each in metadata.items()}
    texts |= {"format": "pt", "tensor_names": json.dumps(list(metadata))}
    save_file({name: each.contiguous() for name, each in written.items()}, path / "quantised/model.safetensors", texts)
    save_file(values, path / "rounded" / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "quantised" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {}}}
    (path / "quantised" / "config.json").write_text(json.dumps(config))
    return path / "quantised", path / "rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    quantised, rounded = folders(tmp_path, kind)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    model = livened(roundpipe.load(quantised, lora=config).train())
    plain = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(rounded), config).train()
    plain.load_state_dict({name: each for name, each in model.state_dict().items() if "lora_" in name}, strict=False)
    assert len(packed_places(model)) == 14
    values = plain_state(model)
    assert values is not None
    assert_same(dict(sorted(values.items())), dict(sorted(plain.state_dict().items())))
    with wrapped(model, 3) as ours:
        batch = labelled("llama", num_rows=5)
        assert_same(train_call(ours, batch, 3), plain_loss(plain, batch, 3))


REFUSED: dict[str, dict[str, Any]] = {
    r"what config.json or the headers say of weights quantised as torchao is damaged": {"_data": ["block_size"]},
    r"proj.weight is a Int4TilePackedTo4dTensor of torchao, which cannot be taken": {
        "_type": "Int4TilePackedTo4dTensor"
    },
    r"Int8Tensor of torchao with act_quant_kwargs, which cannot be taken": {
        "_data": {"act_quant_kwargs": {"granularity": "PerRow"}, "block_size": [1, GROUP]}
    },
    r"proj.weight, which is quantised as torchao, cannot be taken": {"_data": {"block_size": [1, 32]}},
    r"Int8Tensor of torchao, which cannot be taken; known are": {"_tensor_data_names": ["scale"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_tensors_and_damage_are_refused_by_name(message: str, tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, "Int8Tensor", **REFUSED[message])
    with pytest.raises(ConfigError, match=message):
        roundpipe.load(quantised)
