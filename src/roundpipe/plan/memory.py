"""Estimates the device memory of stages and schedules.

Knows costs and tasks. Knows no allocator: the estimates do not include fragmentation, kernel workspaces and activations
in transfer.

[Note: buffers stay] Devices keep their weight and gradient buffers from task to task and reuse them by size. A large
layer, such as an embedding, therefore occupies its memory also while other layers run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, assert_never

from roundpipe.plan.cost import LayerCost
from roundpipe.plan.schedule import StageTask, TaskKind

# What a backward task recomputes at a time: the whole stage, or one layer after the other.
Grain = Literal["stage", "layer"]


class StageMemory:
    """Estimates memory for many schedules of one model, from prefix sums over its layers."""

    def __init__(self, costs: Sequence[LayerCost], grain: Grain = "stage", num_microbatch: int = 1) -> None:
        self._grain = grain
        self._num_microbatch = num_microbatch
        # Between two tasks of one device, the inputs of all microbatches wait on the device.
        self._waiting_inputs = tuple(num_microbatch * cost.input_bytes for cost in costs)
        self._weight_sizes = tuple(cost.weight_bytes for cost in costs)
        self._grad_sizes = tuple(cost.grad_bytes for cost in costs)
        # Prefix sums: the sum over a range is one subtraction.
        self._weights = (0, *accumulate(self._weight_sizes))
        self._grads = (0, *accumulate(self._grad_sizes))
        self._activation_sums = (0, *accumulate(cost.activation_bytes for cost in costs))
        self._activations = tuple(cost.activation_bytes for cost in costs)

    def weight_bytes(self, layers: range) -> int:
        return self._weights[layers.stop] - self._weights[layers.start]

    def range_bytes(self, kind: TaskKind, layers: range) -> int:
        """Return the bytes that a stage over these layers occupies while it runs."""
        held = self.weight_bytes(layers) + self._activation_bytes(kind, layers)
        if kind is not TaskKind.FORWARD:
            held += self._grads[layers.stop] - self._grads[layers.start] + self._fresh_gradient_bytes(layers)
        return held

    def peak_bytes(self, tasks: Sequence[StageTask], num_devices: int) -> int:
        """Return the peak bytes on one device. [Note: buffers stay]

        Counts all weight and gradient buffers, plus the largest sum of activations, a new gradient, and activations
        passed between two tasks of the same device.
        """
        weights, grads = self.buffer_bytes(tasks, num_devices)
        return weights + grads + max(self._transient_bytes(tasks, place, num_devices) for place in range(len(tasks)))

    def buffer_bytes(self, tasks: Sequence[StageTask], num_devices: int) -> tuple[int, int]:
        """Return the bytes of all weight buffers and of all gradient buffers on one device.

        For each buffer size, the device has as many buffers as are ever in use at the same time.
        """
        fused = next((place for place, task in enumerate(tasks) if task.kind is TaskKind.FUSED), len(tasks))
        # The union of Counters (|=) keeps the maximum of each count.
        weights: Counter[int] = Counter()
        grads: Counter[int] = Counter()
        for place, task in enumerate(tasks):
            # The task that follows on the same device. The next call starts when the losses of this one are known: only
            # tasks after the fused one overlap with the next call, where round-robin continues.
            following = place + num_devices
            is_prefetched = following < len(tasks) or place > fused
            prefetched = tasks[following % len(tasks)].layers if is_prefetched else range(0)
            weights |= Counter(self._weight_sizes[i] for i in (*task.layers, *prefetched))
            if task.kind is not TaskKind.FORWARD:
                grads |= Counter(self._grad_sizes[i] for i in task.layers)
        return (
            sum(size * count for size, count in weights.items()),
            sum(size * count for size, count in grads.items()),
        )

    def _transient_bytes(self, tasks: Sequence[StageTask], place: int, num_devices: int) -> int:
        """Return the bytes that a task occupies besides weight and gradient buffers."""
        task = tasks[place]
        transient = self._activation_bytes(task.kind, task.layers)
        if task.kind is not TaskKind.FORWARD:
            transient += self._fresh_gradient_bytes(task.layers)
        # With several devices, consecutive tasks run on different devices.
        return transient + (self._between_bytes(tasks, place) if num_devices == 1 else 0)

    def _fresh_gradient_bytes(self, layers: range) -> int:
        """Return the bytes of one gradient that backward has just computed and not yet added to the buffer."""
        return max(self._grad_sizes[layers.start : layers.stop], default=0)

    def longest_tail(self, tasks: Sequence[StageTask], num_devices: int, limit_bytes: int | None) -> int:
        """Return the longest tail of the fused task that fits into memory, at least 1.

        The microbatches of a tail hold their activations at the same time, except those of the last layer, which are
        held for one microbatch only. The tail is 1 if a different device runs the next task: that device would wait.
        """
        fused = next((task for task in tasks if task.kind is TaskKind.FUSED), None)
        if fused is None or (num_devices > 1 and fused is not tasks[-1]):
            return 1
        if limit_bytes is None:
            return self._num_microbatch
        each = self.tail_bytes(tasks, 2)  # each further microbatch of the tail
        room = limit_bytes - self.peak_bytes(tasks, num_devices)
        return self._num_microbatch if each == 0 else min(self._num_microbatch, 1 + max(room // each, 0))

    def tail_bytes(self, tasks: Sequence[StageTask], tail: int) -> int:
        """Return the activation bytes of a tail's microbatches without the one that `peak_bytes` counts."""
        fused = next((task for task in tasks if task.kind is TaskKind.FUSED), None)
        return 0 if fused is None else (tail - 1) * self._activation_bytes(TaskKind.FUSED, fused.layers[:-1])

    def _between_bytes(self, tasks: Sequence[StageTask], place: int) -> int:
        """Return the bytes of activations that wait on the device between this task and its neighbours.

        Each microbatch frees an input of this task when it adds an output, so the larger of the two counts.
        """
        layers, is_last = tasks[place].layers, place + 1 == len(tasks)
        inputs = self._waiting_inputs[layers.start] if place else 0
        # A forward task passes activations to the next layer; other tasks pass the gradient of their input, which has
        # the same size as the input.
        boundary = layers.stop if tasks[place].kind is TaskKind.FORWARD else layers.start
        outputs = 0 if is_last or boundary == len(self._waiting_inputs) else self._waiting_inputs[boundary]
        return max(inputs, outputs)

    def _activation_bytes(self, kind: TaskKind, layers: range) -> int:
        """Return the most activation bytes that one microbatch of a stage occupies at a time."""
        whole = self._activation_sums[layers.stop] - self._activation_sums[layers.start]
        largest = max(self._activations[layers.start : layers.stop], default=0)
        match kind:
            case TaskKind.FORWARD:  # each layer's activations are freed when the next layer has run
                return largest
            case TaskKind.FUSED:
                return whole
            case TaskKind.BACKWARD:
                return whole if self._grain == "stage" else largest
            case _:
                assert_never(kind)
