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
from roundpipe.plan.search import best_tail, choose_exact_plan, choose_plan, final_gradients_s, updated_s


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
    """Return the seconds of a call on several devices and of its update, which begins as gradients become final."""
    final, end_s = _final_on_several_devices(tasks, profile)
    return max(end_s, updated_s(final, update_s))


def _final_on_several_devices(
    tasks: Sequence[StageTask], profile: ModelProfile
) -> tuple[list[tuple[int, float]], float]:
    """As `final_gradients_s`, on several devices: the gradients of a task are final when the task is done."""
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
        """Return the seconds of one exchange: a machine sends its part of so many bytes to all, or all their parts."""
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
        final, end_s = final_gradients_s(
            found.tasks, profile.layers, num_microbatch=profile.num_microbatch, tail=found.tail, grain=grain
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


def weight_room_bytes(tasks: Sequence[StageTask], profile: ModelProfile, tail: int, grain: Grain) -> int:
    """Return a device's weight budget: the schedule's buffers plus half of the unused memory; 0 without a limit."""
    if profile.memory_limit_bytes is None:
        return 0
    memory = StageMemory(profile.layers, grain, profile.num_microbatch)
    held = memory.peak_bytes(tasks, profile.num_devices) + memory.tail_bytes(tasks, tail)
    unused = max(profile.memory_limit_bytes - held, 0)
    return memory.buffer_bytes(tasks, profile.num_devices)[0] + unused // 2
