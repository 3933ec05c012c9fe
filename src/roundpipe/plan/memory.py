"""Estimates the device bytes of stages.

Called by plan.planner and by the api's memory report. Knows costs and tasks; knows no allocator, so what it says is an
estimate without fragmentation, workspaces and activations on their way.

[Note: buffers stay] Devices keep their buffers for weights and gradients from task to task and reuse them by size. So a
large layer, an embedding say, takes its memory even while it does not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, assert_never

from roundpipe.plan.cost import LayerCost
from roundpipe.plan.schedule import StageTask, TaskKind

Grain = Literal["stage", "layer"]
"""What is recomputed at a time before a backward: the whole stage, or one layer after the other."""


def stage_bytes(task: StageTask, costs: Sequence[LayerCost], grain: Grain = "stage") -> int:
    """Weights, gradients and one fresh one where a backward runs, and the activations of one microbatch."""
    return StageMemory(costs, grain).task_bytes(task)


def peak_bytes(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    grain: Grain = "stage",
    num_devices: int = 1,
    num_microbatch: int = 1,
) -> int:
    """The most that one device holds: a running task, the prefetched weights of the next task on that device, and
    what tasks that both run there hand on."""
    return StageMemory(costs, grain, num_microbatch).peak_bytes(tasks, num_devices)


class StageMemory:
    """The same for many stages of one model, from prefix sums."""

    def __init__(self, costs: Sequence[LayerCost], grain: Grain = "stage", num_microbatch: int = 1) -> None:
        self._grain = grain
        self._num_microbatch = num_microbatch
        self._handed_on = tuple(num_microbatch * cost.input_bytes for cost in costs)
        self._weight_sizes = tuple(cost.weight_bytes for cost in costs)
        self._grad_sizes = tuple(cost.grad_bytes for cost in costs)
        self._weights = _prefix(cost.weight_bytes for cost in costs)
        self._grads = _prefix(cost.grad_bytes for cost in costs)
        self._activation_sums = _prefix(cost.activation_bytes for cost in costs)
        self._activations = tuple(cost.activation_bytes for cost in costs)

    def weight_bytes(self, layers: range) -> int:
        return self._weights[layers.stop] - self._weights[layers.start]

    def range_bytes(self, kind: TaskKind, layers: range) -> int:
        """What a stage over these layers holds while it runs."""
        held = self.weight_bytes(layers) + self._activation_bytes(kind, layers)
        if kind is not TaskKind.FORWARD:
            held += self._grads[layers.stop] - self._grads[layers.start] + self._fresh_gradient_bytes(layers)
        return held

    def task_bytes(self, task: StageTask) -> int:
        return self.range_bytes(task.kind, task.layers)

    def peak_bytes(self, tasks: Sequence[StageTask], num_devices: int) -> int:
        """As the function of the same name, without rebuilding the sums. [Note: buffers stay]"""
        weights, grads = self.buffer_bytes(tasks, num_devices)
        return weights + grads + max(self._passing_bytes(tasks, place, num_devices) for place in range(len(tasks)))

    def buffer_bytes(self, tasks: Sequence[StageTask], num_devices: int) -> tuple[int, int]:
        """What buffers for weights and for gradients take: of each size as many as are ever in use together."""
        fused = next((place for place, task in enumerate(tasks) if task.kind is TaskKind.FUSED), len(tasks))
        weights: Counter[int] = Counter()
        grads: Counter[int] = Counter()
        for place, task in enumerate(tasks):
            following = self._prefetched(tasks, place + num_devices, losses_known=place > fused)
            weights |= Counter(self._weight_sizes[i] for i in (*task.layers, *following))
            if task.kind is not TaskKind.FORWARD:
                grads |= Counter(self._grad_sizes[i] for i in task.layers)
        return _total(weights), _total(grads)

    def _passing_bytes(self, tasks: Sequence[StageTask], place: int, num_devices: int) -> int:
        """What a task takes beside buffers."""
        task = tasks[place]
        passing = self._activation_bytes(task.kind, task.layers)
        if task.kind is not TaskKind.FORWARD:
            passing += self._fresh_gradient_bytes(task.layers)
        return passing + (self._between_bytes(tasks, place) if num_devices == 1 else 0)

    def _fresh_gradient_bytes(self, layers: range) -> int:
        """A gradient that a backward has just made, beside the sum it is added to."""
        return max(self._grad_sizes[layers.start : layers.stop], default=0)

    def longest_tail(self, tasks: Sequence[StageTask], num_devices: int, limit_bytes: int | None) -> int:
        """How many microbatches may be between forward and backward of the fused task at a time; one at least.

        The activations of its last layer are never held for more than one. Where another device goes on after it,
        that one must not be kept waiting.
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
        """What microbatches of a tail hold beside the one that `peak_bytes` counts."""
        fused = next((task for task in tasks if task.kind is TaskKind.FUSED), None)
        return 0 if fused is None else (tail - 1) * self._activation_bytes(TaskKind.FUSED, fused.layers[:-1])

    @staticmethod
    def _prefetched(tasks: Sequence[StageTask], following: int, *, losses_known: bool) -> range:
        """Layers of the task that follows on the same device, in this call or in the next.

        The next call is issued when the losses of this one are known, so only the backward tasks after a fused one
        meet the first tasks of the next call; the round continues with them.
        """
        if following >= len(tasks) and not losses_known:
            return range(0)
        return tasks[following % len(tasks)].layers

    def _between_bytes(self, tasks: Sequence[StageTask], place: int) -> int:
        """What the task before has left on the device for this one, or what this one leaves there: one microbatch of
        the one goes when one of the other comes."""
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


def _prefix(values: Iterable[int]) -> tuple[int, ...]:
    return (0, *accumulate(values))


def _total(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())
