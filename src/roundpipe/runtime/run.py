"""Defines a call that is ready to run, and the state of its run: values passed between tasks, results and outcome.

Worker threads fill a run, the calling thread waits for it. Knows tasks and host values, never a device.

[Note: one failure ends a run]
The first exception of any thread becomes the run's failure. From then on all waits of the run end, its queued tasks are
dropped, and results of running tasks are discarded: nothing that a failed run computes reaches host state.

LayerMeasurement measures the time and device memory of layers for the planner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from roundpipe.compiled import Compiling, Rehearsal
from roundpipe.config import RecomputeGrain
from roundpipe.context import Iteration, LayerPhase
from roundpipe.devices import Device, Event, Mark
from roundpipe.errors import UsageError
from roundpipe.microbatch import LossShares
from roundpipe.module_copy import Hooks, module_hooks
from roundpipe.plan import Phase, StageTask, TaskKind
from roundpipe.plan.overlap import Overlap
from roundpipe.runtime.autograd import ParameterHooks, hooks_of, refuse_hooks_on_shared
from roundpipe.runtime.rng import Ambient
from roundpipe.runtime.transfer import Bundle, Traffic
from roundpipe.store import LayerRecord, LayerStore, ParameterRecord

_run_numbers = itertools.count()


def _has_hooks(layer: LayerRecord) -> bool:
    """Return whether the user has registered gradient hooks on parameters of a layer."""
    params = [record.param for record in layer.parameters]
    return any(param._backward_hooks or param._post_accumulate_grad_hooks for param in params)


class RunCancelled(BaseException):
    """Unwinds a thread out of a run that has failed on another thread. Never reaches the user."""


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A value that a task receives.

    requires_grad: one flag per tensor of the bundle.
    events: the tensors are filled once all of them have passed.
    resident: the tensors are on the receiving task's device; otherwise they are in host memory.
    """

    bundle: Bundle
    requires_grad: tuple[bool, ...] = ()
    events: tuple[Event, ...] = ()
    resident: bool = False

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Parcel:
        return dataclasses.replace(self, bundle=self.bundle.with_tensors(tensors))


@dataclasses.dataclass(frozen=True)
class GradientParcel:
    """Gradients of the tensors of a Parcel, None for a tensor without one. The other fields are those of Parcel."""

    gradients: tuple[torch.Tensor | None, ...]
    events: tuple[Event, ...] = ()
    resident: bool = False


@dataclasses.dataclass(frozen=True)
class HostValues:
    """Tensors in host memory, filled once the event has passed."""

    tensors: list[torch.Tensor | None]
    event: Event


@dataclasses.dataclass(frozen=True)
class LayerSettings:
    """Settings of a layer when a call began. Recomputations use them even if the user has changed settings since."""

    requires_grad: tuple[bool, ...]  # one flag per parameter of the layer
    training: tuple[bool, ...]  # one flag per module of the layer
    hooks: Mapping[int, Hooks] = dataclasses.field(default_factory=dict)  # by position of a module that has hooks

    @classmethod
    def of(cls, record: LayerRecord) -> LayerSettings:
        hooks = ((position, module_hooks(module)) for position, module in enumerate(record.modules))
        return cls(
            tuple(parameter.param.requires_grad for parameter in record.parameters),
            tuple(module.training for module in record.modules),
            {position: of_module for position, of_module in hooks if of_module is not None},
        )

    @property
    def trains(self) -> bool:
        return any(self.requires_grad)

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for equal settings."""
        hooks = [
            (position, name, tuple(by_id.items()))
            for position, of_module in self.hooks.items()
            for name, by_id in of_module.items()
        ]
        return self.requires_grad, self.training, tuple(hooks)


@dataclasses.dataclass
class Recall:
    """The state that a recomputation must share with the forward pass, kept until the backward pass has used it.

    seed, ambient, preserve_rng_state: decide the random numbers and the kernels of layers.
    first_microbatch: the number of microbatch 0 in the batch of all machines; random streams use this number.
    settings: per layer, the flags its parameters and modules had when the call began.
    compiling: what of the layers runs compiled; None: nothing.
    frozen_buffers: per layer with buffers, their values when the call began.
    save_points: layers whose inputs the forward pass saves.
    inputs, layer_data: by (layer, microbatch), saved inputs and data of `save_for_recompute`.
    """

    seed: int
    ambient: Ambient
    preserve_rng_state: bool
    grain: RecomputeGrain
    settings: Sequence[LayerSettings]
    frozen_buffers: dict[int, list[torch.Tensor | None]]
    save_points: frozenset[int]
    loss_shares: LossShares
    first_microbatch: int = 0
    compiling: Compiling | None = None
    inputs: dict[tuple[int, int], Parcel] = dataclasses.field(default_factory=dict)
    layer_data: dict[tuple[int, int], Parcel] = dataclasses.field(default_factory=dict)
    # By (layer, microbatch): the buffers before this forward, if earlier microbatches of the call have changed them.
    buffers_before: dict[tuple[int, int], HostValues] = dataclasses.field(default_factory=dict)
    writes_buffers: set[int] = dataclasses.field(default_factory=set)  # layers that wrote a buffer in this call


@dataclasses.dataclass(frozen=True)
class Costs:
    """The planner's decisions for one run: what it measures, how it overlaps with updates, its memory for weights.

    load: the key under which the planner keeps the cost estimates that the run's measurements improve.
    is_measured: whether the run measures the times of its layers.
    overlap: the tail and the wave of the run, see [Note: tail] and [Note: wave].
    weight_room_bytes: device memory for weights, the schedule's own buffers included; 0 if memory is unlimited.
    staying: layers whose images stay after a task: see [Note: weights that stay] in runtime/replica.
    """

    load: Hashable
    is_measured: bool
    overlap: Overlap
    weight_room_bytes: int
    staying: frozenset[int] = frozenset()


class WeightScope:
    """A time in which images of weights may stay between calls: [Note: weights that stay] in runtime/replica."""

    def __init__(self) -> None:
        self.has_ended = False
        self.holders: set[ImageHolder] = set()  # devices that keep images in this scope

    def drop_images(self) -> None:
        """Give back the device memory of all images that stay. Any thread may call this."""
        for holder in tuple(self.holders):
            holder.drop_staying()


class ImageHolder(Protocol):
    """Keeps images of weights on a device."""

    def drop_staying(self) -> None: ...


class HasScope(Protocol):
    """Calls in its name read weights that stay within `scope`."""

    scope: WeightScope | None
    members: list[Any]  # the models that are called in its name


@contextlib.contextmanager
def weights_stay(owner: HasScope) -> Iterator[WeightScope]:
    """Let images of weights stay between calls of `owner` inside the block, or inside the block around it.

    Only if the calls are those of one model: the parts of a model would take each other's place.
    """
    outer, scope = owner.scope, owner.scope or WeightScope()
    if len(owner.members) == 1:
        owner.scope = scope
    try:
        yield scope
    finally:
        owner.scope = outer
        if outer is None:
            scope.has_ended = True
            scope.drop_images()


class Residence(NamedTuple):
    """Images of runs with equal residences hold the same weights, and are where these runs need them.

    scope: None for images that stay within one run. key: the weights, the layers and the plan.
    """

    scope: WeightScope | None
    key: Hashable

    @classmethod
    def of(cls, scope: WeightScope, call: Call, weights: Hashable) -> Residence | None:
        """The residence of a call; None if its images stay for no other run. `weights`: equal if the layers' are."""
        if call.is_probe or call.forward_phase is not LayerPhase.INFERENCE:
            return None
        return cls(scope, (weights, call.tasks, call.costs.staying))


@dataclasses.dataclass(frozen=True)
class Call:
    """A user call that is split, weighed and planned: everything that its run needs.

    The forward and the backward pass of a call of `forward()` are two Calls with one Recall.

    inputs: what the first task receives, one entry per microbatch.
    forward_phase: the phase that layers see in tasks of kind F.
    labels, loss_fn: used by fused tasks. `labels` has one entry per microbatch.
    wants_outputs: whether a fused task sends the model's outputs to the caller.
    signature: equal for calls that do the same work on tensors of the same shapes; None if calls are not compared.
    is_probe: the run only measures activations: it changes no gradient, buffer or attribute.
    rehearsal: of a probe that compiles layers instead of measuring them.
    num_rows, num_tokens: sizes of the batch, for statistics; None if unknown.
    """

    tasks: tuple[StageTask, ...]
    recall: Recall
    costs: Costs
    inputs: Sequence[Parcel | GradientParcel]
    forward_phase: LayerPhase = LayerPhase.FORWARD
    labels: Sequence[Bundle] = ()
    loss_fn: Callable[[Any, Any], Any] | None = None
    wants_outputs: bool = True
    signature: Hashable = None
    is_probe: bool = False
    rehearsal: Rehearsal | None = None
    num_rows: int | None = None
    num_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The time that one phase of one layer took on a device."""

    layer_id: int
    phase: Phase
    start: Mark
    end: Mark


@dataclasses.dataclass(frozen=True)
class TaskSpan:
    """The time that a task spent on one microbatch, for timelines."""

    device: str
    label: str
    microbatch: int
    start: Mark
    end: Mark


@dataclasses.dataclass
class Trace:
    """What a run has measured, for timelines and statistics. May be kept when the run is gone: it holds no tensor.

    is_call: False in a probe, and in the backward pass of a call whose forward pass was another run.
    spans: one entry per task and microbatch, in any order.
    traffic: one entry per task.
    upload_bytes: one entry per copy of weights.
    kept_bytes: one entry per image that was still on the device, instead of an upload.
    loss: what the call has returned, unless that was a list.
    """

    generation: int
    started_s: float
    is_call: bool
    num_rows: int | None
    num_tokens: int | None
    spans: list[TaskSpan] = dataclasses.field(default_factory=list)
    traffic: list[Traffic] = dataclasses.field(default_factory=list)
    upload_bytes: list[int] = dataclasses.field(default_factory=list)
    kept_bytes: list[int] = dataclasses.field(default_factory=list)
    loss: float | None = None

    @contextlib.contextmanager
    def timed(self, device: Device, task: StageTask, microbatch: int) -> Iterator[None]:
        """Record when the device works on a microbatch of a task. Entered after the input has arrived."""
        start = device.mark()
        yield
        self.spans.append(TaskSpan(device.name, task.name, microbatch, start, device.mark()))


class Run:
    """One schedule of one model being executed.

    The constructor copies what the workers need out of the call. It does not keep the call: a finished run may be kept
    for its times and must not keep inputs alive.
    """

    _has_reached = False  # whether the backward is known to have come to parameters

    def __init__(
        self,
        store: LayerStore,
        call: Call,
        *,
        version: int,
        generation: int,
        iteration: Iteration,
        on_failure: Callable[[Run], None],
        residence: Residence | None = None,
    ) -> None:
        """version: number of the set of weights that layers read.
        residence: if its images may stay for later runs.
        on_failure: called once if the run fails, with the monitor held.
        """
        self.number = next(_run_numbers)
        self.store, self.monitor = store, store.monitor
        self.version, self.generation = version, generation
        self.iteration = iteration
        self._on_failure = on_failure

        self.tasks = call.tasks
        self.first_task_index = call.tasks[0].index
        self.num_microbatch = len(call.inputs)
        self.recall = call.recall
        self.forward_phase = call.forward_phase
        self.labels, self.loss_fn = call.labels, call.loss_fn
        self.wants_outputs = call.wants_outputs
        self.signature = call.signature
        self.is_probe, self.rehearsal = call.is_probe, call.rehearsal
        self.load = call.costs.load
        self.is_measured, self.overlap = call.costs.is_measured, call.costs.overlap
        self.weight_room_bytes = call.costs.weight_room_bytes
        self.staying, self.residence = call.costs.staying, residence or Residence(None, self.number)
        self.workers: tuple[int, ...] = ()  # device index of each task, set when the pool deals the tasks

        # Layers whose parameters get gradients in this run.
        settings = call.recall.settings
        backward = [] if call.is_probe else [task for task in call.tasks if task.kind is not TaskKind.FORWARD]
        self.landing_layers = frozenset(i for task in backward for i in task.layers if settings[i].trains)
        self.trains = bool(self.landing_layers)
        # For each parameter that several layers share: these layers, and the gradients that have arrived, by layer.
        self.contributors = self._layers_of_shared_parameters()
        self.shared_parts: dict[ParameterRecord, dict[int, torch.Tensor | None]] = {}
        self.parameter_hooks = self._gradient_hooks()

        self.losses: dict[int, tuple[bool, HostValues]] = {}  # by microbatch; True: loss_fn returned a sequence
        self.outputs: dict[int, Parcel] = {}
        self.input_gradients: dict[int, GradientParcel] = {}
        self.buffer_results: dict[int, HostValues] = {}
        self.measurements: list[Measurement] = []
        self.activation_bytes: dict[int, tuple[int, int]] = {}
        is_call = call.tasks[0].kind is not TaskKind.BACKWARD and not call.is_probe
        self.trace = Trace(generation, time.perf_counter(), is_call, call.num_rows, call.num_tokens)
        self.failure: BaseException | None = None
        self.has_returned = False  # whether the call has returned its result to the user
        self._failure_is_known = False  # whether `fail` has completed
        self._mail: dict[tuple[int, int], Parcel | GradientParcel] = {}
        self._tasks_left = len(self.tasks)
        self._landings_left = len(self.landing_layers)

    def __repr__(self) -> str:
        return f"run {self.number}"

    def announce(self) -> None:
        """Register the uploads and landings to come, so that the optimizer and later calls wait for them."""
        uploads = Counter(layer_id for task in self.tasks for layer_id in task.layers)
        self.store.expect(
            self,
            uploads=uploads,
            version=self.version,
            landings=sorted(self.landing_layers, reverse=True),
            generation=self.generation,
        )

    def _gradient_hooks(self) -> dict[int, tuple[ParameterHooks, ...]]:
        """Return the user's gradient hooks by layer; see [Note: gradient hooks] in runtime.autograd."""
        hooked = [i for i in self.landing_layers if _has_hooks(self.store.layers[i])]
        hooks = {i: hooks_of(self.store.layers[i], self.recall.settings[i].requires_grad) for i in hooked}
        if hooks:
            refuse_hooks_on_shared(hooks, self.contributors)
        return {layer_id: of_layer for layer_id, of_layer in hooks.items() if of_layer}

    def _layers_of_shared_parameters(self) -> dict[ParameterRecord, list[int]]:
        layers: dict[ParameterRecord, list[int]] = {}
        for layer_id in self.landing_layers:
            for record in self.store.layers[layer_id].parameters:
                layers.setdefault(record, []).append(layer_id)
        return {record: ids for record, ids in layers.items() if len(ids) > 1}

    # Passing values between tasks.

    def post(self, task_index: int, microbatch: int, parcel: Parcel | GradientParcel) -> None:
        """Store the input of a task for `take`."""
        with self.monitor:
            self._mail[task_index, microbatch] = parcel
            self.monitor.changed()

    def take(self, task: StageTask, microbatch: int) -> Parcel | GradientParcel:
        """Wait for the input of a task and return it."""
        key = task.index, microbatch
        with self.monitor:
            if key not in self._mail:
                self._wait(lambda: key in self._mail, f"input of {task.name}, microbatch {microbatch}")
            self.check()
            return self._mail.pop(key)

    # Ending a run, with or without a failure.

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def fail(self, error: BaseException) -> None:
        """Record the first failure and wake all threads that wait for this run.

        Can be called again: a second call completes a first call that was interrupted.
        """
        # The user may keep the exception. Clear its finished frames, which would keep device memory alive.
        traceback.clear_frames(error.__traceback__)
        with self.monitor:
            if self._failure_is_known:
                return
            if self.failure is None:
                self.failure = error
            # This comes before store.cancel: after that, the optimizer would take this run's gradients for complete.
            self._on_failure(self)
            self._mail.clear()
            self.store.cancel(self)
            self._failure_is_known = True
            self.monitor.changed()

    def parameters_reached(self) -> None:
        """Note that the backward has come to a layer whose parameters are in its graph."""
        with self.monitor:
            self._has_reached = True
            self.monitor.changed()

    def task_done(self) -> None:
        with self.monitor:
            self._tasks_left -= 1
            if self._tasks_left == 0:
                # A finished run may be kept for its times. It must not keep objects of the user alive.
                self.loss_fn, self.labels, self.parameter_hooks = None, (), {}
            self.monitor.changed()

    def landing_done(self) -> None:
        with self.monitor:
            self._landings_left -= 1
            self.monitor.changed()

    @property
    def finished(self) -> bool:
        """Whether all tasks have ended and all gradients have landed. In a failed run the landings do not count."""
        return self._tasks_left == 0 and (self.failed or self._landings_left == 0)

    # Waiting for results.

    def wait_for_losses(self) -> None:
        with self.monitor:
            self._wait(lambda: len(self.losses) == self.num_microbatch, "the losses")

    def take_outputs(self) -> list[Parcel]:
        """Wait for the outputs of all microbatches, remove them from the run and return them."""
        with self.monitor:
            self._wait(lambda: len(self.outputs) == self.num_microbatch, "the outputs")
            outputs, self.outputs = self.outputs, {}
            return [outputs[microbatch] for microbatch in range(self.num_microbatch)]

    def wait_until_finished(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has finished or failed, without raising its failure. Returns False after a timeout."""
        with self.monitor:
            return self.monitor.wait_until(lambda: self.finished, f"{self!r} to finish", timeout_s)

    def wait_for_success(self) -> None:
        """Wait until the run has finished; raises RunCancelled if it has failed."""
        self.wait_until_finished()
        self.check()

    def require_gradients(self) -> None:
        """Raise if no backward of this model has reached a parameter yet, this run included: nothing would be trained.

        If no gradient has landed before, waits until the backward has reached a parameter, or for the run's end.
        """
        gradients = self.store.gradients
        if not self.trains or gradients.num_additions:
            return
        with self.monitor:
            self._wait(lambda: self._has_reached or self.finished or gradients.num_additions > 0, "the first gradient")
        if not self._has_reached and not gradients.num_additions:
            trained = [record.name for record in self.store.parameters if record.param.requires_grad]
            raise UsageError(
                f"backward has reached none of the {len(trained)} parameters that require grad ({trained[0]!r} is "
                "one): the loss does not depend on them, so nothing would be trained. Look for a detach(), a no_grad() "
                "or an unused output between the layers and the loss."
            )

    def check(self) -> None:
        """Raise RunCancelled if the run has failed."""
        if self.failure is not None:
            raise RunCancelled

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self.monitor.wait_until(lambda: self.failed or ready(), f"{what} ({self!r})")
        self.check()


@dataclasses.dataclass
class Place:
    """The position of a worker in its run. Exceptions of the worker get a note with this position."""

    run: Run
    task: StageTask
    device_name: str
    layer_id: int | None = None
    microbatch: int | None = None
    phase: str = "set-up"

    def note(self) -> str:
        layer = "" if self.layer_id is None else f"layer {self.layer_id}, "
        microbatch = "" if self.microbatch is None else f"microbatch {self.microbatch}, "
        return f"while running {self.task} of {self.run!r}: {layer}{microbatch}{self.phase} on {self.device_name}"


# How many microbatches of a task are measured: for time, and for memory. Measuring delays the launch of kernels.
TIMED_MICROBATCHES = 3
SIZED_MICROBATCHES = 1
# Estimate: for each byte that the loss keeps, its backward holds one byte of incoming and one of outgoing gradients.
_LOSS_BACKWARD_FACTOR = 2


class LayerMeasurement:
    """Measures the time and device memory of one layer or of the loss.

    The measurement starts with the construction and ends with one of the `end_*` methods.
    """

    def __init__(self, run: Run, device: Device, *, with_memory: bool) -> None:
        self._run, self._device = run, device
        self._start = device.mark()
        self._memory = device.memory_use() if with_memory else None
        self._loss_bytes = 0

    def end_forward(self, layer_id: int, phase: LayerPhase, inputs: Iterable[torch.Tensor]) -> None:
        timed = Phase.RECOMPUTE if phase is LayerPhase.RECOMPUTE else Phase.FORWARD
        self._run.measurements.append(Measurement(layer_id, timed, self._start, self._device.mark()))
        kept = self._bytes_taken()
        if kept is not None and phase is not LayerPhase.INFERENCE:
            self._run.activation_bytes[layer_id] = (kept, sum(tensor.nbytes for tensor in inputs))

    def end_backward(self, layer_id: int) -> None:
        self._run.measurements.append(Measurement(layer_id, Phase.BACKWARD, self._start, self._device.mark()))

    def loss_computed(self) -> None:
        """Note the memory that the loss keeps. Called between the forward and the backward of the loss."""
        self._loss_bytes = self._bytes_taken() or 0

    def end_loss(self, last_layer: int) -> None:
        """Add the peak memory of the loss and its backward to the activation bytes of the last layer.

        This peak is measured if it exceeds every earlier peak of the device, and estimated otherwise.
        """
        now = None if self._memory is None else self._device.memory_use()
        if now is None or self._memory is None or last_layer not in self._run.activation_bytes:
            return
        most = (1 + _LOSS_BACKWARD_FACTOR) * self._loss_bytes
        if now.peak > self._memory.peak:
            most = now.peak - self._memory.current
        kept, input_bytes = self._run.activation_bytes[last_layer]
        self._run.activation_bytes[last_layer] = (kept + most, input_bytes)

    def _bytes_taken(self) -> int | None:
        """Return the increase of used device memory since the start, in bytes; None if memory is not measured."""
        now = None if self._memory is None else self._device.memory_use()
        return None if now is None or self._memory is None else max(now.current - self._memory.current, 0)
