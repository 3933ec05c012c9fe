"""Models of transformers keep their names in messages, and can be copied and saved while they are wrapped."""

from __future__ import annotations

import copy
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import labelled, livened, small, train_call, wrapped
from torch import nn
from torch.optim.swa_utils import AveragedModel

from helpers_parity import assert_same, assert_same_state
from helpers_slow import slow_except
from roundpipe import AutoRoundPipe, ModelChangedError, UsageError, wrap_model_to_roundpipe

pytest.importorskip("transformers")
KINDS = ("llama", "gpt2", "mixtral", "t5", "bert")


def stepped(model: Any, kind: str) -> None:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.01)
    train_call(model, labelled(kind, num_rows=4), 2)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    model.synchronize()


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# Names.


@pytest.mark.parametrize(("kind", "name"), [("llama", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")])
def test_resized_embeddings_are_named_as_the_user_knows_them(kind: str, name: str) -> None:
    plain = small(kind)
    with wrapped(plain) as model:
        model.original_model.resize_token_embeddings(120)
        with pytest.raises(ModelChangedError) as raised:
            train_call(model, labelled(kind, num_rows=4), 2)
    message = str(raised.value)
    assert f"parameter {name!r}" in message
    assert "(120, 32) instead of (97, 32)" in message
    assert "before wrapping" in message
    assert "close()" in message
    assert "trees" not in message
    with wrapped(plain) as model:  # as the message advises
        stepped(model, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_leads_to_its_parameter(kind: str) -> None:
    """In models of transformers a submodule is called `model`, which is also an attribute of a wrapper."""
    plain = small(kind)
    parameters, paths = dict(plain.named_parameters()), dict(plain.named_modules())
    with wrapped(plain) as model:
        assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
        assert all(model.get_submodule(path) is module for path, module in paths.items() if path)
        assert isinstance(model, type(plain))


PARTS, PLACES = ("parameter", "submodule", "buffer"), ("a block", "around the blocks", "an embedding")


@pytest.mark.parametrize(
    ("what", "place"), slow_except(list(zip(PARTS, PLACES, strict=True)), itertools.product(PARTS, PLACES))
)
def test_what_is_added_is_named_as_the_user_knows_it(what: str, place: str) -> None:
    plain = small("llama")
    path = {"a block": "model.layers.1.mlp", "around the blocks": "model", "an embedding": "model.embed_tokens"}[place]
    with wrapped(plain) as model:
        train_call(model, labelled("llama", num_rows=4), 2)
        module = plain.get_submodule(path)
        if what == "parameter":
            module.extra = nn.Parameter(torch.ones(()))
        elif what == "submodule":
            module.extra = nn.Linear(2, 2)
        else:
            module.register_buffer("extra", torch.ones(()))
        if what == "buffer" and place == "around the blocks":
            return  # a buffer of the model's own code is the model's own affair
        with pytest.raises(ModelChangedError, match=f"'{path}.extra'"):
            train_call(model, labelled("llama", num_rows=4), 2)


def test_parameters_of_parts_have_the_names_of_the_whole() -> None:
    plain = small("llama")
    with wrap_model_to_roundpipe(plain, use_sequential_preset=False, devices=["cpu"]) as model:
        assert isinstance(model, AutoRoundPipe)
        records = [record for store in model._engine.group.stepper.stores for record in store.parameters]
        assert {record.name for record in records} == {name for name, _ in plain.named_parameters()}


# Copies.


@pytest.mark.parametrize("kind", KINDS)
def test_the_original_model_can_be_copied_and_saved(kind: str) -> None:
    plain = small(kind)
    with wrapped(plain) as model:
        assert model.original_model is plain
        stepped(model, kind)
        averaged = AveragedModel(model.original_model)
        for twin in (copy.deepcopy(model.original_model), through_file(model.original_model)):
            assert {type(m) for m in twin.modules()} == {type(m) for m in plain.modules()}
            assert_same_state(twin, model)
            pairs = zip(plain.parameters(), twin.parameters(), strict=True)
            assert all(ours.data_ptr() != own.data_ptr() and not vars(own) for ours, own in pairs)
            with torch.no_grad():
                found, expected = (one(**labelled(kind)).loss for one in (twin, plain))
            assert_same(found, expected)
        stepped(model, kind)
        averaged.update_parameters(model.original_model)
        assert_same_state(averaged.module, model)
        for copied in (copy.deepcopy, through_file):
            with pytest.raises(UsageError, match="original_model"):
                copied(model.model)


def test_a_model_in_parts_is_copied_without_them() -> None:
    plain = small("llama")
    kinds = {type(module) for module in plain.modules()}
    with wrap_model_to_roundpipe(plain, use_sequential_preset=False, devices=["cpu"]) as model:
        for twin in (copy.deepcopy(model.original_model), through_file(model.original_model)):
            assert {type(module) for module in twin.modules()} == kinds
            batch = labelled("llama", num_rows=4)
            twin(**batch).loss.backward()
            assert_same_state(twin, model)


def test_an_adapter_saves_without_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = small("llama", hidden_size=128, intermediate_size=512)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = livened(peft.get_peft_model(base, config).train())
    with wrapped(adapted) as model:
        stepped(model, "llama")
        state = peft.get_peft_model_state_dict(model.original_model)
        torch.save(state, tmp_path / "adapter.pt")
        held = sum(tensor.nbytes for tensor in state.values())
        assert (tmp_path / "adapter.pt").stat().st_size < 2 * held + 20_000
        loaded = torch.load(tmp_path / "adapter.pt")
        assert_same(dict(loaded), dict(state))
