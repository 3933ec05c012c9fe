"""Chooses the schedule of each call of one model: the user's plan, or one made from sizes and measured times.

Remembers what finished runs have measured and passes it to `plan`, which decides. Used under the call lock. Knows no
tensor.

[Note: a blind planner]
Where device memory is limited, the planner cannot plan the first training call of a kind: it does not know how large
the activations are. A probe runs the forward of such a call's first microbatch, one layer at a time, and measures the
activations.

A model whose layers are compiled is first rehearsed with microbatches of new shapes: [Note: rehearsals] in
compiled/rehearsals.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from roundpipe.api.calls import Request, Trial
from roundpipe.config import RecomputeGrain
from roundpipe.context import LayerPhase
from roundpipe.optim.native.kernel import measured_rate
from roundpipe.plan import (
    CostModel,
    ModelExecutePlan,
    ModelProfile,
    RunType,
    StageTask,
    TaskKind,
    build_schedule,
    choose_exact_plan,
    choose_plan,
)
from roundpipe.plan.forecast import forecast_step, staying_layers, weight_room_bytes
from roundpipe.plan.overlap import STALE, Overlap, UpdateTiming
from roundpipe.plan.predict import Grain, StageMemory
from roundpipe.progress import phase
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.rng import Ambient
from roundpipe.runtime.run import Costs, LayerSettings, Run
from roundpipe.store import LayerStore

logger = logging.getLogger("roundpipe")
_WORTH_A_CHANGE = 0.95  # a new plan must be predicted to take at most this share of the old plan's time
# Calls between two reviews of a plan; the last number repeats. So reviews come at calls 2, 4, 20, 84, 148 ...
_PAUSES = (1, 2, 16, 64)
_ENOUGH_RUNS = 4  # measured runs after which only the last run before a review of the plan is measured
# After a call has run out of memory, the share of the memory limit for calls of its kind is multiplied by _SHRINK until
# the plan changes, or until the share is below _SMALLEST_SHARE.
_SHRINK, _SMALLEST_SHARE = 0.8, 0.1


class Load(NamedTuple):
    """Key of calls whose layers cost the same: same number and size of microbatches."""

    num_microbatch: int
    size: int
    is_inference: bool = False


_NO_LOAD = Load(0, 0)  # of rehearsals, which measure nothing
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class CallKind:
    """Key of calls that use one plan.

    size: bit length of the number of input elements in a microbatch. Activations and times grow with it.
    timing: when the update of the optimizer step after the call runs.
    """

    run_type: RunType
    num_microbatch: int
    size: int
    grain: Grain
    timing: UpdateTiming
    load: Load

    @classmethod
    def of(cls, run_type: RunType, request: Request, timing: UpdateTiming = STALE) -> CallKind:
        grain: Grain = "layer" if request.config.recompute_grain is RecomputeGrain.LAYER else "stage"
        batches = request.batches
        # An `Arriving` is a leaf; its tensor's shape is known before it has arrived.
        leaves = [getattr(leaf, "value", leaf) for leaf in tree_leaves((batches.args[0], batches.kwargs[0]))]
        num_elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        count, size = len(batches.args), num_elements.bit_length()
        return cls(run_type, count, size, grain, timing, Load(count, size, run_type is RunType.INFER))


class _Planned(NamedTuple):
    """A plan with its schedule."""

    plan: ModelExecutePlan
    tasks: tuple[StageTask, ...]


@dataclasses.dataclass
class _Choice:
    """The plan in use for one kind of call, and the number of calls until it is reviewed."""

    planned: _Planned
    calls_until_review: int = _PAUSES[0]
    num_reviews: int = 0


class _Measured:
    """The costs of the layers, as runs of one load have measured them."""

    def __init__(self, store: LayerStore) -> None:
        self.costs = CostModel(
            [layer.weight_bytes for layer in store.layers],
            [sum(record.weights.nbytes for record in layer.trainable) for layer in store.layers],
        )
        self.num_learned = 0  # number of runs whose measurements are included
        self.layers_left = set(range(len(store.layers)))  # layers whose activation sizes are unknown


class Planner:
    """The plans of one model, by kind of call."""

    def __init__(self, store: LayerStore, pool: DevicePool, name: str) -> None:
        self.number = next(_numbers)  # each division of a model into layers has its planner
        self._store = store
        self._pool = pool
        self._name = name
        self._num_layers = len(store.layers)
        # Parameters that this machine updates. Several machines divide them.
        num_machines = 1 if store.share is None else store.share.size
        self._num_updated = [
            sum(record.param.numel() for record in layer.trainable) / num_machines for layer in store.layers
        ]
        self.limit_bytes: int | None = None  # memory of one device, read anew for each schedule
        self._measured: dict[Load, _Measured] = {}
        self._choices: dict[CallKind, _Choice] = {}
        # Cache of `costs`. Each entry also has the state that it was computed from.
        self._costs: dict[tuple[CallKind, tuple[StageTask, ...]], tuple[Hashable, Costs]] = {}
        self._memory_share: dict[CallKind, float] = {}  # share of the limit, by kinds that ran out of memory
        self._last_kind: CallKind | None = None  # kind of the last call; None if the user gave its plan

    # Planning a call: its schedule and costs.

    def schedule(
        self, kind: CallKind, request: Request, try_out: Callable[[CallKind, Request, Trial], None]
    ) -> tuple[StageTask, ...]:
        """The tasks of a call. `try_out`: runs a trial of the call; see [Note: a blind planner]."""
        if self.limit_bytes is not None or not self._choices:  # no limit at the first call means no limit ever
            self.limit_bytes = self._pool.devices()[0].memory_limit_bytes()
        self._last_kind = None
        for trial in self._rehearsals_of(kind, request):
            with phase(f"{self._name}: compiling its layers for microbatches of new sizes or settings"):
                try_out(kind, request, trial)
        user_plan = request.config.execute_plan
        if user_plan is not None:
            user_plan.check_valid(self._num_layers, kind.run_type)
            return build_schedule(user_plan, kind.run_type)
        if self.is_blind(kind):
            tasks = self._trial_tasks(RunType.INFER if request.loss_fn is None else RunType.FUSED)
            with phase(f"{self._name}: measuring the device memory that its layers take, in a forward pass"):
                try_out(kind, request, Trial(0, tasks, self.costs(kind, tasks)))
        self._last_kind = kind
        choice = self._choices.get(kind)
        if choice is None:
            choice = self._choices[kind] = _Choice(self._best_plan(kind, None))
            return choice.planned.tasks
        choice.calls_until_review -= 1
        if choice.calls_until_review <= 0:
            choice.planned = self._best_plan(kind, choice.planned)
            choice.num_reviews += 1
            choice.calls_until_review = _PAUSES[min(choice.num_reviews, len(_PAUSES) - 1)]
        return choice.planned.tasks

    def costs(self, kind: CallKind, tasks: tuple[StageTask, ...]) -> Costs:
        """The tail, the wave and the weight budget of a schedule, and whether its run is measured."""
        choice = self._choices.get(kind)
        num_learned = self._of(kind.load).num_learned
        known = min(num_learned, _ENOUGH_RUNS)
        # Costs can change only after a run was learned from or the plan was reviewed. Until then the cache is valid.
        state = (
            known,
            choice and choice.num_reviews,
            kind.timing.is_exact and measured_rate() is None,
            self._memory_share.get(kind),
        )
        last_state, costs = self._costs.get((kind, tasks), (None, None))
        if costs is None or last_state != state:
            overlap = self._overlap_of(kind, tasks)
            costs = Costs(kind.load, True, overlap, 0)
            if not self.is_blind(kind):  # a blind planner has no budget: it does not know how much memory is unused
                given = tasks, self._profile(kind.load, kind), overlap, kind.grain
                staying = staying_layers(*given, between_calls=kind.run_type is RunType.INFER)
                costs = dataclasses.replace(costs, weight_room_bytes=weight_room_bytes(*given), staying=staying)
            self._costs[kind, tasks] = state, costs
        # Times that have settled are measured only in the last call before a review.
        is_before_review = choice is not None and choice.calls_until_review == 1
        is_measured = is_before_review or num_learned < _ENOUGH_RUNS
        return costs if is_measured else dataclasses.replace(costs, is_measured=False)

    def is_blind(self, kind: CallKind) -> bool:
        """Whether device memory is limited and the activation sizes of such calls are unknown."""
        if self.limit_bytes is None or kind.run_type is RunType.INFER:
            return False
        return bool(self._of(kind.load).layers_left)

    def _trial_tasks(self, run_type: RunType) -> tuple[StageTask, ...]:
        """The tasks of a trial: a forward pass of one layer per task, which needs the least memory."""
        tasks = build_schedule(ModelExecutePlan.layer_by_layer(self._num_layers, run_type), run_type)
        return tuple(task for task in tasks if task.kind is not TaskKind.BACKWARD)

    def _rehearsals_of(self, kind: CallKind, request: Request) -> Iterator[Trial]:
        """The trials that compile the layers for those microbatches of a call whose shapes or settings are new."""
        if request.compiling is None:
            return
        settings = Ambient.capture(), tuple(LayerSettings.of(layer).key for layer in self._store.layers)
        phase = LayerPhase.INFERENCE if kind.run_type is RunType.INFER else LayerPhase.FUSED
        tasks, costs = self._trial_tasks(RunType.INFER), Costs(_NO_LOAD, False, Overlap(), 0)
        given = [tree_leaves(each) for each in zip(request.batches.args, request.batches.kwargs, strict=True)]
        for rehearsal in request.compiling.missing(settings, phase.value, given):
            yield Trial(rehearsal.microbatch, tasks, costs, phase, rehearsal)

    # Learning from runs.

    def learn(self, run: Run) -> None:
        """Add the measurements of a finished run to the cost estimates."""
        assert isinstance(run.load, Load)
        measured = self._of(run.load)
        measured.num_learned += 1
        for measurement in run.measurements:
            seconds = measurement.end.seconds() - measurement.start.seconds()
            measured.costs.observe(measurement.layer_id, measurement.phase, max(seconds, 0.0))
        for layer_id, (activation_bytes, input_bytes) in run.activation_bytes.items():
            measured.costs.observe_activation(layer_id, activation_bytes, input_bytes)
            measured.layers_left.discard(layer_id)

    def plan_smaller(self) -> bool:
        """Plan later calls of the last call's kind with less memory, because that call ran out of memory.

        Returns whether that is possible.
        """
        kind, self._last_kind = self._last_kind, None
        choice = None if kind is None else self._choices.get(kind)
        if kind is None or choice is None:
            return False
        self.limit_bytes = self._pool.devices()[0].memory_limit_bytes()  # other processes may have taken memory
        finest, before = self._finest_plan(kind), choice.planned
        overlap = self._overlap_of(kind, before.tasks)
        if before == finest and self._memory_share.get(kind, 1.0) < _SMALLEST_SHARE:
            return False
        # A plan with a smaller tail or wave needs less memory, too.
        is_smaller = False
        while not is_smaller and self._memory_share.get(kind, 1.0) >= _SMALLEST_SHARE:
            self._memory_share[kind] = self._memory_share.get(kind, 1.0) * _SHRINK
            choice.planned = self._best_plan(kind, None)
            is_smaller = choice.planned != before or self._overlap_of(kind, choice.planned.tasks) != overlap
        if not is_smaller:
            choice.planned = finest
        self._pool.release_unused()
        return True

    def profile(self) -> ModelProfile:
        """The layers' costs as the latest training calls with the default number of microbatches have shown them."""
        self.limit_bytes = self._pool.devices()[0].memory_limit_bytes()
        count = self._pool.num_devices + 1
        loads = [load for load in self._measured if load.num_microbatch == count and not load.is_inference]
        return self._profile(loads[-1] if loads else Load(count, 0))

    # Choosing plans and tails.

    def overlap(self, kind: CallKind, tasks: Sequence[StageTask]) -> Overlap:
        """The tail and the wave of a call with an exact step: how it adapts to the update."""
        update_s = self._update_s()
        if update_s is None or self.is_blind(kind):
            return Overlap()
        return forecast_step(tasks, self._profile(kind.load, kind), update_s, kind.grain, kind.timing)[0]

    def _overlap_of(self, kind: CallKind, tasks: Sequence[StageTask]) -> Overlap:
        return self.overlap(kind, tasks) if kind.timing.is_exact else Overlap()

    def _finest_plan(self, kind: CallKind) -> _Planned:
        plan = ModelExecutePlan.layer_by_layer(self._num_layers, kind.run_type)
        return _Planned(plan, build_schedule(plan, kind.run_type))

    def _best_plan(self, kind: CallKind, old: _Planned | None) -> _Planned:
        """The fastest plan by prediction; the old one if it fits and the new one is hardly faster."""
        if kind in self._memory_share and self.limit_bytes is None:  # out of memory without a known limit
            return self._finest_plan(kind)
        profile = self._profile(kind.load, kind)
        limit = math.inf if profile.memory_limit_bytes is None else profile.memory_limit_bytes
        update_s = self._update_s() if kind.timing.is_exact else None
        if update_s is None:
            plan = choose_plan(kind.run_type, profile, kind.grain)
        else:
            plan = choose_exact_plan(profile, update_s, kind.grain, kind.timing)
        new = _Planned(plan, build_schedule(plan, kind.run_type))
        new_s = forecast_step(new.tasks, profile, update_s, kind.grain, kind.timing)[1]
        memory = StageMemory(profile.layers, kind.grain, kind.num_microbatch)
        if old is not None:
            old_s = forecast_step(old.tasks, profile, update_s, kind.grain, kind.timing)[1]
            is_hardly_faster = new_s > _WORTH_A_CHANGE * old_s
            if is_hardly_faster and memory.peak_bytes(old.tasks, profile.num_devices) <= limit:
                return old
        if new != old:
            self._log_plan(new, kind, new_s, memory.peak_bytes(new.tasks, profile.num_devices), limit)
        return new

    # Cost estimates.

    def _of(self, load: Load) -> _Measured:
        if load not in self._measured:
            self._measured[load] = _Measured(self._store)
        return self._measured[load]

    def _profile(self, load: Load, kind: CallKind | None = None) -> ModelProfile:
        """The costs of a load. `kind`: limits the memory to the share that this kind of call may use."""
        limit, share = self.limit_bytes, 1.0 if kind is None else self._memory_share.get(kind, 1.0)
        costs = self._of(load).costs.layer_costs()
        limit = None if limit is None else int(limit * share)
        return ModelProfile(costs, self._pool.num_devices, load.num_microbatch, limit)

    def _update_s(self) -> list[float] | None:
        """Seconds of the optimizer's update per layer; None if the optimizer does not update layer by layer."""
        rate = measured_rate()
        return None if rate is None else [count / rate for count in self._num_updated]

    def _log_plan(self, planned: _Planned, kind: CallKind, step_s: float, peak_bytes: int, limit: float) -> None:
        logger.info(
            "%s: plan for %s%s calls with %d microbatches: %d stages, forward %s, backward %s; predicted %.3g s a "
            "step, %.3g%s GB of device memory",
            self._name,
            "exact " if kind.timing.is_exact else "",
            kind.run_type.value,
            kind.num_microbatch,
            len(planned.tasks),
            _brief(planned.plan.fwd_plan),
            _brief(planned.plan.bwd_plan),
            step_s,
            peak_bytes / 1e9,
            "" if limit == math.inf else f" of {limit / 1e9:.3g}",
        )


def _brief(stages: Sequence[range]) -> str:
    return " ".join(f"{stage.start}-{stage.stop - 1}" for stage in stages) or "none"
