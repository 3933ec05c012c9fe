"""What the loss of a model is the mean over, found by running the model on a few labels instead of knowing it.

Used by api to weigh the losses of microbatches so that they add up to the loss of the whole call. The trials run on
the host, on copies of the modules over the same weights, without dropout and without gradients. A trial that raises
counts as "no": the loss is then weighed by rows.

    mean = loss(labels)                      S / n + A     S: sum over the n counted labels
    loss(labels, num_items_in_batch=1)       S + A         A: terms that are no mean over labels, as a router's
    loss(labels, num_items_in_batch=2**20)   S / 2**20 + A

These three show n and A. A loss that does not follow `num_items_in_batch` shows that it is a mean over labels by its
values for label p alone, q alone, and both: the last is the mean of the others.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe.models.calibration import fresh, private_copy
from roundpipe.models.trial import OUT_OF_MEMORY
from roundpipe.models.without_dropout import WithoutDropout

logger = logging.getLogger("roundpipe")

CountTargets = Callable[[Tensor], int]
NUM_ITEMS = "num_items_in_batch"
_IGNORED = -100
_CLOSE = 1e-3
_MANY = 2.0**20  # a power of two: dividing by it rounds nothing
_Kwargs = dict[str, Any]


class LossKind(enum.Enum):
    """How the losses of microbatches make up the loss of the whole."""

    MEAN_OVER_LABELS = "each weighs as much as it has labels that count"
    MEAN_OVER_ROWS = "each weighs as much as it has rows; also where nothing else is known"
    SUM = "they are added"


@dataclasses.dataclass(frozen=True)
class LossForm:
    """What is known of a model's own loss in calls of one form.

    count: how many labels count, of a loss that is a mean over labels; `labels`: the argument that they are in.
    takes_count: it divides by `num_items_in_batch` where that is given.
    has_other_terms: it has terms that `num_items_in_batch` does not divide, such as the loss of a router.
    """

    kind: LossKind
    count: CountTargets | None = None
    takes_count: bool = False
    has_other_terms: bool = False
    labels: str = "labels"


BY_ROWS = LossForm(LossKind.MEAN_OVER_ROWS)


def count_all(labels: Tensor) -> int:
    return int((labels != _IGNORED).sum())


def count_shifted(labels: Tensor) -> int:
    """Each position predicts the label of the next one: the first of a row is predicted by none."""
    return int((labels[..., 1:] != _IGNORED).sum())


def loss_form(model: nn.Module, kwargs: Mapping[str, Any]) -> LossForm:
    """The form of the loss that `model` computes in calls like this one. `kwargs`: a small call with `labels`."""
    trial = _Trial(model, kwargs)
    if trial.has_countable_labels:
        for find in (_divided_by_count, _mean_over_labels):
            if (form := trial.tried(find)) is not None:
                return form
    return trial.tried(_added_over_rows) or BY_ROWS


class _Trial:
    """Runs a private copy of a model on one small call with other labels."""

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        self._model_name = type(model).__name__
        self._copy, _ = private_copy(model)
        self.kwargs = {name: value for name, value in kwargs.items() if name != NUM_ITEMS}
        self.name = "labels" if kwargs.get("shift_labels") is None else "shift_labels"  # shifted by the user
        labels = kwargs[self.name]
        self.has_countable_labels = (
            isinstance(labels, Tensor) and labels.dim() > 0 and labels.numel() > 0 and not labels.is_floating_point()
        )
        if self.has_countable_labels:
            self.kwargs[self.name] = labels.clamp(min=0)  # where none is ignored, the rules count differently
        config = getattr(model, "config", None)
        self.makes_decoder_inputs = bool(getattr(config, "is_encoder_decoder", False))

    @property
    def labels(self) -> Tensor:
        labels: Tensor = self.kwargs[self.name]
        return labels

    def loss(self, **changes: Any) -> float:
        with torch.no_grad(), torch.random.fork_rng(devices=()), WithoutDropout():
            torch.manual_seed(0)  # the runs of a trial are compared
            output = self._copy(**fresh({**self.kwargs, **changes}))
        return float(output[0] if isinstance(output, tuple) else output.loss)

    def tried(self, find: Callable[[_Trial], LossForm | None]) -> LossForm | None:
        try:
            return find(self)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # whatever a model raises for inputs that are not its own
            logger.debug("%s: the trial %s of its loss failed: %r", self._model_name, find.__name__, error)
            return None


def _divided_by_count(trial: _Trial) -> LossForm | None:
    """The form of a loss that follows `num_items_in_batch`."""
    mean, total, part = trial.loss(), trial.loss(**{NUM_ITEMS: 1}), trial.loss(**{NUM_ITEMS: int(_MANY)})
    if not math.isfinite(total) or _is_close(total, part):
        return None  # it does not follow the count
    others = (part - total / _MANY) / (1 - 1 / _MANY)
    for rule in (count_shifted, count_all):
        count = rule(trial.labels)
        if count > 1 and _is_close(total - others, (mean - others) * count):
            has_other_terms = abs(others) > _CLOSE * abs(part)
            return LossForm(LossKind.MEAN_OVER_LABELS, rule, True, has_other_terms, trial.name)
    return None


def _mean_over_labels(trial: _Trial) -> LossForm | None:
    """The form of a loss that is a mean over the labels that are not ignored."""
    labels = trial.labels
    options: _Kwargs = {}
    if labels.numel() < 2:  # one sample with one label: two of them tell
        options = _doubled(trial.kwargs)
        labels = options[trial.name]
    if trial.makes_decoder_inputs and not {"decoder_input_ids", "decoder_inputs_embeds"} & trial.kwargs.keys():
        options["decoder_input_ids"] = labels.clone()  # else made of the labels, which change
    for rule, (p, q) in _telling_pairs(labels):
        one, other, both = (
            trial.loss(**{**options, trial.name: _only(labels, positions)}) for positions in ([p], [q], [p, q])
        )
        is_mean = _is_close(2 * both, one + other) and one + other != 0
        if is_mean and not _is_close(one, other, 1e-6):  # else it may depend on no label at all
            return LossForm(LossKind.MEAN_OVER_LABELS, rule, labels=trial.name)
    return None


def _telling_pairs(labels: Tensor) -> Iterator[tuple[CountTargets, tuple[int, int]]]:
    """By rule: two positions in the flat labels. With the first rule one of them is the first of a row."""
    yield count_all, (0, 1)
    if labels.dim() > 1 and labels.shape[-1] > 2:
        yield count_shifted, (1, 2)


def _only(labels: Tensor, positions: list[int]) -> Tensor:
    """The labels at these positions of the flat tensor; all others are ignored."""
    only = torch.full_like(labels, _IGNORED)
    only.view(-1)[positions] = labels.reshape(-1)[positions]
    return only


def _added_over_rows(trial: _Trial) -> LossForm | None:
    """The form of a loss that is twice as large for twice as many samples."""
    once, twice = trial.loss(), trial.loss(**_doubled(trial.kwargs))
    return LossForm(LossKind.SUM) if once != 0 and _is_close(twice, 2 * once) else None


def _doubled(kwargs: Mapping[str, Any]) -> _Kwargs:
    """The tensors of a call, each sample twice."""
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.dim() > 0}
    return {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items()}


def _is_close(left: float, right: float, relative: float = _CLOSE) -> bool:
    both_are_numbers = math.isfinite(left) and math.isfinite(right)
    return both_are_numbers and abs(left - right) <= relative * max(abs(left), abs(right))
