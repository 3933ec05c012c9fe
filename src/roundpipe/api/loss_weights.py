"""Weighs the losses of a call's microbatches so that they add up to the loss of the whole batch.

Results of loss_fn are weighed by rows, or not at all. The loss that a model computes itself is weighed by rows if it is
a mean over rows, and by labels if it is a mean over the labels that count (those that are not ignored); api.loss_trials
finds out which. Knows no device and no schedule.

[Note: terms beside the mean over labels]
The loss of a model with routers is S / n + A: S is a sum over the n labels of the call, and A, the router's loss, is a
mean over all tokens. A must be weighed by rows and S / n by labels. So the model is told to divide by w * n, where w is
the microbatch's share of the rows. Its loss S / (w * n) + A, weighed by w, is S / n + w * A. If the user gives a count
u for several calls, the loss of the call is weighed by n / u as well.

[Note: what is assumed]
Where the user has set nothing and nothing can be recognised, the loss may be another one than that of the whole batch.
Each such assumption is a warning, once per model, which names the setting that makes it a decision.

[Note: the batch of all machines]
With a process group, a call is one part of the batch. The machines exchange their counts before they weigh, and their
losses afterwards, so that shares, random streams and losses are those of the whole batch.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from roundpipe.api.calls import InputSplit, Request
from roundpipe.api.loss_trials import NUM_ITEMS, LossForm, LossKind, OwnLoss, TrialRows, count_all
from roundpipe.config import LossReduction, ResolvedRunConfig
from roundpipe.distributed.machines import Machines
from roundpipe.distributed.settings import Settings
from roundpipe.errors import ConfigError
from roundpipe.microbatch import MicrobatchInputs
from roundpipe.microbatch.merge import losses_in, merges_automatically, with_losses
from roundpipe.microbatch.split import LossShares, OwnShares, Shares
from roundpipe.runtime.rng import draw_call_seed
from roundpipe.runtime.run import Run

logger = logging.getLogger("roundpipe")

Losses = torch.Tensor | list[torch.Tensor] | None
LossFn = Callable[[Any, Any], Any]


def outputs_alone(outputs: Any, labels: Any) -> Any:
    """The loss_fn of calls without one: returns the model's outputs, which are losses or contain a `loss`."""
    return outputs


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


class HasMode(Protocol):
    """A model."""

    @property
    def is_training(self) -> bool:
        """Whether a layer is in training mode."""


class WholeBatch:
    """What this machine must know of the parts of the batch on other machines.

    first_microbatch: the number of this machine's first microbatch in the whole batch.
    """

    def __init__(self, machines: Machines | None, model: HasMode) -> None:
        self._machines, self._model = machines, model
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
                "loss_reduction": (config.loss_reduction or LossReduction.SUM).value,
                "preserve_rng_state": config.preserve_rng_state,
                "the training mode of the model": self._model.is_training,
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


class Notice(enum.Enum):
    """The warnings of [Note: what is assumed]."""

    REDUCTION = (
        "%s: the batch was split into %d microbatches and the results of loss_fn are added, because loss_reduction was "
        "never set. If loss_fn returns a mean, loss and gradients are too large by about that factor: set "
        'RoundPipeRunConfig(loss_reduction="mean"), which weighs each microbatch by its rows. Set "sum" if adding is '
        "right."
    )
    DOUBT = (
        "%s: the `loss` that the model returns may not be made of the losses of its rows: %s. The %d microbatches are "
        "weighed by their %s, as if it were a mean over %s, which may not give the loss of the whole batch. Set "
        "num_microbatch=1 to compute that, or say how to combine the losses of microbatches: "
        'RoundPipeRunConfig(whole_batch_loss=False, loss_reduction="sum") or "mean".'
    )
    AVERAGED = (
        "%s: %s is one number with a gradient, and no `loss` by its name, so it is averaged over the %d microbatches. "
        "If it is a loss, it is that of the whole batch only where each microbatch has as many rows and labels. Return "
        'it as {"loss": ...}, give merge_output=Reducer(...) for it, or set num_microbatch=1.'
    )
    BATCH_NORM = (
        "%s: the model normalises over the batch (BatchNorm in training mode), and each of the %d microbatches is "
        "normalised by itself, so losses and gradients are not those of the whole batch. Set num_microbatch=1, or put "
        "these modules into evaluation mode."
    )
    LABEL = (
        "%s: forward_backward(label=...) was called without loss_fn, so nothing reads the label: the loss is what the "
        "model returns. Give the label to the model, as in input_kwargs={**batch, 'labels': labels}, or give a loss_fn "
        "with (outputs, label)."
    )


class ModelLosses:
    """Weighs the losses of the calls of one model."""

    def __init__(self, name: str, own: OwnLoss) -> None:
        """`own`: the loss that the model computes itself, if it computes one."""
        self._name, self.own = name, own
        self._noticed: set[Notice] = set()

    def weighed(
        self,
        batches: MicrobatchInputs,
        inputs: InputSplit,
        loss_fn: LossFn | None,
        whole: WholeBatch,
        wait_until_quiet: Callable[[], None],
    ) -> MicrobatchInputs:
        """Return the microbatches of a call, each with its share: the factor of its loss in the loss of the batch.

        batches: the microbatches of `inputs`. `loss_fn`: None in a call of forward().
        whole: the batch of all machines, of which this call is a part.
        wait_until_quiet: waits until no call and no step runs, so that the model can run on the host.
        """
        config = inputs.config
        named = list(map(self.own.named, batches.args, batches.kwargs))
        place = self.own.place(named[0])
        has_loss_fn = loss_fn is not None and loss_fn is not outputs_alone
        if loss_fn is outputs_alone and inputs.label is not None:
            self._notice(Notice.LABEL)
        covers_own = config.whole_batch_loss is True or (config.whole_batch_loss is None and not has_loss_fn)
        if loss_fn is None and not merges_automatically(config.merge_output, place):
            covers_own = False  # the user's spec or function gets the losses as the model returns them
        find = functools.cache(
            lambda: self.own.form(named[0], lambda: TrialRows.of(batches, inputs.split_into), wait_until_quiet)
        )
        form: LossForm | None = None
        counts = BatchCounts(len(batches), None if batches.rows is None else sum(batches.rows))
        given = named[0].get(NUM_ITEMS) if self.own.follows_library else None
        has_several = len(batches) > 1 or not whole.is_alone
        if covers_own and (given is not None or (has_several and self._must_know(named[0], loss_fn, whole))):
            form, counts = find(), _with_labels(counts, find(), named, batches, given)
        weight = None if form is None else form.kind.weight
        weighing = {"loss_fn is given": has_loss_fn, "whole_batch_loss": covers_own, "the weight of losses": weight}
        total = whole.counts(counts, config, weighing)
        rows = _rows(batches, total)
        shares = LossShares(rows=rows, place=place, covers_own=covers_own)
        if total.microbatches > 1:
            if loss_fn is None:
                averaged = functools.partial(self._notice_averaged, len(batches))
                shares = dataclasses.replace(shares, averaged=averaged)
            if has_loss_fn and not covers_own:
                self._notice_reduction(config, total)
            if config.requires_grad and self.own.mixes_rows():
                self._notice(Notice.BATCH_NORM, total.microbatches)
            if form is not None and form.kind is LossKind.ABSENT and loss_fn is not None:
                self._notice_reduction(config, total)
            shares = _with_reduction(shares, config, loss_fn, len(batches))
        if not covers_own or (form is None and total.microbatches == 1):
            return dataclasses.replace(batches, shares=shares)
        if form is None:  # a call of forward(): whether there is a loss is seen when outputs are merged
            later = functools.cache(lambda: self._own_shares(batches, rows, named, find(), total)[1])
            return dataclasses.replace(batches, shares=dataclasses.replace(shares, merged=later))
        batches, own = self._own_shares(batches, rows, named, form, total)
        shares = dataclasses.replace(shares, own=own if loss_fn is not None else None, merged=lambda: own)
        return dataclasses.replace(batches, shares=shares)

    def _must_know(self, named: Mapping[str, Any], loss_fn: LossFn | None, whole: WholeBatch) -> bool:
        """Whether the form of the model's own loss must be known before the call runs.

        It need not in a call of forward(), where outputs show whether there is a loss, unless the model may get other
        arguments for its loss, or machines must exchange counts of labels.
        """
        has_labels = self.own.label_name(named) is not None
        return loss_fn is not None or (has_labels and (self.own.follows_library or not whole.is_alone))

    def _own_shares(
        self,
        batches: MicrobatchInputs,
        rows: Shares | None,
        named: Sequence[Mapping[str, Any]],
        form: LossForm,
        total: BatchCounts,
    ) -> tuple[MicrobatchInputs, OwnShares | None]:
        """The microbatches and the factors of the model's own losses, None if all are 1.

        rows: each microbatch's share of the rows. `named`: the arguments of each microbatch by name. `total`: the
        counts of the whole batch.
        """
        given = total.items
        if form.doubt and total.microbatches > 1:
            self._notice(Notice.DOUBT, form.doubt, total.microbatches, form.kind.weight, form.kind.weight)
        match form.kind:
            case LossKind.MEAN_OVER_LABELS if form.takes_count and not form.has_other_terms and given is not None:
                stated = named[0][NUM_ITEMS]
                has_dims = isinstance(stated, torch.Tensor) and stated.dim() > 0  # it would give the losses dimensions
                if given != stated or has_dims:  # the model divides by the count itself: by that of all machines
                    batches = batches.with_kwargs({NUM_ITEMS: given})
                return batches, None
            case LossKind.MEAN_OVER_LABELS if form.has_other_terms and rows is not None:
                return _beside_other_terms(batches, rows, total)
            case LossKind.MEAN_OVER_LABELS:
                counts = _counts(form, named)
                divisor = (sum(counts) if total.labels is None else total.labels) if given is None else given
                if form.takes_count and given is not None:
                    batches = batches.with_kwargs({NUM_ITEMS: None})
                # If no label counts, the shares are 1.0 and the loss stays NaN, as in PyTorch.
                return batches, tuple(count / divisor if divisor else 1.0 for count in counts)
            case LossKind.SUM:
                return batches, None
            case LossKind.MEAN_OVER_ROWS | LossKind.UNKNOWN | LossKind.ABSENT:
                factor = 1.0 if given is None else total.entries / given
                return batches, (None,) * len(batches) if rows is None else tuple(row * factor for row in rows)

    def _notice_reduction(self, config: ResolvedRunConfig, total: BatchCounts) -> None:
        if config.loss_reduction is None:
            self._notice(Notice.REDUCTION, total.microbatches)

    def _notice_averaged(self, num_microbatch: int, path: str) -> None:
        self._notice(Notice.AVERAGED, path, num_microbatch)

    def _notice(self, notice: Notice, *values: object) -> None:
        """Warn, unless the model has warned of this before."""
        if notice is Notice.BATCH_NORM:
            self._noticed.add(Notice.DOUBT)  # it has the same reason and the same remedy
        if notice not in self._noticed:
            self._noticed.add(notice)
            logger.warning(notice.value, self._name, *values)


def _rows(batches: MicrobatchInputs, total: BatchCounts) -> Shares | None:
    """Each microbatch's share of the rows of the whole batch; None if unknown."""
    if total.microbatches == 1:
        return (1.0,)
    return tuple(count / total.rows for count in batches.rows) if batches.rows is not None and total.rows else None


def _with_reduction(
    shares: LossShares, config: ResolvedRunConfig, loss_fn: LossFn | None, num_microbatch: int
) -> LossShares:
    """The shares with the factors of results of loss_fn, and of losses in outputs that are not the batch's."""
    has_loss_fn = loss_fn is not None and loss_fn is not outputs_alone
    if config.loss_reduction is not LossReduction.MEAN:
        added = (1.0,) * num_microbatch
        return shares if has_loss_fn or shares.covers_own else dataclasses.replace(shares, merged=lambda: added)
    if has_loss_fn and shares.covers_own:
        raise ConfigError(
            'loss_reduction="mean" with whole_batch_loss=True would weigh a loss twice: loss_fn takes it from the '
            "model's output; leave one of them out."
        )
    rows = shares.rows
    if rows is None and not (shares.covers_own and loss_fn is None):
        raise ConfigError(
            'loss_reduction="mean" weighs each microbatch by its rows, and how many each has cannot be told from '
            "how this call was cut: neither its labels nor its inputs are tensors of one size along the dimension "
            'that was cut. Use loss_reduction="sum" and weigh the losses in loss_fn.'
        )
    return dataclasses.replace(shares, returned=rows, merged=lambda: rows)


def _with_labels(
    counts: BatchCounts, form: LossForm, named: Sequence[Mapping[str, Any]], batches: MicrobatchInputs, given: Any
) -> BatchCounts:
    """The counts of a call with those of labels. `given`: the user's `num_items_in_batch`, or None."""
    labels = sum(_counts(form, named)) if form.kind is LossKind.MEAN_OVER_LABELS else None
    items = None if given is None else float(given)
    return dataclasses.replace(counts, labels=labels, entries=_num_entries(named, batches), items=items)


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
    shares, spec = request.batches.shares, request.config.merge_output
    inside = losses_in(outputs, shares, spec)
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
        pairs = zip(inside, totals[len(listed) :], strict=True)
        outputs = with_losses(outputs, shares, spec, [loss - loss.detach() + total for loss, total in pairs])
    if run is not None and isinstance(losses, torch.Tensor):
        run.trace.loss = totals[0].item()
    summed = totals[: len(listed)]
    return (summed[0] if isinstance(losses, torch.Tensor) else summed), outputs
