"""Trials find out what the loss of a model is a mean over."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.api.loss_trials import LossForm, LossKind, OwnLoss, TrialRows, count_all, count_shifted
from roundpipe.microbatch import split_call

IGNORED = -100
LABELS = torch.tensor([[1, 2, IGNORED, 4], [IGNORED, IGNORED, 3, 0], [2, IGNORED, IGNORED, IGNORED]])


class Language(nn.Module):
    """Its loss is a sum over labels, divided by their number or by `num_items_in_batch`, plus `other` times a mean."""

    def __init__(self, *, shift: bool, obeys: bool = True, dropout: float = 0.0, other: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5, 6)
        self.shift, self.obeys, self.other = shift, obeys, other

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: float | None = None) -> Any:
        logits = self.head(self.dropout(self.embed(input_ids)))
        others = self.other * logits.square().mean()
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if num_items_in_batch is None or not self.obeys:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / num_items_in_batch
        return SimpleNamespace(loss=loss + others)


class OfValues(nn.Module):
    """A loss over floating-point labels."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.reduction = reduction

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=nn.functional.mse_loss(self.head(x)[:, 0], labels, reduction=self.reduction))


def call(labels: Tensor = LABELS) -> dict[str, Any]:
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def seeded(model: type[Language], **options: Any) -> Language:
    torch.manual_seed(2)
    return model(**options)


def loss_form(model: nn.Module, given: dict[str, Any]) -> LossForm:
    def split(num_microbatch: int) -> Any:
        return split_call((), given, None, num_microbatch=num_microbatch)

    own = OwnLoss(model, on_the_host=contextlib.nullcontext)
    return own.form(given, lambda: TrialRows.of(split(len(given["labels"])), split), lambda: None)


def test_labels_that_are_not_ignored_are_counted() -> None:
    assert count_all(LABELS) == 6
    assert count_shifted(LABELS) == 4
    assert count_shifted(torch.ones(2, 1, dtype=torch.long)) == 0


@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("shift", [True, False])
def test_microbatches_weighed_by_the_count_make_the_mean_of_the_whole(shift: bool, obeys: bool) -> None:
    model = seeded(Language, shift=shift, obeys=obeys)
    form = loss_form(model, call())
    assert (form.kind, form.takes_count) == (LossKind.MEAN_OVER_LABELS, obeys)
    assert form.count is not None
    counts = [form.count(LABELS[i : i + 1]) for i in range(3)]
    parts = [
        model(**call(LABELS[i : i + 1])).loss * (count / sum(counts)) for i, count in enumerate(counts) if count > 0
    ]
    torch.testing.assert_close(sum(parts), model(**call()).loss)


@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize(("shift", "expected"), [(True, count_shifted), (False, count_all)])
def test_the_rule_holds_for_labels_it_has_not_seen(shift: bool, expected: Any, obeys: bool) -> None:
    """The right rule is found even if both rules count the same labels, as when the first column is ignored."""
    labels = LABELS.clone()
    labels[:, 0] = IGNORED
    for given in (LABELS, labels):
        assert loss_form(seeded(Language, shift=shift, obeys=obeys), call(given)).count is expected


@pytest.mark.parametrize("other", [0.0, 1e-3, 0.5])
def test_terms_that_the_count_does_not_divide_are_seen(other: float) -> None:
    form = loss_form(seeded(Language, shift=True, other=other), call())
    assert form == LossForm(LossKind.MEAN_OVER_LABELS, count_shifted, takes_count=True, has_other_terms=other > 0)


def test_a_number_the_user_has_given_is_not_looked_at() -> None:
    assert loss_form(Language(shift=True), {**call(), "num_items_in_batch": 17}).count is count_shifted


def test_dropout_does_not_blur_it_and_the_model_is_left_alone() -> None:
    model = Language(shift=True, dropout=0.5)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert loss_form(model, call()).count is count_shifted
    assert torch.equal(torch.get_rng_state(), before)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(("reduction", "kind"), [("mean", LossKind.MEAN_OVER_ROWS), ("sum", LossKind.SUM)])
def test_without_labels_to_count_it_is_seen_whether_rows_are_averaged_or_added(reduction: str, kind: LossKind) -> None:
    torch.manual_seed(2)
    given = {"x": torch.randn(3, 3), "labels": torch.randn(3)}
    assert loss_form(OfValues(reduction), given) == LossForm(kind)


def test_a_single_label_is_enough() -> None:
    """A call with one sample and one class: a loss that ignores one of two equal samples is a mean over labels."""

    class Classes(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return SimpleNamespace(loss=nn.functional.cross_entropy(x * torch.arange(1, len(x) + 1)[:, None], labels))

    assert loss_form(Classes(), {"x": torch.randn(1, 4), "labels": torch.tensor([2])}).count is count_all


def test_a_model_that_raises_is_unknown_and_one_without_a_loss_has_none() -> None:
    class Raising(nn.Module):
        def forward(self, labels: Tensor) -> Any:
            raise RuntimeError("not with these labels")

    class Silent(nn.Module):
        def forward(self, labels: Tensor) -> Any:
            return SimpleNamespace(loss=None)

    form = loss_form(Raising(), {"labels": LABELS})
    assert form.kind is LossKind.UNKNOWN
    assert "RuntimeError('not with these labels')" in form.doubt
    assert loss_form(Silent(), {"labels": LABELS}) == LossForm(LossKind.ABSENT)
