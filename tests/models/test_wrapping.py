"""wrap_model_to_roundpipe on a transformers model: how it is wrapped, its attributes, and what is refused."""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same, call_reference
from helpers_split import SplitModels, Toy, assert_same_training, recomputing, rows
from roundpipe import (
    AutoRoundPipe,
    ModelChangedError,
    RoundPipe,
    RoundPipePackedData,
    RoundPipeRunConfig,
    UsageError,
    wrap_model_to_roundpipe,
)
from roundpipe import models as presets
from roundpipe import models as registry
from roundpipe.optim import Adam

transformers = pytest.importorskip("transformers")

CONFIG = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NUM_MICROBATCH = 2


def llama(**changes: Any) -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, **changes}))


def tokens(num_rows: int = 4, *, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(99, (num_rows, 10), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(output: Any, label: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def check_training(model: RoundPipe, reference: nn.Module, batch: dict[str, Any]) -> None:
    """Loss and gradients of a call, everything recomputed."""
    expected = call_reference(reference, (), {**batch, "use_cache": False}, None, loss_of, NUM_MICROBATCH)
    loss = model.forward_backward((), batch, None, loss_of, run_config=recomputing(model, NUM_MICROBATCH))
    assert_same(loss, expected.loss, "loss")
    assert_same_training(model, reference)


@pytest.fixture(autouse=True)
def _no_presets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_presets", {})


@pytest.fixture
def wrap(models: SplitModels) -> Callable[..., Any]:
    def wrap(model: nn.Module, **options: Any) -> Any:
        return models.keep(wrap_model_to_roundpipe(model, **{"devices": ["cpu"] * 2, **options}))

    return wrap


# How a model is wrapped.


@pytest.mark.parametrize("use_sequential_preset", [None, True])
def test_a_language_model_is_split_without_options_or_examples(
    wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture, use_sequential_preset: bool | None
) -> None:
    reference = llama()
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        model = wrap(copy.deepcopy(reference), use_sequential_preset=use_sequential_preset, name="net")
    assert type(model) is RoundPipe
    assert model.num_layers == 5
    assert "net: LlamaForCausalLM is split into 5 layers; pass use_sequential_preset=False to do without" in caplog.text
    check_training(model, reference, tokens())
    assert model.num_layers == 5


def test_splitting_can_be_declined(wrap: Callable[..., Any]) -> None:
    reference = llama()
    model = wrap(copy.deepcopy(reference), use_sequential_preset=False)
    assert type(model) is AutoRoundPipe
    batch: dict[str, Any] = {**tokens(), "use_cache": False}
    loss, expected = model(**batch).loss, reference(**batch).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    model.synchronize()
    torch.testing.assert_close(model.lm_head.weight.grad, reference.lm_head.weight.grad)


def test_a_registered_preset_goes_before_the_splitter(
    wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Whole(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **kwargs: Any) -> Any:
            return self.inner(**kwargs)

    presets.register(transformers.LlamaForCausalLM, lambda model: nn.Sequential(Whole(model)))
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        model = wrap(llama())
    assert model.num_layers == 1
    assert "using the preset for LlamaForCausalLM" in caplog.text


def with_offloading() -> Any:
    hooks = pytest.importorskip("accelerate.hooks")
    model = llama()
    hooks.add_hook_to_module(model.model, hooks.ModelHook())
    return model


def test_insisting_on_a_split_that_is_refused_says_why_and_what_to_do(wrap: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError) as raised:
        wrap(with_offloading(), use_sequential_preset=True)
    message = str(raised.value)
    assert "no preset for LlamaForCausalLM, and it is not split into layers: " in message
    assert "the forward of its LlamaModel was replaced by hooks of accelerate" in message
    assert "roundpipe.models.register" in message


def test_a_model_that_is_refused_is_wrapped_part_by_part_with_a_warning(
    wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = wrap(with_offloading())
    assert type(model) is AutoRoundPipe
    assert "LlamaForCausalLM is wrapped part by part, for " in caplog.text


def test_a_model_without_a_repeated_list_is_wrapped_without_a_warning(
    wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))).num_layers == 2
    assert not caplog.text


def test_a_custom_model_is_split_when_an_example_is_given(wrap: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match="example_inputs must be given"):
        wrap(Toy(), use_sequential_preset=True)
    assert type(wrap(Toy(), example_inputs={"x": rows()})) is RoundPipe
    assert type(wrap(Toy(), example_inputs=[{"x": rows()}])) is RoundPipe


# Attributes, state and printing.


def test_attributes_are_those_of_the_model(wrap: Callable[..., Any]) -> None:
    plain = llama()
    model = wrap(plain)
    assert model.original_model is plain
    assert model.config is plain.config
    assert model.vocab_size == 99
    assert model.device == torch.device("cpu")
    assert model.dtype is torch.float32
    assert model.get_input_embeddings() is plain.model.embed_tokens
    assert model.model[1].block is plain.model.layers[0]
    assert model.num_parameters() == plain.num_parameters()


def test_model_and_layers_can_be_printed(wrap: Callable[..., Any]) -> None:
    model = wrap(llama())
    assert "LlamaDecoderLayer" in repr(model)
    assert "LlamaDecoderLayer" in repr(model.model)
    assert "BlockLayer" in str(model.model[1])


def test_the_state_dict_is_the_models_and_can_be_loaded(wrap: Callable[..., Any]) -> None:
    reference, other = llama(), llama()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    model = wrap(copy.deepcopy(reference))
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    model.load_state_dict(other.state_dict())
    check_training(model, other, tokens())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_train_and_eval_reach_every_module(wrap: Callable[..., Any]) -> None:
    reference = llama(attention_dropout=0.5)
    model = wrap(copy.deepcopy(reference))
    for mode in (False, True, False):
        assert model.train(mode) is model
        assert {module.training for module in model.original_model.modules()} == {mode}
        assert {module.training for module in model.model.modules()} == {mode}
        assert model.training is mode
    reference.eval()
    check_training(model, reference, tokens())


def test_training_mode_reaches_copies_of_modules_in_the_trees(wrap: Callable[..., Any]) -> None:
    """Of the modules above the blocks each layer has a copy."""

    class Doubling(Toy):
        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = super().forward(x)
            return h * 2 if self.training else h

    torch.manual_seed(3)
    reference = Doubling()
    model = wrap(copy.deepcopy(reference), example_inputs={"x": rows()})
    for mode in (True, False, True):
        model.train(mode)
        reference.train(mode)
        with torch.no_grad():
            torch.testing.assert_close(model(x=rows()), reference(rows()))


def test_changed_attributes_of_modules_are_followed(wrap: Callable[..., Any]) -> None:
    class Settable(Toy):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = super().forward(x)
            return h * self.factor

    torch.manual_seed(3)
    reference: Any = Settable()
    model = wrap(copy.deepcopy(reference), example_inputs={"x": rows()})
    for factor in (1.0, 3.0, 0.5):
        reference.factor = model.factor = factor
        reference.blocks[0].norm.eps = model.blocks[0].norm.eps = factor
        model.original_model.head.scale = factor
        with torch.no_grad():
            torch.testing.assert_close(model(x=rows()), reference(rows()))


def test_a_loss_function_set_after_wrapping_is_used(wrap: Callable[..., Any]) -> None:
    reference = llama()
    model = wrap(copy.deepcopy(reference))
    check_training(model, reference, tokens())

    def halved(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) / 2

    reference.loss_function = model.original_model.loss_function = halved
    check_training(model, reference, tokens(seed=2))


REPLACEMENTS: dict[str, Callable[[Any], object]] = {
    "a block": lambda model: model.model.layers.__setitem__(0, copy.deepcopy(model.model.layers[0])),
    "the head": lambda model: setattr(model, "lm_head", nn.Linear(32, 99, bias=False)),
    "a norm": lambda model: setattr(model.model, "norm", copy.deepcopy(model.model.norm)),
    "a part of a block": lambda model: setattr(model.model.layers[1], "mlp", nn.Identity()),
    "a weight": lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(99, 32))),
    "an added module": lambda model: model.model.add_module("adapter", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_a_replaced_module_is_refused(wrap: Callable[..., Any], what: str) -> None:
    model = wrap(llama())
    model.forward_backward((), tokens(), None, loss_of)
    REPLACEMENTS[what](model.original_model)
    with pytest.raises(ModelChangedError, match=r"replaced|added"):
        model.forward_backward((), tokens(), None, loss_of)


# Models and inputs of unusual kinds.


def test_gradient_checkpointing_is_turned_off(wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    reference, plain = llama(), llama()
    plain.gradient_checkpointing_enable()
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        model = wrap(plain)
    assert "gradient checkpointing of LlamaForCausalLM is turned off" in caplog.text
    assert not any(getattr(module, "gradient_checkpointing", False) for module in plain.modules())
    check_training(model, reference, tokens())


def test_names_of_checkpointing_since_transformers_5_23(
    wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That release renames the methods and warns about each use of the old names."""

    def old_name(*_: object) -> None:
        raise AssertionError("the old name was used")

    plain = llama()
    plain.gradient_checkpointing_enable()
    disable = type(plain).gradient_checkpointing_disable
    monkeypatch.setattr(type(plain), "activation_checkpointing_disable", disable, raising=False)
    monkeypatch.setattr(type(plain), "activation_checkpointing_enable", old_name, raising=False)
    monkeypatch.setattr(type(plain), "gradient_checkpointing_disable", old_name)
    monkeypatch.setattr(type(plain), "is_gradient_checkpointing", property(old_name))
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        model = wrap(plain)
        model.activation_checkpointing_enable(every_n_layers=1)  # Trainer calls this
    assert "gradient checkpointing of LlamaForCausalLM is turned off" in caplog.text
    assert "gradient checkpointing stays off" in caplog.text
    assert not any(getattr(module, "gradient_checkpointing", False) for module in plain.modules())


def test_a_model_on_the_meta_device_gets_memory_and_new_weights(
    wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model = wrap(plain)
    assert "is on the meta device: its weights are made anew" in caplog.text
    assert all(param.device.type == "cpu" for param in model.parameters())
    assert all(bool(param.isfinite().all()) for param in model.parameters())
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(model.config.initializer_range, rel=0.2)
    reference = llama()
    model.load_state_dict(reference.state_dict())
    check_training(model, reference, tokens())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    reference = llama()
    reference.save_pretrained(tmp_path)
    return tmp_path, reference


@pytest.mark.parametrize("pin_model", ["off", "register", "alloc"])
def test_weights_in_a_memory_mapped_file(wrap: Callable[..., Any], saved: tuple[Path, Any], pin_model: str) -> None:
    """They can be trained in place, and the file does not change."""
    path, reference = saved
    before = (path / "model.safetensors").read_bytes()
    plain = transformers.LlamaForCausalLM.from_pretrained(path)
    addresses = [param.data_ptr() for param in plain.parameters()]
    model = wrap(plain, pin_model=pin_model)
    assert (addresses == [param.data_ptr() for param in plain.parameters()]) == (pin_model != "alloc")
    check_training(model, reference, tokens())
    optimizer = Adam(model.optim_parameters(), lr=0.01)
    model.step(lambda: optimizer.step(), is_async=False)
    assert not torch.equal(model.state_dict()["lm_head.weight"], reference.lm_head.weight)
    assert (path / "model.safetensors").read_bytes() == before


def test_positional_arguments_get_their_names(wrap: Callable[..., Any]) -> None:
    reference = llama()
    model = wrap(copy.deepcopy(reference))
    batch = tokens()
    mask = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        output = model(batch["input_ids"], mask, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        assert_same(output.logits, reference(batch["input_ids"], mask, use_cache=False).logits)
    expected = call_reference(reference, (), {**batch, "use_cache": False}, None, loss_of, NUM_MICROBATCH)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
    loss = model.forward_backward((batch["input_ids"],), {"labels": batch["labels"]}, None, loss_of, run_config=config)
    assert_same(loss, expected.loss)
    assert_same_training(model, reference)
    with pytest.raises(UsageError, match="for generating"):
        model(batch["input_ids"], None, None, transformers.DynamicCache())


class Detector(transformers.PreTrainedModel):  # type: ignore[misc]
    """Labels are a list with an entry for each image, as of detection models. Has no repeated list of blocks."""

    config_class = transformers.PretrainedConfig

    def __init__(self) -> None:
        super().__init__(transformers.PretrainedConfig())
        self.boxes = nn.Linear(5, 4)

    def forward(self, pixel_values: Tensor, labels: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        each = [
            (self.boxes(pixels) - label["boxes"]).square().mean()
            for pixels, label in zip(pixel_values, labels, strict=False)
        ]
        return {"loss": torch.stack(each).mean()}


@pytest.mark.parametrize("wrap_it", [RoundPipe, functools.partial(wrap_model_to_roundpipe, upper_threshold=2**40)])
@pytest.mark.parametrize("by_name", [True, False])
def test_lists_of_labels_go_with_their_rows_in_a_model_of_one_layer(wrap_it: Any, by_name: bool) -> None:
    """There are as many boxes in each image as images: the entries of the list are rows, not the boxes inside."""
    torch.manual_seed(3)
    reference = Detector()
    pixels, boxes = torch.randn(4, 5), torch.randn(4, 4, 4)
    given = {"pixel_values": pixels, "labels": [{"boxes": each} for each in boxes]}
    with wrap_it(copy.deepcopy(reference), devices=["cpu"] * 2) as model:
        config = RoundPipeRunConfig(num_microbatch=2)
        args = () if by_name else tuple(given.values())
        loss = model.forward_backward(args, given if by_name else {}, run_config=config)
        expected = reference(**given)["loss"]
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        model.synchronize()
        torch.testing.assert_close(model.boxes.weight.grad, reference.boxes.weight.grad)


def test_microbatches_packed_by_the_user_are_taken_as_they_are(wrap: Callable[..., Any]) -> None:
    """Two of different length, as packing makes them."""
    reference = llama()
    model = wrap(copy.deepcopy(reference))
    ids = [tokens(2, seed=4)["input_ids"], tokens(3, seed=5)["input_ids"][:, :7]]
    packed = {name: RoundPipePackedData(list(ids)) for name in ("input_ids", "labels")}
    loss = model.forward_backward((), packed, None, loss_of, run_config=RoundPipeRunConfig(num_microbatch=2))
    expected = [reference(input_ids=piece, labels=piece, use_cache=False).loss for piece in ids]
    for one in expected:
        one.backward()
    assert_same(loss, (expected[0] + expected[1]).detach())
    assert_same_training(model, reference)


def test_logits_come_back_when_they_are_asked_for(wrap: Callable[..., Any]) -> None:
    reference = llama()
    model = wrap(copy.deepcopy(reference))
    batch = tokens()
    config = RoundPipeRunConfig(num_microbatch=2)
    _, output = model.forward_backward((), batch, None, loss_of, return_outputs=True, run_config=config)
    assert type(output) is type(reference(**batch))
    torch.testing.assert_close(output.logits, reference(**batch).logits)


# Refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example_inputs": 3}, "example_inputs must be the keyword arguments"),
        ({"example_inputs": [torch.ones(2)]}, "example_inputs must be the keyword arguments"),
        ({"example_inputs": "input_ids"}, "example_inputs must be the keyword arguments"),
        ({"example_inputs": torch.ones(2, 3)}, "example_inputs must be the keyword arguments"),
        ({"example_inputs": None}, "example_inputs must be the keyword arguments"),
        ({"liger_kernels": 1}, "liger_kernels must be True or False"),
        ({"liger_kernels": "yes"}, "liger_kernels must be True or False"),
        ({"exemple_inputs": {}}, "'exemple_inputs'"),
    ],
)
def test_bad_options_of_splitting(wrap: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        wrap(Toy(), **options)


def test_kernels_that_are_not_installed(wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ValueError, match="liger_kernels=True needs the package liger-kernel"):
        wrap(llama(), liger_kernels=True)


def test_an_example_that_the_model_rejects_raises_the_models_exception(wrap: Callable[..., Any]) -> None:
    plain = llama()
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        wrap(Toy(), example_inputs={"y": rows()})
    with pytest.raises(IndexError):
        wrap(plain, example_inputs={"input_ids": torch.full((2, 4), 1000)})
    assert type(wrap(plain)) is RoundPipe, "it is free again"


@pytest.mark.parametrize("name", ["use_cache", "past_key_values"])
def test_caches_are_refused_in_training(wrap: Callable[..., Any], name: str) -> None:
    model = wrap(llama())
    given = {"use_cache": True} if name == "use_cache" else {"past_key_values": transformers.DynamicCache()}
    with pytest.raises(UsageError, match="for generating"):
        model.forward_backward((), {**tokens(), **given}, None, loss_of)
    with pytest.raises(UsageError, match="for generating"):
        model(**tokens(), **given)
    with torch.no_grad():
        assert model(**tokens(), **given).past_key_values.get_seq_length() == 10


# Closing.


def test_closing_gives_the_plain_model_back(wrap: Callable[..., Any]) -> None:
    plain = llama()
    reference = copy.deepcopy(plain)
    modules, attributes = list(plain.modules()), {id(m): set(vars(m)) for m in plain.modules()}
    model = wrap(plain)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    check_training(model, reference, tokens())
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    plain_optimizer.step()
    reference.zero_grad()
    model.close()
    assert list(plain.modules()) == modules
    added = {name for m in plain.modules() for name in set(vars(m)) - attributes[id(m)]}
    assert not {name for name in added if "roundpipe" in name or name == "forward"}
    assert_same(dict(plain.state_dict()), dict(reference.state_dict()))
    plain(**tokens()).loss.backward()
    reference(**tokens()).loss.backward()
    for param, other in zip(plain.parameters(), reference.parameters(), strict=True):
        assert_same(param.grad, other.grad)
    for side in (plain, reference):
        side.zero_grad()
    check_training(wrap(plain), reference, tokens(seed=2))
