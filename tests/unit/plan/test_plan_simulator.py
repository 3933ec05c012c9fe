"""The simulator follows the schedule rules; balanced schedules leave no device idle."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from plan_strategies import equal_layers, for_all, layer_costs, run_types

from helpers_plans import legal_plans
from roundpipe.plan import (
    LayerCost,
    ModelExecutePlan,
    RunType,
    StageTask,
    TaskKind,
    build_schedule,
    choose_plan,
    deal,
    simulate,
)
from roundpipe.plan.cost import ModelProfile
from roundpipe.plan.predict import steady_step_s, task_seconds

COSTS = [LayerCost(1.0, 10.0, 100.0), LayerCost(2.0, 20.0, 200.0)]


@pytest.mark.parametrize(("kind", "seconds"), list(zip(TaskKind, (3.0, 303.0, 330.0), strict=True)))
def test_a_task_takes_the_sum_of_its_phases(kind, seconds):
    assert task_seconds(StageTask(kind, 0, range(0, 2)), COSTS) == seconds


schedules = st.builds(
    lambda costs, run_type, choice: (
        costs,
        build_schedule(choice.choice(list(legal_plans(len(costs), run_type))), run_type),
    ),
    layer_costs(max_size=4),
    run_types,
    st.randoms(use_true_random=False),
)


@for_all(schedules, st.integers(1, 5), st.integers(1, 5), st.integers(0, 4))
def test_the_rules_of_the_schedule_hold(some, num_devices, num_microbatch, first_device):
    costs, tasks = some
    timeline = simulate(tasks, costs, num_devices=num_devices, num_microbatch=num_microbatch, first_device=first_device)
    spans = {(span.label, span.microbatch): span for span in timeline.spans}
    assert len(spans) == len(timeline.spans) == len(tasks) * num_microbatch
    devices = deal(tasks, first_device, num_devices)
    free_s = dict.fromkeys(devices, 0.0)
    for task, device in zip(tasks, devices, strict=True):
        for microbatch in range(num_microbatch):
            span = spans[str(task), microbatch]
            assert span.device == f"dev{device}"
            assert span.end_s == span.start_s + task_seconds(task, costs)
            before = tasks[task.index - 1] if task.index else None
            ready_s = spans[str(before), microbatch].end_s if before else 0.0
            assert span.start_s == max(ready_s, free_s[device]), "starts as soon as input and device are ready"
            free_s[device] = span.end_s


@for_all(schedules, st.integers(1, 5))
def test_one_device_never_idles(some, num_microbatch):
    costs, tasks = some
    timeline = simulate(tasks, costs, num_devices=1, num_microbatch=num_microbatch)
    work_s = num_microbatch * sum(task_seconds(task, costs) for task in tasks)
    assert timeline.duration_s == timeline.busy_s("dev0") == work_s
    assert steady_step_s(tasks, costs, num_devices=1, num_microbatch=num_microbatch) == work_s


@for_all(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5))
def test_equal_tasks_and_enough_microbatches_leave_no_device_idle(num_devices, rounds, more, first_device):
    """With at least num_devices + 1 microbatches, a device that has started never waits."""
    num_microbatch = num_devices + 1 + more
    plan = ModelExecutePlan.layer_by_layer(num_devices * rounds, RunType.INFER)
    tasks = build_schedule(plan, RunType.INFER)
    timeline = simulate(
        tasks,
        equal_layers(len(tasks)),
        num_devices=num_devices,
        num_microbatch=num_microbatch,
        first_device=first_device,
    )
    for device in timeline.devices():
        spans = [span for span in timeline.spans if span.device == device]
        assert sum(span.end_s - span.start_s for span in spans) == spans[-1].end_s - spans[0].start_s


@for_all(st.integers(2, 5), st.integers(1, 3))
def test_with_too_few_microbatches_devices_idle(num_devices, rounds):
    plan = ModelExecutePlan.layer_by_layer(num_devices * (rounds + 1), RunType.INFER)
    tasks = build_schedule(plan, RunType.INFER)
    timeline = simulate(tasks, equal_layers(len(tasks)), num_devices=num_devices, num_microbatch=num_devices - 1)
    spans = [span for span in timeline.spans if span.device == "dev0"]
    assert sum(span.end_s - span.start_s for span in spans) < spans[-1].end_s - spans[0].start_s


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_balanced_tasks_leave_no_device_idle_across_calls(num_devices):
    """F, FB and B take 3 s each, at least two tasks per device: a step takes exactly work / devices."""
    costs = (LayerCost(3.0, 1.0, 2.0),) * num_devices + (LayerCost(1.0, 1.0, 2.0),)
    plan = ModelExecutePlan.layer_by_layer(num_devices + 1, RunType.FUSED)
    plan.check_valid(len(costs), RunType.FUSED)
    tasks = build_schedule(plan, RunType.FUSED)
    assert {task_seconds(task, costs) for task in tasks} == {3.0}
    num_microbatch = num_devices + 1
    step_s = steady_step_s(tasks, costs, num_devices=num_devices, num_microbatch=num_microbatch)
    assert step_s == len(tasks) * 3.0 * num_microbatch / num_devices


def test_the_next_call_waits_for_the_losses():
    """With one fused stage calls cannot overlap, so three more devices do not help."""
    tasks = build_schedule(ModelExecutePlan([], [range(0, 4)]), RunType.FUSED)
    assert steady_step_s(tasks, equal_layers(4), num_devices=4, num_microbatch=5) == 4 * 3 * 5


@for_all(layer_costs(max_size=6), run_types, st.integers(1, 4), st.integers(1, 5))
def test_a_steady_step_is_between_the_work_per_device_and_a_single_call(costs, run_type, devices, batches):
    plan = choose_plan(run_type, ModelProfile(costs, devices, batches, None))
    tasks = build_schedule(plan, run_type)
    options = {"num_devices": devices, "num_microbatch": batches}
    work_s = batches * sum(task_seconds(task, costs) for task in tasks)
    step_s = steady_step_s(tasks, costs, **options)
    alone_s = simulate(tasks, costs, **options).duration_s
    assert step_s <= alone_s
    if run_type is not RunType.FUSED:
        assert step_s == alone_s
    if len(tasks) % devices == 0 and run_type is not RunType.FUSED:
        assert step_s >= work_s / devices
