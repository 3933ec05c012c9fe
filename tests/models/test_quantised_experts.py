"""Models that transformers keeps in fp8 in memory, experts included, train as the plain model with the same values."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_models import labelled, livened, plain_loss, small, train_call, wrapped
from torch import nn

from helpers_packed import packed_places
from helpers_parity import assert_same, grads_of
from helpers_quantised import quantised_copy
from helpers_slow import slow_except
from roundpipe.errors import ConfigError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers.integrations.finegrained_fp8")
quantizer = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8").FineGrainedFP8HfQuantizer

NOT_QUANTISED = ["lm_head", "mlp.gate", "kv_a_proj_with_mqa"]
CASES = [("qwen3_moe", 3), ("qwen3_moe", 1), ("mixtral", 2), ("deepseek_v3", 1)]


@pytest.fixture(autouse=True)
def _as_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, transformers loads the model dequantised."""
    monkeypatch.setattr(quantizer, "validate_environment", lambda self, *args, **kwargs: None)


def in_memory(model_type: str, path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The quantised model as transformers loads it, and the plain model with the same values."""
    model: Any = small(model_type).to(dtype)
    model.save_pretrained(path / "plain")
    quantised_copy(path / "plain", path / "quantised", path / "rounded", "fp8")
    config = json.loads((path / "quantised" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = NOT_QUANTISED
    (path / "quantised" / "config.json").write_text(json.dumps(config))
    quantised, plain = (
        transformers.AutoModelForCausalLM.from_pretrained(path / each, dtype=dtype) for each in ("quantised", "rounded")
    )
    names = {type(module).__name__ for module in quantised.modules()}
    assert names >= {"FP8Experts", "FP8Linear"}
    return quantised, plain


def adapted(model: Any, **config: Any) -> nn.Module:
    settings = {"target_modules": ["q_proj", "q_b_proj", "o_proj"], **config}
    return livened(peft.get_peft_model(model.train(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **settings)))


def adapters(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if "lora_" in name}


@pytest.mark.parametrize(("model_type", "num_devices"), slow_except(CASES[:1], CASES))
def test_losses_and_gradients_are_those_of_the_plain_model(model_type: str, num_devices: int, tmp_path: Path) -> None:
    model, plain = (adapted(each) for each in in_memory(model_type, tmp_path, torch.bfloat16))
    plain.load_state_dict(adapters(model.state_dict()), strict=False)
    experts = next(module for module in model.modules() if type(module).__name__ == "FP8Experts")
    config, batch = experts.config, labelled(model_type, num_rows=5)
    with wrapped(model, num_devices) as ours:
        assert {name for name in packed_places(model) if ".experts." in name} == {
            name for name, _ in plain.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        }
        assert experts in set(model.modules())
        assert experts.config is config, "the way to compute experts can be set afterwards, too"
        assert "gate_up_proj=fp8_tiles" in str(model)
        for _ in range(2):
            assert_same(train_call(ours, batch, 3), plain_loss(plain, batch, 3))
        found, expected = (adapters(grads_of(each)) for each in (model, plain))
        assert found
        assert all(grad is not None and grad.abs().max() > 0 for grad in found.values())
        assert_same(found, expected)


def test_the_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    model, plain = in_memory("qwen3_moe", tmp_path)
    model.requires_grad_(False).model.norm.weight.requires_grad_(True)
    with wrapped(model) as ours:
        ours.save_pretrained(tmp_path / "saved")
    plain.save_pretrained(tmp_path / "expected")
    found, expected = (load_file(tmp_path / each / "model.safetensors") for each in ("saved", "expected"))
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_what_cannot_be_taken_is_refused_by_name_before_anything_changes(tmp_path: Path) -> None:
    model, _ = in_memory("qwen3_moe", tmp_path)
    with_parameter = adapted(copy.deepcopy(model), target_modules=[], target_parameters=["experts.down_proj"])
    damaged = copy.deepcopy(model)
    damaged.model.layers[1].mlp.experts.down_proj_scale_inv = nn.Parameter(torch.ones(6, 3, 3))
    outside = nn.Sequential(model.model.layers[0].mlp.experts)
    refused = {
        r"layers.0.mlp.experts\S*' is quantised and has an adapter of PEFT's target_parameters": with_parameter,
        r"layers.1.mlp.experts', which transformers has quantised, cannot be taken: its scales": damaged,
        r"'0' is a FP8Experts outside of a model of transformers": outside,
    }
    for message, each in refused.items():
        with pytest.raises(ConfigError, match=message):
            wrapped(each)
        assert not packed_places(each)


def test_experts_in_another_order_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = in_memory("qwen3_moe", tmp_path)
    made = type(model)._from_config

    def interleaved(cls: Any, config: Any) -> Any:
        twin = made(config)
        for layer in twin.model.layers:
            layer.mlp.experts.is_concatenated = False
        return twin

    monkeypatch.setattr(type(model), "_from_config", classmethod(interleaved))
    with pytest.raises(ConfigError, match=r"FP8Experts in place of a Qwen3MoeExperts, which keeps its weights in ano"):
        wrapped(model)
    assert not packed_places(model)
