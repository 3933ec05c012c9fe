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

Grain = Literal["stage", "layer"]
"""What a backward task recomputes at a time: the whole stage, or one layer after the other."""


class StageMemory:
    """Estimates memory for many schedules of one model, from prefix sums over its layers."""

    def __init__(self, costs: Sequence[LayerCost], grain: Grain = "stage", num_microbatch: int = 1) -> None:
        self._grain = grain
        self._num_microbatch = num_microbatch
        self._handed_on = tuple(num_microbatch * cost.input_bytes for cost in costs)
        self._weight_sizes = tuple(cost.weight_bytes for cost in costs)
        self._grad_sizes = tuple(cost.grad_bytes for cost in costs)
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
        weights: Counter[int] = Counter()
        grads: Counter[int] = Counter()
        for place, task in enumerate(tasks):
            following = self._prefetched(tasks, place + num_devices, losses_known=place > fused)
            weights |= Counter(self._weight_sizes[i] for i in (*task.layers, *following))
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
        each = self.tail_bytes(tasks, 2)
        room = limit_bytes - self.peak_bytes(tasks, num_devices)
        return self._num_microbatch if each == 0 else min(self._num_microbatch, 1 + max(room // each, 0))

    def tail_bytes(self, tasks: Sequence[StageTask], tail: int) -> int:
        """Return the activation bytes of a tail's microbatches without the one that `peak_bytes` counts."""
        fused = next((task for task in tasks if task.kind is TaskKind.FUSED), None)
        return 0 if fused is None else (tail - 1) * self._activation_bytes(TaskKind.FUSED, fused.layers[:-1])

    @staticmethod
    def _prefetched(tasks: Sequence[StageTask], following: int, *, losses_known: bool) -> range:
        """Return the layers of the next task on the same device, in this call or in the next one.

        The next call starts when the losses of this one are known. So only backward tasks after a fused task can
        overlap with the first tasks of the next call; round-robin continues across the two calls.
        """
        if following >= len(tasks) and not losses_known:
            return range(0)
        return tasks[following % len(tasks)].layers

    def _between_bytes(self, tasks: Sequence[StageTask], place: int) -> int:
        """Return the bytes of activations that wait on the device between this task and its neighbours.

        Each microbatch frees an input of this task when it adds an output, so the larger of the two counts.
        """
        layers, is_last = tasks[place].layers, place + 1 == len(tasks)
        coming = self._handed_on[layers.start] if place else 0
        going_to = layers.stop if tasks[place].kind is TaskKind.FORWARD else layers.start
        going = 0 if is_last or going_to == len(self._handed_on) else self._handed_on[going_to]
        return max(coming, going)

    def _activation_bytes(self, kind: TaskKind, layers: range) -> int:
        whole = self._activation_sums[layers.stop] - self._activation_sums[layers.start]
        largest = max(self._activations[layers.start : layers.stop], default=0)
        match kind:
            case TaskKind.FORWARD:
                return largest
            case TaskKind.FUSED:
                return whole
            case TaskKind.BACKWARD:
                return whole if self._grain == "stage" else largest
            case _:
                assert_never(kind)
