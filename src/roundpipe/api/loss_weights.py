"""Weighs the losses of a call's microbatches so that they add up to the loss of the whole batch.

Results of loss_fn are weighed by rows, or not at all. The loss that a model computes itself is weighed by rows if it is
a mean over rows, and by labels if it is a mean over the labels that count (those that are not ignored). Trials that run
the model on a few labels find out which. Knows no device and no schedule.

[Note: terms beside the mean over labels]
The loss of a model with routers is S / n + A: S is a sum over the n labels of the call, and A, the router's loss, is a
mean over all tokens. A must be weighed by rows and S / n by labels. So the model is told to divide by w * n, where w is
the microbatch's share of the rows. Its loss S / (w * n) + A, weighed by w, is S / n + w * A. If the user gives a count
u for several calls, the loss of the call is weighed by n / u as well.

[Note: trials of a loss]
Trials run on the host, on copies of the modules over the same weights, without dropout and gradients. A trial that
raises counts as "no"; a loss that no trial recognises is weighed by rows.

    loss(labels)                             S / n + A     S: sum over the n labels that count
    loss(labels, num_items_in_batch=1)       S + A         A: terms that are no mean over labels
    loss(labels, num_items_in_batch=2**20)   S / 2**20 + A

These three values show n and A. A loss that ignores `num_items_in_batch` is a mean over labels if its value for labels
p and q together is the mean of its values for p alone and q alone.

[Note: the batch of all machines]
With a process group, a call is one part of the batch. The machines exchange their counts before they weigh, and their
losses afterwards, so that shares, random streams and losses are those of the whole batch.
"""

from __future__ import annotations

import builtins
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

from roundpipe.api.calls import Request, unwrapped
from roundpipe.config import LossReduction, ResolvedRunConfig
from roundpipe.distributed.machines import Machines
from roundpipe.distributed.settings import Settings
from roundpipe.errors import ConfigError, ModelSplitError
from roundpipe.microbatch import MicrobatchInputs
from roundpipe.microbatch.merge import losses_in, with_losses
from roundpipe.microbatch.split import LossShares, Shares
from roundpipe.runtime.rng import draw_call_seed
from roundpipe.runtime.run import Run
from roundpipe.split.calibrate import PrivateCopy, fresh
from roundpipe.split.determinism import OUT_OF_MEMORY, WithoutDropout
from roundpipe.split.layers import KEEPS_LOGITS
from roundpipe.split.plan import signature
from roundpipe.split.splitter import cut_down
from roundpipe.split.transformers import is_pretrained, with_torch_alone

logger = logging.getLogger("roundpipe")

CountTargets = Callable[[Tensor], int]
NUM_ITEMS = "num_items_in_batch"
_IGNORED = -100  # label of a position that does not count, as in torch's cross_entropy
_CLOSE = 1e-3
_MANY = 2.0**20  # a power of two, so that dividing by it is exact
_Kwargs = dict[str, Any]
Losses = torch.Tensor | list[torch.Tensor] | None


def outputs_alone(outputs: Any, labels: Any) -> Any:
    """The loss_fn of calls without one: returns the model's outputs, which are losses or contain a `loss`."""
    return outputs


class LossKind(enum.Enum):
    """How the loss of a batch is formed. It decides how the losses of microbatches are weighed."""

    MEAN_OVER_LABELS = "a mean over labels: each microbatch is weighed by its number of labels that count"
    MEAN_OVER_ROWS = "a mean over rows, or unknown: each microbatch is weighed by its number of rows"
    SUM = "a sum: the losses are added"


@dataclasses.dataclass(frozen=True)
class LossForm:
    """The result of the trials of a model's own loss, for one form of call.

    count: counts the labels of a loss that is a mean over labels. `labels`: the argument that holds them.
    takes_count: the model divides the sum by `num_items_in_batch` if that is given.
    has_other_terms: the loss has terms that `num_items_in_batch` does not divide, such as a router's.
    """

    kind: LossKind
    count: CountTargets | None = None
    takes_count: bool = False
    has_other_terms: bool = False
    labels: str = "labels"


BY_ROWS = LossForm(LossKind.MEAN_OVER_ROWS)


@dataclasses.dataclass(frozen=True)
class BatchCounts:
    """The counts of a batch by which losses are weighed.

    rows, labels: None if unknown, or not needed. `labels`: those that count in the model's own loss.
    entries: all labels that are not ignored, or rows without labels; for a loss that does not show what it counts.
    items: what the user gave as `num_items_in_batch`, if anything.
    """

    microbatches: int
    rows: int | None
    labels: int | None = None
    entries: int = 0
    items: float | None = None

    def as_list(self) -> list[float | None]:
        """The arguments of the constructor."""
        return [self.microbatches, self.rows, self.labels, self.entries, self.items]

    @staticmethod
    def sum(parts: Sequence[BatchCounts]) -> BatchCounts:
        """The counts of a batch of several parts. A count that is unknown for one part is unknown."""
        columns = zip(*(part.as_list() for part in parts), strict=True)
        totals: list[Any] = [None if None in column else builtins.sum(column) for column in columns]
        return BatchCounts(*totals)


class WholeBatch:
    """What this machine must know of the parts of the batch on other machines.

    first_microbatch: the number of this machine's first microbatch in the whole batch.
    """

    def __init__(self, machines: Machines | None, *, is_training: bool = False) -> None:
        """`is_training`: the mode of the model on this machine."""
        self._machines, self._is_training = machines, is_training
        self._seed: int | None = None
        self.is_alone = machines is None
        self.first_microbatch = 0

    def call_seed(self) -> int:
        """The seed of the call: that of rank 0."""
        return draw_call_seed() if self._seed is None else self._seed

    def counts(self, own: BatchCounts, config: ResolvedRunConfig, weighing: Mapping[str, object]) -> BatchCounts:
        """The counts of the whole batch, from those of this machine's part.

        config, weighing: options of the call, and how it weighs losses; they must be equal on all machines.
        """
        if self._machines is None:
            return own
        settings = Settings.of(
            {
                "requires_grad": config.requires_grad,
                "loss_reduction": config.loss_reduction.value,
                "preserve_rng_state": config.preserve_rng_state,
                "the training mode of the model": self._is_training,
                **weighing,
            }
        )
        # Every machine draws, so that the generators of all machines advance alike; the seed of rank 0 counts.
        payload = {"counts": own.as_list(), "seed": draw_call_seed()}
        answers = self._machines.agree("the counts of a batch", payload, settings)
        self._seed = answers[0]["seed"]
        parts = [BatchCounts(*answer["counts"]) for answer in answers]
        given = {part.items is None for part in parts}
        if len(given) > 1:
            raise ConfigError(
                f"{NUM_ITEMS} was passed on some machines of the process group and not on others; pass it on all, each "
                "with the count of its part of the batch, or on none."
            )
        self.first_microbatch = sum(part.microbatches for part in parts[: self._machines.share.rank])
        return BatchCounts.sum(parts)


def weighed(
    batches: MicrobatchInputs,
    config: ResolvedRunConfig,
    own_loss: OwnLoss | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    wait_until_quiet: Callable[[], None],
    whole: WholeBatch,
) -> MicrobatchInputs:
    """Return the microbatches of a call, each with its share: the factor of its loss in the loss of the batch.

    own_loss: describes the loss that a model of transformers computes itself. loss_fn: None in a call of forward().
    wait_until_quiet: waits until no call and no step runs. Called only if the shares are found by running the model on
        the host.
    whole: the batch of all machines, of which this call is a part.
    """
    has_loss_fn = loss_fn is not None and loss_fn is not outputs_alone
    covers_own = config.whole_batch_loss is True or (config.whole_batch_loss is None and not has_loss_fn)
    num_microbatch = len(batches.args)
    named = [] if own_loss is None else list(map(own_loss.named, batches.args, batches.kwargs))
    own_form: LossForm | None = None
    counts = BatchCounts(num_microbatch, None if batches.rows is None else sum(batches.rows))
    if own_loss is not None and covers_own:
        own_form, counts = _with_labels(counts, batches, own_loss, named, wait_until_quiet, is_alone=whole.is_alone)
    kind = None if own_form is None else own_form.kind.name
    weighing = {"loss_fn is given": has_loss_fn, "whole_batch_loss": covers_own, "the kind of the model's loss": kind}
    total = whole.counts(counts, config, weighing)
    is_single = total.microbatches == 1
    rows: Shares | None = None  # each microbatch's share of the rows
    if is_single:
        rows = (1.0,)
    elif batches.rows is not None and total.rows:
        rows = tuple(count / total.rows for count in batches.rows)
    added = (1.0,) * num_microbatch
    shares = LossShares(rows=rows, covers_own=covers_own, merged=None if has_loss_fn and not covers_own else added)
    if config.loss_reduction is LossReduction.MEAN and not is_single:
        if has_loss_fn and covers_own:
            raise ConfigError(
                'loss_reduction="mean" with whole_batch_loss=True would weigh a loss twice: loss_fn takes it from the '
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
        shares = dataclasses.replace(shares, place=own_loss.place(named[0]))
        if own_form is not None:
            return _with_own_shares(batches, shares, named, own_form, total)
    elif covers_own and not is_single:
        shares = dataclasses.replace(shares, own=rows or (None,) * num_microbatch)
    return dataclasses.replace(batches, shares=shares)


def _with_labels(
    counts: BatchCounts,
    batches: MicrobatchInputs,
    own_loss: OwnLoss,
    named: Sequence[Mapping[str, Any]],
    wait_until_quiet: Callable[[], None],
    *,
    is_alone: bool,
) -> tuple[LossForm | None, BatchCounts]:
    """The form of the loss of a model of transformers, and the counts with those of labels.

    The form is None if the loss needs no weights: in a single microbatch, unless the user gives a count.
    """
    given = named[0].get(NUM_ITEMS)
    if is_alone and len(batches) == 1 and given is None:
        return None, counts
    form = own_loss.form(named[0], wait_until_quiet)
    labels = sum(_counts(form, named)) if form.kind is LossKind.MEAN_OVER_LABELS else None
    items = None if given is None else float(given)
    return form, dataclasses.replace(counts, labels=labels, entries=_num_entries(named, batches), items=items)


def _with_own_shares(
    batches: MicrobatchInputs,
    shares: LossShares,
    named: Sequence[Mapping[str, Any]],
    form: LossForm,
    total: BatchCounts,
) -> MicrobatchInputs:
    """The result of `weighed` for a model of transformers whose own losses must add up to the loss of the batch.

    named: the arguments of each microbatch by name. `total`: the counts of the whole batch.
    """
    given = total.items
    own: tuple[float | None, ...] | None = None
    match form.kind:
        case LossKind.MEAN_OVER_LABELS if form.takes_count and not form.has_other_terms and given is not None:
            if given != named[0][NUM_ITEMS]:  # the model divides by the count itself: by that of all machines
                batches = batches.with_kwargs({NUM_ITEMS: given})
        case LossKind.MEAN_OVER_LABELS if form.has_other_terms and shares.rows is not None:
            batches, own = _beside_other_terms(batches, shares.rows, total)
        case LossKind.MEAN_OVER_LABELS:
            counts = _counts(form, named)
            divisor = (total.labels or 0) if given is None else given
            # If no label counts, the shares are 1.0 and the loss stays NaN, as in PyTorch.
            own = tuple(count / divisor if divisor else 1.0 for count in counts)
            if form.takes_count and given is not None:
                batches = batches.with_kwargs({NUM_ITEMS: None})
        case LossKind.MEAN_OVER_ROWS:
            factor = 1.0 if given is None else total.entries / given
            own = (None,) * len(batches) if shares.rows is None else tuple(row * factor for row in shares.rows)
        case LossKind.SUM:
            pass
    return dataclasses.replace(batches, shares=dataclasses.replace(shares, own=own))


def _beside_other_terms(batches: MicrobatchInputs, rows: Shares, total: BatchCounts) -> tuple[MicrobatchInputs, Shares]:
    """The microbatches with their divisors, and their shares: see [Note: terms beside the mean over labels]."""
    labels = total.labels or 0
    factor = 1.0 if total.items is None else labels / total.items
    divisors = [labels * row for row in rows]
    return batches.with_each_kwargs([{NUM_ITEMS: divisor} for divisor in divisors]), tuple(row * factor for row in rows)


def _counts(form: LossForm, named: Sequence[Mapping[str, Any]]) -> list[int]:
    """The number of labels that count in each microbatch."""
    assert form.count is not None
    return [form.count(kwargs[form.labels]) for kwargs in named]


def _num_entries(named: Sequence[Mapping[str, Any]], batches: MicrobatchInputs) -> int:
    """The number of labels of a call, or of rows if it has no labels. For a loss that does not show what it counts."""
    labels = [kwargs.get("labels") for kwargs in named]
    tensors = [label for label in labels if isinstance(label, torch.Tensor)]
    return sum(map(count_all, tensors)) if tensors else sum(batches.rows or (1,))


def losses_of_all_machines(
    machines: Machines | None, losses: Losses, outputs: Any, request: Request, run: Run | None = None
) -> tuple[Losses, Any]:
    """Replace losses, and the losses in merged outputs, by their sums over all machines.

    Gradients of the losses in outputs stay those of this machine's part. A single loss is noted in the trace of `run`.
    """
    if machines is None:
        return losses, outputs
    listed = [losses] if isinstance(losses, torch.Tensor) else losses or []
    inside = losses_in(outputs, request.batches.shares) if request.config.merge_output is not False else []
    every = [*listed, *inside]
    if request.loss_fn is None and not inside:
        return losses, outputs
    shown = [loss.detach().float().item() if loss.dtype is not torch.float64 else loss.item() for loss in every]
    number = Settings.of({"the number of losses of the call and in its outputs": len(shown)})
    answers = machines.agree("the losses", {"losses": shown}, number)
    totals = []
    for at, loss in enumerate(every):
        total = torch.tensor(answers[0]["losses"][at], dtype=loss.dtype)
        for answer in answers[1:]:
            total = total + torch.tensor(answer["losses"][at], dtype=loss.dtype)
        totals.append(total.to(loss.device))
    if inside:
        # The difference is 0 and carries the gradient.
        outputs = with_losses(
            outputs,
            request.batches.shares,
            [loss - loss.detach() + total for loss, total in zip(inside, totals[len(listed) :], strict=True)],
        )
    if run is not None and isinstance(losses, torch.Tensor):
        run.trace.loss = totals[0].item()
    summed = totals[: len(listed)]
    return (summed[0] if isinstance(losses, torch.Tensor) else summed), outputs


class OwnLoss:
    """The forms of the loss that one model of transformers computes itself, found by trials when first needed."""

    def __init__(self, model: nn.Module, on_the_host: Callable[[], AbstractContextManager[None]] | None = None) -> None:
        """`on_the_host`: a context manager inside which the model can run on the host."""
        self._model = model
        self._on_the_host = on_the_host or (lambda: with_torch_alone(model))
        self._parts = [module for module in model.modules() if is_pretrained(module)]
        self._forms: dict[Hashable, LossForm] = {}
        self._loss_functions: list[Any] = []  # the loss functions of `_parts` when the forms were found
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(model.forward).parameters
        self._parameters = [name for name, parameter in parameters.items() if parameter.kind is by_position]

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a microbatch by name. Waits until they are filled if there are labels among them."""
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        has_labels = given.get("labels") is not None
        return {n: unwrapped(value, wait=has_labels)[0] for n, value in given.items() if n != KEEPS_LOGITS}

    def place(self, kwargs: Mapping[str, Any]) -> str | int:
        """The key or index of the loss in the model's output."""
        asked = kwargs.get("return_dict")
        returns_dict = getattr(getattr(self._model, "config", None), "return_dict", True) if asked is None else asked
        return 0 if returns_dict is False and kwargs.get("labels") is not None else "loss"

    def form(self, kwargs: Mapping[str, Any], wait_until_quiet: Callable[[], None]) -> LossForm:
        """The form of the loss in calls like this one. `wait_until_quiet`: called before trials run the model."""
        if kwargs.get("labels") is None:
            return BY_ROWS
        given = {name: value for name, value in kwargs.items() if name != NUM_ITEMS}
        with torch.no_grad():
            key = signature((), given, self._model.training)
        self._forget_if_replaced()
        if key not in self._forms:
            wait_until_quiet()
            try:
                with self._on_the_host():
                    self._forms[key] = loss_form(self._model, cut_down(given) or given)
            except ModelSplitError:  # the model cannot run on the host
                self._forms[key] = BY_ROWS
        return self._forms[key]

    def _forget_if_replaced(self) -> None:
        """Forget the forms if the user has given the model another loss function."""
        present = [getattr(module, "_loss_function", None) for module in self._parts]
        if any(map(operator.is_not, present, self._loss_functions)) or len(present) != len(self._loss_functions):
            self._forms, self._loss_functions = {}, present


# Trials that find the form of a model's own loss.


def count_all(labels: Tensor) -> int:
    """The number of labels that are not ignored."""
    return int((labels != _IGNORED).sum())


def count_shifted(labels: Tensor) -> int:
    """The number of labels that are not ignored, without the first of each row, which no position predicts."""
    return int((labels[..., 1:] != _IGNORED).sum())


def loss_form(model: nn.Module, kwargs: Mapping[str, Any]) -> LossForm:
    """The form of the loss that `model` computes: see [Note: trials of a loss]. `kwargs`: a small call with labels."""
    trial = _Trial(model, kwargs)
    if trial.has_countable_labels:
        for find in (_divided_by_count, _mean_over_labels):
            if (form := trial.tried(find)) is not None:
                return form
    return trial.tried(_added_over_rows) or BY_ROWS


class _Trial:
    """Runs a private copy of a model on one small call with varying labels."""

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        self._model_name = type(model).__name__
        self._copy = PrivateCopy(model)
        self.kwargs = {name: value for name, value in kwargs.items() if name != NUM_ITEMS}
        # The argument with the labels. `shift_labels` holds labels that the user has shifted already.
        self.name = "labels" if kwargs.get("shift_labels") is None else "shift_labels"
        labels = kwargs[self.name]
        self.has_countable_labels = (
            isinstance(labels, Tensor) and labels.dim() > 0 and labels.numel() > 0 and not labels.is_floating_point()
        )
        if self.has_countable_labels:
            # Without ignored labels, the two counting rules give different numbers.
            self.kwargs[self.name] = labels.clamp(min=0)
        config = getattr(model, "config", None)
        self.makes_decoder_inputs = bool(getattr(config, "is_encoder_decoder", False))

    @property
    def labels(self) -> Tensor:
        labels: Tensor = self.kwargs[self.name]
        return labels

    def loss(self, **changes: Any) -> float:
        """The loss of the call with some arguments changed."""
        with torch.no_grad(), torch.random.fork_rng(devices=()), WithoutDropout():
            torch.manual_seed(0)  # losses are compared, so all runs need the same random numbers
            output = self._copy.run((), fresh({**self.kwargs, **changes}))
        return float(output[0] if isinstance(output, tuple) else output.loss)

    def tried(self, find: Callable[[_Trial], LossForm | None]) -> LossForm | None:
        """Return `find(self)`, or None if `find` raises."""
        try:
            return find(self)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # a model may raise anything for arguments that it does not expect
            logger.debug("%s: the trial %s of its loss failed: %r", self._model_name, find.__name__, error)
            return None


def _divided_by_count(trial: _Trial) -> LossForm | None:
    """The form of a loss that divides by `num_items_in_batch`; None if it does not."""
    mean, total, part = trial.loss(), trial.loss(**{NUM_ITEMS: 1}), trial.loss(**{NUM_ITEMS: int(_MANY)})
    if not math.isfinite(total) or _is_close(total, part):
        return None
    others = (part - total / _MANY) / (1 - 1 / _MANY)
    for rule in (count_shifted, count_all):
        count = rule(trial.labels)
        if count > 1 and _is_close(total - others, (mean - others) * count):
            has_other_terms = abs(others) > _CLOSE * abs(part)
            return LossForm(LossKind.MEAN_OVER_LABELS, rule, True, has_other_terms, trial.name)
    return None


def _mean_over_labels(trial: _Trial) -> LossForm | None:
    """The form of a loss that is a mean over the labels that are not ignored; None if the loss is no such mean."""
    labels = trial.labels
    options: _Kwargs = {}
    if labels.numel() < 2:  # two labels are compared, so a single sample with one label is doubled
        options = _doubled(trial.kwargs)
        labels = options[trial.name]
    if trial.makes_decoder_inputs and not {"decoder_input_ids", "decoder_inputs_embeds"} & trial.kwargs.keys():
        options["decoder_input_ids"] = labels.clone()  # else the model makes them of the labels, which vary here
    for rule, (p, q) in _telling_pairs(labels):
        one, other, both = (
            trial.loss(**{**options, trial.name: _only(labels, positions)}) for positions in ([p], [q], [p, q])
        )
        is_mean = _is_close(2 * both, one + other) and one + other != 0
        if is_mean and not _is_close(one, other, 1e-6):  # if both are equal, the loss may not depend on labels
            return LossForm(LossKind.MEAN_OVER_LABELS, rule, labels=trial.name)
    return None


def _telling_pairs(labels: Tensor) -> Iterator[tuple[CountTargets, tuple[int, int]]]:
    """Yield each counting rule with two positions in the flat labels that the rule counts.

    The positions tell the rules apart: only `count_all` counts the first label of a row.
    """
    yield count_all, (0, 1)
    if labels.dim() > 1 and labels.shape[-1] > 2:
        yield count_shifted, (1, 2)


def _only(labels: Tensor, positions: list[int]) -> Tensor:
    """The labels with all but those at the given flat positions ignored."""
    only = torch.full_like(labels, _IGNORED)
    only.view(-1)[positions] = labels.reshape(-1)[positions]
    return only


def _added_over_rows(trial: _Trial) -> LossForm | None:
    """The form of a loss that doubles with the number of samples; None if it does not."""
    once, twice = trial.loss(), trial.loss(**_doubled(trial.kwargs))
    return LossForm(LossKind.SUM) if once != 0 and _is_close(twice, 2 * once) else None


def _doubled(kwargs: Mapping[str, Any]) -> _Kwargs:
    """The tensor arguments of a call with each sample twice."""
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.dim() > 0}
    return {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items()}


def _is_close(left: float, right: float, relative: float = _CLOSE) -> bool:
    both_are_numbers = math.isfinite(left) and math.isfinite(right)
    return both_are_numbers and abs(left - right) <= relative * max(abs(left), abs(right))
