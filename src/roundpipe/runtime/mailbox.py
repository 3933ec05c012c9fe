"""Moves the values of one task: inputs, values saved for recomputation, outputs, gradients, and buffers of layers.

Values for a task on the same device stay in device memory; all others go through host memory. Knows parcels and
transfers, never schedules.

[Note: buffers] Buffers are those of nn.Module: running statistics, masks. A forward sees them as the previous
microbatch left them. The host gets the values after the last microbatch. A recomputation sees the values that the
forward of its microbatch saw, and its writes are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from roundpipe.context import LayerPhase
from roundpipe.errors import UsageError
from roundpipe.microbatch import LossShares
from roundpipe.microbatch.split import own_loss, weighted
from roundpipe.plan import StageTask
from roundpipe.runtime.autograd import Gradients, checked_losses
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.run import GradientParcel, HostValues, Parcel, Place, Run
from roundpipe.runtime.transfer import Bundle, Transfer

_Tensors = list[torch.Tensor | None]


class Losses(NamedTuple):
    """The losses of one microbatch; `is_sequence`: loss_fn returned a sequence, not a tensor."""

    tensors: list[torch.Tensor]
    is_sequence: bool

    @classmethod
    def weighed(cls, value: Any, shares: LossShares, microbatch: int) -> Losses:
        """What loss_fn has returned for a microbatch, each loss multiplied by its share."""
        found = None if isinstance(value, torch.Tensor) else own_loss(value, shares.place)
        losses = checked_losses(value if found is None else found)
        share = None if shares.returned is None else shares.of_returned(microbatch, is_own=found is not None)
        if share is not None:
            losses = [weighted(loss, share) for loss in losses]
        return cls(losses, is_sequence=found is None and not isinstance(value, torch.Tensor))


class StageMail:
    """Inputs, saved values and outputs of one task. One object per task."""

    def __init__(self, run: Run, task: StageTask, transfer: Transfer, place: Place) -> None:
        self._run, self._task = run, task
        self._recall = run.recall
        self._transfer = transfer
        self._place = place
        position = task.index - run.first_task_index
        self._is_last = position == len(run.tasks) - 1
        # If the next task runs on the same device, it finds the value in device memory.
        self._next_is_here = not self._is_last and run.workers[position] == run.workers[position + 1]

    # Values of the forward pass.

    def receive(self, microbatch: int) -> tuple[Bundle, tuple[bool, ...]]:
        """Wait for the input of the task's first layer: the value, and which of its tensors require grad."""
        self._place.layer_id, self._place.phase = self._task.layers[0], "input upload"
        parcel = self._run.take(self._task, microbatch)
        assert isinstance(parcel, Parcel)
        return self._on_device(parcel), parcel.requires_grad

    def send(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        """Send the output of the task's last layer to the next task, or to the caller after the last task."""
        self._place.layer_id, self._place.phase = self._task.layers[-1], "output download"
        if self._is_last:
            if not self._run.is_probe:  # a probe has no caller that reads outputs
                self.send_outputs(microbatch, bundle, flags)
        elif self._next_is_here:
            self._run.post(self._task.index + 1, microbatch, Parcel(bundle, flags, resident=True))
        else:
            host, event = self._transfer.down_bundle(bundle)
            self._run.post(self._task.index + 1, microbatch, Parcel(host, flags, (event,)))

    def send_outputs(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        """Download the model's outputs for the caller."""
        host, event = self._transfer.down_bundle(bundle)
        _note_result(self._run, self._run.outputs, microbatch, Parcel(host, flags, (event,)))

    def send_losses(self, microbatch: int, losses: Losses) -> None:
        host, event = self._transfer.down(losses.tensors)
        _note_result(self._run, self._run.losses, microbatch, (losses.is_sequence, HostValues(list(host), event)))

    def label(self, microbatch: int) -> Any:
        """The microbatch's label on the device."""
        bundle = self._run.labels[microbatch]
        return bundle.with_tensors(self._transfer.up(bundle.tensors, ())).unpack()

    # Values saved for recomputation.

    def save_input(self, layer_id: int, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        """Download a layer's input, from which its recomputation starts."""
        self._place.layer_id, self._place.phase = layer_id, "saving input"
        host, event = self._transfer.down_bundle(bundle)
        self._recall.inputs[layer_id, microbatch] = Parcel(host, flags, (event,))

    def save_layer_data(self, layer_id: int, microbatch: int, saved: Bundle) -> None:
        """Download the data that the layer passed to save_for_recompute."""
        host, event = self._transfer.down_bundle(saved)
        self._recall.layer_data[layer_id, microbatch] = Parcel(host, (), (event,))

    def recalled_input(self, layer_id: int, microbatch: int) -> tuple[Bundle, tuple[bool, ...]]:
        """The saved input on the device, and its requires_grad flags. The host copy is freed."""
        self._place.layer_id, self._place.phase = layer_id, "saved input upload"
        parcel = self._recall.inputs.pop((layer_id, microbatch))
        return self._on_device(parcel), parcel.requires_grad

    def recalled_data(self, layer_id: int, microbatch: int) -> tuple[Any, ...] | None:
        """The data that the layer passed to save_for_recompute, on the device; None if there is none.

        The host copy is freed.
        """
        parcel = self._recall.layer_data.pop((layer_id, microbatch), None)
        if parcel is None:
            return None
        value: tuple[Any, ...] = self._on_device(parcel).unpack()
        return value

    def needs_no_gradient(self, microbatch: int) -> bool:
        """Whether neither parameters of the task's layers nor its input need a gradient."""
        first = self._recall.inputs[self._task.layers[0], microbatch]
        trains = any(self._recall.settings[layer_id].trains for layer_id in self._task.layers)
        return not trains and not any(first.requires_grad)

    def pass_no_gradient_on(self, microbatch: int) -> None:
        """Free the saved inputs without reading them, and send None as the gradients of the task's input."""
        saved = [layer_id for layer_id in self._task.layers if layer_id in self._recall.save_points]
        counts = [len(self._recall.inputs.pop((layer_id, microbatch)).bundle.tensors) for layer_id in saved]
        self.send_gradients(microbatch, [None] * counts[0])

    # Gradients of the backward pass.

    def receive_gradients(self, microbatch: int) -> Gradients:
        """Wait for the gradients of the outputs of the task's last layer."""
        self._place.layer_id, self._place.phase = self._task.layers[-1], "gradient upload"
        parcel = self._run.take(self._task, microbatch)
        assert isinstance(parcel, GradientParcel)
        if parcel.resident:
            return list(parcel.gradients)
        arrived = iter(self._transfer.up([g for g in parcel.gradients if g is not None], parcel.events))
        return [None if gradient is None else next(arrived) for gradient in parcel.gradients]

    def send_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of the inputs of the task's first layer to the next task or to the caller."""
        self._place.layer_id, self._place.phase = self._task.layers[0], "input gradient download"
        if self._next_is_here:
            self._run.post(self._task.index + 1, microbatch, GradientParcel(tuple(gradients), resident=True))
            return
        copies, event = self._transfer.down([g for g in gradients if g is not None])
        arrived = iter(copies)
        host = tuple(None if gradient is None else next(arrived) for gradient in gradients)
        parcel = GradientParcel(host, (event,))
        if self._is_last:
            _note_result(self._run, self._run.input_gradients, microbatch, parcel)
        else:
            self._run.post(self._task.index + 1, microbatch, parcel)

    def _on_device(self, parcel: Parcel) -> Bundle:
        if parcel.resident:
            return parcel.bundle
        return parcel.bundle.with_tensors(self._transfer.up(parcel.bundle.tensors, parcel.events))


def _note_result(run: Run, results: dict[int, Any], key: int, value: Any) -> None:
    """Store a result in one of the run's dicts and wake the threads that wait for it."""
    with run.monitor:
        results[key] = value
        run.monitor.changed()


class StageBuffers:
    """Sets, saves and downloads the buffers of a task's layers. One object per task."""

    def __init__(self, run: Run, transfer: Transfer) -> None:
        self._run = run
        self._recall = run.recall
        self._transfer = transfer
        self._as_call_began: dict[int, _Tensors] = {}
        # Buffers and their version counters before the forward that is running.
        self._before: list[tuple[torch.Tensor | None, int]] = []

    def upload(self, replica: Replica) -> None:
        """Give the replica device copies of the buffers as they were when the call began."""
        layer_id = replica.record.layer_id
        values = self._up(self._recall.frozen_buffers.get(layer_id, []), None)
        self._as_call_began[layer_id] = values
        replica.set_buffers(values)

    def before_forward(self, replica: Replica, microbatch: int, phase: LayerPhase) -> None:
        """Prepare the buffers for one forward, and remember their versions to detect writes.

        Saves and restores buffers per microbatch only for layers that have written a buffer in this call.
        """
        if not replica.record.buffers:
            return
        layer_id = replica.record.layer_id
        if layer_id in self._recall.writes_buffers:
            if phase is LayerPhase.RECOMPUTE:
                replica.set_buffers(self._as_forward_saw_them(layer_id, microbatch))
            elif phase is LayerPhase.FORWARD:
                # A clone, because the layer's next forward may write in place while the download is queued.
                present = [None if b is None else b.clone() for b in replica.get_buffers()]
                self._recall.buffers_before[layer_id, microbatch] = self._down(present)
        self._before = [(b, -1 if b is None else b._version) for b in replica.get_buffers()]

    def after_forward(self, replica: Replica, microbatch: int, phase: LayerPhase) -> None:
        """Detect writes to buffers. After the last microbatch, download the buffers of a layer that wrote to any."""
        if not replica.record.buffers or phase is LayerPhase.RECOMPUTE:
            return
        layer_id = replica.record.layer_id
        after = replica.get_buffers()
        changed = [
            new is not old or (new is not None and new._version != version)
            for (old, version), new in zip(self._before, after, strict=True)
        ]
        replica.behaviour.writes_buffers = bool(replica.behaviour.writes_buffers) or any(changed)
        if any(changed):
            _refuse_shared_writes(replica, changed)
            self._recall.writes_buffers.add(layer_id)
            # A buffer computed from a graph would keep this microbatch's activations alive.
            after = [None if b is None else b.detach() for b in after]
            replica.set_buffers(after)
        if layer_id in self._recall.writes_buffers and microbatch == self._run.num_microbatch - 1:
            _note_result(self._run, self._run.buffer_results, layer_id, self._down(after))

    def _as_forward_saw_them(self, layer_id: int, microbatch: int) -> _Tensors:
        saved = self._recall.buffers_before.pop((layer_id, microbatch), None)
        if saved is None:  # no earlier microbatch had written a buffer
            return [None if b is None else b.clone() for b in self._as_call_began[layer_id]]
        return self._up(saved.tensors, saved)

    def _up(self, values: Sequence[torch.Tensor | None], source: HostValues | None) -> _Tensors:
        after = () if source is None else (source.event,)
        arrived = iter(self._transfer.up([value for value in values if value is not None], after))
        return [None if value is None else next(arrived) for value in values]

    def _down(self, values: Sequence[torch.Tensor | None]) -> HostValues:
        copies, event = self._transfer.down([value for value in values if value is not None])
        arrived = iter(copies)
        return HostValues([None if value is None else next(arrived) for value in values], event)


def _refuse_shared_writes(replica: Replica, changed: Sequence[bool]) -> None:
    for record, was_changed in zip(replica.record.buffers, changed, strict=True):
        if was_changed and record.shared_between_layers:
            raise UsageError(
                f"buffer {record.name!r} belongs to several layers and layer {replica.record.layer_id} wrote to it; "
                "layers run at the same time on several devices, so the order of such writes is undefined. Give each "
                "layer a buffer of its own."
            )
