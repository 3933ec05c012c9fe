"""A forward that was replaced on the instance before wrapping trains the wrapped model, or is refused by name.

TRL replaces the forward of every causal model by a method around the old one; users do it with closures. Copies on
devices must run their own modules: the original's would compute the same loss and train nothing.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
from small_models import labelled, small
from torch import Tensor, nn

from helpers_parity import assert_same, microbatches, seeded
from helpers_split import SplitModels, Toy, assert_same_training, check_forward_of, plain_call, rows, train_call
from roundpipe import wrap_model_to_roundpipe
from roundpipe.optim import AdamW

transformers = pytest.importorskip("transformers")


def around_the_model(model: Any) -> None:
    """As TRL does: a method of the model that calls the forward it replaces."""
    old = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused: bool = False, **kwargs: Any) -> Any:
        assert not fused
        return old(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def around_a_block(model: Any) -> None:
    old = model.blocks[1].forward
    model.blocks[1].forward = lambda h: old(h) * 2.0


def around_the_head(model: Any) -> None:
    head = model.head
    head.forward = lambda h: nn.functional.linear(h.double(), head.weight.double(), head.bias.double()).float()


@pytest.mark.parametrize("replace", [around_the_model, around_a_block, around_the_head])
def test_a_split_model_trains_with_it(models: SplitModels, replace: Callable[[Any], None], num_devices: int) -> None:
    inputs = {"x": rows()}
    module, reference = seeded(Toy), seeded(Toy)
    replace(module)
    replace(reference)
    model = models.wrap(module, inputs, num_devices)
    expected = plain_call(reference, inputs)
    loss, outputs = train_call(model, inputs)
    assert_same((loss, outputs), (expected.loss, expected.outputs))
    assert_same_training(model, reference)
    check_forward_of(model, reference, inputs)


WAYS: dict[str, dict[str, Any]] = {
    "layers": {"use_sequential_preset": True},
    "one layer": {"use_sequential_preset": False, "upper_threshold": 2**40},
}


def trained(model: Any, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the final weights of a plain loop."""
    optimizer = AdamW(model.optim_parameters(), lr=0.02)
    losses = []
    for _ in range(num_steps):
        loss = model(**labelled("llama")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_a_causal_model_with_tied_embeddings_trains_as_without_it(way: str) -> None:
    options = {"devices": ["cpu"] * 2, "model_run_config": microbatches(2), **WAYS[way]}
    untouched, replaced = (small("llama", tie_word_embeddings=True) for _ in range(2))
    around_the_model(replaced)
    with (
        wrap_model_to_roundpipe(untouched, **options) as expected,
        wrap_model_to_roundpipe(replaced, **options) as model,
    ):
        losses, weights = trained(model)
        assert_same((losses, weights), trained(expected))
    assert losses[2] < losses[1] < losses[0]


def test_hooks_of_accelerate_that_move_weights_are_refused() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = small("llama")
    hooks.add_hook_to_module(model.model, hooks.ModelHook())
    with pytest.raises(NotImplementedError, match="LlamaModel was replaced by hooks of accelerate, which move weights"):
        wrap_model_to_roundpipe(model, True, devices=["cpu"])
