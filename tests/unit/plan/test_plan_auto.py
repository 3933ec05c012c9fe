"""ModelExecutePlan.auto returns valid, balanced plans. They are the best by its rule, compared with every plan."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import strategies as st
from plan_strategies import FakeModel, equal_layers, for_all, layer_costs, profiles, run_types

from helpers_plans import legal_plans
from roundpipe.errors import ArgumentTypeError, ConfigError, PlanError
from roundpipe.plan import LayerCost, ModelExecutePlan, ModelProfile, RunType, TaskKind, build_schedule
from roundpipe.plan.predict import task_seconds

GB = 10**9


def model_of(costs, num_devices=2, limit=None):
    return FakeModel(ModelProfile(tuple(costs), num_devices, 3, limit))


def passes_of(plan, run_type, costs):
    """Return the stage times of each pass of a plan."""
    tasks = build_schedule(plan, run_type)
    times = [
        [task_seconds(task, costs) for task in tasks if (task.kind is TaskKind.BACKWARD) == side] for side in (0, 1)
    ]
    return times if run_type is RunType.TRAIN else [times[0] + times[1]]


@for_all(run_types, st.lists(profiles(), min_size=1, max_size=3), st.none() | st.integers(1, 12), st.floats(1.0, 3.0))
def test_every_plan_is_valid_and_has_min_stages_if_there_are_enough_layers(run_type, some, min_stages, upper_threshold):
    models = [FakeModel(profile) for profile in some]
    found = ModelExecutePlan.auto(run_type, *models, min_stages=min_stages, upper_threshold=upper_threshold)
    plans = found if len(models) > 1 else [found]
    assert len(plans) == len(models)
    for plan, profile in zip(plans, some, strict=True):
        plan.check_valid(len(profile.layers), run_type)
    wanted = max(profile.num_devices for profile in some) if min_stages is None else min_stages
    together = zip(*(passes_of(plan, run_type, p.layers) for plan, p in zip(plans, some, strict=True)), strict=True)
    finest = sum(2 * len(p.layers) - 1 if run_type is RunType.FUSED else len(p.layers) for p in some)
    for times in together:
        assert sum(map(len, times)) >= min(wanted, finest)


@for_all(
    st.sampled_from(["infer", "train"]), layer_costs(max_size=6), st.integers(1, 8), st.sampled_from([1.0, 1.1, 1.5])
)
def test_no_legal_plan_is_better_by_the_rule(run_type, costs, min_stages, upper_threshold):
    plan = ModelExecutePlan.auto(run_type, model_of(costs), min_stages=min_stages, upper_threshold=upper_threshold)
    found = [(len(times), max(times)) for times in passes_of(plan, RunType(run_type), costs)]
    for (stages, slowest), candidates_best in zip(
        found, simple_best(RunType(run_type), costs, min_stages, upper_threshold), strict=True
    ):
        assert (stages, slowest) == candidates_best


def simple_best(run_type, costs, min_stages, upper_threshold):
    """Yield the best plan of each pass by the rule of auto: bound = max(slowest layer, total / min_stages)."""
    plans = [passes_of(plan, run_type, costs) for plan in legal_plans(len(costs), run_type)]
    for number in range(len(plans[0])):
        candidates = [times[number] for times in plans]
        finest = max(candidates, key=len)
        bound = max(max(finest), sum(finest) / min_stages)
        allowed = [times for times in candidates if max(times) <= upper_threshold * bound * (1 + 1e-9)]
        fewest = max(min(map(len, allowed)), min(min_stages, len(finest)))
        yield min((len(times), max(times)) for times in allowed if len(times) >= fewest)


def fused_seconds(plan, costs):
    return sum(costs[layer].forward_s + costs[layer].backward_s for layer in plan.bwd_plan[0])


@for_all(layer_costs(max_size=5), st.integers(1, 9), st.sampled_from([1.0, 1.1, 1.5]))
def test_no_legal_fused_plan_is_better_by_the_rule(costs, min_stages, upper_threshold):
    plans = list(legal_plans(len(costs), "fused"))
    times_of = [passes_of(plan, RunType.FUSED, costs)[0] for plan in plans]
    finest = max(times_of, key=len)
    by_total = min(
        max(fused_seconds(plan, costs), sum(times) / min_stages) for plan, times in zip(plans, times_of, strict=True)
    )
    limit = upper_threshold * max(*finest, by_total) if len(finest) > 1 else upper_threshold * max(finest[0], by_total)
    allowed = [times for times in times_of if max(times) <= limit * (1 + 1e-9)]
    fewest = min(map(len, allowed))

    plan = ModelExecutePlan.auto("fused", model_of(costs), min_stages=min_stages, upper_threshold=upper_threshold)
    found = passes_of(plan, RunType.FUSED, costs)[0]
    assert max(found) <= limit * (1 + 1e-9)
    if fewest >= min_stages:
        assert (len(found), max(found)) == min((len(times), max(times)) for times in allowed)
    else:
        # Moving layers out of the fused stage adds two stages, so the plan may have one more than min_stages.
        assert min(min_stages, len(finest)) <= len(found) <= min(min_stages, len(finest)) + 1


@for_all(run_types, st.lists(layer_costs(max_size=3), min_size=2, max_size=2), st.integers(1, 6))
def test_several_models_share_one_target_stage_time(run_type, both, min_stages):
    """No pair of legal plans with at most as many stages in total has a faster slowest stage."""
    plans = ModelExecutePlan.auto(run_type, *map(model_of, both), min_stages=min_stages)
    found = [passes_of(plan, run_type, costs) for plan, costs in zip(plans, both, strict=True)]
    options = [[passes_of(plan, run_type, costs) for plan in legal_plans(len(costs), run_type)] for costs in both]
    for number in range(len(found[0])):
        stages = sum(len(times[number]) for times in found)
        slowest = max(max(times[number]) for times in found)
        best = min(
            max(max(first[number]), max(second[number]))
            for first, second in product(*options)
            if len(first[number]) + len(second[number]) <= stages
        )
        # Only a split that reaches min_stages in a fused pass may be less than optimal.
        assert slowest == best or (run_type is RunType.FUSED and stages <= min_stages + 1)


def test_equal_layers_give_equal_stages():
    plan = ModelExecutePlan.auto("infer", model_of(equal_layers(12)), min_stages=4)
    assert plan == ModelExecutePlan([range(0, 3), range(3, 6), range(6, 9), range(9, 12)])


def test_rounding_errors_do_not_add_a_stage():
    plan = ModelExecutePlan.auto("infer", model_of(equal_layers(9, forward_s=0.1)), min_stages=3, upper_threshold=1.0)
    assert plan.fwd_plan == [range(0, 3), range(3, 6), range(6, 9)]


def test_a_fused_plan_balances_forward_fused_and_backward_stages():
    """Forward takes 1 s per layer, fused and backward take 3 s per layer: here every stage takes 9 s."""
    costs = (LayerCost(1.0, 1.0, 2.0),) * 12
    plan = ModelExecutePlan.auto("fused", model_of(costs), min_stages=5)
    assert plan == ModelExecutePlan([range(0, 9)], [range(9, 12), range(6, 9), range(3, 6), range(0, 3)])


def test_min_stages_defaults_to_the_number_of_devices():
    assert len(ModelExecutePlan.auto("infer", model_of(equal_layers(12), num_devices=3)).fwd_plan) == 3
    two = ModelExecutePlan.auto("infer", model_of(equal_layers(6), 3), model_of(equal_layers(6), 2))
    assert sum(len(plan.fwd_plan) for plan in two) == 4, "one target of 4 s, which 6 layers cannot meet in one stage"


def test_layers_without_cost_are_planned_too():
    plan = ModelExecutePlan.auto("train", model_of((LayerCost(0.0, 0.0, 0.0),) * 4), min_stages=2)
    plan.check_valid(4, "train")
    assert len(plan.fwd_plan) == 2


@for_all(run_types, layer_costs(), st.integers(1, 8))
def test_a_memory_limit_holds_for_every_stage(run_type, costs, min_stages):
    limit = max(cost.weight_bytes + cost.grad_bytes for cost in costs) + 500
    plan = ModelExecutePlan.auto(run_type, model_of(costs), min_stages=min_stages, model_memory_limit=limit / GB)
    plan.check_valid(len(costs), run_type)
    for task in build_schedule(plan, run_type):
        layers = [costs[layer] for layer in task.layers]
        held = sum(cost.weight_bytes for cost in layers)
        held += 0 if task.kind is TaskKind.FORWARD else sum(cost.grad_bytes for cost in layers)
        assert held <= limit + 1e-3


def test_gradients_count_in_backward_stages_only():
    costs = equal_layers(4, weight_bytes=GB, grad_bytes=GB)
    plan = ModelExecutePlan.auto("train", model_of(costs), min_stages=1, model_memory_limit=4)
    assert plan == ModelExecutePlan([range(0, 4)], [range(2, 4), range(0, 2)])


def test_a_layer_larger_than_the_limit_is_named_with_its_bytes():
    costs = (*equal_layers(2, weight_bytes=10), LayerCost(1.0, 1.0, 1.0, weight_bytes=2 * GB, grad_bytes=GB))
    with pytest.raises(PlanError, match=r"layer 2 of model 1 alone has 3000000000 bytes.*2.5 GB.*raise the limit"):
        ModelExecutePlan.auto("fused", model_of(costs[:2]), model_of(costs), model_memory_limit=2.5)
    ModelExecutePlan.auto("infer", model_of(costs), model_memory_limit=2.5)


def test_without_a_limit_a_stage_uses_up_to_half_of_the_device_except_for_larger_layers():
    costs = (*equal_layers(4, weight_bytes=100), *equal_layers(1, weight_bytes=900))
    plan = ModelExecutePlan.auto("infer", model_of(costs, num_devices=1, limit=400))
    assert plan.fwd_plan == [range(0, 2), range(2, 4), range(4, 5)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_stages": 0}, ConfigError, "min_stages must be at least 1, not 0"),
        ({"min_stages": 2.0}, ArgumentTypeError, "min_stages must be an int, not float"),
        ({"min_stages": True}, ArgumentTypeError, "min_stages must be an int, not bool"),
        ({"upper_threshold": 0.9}, ConfigError, "upper_threshold must be at least 1, not 0.9"),
        ({"upper_threshold": "1"}, ArgumentTypeError, "upper_threshold must be a number, not str"),
        ({"upper_threshold": math.nan}, ConfigError, "upper_threshold must be finite, not nan"),
        ({"model_memory_limit": 0}, ConfigError, "model_memory_limit must be more than 0 GB, not 0"),
        ({"model_memory_limit": "8GB"}, ArgumentTypeError, "model_memory_limit must be a number, not str"),
        ({"model_memory_limit": math.inf}, ConfigError, "model_memory_limit must be finite, not inf"),
    ],
)
def test_wrong_options_are_refused_with_their_values(options, error, message):
    with pytest.raises(error, match=message):
        ModelExecutePlan.auto("infer", model_of(equal_layers(2)), **options)


def test_wrong_models_are_refused():
    with pytest.raises(ConfigError, match="at least one model"):
        ModelExecutePlan.auto("infer")
    with pytest.raises(ArgumentTypeError, match="model 1 must be a RoundPipe, not int"):
        ModelExecutePlan.auto("infer", model_of(equal_layers(1)), 7)
    with pytest.raises(ArgumentTypeError, match="planning_profile\\(\\) of model 0 must return a ModelProfile"):
        ModelExecutePlan.auto("infer", FakeModel(None))
    with pytest.raises(PlanError, match="unknown run type 'x'"):
        ModelExecutePlan.auto("x", model_of(equal_layers(1)))
