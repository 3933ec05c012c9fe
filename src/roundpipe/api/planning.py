"""Chooses the stages of a call: the user's plan, or one made from sizes at first and from measured times later.

Owned by the engine of one model, used under its lock. Deciding is `plan`'s; this only remembers and feeds it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Literal

from roundpipe.config import RecomputeGrain, ResolvedRunConfig
from roundpipe.devices import Device
from roundpipe.plan import CostModel, ModelExecutePlan, ModelProfile, RunType, build_schedule, choose_plan
from roundpipe.plan.memory import Grain, StageMemory
from roundpipe.plan.schedule import StageTask
from roundpipe.plan.simulator import steady_step_s
from roundpipe.runtime.run import Run
from roundpipe.store import LayerStore

logger = logging.getLogger("roundpipe")
_WORTH_A_CHANGE = 0.95  # a new plan must be predicted to take at most this share of the old one's time
_LONGEST_PAUSE = 64  # calls between two looks at the plan, once times have settled


@dataclasses.dataclass
class _Choice:
    """The plan in use for one kind of call, and when to think about it again."""

    plan: ModelExecutePlan
    was_blind: bool  # made without knowing what activations take
    calls_until_review: int = 1
    pause: int = 1


@dataclasses.dataclass(frozen=True)
class _Key:
    run_type: RunType
    num_microbatch: int
    grain: Literal["stage", "layer"]


class _Measured:
    """Costs of calls with one number of microbatches, so with microbatches of about one size."""

    def __init__(self, store: LayerStore) -> None:
        self.costs = CostModel(
            [layer.weight_bytes for layer in store.layers],
            [sum(record.weights.nbytes for record in layer.trainable) for layer in store.layers],
        )
        self._layers_left = set(range(len(store.layers)))

    @property
    def knows_activations(self) -> bool:
        return not self._layers_left

    def learn(self, run: Run) -> None:
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
        self._measured: dict[tuple[bool, int], _Measured] = {}
        self._choices: dict[_Key, _Choice] = {}

    def plan(
        self, run_type: RunType, num_microbatch: int, config: ResolvedRunConfig, device: Device
    ) -> ModelExecutePlan:
        if config.execute_plan is not None:
            config.execute_plan.check_valid(self._num_layers, run_type)
            return config.execute_plan
        by_layer = config.recompute_grain is RecomputeGrain.LAYER
        key = _Key(run_type, num_microbatch, "layer" if by_layer else "stage")
        choice = self._choices.get(key)
        if choice is None:
            was_blind = self.is_blind(run_type, num_microbatch, device)
            choice = self._choices[key] = _Choice(self._best_plan(key, device, None), was_blind)
            return choice.plan
        choice.calls_until_review -= 1
        if choice.calls_until_review <= 0 or choice.was_blind:
            choice.was_blind = self.is_blind(run_type, num_microbatch, device)
            choice.plan = self._best_plan(key, device, choice.plan)
            choice.pause = min(2 * choice.pause, _LONGEST_PAUSE)
            choice.calls_until_review = choice.pause
        return choice.plan

    def tail(self, tasks: Sequence[StageTask], num_microbatch: int, config: ResolvedRunConfig, device: Device) -> int:
        """How many microbatches of a call whose update is waited for go backward together."""
        if self.is_blind(RunType.FUSED, num_microbatch, device):
            return 1
        grain: Grain = "layer" if config.recompute_grain is RecomputeGrain.LAYER else "stage"
        limit = device.memory_limit_bytes()
        memory = StageMemory(self.profile(num_microbatch, limit).layers, grain)
        return memory.longest_tail(tasks, self._num_devices, num_microbatch, limit)

    def is_blind(self, run_type: RunType, num_microbatch: int, device: Device) -> bool:
        """Whether memory is limited and nobody knows yet what activations of such a call take."""
        if run_type is RunType.INFER or device.memory_limit_bytes() is None:
            return False
        return not self._of(False, num_microbatch).knows_activations

    def learn(self, run: Run) -> None:
        """Take over what a finished run has measured."""
        self._of(run.is_inference, run.num_microbatch).learn(run)

    def profile(self, num_microbatch: int, memory_limit_bytes: int | None, *, inference: bool = False) -> ModelProfile:
        costs = self._of(inference, num_microbatch).costs.layer_costs()
        return ModelProfile(costs, self._num_devices, num_microbatch, memory_limit_bytes)

    def _of(self, inference: bool, num_microbatch: int) -> _Measured:
        key = (inference, num_microbatch)
        if key not in self._measured:
            self._measured[key] = _Measured(self._store)
        return self._measured[key]

    def _best_plan(self, key: _Key, device: Device, old: ModelExecutePlan | None) -> ModelExecutePlan:
        if self.is_blind(key.run_type, key.num_microbatch, device):
            return _layer_by_layer(key.run_type, self._num_layers)
        inference = key.run_type is RunType.INFER
        profile = self.profile(key.num_microbatch, device.memory_limit_bytes(), inference=inference)
        new = choose_plan(key.run_type, profile, key.grain)
        if old is not None and self._step_s(new, key, profile) > _WORTH_A_CHANGE * self._step_s(old, key, profile):
            return old
        logger.debug("%s: %s with %d microbatches: %s", self._name, key.run_type.value, key.num_microbatch, new)
        return new

    def _step_s(self, plan: ModelExecutePlan, key: _Key, profile: ModelProfile) -> float:
        tasks = build_schedule(plan, key.run_type)
        return steady_step_s(tasks, profile.layers, num_devices=self._num_devices, num_microbatch=key.num_microbatch)


def _layer_by_layer(run_type: RunType, num_layers: int) -> ModelExecutePlan:
    """The plan of a first call on a device with a memory limit: nobody knows yet what activations take."""
    layers = [range(i, i + 1) for i in range(num_layers)]
    forward = layers[:-1] if run_type is RunType.FUSED else layers
    return ModelExecutePlan(forward, reversed(layers))
