"""Memory estimates of stages and schedules: weights, gradients, activations, prefetched weights."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from plan_strategies import for_all, grains, layer_costs, peak_bytes

from helpers_plans import legal_plans
from roundpipe.plan import LayerCost, ModelExecutePlan, RunType, TaskKind, build_schedule
from roundpipe.plan.predict import StageMemory

COSTS = [LayerCost(1, 1, 1, 10**layer, 2 * 10**layer, 3 * 10**layer, 4 * 10**layer) for layer in range(4)]


@pytest.mark.parametrize(
    ("kind", "grain", "expected"),
    [
        (TaskKind.FORWARD, "stage", 110 + 300),
        (TaskKind.FORWARD, "layer", 110 + 300),
        (TaskKind.FUSED, "stage", 110 + 220 + 200 + 330),
        (TaskKind.FUSED, "layer", 110 + 220 + 200 + 330),
        (TaskKind.BACKWARD, "stage", 110 + 220 + 200 + 330),
        (TaskKind.BACKWARD, "layer", 110 + 220 + 200 + 300),
    ],
)
def test_a_stage_holds_weights_gradients_and_activations(kind, grain, expected):
    assert StageMemory(COSTS, grain).range_bytes(kind, range(1, 3)) == expected


def schedule(fwd, bwd, run_type=RunType.FUSED):
    return build_schedule(ModelExecutePlan(fwd, bwd), run_type)


def test_the_peak_counts_the_weights_of_the_next_task():
    tasks = schedule([range(0, 2), range(2, 4)], [], RunType.INFER)
    assert peak_bytes(tasks, COSTS, "stage", num_devices=2) == 11 + 1100 + 3000, (
        "a device keeps its buffers from task to task"
    )
    costs = [LayerCost(1, 1, 1, weight_bytes=100)] * 3
    tasks = schedule([range(0, 1), range(1, 3)], [], RunType.INFER)
    assert peak_bytes(tasks, costs, "stage") == 100 + 200


def test_the_peak_counts_activations_passed_between_tasks_of_one_device():
    tasks = schedule([range(0, 2), range(2, 4)], [], RunType.INFER)
    assert peak_bytes(tasks, COSTS, "stage", num_microbatch=3) == 11 + 1100 + 3000 + 3 * 400
    costs = [LayerCost(1, 1, 1, input_bytes=size) for size in (1, 10, 100)]
    tasks = schedule([range(0, 1)], [range(1, 3), range(0, 1)])
    assert peak_bytes(tasks, costs, "stage", num_microbatch=2) == 2 * 10, "activations to FB1, then gradients to B2"
    assert peak_bytes(schedule([], [range(0, 3)]), costs, "stage", num_microbatch=2) == 0, (
        "a single task passes nothing on"
    )


def test_buffers_are_reused_by_size():
    equal = [LayerCost(1, 1, 1, weight_bytes=100, grad_bytes=10)] * 4
    tasks = schedule([range(0, 2)], [range(2, 4), range(0, 2)])
    assert peak_bytes(tasks, equal, "stage") == 400 + 20 + 10, (
        "two layers run, two are prefetched; two gradients, one new"
    )
    larger = [LayerCost(1, 1, 1, weight_bytes=1000, grad_bytes=300), *equal[1:]]
    # During B2 the next F0 is prefetched, so layer 0 occupies two weight buffers; B2 also computes its gradient.
    assert peak_bytes(tasks, larger, "stage") == 2 * 1000 + 3 * 100 + 300 + 2 * 10 + 300


def test_prefetched_weights_are_those_of_the_next_task_on_the_same_device():
    costs = [LayerCost(1, 1, 1, weight_bytes=100)] * 4
    tasks = schedule([range(0, 1), range(1, 4)], [], RunType.INFER)
    assert peak_bytes(tasks, costs, "stage", num_devices=1) == 400
    assert peak_bytes(tasks, costs, "stage", num_devices=2) == 300


def test_the_next_call_is_prefetched_only_after_the_losses_are_known():
    costs = [LayerCost(1, 1, 1, weight_bytes=100)] * 4
    assert peak_bytes(schedule([], [range(0, 4)]), costs, "stage") == 400
    tasks = schedule([range(0, 3)], [range(3, 4), range(0, 3)])
    assert peak_bytes(tasks, costs, "stage") == 600, "B2 runs while the weights of the next F0 arrive"
    train = schedule([range(0, 3), range(3, 4)], [range(3, 4), range(0, 3)], RunType.TRAIN)
    assert peak_bytes(train, costs, "stage") == 400


@for_all(layer_costs(min_size=4, max_size=4), grains, st.sampled_from(RunType), st.integers(1, 4))
def test_the_peak_is_at_least_the_largest_stage_and_at_most_the_sum_of_everything(costs, grain, run_type, num_devices):
    for plan in legal_plans(4, run_type):
        tasks = build_schedule(plan, run_type)
        largest = max(StageMemory(costs, grain).range_bytes(task.kind, task.layers) for task in tasks)
        buffers = sum(2 * cost.weight_bytes + cost.grad_bytes for cost in costs)
        transient = sum(cost.activation_bytes for cost in costs) + max(cost.grad_bytes for cost in costs)
        between = max(cost.input_bytes for cost in costs) if num_devices == 1 else 0
        assert largest <= peak_bytes(tasks, costs, grain, num_devices) <= buffers + transient + between
