"""Exact steps (the call waits for the update): predicted seconds, the best tail, and the chosen plan."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from plan_strategies import for_all, grains, layer_costs, peak_bytes

from helpers_plans import legal_plans
from roundpipe.plan import LayerCost, ModelExecutePlan, ModelProfile, RunType, build_schedule, choose_exact_plan
from roundpipe.plan.partition import single_layers
from roundpipe.plan.predict import StageMemory
from roundpipe.plan.search import best_tail, exact_step_s

EQUAL = (LayerCost(1.0, 1.0, 2.0),) * 4
ONE_STAGE = build_schedule(ModelExecutePlan([], [range(0, 4)]), RunType.FUSED)
TWO_HALVES = build_schedule(ModelExecutePlan([range(0, 2)], [range(2, 4), range(0, 2)]), RunType.FUSED)


def seconds(tasks, update_s, tail, num_microbatch=4, costs=EQUAL, grain="stage"):
    return exact_step_s(tasks, costs, update_s, num_microbatch=num_microbatch, tail=tail, grain=grain)


def test_without_an_update_the_step_takes_its_compute_time():
    for tail in range(1, 5):
        assert seconds(ONE_STAGE, [0.0] * 4, tail) == 4 * 4 * 3
    assert seconds(TWO_HALVES, [0.0] * 4, 1) == 4 * (4 * 3 + 2), "two layers are recomputed"


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (1, 48 - 6 + 4 * 5),  # the first gradient is final 6 s before the end, then four updates of 5 s
        (2, 48 - 3 * 4 + 4 * 5),
        (4, 48 - 3 * 8 + 3 * 8 + 5),  # each update runs beside the backward of the layer before it
    ],
)
def test_a_tail_makes_gradients_final_earlier(tail, expected):
    assert seconds(ONE_STAGE, [5.0] * 4, tail) == expected


def test_gradients_of_a_backward_stage_are_final_after_its_last_microbatch():
    # F takes 8 s, FB 4 x 6 s (layers 3 and 2 are final at its end, 2 s apart), B 4 x 6 s (the same for 1 and 0).
    assert seconds(TWO_HALVES, [3.0] * 4, 1) == 8 + 24 + 24 - 2 + 3 + 3
    by_layer = seconds(TWO_HALVES, [3.0] * 4, 1, grain="layer")
    assert by_layer == 8 + 24 + 24 - 3 + 3 + 3, "layer 1 is final before layer 0 is recomputed"


@for_all(
    layer_costs(min_size=4, max_size=4), grains, st.integers(1, 6), st.lists(st.floats(0, 9), min_size=4, max_size=4)
)
def test_a_step_takes_at_least_its_compute_and_its_updates(costs, grain, num_microbatch, update_s):
    for plan in legal_plans(4, RunType.FUSED):
        tasks = build_schedule(plan, RunType.FUSED)
        for tail in range(1, num_microbatch + 1):
            step_s = exact_step_s(tasks, costs, update_s, num_microbatch=num_microbatch, tail=tail, grain=grain)
            compute_s = exact_step_s(tasks, costs, [0.0] * 4, num_microbatch=num_microbatch, tail=tail, grain=grain)
            assert compute_s <= step_s * (1 + 1e-9)
            assert sum(update_s) <= step_s * (1 + 1e-9)
            assert step_s <= (compute_s + sum(update_s)) * (1 + 1e-9)


def test_of_equally_fast_tails_the_shortest_wins():
    sizes = {"num_microbatch": 16, "longest": 16}
    assert best_tail(ONE_STAGE, EQUAL, [0.0] * 4, **sizes)[0] == 1
    tail, step_s = best_tail(ONE_STAGE, EQUAL, [5.0] * 4, **sizes)
    assert 1 < tail < 16, "just long enough for the updates to overlap with the backward"
    assert step_s == seconds(ONE_STAGE, [5.0] * 4, 16, num_microbatch=16)


@pytest.mark.parametrize("limit", [None, 4000, 2000, 1300])
def test_the_chosen_plan_fits_and_no_other_fused_size_is_faster(limit):
    costs = (LayerCost(1.0, 1.0, 2.0, 100, 100, 100, 5),) * 8
    profile, update_s = ModelProfile(costs, 1, 4, limit), [2.0] * 8
    memory = StageMemory(costs, "stage", 4)

    def step_s(plan):
        tasks = build_schedule(plan, RunType.FUSED)
        longest = memory.longest_tail(tasks, 1, limit)
        return best_tail(tasks, costs, update_s, num_microbatch=4, longest=longest)[1]

    def fits(plan):
        return limit is None or peak_bytes(build_schedule(plan, RunType.FUSED), costs, "stage", 1, 4) <= limit

    chosen = choose_exact_plan(profile, update_s)
    chosen.check_valid(8, RunType.FUSED)
    assert fits(chosen)
    fine = [
        ModelExecutePlan(single_layers(range(start)), [range(start, 8), *reversed(single_layers(range(start)))])
        for start in range(8)
    ]
    assert step_s(chosen) <= min(step_s(plan) for plan in fine if fits(plan)) * 1.01


def test_with_several_devices_the_steady_step_decides():
    plan = choose_exact_plan(ModelProfile(EQUAL * 3, 3, 4), [1.0] * 12)
    assert len(plan.bwd_plan) > 1
