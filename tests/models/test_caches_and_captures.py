"""Caches are off in calls that do not ask for one, and outputs that hooks capture are captured once, on every road.

Models come as users have them: `use_cache` stands in their config, and hooks are installed by the first forward.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from small_models import assert_close_grads, labelled, lora, small, tokens
from sweep import build
from tiny_cases import Batch, Case, case_named
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, microbatches
from roundpipe import AutoRoundPipe, ModelSplitError, RoundPipe, UsageError, wrap_model_to_roundpipe

transformers = pytest.importorskip("transformers")

ROUNDING = 1e-5
WAYS: dict[str, dict[str, Any]] = {
    "layers": {"use_sequential_preset": True},
    "one layer": {"use_sequential_preset": False, "upper_threshold": 2**40},
    "parts": {"use_sequential_preset": False, "upper_threshold": 0},
}


def wrap(model: nn.Module, way: str = "layers", num_microbatch: int = 3) -> Any:
    options = {"devices": ["cpu"] * 2, "model_run_config": microbatches(num_microbatch), **WAYS[way]}
    wrapped = wrap_model_to_roundpipe(model, **options)
    assert isinstance(wrapped, AutoRoundPipe if way == "parts" else RoundPipe)
    return wrapped


def caching(model: Any) -> Any:
    """The model as users have it: its config asks for a cache."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = True
    assert model(**labelled("llama")).past_key_values is not None
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [lambda: small("llama"), lambda: lora(small("llama"))], ids=["full", "adapter"])
def test_a_decoder_whose_config_asks_for_a_cache_trains_and_evaluates(way: str, make: Any) -> None:
    plain, batch = caching(make()), labelled("llama")
    with wrap(caching(make()), way) as model:
        expected, found = plain(**batch), model(**batch)
        assert found.past_key_values is None
        torch.testing.assert_close(found.loss, expected.loss, rtol=ROUNDING, atol=0)
        expected.loss.backward()
        found.loss.backward()
        model.synchronize()
        assert_close_grads(model, plain, ROUNDING)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).loss, expected.loss, rtol=ROUNDING, atol=0)


class NeedsCache(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Fails without a cache for one row, after its blocks, as CSM does for as many frames as codebooks."""

    def forward(self, input_ids: Tensor, labels: Any = None, use_cache: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids, labels=labels, use_cache=use_cache, **options)
        if len(input_ids) == 1 and output.past_key_values is None:
            raise IndexError("too many indices")
        return output


def needing_cache() -> Any:
    model = caching(small("llama"))
    model.__class__ = NeedsCache
    return model


def test_a_call_that_fails_for_want_of_a_cache_is_refused_with_the_reason() -> None:
    plain, batch = needing_cache(), labelled("llama", num_rows=3)
    row = {name: value[:1] for name, value in batch.items()}
    assert plain(**row).loss.isfinite(), "the plain model takes it with a cache"
    with pytest.raises(IndexError, match="too many indices"):
        plain(**row, use_cache=False)
    with wrap(needing_cache(), num_microbatch=3) as model:
        with pytest.raises(
            ModelSplitError, match=r"raises IndexError\(.*\) without a cache .* use_cache=False"
        ) as raised:
            model.forward_backward(input_kwargs=batch)
        assert isinstance(raised.value.__cause__, IndexError)
        loss = model.forward_backward(input_kwargs=batch, run_config=microbatches(1))
        torch.testing.assert_close(loss, plain(**batch).loss.detach(), rtol=ROUNDING, atol=0)


def test_a_call_that_fails_with_a_cache_too_raises_what_the_model_raises() -> None:
    plain = needing_cache()
    plain.config.use_cache = False
    with wrap(plain, num_microbatch=3) as model, pytest.raises(IndexError, match="too many indices"):
        model.forward_backward(input_kwargs=labelled("llama", num_rows=3))


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_that_is_asked_for_is_refused_in_training(way: str) -> None:
    with wrap(small("llama"), way) as model:
        with pytest.raises(UsageError, match=r"use_cache=True and past_key_values are for generating"):
            model(**labelled("llama"), use_cache=True)
        with pytest.raises(UsageError, match=r"use_cache=True and past_key_values are for generating"):
            model(**labelled("llama"), past_key_values=transformers.DynamicCache())


def test_microbatches_do_not_share_a_cache() -> None:
    with wrap(small("llama").eval(), "parts") as model, torch.no_grad():
        with pytest.raises(UsageError, match="3 microbatches of this call would write to one cache"):
            model(input_ids=tokens(4, 7), use_cache=True)
        assert model(input_ids=tokens(4, 7)).logits.shape[:2] == (4, 7)


@pytest.mark.parametrize("kind", ["hidden_states", "attentions"])
def test_captured_outputs_of_parts_are_refused_instead_of_lost(kind: str) -> None:
    model = small("llama", attn_implementation="eager")
    with wrap(model, "parts") as wrapped:
        with pytest.raises(UsageError, match=f"the model collects {kind} of its layers, and they would be lost"):
            wrapped(**labelled("llama"), **{f"output_{kind}": True})
        wrapped(**labelled("llama")).loss.backward()


VISION = {
    "llava": case_named("llava:LlavaForConditionalGeneration"),
    "aya_vision": case_named("aya_vision:AyaVisionForConditionalGeneration"),
    "vipllava": dataclasses.replace(
        case_named("llava:LlavaForConditionalGeneration"),
        class_name="VipLlavaForConditionalGeneration",
        config_class="VipLlavaConfig",
    ),
}


def with_features(model_type: str, layer: int) -> Case:
    """The case with a deeper vision tower, of which it reads the hidden states of `layer`."""
    config = copy.deepcopy(VISION[model_type].config)
    config["vision_config"]["num_hidden_layers"] = 4
    name = "vision_feature_layers" if model_type == "vipllava" else "vision_feature_layer"
    config[name] = [layer, 1] if model_type == "vipllava" else layer
    return dataclasses.replace(VISION[model_type], config=config)


def plain_loss(case: Case) -> tuple[nn.Module, Batch, Tensor]:
    model, batch, _ = build(case)
    loss = model(**copy.deepcopy(batch)).loss
    loss.backward()
    return model, batch, loss


@pytest.mark.parametrize("num_microbatch", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("layer", [-2, -1, 1])
@pytest.mark.parametrize("model_type", VISION)
def test_a_vision_tower_gives_the_features_of_the_layer_that_the_config_names(
    model_type: str, layer: int, num_microbatch: int
) -> None:
    case = with_features(model_type, layer)
    plain, batch, expected = plain_loss(case)
    # Loss and gradients must show a wrong layer.
    others = {plain_loss(with_features(model_type, other))[2].item() for other in (-3, 0, 2)}
    assert not any(abs(other - expected.item()) < 1e-4 for other in others), "the layer does not matter here"
    with wrap(build(case)[0], num_microbatch=num_microbatch) as model:
        found = model.forward_backward(input_kwargs=batch)
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0)
        model.synchronize()
        assert_close_grads(model, plain, ROUNDING)
        output = model(**batch)
        torch.testing.assert_close(output.loss, expected, rtol=ROUNDING, atol=0)
        assert output.past_key_values is None


class Tower(nn.Module):
    """A vision model inside a layer of the user, which installs its hooks in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
        self.vision = transformers.CLIPVisionModel(config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        states: Tensor = self.vision(pixel_values=pixel_values, output_hidden_states=True).hidden_states[-2]
        return states


def test_hooks_are_installed_once_for_all_devices() -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(Tower(), nn.Linear(16, 16))

    images, reference = torch.randn(6, 3, 8, 8), module()
    with RoundPipe(module(), devices=["cpu"] * 3, model_run_config=microbatches(2)) as model:
        for _ in range(2):
            expected = sum(reference(part).square().sum() for part in images.tensor_split(2))
            expected.backward()
            found = model.forward_backward((images,), loss_fn=lambda output, _: output.square().sum())
            model.synchronize()
            assert_same(found, expected)
            assert_same_grads(model.model, reference)


def test_all_hidden_states_of_a_split_model_are_those_of_the_plain_one() -> None:
    """Also those of chosen layers, which the library passes as a list."""
    plain, batch = small("llama", num_hidden_layers=4).eval(), labelled("llama")
    for asked in (True, [1, 3]):
        with wrap(copy.deepcopy(plain)) as model, torch.no_grad():
            expected = plain(**batch, output_hidden_states=asked).hidden_states
            found = model(**batch, output_hidden_states=asked).hidden_states
        assert [state is None for state in found] == [state is None for state in expected]
        for state, other in zip(found, expected, strict=True):
            torch.testing.assert_close(state, other, rtol=ROUNDING, atol=ROUNDING)
