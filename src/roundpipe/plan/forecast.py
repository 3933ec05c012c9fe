"""Forecasts a step from the costs of its layers: the plan, its tail, the seconds of a step and the memory on a device.

The planner of a running model and `roundpipe estimate` both use these functions, so that they cannot differ. Knows
profiles and the simulator; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.plan.cost import ModelProfile
from roundpipe.plan.execute_plan import ModelExecutePlan, RunType, StageTask, TaskKind, build_schedule
from roundpipe.plan.predict import Grain, StageMemory, simulate, steady_step_s
from roundpipe.plan.search import best_tail, choose_exact_plan, choose_plan


@dataclass(frozen=True)
class Forecast:
    """The fastest plan of a fused call, and what a step with it takes.

    tail: microbatches at the end of the fused stage that run backward layer by layer. peak_bytes: on one device, the
    tail's activations included. fits: whether the peak is within the memory limit of the profile.
    """

    plan: ModelExecutePlan
    tasks: tuple[StageTask, ...]
    tail: int
    step_s: float
    peak_bytes: int
    weight_room_bytes: int
    fits: bool


def forecast(profile: ModelProfile, update_s: Sequence[float] | None, grain: Grain = "stage") -> Forecast:
    """Choose a plan and forecast its step. `update_s`: seconds of each layer's update if steps are exact, else None."""
    if update_s is None:
        plan = choose_plan(RunType.FUSED, profile, grain)
    else:
        plan = choose_exact_plan(profile, update_s, grain)
    tasks = build_schedule(plan, RunType.FUSED)
    tail, seconds = tail_and_step_s(tasks, profile, update_s, grain)
    memory = StageMemory(profile.layers, grain, profile.num_microbatch)
    peak = memory.peak_bytes(tasks, profile.num_devices) + memory.tail_bytes(tasks, tail)
    limit = profile.memory_limit_bytes
    room = weight_room_bytes(tasks, profile, tail, grain)
    return Forecast(plan, tasks, tail, seconds, peak, room, limit is None or peak <= limit)


def tail_and_step_s(
    tasks: Sequence[StageTask], profile: ModelProfile, update_s: Sequence[float] | None, grain: Grain
) -> tuple[int, float]:
    """Return the best tail that fits into memory, and the seconds of a step with it."""
    num_devices, count = profile.num_devices, profile.num_microbatch
    if update_s is None:
        return 1, steady_step_s(tasks, profile.layers, num_devices=num_devices, num_microbatch=count)
    memory = StageMemory(profile.layers, grain, count)
    longest = memory.longest_tail(tasks, num_devices, profile.memory_limit_bytes)
    tail, step_s = best_tail(tasks, profile.layers, update_s, num_microbatch=count, longest=longest, grain=grain)
    return tail, step_s if num_devices == 1 else _exact_round_s(tasks, profile, update_s)


def _exact_round_s(tasks: Sequence[StageTask], profile: ModelProfile, update_s: Sequence[float]) -> float:
    """Return the seconds of a call on several devices and of its update, which begins with the first final gradients.

    The gradients of a task's layers are final when its last microbatch has run.
    """
    timeline = simulate(tasks, profile.layers, num_devices=profile.num_devices, num_microbatch=profile.num_microbatch)
    ends_s: dict[str, float] = {}
    for span in timeline.spans:
        ends_s[span.label] = max(ends_s.get(span.label, 0.0), span.end_s)
    updated_s = 0.0
    for task in tasks:
        if task.kind is not TaskKind.FORWARD:
            updated_s = max(updated_s, ends_s[str(task)]) + sum(update_s[layer_id] for layer_id in task.layers)
    return max(updated_s, *ends_s.values())


def weight_room_bytes(tasks: Sequence[StageTask], profile: ModelProfile, tail: int, grain: Grain) -> int:
    """Return a device's weight budget: the schedule's buffers plus half of the unused memory; 0 without a limit."""
    if profile.memory_limit_bytes is None:
        return 0
    memory = StageMemory(profile.layers, grain, profile.num_microbatch)
    held = memory.peak_bytes(tasks, profile.num_devices) + memory.tail_bytes(tasks, tail)
    unused = max(profile.memory_limit_bytes - held, 0)
    return memory.buffer_bytes(tasks, profile.num_devices)[0] + unused // 2
