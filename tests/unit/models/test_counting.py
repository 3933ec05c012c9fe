"""Which labels a model's loss is the mean over is found by asking the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ConfigError
from roundpipe.models.counting import count_all, count_shifted, counting_rule

IGNORED = -100
LABELS = torch.tensor([[1, 2, IGNORED, 4], [IGNORED, IGNORED, 3, 0], [2, IGNORED, IGNORED, IGNORED]])


class Language(nn.Module):
    """Its loss is a sum over labels, divided by their number or by what it is told."""

    def __init__(self, *, shift: bool, obeys: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5, 6)
        self.shift, self.obeys = shift, obeys

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> Any:
        logits = self.head(self.dropout(self.embed(input_ids)))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if num_items_in_batch is None or not self.obeys:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / num_items_in_batch
        return SimpleNamespace(loss=loss)


def call(labels: Tensor = LABELS) -> dict[str, Any]:
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def test_labels_that_are_not_ignored_are_counted() -> None:
    assert count_all(LABELS) == 6
    assert count_shifted(LABELS) == 4
    assert count_shifted(torch.ones(2, 1, dtype=torch.long)) == 0


@pytest.mark.parametrize("shift", [True, False])
def test_microbatches_weighed_by_the_rule_make_the_mean_of_the_whole(shift: bool) -> None:
    torch.manual_seed(2)
    model = Language(shift=shift)
    rule = counting_rule(model, call())
    count = rule(LABELS)
    parts = [model(**call(LABELS[i : i + 1]), num_items_in_batch=count).loss for i in range(3)]
    torch.testing.assert_close(sum(parts), model(**call()).loss)


@pytest.mark.parametrize(("shift", "expected"), [(True, count_shifted), (False, count_all)])
def test_the_rule_holds_for_labels_it_has_not_seen(shift: bool, expected: Any) -> None:
    """Also where those it was found with do not tell the rules apart: their first column is ignored, say."""
    torch.manual_seed(2)
    labels = LABELS.clone()
    labels[:, 0] = IGNORED
    for given in (LABELS, labels):
        assert counting_rule(Language(shift=shift), call(given))(LABELS) == expected(LABELS)


def test_a_number_the_user_has_given_is_not_looked_at() -> None:
    assert counting_rule(Language(shift=True), {**call(), "num_items_in_batch": 17}) is count_shifted


def test_dropout_does_not_blur_it() -> None:
    model = Language(shift=True, dropout=0.5)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert counting_rule(model, call()) is count_shifted
    assert torch.equal(torch.get_rng_state(), before)
    assert all(param.grad is None for param in model.parameters())


def test_a_loss_that_ignores_the_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss of Language does not follow num_items_in_batch.*over 12 labels"):
        counting_rule(Language(shift=True, obeys=False), call())
