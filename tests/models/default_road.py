"""Trains a tiny case the way users do, and says whether loss and gradients are those of the whole batch.

The way of users: labels, no `loss_fn`, several microbatches, once with `forward_backward(...)` and once with
`model(**batch).loss.backward()`. Rows have different numbers of labels where the model can ignore labels, and caches
are neither turned on nor off.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from in_double import in_double, model_in_double, without_float32
from small_models import livened
from sweep import CALL_SEED, IN_ONE_MICROBATCH, Holds, RoadVerdict, build, grads_of
from tiny_cases import Batch, Case, seed_everything
from torch import Tensor, nn

from roundpipe import AutoRoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import RoundPipeError
from roundpipe.microbatch.hf_inputs import split_model_inputs

NUM_DEVICES = 2


@dataclass(frozen=True)
class Rounding:
    """What sums in another order may differ by.

    relative: to the loss and to the model's largest gradient. terms: of terms of size 1 that add up to zero, as in the
    gradient of a bias that a softmax cancels.
    """

    relative: float
    terms: float


IN_FLOAT = Rounding(relative=2e-5, terms=2e-7)
IN_DOUBLE = Rounding(relative=1e-12, terms=4e-16)
WARNINGS = ("may not be made of the losses of its rows", "normalises over the batch")
IGNORED = -100


@dataclass(frozen=True)
class Trained:
    loss: Tensor
    grads: dict[str, Tensor | None]


def check_default_road(case: Case, num_microbatch: int) -> RoadVerdict:
    """Train the case with both calls of users. The worse result counts."""
    job = Job.of(case)
    if job is None:
        return RoadVerdict(Holds.NO_PLAIN)
    num_microbatch = 1 if case.key.partition("[")[0] in IN_ONE_MICROBATCH else num_microbatch
    whole = train_plain(job, [job.batch], [1.0])
    try:
        with Warnings() as warnings:
            ours = dict(train_wrapped(job, num_microbatch))
    except RoundPipeError as error:
        return RoadVerdict(Holds.REFUSED, f"{type(error).__name__}: {error}")
    except Exception:  # of the model's own code: the plain model must raise it for these microbatches, too
        if plain_microbatches(job, num_microbatch) is not None:
            raise
        return RoadVerdict(Holds.NO_PLAIN, "the plain model cannot be trained with these microbatches")
    wrong = {road: detail for road, got in ours.items() if (detail := difference(got, whole))}
    if not wrong:
        return RoadVerdict(Holds.WHOLE_BATCH)
    if is_random(job, whole):
        return RoadVerdict(Holds.RANDOM)
    detail = "; ".join(f"{road}: {text}" for road, text in wrong.items())
    return _explained(job, num_microbatch, whole, ours, warnings.seen, detail)


def _explained(
    job: Job, num_microbatch: int, whole: Trained, ours: dict[str, Trained], has_warned: bool, detail: str
) -> RoadVerdict:
    """The verdict on results that are not those of the whole batch, but for `detail`.

    They are wrong if RoundPipe has not warned, even where no weights of the microbatches give the whole batch.
    """
    by_weight = plain_microbatches(job, num_microbatch)
    if by_weight is None:
        return RoadVerdict(Holds.NO_PLAIN, "the plain model cannot be trained with these microbatches")
    for each in router_losses(job, num_microbatch, whole):
        if not any(difference(got, each) for got in ours.values()):
            return RoadVerdict(Holds.ROUTER)
    if not any(all(not difference(got, each) for got in ours.values()) for each in by_weight):
        return RoadVerdict(Holds.WRONG, detail)
    if has_warned:
        return RoadVerdict(Holds.MICROBATCHES)
    # The plain model on these microbatches differs from the whole batch by as much: by rounding, or by wrong weights.
    wrong_in_double = difference_in_double(job, num_microbatch)
    if wrong_in_double:
        return RoadVerdict(Holds.WRONG, f"{detail}; in float64: {wrong_in_double}")
    return RoadVerdict(Holds.WHOLE_BATCH, f"in float64; in float32 sums in another order: {detail}")


def difference_in_double(job: Job, num_microbatch: int) -> str:
    """What differs from the whole batch in float64; empty if nothing does. Rounding shrinks with the precision."""
    try:
        with without_float32():
            job = Job(model_in_double(job.model()), in_double(job.batch))
            whole = train_plain(job, [job.batch], [1.0])
            if kinds := {grad.dtype for grad in whole.grads.values() if grad is not None} - {torch.float64}:
                return f"the plain model has gradients of {kinds}"
            found = [difference(got, whole, IN_DOUBLE) for _, got in train_wrapped(job, num_microbatch)]
    except Exception as error:  # the model may be unable to run in float64
        return f"{type(error).__name__}: {error}"
    return "; ".join(filter(None, found))


def plain_microbatches(job: Job, num_microbatch: int) -> list[Trained] | None:
    """The results of the plain model over microbatches, with all ways to weigh them; None if it refuses one."""
    try:
        parts = microbatches_of(job, num_microbatch)
        return [train_plain(job, parts, shares) for _, shares in shares_of(parts)]
    except Exception:  # the plain model may raise anything for a part of a batch
        return None


def microbatches_of(job: Job, num_microbatch: int) -> list[Batch]:
    return list(split_model_inputs(job.batch, num_microbatch, getattr(job.model(), "config", None)))


@dataclass(frozen=True)
class Job:
    """A case with the weights and the batch that it is trained with."""

    built: nn.Module  # copied for every training: some models have weights that nothing initialises
    batch: Batch

    @classmethod
    def of(cls, case: Case) -> Job | None:
        """None if the plain model cannot be trained."""
        try:
            model, batch, _ = build(case)
            batch = {name: value for name, value in batch.items() if name != "use_cache"}
            models = (livened(copy.deepcopy(model), 3), model)
            job = next(job for job in (cls(each, batch) for each in models) if job.is_trainable())
        except Exception:  # the plain model may raise anything for a configuration that it does not take
            return None
        if case.class_name.endswith("ForCTC"):  # ignored labels are padding there, at the end alone
            return job
        ragged = cls(job.built, with_fewer_labels(batch))
        try:
            return ragged if ragged.is_trainable() else job
        except Exception:  # a model may be unable to ignore labels
            return job

    def model(self) -> nn.Module:
        return copy.deepcopy(self.built)

    def is_trainable(self) -> bool:
        trained = train_plain(self, [self.batch], [1.0])
        numbers = [trained.loss, *(grad for grad in trained.grads.values() if grad is not None)]
        return all(bool(number.isfinite().all()) for number in numbers)


def with_fewer_labels(batch: Batch) -> Batch:
    """The batch with another number of ignored labels at the beginning of every row."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
        return batch
    changed = labels.clone()
    for row in range(len(changed)):
        changed[row, : (2 * row + 1) % changed.shape[1]] = IGNORED
    return {**batch, "labels": changed}


def train_plain(job: Job, parts: Sequence[Batch], shares: Sequence[float]) -> Trained:
    model = job.model()
    seed_everything(CALL_SEED)
    losses = []
    for part, share in zip(parts, shares, strict=True):
        loss = model(**copy.deepcopy(part)).loss * share
        loss.backward()
        losses.append(loss.detach())
    return Trained(sum(losses[1:], losses[0]), grads_of(model))


def train_wrapped(job: Job, num_microbatch: int) -> Iterator[tuple[str, Trained]]:
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    with wrap_model_to_roundpipe(job.model(), devices=["cpu"] * NUM_DEVICES, model_run_config=config) as wrapped:
        for road in ("forward_backward", "backward"):
            wrapped.zero_grad(set_to_none=True)
            seed_everything(CALL_SEED)
            batch = copy.deepcopy(job.batch)
            if road == "backward":
                loss = wrapped(**batch).loss
                loss.backward()
            elif isinstance(wrapped, AutoRoundPipe):
                continue  # has no forward_backward()
            else:
                loss = wrapped.forward_backward(input_kwargs=batch)
            wrapped.synchronize()
            yield road, Trained(loss.detach(), grads_of(wrapped))


def is_random(job: Job, whole: Trained) -> bool:
    """Whether the plain model gives another loss with another seed."""
    model = job.model()
    seed_everything(CALL_SEED + 1)
    return not torch.equal(model(**copy.deepcopy(job.batch)).loss.detach(), whole.loss)


def shares_of(parts: Sequence[Batch]) -> Iterator[tuple[str, list[float]]]:
    """The ways to weigh the losses of microbatches."""
    counts = {
        "labels": [num_labels(part, shifted=False) for part in parts],
        "shifted labels": [num_labels(part, shifted=True) for part in parts],
        "rows": [num_rows(part) for part in parts],
    }
    for name, numbers in counts.items():
        if sum(numbers):
            yield name, [number / sum(numbers) for number in numbers]
    yield "nothing", [1.0] * len(parts)


def num_labels(part: Batch, *, shifted: bool) -> int:
    labels = part.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return 0
    return int(((labels[..., 1:] if shifted else labels) != IGNORED).sum())


def num_rows(part: Batch) -> int:
    named = [part.get(name) for name in ("labels", "input_ids", "past_values", "start_positions")]
    rows = [value for value in (*named, *part.values()) if isinstance(value, Tensor) and value.dim()]
    return len(rows[0])


def router_losses(job: Job, num_microbatch: int, whole: Trained) -> Iterator[Trained]:
    """The sums S / n + mean of A over microbatches, for both ways to count the n labels; S / n + A is the whole loss.

    A is the loss of a model's routers, which is no sum over rows.
    """
    parts = microbatches_of(job, num_microbatch)
    for shifted in (True, False):
        total = sum(num_labels(part, shifted=shifted) for part in parts)
        try:
            if not difference(_with_router_loss(job, [job.batch], total), whole):
                yield _with_router_loss(job, parts, total)
        except (AttributeError, TypeError):  # the model has no such loss, or takes no count
            return


def _with_router_loss(job: Job, parts: Sequence[Batch], total: int) -> Trained:
    model = job.model()
    rows = [num_rows(part) for part in parts]
    seed_everything(CALL_SEED)
    losses = []
    for part, row in zip(parts, rows, strict=True):
        output: Any = model(**copy.deepcopy(part), num_items_in_batch=total)
        loss = output.loss - (1 - row / sum(rows)) * _coefficient(model.config) * output.aux_loss
        loss.backward()
        losses.append(loss.detach())
    return Trained(sum(losses[1:], losses[0]), grads_of(model))


def _coefficient(config: Any) -> float:
    """The factor of the routers' loss."""
    for each in (config, getattr(config, "text_config", None)):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if (factor := getattr(each, name, None)) is not None:
                return float(factor)
    raise AttributeError("the config has no factor for the loss of routers")


class Warnings(logging.Handler):
    """Notes, while entered, whether RoundPipe has warned of a loss that does not add up."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen |= any(text in record.getMessage() for text in WARNINGS)

    def __enter__(self) -> Warnings:
        logging.getLogger("roundpipe").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("roundpipe").removeHandler(self)


def difference(got: Trained, expected: Trained, rounding: Rounding = IN_FLOAT) -> str:
    """What differs; empty if nothing does. A gradient of zeros counts as none."""
    scale = max(float(grad.abs().max()) for grad in expected.grads.values() if grad is not None and grad.numel())
    by_loss = abs(float(got.loss) - float(expected.loss)) / max(abs(float(expected.loss)), rounding.terms)
    if not by_loss <= rounding.relative:
        return f"loss {float(got.loss):.6g} for {float(expected.loss):.6g}"
    worst, where = 0.0, ""
    for name in expected.grads.keys() | got.grads.keys():
        pair = [each.get(name) for each in (got.grads, expected.grads)]
        one, other = (torch.zeros(()) if grad is None else grad for grad in pair)
        error = float((one - other).abs().max()) if (one - other).numel() else 0.0
        if math.isnan(error) or error > max(worst, rounding.relative * scale + rounding.terms):
            worst, where = error, name
    return f"gradient of {where} off by {worst / scale:.1e} of the largest" if where else ""
