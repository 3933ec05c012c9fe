"""Losses of modules that are not of transformers and are split at their blocks: right, or warned of."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import assert_close_grads
from torch import Tensor, nn

from helpers_parity import batch, microbatches, seeded
from roundpipe import wrap_model_to_roundpipe

cross_entropy = nn.functional.cross_entropy


class Classifier(nn.Module):
    def __init__(self, loss_of: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(6, 3)
        self.loss_of = loss_of

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.loss_of(self.head(x), labels, **kwargs)


def inputs(**more: Any) -> dict[str, Any]:
    """Five rows, the second of which has no label that counts."""
    return {"x": batch(5, 6), "labels": torch.tensor([0, -100, 2, 1, 0]), **more}


def divided(logits: Tensor, labels: Tensor, **kwargs: Any) -> Any:
    return {"loss": cross_entropy(logits, labels, reduction="sum") / kwargs["num_items_in_batch"]}


@pytest.mark.parametrize("count", [4, torch.tensor(4), torch.tensor([4])], ids=["number", "tensor", "with_a_dimension"])
def test_a_loss_that_needs_the_count_of_labels_is_that_of_the_batch(
    count: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, given = seeded(lambda: Classifier(divided)), inputs(num_items_in_batch=count)
    expected = plain(**given)["loss"].sum()
    expected.backward()
    config = microbatches(3)
    wrapped = copy.deepcopy(plain)
    wrapped.zero_grad()
    with wrap_model_to_roundpipe(wrapped, example_inputs=given, devices=["cpu"] * 2, model_run_config=config) as model:
        loss = model(**given)["loss"]
        loss.backward()
        model.synchronize()
        torch.testing.assert_close(loss, expected, atol=0.0, rtol=1e-6)
        assert_close_grads(model.original_model, plain, 1e-6)
        torch.testing.assert_close(model.forward_backward(input_kwargs=given), expected.detach(), atol=0.0, rtol=1e-6)
    assert caplog.messages == []


def largest(logits: Tensor, labels: Tensor) -> Any:
    return {"loss": cross_entropy(logits, labels, reduction="none").max()}


def in_front(logits: Tensor, labels: Tensor) -> Any:
    return cross_entropy(logits, labels), logits


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [(largest, "for two rows together"), (in_front, "output[0] is one number with a gradient")],
    ids=["an_ignored_row", "no_name"],
)
def test_a_loss_that_may_not_be_that_of_the_batch_is_warned_of_once(
    loss_of: Callable[..., Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, given = seeded(lambda: Classifier(loss_of)), inputs()
    with (
        caplog.at_level(logging.WARNING, logger="roundpipe"),
        wrap_model_to_roundpipe(plain, example_inputs=given, devices=["cpu"]) as model,
    ):
        with torch.no_grad():
            model(**given, roundpipe_run_config=microbatches(1))
        assert caplog.messages == []
        for _ in range(2):
            model(**given, roundpipe_run_config=microbatches(3))
    (found,) = caplog.messages
    assert message in found
    assert "num_microbatch=1" in found
