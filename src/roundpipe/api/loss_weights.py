"""How the losses of a call's microbatches make up the loss of the call.

Used by api.engine, after a call has been cut. What loss_fn returns is weighed by rows, or not at all. The loss that a
model computes itself is weighed by what it is a mean over, which models.counting finds out.

[Note: terms beside the mean over labels]
The loss of a router is a mean over tokens, labelled or not: it is to be weighed by rows, and the rest of the loss by
labels. So the model is told to divide by w * n, where w is the microbatch's share of the rows and n the number of
labels in the call; its loss S / (w * n) + A is then weighed by w, which makes S / n + w * A.
A count from the user, of several calls, is u: the loss of the call is weighed by n / u.

What the loss of a model is the mean over, found by running the model on a few labels instead of knowing it.

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
import inspect
import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe.config import LossReduction, ResolvedRunConfig
from roundpipe.errors import ConfigError, ModelSplitError
from roundpipe.microbatch import Arriving, MicrobatchInputs
from roundpipe.microbatch.loss_shares import LossShares, Shares
from roundpipe.split.calibrate import fresh, private_copy
from roundpipe.split.determinism import OUT_OF_MEMORY, WithoutDropout
from roundpipe.split.layers import KEEPS_LOGITS
from roundpipe.split.plan import signature
from roundpipe.split.splitter import cut_down
from roundpipe.split.transformers import is_pretrained, with_torch_alone

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


def outputs_alone(outputs: Any, labels: Any) -> Any:
    """The loss_fn of a call that has none: the model returns losses, or an output with a `loss` in it."""
    return outputs


class OwnLoss:
    """What is known of the loss that one model computes itself, by the form of the call."""

    def __init__(self, model: nn.Module, on_the_host: Callable[[], AbstractContextManager[None]] | None = None) -> None:
        """`on_the_host`: inside it the model can run on the host."""
        self._model = model
        self._on_the_host = on_the_host or (lambda: with_torch_alone(model))
        self._parts = [module for module in model.modules() if is_pretrained(module)]
        self._forms: dict[Hashable, LossForm] = {}
        self._loss_functions: list[Any] = []  # those the forms were found with
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(model.forward).parameters
        self._parameters = [name for name, parameter in parameters.items() if parameter.kind is by_position]

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a microbatch by their names. Waits for them if there are labels among them."""
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        has_labels = given.get("labels") is not None
        return {name: _unwrapped(value, wait=has_labels) for name, value in given.items() if name != KEEPS_LOGITS}

    def place(self, kwargs: Mapping[str, Any]) -> str | int:
        """Where the loss is in the output."""
        asked = kwargs.get("return_dict")
        returns_dict = getattr(getattr(self._model, "config", None), "return_dict", True) if asked is None else asked
        return 0 if returns_dict is False and kwargs.get("labels") is not None else "loss"

    def form(self, kwargs: Mapping[str, Any], come_to_rest: Callable[[], None]) -> LossForm:
        """What the loss is in calls like this one; `come_to_rest` is called before the model has to run for it."""
        if kwargs.get("labels") is None:
            return BY_ROWS
        given = {name: value for name, value in kwargs.items() if name != NUM_ITEMS}
        with torch.no_grad():
            key = signature((), given, self._model.training)
        self._forget_if_replaced()
        if key not in self._forms:
            come_to_rest()
            try:
                with self._on_the_host():
                    self._forms[key] = loss_form(self._model, cut_down(given) or given)
            except ModelSplitError:  # it cannot run on the host
                self._forms[key] = BY_ROWS
        return self._forms[key]

    def _forget_if_replaced(self) -> None:
        """A user may give the model another loss function at any time."""
        present = [getattr(module, "_loss_function", None) for module in self._parts]
        if any(map(operator.is_not, present, self._loss_functions)) or len(present) != len(self._loss_functions):
            self._forms, self._loss_functions = {}, present


def weighed(
    batches: MicrobatchInputs,
    config: ResolvedRunConfig,
    own_loss: OwnLoss | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    come_to_rest: Callable[[], None],
) -> MicrobatchInputs:
    """The microbatches of a call with the shares of their losses. `loss_fn`: None in a call of forward()."""
    has_loss_fn = loss_fn is not None and loss_fn is not outputs_alone
    covers_own = config.whole_batch_loss is True or (config.whole_batch_loss is None and not has_loss_fn)
    rows = _shares_of_rows(batches)
    added = (1.0,) * len(batches)
    shares = LossShares(rows=rows, covers_own=covers_own, merged=None if has_loss_fn and not covers_own else added)
    if config.loss_reduction is LossReduction.MEAN and len(batches) > 1:
        if has_loss_fn and covers_own:
            raise ConfigError(
                'loss_reduction="mean" with whole_batch_loss=True would weigh a loss twice that loss_fn takes from the '
                "model's output; leave one of them out."
            )
        if rows is None and not (covers_own and loss_fn is None):
            raise ConfigError(
                'loss_reduction="mean" weighs each microbatch by its rows, and how many each has cannot be told from '
                "how this call was cut: neither its labels nor its inputs are tensors of one size along the dimension "
                'that was cut. Use loss_reduction="sum" and weigh the losses in loss_fn.'
            )
        shares = dataclasses.replace(shares, returned=rows, merged=added if covers_own else rows)
    if own_loss is not None:
        named = [own_loss.named(args, kwargs) for args, kwargs in zip(batches.args, batches.kwargs, strict=True)]
        shares = dataclasses.replace(shares, place=own_loss.place(named[0]))
        if covers_own:
            return _with_own_shares(batches, shares, named, own_loss, come_to_rest)
    elif covers_own and len(batches) > 1:
        shares = dataclasses.replace(shares, own=rows or (None,) * len(batches))
    return dataclasses.replace(batches, shares=shares)


def _with_own_shares(
    batches: MicrobatchInputs,
    shares: LossShares,
    named: Sequence[Mapping[str, Any]],
    own_loss: OwnLoss,
    come_to_rest: Callable[[], None],
) -> MicrobatchInputs:
    """`named`: the arguments of each microbatch by name."""
    given = named[0].get(NUM_ITEMS)
    if len(batches) == 1 and given is None:
        return dataclasses.replace(batches, shares=shares)
    form = own_loss.form(named[0], come_to_rest)
    own: tuple[float | None, ...] | None = None
    match form.kind:
        case LossKind.MEAN_OVER_LABELS if form.takes_count and not form.has_other_terms and given is not None:
            pass  # the model divides by it
        case LossKind.MEAN_OVER_LABELS if form.has_other_terms and shares.rows is not None:
            batches, own = _beside_other_terms(batches, form, named, shares.rows)
        case LossKind.MEAN_OVER_LABELS:
            counts = _counts(form, named)
            divisor = sum(counts) if given is None else float(given)
            own = tuple(count / divisor if divisor else 1.0 for count in counts)  # over no label: NaN, as in plain
            if form.takes_count and given is not None:
                batches = batches.with_kwargs({NUM_ITEMS: None})
        case LossKind.MEAN_OVER_ROWS:
            factor = 1.0 if given is None else _num_entries(named, batches) / float(given)
            own = (None,) * len(batches) if shares.rows is None else tuple(row * factor for row in shares.rows)
        case LossKind.SUM:
            pass
    return dataclasses.replace(batches, shares=dataclasses.replace(shares, own=own))


def _beside_other_terms(
    batches: MicrobatchInputs, form: LossForm, named: Sequence[Mapping[str, Any]], rows: Shares
) -> tuple[MicrobatchInputs, Shares]:
    """See [Note: terms beside the mean over labels]."""
    total, given = sum(_counts(form, named)), named[0].get(NUM_ITEMS)
    factor = 1.0 if given is None else total / float(given)
    divisors = [total * row for row in rows]
    return batches.with_each_kwargs([{NUM_ITEMS: divisor} for divisor in divisors]), tuple(row * factor for row in rows)


def _counts(form: LossForm, named: Sequence[Mapping[str, Any]]) -> list[int]:
    """The labels that count in each microbatch."""
    assert form.count is not None
    return [form.count(kwargs[form.labels]) for kwargs in named]


def _num_entries(named: Sequence[Mapping[str, Any]], batches: MicrobatchInputs) -> int:
    """What `num_items_in_batch` is compared with where the loss does not show what it counts."""
    labels = [kwargs.get("labels") for kwargs in named]
    tensors = [label for label in labels if isinstance(label, torch.Tensor)]
    return sum(map(count_all, tensors)) if tensors else sum(batches.rows or (1,))


def _shares_of_rows(batches: MicrobatchInputs) -> Shares | None:
    if len(batches) == 1:
        return (1.0,)
    if batches.rows is None or not sum(batches.rows):
        return None
    return tuple(rows / sum(batches.rows) for rows in batches.rows)


def _unwrapped(value: Any, *, wait: bool) -> Any:
    if not isinstance(value, Arriving):
        return value
    if wait and value.event is not None:
        value.event.wait()
    return value.value
