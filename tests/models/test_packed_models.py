"""Models with packed frozen weights train, recompute and generate as the plain model with the same values does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import labelled, livened, lora, plain_loss, small, tokens, train_call, wrapped
from torch import nn

import roundpipe
from helpers_adam import NumpyAdamW
from helpers_packed import packed_places, unpacked
from helpers_parity import StalenessReference, assert_same, grads_of, microbatches
from helpers_slow import slow_except
from helpers_split import Toy, recomputing, rows
from roundpipe import RoundPipe, wrap_model_to_roundpipe
from roundpipe.errors import ArgumentTypeError, ConfigError, UsageError
from roundpipe.optim import AdamW
from roundpipe.packed import FORMS, PackedWeight, pack_frozen, plain_state
from roundpipe.split.splitter import ModelSplitter
from roundpipe.store.training_memory import PinMode, training_memory

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

FAST = [("llama", "nf4", 2), ("qwen3_moe", "fp8", 3), ("gpt2", "int8", 1)]
DOWN = "model.layers.1.mlp.down_proj.weight"
TARGETS = {"gpt2": ("c_attn", "c_proj"), "t5": ("q", "wo"), "phi3": ("qkv_proj",), "qwen3_moe": ("q_proj", "o_proj")}
CASES = [
    (kind, form, num)
    for kind in ("llama", "gpt2", "t5", "mixtral", "phi3", "gpt_oss")
    for form in FORMS
    for num in (1, 2, 3)
]


def adapted(model_type: str, **config: Any) -> nn.Module:
    return lora(small(model_type, **config), *TARGETS.get(model_type, ("q_proj", "o_proj")))


def packed(model: nn.Module, form: str = "nf4", num_devices: int = 2, **options: Any) -> tuple[RoundPipe, nn.Module]:
    """The model, packed and wrapped, and the plain model with the same values."""
    before = copy.deepcopy(model)
    found = wrapped(model, num_devices, frozen_weights=form, **options)
    assert packed_places(model), "nothing is packed"
    return found, unpacked(before, model)


def assert_same_adapter_grads(model: RoundPipe, plain: nn.Module) -> None:
    found = grads_of(model.original_model)
    trained = {name: param.grad for name, param in plain.named_parameters() if param.requires_grad}
    assert trained.keys() == {name for name, grad in found.items() if grad is not None}
    for name, grad in trained.items():
        assert_same(found[name], grad, name)
        assert grad is not None
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize(("model_type", "form", "num_devices"), slow_except(FAST, sorted({*FAST, *CASES})))
def test_losses_and_gradients_are_those_of_the_plain_model(model_type: str, form: str, num_devices: int) -> None:
    model, plain = packed(adapted(model_type), form, num_devices)
    batch = labelled(model_type, num_rows=5)
    with model:
        for _ in range(2):
            assert_same(train_call(model, batch, 3), plain_loss(plain, batch, 3), "loss")
        assert_same_adapter_grads(model, plain)


def test_bfloat16_dropout_and_recomputed_layers() -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.3, target_modules=["q_proj", "down_proj"])
    model = livened(peft.get_peft_model(small("llama", attention_dropout=0.2), config).to(torch.bfloat16).train())
    before = copy.deepcopy(model)
    ours, plain = packed(model, "nf4", optim_dtype=torch.float32)
    assert_same(*(dropped_out(each) for each in (ours, wrapped(plain, 2, optim_dtype=torch.float32))))
    with pytest.raises(AssertionError):  # the values matter
        assert_same(*(dropped_out(wrapped(each, 2, optim_dtype=torch.float32)) for each in (plain, before)))


def dropped_out(model: RoundPipe) -> tuple[Any, dict[str, Any]]:
    """The loss and the gradients of adapters of a call that recomputes."""
    with model:
        torch.manual_seed(4)
        config = recomputing(model, 3)
        loss = model.forward_backward(input_kwargs=labelled("llama"), run_config=config)
        model.synchronize()
        found = {name: grad for name, grad in grads_of(model.original_model).items() if grad is not None}
    assert found
    return loss, found


@pytest.mark.parametrize("implementation", slow_except(("grouped_mm",), ("eager", "batched_mm", "grouped_mm")))
def test_every_way_to_compute_experts(implementation: str) -> None:
    base = adapted("mixtral")
    for module in base.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = implementation
    model, plain = packed(base, "nf4")
    assert {name.rpartition(".")[2] for name in packed_places(model.original_model)} >= {"gate_up_proj", "down_proj"}
    with model:
        batch = labelled("mixtral")
        assert_same(train_call(model, batch), plain_loss(plain, batch))
        assert_same_adapter_grads(model, plain)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
def test_training_equals_the_plain_loop(is_async: bool) -> None:
    model, plain = packed(adapted("llama"), "int8")
    reference = StalenessReference(plain, lambda params: NumpyAdamW(params, lr=0.01))
    with model:
        optimizer = AdamW(model.optim_parameters(), lr=0.01)
        bytes_before = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("_int8")}
        for iteration in range(4):
            batch = labelled("llama", seed=iteration)
            loss = model.forward_backward(input_kwargs=batch, run_config=microbatches(2))
            assert_same(loss, plain_loss(reference.module, batch), f"loss {iteration}")
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            reference.step(is_async)
        model.synchronize()
        reference.synchronize()
        ours = dict(model.original_model.named_parameters())
        for name, param in reference.module.named_parameters():
            if param.requires_grad:
                assert_same(ours[name], param, name)
        state = model.state_dict()
        assert bytes_before
        for name, value in bytes_before.items():
            assert_same(state[name], value, name)


def test_dora_and_adapters_that_rest() -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=["q_proj", "down_proj"])
    base = peft.get_peft_model(small("llama"), config)
    base.add_adapter("resting", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
    model, plain = packed(livened(base.train()), "nf4")
    assert not any("lora_" in name for name in packed_places(model.original_model))
    with model:
        batch = labelled("llama")
        assert_same(train_call(model, batch), plain_loss(plain, batch))
        assert_same_adapter_grads(model, plain)


def test_adapters_put_on_a_packed_model() -> None:
    base = small("llama").requires_grad_(False)
    wrapped(base, frozen_weights="nf4").close()
    model = lora(base, "q_proj", "down_proj")
    plain = unpacked(lora(small("llama"), "q_proj", "down_proj"), model)
    with wrapped(model) as ours:
        batch = labelled("llama")
        assert_same(train_call(ours, batch), plain_loss(plain, batch))
        assert_same_adapter_grads(ours, plain)


@pytest.mark.parametrize("is_resident", [True, False], ids=["resident", "uploading"])
def test_generate(is_resident: bool, monkeypatch: Any) -> None:
    if not is_resident:
        monkeypatch.setattr("roundpipe.api.split_model.ResidentForward._fits", lambda self: False)
    model, plain = packed(adapted("llama").eval(), "nf4")
    options = {"input_ids": tokens(2, 6), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with model:
        assert_same(model.generate(**options), plain.generate(**options))


@pytest.mark.parametrize(
    "options",
    [{"use_sequential_preset": False, "lower_threshold": 100}, {"example_inputs": {"x": rows()}}],
    ids=["parts", "split"],
)
def test_other_modules(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    before = Toy().requires_grad_(False)
    before.blocks[1].norm.requires_grad_(True)
    toy, found = copy.deepcopy(before), []
    for module, form in ((toy, "fp8"), (before, None)):
        plain = module if form else unpacked(before, toy)
        with wrap_model_to_roundpipe(plain, devices=["cpu"] * 2, frozen_weights=form, **options) as model:
            out = model(rows())
            out.square().sum().backward()
            model.synchronize()
        found.append((out.detach(), plain.blocks[1].norm.weight.grad, plain.blocks[1].norm.bias.grad))
    assert len(packed_places(toy)) == 5
    assert_same(*found)


@pytest.mark.parametrize(("model_type", "form"), slow_except([("llama", "nf4")], [("llama", "nf4"), ("phi3", "fp8")]))
def test_compiled_layers(model_type: str, form: str) -> None:
    model, plain = packed(adapted(model_type), form, compile={"backend": "eager", "fullgraph": True})
    batch = labelled(model_type)
    with model:
        for _ in range(2):
            assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_same_adapter_grads(model, plain)


def test_layers_with_packed_experts_run_eagerly_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = packed(adapted("mixtral"), "nf4", compile={"backend": "eager"})
    with model, caplog.at_level("INFO", "roundpipe"):
        batch = labelled("mixtral")
        assert_same(train_call(model, batch), plain_loss(plain, batch))
        assert_same_adapter_grads(model, plain)
    assert any("MixtralDecoderLayer" in message and "eager" in message for message in caplog.messages), caplog.messages


# Bytes.


def test_images_and_the_memory_table_count_packed_bytes() -> None:
    base = adapted("llama")
    rows_before = training_memory([base], torch.float32, PinMode.ALLOC)
    dense = sum(param.nbytes for param in base.parameters())
    with wrapped(base, frozen_weights="nf4", optim_dtype=torch.float32) as model:
        places = packed_places(base)
        saved = sum(described.num_elements * 4 - described.num_bytes for described in places.values())
        assert sum(param.nbytes for param in base.parameters()) == dense - saved
        layers = model._engine.store.layers
        assert sum(layer.weight_bytes for layer in layers) == dense - saved
        assert not any(
            record.master or record.back
            for layer in layers
            for record in layer.parameters
            if record.name.endswith("_nf4")
        )
    rows_after = training_memory([base], torch.float32, PinMode.ALLOC)
    for row in ("gradients", "master weights"):
        assert rows_after[row] == rows_before[row]


# Refusals.


def test_wrong_options_and_models_without_frozen_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"frozen_weights must be one of 'nf4', 'int8', 'fp8', got 'int4'"):
        wrapped(adapted("llama"), frozen_weights="int4")
    with pytest.raises(ArgumentTypeError, match=r"frozen_weights must be one of .* got int"):
        wrapped(adapted("llama"), frozen_weights=4)
    with pytest.raises(ConfigError, match=r"no frozen linear weight \(1\d train\).*get_peft_model"):
        wrapped(small("llama"), frozen_weights="nf4")


def test_adapters_of_parameters_and_merging_are_refused() -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=[], target_parameters=["experts.down_proj"])
    model = peft.get_peft_model(small("mixtral"), config)
    with pytest.raises(ConfigError, match=r"experts\S*down_proj' has an adapter of PEFT's target_parameters"):
        wrapped(model, frozen_weights="nf4")
    assert not packed_places(model)
    base = adapted("llama")
    with wrapped(base, frozen_weights="nf4") as ours:
        ours.synchronize()
    with pytest.raises(
        UsageError, match=r"'weight' is a frozen weight that is packed as nf4.*adapters cannot be merged"
    ):
        base.merge_and_unload()


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt2"])
def test_trials_expand_no_weight(model_type: str, monkeypatch: Any) -> None:
    """A trial runs the whole model on the host a dozen times; expanding its weights each time would take hours."""
    model = adapted(model_type)
    pack_frozen(model, FORMS["nf4"], "model")
    parts: list[float] = []
    expand = PackedWeight.expand

    def watched(self: PackedWeight, packed: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        parts.append(((self.num_elements if stop is None else stop) - start) / self.num_elements)
        return expand(self, packed, start, stop)

    monkeypatch.setattr(PackedWeight, "expand", watched)
    assert ModelSplitter(model).learn((), labelled(model_type))
    assert len(parts) > 20
    assert max(parts) < 0.5
    model(**labelled(model_type))
    assert max(parts) == 1


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_saved_model_without_adapter_is_the_plain_one(model_type: str, tmp_path: Path) -> None:
    """Embeddings train beside a packed base; transformers reads the folder with the values of both."""
    model = small(model_type).requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)  # type: ignore[operator,union-attr]
    with wrapped(model, frozen_weights="int8") as ours:
        ours.save_pretrained(tmp_path)
        expected = plain_state(model)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert expected is not None
    assert packed_places(model).keys() < expected.keys()
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))


@pytest.mark.parametrize(("model_type", "form"), [("llama", "nf4"), ("qwen3_moe", "int8")])
def test_a_checkpoint_without_adapter_loads_as_it_is(model_type: str, form: str, tmp_path: Path) -> None:
    """from_pretrained would put random values in place of packed weights, so it refuses the folder."""
    model = small(model_type, tie_word_embeddings=True).to(torch.bfloat16).requires_grad_(False)
    model.get_parameter("model.norm.weight").requires_grad_(True)
    with wrapped(model, frozen_weights=form, optim_dtype=torch.float32) as ours:
        roundpipe.checkpoint.save(tmp_path / "saved", ours).wait()
        expected = plain_state(model)
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    found = roundpipe.load(tmp_path / "saved")
    assert packed_places(found) == packed_places(model)
    values = plain_state(found)
    assert expected is not None
    assert values is not None
    assert values["model.norm.weight"].dtype is torch.bfloat16
    assert_same(dict(sorted(values.items())), dict(sorted(expected.items())))


def test_damaged_checkpoints_of_packed_models_are_refused_by_name(tmp_path: Path) -> None:
    model = small("llama").requires_grad_(False)
    model.get_parameter("model.norm.weight").requires_grad_(True)
    with wrapped(model, frozen_weights="fp8") as ours:
        roundpipe.checkpoint.save(tmp_path / "saved", ours).wait()
    content = json.loads((tmp_path / "saved" / "config.json").read_text())
    weights = content["quantization_config"]["weights"]
    changes: dict[str, Any] = {
        r"down_proj.weight, which is quantised as roundpipe, cannot be taken: it has torch.uint8": {"shape": [4, 4]},
        r"down_proj.weight came quantised, as fp8_tiles. Load the model that was trained": {"form": "fp8_tiles"},
        r"quantised as roundpipe, but there is no \S*down_proj.weight_nf4": {"form": "nf4"},
    }
    for message, change in changes.items():
        changed = {**weights, DOWN: {**weights[DOWN], **change}}
        settings = {**content["quantization_config"], "weights": changed}
        (tmp_path / "saved" / "config.json").write_text(json.dumps({**content, "quantization_config": settings}))
        with pytest.raises(ConfigError, match=message):
            roundpipe.load(tmp_path / "saved")
    for damaged in (
        {},
        {DOWN: {}},
        {DOWN: {**weights[DOWN], "dtype": "float7"}},
        {DOWN: {**weights[DOWN], "shape": 4}},
    ):
        settings = {"packed_by": "roundpipe", **({"weights": damaged} if damaged else {})}
        (tmp_path / "saved" / "config.json").write_text(json.dumps({**content, "quantization_config": settings}))
        with pytest.raises(ConfigError, match=r"weights quantised as roundpipe is damaged \(.*Error"):
            roundpipe.load(tmp_path / "saved")
