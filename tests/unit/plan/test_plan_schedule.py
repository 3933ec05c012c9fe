"""build_schedule turns a plan into named tasks in order; deal assigns them to devices round-robin."""

from __future__ import annotations

import pytest

from helpers_plans import legal_plans
from roundpipe.errors import ConfigError
from roundpipe.plan import ModelExecutePlan, RunType, StageTask, TaskKind, build_schedule, deal

PLAN = ModelExecutePlan([range(0, 1), range(1, 3)], [range(3, 5), range(1, 3), range(0, 1)])


def test_tasks_are_named_by_kind_and_place():
    assert [str(task) for task in build_schedule(PLAN, RunType.FUSED)] == ["F0", "F1", "FB2", "B3", "B4"]
    assert [str(task) for task in build_schedule(PLAN, RunType.INFER)] == ["F0", "F1"]
    assert [str(task) for task in build_schedule(PLAN, RunType.TRAIN)] == ["F0", "F1", "B2", "B3", "B4"]


def test_tasks_are_plain_values():
    assert build_schedule(PLAN, RunType.FUSED)[2] == StageTask(TaskKind.FUSED, 2, range(3, 5))
    assert len({*build_schedule(PLAN, RunType.FUSED), *build_schedule(PLAN, RunType.FUSED)}) == 5


@pytest.mark.parametrize("run_type", RunType)
def test_every_layer_runs_once_each_way_in_order(run_type):
    for plan in legal_plans(5, run_type):
        tasks = build_schedule(plan, run_type)
        assert [task.index for task in tasks] == list(range(len(tasks)))
        forward = [layer for task in tasks if task.kind is not TaskKind.BACKWARD for layer in task.layers]
        backward = [layer for task in tasks if task.kind is not TaskKind.FORWARD for layer in reversed(task.layers)]
        assert forward == [0, 1, 2, 3, 4]
        assert backward == ([] if run_type is RunType.INFER else [4, 3, 2, 1, 0])


def test_tasks_are_dealt_round_robin_from_the_first_device():
    tasks = build_schedule(PLAN, RunType.FUSED)
    assert deal(tasks, 0, 3) == (0, 1, 2, 0, 1)
    assert deal(tasks, 2, 3) == (2, 0, 1, 2, 0)
    assert deal(tasks, 7, 1) == (0, 0, 0, 0, 0)
    assert deal((), 0, 2) == ()


def test_dealing_to_no_device_is_refused():
    with pytest.raises(ConfigError, match="num_devices must be at least 1, not 0"):
        deal(build_schedule(PLAN, RunType.INFER), 0, 0)
