"""Measures the time and device memory of layers while a task runs them, for the planner.

Knows marks and memory counters, never plans. A run that is not measured costs two attribute reads per layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from roundpipe.context import LayerPhase
from roundpipe.devices import Device, Mark, MemoryUse
from roundpipe.plan import Phase
from roundpipe.runtime.run import Measurement, Run

# Measuring costs the worker time in which it launches nothing, and the first microbatches show enough.
_TIMED_MICROBATCHES = 3
_SIZED_MICROBATCHES = 1
_LOSS_BACKWARD_FACTOR = 2  # everything that a loss keeps gets a gradient, and passes one on


class Began(NamedTuple):
    """The state before a layer or the loss ran."""

    mark: Mark
    memory: MemoryUse | None


class LayerProfiler:
    """The measurements of one task. `is_on` is False where the present microbatch is not measured."""

    def __init__(self, run: Run, device: Device) -> None:
        self._run, self._device = run, device
        self.is_on = False
        self._measures_memory = False
        self._loss_bytes = 0

    def begin_microbatch(self, microbatch: int) -> None:
        self.is_on = self._run.is_measured and microbatch < _TIMED_MICROBATCHES
        self._measures_memory = self.is_on and microbatch < _SIZED_MICROBATCHES

    def begin(self) -> Began | None:
        """Note the present state; None where the microbatch is not measured."""
        return Began(self._device.mark(), self._memory_use()) if self.is_on else None

    def end_forward(self, began: Began, layer_id: int, phase: LayerPhase, inputs: Iterable[torch.Tensor]) -> None:
        timed = Phase.RECOMPUTE if phase is LayerPhase.RECOMPUTE else Phase.FORWARD
        self._run.measurements.append(Measurement(layer_id, timed, began.mark, self._device.mark()))
        now = self._memory_use()
        if began.memory is not None and now is not None and phase is not LayerPhase.INFERENCE:
            kept = max(now.current - began.memory.current, 0)
            self._run.activation_bytes[layer_id] = (kept, sum(tensor.nbytes for tensor in inputs))

    def end_backward(self, began: Began, layer_id: int) -> None:
        self._run.measurements.append(Measurement(layer_id, Phase.BACKWARD, began.mark, self._device.mark()))

    def loss_computed(self, began: Began | None) -> None:
        """The loss exists and its backward follows."""
        now = self._memory_use()
        if began is not None and began.memory is not None and now is not None:
            self._loss_bytes = max(now.current - began.memory.current, 0)

    def end_loss(self, began: Began, last_layer: int) -> None:
        """The loss's backward is done: count the most it took as kept by the last layer.

        The most is known where it exceeds every earlier peak, and estimated otherwise.
        """
        now = self._memory_use()
        if now is None or began.memory is None or last_layer not in self._run.activation_bytes:
            return
        most = (1 + _LOSS_BACKWARD_FACTOR) * self._loss_bytes
        if now.peak > began.memory.peak:
            most = now.peak - began.memory.current
        kept, input_bytes = self._run.activation_bytes[last_layer]
        self._run.activation_bytes[last_layer] = (kept + most, input_bytes)

    def _memory_use(self) -> MemoryUse | None:
        return self._device.memory_use() if self._measures_memory else None
