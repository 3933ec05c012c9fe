"""Predicts exact steps whose update overlaps with calls, on one device, and chooses how calls adapt to it.

The update of a step may begin as gradients become final, or, if a norm of all gradients comes first, when the last one
has landed. A step that publishes layer by layer returns at once: the next call computes with a layer as soon as the
layer is updated. Knows layer costs and tasks, no tensors.

[Note: gradients become final]
A layer's gradients are final when its last microbatch has run backward. In a backward stage that is during the stage's
last microbatch. The same holds for a fused stage without a tail. With a tail (last microbatches that run backward
together, layer by layer), the gradients of the last layers are final earlier.

[Note: wave]
In such a call the first microbatch would run at the pace of the updates while the device has other work: the forwards
of the other microbatches. So the first layers run for several microbatches before the next layer does. These
microbatches are the wave. Tasks that only run forward do this with all microbatches, which takes no memory. In a fused
task, the activations of all microbatches of the wave are held, so its wave ends after `Wave.num_layers` layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from roundpipe.plan.cost import LayerCost
from roundpipe.plan.execute_plan import StageTask, TaskKind
from roundpipe.plan.predict import Grain

_MIN_GAIN = 0.01  # a longer tail or a larger wave takes more memory, so it must shorten the step at least by this share
_MAX_TAILS = 8  # tail lengths that `best_overlap` tries at most
_WAVE_SHARES = (1 / 4, 1 / 2, 3 / 4, 1)  # of the layers that fit into memory
_ROUNDS = 3  # calls that are simulated until their waits repeat


@dataclass(frozen=True)
class UpdateTiming:
    """When the update of a step runs.

    is_exact: whether the next call computes with the new weights. Otherwise the update runs beside the whole call.
    by_layer: whether the next call begins at once and waits for one layer at a time, instead of for the whole update.
    after_norm: whether the update begins only when all gradients have landed.
    """

    is_exact: bool = False
    by_layer: bool = False
    after_norm: bool = False


STALE = UpdateTiming()
EXACT = UpdateTiming(is_exact=True)  # the caller waits for the update, which begins as gradients become final


@dataclass(frozen=True)
class Wave:
    """The first microbatches of a call, and the layers of a fused task that they run one after the other.

    See [Note: wave]. num_microbatch 0: there is no wave.
    """

    num_microbatch: int = 0
    num_layers: int = 0


NO_WAVE = Wave()


@dataclass(frozen=True)
class Overlap:
    """How a call adapts to the update: see [Note: tail] in runtime/stage and [Note: wave]."""

    tail: int = 1
    wave: Wave = NO_WAVE

    def in_tail(self, num_microbatch: int) -> range:
        """The microbatches of a fused task that are in its tail."""
        return range(max(num_microbatch - self.tail, 0) if self.tail > 1 else num_microbatch, num_microbatch)

    def in_wave(self, num_microbatch: int, *, is_fused: bool) -> range:
        """The microbatches of a task that are in its wave: all, or those for which a fused task has memory."""
        most = self.wave.num_microbatch * bool(self.wave.num_layers) if is_fused else num_microbatch
        return range(min(most, num_microbatch) if self.wave.num_microbatch else 0)


def step_s(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    update_s: Sequence[float],
    timing: UpdateTiming,
    overlap: Overlap,
    *,
    num_microbatch: int,
    grain: Grain = "stage",
) -> float:
    """Return the seconds of an exact step in a long training. `update_s`: the seconds of each layer's update."""
    ready_s = [0.0] * len(costs)  # when each layer may be used, counted from the beginning of the call
    seconds = 0.0
    for _ in range(_ROUNDS if timing.by_layer else 1):
        final, end_s = gradients_final_s(tasks, costs, ready_s, overlap, num_microbatch=num_microbatch, grain=grain)
        if timing.after_norm:
            final = [(layer_id, end_s) for layer_id, _ in final]
        updated = _updated_s(final, update_s)
        seconds = end_s if timing.by_layer else max(end_s, *updated.values(), 0.0)
        for layer_id, at_s in updated.items():
            ready_s[layer_id] = max(at_s - end_s, 0.0)
    return seconds


def gradients_final_s(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    ready_s: Sequence[float],
    overlap: Overlap,
    *,
    num_microbatch: int,
    grain: Grain = "stage",
) -> tuple[list[tuple[int, float]], float]:
    """Return each layer with the time at which its gradients are final, in that order, and the end of the call.

    ready_s: when the weights of each layer are new, counted from the beginning of the call.
    """
    final: list[tuple[int, float]] = []
    now_s = 0.0
    for task in tasks:
        for layer_id, seconds, is_final in _pieces(task, costs, num_microbatch, overlap, grain):
            now_s = (now_s if layer_id is None else max(now_s, ready_s[layer_id])) + seconds
            if layer_id is not None and is_final:
                final.append((layer_id, now_s))
    return final, now_s


def _pieces(
    task: StageTask, costs: Sequence[LayerCost], num_microbatch: int, overlap: Overlap, grain: Grain
) -> Iterator[tuple[int | None, float, bool]]:
    """Yield the task's time in consecutive pieces of (layer, seconds, whether the layer's gradients are final then).

    A piece begins when the weights of its layer are there. The layer is None where all weights were used before.
    """
    layers = costs[task.layers.start : task.layers.stop]
    forward_s, backward_s = sum(cost.forward_s for cost in layers), sum(cost.backward_s for cost in layers)
    recompute_s = sum(cost.recompute_s for cost in layers)
    together = 1  # microbatches that run backward layer by layer at the end of the task
    if task.kind is TaskKind.BACKWARD:
        yield (
            None,
            (num_microbatch - 1) * (recompute_s + backward_s) + (recompute_s if grain == "stage" else 0.0),
            False,
        )
    else:
        wave, begun_s = overlap.wave, 0.0
        for position, layer_id in enumerate(task.layers):
            is_in_wave = wave.num_microbatch > 0 and (task.kind is TaskKind.FORWARD or position < wave.num_layers)
            count = num_microbatch if task.kind is TaskKind.FORWARD else wave.num_microbatch
            seconds = (count if is_in_wave else 1) * costs[layer_id].forward_s
            begun_s += seconds
            yield layer_id, seconds, False
        if task.kind is TaskKind.FORWARD:
            yield None, num_microbatch * forward_s - begun_s, False
            return
        together = min(overlap.tail, num_microbatch)
        yield None, num_microbatch * forward_s - begun_s + (num_microbatch - together) * backward_s, False
    for layer_id in reversed(task.layers):
        of_layer_s = costs[layer_id].backward_s
        if task.kind is TaskKind.BACKWARD and grain == "layer":
            of_layer_s += costs[layer_id].recompute_s
        yield layer_id, together * of_layer_s, True


def _updated_s(final: Sequence[tuple[int, float]], update_s: Sequence[float]) -> dict[int, float]:
    """Return when each layer is updated. `final`: layers and when their gradients are final, in that order.

    Of the layers whose gradients are final, the optimizer takes the one that the next call needs first.
    """
    ready: list[int] = []  # a heap
    updated: dict[int, float] = {}
    free_s, position = 0.0, 0
    while ready or position < len(final):
        if not ready:
            free_s = max(free_s, final[position][1])
        while position < len(final) and final[position][1] <= free_s:
            heappush(ready, final[position][0])
            position += 1
        layer_id = heappop(ready)
        free_s += update_s[layer_id]
        updated[layer_id] = free_s
    return updated


def best_overlap(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    update_s: Sequence[float],
    timing: UpdateTiming,
    *,
    num_microbatch: int,
    longest_tail: int,
    room_bytes: int | None,
    grain: Grain = "stage",
) -> tuple[Overlap, float]:
    """Return the tail and the wave with the shortest step, and its seconds. Among ties, those with the least memory.

    room_bytes: device memory that the schedule without tail and wave leaves unused; None if memory is unlimited.
    """
    waves = _waves(tasks, costs, num_microbatch, room_bytes) if timing.by_layer else [NO_WAVE]
    tails = [1] if timing.after_norm else _tails(longest_tail)
    best, best_s = Overlap(), float("inf")
    for tail in tails:
        for wave in waves:
            overlap = Overlap(tail, wave)
            seconds = step_s(tasks, costs, update_s, timing, overlap, num_microbatch=num_microbatch, grain=grain)
            if seconds < best_s * (1 - _MIN_GAIN):
                best, best_s = overlap, seconds
    return best, best_s


def _tails(longest: int) -> list[int]:
    if longest <= _MAX_TAILS:
        return list(range(1, longest + 1))
    return sorted({1 + round((longest - 1) * i / (_MAX_TAILS - 1)) for i in range(_MAX_TAILS)})


def _waves(
    tasks: Sequence[StageTask], costs: Sequence[LayerCost], num_microbatch: int, room_bytes: int | None
) -> list[Wave]:
    """Return waves that fit into memory, those with little memory first."""
    fused = next((task.layers for task in tasks if task.kind is TaskKind.FUSED), range(0))
    held = list(accumulate(costs[layer_id].activation_bytes for layer_id in fused))  # by the first layers
    waves = [NO_WAVE, Wave(num_microbatch)] if len(tasks) > 1 else [NO_WAVE]
    count = num_microbatch
    while count > 1:
        fitting = [bytes_ for bytes_ in held if room_bytes is None or (count - 1) * bytes_ <= room_bytes]
        depths = {max(1, round(share * len(fitting))) for share in _WAVE_SHARES} if fitting else set()
        waves += [Wave(count, depth) for depth in sorted(depths)]
        count = -(-count // 2) if count > 2 else 1
    return waves


def wave_bytes(tasks: Sequence[StageTask], costs: Sequence[LayerCost], wave: Wave) -> int:
    """Return the activation bytes that a wave adds to the peak of the fused task, which counts one microbatch."""
    fused = next((task.layers for task in tasks if task.kind is TaskKind.FUSED), range(0))
    held = sum(costs[layer_id].activation_bytes for layer_id in fused[: wave.num_layers])
    return max(wave.num_microbatch - 1, 0) * held
