"""Predicts a step whose update is waited for, on one device: when gradients become final decides what it hides.

Called by plan.planner and the api. Knows tasks, costs and the seconds an update takes per layer; no optimizer.

[Note: gradients become final] A layer's gradients are final once its last microbatch has gone backward. In a backward
stage that is when the stage ends; in the fused stage it is the very end of the call, unless the last microbatches (the
tail) go backward together, layer by layer. The optimizer takes one layer after the other as they become final.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roundpipe.plan.cost import LayerCost
from roundpipe.plan.memory import Grain
from roundpipe.plan.schedule import StageTask, TaskKind

_MOST_TAILS = 8  # that are tried
_WORTH_MEMORY = 0.01  # a longer tail must save this share of the step


def exact_step_s(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    update_s: Sequence[float],
    *,
    num_microbatch: int,
    tail: int,
    grain: Grain = "stage",
) -> float:
    """Seconds from the beginning of a call to the end of its update. [Note: gradients become final]"""
    now_s = updated_s = 0.0
    for task in tasks:
        for layer_id, seconds in _pieces(task, costs, num_microbatch, tail, grain):
            now_s += seconds
            if layer_id is not None:
                updated_s = max(updated_s, now_s) + update_s[layer_id]
    return max(now_s, updated_s)


def best_tail(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    update_s: Sequence[float],
    *,
    num_microbatch: int,
    longest: int,
    grain: Grain = "stage",
) -> tuple[int, float]:
    """The tail with the shortest step, and that step; the shorter tail where it makes no difference."""
    best, best_s = 1, float("inf")
    for tail in _spread(longest):
        step_s = exact_step_s(tasks, costs, update_s, num_microbatch=num_microbatch, tail=tail, grain=grain)
        if step_s < best_s * (1 - _WORTH_MEMORY):
            best, best_s = tail, step_s
    return best, best_s


def _pieces(
    task: StageTask, costs: Sequence[LayerCost], num_microbatch: int, tail: int, grain: Grain
) -> Iterator[tuple[int | None, float]]:
    """Seconds one after the other, each with the layer whose gradients are final after them."""
    layers = costs[task.layers.start : task.layers.stop]
    forward_s = sum(cost.forward_s for cost in layers)
    backward_s = sum(cost.backward_s for cost in layers)
    recompute_s = sum(cost.recompute_s for cost in layers)
    if task.kind is TaskKind.FORWARD:
        yield None, num_microbatch * forward_s
        return
    if task.kind is TaskKind.FUSED:
        together = min(tail, num_microbatch)
        yield None, (num_microbatch - together) * (forward_s + backward_s) + together * forward_s
    else:
        together = 1
        yield None, (num_microbatch - 1) * (recompute_s + backward_s) + (recompute_s if grain == "stage" else 0.0)
    for layer_id in reversed(task.layers):
        of_layer_s = costs[layer_id].backward_s
        if task.kind is TaskKind.BACKWARD and grain == "layer":
            of_layer_s += costs[layer_id].recompute_s
        yield layer_id, together * of_layer_s


def _spread(longest: int) -> list[int]:
    if longest <= _MOST_TAILS:
        return list(range(1, longest + 1))
    return sorted({1 + round((longest - 1) * i / (_MOST_TAILS - 1)) for i in range(_MOST_TAILS)})
