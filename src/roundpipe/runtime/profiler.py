"""Measures the time and device memory of layers while a task runs them.

Writes measurements into the run, for the planner. Costs nothing in runs that are not measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from roundpipe.context import LayerPhase
from roundpipe.devices import Device, MemoryUse
from roundpipe.plan import Phase
from roundpipe.runtime.run import Measurement, Place, Run

_NOTHING_TO_NOTE = contextlib.nullcontext()
_TIMED_MICROBATCHES = 3
_LOSS_BACKWARD_FACTOR = 2  # backward of a loss holds an incoming and an outgoing gradient per saved byte


class Meter:
    """Context managers around forward, backward and loss that record their cost. One object per task."""

    def __init__(self, run: Run, device: Device, place: Place) -> None:
        """`place` knows the microbatch that is running."""
        self._run, self._device, self._place = run, device, place

    def forward(self, layer_id: int, phase: LayerPhase, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        return self._forward(layer_id, phase, inputs) if self._is_on(_TIMED_MICROBATCHES) else _NOTHING_TO_NOTE

    def backward(self, layer_id: int) -> AbstractContextManager[None]:
        return self._backward(layer_id) if self._is_on(_TIMED_MICROBATCHES) else _NOTHING_TO_NOTE

    def _is_on(self, for_microbatches: int) -> bool:
        """Whether to measure now. Only the first microbatches: measuring delays the launch of kernels."""
        return self._run.is_measured and (self._place.microbatch or 0) < for_microbatches

    def _memory_use(self) -> MemoryUse | None:
        return self._device.memory_use() if self._is_on(1) else None

    @contextlib.contextmanager
    def _forward(self, layer_id: int, phase: LayerPhase, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        memory_before, start = self._memory_use(), self._device.mark()
        yield
        timed = Phase.RECOMPUTE if phase is LayerPhase.RECOMPUTE else Phase.FORWARD
        self._run.measurements.append(Measurement(layer_id, timed, start, self._device.mark()))
        memory_after = self._memory_use()
        # An inference keeps no activations, so it says nothing about training.
        if memory_before is not None and memory_after is not None and phase is not LayerPhase.INFERENCE:
            kept = max(memory_after.current - memory_before.current, 0)
            self._run.activation_bytes[layer_id] = (kept, sum(tensor.nbytes for tensor in inputs))

    @contextlib.contextmanager
    def _backward(self, layer_id: int) -> Iterator[None]:
        start = self._device.mark()
        yield
        self._run.measurements.append(Measurement(layer_id, Phase.BACKWARD, start, self._device.mark()))

    @contextlib.contextmanager
    def loss(self, last_layer: int) -> Iterator[LossMemory]:
        """Measure a loss and its backward; their peak counts as activations of the last layer."""
        is_on = self._is_on(1)
        memory = LossMemory(self._device if is_on else None)
        yield memory
        if is_on and last_layer in self._run.activation_bytes:
            kept, input_bytes = self._run.activation_bytes[last_layer]
            self._run.activation_bytes[last_layer] = (kept + memory.most(), input_bytes)


class LossMemory:
    """Peak device memory of one loss and its backward. Without a device it measures nothing and returns 0."""

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._before = self._use()
        self._kept = 0

    def computed(self) -> None:
        """Call between the loss and its backward: records how much the loss keeps for its backward."""
        use = self._use()
        if use is not None and self._before is not None:
            self._kept = max(use.current - self._before.current, 0)

    def most(self) -> int:
        """Peak bytes of loss and backward: measured if they raised the device's peak, estimated otherwise."""
        after, before = self._use(), self._before
        if after is not None and before is not None and after.peak > before.peak:
            return after.peak - before.current
        return (1 + _LOSS_BACKWARD_FACTOR) * self._kept

    def _use(self) -> MemoryUse | None:
        return None if self._device is None else self._device.memory_use()
