"""Runs one stage task on one device: for every microbatch the layers' forward, loss, recomputation and backward.

Called by runtime.worker. Knows layers and tensors; where values come from and go to is StageMail's, what buffers hold
is StageBuffers', and when weights may be read is LayerStore's.

[Note: forward keeps the grad mode]
A forward that will be recomputed runs with grad enabled too, and its graph is dropped layer by layer: code that looks
at the grad mode (fused kernels, checkpoints) takes the same path both times.

[Note: tail]
The last microbatches of a fused task may run all their forwards first, and then go backward layer by layer, all of them
through a layer before any goes through the one before it. Each layer adds up the same gradients in the same order, but
those of the last layers are complete early, so that an optimizer which needs them all can work behind the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe.config import RecomputeGrain
from roundpipe.context import LayerPhase, LayerRun, running_layer, within_iteration
from roundpipe.devices import Device, Mark, StreamKind
from roundpipe.devices.random import HostRandomStream, ProcessRandomStream, route_shared_generators
from roundpipe.errors import ArgumentTypeError, RecomputeError, UsageError
from roundpipe.microbatch.loss_shares import own_loss, weighted
from roundpipe.plan import StageTask, TaskKind
from roundpipe.runtime.autograd import Frame, Gradients, Leaves
from roundpipe.runtime.buffers import StageBuffers
from roundpipe.runtime.gradients import Landing, LandingThread, LayerGradients
from roundpipe.runtime.mailbox import StageMail
from roundpipe.runtime.profiler import Meter
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.rng import stream_seed
from roundpipe.runtime.run import Place, Run, TaskSpan
from roundpipe.runtime.transfer import DeviceBuffers, Transfer
from roundpipe.runtime.values import Bundle
from roundpipe.runtime.weights import LayerImages


class StageRunner:
    """Carries out tasks on one device, one at a time."""

    def __init__(
        self, device: Device, landing: LandingThread, images: LayerImages, prefetch_next: Callable[[bool], None]
    ) -> None:
        self.device = device
        self.landing = landing
        self.images = images
        self.prefetch_next = prefetch_next
        self.transfer = Transfer(device)
        self.gradient_buffers = DeviceBuffers(device, StreamKind.COMPUTE, StreamKind.GRADS_DOWN)
        self.place = Place()

    def release_unused(self) -> None:
        self.images.release_unused()
        self.gradient_buffers.release_unused()
        self.device.release_unused()

    def run(self, run: Run, task: StageTask) -> None:
        route_shared_generators()
        with self.device.computing(), within_iteration(run.iteration):
            _Task(self, run, task).carry_out()


class _Task:
    """One task being carried out."""

    def __init__(self, runner: StageRunner, run: Run, task: StageTask) -> None:
        self._run, self._task = run, task
        self._recall = run.recall
        self._runner = runner
        self._device = runner.device
        self._images = runner.images
        self._place = runner.place
        self._place.enter(run, task, self._device.name)
        self._mail = StageMail(run, task, runner.transfer, runner.place)
        self._buffers = StageBuffers(run, runner.transfer)
        self._meter = Meter(run, runner.device, runner.place)
        self._replicas: dict[int, Replica] = {}
        self._gradients: dict[int, LayerGradients] = {}

    def carry_out(self) -> None:
        try:
            self._images.prefetch(self._run, self._task, self._place)
            in_tail = self._tail()
            for microbatch in range(in_tail.start):
                self._run.check()
                self._place.microbatch = microbatch
                self._run_microbatch(microbatch)
                if microbatch == 0:
                    self._runner.prefetch_next(False)
            if in_tail:
                self._run_tail(in_tail)
        finally:
            for replica in self._replicas.values():
                replica.unbind()

    def _run_microbatch(self, microbatch: int) -> None:
        match self._task.kind:
            case TaskKind.FORWARD:
                value = self._mail.receive(microbatch)
                with self._spanned(microbatch):
                    self._forward_task(microbatch, *value)
            case TaskKind.FUSED:
                value = self._mail.receive(microbatch)
                with self._spanned(microbatch):
                    self._fused_task(microbatch, *value)
            case TaskKind.BACKWARD:
                # Gradients come last of all: once they are here, so is what forward saved.
                gradients = self._mail.receive_gradients(microbatch)
                with self._spanned(microbatch):
                    self._backward_task(microbatch, gradients)

    # The kinds of task.

    def _forward_task(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        for layer_id in self._task.layers:
            if layer_id in self._recall.save_points:
                self._mail.save_input(layer_id, microbatch, bundle, flags)
            bundle, flags = self._forward_layer(
                layer_id, microbatch, bundle, flags, self._run.forward_phase
            ).handed_on()
            if microbatch == self._run.num_microbatch - 1:
                self._let_go_of_weights(layer_id)
        self._mail.send(microbatch, bundle, flags)

    def _fused_task(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        frames, bundle, flags = self._forward_stage(microbatch, bundle, flags, LayerPhase.FUSED)
        gradients = self._loss(microbatch, bundle, flags)
        del bundle
        if not self._run.is_probe:
            self._backward_frames(frames, gradients, microbatch)

    def _tail(self) -> range:
        """The microbatches at the end of a fused task that go backward together; see [Note: tail].

        None where a layer may write buffers: what one microbatch has saved another would change.
        """
        count = self._run.num_microbatch
        has_one = self._task.kind is TaskKind.FUSED and self._run.tail > 1
        if not has_one or any(map(self._may_write_buffers, self._task.layers)):
            return range(count, count)
        return range(max(count - self._run.tail, 0), count)

    def _may_write_buffers(self, layer_id: int) -> bool:
        replica = self._images.replica(self._run.store, layer_id)
        return replica.may_write_buffers(self._recall.settings[layer_id].training)

    def _run_tail(self, microbatches: range) -> None:
        stacks: dict[int, list[Frame]] = {}
        gradients: dict[int, Gradients] = {}
        for microbatch in microbatches:
            self._run.check()
            self._place.microbatch = microbatch
            bundle, flags = self._mail.receive(microbatch)
            with self._spanned(microbatch):
                frames, bundle, flags = self._forward_stage(microbatch, bundle, flags, LayerPhase.FUSED)
                of_outputs = self._loss(microbatch, bundle, flags)
                del bundle
                # The last layer at once: what comes out of it, often the largest of all, need not be kept.
                gradients[microbatch] = self._backward_layer(frames.pop(), of_outputs, microbatch)
                stacks[microbatch] = frames
            if microbatch == microbatches.start == 0:
                self._runner.prefetch_next(False)
        for _ in self._task.layers[1:]:
            self._run.check()
            for microbatch in microbatches:
                self._place.microbatch = microbatch
                frame = stacks[microbatch].pop()
                gradients[microbatch] = self._backward_layer(frame, gradients[microbatch], microbatch)
        for microbatch in microbatches:
            self._mail.send_gradients(microbatch, gradients[microbatch])

    def _backward_task(self, microbatch: int, gradients: Gradients) -> None:
        if self._needs_no_gradient(microbatch):
            self._pass_no_gradient_on(microbatch)
        elif self._recall.grain is RecomputeGrain.LAYER:
            self._backward_by_layer(microbatch, gradients)
        else:
            self._backward_by_stage(microbatch, gradients)

    def _backward_by_stage(self, microbatch: int, gradients: Gradients) -> None:
        bundle, flags = self._mail.recalled_input(self._task.layers[0], microbatch)
        frames, bundle, flags = self._forward_stage(microbatch, bundle, flags, LayerPhase.RECOMPUTE)
        del bundle
        self._backward_frames(frames, gradients, microbatch)

    def _backward_by_layer(self, microbatch: int, gradients: Gradients) -> None:
        for layer_id in reversed(self._task.layers):
            bundle, flags = self._mail.recalled_input(layer_id, microbatch)
            frame = self._forward_layer(layer_id, microbatch, bundle, flags, LayerPhase.RECOMPUTE)
            del bundle
            gradients = self._backward_layer(frame, gradients, microbatch)
        self._mail.send_gradients(microbatch, gradients)

    def _needs_no_gradient(self, microbatch: int) -> bool:
        first = self._recall.inputs[self._task.layers[0], microbatch]
        trains = any(self._recall.settings[layer_id].trains for layer_id in self._task.layers)
        return not trains and not any(first.requires_grad)

    def _pass_no_gradient_on(self, microbatch: int) -> None:
        counts = [
            self._mail.forget_input(layer_id, microbatch)
            for layer_id in self._task.layers
            if layer_id in self._recall.save_points
        ]
        self._mail.send_gradients(microbatch, [None] * counts[0])

    # Layers.

    def _forward_stage(
        self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...], phase: LayerPhase
    ) -> tuple[list[Frame], Bundle, tuple[bool, ...]]:
        frames = []
        for layer_id in self._task.layers:
            frames.append(self._forward_layer(layer_id, microbatch, bundle, flags, phase))
            bundle, flags = frames[-1].handed_on()
        return frames, bundle, flags

    def _forward_layer(
        self, layer_id: int, microbatch: int, bundle: Bundle, flags: Sequence[bool], phase: LayerPhase
    ) -> Frame:
        replica = self._bound_replica(layer_id)
        self._place.at(layer_id, "recompute" if phase is LayerPhase.RECOMPUTE else "forward")
        self._buffers.before_forward(replica, microbatch, phase)
        if replica.may_change_input():
            self._runner.transfer.let_downloads_finish_first()
        with_grad = phase is not LayerPhase.INFERENCE
        leaves = Leaves(bundle, [flag and with_grad for flag in flags])
        recalled = self._mail.recalled_data(layer_id, microbatch) if phase is LayerPhase.RECOMPUTE else None
        layer_run = LayerRun(phase, recalled)
        metered = self._meter.forward(layer_id, phase, bundle.tensors)
        with torch.set_grad_enabled(with_grad), running_layer(layer_run), metered:
            args, kwargs = _call_arguments(layer_id, leaves.value())
            outputs, drew = self._call_layer(replica, microbatch, phase, args, kwargs)
        replica.note_behaviour(changed_input=leaves.were_changed(), drew_on_host=drew)
        self._buffers.after_forward(replica, microbatch, phase)
        is_last = microbatch == self._run.num_microbatch - 1
        if is_last and phase is not LayerPhase.RECOMPUTE and not self._run.is_probe:
            replica.write_attributes_back()
        if layer_run.saved and phase is LayerPhase.FORWARD:
            saved = Bundle.pack(layer_run.recompute_data or ())
            self._mail.save_layer_data(layer_id, microbatch, replica.apart(saved))
        return Frame(layer_id, replica, leaves, outputs)

    def _call_layer(
        self, replica: Replica, microbatch: int, phase: LayerPhase, args: Any, kwargs: Any
    ) -> tuple[Bundle, bool | None]:
        anew = phase is LayerPhase.RECOMPUTE and not self._recall.preserve_rng_state
        seed = stream_seed(self._recall.seed, replica.record.layer_id, microbatch, anew)
        with self._random_stream(seed, replica.may_draw_on_host(), is_first=not replica.has_run()) as host:
            value = replica.module(*args, **kwargs)
            if replica.record.layer_id == len(self._run.store.layers) - 1:
                value = self._recall.loss_shares.apply_to_output(value, microbatch)
        return Bundle.pack(value), None if host is None else host.drew

    @contextlib.contextmanager
    def _random_stream(
        self, seed: int, may_draw_on_host: bool, *, is_first: bool = False
    ) -> Iterator[HostRandomStream | None]:
        """Random numbers of this (call, layer, microbatch), on the device and, where it may draw there, on the host."""
        of_process = ProcessRandomStream(seed, is_watched=is_first)
        with self._recall.ambient.entered(), self._device.random_stream(seed), of_process:
            if self._device.draws_on_host or may_draw_on_host:
                with HostRandomStream(seed) as host:
                    yield host
            else:
                yield None

    def _backward_frames(self, frames: list[Frame], gradients: Gradients, microbatch: int) -> None:
        while frames:
            gradients = self._backward_layer(frames.pop(), gradients, microbatch)
        self._mail.send_gradients(microbatch, gradients)

    def _backward_layer(self, frame: Frame, gradients: Gradients, microbatch: int) -> Gradients:
        """Gradients of the layer's inputs from those of its outputs; parameters gather theirs in the replica."""
        self._place.at(frame.layer_id, "backward")
        outputs = frame.outputs.tensors
        if len(outputs) != len(gradients):
            raise RecomputeError(
                f"layer {frame.layer_id} returned {len(outputs)} tensors when recomputed but {len(gradients)} in the "
                "forward pass; a layer must do the same both times (see save_for_recompute)."
            )
        pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None and t.requires_grad]
        if pairs:
            with self._meter.backward(frame.layer_id):
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
                self._gradients[frame.layer_id].gather()
        if microbatch == self._run.num_microbatch - 1:
            self._send_parameter_gradients(frame.layer_id)
            self._let_go_of_weights(frame.layer_id)
        return frame.leaves.gradients

    def _send_parameter_gradients(self, layer_id: int) -> None:
        """All microbatches have been added up: the layer's gradients start on their way down."""
        if layer_id not in self._run.landing_layers:
            return
        self._place.at(layer_id, "gradient download")
        sent = self._gradients[layer_id].download(self._runner.transfer, self._run.store.landing_buffers)
        self._runner.landing.submit(Landing(self._run, layer_id, sent))

    def _bound_replica(self, layer_id: int) -> Replica:
        if layer_id not in self._replicas:
            self._place.at(layer_id, "weight upload")
            replica = self._images.replica(self._run.store, layer_id)
            image = self._images.ready(self._run, self._task, layer_id, self._place)
            replica.bind(image, self._recall.settings[layer_id], self._run.parameter_hooks.get(layer_id, ()))
            self._replicas[layer_id] = replica
            self._gradients[layer_id] = LayerGradients(replica, self._runner.gradient_buffers)
            self._buffers.upload(replica)
        return self._replicas[layer_id]

    def _let_go_of_weights(self, layer_id: int) -> None:
        """The task needs them no more; the next one may."""
        self._replicas.pop(layer_id).unbind()
        self._images.finish_layer(self._run, self._task, layer_id)
        self._runner.prefetch_next(True)

    # The loss.

    def _loss(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> Gradients:
        """Runs loss_fn and its backward; returns the gradients of the model's outputs."""
        run = self._run
        self._place.at(None, "loss_fn")
        if run.wants_outputs:
            self._mail.send_outputs(microbatch, bundle, flags)
            self._runner.transfer.let_downloads_finish_first()
        label = self._mail.label(microbatch)
        leaves = Leaves(bundle, flags)
        seed = stream_seed(self._recall.seed, len(run.store.layers), microbatch, False)
        assert run.loss_fn is not None
        with self._meter.loss(self._task.layers[-1]) as memory:
            with torch.enable_grad(), self._random_stream(seed, may_draw_on_host=False):
                value = run.loss_fn(leaves.value(), label)
                found = own_loss(value, self._recall.loss_shares.place)
                losses = checked_losses(value if found is None else found)
                share = self._recall.loss_shares.of_returned(microbatch, is_own=found is not None)
                if share is not None:
                    losses = [weighted(loss, share) for loss in losses]
            memory.computed()
            self._place.at(None, "loss backward")
            torch.autograd.backward(losses)
        is_sequence = found is None and not isinstance(value, torch.Tensor)
        self._mail.send_losses(microbatch, losses, is_sequence=is_sequence)
        return leaves.gradients

    # Measurements.

    @contextlib.contextmanager
    def _spanned(self, microbatch: int) -> Iterator[None]:
        """Work only: entered once the input is there."""
        start: Mark = self._device.mark()
        yield
        self._run.spans.append(TaskSpan(self._device.name, str(self._task), microbatch, start, self._device.mark()))


def _call_arguments(layer_id: int, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first layer gets the call's arguments, every other one the output of the layer before it."""
    if layer_id == 0:
        args, kwargs = value
        return args, kwargs
    return (value,), {}


def checked_losses(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Mapping) and value.get("loss") is None:
        raise ArgumentTypeError(
            f"there is no loss in the {type(value).__name__} with {', '.join(map(str, value))}: give the model labels, "
            "so that it computes one, or give forward_backward() a loss_fn that returns a tensor."
        )
    losses = [value] if isinstance(value, torch.Tensor) else value
    is_sequence = isinstance(losses, Sequence) and not isinstance(losses, str)
    if not is_sequence or not losses or not all(isinstance(loss, torch.Tensor) for loss in losses):
        raise ArgumentTypeError(
            f"loss_fn must return a tensor or a non-empty sequence of tensors, got {type(value).__name__}: {value!r}."
        )
    for position, loss in enumerate(losses):
        if not loss.requires_grad:
            raise UsageError(
                f"loss {position} of shape {tuple(loss.shape)} does not require grad: nothing it was computed from is "
                "trainable. Train at least one parameter the loss depends on, and do not detach() the outputs."
            )
        if loss.numel() != 1:
            raise UsageError(
                f"loss {position} has shape {tuple(loss.shape)}; loss_fn must return losses of one element each: "
                "reduce it with .mean() or .sum()."
            )
    return list(losses)
