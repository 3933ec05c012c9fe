"""Trains a tiny case wrapped and plain, and says how alike the losses and gradients are.

Used by the tests of this folder. Goes through the public API, as a user would, but for `split_model_inputs`: the plain
model is to see the microbatches of the wrapped one. Both are called twice, with batches of different shapes. The second
call is compared: that the split was made for the first must not show.
"""

from __future__ import annotations

import enum
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tiny_cases import Batch, Case, seed_everything
from torch import Tensor, nn

from roundpipe import AutoRoundPipe, ModelSplitError, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.microbatch.hf_inputs import split_model_inputs

RUNS = ((1, 1), (3, 2))  # (devices, microbatches) that every case is to be checked with
CALL_SEED = 11  # some forwards draw numbers
TOLERANCE = 1e-5  # of the loss, and of the model's largest gradient: all cases are float32

# Packages, where `requires` of the data file is not what the class needs.
PACKAGES = {
    "gemma3n:Gemma3nForConditionalGeneration": ["timm"],
    "maskformer:MaskFormerForInstanceSegmentation": ["scipy"],
    "deformable_detr:DeformableDetrForObjectDetection": ["scipy", "PIL"],
    "inkling:InklingForConditionalGeneration": ["scipy"],
}
# The plain model refuses a microbatch of one sample: its BatchNorm has one value per channel at the end.
IN_ONE_MICROBATCH = {
    "hgnet_v2:HGNetV2ForImageClassification",
    "regnet:RegNetForImageClassification",
    "resnet:ResNetForImageClassification",
    "textnet:TextNetForImageClassification",
}


class Outcome(enum.StrEnum):
    """The result of a case, the worst first. The data file has neither WRONG nor BITWISE_UNLESS_SHARED."""

    WRONG = "wrong"
    CRASH = "crash"
    REFUSED = "refused"
    EXACT = "exact"  # but for rounding
    BITWISE_UNLESS_SHARED = "bitwise unless shared"  # parameters used in several layers: to rounding
    BITWISE = "bitwise"

    @property
    def rank(self) -> int:
        return list(Outcome).index(self)


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    detail: str = ""  # what differs, and by how much
    reason: str | None = None  # of a refusal, or the exception of a crash

    def is_enough_for(self, demanded: Outcome) -> bool:
        """Whether nothing worse came out; a refusal must say why."""
        has_reason = bool(self.reason) or self.outcome is not Outcome.REFUSED
        return has_reason and self.outcome.rank >= demanded.rank


class Holds(enum.StrEnum):
    """How the results of a case compare with those of the plain model."""

    WHOLE_BATCH = "equal to the whole batch"
    MICROBATCHES = "equal to the microbatches, with a warning that their losses may not add up"
    ROUTER = "equal to the whole batch, but for a router's loss, which is that of the microbatches"
    RANDOM = "the plain model draws random numbers"
    NO_PLAIN = "the plain model cannot be trained so"
    REFUSED = "refused with a reason"
    WRONG = "wrong"

    @property
    def is_tried(self) -> bool:
        return self not in (Holds.NO_PLAIN, Holds.RANDOM)


@dataclass(frozen=True)
class RoadVerdict:
    holds: Holds
    detail: str = ""


@dataclass(frozen=True)
class Trained:
    """The results of a training call."""

    loss: Tensor  # the sum over the microbatches
    grads: dict[str, Tensor | None]  # by the names of the parameters
    shared: frozenset[str] = frozenset()  # parameters that are used in several layers


def missing_packages(case: Case) -> list[str]:
    """Return the packages that the case needs."""
    return [name for name in PACKAGES.get(case.key, case.requires) if importlib.util.find_spec(name) is None]


def demanded_outcome(case: Case, num_microbatch: int) -> Outcome:
    """The least that is good enough: what was recorded, with one microbatch.

    With several, the parts of a shared parameter are summed in another order: over microbatches first, then layers.
    """
    recorded = Outcome(case.outcome)
    best = Outcome.BITWISE if num_microbatch == 1 else Outcome.BITWISE_UNLESS_SHARED
    return min(recorded, best, key=lambda outcome: outcome.rank)


def check_case(case: Case, num_devices: int, num_microbatch: int, **options: Any) -> Verdict:
    """How the wrapped model compares with the plain one. Exceptions other than refusals are the caller's.

    options: further arguments of the wrapper.
    """
    if case.key in IN_ONE_MICROBATCH:
        num_microbatch = 1
    try:
        ours = train_wrapped(case, num_devices, num_microbatch, **options)
    except ModelSplitError as error:
        return Verdict(Outcome.REFUSED, reason=str(error))
    if ours is None:
        return Verdict(Outcome.REFUSED, "wrapped in parts, or as one layer", reason_of_refusal(case))
    return compare(ours, train_plain(case, num_microbatch))


def build(case: Case) -> tuple[nn.Module, Batch, Batch]:
    """The case without the noise of routers: like dropout's, the numbers would be others than in the plain model."""
    model, batch, other = case.build()
    for module in model.modules():
        if isinstance(getattr(module, "jitter_noise", None), float):
            setattr(module, "jitter_noise", 0.0)  # noqa: B010, nn.Module is annotated with modules and tensors alone
    return model, batch, other


def train_plain(case: Case, num_microbatch: int) -> Trained:
    model, *batches = build(case)
    for batch in batches:
        model.zero_grad(set_to_none=True)
        seed_everything(CALL_SEED)
        losses = []
        for microbatch in split_model_inputs(batch, num_microbatch, getattr(model, "config", None)):
            loss = model(**microbatch).loss
            loss.backward()
            losses.append(loss.detach())
    return Trained(sum(losses[1:], losses[0]), grads_of(model))


def train_wrapped(case: Case, num_devices: int, num_microbatch: int, **options: Any) -> Trained | None:
    """None if the model was not split into layers, but wrapped some other way."""
    model, *batches = build(case)
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    with wrap_model_to_roundpipe(model, devices=["cpu"] * num_devices, **options) as wrapped:
        if isinstance(wrapped, AutoRoundPipe) or wrapped.model is model:
            return None
        for batch in batches:
            wrapped.zero_grad(set_to_none=True)
            seed_everything(CALL_SEED)
            loss = wrapped.forward_backward(
                input_kwargs=batch, loss_fn=lambda output, _: output.loss, run_config=config
            )
            wrapped.synchronize()
        return Trained(loss, grads_of(wrapped), frozenset(names_of_shared(wrapped)))


def reason_of_refusal(case: Case) -> str:
    """Why a model is not split: said when that is insisted on."""
    try:
        wrap_model_to_roundpipe(case.build_model(), use_sequential_preset=True, devices=["cpu"]).close()
    except NotImplementedError as error:
        return str(error.__cause__)
    raise AssertionError(f"{case} is split when that is insisted on, but not when it is not")


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def names_of_shared(wrapped: RoundPipe) -> Iterator[str]:
    assert isinstance(wrapped.model, nn.Sequential)
    num_layers_of = Counter(param for layer in wrapped.model for param in set(layer.parameters()))
    return (name for name, param in wrapped.named_parameters() if num_layers_of[param] > 1)


def compare(ours: Trained, plain: Trained) -> Verdict:
    """Names, presence and dtypes of the gradients must agree in any case."""
    for name in sorted(ours.grads.keys() ^ plain.grads.keys()):
        return Verdict(Outcome.WRONG, f"only one of the models has a parameter {name}")
    pairs = [(name, ours.grads[name], grad) for name, grad in plain.grads.items()]
    if lost := [name for name, one, other in pairs if one is None and other is not None]:
        return Verdict(Outcome.WRONG, f"no gradient for {_listed(lost)}")
    if made_up := [name for name, one, other in pairs if one is not None and other is None]:
        return Verdict(Outcome.WRONG, f"a gradient for {_listed(made_up)}, which the plain model has none for")
    both = {name: (one, other) for name, one, other in pairs if one is not None and other is not None}
    scale = torch.stack([grad.abs().max() for _, grad in both.values() if grad.numel()]).max()
    errors = {name: _error(one, other, scale) for name, (one, other) in both.items() if not _is_same(one, other)}
    return _verdict(_error(ours.loss, plain.loss, plain.loss.abs()), errors, len(both), ours.shared)


def _verdict(loss_error: float, errors: dict[str, float], num_grads: int, shared: frozenset[str]) -> Verdict:
    """`errors`: of the gradients that are not the same to the last bit."""
    worst = sorted(errors, key=lambda name: -errors[name])
    by = max(errors.values(), default=0.0)
    detail = f"loss off by {loss_error:.1e}, {len(errors)} of {num_grads} gradients by up to {by:.1e}: {_listed(worst)}"
    if not all(error <= TOLERANCE for error in (loss_error, *errors.values())):  # not even if it is no number
        return Verdict(Outcome.WRONG, detail)
    if not errors and loss_error == 0:
        return Verdict(Outcome.BITWISE)
    if errors.keys() <= shared and loss_error == 0:
        return Verdict(Outcome.BITWISE_UNLESS_SHARED, detail)
    return Verdict(Outcome.EXACT, detail)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _error(one: Tensor, other: Tensor, scale: Tensor) -> float:
    """The largest difference in units of `scale`; infinite where the tensors are of different kinds."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return float("inf")
    return 0.0 if torch.equal(one, other) else ((one - other).abs().max() / scale).item()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
