"""Chooses the stages of a call: the user's plan, or one made from sizes at first and from measured times later.

Owned by the engine of one model, used under its lock. Deciding is `plan`'s; this only remembers and feeds it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal

from roundpipe.config import RecomputeGrain, ResolvedRunConfig
from roundpipe.devices import Device
from roundpipe.plan import CostModel, ModelExecutePlan, ModelProfile, RunType, build_schedule, choose_plan, simulate
from roundpipe.runtime.run import Run
from roundpipe.store import LayerStore

logger = logging.getLogger("roundpipe")
_WORTH_A_CHANGE = 0.95  # a new plan must be predicted to take at most this share of the old one's time


@dataclasses.dataclass(frozen=True)
class _Key:
    run_type: RunType
    num_microbatch: int
    grain: Literal["stage", "layer"]


class Planner:
    def __init__(self, store: LayerStore, num_devices: int, name: str) -> None:
        self._num_devices = num_devices
        self._name = name
        self._num_layers = len(store.layers)
        self._costs = CostModel(
            [layer.weight_bytes for layer in store.layers],
            [sum(record.weights.nbytes for record in layer.trainable) for layer in store.layers],
        )
        self._plans: dict[_Key, ModelExecutePlan] = {}
        self._learned = True

    def plan(
        self, run_type: RunType, num_microbatch: int, config: ResolvedRunConfig, device: Device
    ) -> ModelExecutePlan:
        if config.execute_plan is not None:
            config.execute_plan.check_valid(self._num_layers, run_type)
            return config.execute_plan
        by_layer = config.recompute_grain is RecomputeGrain.LAYER
        key = _Key(run_type, num_microbatch, "layer" if by_layer else "stage")
        if key not in self._plans or self._learned:
            self._plans[key] = self._better_plan(key, device)
            self._learned = False
        return self._plans[key]

    def learn(self, run: Run) -> None:
        """Take over what a finished run has measured."""
        for measurement in run.measurements:
            seconds = measurement.end.seconds() - measurement.start.seconds()
            self._costs.observe(measurement.layer_id, measurement.phase, max(seconds, 0.0))
        for layer_id, (activation_bytes, input_bytes) in run.activation_bytes.items():
            self._costs.observe_activation(layer_id, activation_bytes, input_bytes)
        self._learned = bool(run.measurements)

    def profile(self, num_microbatch: int, memory_limit_bytes: int | None) -> ModelProfile:
        return ModelProfile(self._costs.layer_costs(), self._num_devices, num_microbatch, memory_limit_bytes)

    def _better_plan(self, key: _Key, device: Device) -> ModelExecutePlan:
        profile = self.profile(key.num_microbatch, device.memory_limit_bytes())
        new = choose_plan(key.run_type, profile, key.grain)
        old = self._plans.get(key)
        if old is None or self._predicted_s(new, key, profile) <= _WORTH_A_CHANGE * self._predicted_s(
            old, key, profile
        ):
            logger.debug("%s: plan for %s with %d microbatches: %s", self._name, key.run_type, key.num_microbatch, new)
            return new
        return old

    def _predicted_s(self, plan: ModelExecutePlan, key: _Key, profile: ModelProfile) -> float:
        tasks = build_schedule(plan, key.run_type)
        timeline = simulate(
            tasks, profile.layers, num_devices=self._num_devices, num_microbatch=key.num_microbatch, first_device=0
        )
        return timeline.duration_s
