"""Chosen schedules and their simulated timelines as text. A changed text means a different schedule on devices."""

from __future__ import annotations

import pytest

from roundpipe.plan import (
    LayerCost,
    ModelExecutePlan,
    ModelProfile,
    RunType,
    build_schedule,
    choose_plan,
    deal,
    simulate,
)

LAYERS = (LayerCost(1.0, 1.0, 2.0, weight_bytes=100, grad_bytes=100, activation_bytes=50),) * 12


def schedule_text(plan: ModelExecutePlan, run_type: RunType, num_devices: int) -> str:
    tasks = build_schedule(plan, run_type)
    return "\n".join(
        f"{task!s:<4} layers {task.layers.start:>2}-{task.layers.stop - 1:<2} dev{device}"
        for task, device in zip(tasks, deal(tasks, 0, num_devices), strict=True)
    )


def chosen_text(run_type: RunType, num_devices: int, limit: int | None = None, columns: int = 72) -> str:
    profile = ModelProfile(LAYERS, num_devices, num_devices + 1, limit)
    plan = choose_plan(run_type, profile)
    timeline = simulate(build_schedule(plan, run_type), LAYERS, num_devices=num_devices, num_microbatch=num_devices + 1)
    return f"{schedule_text(plan, run_type, num_devices)}\n{timeline.to_text(columns)}\n{timeline.duration_s:g} s"


FUSED_ONE_DEVICE = """
FB0  layers  0-11 dev0
dev0 |FB0---------------------------------------------------------------------|
72 s
"""

FUSED_ONE_DEVICE_1500_BYTES = """
F0   layers  0-1  dev0
F1   layers  2-3  dev0
F2   layers  4-5  dev0
F3   layers  6-6  dev0
FB4  layers  7-11 dev0
B5   layers  6-6  dev0
B6   layers  4-5  dev0
B7   layers  2-3  dev0
B8   layers  0-1  dev0
dev0 |F0-F1--F2-F3FB4----------------------B5---B6--------B7--------B8--------|
86 s
"""

FUSED_TWO_DEVICES = """
F0   layers  0-8  dev0
FB1  layers  9-11 dev1
B2   layers  6-8  dev0
B3   layers  3-5  dev1
B4   layers  0-2  dev0
dev0 |F0----------------------B2----------------------B4----------------------|
dev1 |........FB1---------------------B3----------------------................|
81 s
"""

FUSED_FOUR_DEVICES = """
F0   layers  0-8  dev0
FB1  layers  9-11 dev1
B2   layers  6-8  dev2
B3   layers  3-5  dev3
B4   layers  0-2  dev0
dev0 |F0----------------------------------B4----------------------------------|
dev1 |.......FB1---------------------------------.............................|
dev2 |..............B2----------------------------------......................|
dev3 |......................B3----------------------------------..............|
90 s
"""

FUSED_FOUR_DEVICES_800_BYTES = """
F0   layers  0-2  dev0
F1   layers  3-5  dev1
F2   layers  6-8  dev2
F3   layers  9-10 dev3
FB4  layers 11-11 dev0
B5   layers 10-10 dev1
B6   layers  9-9  dev2
B7   layers  8-8  dev3
B8   layers  7-7  dev0
B9   layers  6-6  dev1
B10  layers  5-5  dev2
B11  layers  4-4  dev3
B12  layers  3-3  dev0
B13  layers  2-2  dev1
B14  layers  1-1  dev2
B15  layers  0-0  dev3
dev0 |F0--------------FB4------------B8--------------B12-------------.........|
dev1 |...F1--------------B5-------------B9--------------B13-------------......|
dev2 |......F2--------------B6--------------B10------------B14-------------...|
dev3 |.........F3..--.--.--.--.B7--------------B11------------B15-------------|
69 s
"""

INFER_THREE_DEVICES = """
F0   layers  0-0  dev0
F1   layers  1-1  dev1
F2   layers  2-2  dev2
F3   layers  3-3  dev0
F4   layers  4-4  dev1
F5   layers  5-5  dev2
F6   layers  6-6  dev0
F7   layers  7-7  dev1
F8   layers  8-8  dev2
F9   layers  9-9  dev0
F10  layers 10-10 dev1
F11  layers 11-11 dev2
dev0 |F0--------------F3--------------F6--------------F9--------------........|
dev1 |....F1--------------F4--------------F7--------------F10-------------....|
dev2 |........F2--------------F5--------------F8--------------F11-------------|
18 s
"""


@pytest.mark.parametrize(
    ("run_type", "num_devices", "limit", "expected"),
    [
        (RunType.FUSED, 1, None, FUSED_ONE_DEVICE),
        (RunType.FUSED, 1, 1500, FUSED_ONE_DEVICE_1500_BYTES),
        (RunType.FUSED, 2, None, FUSED_TWO_DEVICES),
        (RunType.FUSED, 4, None, FUSED_FOUR_DEVICES),
        (RunType.FUSED, 4, 800, FUSED_FOUR_DEVICES_800_BYTES),
        (RunType.INFER, 3, None, INFER_THREE_DEVICES),
    ],
)
def test_chosen_plans_of_twelve_equal_layers(run_type, num_devices, limit, expected):
    assert chosen_text(run_type, num_devices, limit) == expected.strip()


def test_a_train_plan_runs_backward_after_forward():
    plan = ModelExecutePlan([range(0, 6), range(6, 12)], [range(8, 12), range(4, 8), range(0, 4)])
    timeline = simulate(build_schedule(plan, RunType.TRAIN), LAYERS, num_devices=2, num_microbatch=3)
    assert schedule_text(plan, RunType.TRAIN, 2) == "\n".join(
        [
            "F0   layers  0-5  dev0",
            "F1   layers  6-11 dev1",
            "B2   layers  8-11 dev0",
            "B3   layers  4-7  dev1",
            "B4   layers  0-3  dev0",
        ]
    )
    assert timeline.to_text(60) == "\n".join(
        [
            "dev0 |F0----------B2----------------------B4----------------------|",
            "dev1 |....F1----------....B3----------------------................|",
        ]
    )
