"""Runs one stage task on one device: for every microbatch the layers' forward, loss, recomputation and backward.

Knows layers and tensors. StageMail moves values between tasks, StageBuffers sets and saves the buffers of layers,
LayerImages uploads their weights, and LayerStore decides when weights may be read.

[Note: forward keeps the grad mode]
A forward that will be recomputed later also runs with grad enabled, although the graph of each layer is dropped at
once. So code that checks the grad mode (fused kernels, checkpoints) takes the same path in forward and recomputation.

[Note: tail]
The last microbatches of a fused task, its tail, may run all their forwards first. Then the layers run backward from the
last to the first, each for all microbatches of the tail. The sums of gradients and their order do not change, but the
gradients of the last layers are complete earlier: an optimizer can update these layers during the rest of the backward.
The first microbatches, the wave, may run forward together: see [Note: wave] in plan/overlap. Every layer sees the
microbatches in the same order as without a wave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from roundpipe.compiled import rehearsed
from roundpipe.config import RecomputeGrain
from roundpipe.context import LayerPhase, LayerRun, within_iteration
from roundpipe.devices import Device, StreamKind
from roundpipe.plan import StageTask, TaskKind
from roundpipe.plan.overlap import Overlap
from roundpipe.runtime.autograd import (
    Gradients,
    GradientWatch,
    Leaves,
    ObservedGraph,
    StageGraph,
    results_of,
    roots_of,
    tensors_in,
)
from roundpipe.runtime.gradients import Landing, LandingThread, LayerGradients
from roundpipe.runtime.mailbox import Losses, StageBuffers, StageMail
from roundpipe.runtime.replica import Behaviour, LayerImages, Replica, refuse_late_gradients
from roundpipe.runtime.rng import RandomStream, TaskRandom
from roundpipe.runtime.run import SIZED_MICROBATCHES, TIMED_MICROBATCHES, LayerMeasurement, Place, Run
from roundpipe.runtime.transfer import Bundle, DeviceBuffers, Traffic, Transfer


class StageRunner:
    """Carries out tasks on one device, one at a time."""

    def __init__(
        self, device: Device, landing: LandingThread, images: LayerImages, prefetch_next: Callable[[bool], None]
    ) -> None:
        """prefetch_next: starts the uploads of the next task. Its argument is `within_room` of LayerImages.prefetch."""
        self.device = device
        self.landing = landing
        self.images = images
        self.prefetch_next = prefetch_next
        self.transfer = Transfer(device)
        self.gradient_buffers = DeviceBuffers(device, StreamKind.COMPUTE, StreamKind.GRADS_DOWN)
        self.place: Place | None = None  # position in the present task, or in the last one

    def release_unused(self) -> None:
        for owner in (self.images, self.gradient_buffers, self.device):
            owner.release_unused()

    def run(self, run: Run, task: StageTask) -> None:
        with self.device.computing(), within_iteration(run.iteration):
            try:
                _Task(self, run, task).carry_out()
            finally:
                run.trace.traffic.append(self.transfer.traffic)
                self.transfer.traffic = Traffic()


class _Layer(NamedTuple):
    """A layer prepared for the forwards of one task: everything that is the same for all microbatches."""

    layer_id: int
    replica: Replica
    gradients: LayerGradients
    has_buffers: bool


class _Frame(NamedTuple):
    """One forward of a layer in its own graph, kept for the layer's backward."""

    layer: _Layer
    microbatch: int
    leaves: Leaves
    outputs: Bundle
    handed_on: Bundle  # the outputs for the next layer, cut from this layer's graph
    uses_parameters: bool  # whether the layer's parameters are in its graph; False if the graph was not looked at


class _Begun(NamedTuple):
    """A microbatch of which the first layers of the task have run forward."""

    frames: list[_Frame]
    bundle: Bundle
    flags: tuple[bool, ...]


class _Task:
    """One task being carried out."""

    def __init__(self, runner: StageRunner, run: Run, task: StageTask) -> None:
        self._run, self._recall, self._task = run, run.recall, task
        self._runner = runner
        self._device = runner.device
        self._images = runner.images
        self._place = runner.place = Place(run, task, self._device.name)
        self._mail = StageMail(run, task, runner.transfer, self._place)
        self._buffers = StageBuffers(run, runner.transfer)
        self._autocast = self._recall.ambient.take_over()
        self._random = TaskRandom(self._device, self._recall.seed, self._recall.first_microbatch)
        self._replicas = {i: runner.images.replica(run.store, i) for i in task.layers}
        self._layers: dict[int, _Layer] = {}  # layers whose replica is bound now, by layer_id
        self._begun: dict[int, _Begun] = {}  # microbatches of the wave that have not gone on yet
        self._runs_in_one_graph = self._is_last_microbatch = False
        self._is_timed = self._is_sized = False  # whether the present microbatch is measured
        self._measured_backward: LayerMeasurement | None = None
        self._loss_backward_done: Callable[[], None] | None = None

    def carry_out(self) -> None:
        try:
            self._images.prefetch(self._run, self._task, self._place)
            in_tail, wave = self._tail_and_wave()
            if wave and self._task.kind is TaskKind.FORWARD:
                return self._forward_task_together(wave)
            if wave:
                self._begin_wave(wave)
            for microbatch in range(in_tail.start):
                self._begin_microbatch(microbatch)
                self._run_microbatch(microbatch)
                if microbatch == 0:
                    self._runner.prefetch_next(False)
            if in_tail:
                self._run_tail(in_tail)
        finally:
            # Break a reference cycle: the callback holds the losses, whose graph refers to this task. The garbage
            # collector never frees a cycle through an autograd graph.
            self._loss_backward_done = None
            self._begun.clear()
            for layer in self._layers.values():
                layer.replica.unbind()

    def _begin_microbatch(self, microbatch: int) -> None:
        self._run.check()
        self._place.microbatch = microbatch
        self._is_last_microbatch = microbatch == self._run.num_microbatch - 1
        self._is_timed = self._run.is_measured and microbatch < TIMED_MICROBATCHES
        self._is_sized = self._is_timed and microbatch < SIZED_MICROBATCHES

    def _measure(self) -> LayerMeasurement | None:
        """Start the measurement of a layer or the loss, if the present microbatch is measured."""
        return LayerMeasurement(self._run, self._device, with_memory=self._is_sized) if self._is_timed else None

    def _run_microbatch(self, microbatch: int) -> None:
        match self._task.kind:
            case TaskKind.FORWARD:
                bundle, flags = self._mail.receive(microbatch)
                with self._run.trace.timed(self._device, self._task, microbatch):
                    self._forward_task(microbatch, bundle, flags)
            case TaskKind.FUSED if microbatch in self._begun:
                with self._run.trace.timed(self._device, self._task, microbatch):
                    self._fused_layer_by_layer(microbatch, self._begun.pop(microbatch))
            case TaskKind.FUSED:
                bundle, flags = self._mail.receive(microbatch)
                with self._run.trace.timed(self._device, self._task, microbatch):
                    if self._can_run_in_one_graph():
                        self._fused_in_one_graph(microbatch, bundle, flags)
                    else:
                        self._fused_layer_by_layer(microbatch, _Begun([], bundle, flags))
            case TaskKind.BACKWARD:
                # The values that the forward saved are available before the gradients: wait only for the gradients.
                gradients = self._mail.receive_gradients(microbatch)
                with self._run.trace.timed(self._device, self._task, microbatch):
                    self._backward_task(microbatch, gradients)

    # One microbatch of a task, by kind of task.

    def _forward_task(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        for layer_id in self._task.layers:
            bundle, flags = self._forward_unkept(layer_id, microbatch, bundle, flags)
        self._mail.send(microbatch, bundle, flags)

    def _forward_unkept(
        self, layer_id: int, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]
    ) -> tuple[Bundle, tuple[bool, ...]]:
        """Run a layer of a forward task and return its outputs, which are cut from its graph."""
        if layer_id in self._recall.save_points:
            self._mail.save_input(layer_id, microbatch, bundle, flags)
        args = layer_id, microbatch, bundle, flags, self._run.forward_phase
        rehearsal = self._run.rehearsal
        frame = self._forward_layer(*args) if rehearsal is None else self._rehearsed(rehearsal.order, *args)
        if self._is_last_microbatch:
            self._release_layer(layer_id)
        return frame.handed_on, frame.outputs.requires_grad

    def _rehearsed(self, order: int, layer_id: int, microbatch: int, *args: Any) -> _Frame:
        """Compile a layer, forward and backward, and return its forward: [Note: rehearsals] in compiled/rehearsals."""
        replica = (self._layers.get(layer_id) or self._bind(layer_id)).replica

        def backward(frame: _Frame) -> dict[str, torch.Tensor]:
            with self._random.backward(layer_id, microbatch, [replica.behaviour]):
                return results_of(frame.outputs.tensors, [*frame.leaves.tensors, *replica.parameters])

        return rehearsed(replica.parts or (), order, lambda: self._forward_layer(layer_id, microbatch, *args), backward)

    def _fused_layer_by_layer(self, microbatch: int, begun: _Begun) -> None:
        frames, bundle, flags = self._forward_rest(microbatch, begun)
        del begun
        gradients = self._loss_and_backward(microbatch, bundle, flags)
        del bundle
        if not self._run.is_probe:
            self._mail.send_gradients(microbatch, self._backward_frames(frames, gradients))

    def _fused_in_one_graph(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        leaves = Leaves(bundle, flags)
        # The loss counts as one more layer.
        graph = StageGraph(len(self._task.layers) + 1, self._layer_done)
        with torch.enable_grad():
            value = self._forward_in_one_graph(microbatch, leaves, LayerPhase.FUSED, graph)
        if self._run.wants_outputs:
            self._place.layer_id, self._place.phase = None, "output download"
            outputs = Bundle.pack(value)
            copies, _ = self._layers[self._task.layers[-1]].replica.copy_own_memory(outputs.detached())
            self._mail.send_outputs(microbatch, copies, outputs.requires_grad)
            self._runner.transfer.let_downloads_finish_first()
            del outputs, copies
        measured = self._measured_backward = self._measure()
        losses = self._losses(microbatch, value)
        del value
        if measured is not None:
            measured.loss_computed()
        # The caller waits for the losses only: send them when the backward of the loss has run, before the layers'.
        self._loss_backward_done = functools.partial(self._mail.send_losses, microbatch, losses)
        self._place.layer_id, self._place.phase = None, "loss backward"
        with self._random.backward(len(self._run.store.layers), microbatch, self._behaviours()):
            graph.backward(losses.tensors)
        if self._is_last_microbatch:
            refuse_late_gradients(self._replicas.values())
        self._mail.send_gradients(microbatch, leaves.gradients)

    def _backward_task(self, microbatch: int, gradients: Gradients) -> None:
        if self._mail.needs_no_gradient(microbatch):
            self._mail.pass_no_gradient_on(microbatch)
            return
        if self._recall.grain is RecomputeGrain.LAYER:
            for layer_id in reversed(self._task.layers):
                bundle, flags = self._mail.recalled_input(layer_id, microbatch)
                frame = self._forward_layer(layer_id, microbatch, bundle, flags, LayerPhase.RECOMPUTE)
                del bundle
                gradients = self._backward_layer(frame, gradients)
                del frame
        else:
            bundle, flags = self._mail.recalled_input(self._task.layers[0], microbatch)
            if self._can_run_in_one_graph():
                gradients = self._recompute_in_one_graph(microbatch, bundle, flags, gradients)
            else:
                frames, bundle, flags = self._forward_layers(microbatch, bundle, flags, LayerPhase.RECOMPUTE)
                del bundle
                gradients = self._backward_frames(frames, gradients)
        self._mail.send_gradients(microbatch, gradients)

    def _recompute_in_one_graph(
        self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...], gradients: Gradients
    ) -> Gradients:
        leaves = Leaves(bundle, flags)
        graph = StageGraph(len(self._task.layers), self._layer_done)
        with torch.enable_grad():
            value = self._forward_in_one_graph(microbatch, leaves, LayerPhase.RECOMPUTE, graph)
        last = self._task.layers[-1]
        self._place.layer_id, self._place.phase = last, "backward"
        self._measured_backward = self._measure()
        roots = roots_of(last, Bundle.pack(value).tensors, gradients)
        del value
        with self._random.backward(last, microbatch, self._behaviours()):
            graph.backward(*roots)
        if self._is_last_microbatch:
            refuse_late_gradients(self._replicas.values())
        return leaves.gradients

    # Running the tail of a fused task.

    def _tail_and_wave(self) -> tuple[range, range]:
        """The microbatches of the tail, see [Note: tail], and of the wave, see [Note: wave] in plan/overlap.

        The ranges are empty if a layer may write buffers: one microbatch would change buffers that the graph of another
        one has saved.
        """
        kind, num_microbatch, overlap = self._task.kind, self._run.num_microbatch, self._run.overlap
        if kind is TaskKind.BACKWARD or any(
            self._known_behaviour(i).writes_buffers is not False for i in self._task.layers
        ):
            overlap = Overlap()
        is_fused = kind is TaskKind.FUSED
        tail = (overlap if is_fused else Overlap()).in_tail(num_microbatch)
        wave = (Overlap() if self._run.is_probe else overlap).in_wave(num_microbatch, is_fused=is_fused)
        return tail, wave

    def _run_tail(self, microbatches: range) -> None:
        stacks: dict[int, list[_Frame]] = {}
        gradients: dict[int, Gradients] = {}
        for microbatch in microbatches:
            self._begin_microbatch(microbatch)
            begun = self._begun.pop(microbatch, None) or _Begun([], *self._mail.receive(microbatch))
            with self._run.trace.timed(self._device, self._task, microbatch):
                frames, bundle, flags = self._forward_rest(microbatch, begun)
                del begun
                of_outputs = self._loss_and_backward(microbatch, bundle, flags)
                del bundle
                # The last layer runs backward at once, so that its outputs, often the largest tensors, are not kept.
                gradients[microbatch] = self._backward_layer(frames.pop(), of_outputs)
                stacks[microbatch] = frames
            if microbatch == microbatches.start == 0:
                self._runner.prefetch_next(False)
        with self._run.trace.timed(self._device, self._task, microbatches[-1]):
            for _ in self._task.layers[1:]:
                self._run.check()
                for microbatch in microbatches:
                    self._place.microbatch = microbatch
                    self._is_last_microbatch = microbatch == microbatches[-1]
                    gradients[microbatch] = self._backward_layer(stacks[microbatch].pop(), gradients[microbatch])
        for microbatch in microbatches:
            self._mail.send_gradients(microbatch, gradients[microbatch])

    # Running the first microbatches of a task together.

    def _forward_task_together(self, microbatches: range) -> None:
        """Carry out a forward task for all microbatches, layer by layer."""
        values = {j: self._mail.receive(j) for j in microbatches}
        with self._run.trace.timed(self._device, self._task, microbatches[-1]):
            for layer_id in self._task.layers:
                for microbatch in microbatches:
                    self._begin_microbatch(microbatch)
                    values[microbatch] = self._forward_unkept(layer_id, microbatch, *values[microbatch])
                self._runner.prefetch_next(False)
            for microbatch in microbatches:
                self._mail.send(microbatch, *values.pop(microbatch))

    def _begin_wave(self, microbatches: range) -> None:
        """Run the first layers of a fused task forward for several microbatches, layer by layer."""
        for microbatch in microbatches:
            self._begun[microbatch] = _Begun([], *self._mail.receive(microbatch))
        with self._run.trace.timed(self._device, self._task, microbatches[0]):
            for layer_id in self._task.layers[: self._run.overlap.wave.num_layers]:
                for microbatch in microbatches:
                    self._begin_microbatch(microbatch)
                    frames, bundle, flags = self._begun[microbatch]
                    frame = self._forward_layer(layer_id, microbatch, bundle, flags, LayerPhase.FUSED)
                    frames.append(frame)
                    self._begun[microbatch] = _Begun(frames, frame.handed_on, frame.outputs.requires_grad)

    # Running all layers of a stage in one autograd graph.

    def _can_run_in_one_graph(self) -> bool:
        """Return whether the behaviour of all layers is known and lets them share a graph."""
        if not self._runs_in_one_graph and not self._run.is_probe:
            self._runs_in_one_graph = all(self._known_behaviour(i).suits_one_graph for i in self._task.layers)
        return self._runs_in_one_graph

    def _known_behaviour(self, layer_id: int) -> Behaviour:
        return self._replicas[layer_id].behaviour_with(self._recall.settings[layer_id])

    def _behaviours(self) -> list[Behaviour]:
        return [self._layers[layer_id].replica.behaviour for layer_id in self._task.layers]

    def _forward_in_one_graph(self, microbatch: int, leaves: Leaves, phase: LayerPhase, graph: StageGraph) -> Any:
        """Return what the stage's last layer returns. The caller enables grad."""
        value = leaves.value()
        inputs = tensors_in(value)
        place, name = self._place, "recompute" if phase is LayerPhase.RECOMPUTE else "forward"
        for position, layer_id in enumerate(self._task.layers):
            layer = self._layers.get(layer_id) or self._bind(layer_id)
            place.layer_id, place.phase = layer_id, name
            if layer.has_buffers:
                self._buffers.before_forward(layer.replica, microbatch, phase)
            versions = [tensor._version for tensor in inputs]
            measured = self._measure() if self._is_timed else None
            value, _ = self._call(layer, microbatch, phase, value)
            if measured is not None:
                measured.end_forward(layer_id, phase, inputs)
            if [tensor._version for tensor in inputs] != versions:
                layer.replica.refuse_new_change_of_input()
            if layer.has_buffers:
                self._buffers.after_forward(layer.replica, microbatch, phase)
            if self._is_last_microbatch and phase is not LayerPhase.RECOMPUTE:
                layer.replica.write_attributes_back()
            inputs = tensors_in(value)
            graph.watch(position, inputs)
        return value

    def _layer_done(self, position: int) -> None:
        """Finish the layer at `position` of the stage, after its backward.

        In a fused stage the loss has the position after the last layer. On CUDA this runs on autograd's thread, while
        the worker waits for the backward.
        """
        measured, layers = self._measured_backward, self._task.layers
        if position == len(layers):
            if measured is not None:
                measured.end_loss(layers[-1])
            if self._loss_backward_done is not None:
                self._loss_backward_done()
                self._loss_backward_done = None  # the callback holds the losses
        else:
            layer_id = layers[position]
            if measured is not None:
                measured.end_backward(layer_id)
            # In the microbatches between the first and the last one, autograd adds to the gathered gradients in place.
            if self._is_last_microbatch or self._place.microbatch == 0:
                self._layers[layer_id].gradients.gather()
            if self._is_last_microbatch:
                self._send_parameter_gradients(layer_id)
                self._release_layer(layer_id)
        if measured is not None:
            self._measured_backward = self._measure()
        self._place.layer_id, self._place.phase = layers[position - 1] if position else None, "backward"
        if position:
            self._random.layer_in_backward = layers[position - 1]

    # Running each layer in its own autograd graph.

    def _forward_rest(self, microbatch: int, begun: _Begun) -> tuple[list[_Frame], Bundle, tuple[bool, ...]]:
        """Run the layers of a fused task that have not run forward for this microbatch yet."""
        frames, bundle, flags = begun
        rest = self._task.layers[len(frames) :]
        more, bundle, flags = self._forward_layers(microbatch, bundle, flags, LayerPhase.FUSED, rest)
        return [*frames, *more], bundle, flags

    def _forward_layers(
        self,
        microbatch: int,
        bundle: Bundle,
        flags: tuple[bool, ...],
        phase: LayerPhase,
        layers: Sequence[int] | None = None,
    ) -> tuple[list[_Frame], Bundle, tuple[bool, ...]]:
        frames = []
        for layer_id in self._task.layers if layers is None else layers:
            frame = self._forward_layer(layer_id, microbatch, bundle, flags, phase)
            bundle, flags = frame.handed_on, frame.outputs.requires_grad
            frames.append(frame)
        return frames, bundle, flags

    def _forward_layer(
        self, layer_id: int, microbatch: int, bundle: Bundle, flags: Sequence[bool], phase: LayerPhase
    ) -> _Frame:
        """Run a layer in its own graph and note its behaviour; see `Behaviour`."""
        layer = self._layers.get(layer_id) or self._bind(layer_id)
        replica, behaviour = layer.replica, layer.replica.behaviour
        self._place.layer_id, self._place.phase = layer_id, "recompute" if phase is LayerPhase.RECOMPUTE else "forward"
        if layer.has_buffers:
            self._buffers.before_forward(replica, microbatch, phase)
        if behaviour.changes_input:
            self._runner.transfer.let_downloads_finish_first()
        with_grad, has_backward = phase is not LayerPhase.INFERENCE, phase is not LayerPhase.FORWARD
        measured = self._measure()
        leaves = Leaves(bundle, flags if with_grad else [False] * len(flags))
        with torch.set_grad_enabled(with_grad):
            value = leaves.value() if has_backward or behaviour.changes_input else leaves.bare_value()
            watch = None if behaviour.calls_autograd is False else GradientWatch(tensors_in(value))
            value, random = self._call(layer, microbatch, phase, value)
            drew_on_host, outputs = random.drew_on_host, Bundle.pack(value)
        if measured is not None:
            measured.end_forward(layer_id, phase, bundle.tensors)
        changed_input = leaves.were_changed()
        handed_on, returned_own_memory = replica.copy_own_memory(outputs.detached())
        replica.note_forward(
            changed_input=changed_input,
            drew_on_host=drew_on_host,
            returned_own_memory=returned_own_memory,
        )
        uses_parameters = False
        if with_grad and watch is not None:
            graph = ObservedGraph.behind(outputs.tensors, self._device.torch_device)
            self._run.store.refuse_as_leaves(layer_id, graph.leaves)
            behaviour.calls_autograd = watch.end() or bool(behaviour.calls_autograd)
            behaviour.leaves_device = graph.leaves_device
            uses_parameters = any(leaf is param for leaf in graph.leaves for param in replica.parameters)
        if layer.has_buffers:
            self._buffers.after_forward(replica, microbatch, phase)
        if self._is_last_microbatch and phase is not LayerPhase.RECOMPUTE and not self._run.is_probe:
            replica.write_attributes_back()
        return _Frame(layer, microbatch, leaves, outputs, handed_on, uses_parameters)

    def _backward_frames(self, frames: list[_Frame], gradients: Gradients) -> Gradients:
        while frames:
            gradients = self._backward_layer(frames.pop(), gradients)
        return gradients

    def _backward_layer(self, frame: _Frame, gradients: Gradients) -> Gradients:
        """Run the backward of a layer, gather the gradients of its parameters, and return those of its inputs."""
        layer_id = frame.layer.layer_id
        self._place.layer_id, self._place.phase = layer_id, "backward"
        roots = roots_of(layer_id, frame.outputs.tensors, gradients)
        if roots[0]:
            if frame.uses_parameters:
                self._run.parameters_reached()
            measured = self._measure()
            with self._random.backward(layer_id, frame.microbatch, [frame.layer.replica.behaviour]):
                torch.autograd.backward(*roots)
            frame.layer.gradients.gather()
            if measured is not None:
                measured.end_backward(layer_id)
        if self._is_last_microbatch:
            self._send_parameter_gradients(layer_id)
            self._release_layer(layer_id)
        return frame.leaves.gradients

    # Preparing, calling and releasing one layer.

    def _bind(self, layer_id: int) -> _Layer:
        """Prepare a layer for this task: its weights, buffers, hooks and gradients."""
        self._place.layer_id, self._place.phase = layer_id, "weight upload"
        settings = self._recall.settings[layer_id]
        replica = self._replicas[layer_id]
        weights = self._images.ready(self._run, self._task, replica, self._place)
        hooks = () if self._run.is_probe else self._run.parameter_hooks.get(layer_id, ())
        replica.bind(weights, settings, hooks, self._recall.compiling)
        layer = self._layers[layer_id] = _Layer(
            layer_id,
            replica,
            LayerGradients(replica, self._runner.gradient_buffers),
            has_buffers=bool(replica.record.buffers),
        )
        if layer.has_buffers:
            self._buffers.upload(replica)
        return layer

    def _call(self, layer: _Layer, microbatch: int, phase: LayerPhase, value: Any) -> tuple[Any, RandomStream]:
        """Return what the layer returns, and its random stream, which knows what the layer has drawn."""
        replica, recall, is_recomputed = layer.replica, self._recall, phase is LayerPhase.RECOMPUTE
        # The first layer gets the call's arguments, every other one the output of the layer before it.
        args, kwargs = value if layer.layer_id == 0 else ((value,), {})
        is_new = is_recomputed and not recall.preserve_rng_state
        random = self._random.forward(layer.layer_id, microbatch, replica.behaviour, is_new=is_new)
        recalled = self._mail.recalled_data(layer.layer_id, microbatch) if is_recomputed and recall.layer_data else None
        layer_run = LayerRun(phase, recalled)
        with layer_run, self._autocast, random:
            replica.has_run = True
            output = replica.module(*args, **kwargs)
        if layer_run.saved and phase is LayerPhase.FORWARD:
            saved, _ = replica.copy_own_memory(Bundle.pack(layer_run.recompute_data or ()))
            self._mail.save_layer_data(layer.layer_id, microbatch, saved)
        return output, random

    def _send_parameter_gradients(self, layer_id: int) -> None:
        """Start the download of a layer's parameter gradients, after those of all microbatches were added up."""
        if layer_id not in self._run.landing_layers:
            return
        self._place.layer_id, self._place.phase = layer_id, "gradient download"
        sent = self._layers[layer_id].gradients.download(self._runner.transfer, self._run.store.landing_buffers)
        self._runner.landing.submit(Landing(self._run, layer_id, sent))

    def _release_layer(self, layer_id: int) -> None:
        """Free the weights of a layer that this task no longer needs, for the next task's uploads."""
        self._layers.pop(layer_id).replica.unbind()
        self._images.finish_layer(self._run, self._task, layer_id)
        self._runner.prefetch_next(True)

    # Running the loss.

    def _loss_and_backward(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> Gradients:
        """Run loss_fn and its backward in a separate graph; return the gradients of the model's outputs."""
        if self._run.wants_outputs:
            self._place.layer_id, self._place.phase = None, "output download"
            self._mail.send_outputs(microbatch, bundle, flags)
            self._runner.transfer.let_downloads_finish_first()
        leaves = Leaves(bundle, flags)
        measured = self._measure()
        with torch.enable_grad():
            losses = self._losses(microbatch, leaves.value())
        if measured is not None:
            measured.loss_computed()
        self._place.layer_id, self._place.phase = None, "loss backward"
        with self._random.backward(len(self._run.store.layers), microbatch):
            torch.autograd.backward(losses.tensors)
        if measured is not None:
            measured.end_loss(self._task.layers[-1])
        self._mail.send_losses(microbatch, losses)
        return leaves.gradients

    def _losses(self, microbatch: int, outputs: Any) -> Losses:
        """Run loss_fn on a microbatch and multiply each loss by its share."""
        self._place.layer_id, self._place.phase = None, "loss_fn"
        shares, loss_fn = self._recall.loss_shares, self._run.loss_fn
        assert loss_fn is not None
        label = self._mail.label(microbatch)
        random = self._random.forward(len(self._run.store.layers), microbatch)  # the loss counts as one more layer
        with torch.enable_grad(), self._autocast, random:
            given = outputs if shares.own is None else shares.apply_to_output(outputs, microbatch)
            value = loss_fn(given, label)
            return Losses.weighed(value, shares, microbatch)
