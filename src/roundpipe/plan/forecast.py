"""Forecasts a step from the costs of its layers: the plan, its tail, the seconds of a step and the memory on a device.

The planner of a running model and `roundpipe estimate` both use these functions, so that they cannot differ. Knows
profiles and the simulator; knows no tensors.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.plan.cost import ModelProfile
from roundpipe.plan.execute_plan import ModelExecutePlan, RunType, StageTask, TaskKind, build_schedule
from roundpipe.plan.overlap import EXACT, Overlap, UpdateTiming, gradients_final_s, wave_bytes
from roundpipe.plan.predict import Grain, StageMemory, simulate, steady_step_s
from roundpipe.plan.search import choose_exact_plan, choose_plan, overlap_and_step_s


@dataclass(frozen=True)
class Forecast:
    """The fastest plan of a fused call, and what a step with it takes.

    overlap: its tail and its wave. peak_bytes: on one device, the activations of tail and wave included. fits: whether
    the peak is within the memory limit of the profile.
    """

    plan: ModelExecutePlan
    tasks: tuple[StageTask, ...]
    overlap: Overlap
    step_s: float
    peak_bytes: int
    weight_room_bytes: int
    fits: bool


def forecast(
    profile: ModelProfile, update_s: Sequence[float] | None, grain: Grain = "stage", timing: UpdateTiming = EXACT
) -> Forecast:
    """Choose a plan and forecast its step.

    update_s: seconds of each layer's update if steps are exact, else None. timing: of an exact step's update.
    """
    if update_s is None:
        plan = choose_plan(RunType.FUSED, profile, grain)
    else:
        plan = choose_exact_plan(profile, update_s, grain, timing)
    tasks = build_schedule(plan, RunType.FUSED)
    overlap, seconds = forecast_step(tasks, profile, update_s, grain, timing)
    peak = peak_bytes(tasks, profile, overlap, grain)
    limit = profile.memory_limit_bytes
    room = weight_room_bytes(tasks, profile, overlap, grain)
    return Forecast(plan, tasks, overlap, seconds, peak, room, limit is None or peak <= limit)


def forecast_step(
    tasks: Sequence[StageTask],
    profile: ModelProfile,
    update_s: Sequence[float] | None,
    grain: Grain,
    timing: UpdateTiming = EXACT,
) -> tuple[Overlap, float]:
    """Return the best tail and wave that fit into memory, and the seconds of a step with them."""
    num_devices, count = profile.num_devices, profile.num_microbatch
    if update_s is None:
        return Overlap(), steady_step_s(tasks, profile.layers, num_devices=num_devices, num_microbatch=count)
    memory = StageMemory(profile.layers, grain, count)
    if num_devices == 1:
        return overlap_and_step_s(tasks, profile, memory, update_s, timing, grain)
    waiting = UpdateTiming(is_exact=True, after_norm=timing.after_norm)  # a wave would let other devices wait
    overlap, _ = overlap_and_step_s(tasks, profile, memory, update_s, waiting, grain)
    return overlap, _exact_round_s(tasks, profile, update_s)


def peak_bytes(tasks: Sequence[StageTask], profile: ModelProfile, overlap: Overlap, grain: Grain) -> int:
    """Return the peak bytes on one device, the activations of tail and wave included."""
    memory = StageMemory(profile.layers, grain, profile.num_microbatch)
    # The tail begins when most microbatches of the wave have ended.
    held = max(memory.tail_bytes(tasks, overlap.tail), wave_bytes(tasks, profile.layers, overlap.wave))
    return memory.peak_bytes(tasks, profile.num_devices) + held


def _exact_round_s(tasks: Sequence[StageTask], profile: ModelProfile, update_s: Sequence[float]) -> float:
    """Return the seconds of a call on several devices and of its update, which begins as gradients become final."""
    final, end_s = _final_on_several_devices(tasks, profile)
    free_s = 0.0  # the time at which the optimizer is free
    for layer_id, final_s in final:
        free_s = max(free_s, final_s) + update_s[layer_id]
    return max(end_s, free_s)


def _final_on_several_devices(
    tasks: Sequence[StageTask], profile: ModelProfile
) -> tuple[list[tuple[int, float]], float]:
    """As `gradients_final_s`, on several devices: the gradients of a task are final when the task is done."""
    timeline = simulate(tasks, profile.layers, num_devices=profile.num_devices, num_microbatch=profile.num_microbatch)
    ends_s: dict[str, float] = {}
    for span in timeline.spans:
        ends_s[span.label] = max(ends_s.get(span.label, 0.0), span.end_s)
    backward = [task for task in tasks if task.kind is not TaskKind.FORWARD]
    return [(layer_id, ends_s[str(task)]) for task in backward for layer_id in reversed(task.layers)], timeline.end_s


@dataclass(frozen=True)
class Network:
    """The network between machines that train one model.

    bytes_per_s: what a machine sends, and receives at the same time. latency_s: of one exchange. message_s: host time
    of the messages to and from one other machine, headers included.
    """

    num_machines: int
    bytes_per_s: float
    latency_s: float = 3e-4
    message_s: float = 5e-5

    def exchange_s(self, num_bytes: int) -> float:
        """Return the seconds in which each machine sends its part of `num_bytes` to all, or each of all its part."""
        if self.num_machines == 1 or not num_bytes:
            return 0.0
        others = self.num_machines - 1
        sent_s = num_bytes * others / self.num_machines / self.bytes_per_s
        return sent_s + self.latency_s + others * self.message_s


def step_with_exchange_s(
    found: Forecast,
    profile: ModelProfile,
    update_s: Sequence[float],
    exchange_s: Sequence[float],
    *,
    is_exact: bool,
    grain: Grain,
) -> float:
    """Return the seconds of a step of one of several machines.

    By layer, `update_s` are the seconds of updating this machine's part, and `exchange_s` those of exchanging its
    gradients, or its new weights. Stale steps: the exchange and the update run beside the next call. Exact steps: see
    `exchanged_update_s`.
    """
    if not is_exact:
        return max(found.step_s, 2 * sum(exchange_s), sum(update_s))
    if profile.num_devices == 1:
        at_once = [0.0] * len(profile.layers)
        final, end_s = gradients_final_s(
            found.tasks,
            profile.layers,
            at_once,
            Overlap(found.overlap.tail),
            num_microbatch=profile.num_microbatch,
            grain=grain,
        )
    else:
        final, end_s = _final_on_several_devices(found.tasks, profile)
    return max(end_s, exchanged_update_s(final, update_s, exchange_s, exchange_s))


def exchanged_update_s(
    final: Sequence[tuple[int, float]],
    update_s: Sequence[float],
    fetch_s: Sequence[float],
    gather_s: Sequence[float],
) -> float:
    """Return when the last layer is updated on all machines. `final`: layers and when their gradients are final.

    By layer, `fetch_s` are the seconds of exchanging its gradients and `gather_s` those of exchanging its new weights.
    One thread exchanges layer by layer: the gradients of a layer, then the new weights of the layer before it, which
    was updated meanwhile.
    """
    network_s = optimizer_s = 0.0  # the times at which network and optimizer are free
    before: int | None = None
    for layer_id, final_s in final:
        network_s = max(network_s, final_s) + fetch_s[layer_id]
        fetched_s = network_s
        if before is not None:
            network_s = max(network_s, optimizer_s) + gather_s[before]
        optimizer_s = max(optimizer_s, fetched_s) + update_s[layer_id]
        before = layer_id
    return optimizer_s if before is None else max(network_s, optimizer_s) + gather_s[before]


def weight_room_bytes(tasks: Sequence[StageTask], profile: ModelProfile, overlap: Overlap, grain: Grain) -> int:
    """Return a device's weight budget: the schedule's buffers plus half of the unused memory; 0 without a limit."""
    buffers, unused = _buffers_and_unused(tasks, profile, overlap, grain)
    return 0 if unused is None else buffers + unused // 2


def staying_layers(
    tasks: Sequence[StageTask], profile: ModelProfile, overlap: Overlap, grain: Grain, *, between_calls: bool
) -> frozenset[int]:
    """Return the layers whose weights stay on their device after a task; none without a memory limit.

    between_calls: until the next call with this schedule, which begins on the same device; otherwise until the last
    task of the call that needs the layer. They and the buffers of the other layers take the schedule's buffers and a
    quarter of the unused memory: half of the weight budget beyond the schedule is left to early uploads.
    """
    buffers, unused = _buffers_and_unused(tasks, profile, overlap, grain)
    if unused is None:
        return frozenset()
    memory = StageMemory(profile.layers, grain, profile.num_microbatch)
    # Task k runs on the same device as task k + num_devices.
    by_device = [
        Counter(layer_id for task in tasks[place :: profile.num_devices] for layer_id in task.layers)
        for place in range(profile.num_devices)
    ]
    least = 1 if between_calls else 2
    useful = sorted({layer_id for counts in by_device for layer_id, count in counts.items() if count >= least})

    def fits(count: int) -> bool:
        staying = frozenset(useful[:count])
        held = max(sum(profile.layers[i].weight_bytes for i in staying & counts.keys()) for counts in by_device)
        return held + memory.buffer_bytes(tasks, profile.num_devices, staying)[0] <= buffers + unused // 4

    return frozenset(useful[: bisect.bisect_left(range(1, len(useful) + 1), True, key=lambda count: not fits(count))])


def _buffers_and_unused(
    tasks: Sequence[StageTask], profile: ModelProfile, overlap: Overlap, grain: Grain
) -> tuple[int, int | None]:
    """Return the bytes of the schedule's weight buffers, and of the memory that it leaves unused: None if unlimited."""
    memory = StageMemory(profile.layers, grain, profile.num_microbatch)
    limit = profile.memory_limit_bytes
    unused = None if limit is None else max(limit - peak_bytes(tasks, profile, overlap, grain), 0)
    return memory.buffer_bytes(tasks, profile.num_devices)[0], unused
