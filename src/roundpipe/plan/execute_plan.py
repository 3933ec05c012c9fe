"""The execute plan (which layers run together as one stage) and the schedule of stage tasks that it becomes.

Also validates plans, balances them for `ModelExecutePlan.auto`, and deals tasks to devices. Knows layers by number and
their costs; knows no microbatches and no tensors.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn, assert_never, overload

from roundpipe.errors import ArgumentTypeError, ConfigError, PlanError
from roundpipe.plan.cost import ModelProfile, Plannable
from roundpipe.plan.partition import KindPacker, PassPacker, balance, single_layers

__all__ = ["ModelExecutePlan", "RunType"]

BYTES_PER_GB = 1e9


class RunType(enum.Enum):
    """How a model is run. It decides which layers an execute plan must cover.

    ``INFER``: forward only. ``TRAIN``: forward, and backward in a later call. ``FUSED``: forward, loss and backward in
    one call.
    """

    INFER = "infer"
    TRAIN = "train"
    FUSED = "fused"


def _as_run_type(value: object) -> RunType:
    """Return the run type for a value that a user passed: an enum member or its string."""
    if isinstance(value, RunType):
        return value
    if not isinstance(value, str):
        raise ArgumentTypeError(f"run_type must be a str or RunType, not {type(value).__name__} ({value!r})")
    try:
        return RunType(value)
    except ValueError:
        known = ", ".join(repr(run_type.value) for run_type in RunType)
        raise PlanError(f"unknown run type {value!r}; use one of {known}") from None


class ModelExecutePlan:
    """The stages of a model as two lists of layer ranges.

    ``fwd_plan`` runs from the first layers to the last, ``bwd_plan`` from the last to the first. Inside a range layers
    ascend. The run type decides how the lists are used. ``infer`` uses ``fwd_plan`` only. ``train`` needs both lists
    over all layers. In ``fused``, ``bwd_plan[0]`` is the fused stage: it starts where ``fwd_plan`` ends and runs
    forward, loss and backward of the last layers together. The other ranges of ``bwd_plan`` run backward only.
    """

    __hash__ = None  # type: ignore[assignment]  # users may change the lists

    def __init__(self, fwd_plan: Iterable[range] = (), bwd_plan: Iterable[range] = ()) -> None:
        for name, plan in (("fwd_plan", fwd_plan), ("bwd_plan", bwd_plan)):
            if not isinstance(plan, Iterable):
                raise ArgumentTypeError(f"{name} must be a list of ranges, such as [range(0, 3)], got {plan!r}")
        self.fwd_plan = list(fwd_plan)
        self.bwd_plan = list(bwd_plan)

    @classmethod
    def layer_by_layer(cls, num_layers: int, run_type: RunType) -> ModelExecutePlan:
        """Return the plan with one layer per stage: it needs the least device memory of all plans.

        The fused stage of ``FUSED`` is the last layer. ``INFER`` has an empty ``bwd_plan``.
        """
        layers = single_layers(range(num_layers))
        match run_type:
            case RunType.INFER:
                return cls(layers)
            case RunType.TRAIN:
                return cls(layers, reversed(layers))
            case RunType.FUSED:
                return cls(layers[:-1], reversed(layers))
            case _:
                assert_never(run_type)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelExecutePlan):
            return NotImplemented
        return self.fwd_plan == other.fwd_plan and self.bwd_plan == other.bwd_plan

    def __repr__(self) -> str:
        return f"ModelExecutePlan(fwd_plan={self.fwd_plan}, bwd_plan={self.bwd_plan})"

    def check_valid(self, num_layers: int, run_type: str | RunType) -> None:
        """Raise a `PlanError` that names the first fault if this plan cannot run a model with ``num_layers`` layers."""
        kind = _as_run_type(run_type)
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            raise ArgumentTypeError(f"num_layers must be an int, not {type(num_layers).__name__} ({num_layers!r})")
        if num_layers < 1:
            raise PlanError(f"a plan needs a model with at least 1 layer, not {num_layers}")
        # The order of the checks decides which fault is named first: form, emptiness, then coverage.
        if kind is RunType.FUSED:
            self._check_fused(num_layers)
            return
        _check_form("fwd_plan", self.fwd_plan, num_layers)
        if not self.fwd_plan:
            raise PlanError(f"fwd_plan is empty; give the forward stages, e.g. [range(0, {num_layers})]")
        _check_cover("fwd_plan", self.fwd_plan, range(num_layers), _Order.ASCENDING)
        if kind is RunType.TRAIN:
            _check_form("bwd_plan", self.bwd_plan, num_layers)
            if not self.bwd_plan:
                raise PlanError(f"bwd_plan is empty; give the backward stages, e.g. [range(0, {num_layers})]")
            _check_cover("bwd_plan", self.bwd_plan, range(num_layers), _Order.DESCENDING)

    def _check_fused(self, num_layers: int) -> None:
        """Raise a `PlanError` unless this is a plan for ``FUSED``: see the docstring of the class."""
        _check_form("fwd_plan", self.fwd_plan, num_layers)
        # The fused stage takes all layers that come after those of fwd_plan.
        fused_start = self.fwd_plan[-1].stop if self.fwd_plan else 0
        _check_cover("fwd_plan", self.fwd_plan, range(fused_start), _Order.ASCENDING)
        if fused_start == num_layers:
            raise PlanError(
                f"fwd_plan ends at layer {num_layers - 1}, the last one, and leaves none for the fused stage; "
                "end it earlier, it may be empty"
            )
        _check_form("bwd_plan", self.bwd_plan, num_layers)
        fused = range(fused_start, num_layers)
        if not self.bwd_plan:
            raise PlanError(f"bwd_plan is empty; its first range must be the fused stage {fused}")
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
        _check_cover("bwd_plan", self.bwd_plan, range(num_layers), _Order.DESCENDING)

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
        """Return a plan for one model, or a list of plans for several models, balanced to one stage time.

        No stage is slower than ``upper_threshold`` times max(slowest layer, total / ``min_stages``). Among such plans
        this returns the one with the fewest stages (at least ``min_stages``, if there are enough layers), then the one
        with the fastest slowest stage.

        min_stages: default is the number of devices. It counts the stages of all models in one pass. ``train`` has
            a forward pass and a backward pass, ``fused`` has one pass.
        model_memory_limit: GB (1e9 bytes) of weights in one stage; in backward stages of weights and gradients. By
            default a stage uses up to half of the device, because the next stage's weights arrive while it computes;
            a larger single layer still gets a stage.
        """
        kind = _as_run_type(run_type)
        profiles = _profiles(models)
        num_stages = _min_stages(min_stages, profiles)
        _check_number("upper_threshold", upper_threshold)
        if upper_threshold < 1:
            raise ConfigError(
                f"upper_threshold must be at least 1, not {upper_threshold}: stages cannot be faster than their lower "
                "bound"
            )
        limits = _limits_bytes(kind, profiles, model_memory_limit)
        # Indexed as packers_of[model][pass].
        packers_of = [_packers(kind, profile, limit) for profile, limit in zip(profiles, limits, strict=True)]
        # Each pass is balanced separately: stages of the forward pass of ``train`` never run beside backward stages.
        passes = [balance(packers, num_stages, upper_threshold) for packers in zip(*packers_of, strict=True)]
        plans = [
            cls(
                [layers for partition in partitions for layers in partition.fwd],
                [layers for partition in partitions for layers in partition.bwd_plan],
            )
            for partitions in zip(*passes, strict=True)
        ]
        return plans[0] if len(plans) == 1 else plans


class _Order(enum.Enum):
    """The direction in which successive ranges of a list walk over the layers."""

    ASCENDING = "ascending"
    DESCENDING = "descending"


def _check_form(name: str, ranges: object, num_layers: int) -> None:
    """Raise a `PlanError` unless every entry is a non-empty range of step 1 within the model."""
    if not isinstance(ranges, list | tuple):
        raise PlanError(f"{name} must be a list of ranges, not {type(ranges).__name__} ({ranges!r})")
    # Users may assign any object to the lists after construction, so every entry is checked.
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


def _check_cover(name: str, ranges: Sequence[range], layers: range, order: _Order) -> None:
    """Raise a `PlanError` unless the ranges cover every layer of ``layers`` exactly once, in the given order.

    Every range must have passed `_check_form`.
    """
    ascending = order is _Order.ASCENDING
    # All layers before `edge` (in walking order) are covered, none beyond.
    edge = layers.start if ascending else layers.stop
    for position, found in enumerate(ranges):
        beyond = found.start - edge if ascending else edge - found.stop
        if beyond > 0:
            _raise_gap(name, ranges, position, edge if ascending else edge - 1, order)
        if beyond < 0:
            _raise_overlap(name, ranges, position)
        edge = found.stop if ascending else found.start
    end = layers.stop if ascending else layers.start
    if edge != end:
        missing = range(edge, end) if ascending else range(end, edge)
        raise PlanError(
            f"{name} ends too early: layers {missing.start} to {missing.stop - 1} are in no range; add {missing} at "
            "its end"
        )


def _raise_gap(name: str, ranges: Sequence[range], position: int, expected: int, order: _Order) -> NoReturn:
    """Raise a `PlanError`: ``ranges[position]`` does not continue with layer ``expected``."""
    where = f"{name}[{position}] = {ranges[position]}"
    # A layer that appears in a later range is not missing, so the ranges are in the wrong order.
    if any(expected in later for later in ranges[position + 1 :]):
        ascending = order is _Order.ASCENDING
        direction = "from the first layers to the last" if ascending else "from the last layers to the first"
        raise PlanError(
            f"{where} is in the wrong order: layer {expected} comes after it; {name} must be {order.value}, {direction}"
        )
    raise PlanError(f"{where} leaves a hole: layer {expected} is in no range before it; every layer must appear once")


def _raise_overlap(name: str, ranges: Sequence[range], position: int) -> NoReturn:
    """Raise a `PlanError`: ``ranges[position]`` contains a layer of an earlier range."""
    found = ranges[position]
    earlier = next(place for place in range(position) if set(found) & set(ranges[place]))
    twice = min(set(found) & set(ranges[earlier]))
    raise PlanError(
        f"{name}[{position}] = {found} overlaps {name}[{earlier}] = {ranges[earlier]}: layer {twice} appears twice; "
        "every layer must appear once"
    )


def _profiles(models: Sequence[Plannable]) -> list[ModelProfile]:
    if not models:
        raise ConfigError("auto needs at least one model: ModelExecutePlan.auto(run_type, model)")
    return [_profile(number, model) for number, model in enumerate(models)]


def _profile(number: int, model: object) -> ModelProfile:
    """Return the profile of model ``number``, or raise if it is not a RoundPipe."""
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
    """Return the checked ``min_stages``, by default the largest number of devices."""
    if min_stages is None:
        return max(profile.num_devices for profile in profiles)
    # bool is a subclass of int.
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


def _limits_bytes(run_type: RunType, profiles: Sequence[ModelProfile], limit_gb: float | None) -> list[float]:
    """Return the bytes that one stage of each model may hold.

    A limit from the user is strict: a layer above it is an error. The default limit, half of the device, is an
    estimate: a layer above it gets its own stage.
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
        for layer_id, cost in enumerate(profile.layers):
            layer_bytes = cost.weight_bytes + (0 if run_type is RunType.INFER else cost.grad_bytes)
            if layer_bytes > limit_bytes:
                raise PlanError(
                    f"layer {layer_id} of model {number} alone has {layer_bytes} bytes, more than model_memory_limit = "
                    f"{limit_gb:g} GB ({limit_bytes:.0f} bytes); raise the limit or split the layer"
                )
    return [limit_bytes] * len(profiles)


def _packers(run_type: RunType, profile: ModelProfile, limit_bytes: float) -> list[PassPacker]:
    """Return one packer per pass of the run type."""
    layers = profile.layers
    # Forward stages hold weights; fused and backward stages also hold gradients.
    forward_fits = _size_fits((cost.weight_bytes for cost in layers), limit_bytes)
    backward_fits = _size_fits((cost.weight_bytes + cost.grad_bytes for cost in layers), limit_bytes)
    fwd = KindPacker.of((cost.forward_s for cost in layers), forward_fits)
    fused = KindPacker.of((cost.fused_s for cost in layers), backward_fits)
    bwd = KindPacker.of((cost.recompute_backward_s for cost in layers), backward_fits)
    match run_type:
        case RunType.INFER:
            return [PassPacker(len(layers), fwd=fwd)]
        case RunType.TRAIN:
            return [PassPacker(len(layers), fwd=fwd), PassPacker(len(layers), bwd=bwd)]
        case RunType.FUSED:
            return [PassPacker(len(layers), fwd, fused, bwd)]
        case _:
            assert_never(run_type)


def _size_fits(layer_bytes: Iterable[int], limit_bytes: float) -> Callable[[range], bool]:
    """Return a function that says whether a range of layers has at most ``limit_bytes``."""
    prefix = (0, *accumulate(layer_bytes))
    return lambda layers: prefix[layers.stop] - prefix[layers.start] <= limit_bytes


class TaskKind(enum.Enum):
    """What a task computes. ``FUSED``: forward, loss and backward. ``BACKWARD``: recomputation and backward."""

    FORWARD = "F"
    FUSED = "FB"
    BACKWARD = "B"


@dataclass(frozen=True)
class StageTask:
    """One stage that one device runs for all microbatches of a call. ``index`` is its place in the schedule."""

    kind: TaskKind
    index: int
    layers: range

    @functools.cached_property
    def name(self) -> str:
        """The name of the task, such as F0, FB3 or B7. Cached, because every microbatch records it."""
        return f"{self.kind.value}{self.index}"

    def __str__(self) -> str:
        return self.name


def build_schedule(plan: ModelExecutePlan, run_type: RunType) -> tuple[StageTask, ...]:
    """Return the tasks of a valid plan in running order, such as F0, F1, FB2, B3, B4."""
    match run_type:
        case RunType.INFER:
            return number_tasks(fwd=plan.fwd_plan)
        case RunType.TRAIN:
            return number_tasks(fwd=plan.fwd_plan, bwd=plan.bwd_plan)
        case RunType.FUSED:  # the first range of bwd_plan is the fused stage
            return number_tasks(fwd=plan.fwd_plan, fused=plan.bwd_plan[:1], bwd=plan.bwd_plan[1:])
        case _:
            assert_never(run_type)


def number_tasks(
    *, fwd: Iterable[range] = (), fused: Iterable[range] = (), bwd: Iterable[range] = ()
) -> tuple[StageTask, ...]:
    """Return forward, fused and backward stages as one numbered schedule; each list is in running order."""
    stages = [(TaskKind.FORWARD, layers) for layers in fwd]
    stages += [(TaskKind.FUSED, layers) for layers in fused]
    stages += [(TaskKind.BACKWARD, layers) for layers in bwd]
    return tuple(StageTask(kind, index, layers) for index, (kind, layers) in enumerate(stages))


def deal(tasks: Sequence[StageTask], first_device: int, num_devices: int) -> tuple[int, ...]:
    """Return the device index of each task: round-robin, starting with ``first_device``."""
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    return tuple((first_device + position) % num_devices for position in range(len(tasks)))
