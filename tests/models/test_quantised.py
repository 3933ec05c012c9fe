"""Models that come quantised train with their own codes and scales, as the plain model with the same values does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import labelled, livened, plain_loss, small, train_call, wrapped
from torch import nn

import roundpipe
from helpers_packed import packed_places
from helpers_parity import assert_same, grads_of
from helpers_quantised import quantised_copy
from helpers_slow import slow_except
from roundpipe.errors import ConfigError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# Matrices whose sizes are no multiples of tiles and blocks, and experts that the folder has one by one.
CASES = [
    ("llama", "fp8", 1),
    ("qwen3_moe", "fp8", 3),
    ("gpt_oss", "mxfp4", 2),
    ("llama", "nf4", 3),
    ("qwen3_moe", "nf4", 2),
    ("llama", "fp4", 1),
    ("llama", "int8", 2),
    ("qwen3_moe", "int8", 2),
]
FAST = [case for case in CASES if case[0] != "llama" or case[1] in ("nf4", "int8")]


def folders(model_type: str, kind: str, path: Path, dtype: torch.dtype = torch.float32) -> tuple[Path, Path, list[str]]:
    """A quantised model, the plain model with the same values, and the names of quantised matrices."""
    config = {"intermediate_size": 64} if model_type == "gpt_oss" else {}
    model: Any = small(model_type, **config).to(dtype)
    model.save_pretrained(path / "plain")
    names = quantised_copy(path / "plain", path / "quantised", path / "rounded", kind)
    assert names
    return path / "quantised", path / "rounded", names


def lora_config() -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj"])


def adapted(folder: Path) -> nn.Module:
    """The model of a folder with an adapter, as our loader makes it."""
    return livened(roundpipe.load(folder, lora=lora_config()).train())


def plain_twin(model: nn.Module, rounded: Path) -> nn.Module:
    """The plain model with the same values and the same adapter, as transformers and peft make it."""
    plain = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(rounded), lora_config()).train()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "lora_" in name}, strict=False)
    return plain


def assert_same_adapter_grads(model: nn.Module, plain: nn.Module) -> None:
    found, expected = (
        {name: grad for name, grad in grads_of(each).items() if "lora_" in name} for each in (model, plain)
    )
    assert found
    assert all(grad is not None and grad.abs().max() > 0 for grad in found.values())
    assert_same(found, expected)


@pytest.mark.parametrize(("model_type", "kind", "num_devices"), slow_except(FAST, CASES))
def test_losses_and_gradients_are_those_of_the_plain_model(
    model_type: str, kind: str, num_devices: int, tmp_path: Path
) -> None:
    quantised, rounded, _ = folders(model_type, kind, tmp_path)
    model = adapted(quantised)
    plain = plain_twin(model, rounded)
    places = packed_places(model)
    is_quantised = "experts" if kind == "mxfp4" else "proj"
    wanted = {
        name
        for name, param in plain.named_parameters()
        if is_quantised in name and param.dim() > 1 and not name.endswith("bias") and "lora_" not in name
    }
    assert set(places) == wanted
    for name in places:
        path, _, key = name.rpartition(".")
        assert_same(getattr(model.get_submodule(path), key) + 0, plain.get_parameter(name).detach(), name)
    with wrapped(model, num_devices) as ours:
        batch = labelled(model_type, num_rows=5)
        for _ in range(2):
            assert_same(train_call(ours, batch, 3), plain_loss(plain, batch, 3), "loss")
        assert_same_adapter_grads(ours.original_model, plain)


def test_bfloat16_with_frozen_weights_for_what_is_plain(tmp_path: Path) -> None:
    """Experts stay as they come, other matrices get the form that was asked for."""
    quantised, rounded, _ = folders("gpt_oss", "mxfp4", tmp_path, torch.bfloat16)
    model = roundpipe.load(quantised, frozen_weights="int8")
    plain = transformers.AutoModelForCausalLM.from_pretrained(rounded).requires_grad_(False)
    wrapped(plain, frozen_weights="int8").close()
    forms = {name: described.form.name for name, described in packed_places(model).items()}
    assert set(forms.values()) == {"mxfp4", "int8"}
    assert forms.keys() == packed_places(plain).keys()
    for name, form in forms.items():
        path, _, key = name.rpartition(".")
        if form == "int8":
            assert_same(getattr(model.get_submodule(path), key) + 0, getattr(plain.get_submodule(path), key) + 0, name)
    assert "gate_up_proj=mxfp4" in str(model)
    assert not any(param.requires_grad for param in model.parameters())
    assert getattr(model.config, "quantization_config", None) is None


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **settings: Any) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


UP = "model.layers.1.mlp.up_proj"
DAMAGES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "scales": ("fp8", lambda all_: all_.pop(f"{UP}.weight_scale_inv"), rf"{UP}.weight has codes .* without the scales"),
    "codes": ("fp8", lambda all_: all_.pop(f"{UP}.weight"), rf"{UP}.weight is quantised as fp8, but there is no {UP}"),
    "shape": (
        "fp8",
        lambda all_: all_.update({f"{UP}.weight_scale_inv": torch.ones(5, 2)}),
        rf"{UP}.weight, which is quantised as fp8, cannot be taken: its scales are torch.float32 of shape \(5, 2\)",
    ),
    "nan": (
        "int8",
        lambda all_: all_[f"{UP}.SCB"].fill_(torch.nan),
        rf"{UP}.weight, which is quantised as bitsandbytes, cannot be taken: it has scales that are infinite or NaN",
    ),
    "order": ("int8", lambda all_: all_[f"{UP}.weight_format"].fill_(2), "the order 2 of old GPU kernels"),
    "absmax": ("nf4", lambda all_: all_.pop(f"{UP}.weight.absmax"), rf"there is no {UP}.weight.absmax"),
    "state": (
        "nf4",
        lambda all_: all_[f"{UP}.weight.quant_state.bitsandbytes__nf4"].fill_(65),
        "its quant_state is damaged",
    ),
    "nothing": ("fp4", lambda all_: all_.clear() or all_.update(a=torch.ones(1)), "there are no scales of this format"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    kind, change, message = DAMAGES[damage]
    quantised, _, _ = folders("llama", kind, tmp_path)
    edited(quantised, change)
    with pytest.raises(ConfigError, match=message):
        roundpipe.load(quantised)


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "eetq", "compressed-tensors"])
def test_formats_that_are_not_known_are_refused_by_name(method: str, tmp_path: Path) -> None:
    quantised, _, _ = folders("llama", "fp8", tmp_path)
    edited(quantised, lambda tensors: None, quant_method=method)
    with pytest.raises(ConfigError, match=rf"quantised as {method}, which is not known; known are fp8.*'nf4', 'int8'"):
        roundpipe.load(quantised)


def test_pages_of_all_tensors_go_back_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _, _ = folders("qwen3_moe", "nf4", tmp_path)
    released: list[tuple[torch.Size, torch.dtype]] = []
    monkeypatch.setattr(
        "roundpipe.loading.weight_folder.forget_file_pages",
        lambda tensor: released.append((tensor.shape, tensor.dtype)),
    )
    roundpipe.load(quantised)
    (file,) = quantised.glob("*.safetensors")
    assert {(tensor.shape, tensor.dtype) for tensor in load_file(file).values()} <= set(released)
    assert len(released) >= len(load_file(file))
