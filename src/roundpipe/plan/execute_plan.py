"""The execute plan: which layers run together as one stage, forward and backward.

Written by users or by the planner, checked by the api before every use. Knows layers by number; knows no devices and
no microbatches.

The three ways a model is run; they decide what an execute plan must cover.

Used by everything in plan and by the api. Knows no plans and no models.

Checks a list of layer ranges: form first, then order and coverage. The first fault becomes a PlanError.

Called by plan.execute_plan. Knows lists of ranges, never run types or whole plans.

The work behind `ModelExecutePlan.auto`: checks its arguments and balances several models together.

Called by plan.execute_plan only. Knows profiles and partitions; hands back plain lists of ranges.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NoReturn, assert_never, overload

from roundpipe.errors import ArgumentTypeError, ConfigError, PlanError
from roundpipe.plan.cost import LayerCost, ModelProfile, Plannable
from roundpipe.plan.partition import Packer, balance, make_line


class RunType(enum.Enum):
    """``INFER``: forward only. ``TRAIN``: forward, later backward. ``FUSED``: forward, loss, backward in one call."""

    INFER = "infer"
    TRAIN = "train"
    FUSED = "fused"


def as_run_type(value: object) -> RunType:
    """The run type that a user named by string or enum."""
    if isinstance(value, RunType):
        return value
    if not isinstance(value, str):
        raise ArgumentTypeError(f"run_type must be a str or RunType, not {type(value).__name__} ({value!r})")
    try:
        return RunType(value)
    except ValueError:
        known = ", ".join(repr(run_type.value) for run_type in RunType)
        raise PlanError(f"unknown run type {value!r}; use one of {known}") from None


class Order(enum.Enum):
    """The way in which successive ranges walk over the layers (inside a range layers always ascend)."""

    ASCENDING = "ascending"
    DESCENDING = "descending"


def check_form(name: str, ranges: object, num_layers: int) -> None:
    """Every entry is a non-empty range of step 1 within the model."""
    if not isinstance(ranges, list | tuple):
        raise PlanError(f"{name} must be a list of ranges, not {type(ranges).__name__} ({ranges!r})")
    for position, layers in enumerate(ranges):
        where = f"{name}[{position}]"
        if not isinstance(layers, range):
            raise PlanError(
                f"{where} must be a range, not {type(layers).__name__} ({layers!r}); write e.g. range(0, {num_layers})"
            )
        if layers.step != 1:
            raise PlanError(f"{where} = {layers} has step {layers.step}; ranges ascend by 1")
        if not layers:
            raise PlanError(f"{where} = {layers} is empty; remove it or give it a layer")
        if layers.start < 0 or layers.stop > num_layers:
            raise PlanError(f"{where} = {layers} is out of bounds; the model has layers 0 to {num_layers - 1}")


def check_cover(name: str, ranges: Sequence[range], layers: range, order: Order) -> None:
    """Every layer of ``layers`` exactly once, in the given order. Expects a good form, and ranges that stay within.

    ``edge`` is the boundary that the walk has reached: all layers on its near side are covered, none beyond.
    """
    ascending = order is Order.ASCENDING
    edge = layers.start if ascending else layers.stop
    for position, found in enumerate(ranges):
        beyond = found.start - edge if ascending else edge - found.stop
        if beyond > 0:
            _raise_gap(name, ranges, position, edge if ascending else edge - 1, order)
        if beyond < 0:
            _raise_overlap(name, ranges, position)
        edge = found.stop if ascending else found.start
    _check_end(name, edge, layers, order)


def _raise_gap(name: str, ranges: Sequence[range], position: int, expected: int, order: Order) -> NoReturn:
    where = f"{name}[{position}] = {ranges[position]}"
    if any(expected in later for later in ranges[position + 1 :]):
        raise PlanError(
            f"{where} is in the wrong order: layer {expected} comes after it; "
            f"{name} must be {order.value}, {_hint(order)}"
        )
    raise PlanError(f"{where} leaves a hole: layer {expected} is in no range before it; every layer must appear once")


def _raise_overlap(name: str, ranges: Sequence[range], position: int) -> NoReturn:
    found = ranges[position]
    earlier = next(place for place in range(position) if set(found) & set(ranges[place]))
    twice = min(set(found) & set(ranges[earlier]))
    raise PlanError(
        f"{name}[{position}] = {found} overlaps {name}[{earlier}] = {ranges[earlier]}: layer {twice} appears twice; "
        "every layer must appear once"
    )


def _check_end(name: str, edge: int, layers: range, order: Order) -> None:
    end = layers.stop if order is Order.ASCENDING else layers.start
    if edge == end:
        return
    missing = range(edge, end) if order is Order.ASCENDING else range(end, edge)
    raise PlanError(
        f"{name} ends too early: layers {missing.start} to {missing.stop - 1} are in no range; add {missing} at its end"
    )


def _hint(order: Order) -> str:
    if order is Order.ASCENDING:
        return "from the first layers to the last"
    return "from the last layers to the first"


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


__all__ = ["ModelExecutePlan", "RunType"]


class ModelExecutePlan:
    """Two lists of ascending ranges: ``fwd_plan`` from the first layers to the last, ``bwd_plan`` the other way.

    ``infer`` needs the forward list only, ``train`` both over all layers. ``fused``: ``bwd_plan[0]`` continues where
    ``fwd_plan`` ends and runs forward, loss and backward of the last layers together; the others run backward only.
    """

    __hash__ = None  # type: ignore[assignment]  # the lists are the user's to change

    def __init__(self, fwd_plan: Iterable[range] = (), bwd_plan: Iterable[range] = ()) -> None:
        for name, plan in (("fwd_plan", fwd_plan), ("bwd_plan", bwd_plan)):
            if not isinstance(plan, Iterable):
                raise ArgumentTypeError(f"{name} must be a list of ranges, such as [range(0, 3)], got {plan!r}")
        self.fwd_plan = list(fwd_plan)
        self.bwd_plan = list(bwd_plan)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelExecutePlan):
            return NotImplemented
        return self.fwd_plan == other.fwd_plan and self.bwd_plan == other.bwd_plan

    def __repr__(self) -> str:
        return f"ModelExecutePlan(fwd_plan={self.fwd_plan}, bwd_plan={self.bwd_plan})"

    def check_valid(self, num_layers: int, run_type: str | RunType) -> None:
        """Raises a `PlanError` that names the first fault, if the plan cannot run a model of so many layers."""
        kind = as_run_type(run_type)
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            raise ArgumentTypeError(f"num_layers must be an int, not {type(num_layers).__name__} ({num_layers!r})")
        if num_layers < 1:
            raise PlanError(f"a plan needs a model with at least 1 layer, not {num_layers}")
        match kind:
            case RunType.INFER:
                self._check_forward(num_layers)
            case RunType.TRAIN:
                self._check_forward(num_layers)
                self._check_backward(num_layers)
            case RunType.FUSED:
                self._check_fused(num_layers)
            case _:
                assert_never(kind)

    def _check_forward(self, num_layers: int) -> None:
        check_form("fwd_plan", self.fwd_plan, num_layers)
        if not self.fwd_plan:
            raise PlanError(f"fwd_plan is empty; give the forward stages, e.g. [range(0, {num_layers})]")
        check_cover("fwd_plan", self.fwd_plan, range(num_layers), Order.ASCENDING)

    def _check_backward(self, num_layers: int) -> None:
        check_form("bwd_plan", self.bwd_plan, num_layers)
        if not self.bwd_plan:
            raise PlanError(f"bwd_plan is empty; give the backward stages, e.g. [range(0, {num_layers})]")
        check_cover("bwd_plan", self.bwd_plan, range(num_layers), Order.DESCENDING)

    def _check_fused(self, num_layers: int) -> None:
        check_form("fwd_plan", self.fwd_plan, num_layers)
        fused_start = self.fwd_plan[-1].stop if self.fwd_plan else 0
        check_cover("fwd_plan", self.fwd_plan, range(fused_start), Order.ASCENDING)
        if fused_start == num_layers:
            raise PlanError(
                f"fwd_plan ends at layer {num_layers - 1}, the last one, and leaves none for the fused stage; "
                "end it earlier, it may be empty"
            )
        check_form("bwd_plan", self.bwd_plan, num_layers)
        fused = range(fused_start, num_layers)
        if not self.bwd_plan:
            raise PlanError(f"bwd_plan is empty; its first range must be the fused stage {fused}")
        self._check_fused_stage(fused)
        check_cover("bwd_plan", self.bwd_plan, range(num_layers), Order.DESCENDING)

    def _check_fused_stage(self, fused: range) -> None:
        found = self.bwd_plan[0]
        if found.stop != fused.stop:
            raise PlanError(
                f"bwd_plan[0] = {found} is the fused stage and must end with the last layer, {fused.stop - 1}: "
                f"use {fused}"
            )
        if found.start != fused.start:
            raise PlanError(
                f"bwd_plan[0] = {found} is the fused stage and must start where fwd_plan ends, at layer {fused.start}: "
                f"use {fused}"
            )

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str | RunType,
        model: Plannable,
        /,
        *,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan: ...

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str | RunType,
        *models: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]: ...

    @classmethod
    def auto(
        cls,
        run_type: str | RunType,
        *models: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]:
        """One plan for one model, a list for several, balanced together to one target stage time.

        No stage takes longer than ``upper_threshold`` times max(slowest layer, total / ``min_stages``). Among such
        plans: the fewest stages (``min_stages`` at least, if the layers suffice), then the shortest slowest stage.
        ``min_stages`` (default: the number of devices) counts all models together, in one pass: ``train`` has a forward
        and a backward pass, ``fused`` a single one. ``model_memory_limit``: GB (1e9 bytes) of weights, in backward
        stages also gradients, in one stage. Without it a stage takes up to half the device, where layers allow: the
        next stage's weights arrive while one computes.
        """
        lists = balanced_lists(
            as_run_type(run_type),
            models,
            min_stages=min_stages,
            upper_threshold=upper_threshold,
            model_memory_limit=model_memory_limit,
        )
        plans = [cls(fwd_plan, bwd_plan) for fwd_plan, bwd_plan in lists]
        return plans[0] if len(plans) == 1 else plans
