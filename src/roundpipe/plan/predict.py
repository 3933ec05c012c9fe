"""Predicts the device memory of a schedule, and when each of its tasks and microbatches runs, from layer costs.

Knows no allocator and no transfers. Memory estimates do not include fragmentation, kernel workspaces and activations
in transfer. Times assume that copies overlap with compute completely.

[Note: schedule rules] Task i runs on device (first + i) mod N. A device runs a task for all microbatches in order
before its next task. Microbatch j of task i needs microbatch j of task i - 1. These are the only orderings between
tasks of one call.

[Note: buffers stay] Devices keep their weight and gradient buffers from task to task and reuse them by size. A large
layer, such as an embedding, therefore occupies its memory also while other layers run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Literal, assert_never

from roundpipe.plan.cost import LayerCost
from roundpipe.plan.execute_plan import StageTask, TaskKind, deal
from roundpipe.timeline import Span, Timeline

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

    def buffer_bytes(
        self, tasks: Sequence[StageTask], num_devices: int, staying: Container[int] = ()
    ) -> tuple[int, int]:
        """Return the bytes of all weight buffers and of all gradient buffers on one device.

        For each buffer size, the device has as many buffers as are ever in use at the same time. The weights of the
        layers `staying` do not count.
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
            weights |= Counter(self._weight_sizes[i] for i in (*task.layers, *prefetched) if i not in staying)
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
        each = self.tail_bytes(tasks, 2)  # bytes of each further microbatch of the tail
        room = limit_bytes - self.peak_bytes(tasks, num_devices)
        return self._num_microbatch if each == 0 else min(self._num_microbatch, 1 + max(room // each, 0))

    def tail_bytes(self, tasks: Sequence[StageTask], tail: int) -> int:
        """Return the activation bytes that a tail of `tail` microbatches adds to `peak_bytes`, which counts one.

        The last layer of the fused stage adds nothing; see `longest_tail`.
        """
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


# Calls to skip if the simulation finds no cycle; it then averages over one call per device, one whole round.
SETTLING_CALLS = 3


def task_seconds(task: StageTask, costs: Sequence[LayerCost]) -> float:
    """Return the compute seconds of one microbatch of a task."""
    layers = costs[task.layers.start : task.layers.stop]
    match task.kind:
        case TaskKind.FORWARD:
            return sum(cost.forward_s for cost in layers)
        case TaskKind.FUSED:
            return sum(cost.fused_s for cost in layers)
        case TaskKind.BACKWARD:
            return sum(cost.recompute_backward_s for cost in layers)
        case _:
            assert_never(task.kind)


def simulate(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    *,
    num_devices: int,
    num_microbatch: int,
    first_device: int = 0,
) -> Timeline:
    """Return the timeline of one call on idle devices, named ``dev0``, ``dev1``, ... [Note: schedule rules]."""
    free_s = [0.0] * num_devices  # the time at which each device becomes free
    ready_s = [0.0] * num_microbatch  # the time at which each microbatch's input is ready
    spans: list[Span] = []
    for task, device in zip(tasks, deal(tasks, first_device, num_devices), strict=True):
        seconds = task_seconds(task, costs)
        starts_s = _starts(ready_s, free_s[device], seconds)
        ready_s = [start_s + seconds for start_s in starts_s]
        free_s[device] = ready_s[-1]
        spans += [
            Span(f"dev{device}", str(task), microbatch, start_s, start_s + seconds)
            for microbatch, start_s in enumerate(starts_s)
        ]
    return Timeline(tuple(spans))


def steady_step_s(
    tasks: Sequence[StageTask], costs: Sequence[LayerCost], *, num_devices: int, num_microbatch: int
) -> float:
    """Return the seconds from call to call when the same call repeats and round-robin continues across calls.

    Call k + 1 starts when call k has returned. A call with a fused task returns when that task is done, because its
    losses are then known; its backward tasks overlap with the first tasks of call k + 1. Other calls return when all
    their tasks are done. Call k + 1 also waits for all tasks of call k - 1: with asynchronous steps, it reads the
    weights that were updated after call k - 1.
    """
    seconds = [task_seconds(task, costs) for task in tasks]
    returns_after = next((place for place, task in enumerate(tasks) if task.kind is TaskKind.FUSED), len(tasks) - 1)
    if returns_after == len(tasks) - 1:
        # Calls do not overlap, so every call takes as long as the first one.
        return _run_call(seconds, returns_after, num_microbatch, [0.0] * num_devices)[0]
    return _cycle_mean_s(seconds, returns_after, num_microbatch, num_devices)


def _cycle_mean_s(seconds: Sequence[float], returns_after: int, num_microbatch: int, num_devices: int) -> float:
    """Return the mean seconds per call over one cycle of calls.

    The state before a call is how long each device is still busy. When a state repeats, the calls between the two
    occurrences form a cycle.
    """
    unit_s = sum(seconds) or 1.0  # states are divided by this unit and rounded to 9 digits for comparison
    busy_s = [0.0] * num_devices
    seen = {tuple(busy_s): 0}
    issued_s = [0.0]
    for call in range(1, SETTLING_CALLS + num_devices + 1):
        returned_s, busy_s = _run_call(seconds, returns_after, num_microbatch, busy_s)
        issued_s.append(issued_s[-1] + returned_s)
        earlier = seen.setdefault(tuple(round(left_s / unit_s, 9) for left_s in busy_s), call)
        if earlier != call:
            return (issued_s[call] - issued_s[earlier]) / (call - earlier)
    return (issued_s[-1] - issued_s[-1 - num_devices]) / num_devices


def _run_call(
    seconds: Sequence[float], returns_after: int, num_microbatch: int, busy_s: Sequence[float]
) -> tuple[float, list[float]]:
    """Simulate a call that starts at 0; return when the next call starts and how long each device is busy after that.

    ``busy_s`` begins with the device of the call's first task. The returned list begins with the device of the next
    call's first task, so it can be passed to the next simulation as it is.
    """
    num_devices = len(busy_s)
    free_s = list(busy_s)
    ready_s = [0.0] * num_microbatch
    returned_s = max(busy_s)  # at the earliest when all tasks of the previous call are done
    for place, task_s in enumerate(seconds):
        device = place % num_devices
        ready_s = [start_s + task_s for start_s in _starts(ready_s, free_s[device], task_s)]
        free_s[device] = ready_s[-1]
        if place == returns_after:
            returned_s = max(returned_s, ready_s[-1])
    # Round-robin continues: the next call starts on the device after that of the last task.
    turn = len(seconds) % num_devices
    return returned_s, [max(0.0, until_s - returned_s) for until_s in free_s[turn:] + free_s[:turn]]


def _starts(ready_s: Sequence[float], free_s: float, seconds: float) -> list[float]:
    """Return when each microbatch of one task starts: its input is ready and the device is free."""
    starts_s = []
    for microbatch_ready_s in ready_s:
        start_s = microbatch_ready_s if microbatch_ready_s > free_s else free_s
        starts_s.append(start_s)
        free_s = start_s + seconds
    return starts_s
