"""Run options: a user's overlay of optional fields, and the resolved config in which every option has a value.

A RoundPipeRunConfig is validated when the user constructs it. Configs derived from validated ones are not checked
again. Knows no inputs and no layers: each call checks its split specs and execute plans against them.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.plan import ModelExecutePlan


class RecomputeGrain(enum.Enum):
    """How many layers the backward pass recomputes at a time: a whole stage, or one layer after the other."""

    STAGE = "stage"
    LAYER = "layer"


class LossReduction(enum.Enum):
    """How the losses of the microbatches are combined into one loss."""

    SUM = "sum"
    MEAN = "mean"


@dataclasses.dataclass(frozen=True)
class RoundPipeRunConfig:
    """Options of a call, or a model's defaults for its calls.

    A field that is None in a call's config is taken from the model's config, then from the defaults below.

    requires_grad: whether a forward call keeps what backward needs. Default: torch's grad mode.
    output_device: the device of the outputs. Default: the CPU.
    preserve_rng_state: recomputation repeats the random numbers of the forward pass. Default: True.
    recompute_grain: "stage" (default) or "layer" (less memory, more transfers).
    num_microbatch: number of microbatches per call. Default: devices in the pool + 1.
    split_input, split_label, merge_output: specs or functions; see `roundpipe.microbatch`.
    execute_plan: which layers form stages. Default: planned from measured times.
    keep_logits: whether a model that computes its own loss returns its logits. Default: True, except in
        forward_backward calls that ask for the loss only, if the logits of a microbatch exceed 512 MB.
    whole_batch_loss: whether the loss that a model computes itself is the loss of the whole call: the mean over all
        counted labels, independent of the number of microbatches. False adds up the losses of the microbatches.
        Default: True in calls without loss_fn; a loss_fn receives the loss of its microbatch alone.
    loss_reduction: how the results of loss_fn are combined. "sum" (default) adds them. "mean" weights each microbatch
        by its share of the batch's rows, so that means over rows become the mean over the batch.
    """

    requires_grad: bool | None = None
    output_device: torch.device | str | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: str | None = None
    num_microbatch: int | None = None
    # The content of specs and plans is checked in each call: they are mutable, and a plan must match its model.
    split_input: Any = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: ModelExecutePlan | None = None
    keep_logits: bool | None = None
    whole_batch_loss: bool | None = None
    loss_reduction: str | None = None

    def __post_init__(self) -> None:
        for name in ("keep_logits", "whole_batch_loss", "requires_grad", "preserve_rng_state"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ArgumentTypeError(f"{name} must be True, False or None, got {value!r}.")
        # torch.device only parses the name; whether the device exists is checked in each call.
        if self.output_device is not None:
            try:
                torch.device(self.output_device)
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f'output_device={self.output_device!r} is not a device; give "cpu", "cuda:0" or a torch.device.'
                ) from error
        if self.recompute_grain is not None and not _is_member(self.recompute_grain, RecomputeGrain):
            raise ConfigError(f'recompute_grain must be "stage" or "layer", got {self.recompute_grain!r}.')
        if self.loss_reduction is not None and not _is_member(self.loss_reduction, LossReduction):
            raise ConfigError(
                'loss_reduction must be "sum", which adds the losses of the microbatches, or "mean", which weights '
                f"each by its share of the batch's rows, got {self.loss_reduction!r}."
            )
        if self.num_microbatch is not None:
            # bool is a subclass of int.
            if not isinstance(self.num_microbatch, int) or isinstance(self.num_microbatch, bool):
                raise ArgumentTypeError(f"num_microbatch must be an int or None, got {self.num_microbatch!r}.")
            if self.num_microbatch < 1:
                raise ConfigError(f"num_microbatch must be at least 1, got {self.num_microbatch}.")
        if self.execute_plan is not None and not isinstance(self.execute_plan, ModelExecutePlan):
            raise ArgumentTypeError(
                f"execute_plan must be a ModelExecutePlan or None, got {type(self.execute_plan).__name__}."
            )

    def over(self, base: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """Return a config with this config's fields; a field that is None here comes from `base`."""
        # Both configs are validated, so the result skips the constructor and its checks.
        overlay = object.__new__(RoundPipeRunConfig)
        for name in RoundPipeRunConfig.__dataclass_fields__:
            value = getattr(self, name)
            object.__setattr__(overlay, name, getattr(base, name) if value is None else value)
        return overlay


def _is_member(value: object, kind: type[enum.Enum]) -> bool:
    """Return whether `value` is a member of an enum or the value of one."""
    try:
        kind(value)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class ResolvedRunConfig:
    """The options of one call after applying the model's config and the defaults."""

    requires_grad: bool
    output_device: torch.device
    preserve_rng_state: bool
    recompute_grain: RecomputeGrain
    num_microbatch: int
    split_input: Any
    split_label: Any
    merge_output: Any
    execute_plan: ModelExecutePlan | None
    keep_logits: bool | None = None  # None: each call decides by the size of its logits
    whole_batch_loss: bool | None = None  # None: True in calls without loss_fn
    loss_reduction: LossReduction | None = None  # None: never set; losses are added


def resolve(call: RoundPipeRunConfig, model: RoundPipeRunConfig, num_devices: int) -> ResolvedRunConfig:
    """Return the options of one call: the call's config over the model's config over the defaults."""
    if not isinstance(call, RoundPipeRunConfig):
        raise ArgumentTypeError(f"a run config must be a RoundPipeRunConfig, got {type(call).__name__}.")
    chosen = call.over(model)
    return ResolvedRunConfig(
        requires_grad=torch.is_grad_enabled() if chosen.requires_grad is None else chosen.requires_grad,
        output_device=torch.device("cpu" if chosen.output_device is None else chosen.output_device),
        preserve_rng_state=chosen.preserve_rng_state is not False,  # None means True
        recompute_grain=RecomputeGrain(chosen.recompute_grain or RecomputeGrain.STAGE),
        # With one more microbatch than devices, no device waits for the others in balanced schedules.
        num_microbatch=chosen.num_microbatch or num_devices + 1,
        split_input=chosen.split_input,
        split_label=chosen.split_label,
        merge_output=chosen.merge_output,
        execute_plan=chosen.execute_plan,
        keep_logits=chosen.keep_logits,
        whole_batch_loss=chosen.whole_batch_loss,
        loss_reduction=None if chosen.loss_reduction is None else LossReduction(chosen.loss_reduction),
    )
