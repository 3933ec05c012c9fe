"""Predicts when each task and microbatch of a schedule runs, from layer costs.

Knows no transfers: it assumes that copies overlap with compute completely.

[Note: schedule rules] Task i runs on device (first + i) mod N. A device runs a task for all microbatches in order
before its next task. Microbatch j of task i needs microbatch j of task i - 1. These are the only orderings between
tasks of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from roundpipe.plan.cost import LayerCost
from roundpipe.plan.schedule import StageTask, TaskKind, deal
from roundpipe.timeline import Span, Timeline

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
    free_s = [0.0] * num_devices  # when each device is free
    ready_s = [0.0] * num_microbatch  # when the input of each microbatch is ready
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
    their tasks are done. Call k + 1 also waits for all tasks of call k - 1: the update after those tasks made its
    weights (asynchronous steps).
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
    unit_s = sum(seconds) or 1.0  # states are compared relative to it, rounded to 9 digits
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
    returned_s = max(busy_s)  # wait for all tasks of the call before
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
