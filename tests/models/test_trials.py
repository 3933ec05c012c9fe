"""A trial that raises counts as "no": exceptions of a model during a trial do not reach the user."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from small_models import livened
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, call_reference, microbatches
from helpers_split import WIDTH, Block, SplitModels, Toy, check_split
from roundpipe.errors import ModelSplitError
from roundpipe.split import splitter, verify
from roundpipe.split.determinism import refusing, succeeds


class Pairwise(nn.Module):
    """With as many rows as columns its output looks as if the module were tokenwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = self.linear(h).transpose(0, 1)
        return h[None] - h[:, None]


class WithPairs(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = Pairwise()

    def forward(self, x: Tensor) -> Any:
        bias = self.pairs(x).tanh().mean((0, 1)).unsqueeze(1)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, bias)
        return self.head(h)


@pytest.mark.parametrize("size", [3, 4, 6])
def test_a_module_that_is_not_tokenwise_may_fail_on_parts_of_its_input(models: SplitModels, size: int) -> None:
    x = torch.randn(size, size, WIDTH, generator=torch.Generator().manual_seed(3))
    check_split(models, WithPairs(), {"x": x}, num_microbatch=1)


@pytest.mark.parametrize("size", [3, 4])
def test_bros_is_split_and_trains_as_the_plain_model(models: SplitModels, size: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BrosConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(1)
    plain = livened(transformers.BrosForTokenClassification(config).train())
    generator = torch.Generator().manual_seed(2)
    inputs = {
        "input_ids": torch.randint(3, 50, (size, size), generator=generator),
        "bbox": torch.rand(size, size, 4, generator=generator),
        "labels": torch.randint(0, 2, (size, size), generator=generator),
    }
    model = models.wrap(copy.deepcopy(plain), inputs, 2)
    loss = model.forward_backward((), inputs, run_config=microbatches(1), loss_fn=lambda output, _: output.loss)
    expected = call_reference(plain, (), inputs, None, lambda output, _: output.loss, 1)
    assert_same(loss, expected.loss)
    model.synchronize()
    assert_same_grads(model.original_model, plain)


def test_a_trial_that_raises_is_a_no_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> bool:
        raise ZeroDivisionError("never mind")

    with caplog.at_level(logging.DEBUG, logger="roundpipe"):
        assert not succeeds("it divides", fails)
    assert "it divides: no, trying it out raised ZeroDivisionError('never mind')" in caplog.text
    with pytest.raises(ModelSplitError, match="dividing raised ZeroDivisionError"), refusing("dividing"):
        fails()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, torch.OutOfMemoryError])
def test_interrupts_and_exhausted_memory_reach_the_caller(error: type[BaseException]) -> None:
    def fails() -> bool:
        raise error

    with pytest.raises(error):
        succeeds("it works", fails)
    with pytest.raises(error), refusing("it"):
        fails()


@pytest.mark.parametrize("place", [(verify, "_find_tokenwise"), (splitter, "verify")], ids=["inside", "whole"])
def test_a_verification_that_raises_refuses_the_split(
    models: SplitModels, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("never mind")

    monkeypatch.setattr(*place, fails)
    with pytest.raises(NotImplementedError, match="comparing its layers with the model raised ZeroDivisionError"):
        models.wrap(Toy(block=Block), {"x": torch.ones(4, WIDTH)})


def test_an_exception_of_the_model_for_the_examples_reaches_the_user(models: SplitModels) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        models.wrap(Toy(), {"x": torch.ones(4, WIDTH + 1)})
