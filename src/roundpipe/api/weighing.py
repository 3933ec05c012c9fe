"""How the losses of a call's microbatches make up the loss of the call.

Used by api.engine, after a call has been cut. What loss_fn returns is weighed by rows, or not at all. The loss that a
model computes itself is weighed by what it is a mean over, which models.counting finds out.

[Note: terms beside the mean over labels]
The loss of a router is a mean over tokens, labelled or not: it is to be weighed by rows, and the rest of the loss by
labels. So the model is told to divide by w * n, where w is the microbatch's share of the rows and n the number of
labels in the call; its loss S / (w * n) + A is then weighed by w, which makes S / n + w * A.
A count from the user, of several calls, is u: the loss of the call is weighed by n / u.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from roundpipe.config import LossReduction, ResolvedRunConfig
from roundpipe.errors import ConfigError, ModelSplitError
from roundpipe.microbatch import Arriving, MicrobatchInputs
from roundpipe.microbatch.shares import LossShares, Shares
from roundpipe.models.counting import BY_ROWS, NUM_ITEMS, LossForm, LossKind, count_all, loss_form
from roundpipe.models.library_state import is_pretrained, with_torch_alone
from roundpipe.models.sample_inputs import cut_down
from roundpipe.models.signature import signature
from roundpipe.models.split_layers import KEEPS_LOGITS


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
