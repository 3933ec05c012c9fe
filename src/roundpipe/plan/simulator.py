"""Predicts when each task and microbatch of a schedule runs, from the costs of the layers alone.

Called by plan.planner and by tests. Knows the rules of the schedule; knows no transfers: it assumes that copies hide
behind compute.

[Note: schedule rules] Task i runs on device (first + i) mod N. A device runs a task for all microbatches in order
before its next task. Microbatch j of task i needs microbatch j of task i - 1. Nothing else orders tasks of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from roundpipe.plan.cost import LayerCost
from roundpipe.plan.schedule import StageTask, TaskKind, deal
from roundpipe.timeline import Span, Timeline

SETTLING_CALLS = 3
"""Calls left out where no cycle closes; then one call per device is measured, which is a whole turn of the round."""


def task_seconds(task: StageTask, costs: Sequence[LayerCost]) -> float:
    """The compute time of one microbatch of a task."""
    layers = costs[task.layers.start : task.layers.stop]
    match task.kind:
        case TaskKind.FORWARD:
            return sum(cost.forward_s for cost in layers)
        case TaskKind.FUSED:
            return sum(cost.forward_s + cost.backward_s for cost in layers)
        case TaskKind.BACKWARD:
            return sum(cost.recompute_s + cost.backward_s for cost in layers)
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
    """The timeline of one call on idle devices, named ``dev0``, ``dev1``, ... [Note: schedule rules]."""
    free_s = [0.0] * num_devices
    ready_s = [0.0] * num_microbatch
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
    """Seconds from call to call when the same call repeats and the round continues across calls.

    A call is issued when the one before has returned: once its losses are known (its fused task is done), or, without
    a fused task, once all its tasks are done. So the backward tasks of one call run beside the first ones of the next.
    It also waits for all tasks of the call before that one, whose update made its weights (asynchronous steps).
    """
    seconds = [task_seconds(task, costs) for task in tasks]
    returns_after = next((place for place, task in enumerate(tasks) if task.kind is TaskKind.FUSED), len(tasks) - 1)
    if returns_after == len(tasks) - 1:
        # Calls do not overlap, so the first of them shows all.
        return _run_call(seconds, returns_after, num_microbatch, [0.0] * num_devices)[0]
    return _cycle_mean_s(seconds, returns_after, num_microbatch, num_devices)


def _cycle_mean_s(seconds: Sequence[float], returns_after: int, num_microbatch: int, num_devices: int) -> float:
    """The mean over one cycle of calls: what a call meets is how long each device of its round is still busy.

    Once a call meets what an earlier call met, everything between the two repeats for ever.
    """
    unit_s = sum(seconds) or 1.0
    busy_s = [0.0] * num_devices
    met = {tuple(busy_s): 0}
    issued_s = [0.0]
    for call in range(1, SETTLING_CALLS + num_devices + 1):
        returned_s, busy_s = _run_call(seconds, returns_after, num_microbatch, busy_s)
        issued_s.append(issued_s[-1] + returned_s)
        earlier = met.setdefault(tuple(round(left_s / unit_s, 9) for left_s in busy_s), call)
        if earlier != call:
            return (issued_s[call] - issued_s[earlier]) / (call - earlier)
    return (issued_s[-1] - issued_s[-1 - num_devices]) / num_devices


def _run_call(
    seconds: Sequence[float], returns_after: int, num_microbatch: int, busy_s: Sequence[float]
) -> tuple[float, list[float]]:
    """When the call after one that is issued at 0 is issued, and how long after that each device is busy.

    Devices are listed from the one that the call starts with, so the next call finds its own list in the same order.
    """
    num_devices = len(busy_s)
    free_s = list(busy_s)
    ready_s = [0.0] * num_microbatch
    returned_s = max(busy_s)  # the end of the call before: nothing older is left
    for place, task_s in enumerate(seconds):
        device = place % num_devices
        ready_s = [start_s + task_s for start_s in _starts(ready_s, free_s[device], task_s)]
        free_s[device] = ready_s[-1]
        if place == returns_after:
            returned_s = max(returned_s, ready_s[-1])
    turn = len(seconds) % num_devices
    return returned_s, [max(0.0, until_s - returned_s) for until_s in free_s[turn:] + free_s[:turn]]


def _starts(ready_s: Sequence[float], free_s: float, seconds: float) -> list[float]:
    """When each microbatch of one task starts: when its input is there and the device has done those before it."""
    starts_s = []
    for microbatch_ready_s in ready_s:
        start_s = microbatch_ready_s if microbatch_ready_s > free_s else free_s
        starts_s.append(start_s)
        free_s = start_s + seconds
    return starts_s
