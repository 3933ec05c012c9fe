"""Trials find out what the loss of a model is a mean over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: float | None = None, ignore_index: int = IGNORED
    ) -> Any:
        logits = self.head(self.dropout(self.embed(input_ids)))
        others = self.other * logits.square().mean()
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if num_items_in_batch is None or not self.obeys:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index)
        else:
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="sum"
            )
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


@pytest.mark.parametrize("other", [0.0, 0.5])
@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("ignored", [-1, 0, 1, 5])
def test_labels_with_the_number_that_the_call_names_do_not_count(
    ignored: int, shift: bool, obeys: bool, other: float
) -> None:
    if other and not obeys:
        return  # such a loss is no mean over labels
    model = seeded(Language, shift=shift, obeys=obeys, other=other)
    labels = torch.where(ignored == LABELS, 2, LABELS).where(LABELS != IGNORED, ignored)
    form = loss_form(model, {**call(labels), "ignore_index": ignored})
    assert (form.kind, form.takes_count, form.ignored, form.doubt) == (LossKind.MEAN_OVER_LABELS, obeys, ignored, "")
    assert form.count is not None
    assert form.count(labels) == (4 if shift else 6)


@pytest.mark.parametrize("obeys", [True, False])
def test_a_number_that_the_loss_does_not_ignore_is_not_believed(obeys: bool) -> None:
    model = seeded(Language, shift=True, obeys=obeys)
    model.unused = nn.CrossEntropyLoss(ignore_index=0)
    form = loss_form(model, call())
    assert (form.count, form.ignored, form.doubt) == (count_shifted, IGNORED, "")


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("obeys", [True, False])
def test_rounding_does_not_hide_a_mean(dtype: torch.dtype, obeys: bool) -> None:
    """Losses in low precision differ by more than those in float32."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = Language(shift=True, obeys=obeys).to(dtype)
        assert loss_form(model, call()).count is count_shifted, seed


@pytest.mark.parametrize("labels", [LABELS, torch.full_like(LABELS, IGNORED), torch.ones_like(LABELS)])
@pytest.mark.parametrize("obeys", [True, False])
def test_the_labels_of_a_call_are_not_looked_at(labels: Tensor, obeys: bool) -> None:
    """Neither those that are ignored nor those of a single class; nor do outputs that are all alike matter."""
    for has_zeros in (False, True):
        model = seeded(Language, shift=False, obeys=obeys)
        if has_zeros:
            nn.init.zeros_(model.head.weight)
            nn.init.zeros_(model.head.bias)
        assert loss_form(model, call(labels)).count is count_all


class PerRow(nn.Module):
    """A mean over rows of the means over their labels, or another reduction of rows."""

    def __init__(self, reduce: Callable[[Tensor], Tensor], noise: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.reduce, self.noise = reduce, noise

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.embed(input_ids)
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        count = (labels != IGNORED).sum(1).clamp(min=1)
        return {"loss": self.reduce(losses.sum(1) / count) + self.noise * torch.randn(())}


REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], LossKind]] = {
    "mean": (torch.mean, LossKind.MEAN_OVER_ROWS),
    "sum": (torch.sum, LossKind.SUM),
    "maximum": (torch.max, LossKind.UNKNOWN),
    "spread": (lambda losses: losses.std(unbiased=False) + 1, LossKind.UNKNOWN),
}


@pytest.mark.parametrize(("reduce", "kind"), REDUCTIONS.values(), ids=REDUCTIONS)
def test_rows_that_are_not_averaged_over_labels_show_the_kind(
    reduce: Callable[[Tensor], Tensor], kind: LossKind
) -> None:
    torch.manual_seed(2)
    form = loss_form(PerRow(reduce), call())
    assert form.kind is kind
    assert bool(form.doubt) is (kind is LossKind.UNKNOWN)


def test_noise_does_not_hide_a_sum() -> None:
    """Noise other than dropout's stays on in trials."""
    torch.manual_seed(2)
    assert loss_form(PerRow(torch.sum, noise=1e-2), call()) == LossForm(LossKind.SUM)


def test_a_model_that_computes_one_row_from_others_is_in_doubt() -> None:
    class Mixing(Language):
        def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: float | None = None) -> Any:
            loss = super().forward(input_ids, labels, num_items_in_batch).loss
            return SimpleNamespace(loss=loss * (1 + 0.01 * len(input_ids)))

    form = loss_form(seeded(Mixing, shift=True, obeys=False), call())
    assert form.count is count_shifted
    assert "for two rows together" in form.doubt


def test_values_that_show_nothing_are_examined_again() -> None:
    """A loss that is zero at first is examined in three calls, and not for ever."""

    class Hinge(nn.Module):
        calls = 0

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            Hinge.calls += 1
            return {"loss": (x * labels).relu().sum()}

    own = OwnLoss(Hinge(), on_the_host=contextlib.nullcontext)

    def kind_of(sign: float) -> LossKind:
        given = {"x": torch.ones(3), "labels": torch.full((3,), sign)}

        def split(num_microbatch: int) -> Any:
            return split_call((), given, None, num_microbatch=num_microbatch)

        return own.form(given, lambda: TrialRows.of(split(3), split), lambda: None).kind

    assert [kind_of(-1.0), kind_of(1.0)] == [LossKind.MEAN_OVER_ROWS, LossKind.SUM]
    own = OwnLoss(Hinge(), on_the_host=contextlib.nullcontext)
    counts = []
    for _ in range(5):
        kind_of(-1.0)
        counts.append(Hinge.calls)
    assert counts[0] < counts[1] < counts[2] == counts[3] == counts[4]


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
