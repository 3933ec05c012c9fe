"""What a stage task receives, keeps for its recomputation, and hands on.

Used by runtime.stage, one per task. Values for the next task stay on the device when that task runs here too, and go
through host memory otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from roundpipe.plan import StageTask
from roundpipe.runtime.autograd import Gradients
from roundpipe.runtime.run import GradientParcel, HostValues, Parcel, Place, Run
from roundpipe.runtime.transfer import Transfer
from roundpipe.runtime.values import Bundle


class Losses(NamedTuple):
    """The losses of one microbatch; `is_sequence`: loss_fn returned a sequence, not a tensor."""

    tensors: list[torch.Tensor]
    is_sequence: bool


class StageMail:
    def __init__(self, run: Run, task: StageTask, transfer: Transfer, place: Place) -> None:
        self._run, self._task = run, task
        self._recall = run.recall
        self._transfer = transfer
        self._place = place
        position = task.index - run.first_task_index
        self._is_last = position == len(run.tasks) - 1
        self._next_is_here = not self._is_last and run.workers[position] == run.workers[position + 1]

    # Forward.

    def receive(self, microbatch: int) -> tuple[Bundle, tuple[bool, ...]]:
        """The value for the task's first layer, and which of its tensors require grad."""
        self._place.at(self._task.layers[0], "input upload")
        parcel = self._run.take(self._task, microbatch)
        assert isinstance(parcel, Parcel)
        return self._on_device(parcel), parcel.requires_grad

    def send(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        self._place.at(self._task.layers[-1], "output download")
        if self._is_last:
            if not self._run.is_probe:
                self.send_outputs(microbatch, bundle, flags)
        elif self._next_is_here:
            self._run.post(self._task.index + 1, microbatch, Parcel(bundle, flags, resident=True))
        else:
            host, event = self._transfer.down_bundle(bundle)
            self._run.post(self._task.index + 1, microbatch, Parcel(host, flags, (event,)))

    def send_outputs(self, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        """The model's outputs go to the caller."""
        host, event = self._transfer.down_bundle(bundle)
        self._run.note_result(self._run.outputs, microbatch, Parcel(host, flags, (event,)))

    def send_losses(self, microbatch: int, losses: Losses) -> None:
        host, event = self._transfer.down(losses.tensors)
        self._run.note_result(self._run.losses, microbatch, (losses.is_sequence, HostValues(list(host), event)))

    def label(self, microbatch: int) -> Any:
        bundle = self._run.labels[microbatch]
        return bundle.with_tensors(self._transfer.up(bundle.tensors, ())).unpack()

    # Kept for recomputation.

    def save_input(self, layer_id: int, microbatch: int, bundle: Bundle, flags: tuple[bool, ...]) -> None:
        self._place.at(layer_id, "saving input")
        host, event = self._transfer.down_bundle(bundle)
        self._recall.inputs[layer_id, microbatch] = Parcel(host, flags, (event,))

    def save_layer_data(self, layer_id: int, microbatch: int, saved: Bundle) -> None:
        host, event = self._transfer.down_bundle(saved)
        self._recall.layer_data[layer_id, microbatch] = Parcel(host, (), (event,))

    def recalled_input(self, layer_id: int, microbatch: int) -> tuple[Bundle, tuple[bool, ...]]:
        self._place.at(layer_id, "saved input upload")
        parcel = self._recall.inputs.pop((layer_id, microbatch))
        return self._on_device(parcel), parcel.requires_grad

    def recalled_data(self, layer_id: int, microbatch: int) -> tuple[Any, ...] | None:
        parcel = self._recall.layer_data.pop((layer_id, microbatch), None)
        if parcel is None:
            return None
        value: tuple[Any, ...] = self._on_device(parcel).unpack()
        return value

    def forget_input(self, layer_id: int, microbatch: int) -> int:
        """The saved input is not needed after all; returns how many tensors it had."""
        return len(self._recall.inputs.pop((layer_id, microbatch)).bundle.tensors)

    # Backward.

    def receive_gradients(self, microbatch: int) -> Gradients:
        """Gradients of the outputs of the task's last layer."""
        self._place.at(self._task.layers[-1], "gradient upload")
        parcel = self._run.take(self._task, microbatch)
        assert isinstance(parcel, GradientParcel)
        if parcel.resident:
            return list(parcel.gradients)
        arrived = iter(self._transfer.up([g for g in parcel.gradients if g is not None], parcel.events))
        return [None if gradient is None else next(arrived) for gradient in parcel.gradients]

    def send_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients of the inputs of the task's first layer."""
        self._place.at(self._task.layers[0], "input gradient download")
        if self._next_is_here:
            self._run.post(self._task.index + 1, microbatch, GradientParcel(tuple(gradients), resident=True))
            return
        copies, event = self._transfer.down([g for g in gradients if g is not None])
        arrived = iter(copies)
        host = tuple(None if gradient is None else next(arrived) for gradient in gradients)
        parcel = GradientParcel(host, (event,))
        if self._is_last:
            self._run.note_result(self._run.input_gradients, microbatch, parcel)
        else:
            self._run.post(self._task.index + 1, microbatch, parcel)

    def _on_device(self, parcel: Parcel) -> Bundle:
        if parcel.resident:
            return parcel.bundle
        return parcel.bundle.with_tensors(self._transfer.up(parcel.bundle.tensors, parcel.events))
