"""Weights are trained in the memory they were loaded into, and tensors that were not loaded are reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import labelled, plain_loss, small, train_call, wrapped

from helpers_parity import assert_same, assert_same_grads
from roundpipe import ConfigError, wrap_model_to_roundpipe

transformers = pytest.importorskip("transformers")


def empty_like(plain: Any) -> Any:
    """The same model without weights, but with the buffers that no checkpoint has."""
    with torch.device("meta"):
        model = type(plain)(plain.config)
    for (_, ours), (_, theirs) in zip(model.named_modules(), plain.named_modules(), strict=True):
        for name, buffer in theirs._buffers.items():
            if name in theirs._non_persistent_buffers_set:
                ours._buffers[name] = copy.deepcopy(buffer)
    return model


def from_torch(plain: Any, folder: Path) -> Any:
    torch.save(plain.state_dict(), folder / "weights.pt")
    model = empty_like(plain)
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)
    return model


def from_safetensors(plain: Any, folder: Path) -> Any:
    from safetensors.torch import load_file

    plain.save_pretrained(folder)
    model = empty_like(plain)
    model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    return model


def from_pretrained(plain: Any, folder: Path) -> Any:
    plain.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "torch, memory-mapped": from_torch,
    "safetensors, memory-mapped": from_safetensors,
    "from_pretrained": from_pretrained,
}


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
@pytest.mark.parametrize("way", WAYS)
def test_loaded_weights_train_as_in_the_plain_model(tmp_path: Path, way: str, pin_model: str) -> None:
    plain, batch = small("llama"), labelled("llama")
    with wrapped(WAYS[way](plain, tmp_path).train(), 2, pin_model=pin_model) as model:
        assert_same(train_call(model, batch), plain_loss(plain, batch), "loss")
        assert_same_grads(model.original_model, plain)


def test_tensors_that_were_not_loaded_are_reported() -> None:
    plain = small("llama")
    with torch.device("meta"):
        model = type(plain)(plain.config)
    model.load_state_dict(plain.state_dict(), assign=True)
    with pytest.raises(ConfigError, match=r"rotary_emb\.inv_freq of LlamaForCausalLM is on the meta device .*2 of 23"):
        wrap_model_to_roundpipe(model, devices=["cpu"])
