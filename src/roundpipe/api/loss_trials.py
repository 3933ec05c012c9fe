"""Finds out by trials how the loss that a model computes itself is formed from the rows and labels of a batch.

Knows neither the weights of microbatches nor devices.

[Note: trials of a loss]
Trials run on the host, on copies of the modules over the same weights, without dropout and gradients. The values of the
first batch must not decide how a whole run is weighed, so labels are made up: all different as far as there are
classes, and none ignored except by the trial itself. A trial that raises counts as "no". If the call, the model's loss
function or a loss module names an `ignore_index`, labels with that number are tried first, then -100.

    loss(labels)                             S / n + A     S: sum over the n labels that count
    loss(labels, num_items_in_batch=1)       S + A         A: terms that are no mean over labels
    loss(labels, num_items_in_batch=2**20)   S / 2**20 + A

These three values show n and A. A loss that ignores `num_items_in_batch` is a mean over labels if its value for labels
p and q together is the mean of its values for p alone and q alone, and another one if all labels are ignored.

Every loss also runs on two rows of the batch, alone and together. If the loss of both is the mean of the two losses, it
is a mean over rows; if it is their sum, it is a sum. If it is neither of these, nor the mean over labels that the first
trials have found, it does not add up: the loss of a batch is not made of the losses of its rows, as in contrastive
losses. The second row has fewer labels, so that a mean over labels is not taken for a mean over rows.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from roundpipe.api.calls import unwrapped
from roundpipe.errors import ModelSplitError, RoundPipeError
from roundpipe.microbatch import MicrobatchInputs
from roundpipe.split.calibrate import PrivateCopy, fresh
from roundpipe.split.determinism import OUT_OF_MEMORY, WithoutDropout, own_generators
from roundpipe.split.layers import KEEPS_LOGITS
from roundpipe.split.plan import signature
from roundpipe.split.splitter import cut_down
from roundpipe.split.transformers import ConfigStates, has_pretrained, is_pretrained, with_torch_alone

logger = logging.getLogger("roundpipe")

CountTargets = Callable[..., int]  # called with labels
NUM_ITEMS = "num_items_in_batch"
_IGNORED = -100  # label of a position that does not count, as in torch's cross_entropy
# Relative differences of losses that count as rounding, by the precision of what is computed.
_ROUNDING = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_NOISE = 0.1  # the same for a model that draws random numbers
_NOTABLE = 1e-3  # smaller terms and differences of a loss are not worth a warning
_CHEAP = 10**11  # weights times tokens of a row: about a second for one forward of two rows on a few cores
_MANY = 2.0**20  # a power of two, so that dividing by it is exact
_MOST_ATTEMPTS = 3  # calls of one form that are examined if the values of a loss show nothing
# The names of labels: in models of transformers, where `shift_labels` are labels that the user has shifted already, and
# in other modules.
_LABELS = ("shift_labels", "labels")
_OTHER_LABELS = ("labels", "label", "targets", "target")
_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # modules that name the label that they ignore
_Kwargs = dict[str, Any]
_Call = tuple[tuple[Any, ...], _Kwargs]


class LossKind(enum.Enum):
    """How the loss of a batch is formed. It decides how the losses of microbatches are weighed."""

    MEAN_OVER_LABELS = "a mean over labels: each microbatch is weighed by its number of labels that count"
    MEAN_OVER_ROWS = "a mean over rows: each microbatch is weighed by its number of rows"
    SUM = "a sum: the losses are added"
    UNKNOWN = "unknown: each microbatch is weighed by its number of rows, with a warning"
    ABSENT = "the model's output has no loss: the output itself is one, or there is none"

    @property
    def weight(self) -> str:
        """What each microbatch is weighed by."""
        return {LossKind.MEAN_OVER_LABELS: "labels", LossKind.SUM: "nothing"}.get(self, "rows")


@dataclasses.dataclass(frozen=True)
class LossForm:
    """The result of the trials of a model's own loss, for one form of call.

    count: counts the labels of a loss that is a mean over labels. `labels`: the argument that holds them.
    takes_count: the model divides the sum by `num_items_in_batch` if that is given.
    has_other_terms: the loss has terms that `num_items_in_batch` does not divide, such as a router's.
    doubt: why the loss of a batch may not be made of those of its rows, for a warning; empty if it is.
    ignored: the label of a position that does not count.
    """

    kind: LossKind
    count: CountTargets | None = None
    takes_count: bool = False
    has_other_terms: bool = False
    labels: str = "labels"
    doubt: str = ""
    ignored: int = _IGNORED


BY_ROWS = LossForm(LossKind.MEAN_OVER_ROWS)
ABSENT = LossForm(LossKind.ABSENT)


class TrialRows(NamedTuple):
    """Two rows of a call, alone and together."""

    first: _Call
    second: _Call
    both: _Call

    @classmethod
    def of(cls, batches: MicrobatchInputs, split: Callable[[int], MicrobatchInputs | None]) -> TrialRows:
        """The first two rows of a call. If they cannot be told, the first microbatch alone and twice.

        split: splits the call into another number of microbatches; returns None if it cannot.
        """
        num_rows = sum(batches.rows or ())
        try:
            alone, pairs = (split(num_rows), split((num_rows + 1) // 2)) if num_rows > 1 else (None, None)
        except RoundPipeError:  # these inputs cannot be split into one microbatch per row, or per two rows
            alone = pairs = None
        if alone and pairs and alone.rows and pairs.rows and alone.rows[:2] == (1, 1) and pairs.rows[0] == 2:
            return cls(_call(alone, 0), _call(alone, 1), _call(pairs, 0))
        one = _call(batches, 0)
        return cls(one, one, tree_map(_twice, one))


def _call(batches: MicrobatchInputs, microbatch: int) -> _Call:
    call: _Call = unwrapped((tuple(batches.args[microbatch]), dict(batches.kwargs[microbatch])), wait=True)[0]
    return call


def _twice(leaf: Any) -> Any:
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf


class OwnLoss:
    """The loss that one model computes itself: its place in the output, and its forms, found when first needed."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module] = (),
        on_the_host: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """`layers`: what runs, one after the other, if that is not `model` itself.

        on_the_host: a context manager inside which the model can run on the host.
        """
        self._model = model
        self._layers = list(layers) or [model]
        self._on_the_host = on_the_host or (lambda: with_torch_alone(model))
        self._parts = [module for module in model.modules() if is_pretrained(module)]
        self._configs = ConfigStates(model)
        # Whether arguments and outputs mean what they mean in models of transformers.
        self.follows_library = on_the_host is not None or has_pretrained(model)
        self._forms: dict[Hashable, LossForm] = {}
        self._attempts: dict[Hashable, int] = {}  # number of examinations that have shown nothing, by form of call
        self._loss_functions: list[Any] = []  # the loss functions of `_parts` when the forms were found
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward = model.forward if self.follows_library else self._layers[0].forward
        parameters: Mapping[str, inspect.Parameter]
        try:
            parameters = inspect.signature(forward).parameters
        except (TypeError, ValueError):  # a forward that is not written in Python has no signature
            parameters = {}
        self._parameters = [name for name, parameter in parameters.items() if parameter.kind is by_position]
        self._batch_norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Kwargs:
        """The arguments of a microbatch by name. Waits until they are filled if there are labels among them."""
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        has_labels = any(given.get(name) is not None for name in (*_LABELS, *_OTHER_LABELS))
        return {n: unwrapped(value, wait=has_labels)[0] for n, value in given.items() if n != KEEPS_LOGITS}

    def label_name(self, kwargs: Mapping[str, Any]) -> str | None:
        """The name of the labels among the arguments of a call; None if there are none that can be counted."""
        if self.follows_library and kwargs.get("labels") is None:
            return None
        names = _LABELS if self.follows_library else _OTHER_LABELS
        name = next((name for name in names if kwargs.get(name) is not None), None)
        return name if name is not None and _is_countable(kwargs[name]) else None

    def place(self, kwargs: Mapping[str, Any]) -> str | int:
        """The key or index of the loss in the model's output."""
        asked = kwargs.get("return_dict")
        returns_dict = getattr(getattr(self._model, "config", None), "return_dict", True) if asked is None else asked
        return 0 if returns_dict is False and self.follows_library else "loss"

    def mixes_rows(self) -> bool:
        """Whether the output for one row depends on other rows, because a module normalises over the batch."""
        return any(norm.training or norm.running_mean is None for norm in self._batch_norms)

    def form(self, kwargs: Mapping[str, Any], rows: Callable[[], TrialRows], wait: Callable[[], None]) -> LossForm:
        """The form of the loss in calls like this one.

        kwargs: the arguments of the first microbatch by name. `rows`: makes two rows of the call.
        wait: waits until no call and no step runs. Called before trials run the model on the host.
        """
        given = {name: value for name, value in kwargs.items() if name != NUM_ITEMS}
        with torch.no_grad():
            call = signature((), given if self.follows_library else kwargs, self._model.training)
        key = (call, self._configs.number())
        self._forget_if_replaced()
        if key not in self._forms:
            wait()
            form = self._examined(given, rows)
            if form is None:
                self._attempts[key] = self._attempts.get(key, 0) + 1
                if self._attempts[key] < _MOST_ATTEMPTS:
                    return BY_ROWS
            self._forms[key] = form or BY_ROWS
        return self._forms[key]

    def _examined(self, given: _Kwargs, rows: Callable[[], TrialRows]) -> LossForm | None:
        """The form that trials show; None if the values of the loss show nothing."""
        # Some models need many tokens to run, or to show that rows influence each other.
        ways: list[Callable[[_Kwargs], _Kwargs | None]] = (
            [_as_it_is] if self._is_cheap(given) else [cut_down, _as_it_is]
        )
        form: LossForm | None = None
        try:
            with self._configs.restored(), self._on_the_host():
                for shorten in ways if self.follows_library else ways[-1:]:
                    trial = _Trial(self._layers, self.place(given), self._model)  # a failed trial may have changed it
                    form = self._form_on(trial, given, rows, shorten)
                    if trial.error is None:
                        break
        except ModelSplitError as error:
            form = LossForm(LossKind.UNKNOWN, doubt=f"the model cannot run on the host ({error})")
        return form

    def _is_cheap(self, given: _Kwargs) -> bool:
        """Whether trials on all tokens of two rows take at most a few seconds on the host."""
        num_weights = sum(param.numel() for param in self._model.parameters())
        sizes = [value[:1].numel() for value in given.values() if isinstance(value, Tensor) and value.dim() > 1]
        return num_weights * max(sizes, default=1) <= _CHEAP

    def _form_on(
        self, trial: _Trial, given: _Kwargs, rows: Callable[[], TrialRows], shorten: Callable[[_Kwargs], _Kwargs | None]
    ) -> LossForm | None:
        """The form that trials show. `shorten`: returns arguments with fewer tokens, or None."""
        name = self.label_name(given)
        form = None
        for ignored in self._ignored_labels(given):
            if name is not None and form is None:
                form = _form_by_labels(trial, shorten(given) or given, name, ignored)
        calls = []
        for args, kwargs in rows():
            named = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
            without = (KEEPS_LOGITS, NUM_ITEMS) if self.follows_library else (KEEPS_LOGITS,)
            named = {name: value for name, value in named.items() if name not in without}
            calls.append((args[len(self._parameters) :], shorten(named) or named))
        pair = _with_classes(TrialRows(*calls), name)
        ignored = _IGNORED if form is None else form.ignored
        ragged = _made_ragged(pair, name, ignored, with_masks=not self.follows_library)
        return _form_by_rows(trial, pair, ragged, form)

    def _ignored_labels(self, given: _Kwargs) -> list[int]:
        """The labels that may mean that a position does not count, those that the model or the call names first."""
        functions = [getattr(module, "_loss_function", None) for module in self._parts]
        named = [given, *(each.keywords for each in functions if isinstance(each, functools.partial))]
        named += [vars(module) for module in self._model.modules() if isinstance(module, _LOSSES)]
        values = [values.get("ignore_index") for values in named]
        return list(dict.fromkeys([*(value for value in values if isinstance(value, int)), _IGNORED]))

    def _forget_if_replaced(self) -> None:
        """Forget the forms if the user has given the model another loss function."""
        present = [getattr(module, "_loss_function", None) for module in self._parts]
        if any(map(operator.is_not, present, self._loss_functions)) or len(present) != len(self._loss_functions):
            self._forms, self._attempts, self._loss_functions = {}, {}, present


def _as_it_is(kwargs: _Kwargs) -> None:
    return None


def count_all(labels: Tensor, ignored: int = _IGNORED) -> int:
    """The number of labels that are not ignored."""
    return int((labels != ignored).sum())


def count_shifted(labels: Tensor, ignored: int = _IGNORED) -> int:
    """The number of labels that are not ignored, without the first of each row, which no position predicts."""
    return int((labels[..., 1:] != ignored).sum())


class _NoLoss(Exception):
    """The model returned no loss."""


class _Chain(nn.ModuleList):
    """Runs modules one after the other. The first gets the arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        value = first(*args, **kwargs)
        for layer in others:
            value = layer(value)
        return value


class _Trial:
    """Runs a private copy of a model, or of its layers, on small calls."""

    def __init__(self, layers: Sequence[nn.Module], place: str | int, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._copy = PrivateCopy(_Chain(layers))
        self._place = place
        self.makes_decoder_inputs = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.error: Exception | None = None  # of the last trial, if it has raised
        # Losses of one shape differ by the rounding of the loss, losses of different rows by that of all weights.
        self.rounding = _ROUNDING[torch.float32]
        self.rounding_of_rows = max((_ROUNDING.get(param.dtype, 0.0) for param in model.parameters()), default=0.0)

    def output(self, args: tuple[Any, ...], kwargs: _Kwargs, seed: int = 0) -> Any:
        """What the model returns for a call."""
        with torch.no_grad(), torch.random.fork_rng(devices=()), WithoutDropout():
            torch.default_generator.manual_seed(seed)  # losses are compared, so all runs need the same random numbers
            with own_generators():
                return self._copy.run(*fresh((args, kwargs)))

    def loss(self, kwargs: _Kwargs, args: tuple[Any, ...] = (), seed: int = 0) -> float:
        """The loss of a call."""
        loss = self.loss_in(self.output(args, kwargs, seed))
        if loss is None:
            raise _NoLoss
        self.rounding = _ROUNDING.get(loss.dtype, self.rounding)
        self.rounding_of_rows = max(self.rounding, self.rounding_of_rows)
        return float(loss)

    def loss_in(self, output: Any) -> Tensor | None:
        """The loss in an output, if there is one."""
        if isinstance(output, tuple) and isinstance(self._place, int):
            loss = output[self._place] if output else None
        else:
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        return loss if is_loss else None

    def tried(self, find: Callable[[], LossForm | None]) -> LossForm | None:
        """Return `find()`, or None if it raises; `error` is then the exception."""
        self.error = None
        try:
            return find()
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # a model may raise anything for arguments that it does not expect
            logger.debug("%s: a trial of its loss failed: %r", self._name, error)
            self.error = error
            return None


def _are_close(left: float, right: float, relative: float) -> bool:
    both_are_numbers = math.isfinite(left) and math.isfinite(right)
    return both_are_numbers and abs(left - right) <= relative * max(abs(left), abs(right))


# Losses over labels.


def _form_by_labels(trial: _Trial, kwargs: _Kwargs, name: str, ignored: int) -> LossForm | None:
    """The form of a loss that is a mean over labels; None for other losses.

    name: the argument with the labels. `ignored`: the label of a position that does not count.
    """
    kwargs = {**kwargs, name: _made_up(trial, kwargs, name, ignored)}
    for find in (_divided_by_count, _mean_over_labels):
        form = trial.tried(lambda find=find: find(trial, kwargs, name, ignored))  # type: ignore[misc]
        if form is not None and ignored == _IGNORED:
            return form
        if form is not None and form.count is not None:
            return dataclasses.replace(form, count=functools.partial(form.count, ignored=ignored), ignored=ignored)
    return None


def _is_countable(labels: Any) -> bool:
    is_filled = isinstance(labels, Tensor) and labels.dim() > 0 and labels.numel() > 0
    return is_filled and not (labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool)


def _made_up(trial: _Trial, kwargs: _Kwargs, name: str, ignored: int) -> Tensor:
    """Labels like those of a call, all different as far as there are classes.

    The classes are the last dimension of the logits, if logits have one entry per label and class. Otherwise the labels
    are 0 and 1.
    """
    labels: Tensor = kwargs[name]
    sizes: list[int] = []

    def look() -> None:
        output = trial.output((), {**kwargs, name: _numbered(labels, 2, ignored)})
        logits = output.get("logits") if isinstance(output, Mapping) else None
        if isinstance(logits, Tensor) and logits.dim() == labels.dim() + 1 and logits.shape[-1] > 1:
            sizes.append(logits.shape[-1])

    trial.tried(look)
    return _numbered(labels, sizes[0] if sizes else 2, ignored)


def _numbered(labels: Tensor, num_classes: int, ignored: int = _IGNORED) -> Tensor:
    # Tokens with a special meaning are among the first and the last ones.
    start = num_classes // 2 if num_classes >= 2 * labels.numel() else 0
    numbers = (start + torch.arange(labels.numel(), device=labels.device)) % num_classes
    numbers[numbers == ignored] = (ignored + 1) % num_classes
    return numbers.view(labels.shape).to(labels.dtype)


def _divided_by_count(trial: _Trial, kwargs: _Kwargs, name: str, ignored: int) -> LossForm | None:
    """The form of a loss that divides by `num_items_in_batch`; None if it does not."""
    total, part = (trial.loss({**kwargs, NUM_ITEMS: count}) for count in (1, int(_MANY)))
    if not math.isfinite(total) or _are_close(total, part, _NOTABLE):
        return None
    others = (part - total / _MANY) / (1 - 1 / _MANY)
    has_other_terms = abs(others) > _NOTABLE * abs(part)
    try:
        mean = trial.loss(kwargs)
    except OUT_OF_MEMORY:
        raise
    except Exception:  # the model needs the count, so every call gives it, and no rule is needed
        return LossForm(LossKind.MEAN_OVER_LABELS, count_all, True, has_other_terms, name)
    for rule in (count_shifted, count_all):
        count = rule(kwargs[name])
        if ignored != _IGNORED and not _is_ignored(trial, kwargs, name, ignored, rule, others):
            continue
        if count > 1 and _are_close(total - others, (mean - others) * count, max(trial.rounding, _NOTABLE)):
            return LossForm(LossKind.MEAN_OVER_LABELS, rule, True, has_other_terms, name)
    return None


def _is_ignored(trial: _Trial, kwargs: _Kwargs, name: str, ignored: int, rule: CountTargets, others: float) -> bool:
    """Whether a loss that divides by `num_items_in_batch` is a mean over the labels that are not `ignored`.

    others: the terms that it does not divide.
    """
    half = kwargs[name].clone()
    half.view(-1)[::2] = ignored
    total, mean = (trial.loss({**kwargs, name: half, **count}) for count in ({NUM_ITEMS: 1}, {}))
    return _are_close(total - others, (mean - others) * rule(half, ignored), max(trial.rounding, _NOTABLE))


def _mean_over_labels(trial: _Trial, kwargs: _Kwargs, name: str, ignored: int) -> LossForm | None:
    """The form of a loss that is a mean over the labels that are not ignored; None if the loss is no such mean."""
    if kwargs[name].numel() < 2:  # two labels are compared, so a single sample with one label is doubled
        kwargs = {argument: _twice(value) for argument, value in kwargs.items()}
        kwargs[name] = _numbered(kwargs[name], 3 if ignored in (0, 1) else 2, ignored)
    labels: Tensor = kwargs[name]
    if trial.makes_decoder_inputs and not {"decoder_input_ids", "decoder_inputs_embeds"} & kwargs.keys():
        kwargs = {**kwargs, "decoder_input_ids": labels.clone()}  # else made of the labels, which vary here
    for rule, (p, q) in _telling_pairs(labels):
        one, other, both, none = (
            trial.loss({**kwargs, name: _only(labels, positions, ignored)}) for positions in ([p], [q], [p, q], [])
        )
        is_mean = _are_close(2 * both, one + other, trial.rounding) and one + other != 0
        # If all four are equal, the loss does not depend on labels. If no label counts, a mean over labels is NaN.
        if is_mean and not (_are_close(one, other, 1e-6) and _are_close(one, none, 1e-6)):
            return LossForm(LossKind.MEAN_OVER_LABELS, rule, labels=name)
    return None


def _telling_pairs(labels: Tensor) -> Iterator[tuple[CountTargets, tuple[int, int]]]:
    """Yield each counting rule with two positions in the flat labels that the rule counts.

    The positions tell the rules apart: only `count_all` counts the first label of a row. If there are two rows, the
    positions are in different rows: a mean over rows of means over their labels is no mean over all labels.
    """
    next_row = labels[0].numel() if labels.dim() > 1 and len(labels) > 1 else 0
    yield count_all, (0, next_row + 1) if labels.dim() == 1 or labels[0].numel() > 1 else (0, next_row)
    if labels.dim() > 1 and labels.shape[-1] > 2:
        yield count_shifted, (1, next_row + 2)


def _only(labels: Tensor, positions: list[int], ignored: int) -> Tensor:
    """The labels with all but those at the given flat positions ignored."""
    only = torch.full_like(labels, ignored)
    only.view(-1)[positions] = labels.reshape(-1)[positions]
    return only


# Losses over rows.


def _form_by_rows(
    trial: _Trial, rows: TrialRows, ragged: TrialRows | None, by_labels: LossForm | None
) -> LossForm | None:
    """The form that two rows show, alone and together; None if the values show nothing.

    ragged: the rows with fewer labels in the second one, if that is possible.
    by_labels: the form that trials of labels have found, if any. It stays, possibly with a doubt.
    """
    if by_labels is not None and by_labels.has_other_terms:
        return by_labels  # a router's loss never adds up exactly
    form: LossForm | None = None
    if ragged is not None:
        form = trial.tried(lambda: _compared(trial, ragged, by_labels, is_ragged=True))
    if form is None:  # a model that cannot ignore labels gets them as they are
        form = trial.tried(lambda: _compared(trial, rows, by_labels, is_ragged=False))
    if form is None and by_labels is None and trial.error is not None:
        doubt = f"running the model on two rows on the host, to find out, raised {trial.error!r}"
        form = LossForm(LossKind.UNKNOWN, doubt=doubt)
    return form or by_labels


def _compared(trial: _Trial, rows: TrialRows, by_labels: LossForm | None, *, is_ragged: bool) -> LossForm | None:
    try:
        together, again = (trial.loss(rows.both[1], rows.both[0], seed) for seed in (0, 1))
    except _NoLoss:
        return ABSENT
    one, other = (trial.loss(kwargs, args) for args, kwargs in rows[:2])
    if not (math.isfinite(together) and any((one, other, together))):
        return None
    rounding = trial.rounding_of_rows if together == again else _NOISE
    mean = (one + other) / 2
    doubt = f"it is {together:.6g} for two rows together, {one:.6g} for the first and {other:.6g} for the second alone"
    if by_labels is not None:
        counts = [0 if by_labels.count is None else by_labels.count(call[1][by_labels.labels]) for call in rows[:2]]
        parts = [count * loss for count, loss in zip(counts, (one, other), strict=True) if count]
        weighed = sum(parts) / sum(counts) if parts else together
        # Closer than elsewhere: a count that is wrong by one label changes the loss only a little.
        if _are_close(together, weighed, rounding / 4):
            return by_labels
        is_another = any(_are_close(together, other_sum, rounding) for other_sum in (mean, one + other))
        if _are_close(together, weighed, rounding) or not is_another:
            return dataclasses.replace(by_labels, doubt=doubt)
    if _are_close(together, mean, rounding):
        # The second row has half as many labels, so a mean over labels differs from a mean over rows.
        distances = abs(together - (2 * one + other) / 3), abs(together - mean)
        is_over_labels = is_ragged and distances[0] <= distances[1] + rounding * abs(mean)
        return LossForm(LossKind.UNKNOWN, doubt=doubt) if is_over_labels else BY_ROWS
    if _are_close(together, one + other, rounding):
        return LossForm(LossKind.SUM)
    return LossForm(LossKind.UNKNOWN, doubt=doubt)


def _with_classes(rows: TrialRows, labels: str | None) -> TrialRows:
    """The rows with other labels if each row has one: the classes 0 and 1, none of which is ignored.

    labels: the name of the labels, if there are any.
    """
    given = None if labels is None else rows.first[1].get(labels)
    if labels is None or not isinstance(given, Tensor) or given.dim() != 1:
        return rows
    first = _numbered(given, 2)
    classes = (first, 1 - first, torch.cat([first, 1 - first]))
    pairs = zip(rows, classes, strict=True)
    return TrialRows(*((args, {**kwargs, labels: own}) for (args, kwargs), own in pairs))


def _made_ragged(rows: TrialRows, labels: str | None, ignored: int, *, with_masks: bool) -> TrialRows | None:
    """The rows with only half as much in the second one; None if nothing shows how much there is.

    labels: the name of the labels. They are made up, and half of those of the second row are ignored.
    with_masks: masks are all 1, and half of those of the second row are 0.
    """
    changes: list[_Kwargs] = [{}, {}, {}]
    for name, value in rows.second[1].items():
        is_row = isinstance(value, Tensor) and value.dim() >= 2 and len(value) == 1 and value.shape[1] > 1
        if not is_row or not (name == labels or (with_masks and "mask" in name and _is_mask(value))):
            continue
        full = _numbered(value, 2, ignored) if name == labels else torch.ones_like(value)
        half = full.clone()
        half[:, (half.shape[1] + 1) // 2 :] = ignored if name == labels else 0
        for change, own in zip(changes, (full, half, torch.cat([full, half])), strict=True):
            change[name] = own
    calls = ((args, {**kwargs, **change}) for (args, kwargs), change in zip(rows, changes, strict=True))
    return TrialRows(*calls) if changes[0] else None


def _is_mask(value: Tensor) -> bool:
    return value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())
