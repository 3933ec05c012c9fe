"""Makes the schedule of a call: lets the planner choose, after a probe where it is blind, and smaller after a failure.

Owned by the engine of one model, used under its lock. The engine carries probes out.
"""

from __future__ import annotations

from collections.abc import Callable

from roundpipe.api.planning import CallKind, Planner
from roundpipe.config import ResolvedRunConfig
from roundpipe.plan import ModelProfile, StageTask, build_schedule
from roundpipe.plan.schedule import number_tasks
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.run import Run
from roundpipe.store import LayerStore


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
