"""The state of one pass over the pipeline: what its tasks hand to each other and how it ended.

Made by api.engine, filled by runtime.stage on worker threads, awaited by the caller. Knows no device.

[Note: one failure ends a run]
The first exception, wherever it happens, is the run's failure. From then on every wait of the run ends, its queued
tasks are dropped, and what a task still computes is thrown away: nothing of a failed run reaches host state.

Where a worker is, kept up to date so that an exception can say so.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from roundpipe.config import RecomputeGrain
from roundpipe.context import Iteration, LayerPhase
from roundpipe.devices import Event, Mark
from roundpipe.microbatch import LossShares
from roundpipe.plan import Phase, StageTask, TaskKind
from roundpipe.runtime.replica import LayerSettings, hooks_of, refuse_hooks_on_shared
from roundpipe.runtime.rng import Ambient
from roundpipe.runtime.values import Bundle
from roundpipe.store import LayerStore, ParameterRecord

_run_numbers = itertools.count()


class RunCancelled(BaseException):
    """Unwinds a worker out of a run that has failed elsewhere. Never reaches a user."""


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A value on its way: on the device of the worker that takes it, or in host memory once `events` have passed."""

    bundle: Bundle
    requires_grad: tuple[bool, ...] = ()
    events: tuple[Event, ...] = ()
    resident: bool = False

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Parcel:
        return dataclasses.replace(self, bundle=self.bundle.with_tensors(tensors))


@dataclasses.dataclass(frozen=True)
class GradientParcel:
    """Gradients of a parcel's tensors, None where there is none."""

    gradients: tuple[torch.Tensor | None, ...]
    events: tuple[Event, ...] = ()
    resident: bool = False


@dataclasses.dataclass(frozen=True)
class HostValues:
    """Tensors in host memory, filled once the event has passed."""

    tensors: list[torch.Tensor | None]
    event: Event


@dataclasses.dataclass
class Recall:
    """What recomputation needs to see exactly what forward saw. Lives as long as a backward may come."""

    seed: int
    ambient: Ambient
    preserve_rng_state: bool
    grain: RecomputeGrain
    settings: Sequence[LayerSettings]
    frozen_buffers: dict[int, list[torch.Tensor | None]]
    save_points: frozenset[int]
    loss_shares: LossShares
    inputs: dict[tuple[int, int], Parcel] = dataclasses.field(default_factory=dict)
    layer_data: dict[tuple[int, int], Parcel] = dataclasses.field(default_factory=dict)
    # Buffers a layer's forward found changed by an earlier microbatch of the same call, and the layers that wrote any.
    buffers_before: dict[tuple[int, int], HostValues] = dataclasses.field(default_factory=dict)
    writes_buffers: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Measurement:
    layer_id: int
    phase: Phase
    start: Mark
    end: Mark


@dataclasses.dataclass(frozen=True)
class TaskSpan:
    device: str
    label: str
    microbatch: int
    start: Mark
    end: Mark


class Run:
    """One schedule being carried out for one model."""

    def __init__(
        self,
        store: LayerStore,
        tasks: Sequence[StageTask],
        num_microbatch: int,
        recall: Recall,
        *,
        forward_phase: LayerPhase,
        version: int,
        generation: int,
        iteration: Iteration,
        on_failure: Callable[[Run], None],
        is_probe: bool = False,
    ) -> None:
        """`is_probe`: nothing of it stays but what it shows of layers."""
        self.number = next(_run_numbers)
        self.store = store
        self.monitor = store.monitor
        self.tasks = tuple(tasks)
        self.num_microbatch = num_microbatch
        self.recall = recall
        self.forward_phase = forward_phase
        self.version = version
        self.generation = generation
        self.iteration = iteration
        self.signature: Hashable = None  # runs that have the same do the same work on tensors of the same shapes
        self.is_probe = is_probe
        self.is_measured = True
        self.load: Hashable = None  # of the calls whose costs it shows
        self._on_failure = on_failure
        self.loss_fn: Callable[[Any, Any], Any] | None = None
        self.labels: list[Bundle] = []
        self.wants_outputs = True
        self.tail = 1  # microbatches at the end that go backward together
        self.weight_room_bytes = 0  # device memory for weights beyond what the schedule needs: up to so much in all
        self.workers: tuple[int, ...] = ()
        self.first_task_index = tasks[0].index if tasks else 0

        self.failure: BaseException | None = None
        self._failure_is_known = False  # to the store and to recovery
        self.has_returned = False  # the call that made it has returned normally to the user
        self.losses: dict[int, tuple[bool, HostValues]] = {}
        self.outputs: dict[int, Parcel] = {}
        self.input_gradients: dict[int, GradientParcel] = {}
        self.buffer_results: dict[int, HostValues] = {}
        self.measurements: list[Measurement] = []
        self.activation_bytes: dict[int, tuple[int, int]] = {}
        self.spans: list[TaskSpan] = []
        self._mail: dict[tuple[int, int], Parcel | GradientParcel] = {}
        self._tasks_left = len(self.tasks)
        self.landing_layers = self._layers_that_land()
        self._landings_left = len(self.landing_layers)
        # A parameter of several layers: its parts, by layer, until all are there.
        self.contributors = self._layers_of_shared_parameters()
        self.shared_parts: dict[ParameterRecord, dict[int, torch.Tensor | None]] = {}
        hooks = {i: hooks_of(store.layers[i], recall.settings[i].requires_grad) for i in self.landing_layers}
        self.parameter_hooks = {layer_id: of_layer for layer_id, of_layer in hooks.items() if of_layer}
        refuse_hooks_on_shared(self.parameter_hooks, self.contributors)

    def __repr__(self) -> str:
        return f"run {self.number}"

    def announce(self) -> None:
        """Tell the store what is to come, so that optimizer and later calls order themselves after it."""
        uploads = Counter(layer_id for task in self.tasks for layer_id in task.layers)
        self.store.expect(
            self,
            uploads=uploads,
            version=self.version,
            landings=sorted(self.landing_layers, reverse=True),
            generation=self.generation,
        )

    @property
    def is_inference(self) -> bool:
        return self.forward_phase is LayerPhase.INFERENCE

    @property
    def trains(self) -> bool:
        return bool(self.landing_layers)

    def _layers_that_land(self) -> frozenset[int]:
        if self.is_probe:
            return frozenset()
        backward = (task for task in self.tasks if task.kind is not TaskKind.FORWARD)
        return frozenset(i for task in backward for i in task.layers if self.recall.settings[i].trains)

    def _layers_of_shared_parameters(self) -> dict[ParameterRecord, list[int]]:
        layers: dict[ParameterRecord, list[int]] = {}
        for layer_id in self.landing_layers:
            for record in self.store.layers[layer_id].parameters:
                layers.setdefault(record, []).append(layer_id)
        return {record: ids for record, ids in layers.items() if len(ids) > 1}

    # Mail between tasks.

    def post(self, task_index: int, microbatch: int, parcel: Parcel | GradientParcel) -> None:
        """Leave a parcel for a task."""
        with self.monitor:
            self._mail[task_index, microbatch] = parcel
            self.monitor.changed()

    def take(self, task: StageTask, microbatch: int) -> Parcel | GradientParcel:
        with self.monitor:
            self._wait(lambda: (task.index, microbatch) in self._mail, f"input of {task}, microbatch {microbatch}")
            return self._mail.pop((task.index, microbatch))

    # How it ends.

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def fail(self, error: BaseException) -> None:
        """Record the first failure and wake everybody who waits for this run.

        Every part of it can be repeated, so a second call completes one that was interrupted.
        """
        # Frames that are done must not keep device memory alive for as long as somebody keeps the exception.
        traceback.clear_frames(error.__traceback__)
        with self.monitor:
            if self._failure_is_known:
                return
            if self.failure is None:
                self.failure = error
            self._on_failure(self)  # before the store lets go of us: nobody may take our gradients for complete
            self._mail.clear()
            self.store.cancel(self)
            self._failure_is_known = True
            self.monitor.changed()

    def task_done(self) -> None:
        with self.monitor:
            self._tasks_left -= 1
            if self._tasks_left == 0:
                # A finished run may be kept for its times; what the user's functions hold is not ours to keep.
                self.loss_fn, self.labels, self.parameter_hooks = None, [], {}
            self.monitor.changed()

    def landing_done(self) -> None:
        with self.monitor:
            self._landings_left -= 1
            self.monitor.changed()

    @property
    def finished(self) -> bool:
        return self._tasks_left == 0 and (self.failed or self._landings_left == 0)

    def note_result(self, kind: dict[int, Any], key: int, value: Any) -> None:
        with self.monitor:
            kind[key] = value
            self.monitor.changed()

    # What a caller waits for.

    def wait_for_losses(self) -> None:
        with self.monitor:
            self._wait(lambda: len(self.losses) == self.num_microbatch, "the losses")

    def take_outputs(self) -> list[Parcel]:
        """The outputs, once. A run may be kept for its times, and what is taken belongs to the user."""
        with self.monitor:
            self._wait(lambda: len(self.outputs) == self.num_microbatch, "the outputs")
            outputs, self.outputs = self.outputs, {}
            return [outputs[microbatch] for microbatch in range(self.num_microbatch)]

    def wait_until_finished(self, timeout_s: float | None = None) -> bool:
        """Until no worker touches the run any more; a failure is not raised here."""
        with self.monitor:
            return self.monitor.wait_until(lambda: self.finished, f"{self!r} to finish", timeout_s)

    def check(self) -> None:
        if self.failed:
            raise RunCancelled

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self.monitor.wait_until(lambda: self.failed or ready(), f"{what} ({self!r})")
        self.check()


class Place:
    def __init__(self) -> None:
        self.microbatch: int | None = None
        self._task, self._layer_id, self._phase, self._device = "", None, "", ""  # type: tuple[str, int | None, str, str]

    def enter(self, run: Run, task: StageTask, device: str) -> None:
        self._task, self._device = f"{task} of {run!r}", device
        self._layer_id, self._phase, self.microbatch = None, "set-up", None

    def at(self, layer_id: int | None, phase: str) -> None:
        self._layer_id, self._phase = layer_id, phase

    def note(self) -> str:
        layer = "" if self._layer_id is None else f"layer {self._layer_id}, "
        microbatch = "" if self.microbatch is None else f"microbatch {self.microbatch}, "
        return f"while running {self._task}: {layer}{microbatch}{self._phase} on {self._device}"
