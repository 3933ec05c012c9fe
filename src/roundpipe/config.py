"""Run options: an overlay of optional fields, and what remains when every field is decided.

`api` resolves once per call: call over model over default. Inner code only ever sees a ResolvedRunConfig.
Does not know how a split spec or a plan is carried out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.plan import ModelExecutePlan


class RecomputeGrain(enum.Enum):
    """How much of a stage is recomputed at a time in the backward pass."""

    STAGE = "stage"
    LAYER = "layer"


class LossReduction(enum.Enum):
    """How the losses of the microbatches become one."""

    SUM = "sum"
    MEAN = "mean"


@dataclasses.dataclass(frozen=True)
class RoundPipeRunConfig:
    """Options of a call, or a model's defaults for its calls; None inherits.

    requires_grad: whether a forward call keeps what backward needs. Default: torch's grad mode.
    output_device: where outputs are handed over. Default: the CPU.
    preserve_rng_state: recomputation draws the random numbers of the forward pass again. Default: True.
    recompute_grain: "stage" (default) or "layer" (less memory, more transfers).
    num_microbatch: pieces the batch is cut into. Default: devices in the pool + 1.
    split_input, split_label, merge_output: specs or functions; see `roundpipe.microbatch`.
    execute_plan: which layers form stages. Default: planned from measured times.
    keep_logits: whether a model that computes its own loss returns its logits. Default: unless forward_backward is
        called for the loss alone and they would take more memory than is set for them (512 MB a microbatch).
    whole_batch_loss: let the loss that a model computes itself be the loss of the whole call, the mean over all
        counted labels, however the call is cut. Default: True in a call without loss_fn; in a call with one, the
        loss_fn sees the loss of its microbatch alone. False adds up the losses of the microbatches.
    loss_reduction: how the results of loss_fn are put together: "sum" (default) adds them, "mean" weighs each
        microbatch by its share of the batch's rows, so that means over rows become the mean over the batch.
    """

    requires_grad: bool | None = None
    output_device: torch.device | str | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: str | None = None
    num_microbatch: int | None = None
    split_input: Any = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: ModelExecutePlan | None = None
    keep_logits: bool | None = None
    whole_batch_loss: bool | None = None
    loss_reduction: str | None = None

    def __post_init__(self) -> None:
        _check_bool("keep_logits", self.keep_logits)
        _check_bool("whole_batch_loss", self.whole_batch_loss)
        _check_bool("requires_grad", self.requires_grad)
        _check_bool("preserve_rng_state", self.preserve_rng_state)
        if self.output_device is not None:
            _to_device(self.output_device)
        if self.recompute_grain is not None:
            _to_grain(self.recompute_grain)
        if self.num_microbatch is not None:
            _check_num_microbatch(self.num_microbatch)
        if self.loss_reduction is not None:
            _to_reduction(self.loss_reduction)
        if self.execute_plan is not None and not isinstance(self.execute_plan, ModelExecutePlan):
            raise ArgumentTypeError(
                f"execute_plan must be a ModelExecutePlan or None, got {type(self.execute_plan).__name__}."
            )

    def over(self, base: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """This overlay where it says something, `base` elsewhere."""
        fields = [field.name for field in dataclasses.fields(self)]
        own = {name: getattr(self, name) for name in fields}
        return RoundPipeRunConfig(**{k: getattr(base, k) if v is None else v for k, v in own.items()})


@dataclasses.dataclass(frozen=True)
class ResolvedRunConfig:
    """Every option decided."""

    requires_grad: bool
    output_device: torch.device
    preserve_rng_state: bool
    recompute_grain: RecomputeGrain
    num_microbatch: int
    split_input: Any
    split_label: Any
    merge_output: Any
    execute_plan: ModelExecutePlan | None
    keep_logits: bool | None = None  # None: as the call needs them
    whole_batch_loss: bool | None = None  # None: in calls without loss_fn
    loss_reduction: LossReduction = LossReduction.SUM


def resolve(call: RoundPipeRunConfig, model: RoundPipeRunConfig, num_devices: int) -> ResolvedRunConfig:
    """Call level over model level over default, field by field."""
    if not isinstance(call, RoundPipeRunConfig):
        raise ArgumentTypeError(f"a run config must be a RoundPipeRunConfig, got {type(call).__name__}.")
    chosen = call.over(model)
    return ResolvedRunConfig(
        requires_grad=_default(chosen.requires_grad, torch.is_grad_enabled),
        output_device=_to_device(_default(chosen.output_device, lambda: "cpu")),
        preserve_rng_state=_default(chosen.preserve_rng_state, lambda: True),
        recompute_grain=_to_grain(_default(chosen.recompute_grain, lambda: "stage")),
        num_microbatch=_default(chosen.num_microbatch, lambda: num_devices + 1),
        split_input=chosen.split_input,
        split_label=chosen.split_label,
        merge_output=chosen.merge_output,
        execute_plan=chosen.execute_plan,
        keep_logits=chosen.keep_logits,
        whole_batch_loss=chosen.whole_batch_loss,
        loss_reduction=_to_reduction(_default(chosen.loss_reduction, lambda: "sum")),
    )


def _default(value: Any, default: Callable[[], Any]) -> Any:
    return default() if value is None else value


def _check_bool(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True, False or None, got {value!r}.")


def _check_num_microbatch(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"num_microbatch must be an int or None, got {value!r}.")
    if value < 1:
        raise ConfigError(f"num_microbatch must be at least 1, got {value}.")


def _to_grain(value: object) -> RecomputeGrain:
    try:
        return RecomputeGrain(value)
    except ValueError:
        raise ConfigError(f'recompute_grain must be "stage" or "layer", got {value!r}.') from None


def _to_reduction(value: object) -> LossReduction:
    try:
        return LossReduction(value)
    except ValueError:
        raise ConfigError(
            'loss_reduction must be "sum", which adds the losses of the microbatches, or "mean", which weighs each by '
            f"its share of the batch's rows, got {value!r}."
        ) from None


def _to_device(value: torch.device | str) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f'output_device={value!r} is not a device; give "cpu", "cuda:0" or a torch.device.'
        ) from error
