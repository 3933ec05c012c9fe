"""choose_plan returns valid plans, within memory if possible, that are close to the best of all legal plans."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import strategies as st
from plan_strategies import equal_layers, for_all, grains, layer_costs, peak_bytes, profiles, run_types

from helpers_plans import legal_plans
from roundpipe.plan import LayerCost, ModelExecutePlan, ModelProfile, RunType, build_schedule, choose_plan
from roundpipe.plan.predict import steady_step_s
from roundpipe.plan.search import TIE


def passes(plan, run_type):
    """Return the task lists of each call: forward and backward of ``train`` are two calls."""
    tasks = build_schedule(plan, run_type)
    if run_type is not RunType.TRAIN:
        return [tasks]
    return [tasks[: len(plan.fwd_plan)], tasks[len(plan.fwd_plan) :]]


def peak(plan, run_type, profile, grain="stage"):
    return max(
        peak_bytes(tasks, profile.layers, grain, profile.num_devices, profile.num_microbatch)
        for tasks in passes(plan, run_type)
    )


def step_s(plan, run_type, profile):
    sizes = {"num_devices": profile.num_devices, "num_microbatch": profile.num_microbatch}
    return sum(steady_step_s(tasks, profile.layers, **sizes) for tasks in passes(plan, run_type))


@for_all(run_types, profiles(max_size=12), grains)
def test_every_plan_is_valid_and_fits_into_memory_if_the_finest_plan_does(run_type, profile, grain):
    plan = choose_plan(run_type, profile, grain)
    num_layers = len(profile.layers)
    plan.check_valid(num_layers, run_type)
    if profile.memory_limit_bytes is None:
        return
    finest = ModelExecutePlan.layer_by_layer(num_layers, run_type)
    for chosen, single in zip(passes(plan, run_type), passes(finest, run_type), strict=True):
        sizes = {"num_devices": profile.num_devices, "num_microbatch": profile.num_microbatch}
        held = partial(peak_bytes, costs=profile.layers, grain=grain, **sizes)
        if held(single) <= profile.memory_limit_bytes:
            assert held(chosen) <= profile.memory_limit_bytes


@for_all(run_types, layer_costs(max_size=8), grains, st.integers(1, 5))
def test_when_nothing_fits_the_finest_plan_is_returned(run_type, costs, grain, num_devices):
    costs = tuple(LayerCost(c.forward_s, c.recompute_s, c.backward_s, c.weight_bytes + 1, 1, 1) for c in costs)
    plan = choose_plan(run_type, ModelProfile(costs, num_devices, 3, 1), grain)
    assert plan == ModelExecutePlan.layer_by_layer(len(costs), run_type)


@for_all(layer_costs(max_size=5), st.sampled_from(["infer", "train"]), st.integers(2, 4), st.integers(1, 5))
def test_a_pass_is_as_fast_as_the_coarsest_and_the_finest_plan(costs, run_type, num_devices, num_microbatch):
    """The plan is not slower than one layer per stage or one stage in total, except for ties."""
    run_type = RunType(run_type)
    profile = ModelProfile(costs, num_devices, num_microbatch, None)
    whole = [range(0, len(costs))]
    coarsest = ModelExecutePlan(whole, whole)
    found_s = step_s(choose_plan(run_type, profile), run_type, profile)
    for other in (coarsest, ModelExecutePlan.layer_by_layer(len(costs), run_type)):
        assert found_s <= step_s(other, run_type, profile) * (1 + TIE) * (1 + 1e-9)


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6])
def test_a_fused_plan_of_equal_layers_is_close_to_the_best_of_all_legal_plans(num_layers, num_devices):
    profile = ModelProfile(equal_layers(num_layers), num_devices, num_devices + 1, None)
    best_s = min(step_s(plan, RunType.FUSED, profile) for plan in legal_plans(num_layers, "fused"))
    assert step_s(choose_plan(RunType.FUSED, profile), RunType.FUSED, profile) <= 1.1 * best_s


@for_all(profiles(limits=st.none()))
def test_one_device_without_a_limit_fuses_everything(profile):
    profile = ModelProfile(profile.layers, 1, profile.num_microbatch, None)
    num_layers = len(profile.layers)
    whole = [range(0, num_layers)]
    assert choose_plan(RunType.FUSED, profile) == ModelExecutePlan([], whole)
    assert choose_plan(RunType.TRAIN, profile) == ModelExecutePlan(whole, whole)
    assert choose_plan(RunType.INFER, profile) == ModelExecutePlan(whole)


@for_all(layer_costs(max_size=5), grains, st.integers(1, 12000))
def test_one_device_fuses_as_much_as_memory_allows(costs, grain, limit):
    profile = ModelProfile(costs, 1, 2, limit)
    plan = choose_plan(RunType.FUSED, profile, grain)
    fitting = [p for p in legal_plans(len(costs), "fused") if peak(p, RunType.FUSED, profile, grain) <= limit]
    if peak(plan, RunType.FUSED, profile, grain) <= limit:
        assert plan in fitting
        simple = [p for p in fitting if max(map(len, [*p.fwd_plan, *p.bwd_plan[1:]]), default=1) == 1]
        for other in simple:
            assert len(plan.bwd_plan[0]) >= len(other.bwd_plan[0])


def test_one_device_with_a_limit_fuses_what_fits_and_packs_the_rest():
    """Layers of 100 bytes of weights, gradients and activations each; a fused stage of three layers fits."""
    layers = equal_layers(12, weight_bytes=100, grad_bytes=100, activation_bytes=100)
    plan = choose_plan(RunType.FUSED, ModelProfile(layers, 1, 2, 1200))
    assert len(plan.bwd_plan[0]) == 3
    assert peak(plan, RunType.FUSED, ModelProfile(layers, 1, 2, 1200)) <= 1200


def test_layer_grain_allows_larger_backward_stages():
    layers = equal_layers(8, weight_bytes=10, grad_bytes=10, activation_bytes=100)
    by_stage = choose_plan(RunType.TRAIN, ModelProfile(layers, 1, 2, 400), "stage")
    by_layer = choose_plan(RunType.TRAIN, ModelProfile(layers, 1, 2, 400), "layer")
    assert (len(by_stage.bwd_plan), len(by_layer.bwd_plan)) == (3, 1)


def test_ties_go_to_fewer_tasks():
    """Only one layer takes time, so more stages do not make the step shorter."""
    layers = (LayerCost(0.0, 0.0, 0.0), LayerCost(1.0, 1.0, 1.0), LayerCost(0.0, 0.0, 0.0))
    assert choose_plan(RunType.INFER, ModelProfile(layers, 2, 2, None)) == ModelExecutePlan([range(0, 3)])


def test_the_choice_is_deterministic():
    profile = ModelProfile(equal_layers(30, weight_bytes=7), 4, 5, 100)
    assert choose_plan(RunType.FUSED, profile) == choose_plan(RunType.FUSED, profile)
