"""check_valid accepts exactly the legal plans of small models and names the first fault of the others."""

from __future__ import annotations

from itertools import product

import pytest

from helpers_plans import compositions, legal_plans
from roundpipe.errors import ArgumentTypeError, ConfigError, PlanError
from roundpipe.plan import ModelExecutePlan, RunType


@pytest.mark.parametrize(("run_type", "count"), [("infer", 16), ("train", 256), ("fused", 86)])
def test_every_legal_plan_of_five_layers_is_accepted(run_type, count):
    plans = list(legal_plans(5, run_type))
    assert len(plans) == count
    for plan in plans:
        plan.check_valid(5, run_type)
        plan.check_valid(5, RunType(run_type))


@pytest.mark.parametrize("run_type", RunType)
def test_no_other_lists_over_three_layers_are_accepted(run_type):
    """All lists of up to three ranges over three layers, legal or not: exactly the legal plans pass."""
    ranges = [range(start, stop) for start in range(4) for stop in range(4)]
    lists = [list(some) for length in range(4) for some in product(ranges, repeat=length)]
    legal = list(legal_plans(3, run_type))
    fwd_of_legal = [plan.fwd_plan for plan in legal]
    other_side = [[], [range(0, 3)], [range(2, 3), range(0, 2)], [range(0, 1), range(1, 3)]]
    candidates = [(a, b) for a in lists for b in other_side] + [(a, b) for a in other_side for b in lists]
    for fwd, bwd in candidates:
        plan = ModelExecutePlan(fwd, bwd)
        if plan in legal or (run_type is RunType.INFER and fwd in fwd_of_legal):
            plan.check_valid(3, run_type)
        else:
            with pytest.raises(PlanError):
                plan.check_valid(3, run_type)


def test_legal_plans_of_the_smallest_models():
    assert list(compositions(0)) == [[]]
    assert list(legal_plans(1, "fused")) == [ModelExecutePlan([], [range(0, 1)])]
    assert ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)]) in legal_plans(2, "fused")


FAULTS = [
    # run type, fwd_plan, bwd_plan, message (5 layers)
    ("infer", [3], [], "fwd_plan[0] must be a range, not int (3); write e.g. range(0, 5)"),
    ("infer", [(0, 5)], [], "fwd_plan[0] must be a range, not tuple ((0, 5)); write e.g. range(0, 5)"),
    ("infer", None, [], "fwd_plan must be a list of ranges, not NoneType (None)"),
    ("infer", [range(0, 5, 2)], [], "fwd_plan[0] = range(0, 5, 2) has step 2; ranges ascend by 1"),
    ("infer", [range(4, -1, -1)], [], "fwd_plan[0] = range(4, -1, -1) has step -1; ranges ascend by 1"),
    ("infer", [range(0, 5), range(5, 5)], [], "fwd_plan[1] = range(5, 5) is empty; remove it or give it a layer"),
    ("infer", [range(0, 6)], [], "fwd_plan[0] = range(0, 6) is out of bounds; the model has layers 0 to 4"),
    ("infer", [range(-1, 5)], [], "fwd_plan[0] = range(-1, 5) is out of bounds; the model has layers 0 to 4"),
    ("infer", [], [], "fwd_plan is empty; give the forward stages, e.g. [range(0, 5)]"),
    (
        "infer",
        [range(0, 2), range(3, 5)],
        [],
        "fwd_plan[1] = range(3, 5) leaves a hole: layer 2 is in no range before it",
    ),
    ("infer", [range(1, 5)], [], "fwd_plan[0] = range(1, 5) leaves a hole: layer 0"),
    (
        "infer",
        [range(0, 3), range(2, 5)],
        [],
        "fwd_plan[1] = range(2, 5) overlaps fwd_plan[0] = range(0, 3): layer 2 appears twice",
    ),
    ("infer", [range(0, 5), range(0, 5)], [], "overlaps fwd_plan[0] = range(0, 5): layer 0 appears twice"),
    (
        "infer",
        [range(3, 5), range(0, 3)],
        [],
        "fwd_plan[0] = range(3, 5) is in the wrong order: layer 0 comes after it; fwd_plan must be ascending, "
        "from the first layers to the last",
    ),
    ("infer", [range(0, 3)], [], "fwd_plan ends too early: layers 3 to 4 are in no range; add range(3, 5) at its end"),
    ("train", [], [range(0, 5)], "fwd_plan is empty"),
    ("train", [range(0, 5)], [], "bwd_plan is empty; give the backward stages, e.g. [range(0, 5)]"),
    ("train", [range(0, 5)], [5], "bwd_plan[0] must be a range, not int (5)"),
    ("train", [range(0, 4)], [5], "fwd_plan ends too early"),
    (
        "train",
        [range(0, 5)],
        [range(0, 3), range(3, 5)],
        "bwd_plan[0] = range(0, 3) is in the wrong order: layer 4 comes after it; bwd_plan must be descending, "
        "from the last layers to the first",
    ),
    ("train", [range(0, 5)], [range(3, 5), range(0, 2)], "bwd_plan[1] = range(0, 2) leaves a hole: layer 2"),
    (
        "train",
        [range(0, 5)],
        [range(2, 5), range(0, 3)],
        "bwd_plan[1] = range(0, 3) overlaps bwd_plan[0] = range(2, 5): layer 2 appears twice",
    ),
    ("train", [range(0, 5)], [range(2, 5)], "bwd_plan ends too early: layers 0 to 1 are in no range; add range(0, 2)"),
    ("fused", [], [], "bwd_plan is empty; its first range must be the fused stage range(0, 5)"),
    ("fused", [range(0, 3)], [], "bwd_plan is empty; its first range must be the fused stage range(3, 5)"),
    ("fused", [range(0, 5)], [range(0, 5)], "fwd_plan ends at layer 4, the last one, and leaves none"),
    ("fused", [range(1, 3)], [range(3, 5)], "fwd_plan[0] = range(1, 3) leaves a hole: layer 0"),
    (
        "fused",
        [range(0, 2)],
        [range(3, 5), range(0, 3)],
        "bwd_plan[0] = range(3, 5) is the fused stage and must start where fwd_plan ends, at layer 2: use range(2, 5)",
    ),
    (
        "fused",
        [range(0, 2)],
        [range(2, 4), range(0, 2)],
        "bwd_plan[0] = range(2, 4) is the fused stage and must end with the last layer, 4: use range(2, 5)",
    ),
    ("fused", [range(0, 2)], [range(2, 5)], "bwd_plan ends too early: layers 0 to 1 are in no range"),
    ("fused", [range(0, 2)], [range(2, 5), range(1, 2)], "bwd_plan ends too early: layers 0 to 0 are in no range"),
    ("fused", [range(0, 2)], [range(2, 5), range(0, 1)], "bwd_plan[1] = range(0, 1) leaves a hole: layer 1"),
    (
        "fused",
        [range(0, 2)],
        [range(2, 5), range(0, 1), range(1, 2)],
        "bwd_plan[1] = range(0, 1) is in the wrong order",
    ),
    (
        "fused",
        [range(0, 2)],
        [range(2, 5), range(0, 3)],
        "bwd_plan[1] = range(0, 3) overlaps bwd_plan[0] = range(2, 5)",
    ),
    ("fused", [], [range(0, 5), range(0, 1)], "bwd_plan[1] = range(0, 1) overlaps bwd_plan[0] = range(0, 5): layer 0"),
]


@pytest.mark.parametrize(("run_type", "fwd_plan", "bwd_plan", "message"), FAULTS)
def test_the_first_fault_is_named_with_its_values(run_type, fwd_plan, bwd_plan, message):
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = fwd_plan, bwd_plan
    with pytest.raises(PlanError) as caught:
        plan.check_valid(5, run_type)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_infer_ignores_the_backward_list():
    ModelExecutePlan([range(0, 2)], [range(7, 9)]).check_valid(2, "infer")


def test_an_unknown_run_type_is_named_beside_the_known_ones():
    with pytest.raises(PlanError, match="unknown run type 'both'; use one of 'infer', 'train', 'fused'"):
        ModelExecutePlan([range(0, 1)]).check_valid(1, "both")
    with pytest.raises(ArgumentTypeError, match="run_type must be a str or RunType, not int"):
        ModelExecutePlan([range(0, 1)]).check_valid(1, 3)


def test_the_number_of_layers_must_be_a_positive_int():
    with pytest.raises(PlanError, match="at least 1 layer, not 0"):
        ModelExecutePlan().check_valid(0, "infer")
    for wrong in (True, 2.0, "2"):
        with pytest.raises(ArgumentTypeError, match="num_layers must be an int"):
            ModelExecutePlan([range(0, 2)]).check_valid(wrong, "infer")


def test_users_may_assign_and_change_the_lists():
    plan = ModelExecutePlan()
    assert (plan.fwd_plan, plan.bwd_plan) == ([], [])
    plan.fwd_plan = [range(0, 3)]
    plan.fwd_plan.append(range(3, 5))
    plan.check_valid(5, "infer")
    assert plan == ModelExecutePlan((range(0, 3), range(3, 5)))


def test_plans_do_not_share_lists():
    stages = [range(0, 2)]
    plan = ModelExecutePlan(stages)
    stages.clear()
    assert plan.fwd_plan == [range(0, 2)]
    ModelExecutePlan().fwd_plan.append(range(0, 1))
    assert ModelExecutePlan().fwd_plan == []


def test_plans_compare_by_their_lists_print_as_code_and_are_not_hashable():
    plan = ModelExecutePlan([range(0, 2)], [range(0, 2)])
    assert repr(plan) == "ModelExecutePlan(fwd_plan=[range(0, 2)], bwd_plan=[range(0, 2)])"
    assert eval(repr(plan)) == plan
    assert plan != ModelExecutePlan([range(0, 2)])
    assert plan != "plan"
    with pytest.raises(TypeError):
        hash(plan)


def test_plan_errors_are_config_errors():
    assert issubclass(PlanError, ConfigError)


def test_layer_by_layer_has_one_layer_per_stage():
    first, second, third = range(0, 1), range(1, 2), range(2, 3)
    assert ModelExecutePlan.layer_by_layer(3, RunType.INFER) == ModelExecutePlan([first, second, third])
    backward = [third, second, first]
    assert ModelExecutePlan.layer_by_layer(3, RunType.TRAIN) == ModelExecutePlan([first, second, third], backward)
    assert ModelExecutePlan.layer_by_layer(3, RunType.FUSED) == ModelExecutePlan([first, second], backward)
    assert ModelExecutePlan.layer_by_layer(1, RunType.FUSED) == ModelExecutePlan([], [first])
