"""Trains a tiny case wrapped and plain, and says how alike the losses and gradients are.

Used by the tests of this folder and by nothing else. Goes through the public API alone, as a user would, but for
split_model_inputs: the plain model is to see the microbatches that the wrapped one sees. Both are called twice, with
batches of different shapes; the second call is compared, for which the split was not made.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tiny_cases import Batch, Case, seed_everything
from torch import Tensor, nn

from roundpipe import AutoRoundPipe, ModelSplitError, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.microbatch.model_inputs import split_model_inputs

CALL_SEED = 11  # some forwards draw numbers
LOSS_TOLERANCE = 1e-5  # of the loss
GRAD_TOLERANCE = 1e-5  # of the model's largest gradient

# What the data file leaves out of `requires`, or asks for in vain.
PACKAGES = {
    "gemma3n:Gemma3nForConditionalGeneration": ["timm"],
    "maskformer:MaskFormerForInstanceSegmentation": ["scipy"],
    "deformable_detr:DeformableDetrForObjectDetection": ["scipy", "PIL"],
    "inkling:InklingForConditionalGeneration": ["scipy"],
}

Grads = dict[str, Tensor | None]


class Outcome(enum.StrEnum):
    """What became of a case, the worst first; the data file knows all but WRONG."""

    WRONG = "wrong"
    CRASH = "crash"
    REFUSED = "refused"
    EXACT = "exact"  # but for rounding
    BITWISE = "bitwise"

    def is_as_good_as(self, other: Outcome) -> bool:
        ranks = list(Outcome)
        return ranks.index(self) >= ranks.index(other)


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    detail: str = ""  # what differs, and by how much
    reason: str | None = None  # for a refusal


@dataclass(frozen=True)
class Trained:
    """What a training call leaves: the sum of its losses, and the gradients by the parameters' names."""

    loss: Tensor
    grads: Grads


def missing_packages(case: Case) -> list[str]:
    needed = PACKAGES.get(case.key, case.requires)
    return [name for name in needed if importlib.util.find_spec(name) is None]


def check_case(case: Case, num_devices: int, num_microbatch: int) -> Verdict:
    """How the wrapped case compares with the plain one. A refusal is a verdict; any other exception is the caller's."""
    try:
        ours = train_wrapped(case, num_devices, num_microbatch)
    except ModelSplitError as error:
        return Verdict(Outcome.REFUSED, "RoundPipe", reason=str(error))
    verdict = compare(ours, train_plain(case, num_microbatch))
    return verdict


def train_plain(case: Case, num_microbatch: int) -> Trained:
    model, *batches = case.build()
    for batch in batches:
        model.zero_grad(set_to_none=True)
        parts = split_model_inputs(batch, num_microbatch, getattr(model, "config", None))
        seed_everything(CALL_SEED)
        losses = []
        for part in parts:
            loss = model(**part).loss
            loss.backward()
            losses.append(loss.detach())
    return Trained(sum(losses[1:], losses[0]), grads_of(model))


def train_wrapped(case: Case, num_devices: int, num_microbatch: int) -> Trained:
    model, *batches = case.build()
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    with wrap_model_to_roundpipe(model, devices=["cpu"] * num_devices) as wrapped:
        if not isinstance(wrapped, RoundPipe): raise ModelSplitError("AUTO")
        for batch in batches:
            wrapped.zero_grad(set_to_none=True)
            seed_everything(CALL_SEED)
            loss = wrapped.forward_backward(
                input_kwargs=batch, loss_fn=lambda output, _: output.loss, run_config=config
            )
            wrapped.synchronize()
        return Trained(loss, grads_of(wrapped))


def grads_of(model: nn.Module) -> Grads:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def compare(ours: Trained, plain: Trained) -> Verdict:
    missing = [n for n in plain.grads if (plain.grads[n] is None) != (ours.grads[n] is None)]
    assert plain.grads.keys()==ours.grads.keys()
    unequal = [n for n in plain.grads if n not in missing and plain.grads[n] is not None and not torch.equal(plain.grads[n], ours.grads[n])]
    gm = max((g.abs().max().item() for g in plain.grads.values() if g is not None and g.numel()), default=0)
    err = max(((plain.grads[n]-ours.grads[n]).abs().max().item()/gm for n in unequal), default=0.)
    dl = abs(ours.loss-plain.loss).item()/abs(plain.loss).item() if not torch.equal(ours.loss,plain.loss) else 0
    detail=f"loss {dl:.1e} grad {err:.1e} missing {missing[:5]} unequal {len(unequal)}/{len(plain.grads)} {unequal[:6]}"
    if not dl and not missing and not unequal: return Verdict(Outcome.BITWISE,detail)
    if missing or not err<=GRAD_TOLERANCE or not dl<=LOSS_TOLERANCE: return Verdict(Outcome.WRONG,detail)
    return Verdict(Outcome.EXACT, detail)
