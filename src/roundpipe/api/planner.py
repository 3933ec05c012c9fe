"""Makes the schedule of a call: lets the planner choose, after a probe where it is blind, and smaller after a failure.

Owned by the engine of one model, used under its lock. The engine carries probes out.

Chooses the stages of a call: the user's plan, or one made from sizes at first and from measured times later.

Owned by the engine of one model, used under its lock. Deciding is `plan`'s; this only remembers and feeds it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from roundpipe.config import RecomputeGrain, ResolvedRunConfig
from roundpipe.devices import Device
from roundpipe.microbatch import MicrobatchInputs
from roundpipe.optim.native.kernel import measured_rate
from roundpipe.plan import (
    CostModel,
    ModelExecutePlan,
    ModelProfile,
    RunType,
    StageTask,
    build_schedule,
    choose_exact_plan,
    choose_plan,
)
from roundpipe.plan.memory import Grain, StageMemory
from roundpipe.plan.schedule import number_tasks
from roundpipe.plan.search import best_tail
from roundpipe.plan.simulator import steady_step_s
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.run import Run
from roundpipe.store import LayerStore

logger = logging.getLogger("roundpipe")
_WORTH_A_CHANGE = 0.95  # a new plan must be predicted to take at most this share of the old one's time
_LONGEST_PAUSE = 64  # calls between two looks at the plan, once times have settled
_ENOUGH_RUNS = 4  # measured ones; times have settled then, and are taken only before a look at the plan
_SHRINK, _SMALLEST_SHARE = 0.8, 0.1  # of the memory limit, when a call has run out of memory


class Load(NamedTuple):
    """Calls whose layers cost the same."""

    num_microbatch: int
    size: int
    is_inference: bool = False


@dataclasses.dataclass(frozen=True)
class CallKind:
    """Calls that one plan serves."""

    run_type: RunType
    num_microbatch: int
    size: int = 0  # of a microbatch, to the next power of two: activations and times go with it
    grain: Grain = "stage"
    is_exact: bool = False  # whether the update is waited for

    @classmethod
    def of(
        cls, run_type: RunType, batches: MicrobatchInputs, config: ResolvedRunConfig, is_exact: bool = False
    ) -> CallKind:
        grain: Grain = "layer" if config.recompute_grain is RecomputeGrain.LAYER else "stage"
        return cls(run_type, len(batches), batches.first_numel().bit_length(), grain, is_exact)

    @property
    def load(self) -> Load:
        return Load(self.num_microbatch, self.size, self.run_type is RunType.INFER)


class Details(NamedTuple):
    """What is left to settle once a call has its schedule."""

    tail: int
    weight_room_bytes: int


@dataclasses.dataclass
class _Choice:
    """The plan in use for one kind of call, and when to think about it again."""

    plan: ModelExecutePlan
    calls_until_review: int = 1
    pause: int = 1


class _Measured:
    """Costs of calls with microbatches of about one size."""

    def __init__(self, store: LayerStore) -> None:
        self.costs = CostModel(
            [layer.weight_bytes for layer in store.layers],
            [sum(record.weights.nbytes for record in layer.trainable) for layer in store.layers],
        )
        self._layers_left = set(range(len(store.layers)))
        self.num_learned = 0

    @property
    def knows_activations(self) -> bool:
        return not self._layers_left

    def learn(self, run: Run) -> None:
        self.num_learned += 1
        for measurement in run.measurements:
            seconds = measurement.end.seconds() - measurement.start.seconds()
            self.costs.observe(measurement.layer_id, measurement.phase, max(seconds, 0.0))
        for layer_id, (activation_bytes, input_bytes) in run.activation_bytes.items():
            self.costs.observe_activation(layer_id, activation_bytes, input_bytes)
            self._layers_left.discard(layer_id)


class Planner:
    def __init__(self, store: LayerStore, num_devices: int, name: str) -> None:
        self._store = store
        self._num_devices = num_devices
        self._name = name
        self._num_layers = len(store.layers)
        self._num_trained = [sum(record.param.numel() for record in layer.trainable) for layer in store.layers]
        self._measured: dict[Load, _Measured] = {}
        self._choices: dict[CallKind, _Choice] = {}
        # With the occasion they were settled on.
        self._details: dict[tuple[CallKind, tuple[StageTask, ...]], tuple[Hashable, Details]] = {}
        self._memory_share: dict[CallKind, float] = {}  # of the limit, for calls that ran out of memory within it

    def plan(self, kind: CallKind, config: ResolvedRunConfig, device: Device) -> ModelExecutePlan:
        if config.execute_plan is not None:
            config.execute_plan.check_valid(self._num_layers, kind.run_type)
            return config.execute_plan
        choice = self._choices.get(kind)
        if choice is None:
            choice = self._choices[kind] = _Choice(self._best_plan(kind, device, None))
            return choice.plan
        choice.calls_until_review -= 1
        if choice.calls_until_review <= 0:
            choice.plan = self._best_plan(kind, device, choice.plan)
            choice.pause = min(2 * choice.pause, _LONGEST_PAUSE)
            choice.calls_until_review = choice.pause
        return choice.plan

    def details(self, tasks: tuple[StageTask, ...], kind: CallKind, device: Device) -> Details:
        """Thought about anew when something was learned or the plan was looked at again, and kept until then."""
        choice = self._choices.get(kind)
        known = min(self._of(kind.load).num_learned, _ENOUGH_RUNS)
        occasion = (known, choice and choice.pause, measured_rate() is None, self._memory_share.get(kind))
        if self._details.get((kind, tasks), (None, None))[0] != occasion:
            tail = self.tail(tasks, kind, device) if kind.is_exact else 1
            self._details[kind, tasks] = occasion, Details(tail, self._weight_room_bytes(tasks, tail, kind, device))
        return self._details[kind, tasks][1]

    def tail(self, tasks: Sequence[StageTask], kind: CallKind, device: Device) -> int:
        """How many microbatches of a call whose update is waited for go backward together."""
        update_s = self._update_s()
        if update_s is None or self.is_blind(kind, device):
            return 1
        return self._best_tail(tasks, kind, self._profile(kind, device), update_s)[0]

    def wants_measurements(self, kind: CallKind) -> bool:
        """Whether the next look at the plan is near; times that settled long ago need not be taken in every call."""
        choice = self._choices.get(kind)
        is_near = choice is not None and choice.calls_until_review == 1
        return is_near or self._of(kind.load).num_learned < _ENOUGH_RUNS

    def is_blind(self, kind: CallKind, device: Device) -> bool:
        """Whether memory is limited and nobody knows yet what activations of such a call take."""
        if kind.run_type is RunType.INFER or device.memory_limit_bytes() is None:
            return False
        return not self._of(kind.load).knows_activations

    def shrink(self, kind: CallKind, device: Device) -> bool:
        """A call ran out of device memory: plan for less of it. Returns whether there is any smaller plan."""
        choice = self._choices.get(kind)
        finest = _layer_by_layer(kind.run_type, self._num_layers)
        if choice is None or (choice.plan == finest and self._memory_share.get(kind, 1.0) < _SMALLEST_SHARE):
            return False
        before = choice.plan
        while self._memory_share.get(kind, 1.0) >= _SMALLEST_SHARE:
            self._memory_share[kind] = self._memory_share.get(kind, 1.0) * _SHRINK
            choice.plan = self._best_plan(kind, device, None)
            if choice.plan != before:
                return True
        choice.plan = finest
        return True

    def learn(self, run: Run) -> None:
        """Take over what a finished run has measured."""
        if isinstance(run.load, Load):
            self._of(run.load).learn(run)

    def latest_profile(self, num_microbatch: int, memory_limit_bytes: int | None) -> ModelProfile:
        """By what the latest training calls with so many microbatches have shown, if there were any."""
        loads = [load for load in self._measured if load.num_microbatch == num_microbatch and not load.is_inference]
        return self._profile_of(loads[-1] if loads else Load(num_microbatch, 0), memory_limit_bytes)

    def _weight_room_bytes(self, tasks: Sequence[StageTask], tail: int, kind: CallKind, device: Device) -> int:
        """What weights may take on a device in all: what the schedule needs, and half of what nobody needs."""
        limit = device.memory_limit_bytes()
        if limit is None or self.is_blind(kind, device):
            return 0
        memory = StageMemory(self._profile(kind, device).layers, kind.grain, kind.num_microbatch)
        held = memory.peak_bytes(tasks, self._num_devices) + memory.tail_bytes(tasks, tail)
        share = self._memory_share.get(kind, 1.0)
        return memory.buffer_bytes(tasks, self._num_devices)[0] + max(int(limit * share) - held, 0) // 2

    def _profile_of(self, load: Load, memory_limit_bytes: int | None) -> ModelProfile:
        costs = self._of(load).costs.layer_costs()
        return ModelProfile(costs, self._num_devices, load.num_microbatch, memory_limit_bytes)

    def _profile(self, kind: CallKind, device: Device) -> ModelProfile:
        limit = device.memory_limit_bytes()
        share = self._memory_share.get(kind, 1.0)
        return self._profile_of(kind.load, None if limit is None else int(limit * share))

    def _of(self, load: Load) -> _Measured:
        if load not in self._measured:
            self._measured[load] = _Measured(self._store)
        return self._measured[load]

    def _update_s(self) -> list[float] | None:
        """The seconds an update takes, layer by layer; None if it does not go layer by layer."""
        rate = measured_rate()
        return None if rate is None else [count / rate for count in self._num_trained]

    def _best_plan(self, kind: CallKind, device: Device, old: ModelExecutePlan | None) -> ModelExecutePlan:
        if kind in self._memory_share and device.memory_limit_bytes() is None:  # it ran out, nobody knows of what
            return _layer_by_layer(kind.run_type, self._num_layers)
        profile = self._profile(kind, device)
        update_s = self._update_s() if kind.is_exact else None
        if update_s is None:
            new = choose_plan(kind.run_type, profile, kind.grain)
        else:
            new = choose_exact_plan(profile, update_s, kind.grain)
        new_s = self._step_s(new, kind, profile)
        is_worth_it = old is None or new_s <= _WORTH_A_CHANGE * self._step_s(old, kind, profile)
        if old is not None and not is_worth_it and self._still_fits(old, kind, profile):
            return old
        if new != old:
            self._announce(new, kind, profile, new_s)
        return new

    def _still_fits(self, plan: ModelExecutePlan, kind: CallKind, profile: ModelProfile) -> bool:
        limit = profile.memory_limit_bytes
        memory = StageMemory(profile.layers, kind.grain, kind.num_microbatch)
        return limit is None or memory.peak_bytes(build_schedule(plan, kind.run_type), self._num_devices) <= limit

    def _step_s(self, plan: ModelExecutePlan, kind: CallKind, profile: ModelProfile) -> float:
        tasks = build_schedule(plan, kind.run_type)
        update_s = self._update_s()
        if kind.is_exact and update_s is not None and self._num_devices == 1:
            return self._best_tail(tasks, kind, profile, update_s)[1]
        return steady_step_s(tasks, profile.layers, num_devices=self._num_devices, num_microbatch=kind.num_microbatch)

    def _best_tail(
        self, tasks: Sequence[StageTask], kind: CallKind, profile: ModelProfile, update_s: Sequence[float]
    ) -> tuple[int, float]:
        memory = StageMemory(profile.layers, kind.grain, kind.num_microbatch)
        longest = memory.longest_tail(tasks, self._num_devices, profile.memory_limit_bytes)
        return best_tail(
            tasks, profile.layers, update_s, num_microbatch=kind.num_microbatch, longest=longest, grain=kind.grain
        )

    def _announce(self, plan: ModelExecutePlan, kind: CallKind, profile: ModelProfile, step_s: float) -> None:
        tasks = build_schedule(plan, kind.run_type)
        memory = StageMemory(profile.layers, kind.grain, kind.num_microbatch)
        limit = profile.memory_limit_bytes
        logger.info(
            "%s: plan for %s%s calls with %d microbatches: %d stages, forward %s, backward %s; predicted %.3g s a "
            "step, %.3g%s GB of device memory",
            self._name,
            "exact " if kind.is_exact else "",
            kind.run_type.value,
            kind.num_microbatch,
            len(tasks),
            _brief(plan.fwd_plan),
            _brief(plan.bwd_plan),
            step_s,
            memory.peak_bytes(tasks, self._num_devices) / 1e9,
            "" if limit is None else f" of {limit / 1e9:.3g}",
        )


def _brief(stages: Sequence[range]) -> str:
    return " ".join(f"{stage.start}-{stage.stop - 1}" for stage in stages) or "none"


def _layer_by_layer(run_type: RunType, num_layers: int) -> ModelExecutePlan:
    """The smallest plan there is."""
    layers = [range(i, i + 1) for i in range(num_layers)]
    forward = layers[:-1] if run_type is RunType.FUSED else layers
    return ModelExecutePlan(forward, reversed(layers))


class Scheduler:
    def __init__(self, store: LayerStore, pool: DevicePool, name: str) -> None:
        self._pool = pool
        self._num_layers = len(store.layers)
        self._planner = Planner(store, pool.num_devices, name)
        self._last_kind: CallKind | None = None  # of the last call whose plan is ours

    def schedule(self, kind: CallKind, config: ResolvedRunConfig, probe: Callable[[], None]) -> tuple[StageTask, ...]:
        """`probe`: shows what activations of such a call take."""
        device = self._pool.devices()[0]
        is_planned = config.execute_plan is None
        if is_planned and self._planner.is_blind(kind, device):
            probe()
        self._last_kind = kind if is_planned else None
        return build_schedule(self._planner.plan(kind, config, device), kind.run_type)

    @property
    def memory_is_limited(self) -> bool:
        return self._pool.devices()[0].memory_limit_bytes() is not None

    def is_blind(self, kind: CallKind) -> bool:
        return self._planner.is_blind(kind, self._pool.devices()[0])

    def probe_tasks(self, *, with_loss: bool) -> tuple[StageTask, ...]:
        """One layer at a time, so that anything that can run at all can be probed."""
        layers = [range(i, i + 1) for i in range(self._num_layers)]
        return number_tasks(fwd=layers[:-1] if with_loss else layers, fused=layers[-1:] if with_loss else ())

    def prepare(self, run: Run, kind: CallKind) -> None:
        """Settle what the planner leaves open until the schedule is known."""
        run.load, run.is_measured = kind.load, self._planner.wants_measurements(kind)
        run.tail, run.weight_room_bytes = self._planner.details(run.tasks, kind, self._pool.devices()[0])

    def plan_smaller(self) -> bool:
        """The last call ran out of device memory: whether the next one like it will be planned to take less."""
        kind, self._last_kind = self._last_kind, None
        if kind is None or not self._planner.shrink(kind, self._pool.devices()[0]):
            return False
        self._pool.release_unused()
        return True

    def learn(self, run: Run) -> None:
        self._planner.learn(run)

    def profile(self) -> ModelProfile:
        limit = self._pool.devices()[0].memory_limit_bytes()
        return self._planner.latest_profile(self._pool.num_devices + 1, limit)
