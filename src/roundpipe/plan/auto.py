"""The work behind `ModelExecutePlan.auto`: checks its arguments and balances several models together.

Called by plan.execute_plan only. Knows profiles and partitions; hands back plain lists of ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import assert_never

from roundpipe.errors import ArgumentTypeError, ConfigError, PlanError
from roundpipe.plan.cost import LayerCost, ModelProfile, Plannable
from roundpipe.plan.partition import Packer, balance, make_line
from roundpipe.plan.run_type import RunType

BYTES_PER_GB = 1e9

PlanLists = tuple[list[range], list[range]]
"""The forward and the backward list of one plan."""


def balanced_lists(
    run_type: RunType,
    models: Sequence[Plannable],
    *,
    min_stages: int | None,
    upper_threshold: float,
    model_memory_limit: float | None,
) -> list[PlanLists]:
    """The lists of each model's plan. Each pass (forward and backward of ``train`` are two) is balanced by itself:
    its stages never run beside those of the other pass."""
    profiles = _profiles(models)
    num_stages = _min_stages(min_stages, profiles)
    _check_upper_threshold(upper_threshold)
    limits = _limits_bytes(run_type, profiles, model_memory_limit)
    packers_of = [_packers(run_type, profile, limit) for profile, limit in zip(profiles, limits, strict=True)]
    passes = [balance(packers, num_stages, upper_threshold) for packers in zip(*packers_of, strict=True)]
    return [
        ([layers for cut in cuts for layers in cut.fwd], [layers for cut in cuts for layers in cut.bwd_plan])
        for cuts in zip(*passes, strict=True)
    ]


def _profiles(models: Sequence[Plannable]) -> list[ModelProfile]:
    if not models:
        raise ConfigError("auto needs at least one model: ModelExecutePlan.auto(run_type, model)")
    return [_profile(number, model) for number, model in enumerate(models)]


def _profile(number: int, model: object) -> ModelProfile:
    planning_profile = getattr(model, "planning_profile", None)
    if not callable(planning_profile):
        raise ArgumentTypeError(f"model {number} must be a RoundPipe, not {type(model).__name__}; wrap it first")
    profile = planning_profile()
    if not isinstance(profile, ModelProfile):
        raise ArgumentTypeError(
            f"planning_profile() of model {number} must return a ModelProfile, not {type(profile).__name__}"
        )
    return profile


def _min_stages(min_stages: int | None, profiles: Sequence[ModelProfile]) -> int:
    if min_stages is None:
        return max(profile.num_devices for profile in profiles)
    if isinstance(min_stages, bool) or not isinstance(min_stages, int):
        raise ArgumentTypeError(f"min_stages must be an int, not {type(min_stages).__name__} ({min_stages!r})")
    if min_stages < 1:
        raise ConfigError(f"min_stages must be at least 1, not {min_stages}")
    return min_stages


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name} must be a number, not {type(value).__name__} ({value!r})")
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, not {value}")


def _check_upper_threshold(upper_threshold: float) -> None:
    _check_number("upper_threshold", upper_threshold)
    if upper_threshold < 1:
        raise ConfigError(
            f"upper_threshold must be at least 1, not {upper_threshold}: stages cannot beat their lower bound"
        )


def _limits_bytes(run_type: RunType, profiles: Sequence[ModelProfile], limit_gb: float | None) -> list[float]:
    """The bytes one stage of each model may hold.

    A limit the user gave is strict. The half of the device that stands in for it is an estimate: a layer that is larger
    gets a stage of its own.
    """
    if limit_gb is None:
        return [
            math.inf if profile.memory_limit_bytes is None else profile.memory_limit_bytes / 2 for profile in profiles
        ]
    _check_number("model_memory_limit", limit_gb)
    if limit_gb <= 0:
        raise ConfigError(f"model_memory_limit must be more than 0 GB, not {limit_gb}; leave it out for no limit")
    limit_bytes = limit_gb * BYTES_PER_GB
    for number, profile in enumerate(profiles):
        _check_layers_fit(run_type, number, profile, limit_bytes)
    return [limit_bytes] * len(profiles)


def _check_layers_fit(run_type: RunType, number: int, profile: ModelProfile, limit_bytes: float) -> None:
    for layer_id, cost in enumerate(profile.layers):
        layer_bytes = cost.weight_bytes if run_type is RunType.INFER else _trained_bytes(cost)
        if layer_bytes > limit_bytes:
            raise PlanError(
                f"layer {layer_id} of model {number} alone has {layer_bytes} bytes, more than model_memory_limit = "
                f"{limit_bytes / BYTES_PER_GB:g} GB ({limit_bytes:.0f} bytes); raise the limit or split the layer"
            )


def _trained_bytes(cost: LayerCost) -> int:
    return cost.weight_bytes + cost.grad_bytes


def _packers(run_type: RunType, profile: ModelProfile, limit_bytes: float) -> list[Packer]:
    """One packer a pass."""
    layers = profile.layers
    forward_fits = _size_fits((cost.weight_bytes for cost in layers), limit_bytes)
    backward_fits = _size_fits((_trained_bytes(cost) for cost in layers), limit_bytes)
    fwd = make_line((cost.forward_s for cost in layers), forward_fits)
    fused = make_line((cost.forward_s + cost.backward_s for cost in layers), backward_fits)
    bwd = make_line((cost.recompute_s + cost.backward_s for cost in layers), backward_fits)
    match run_type:
        case RunType.INFER:
            return [Packer(len(layers), fwd=fwd)]
        case RunType.TRAIN:
            return [Packer(len(layers), fwd=fwd), Packer(len(layers), bwd=bwd)]
        case RunType.FUSED:
            return [Packer(len(layers), fwd, fused, bwd)]
        case _:
            assert_never(run_type)


def _size_fits(layer_bytes: Iterable[int], limit_bytes: float) -> Callable[[range], bool]:
    prefix = (0, *accumulate(layer_bytes))
    return lambda layers: prefix[layers.stop] - prefix[layers.start] <= limit_bytes
