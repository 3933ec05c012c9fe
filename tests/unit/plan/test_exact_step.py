"""Exact steps (the call waits for the update): predicted seconds, the best tail, and the chosen plan."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from plan_strategies import for_all, grains, layer_costs, peak_bytes

from helpers_plans import legal_plans
from roundpipe.plan import LayerCost, ModelExecutePlan, ModelProfile, RunType, build_schedule, choose_exact_plan
from roundpipe.plan.overlap import EXACT, NO_WAVE, Overlap, UpdateTiming, Wave, best_overlap, step_s, wave_bytes
from roundpipe.plan.partition import single_layers
from roundpipe.plan.predict import StageMemory

EQUAL = (LayerCost(1.0, 1.0, 2.0),) * 4
ONE_STAGE = build_schedule(ModelExecutePlan([], [range(0, 4)]), RunType.FUSED)
TWO_HALVES = build_schedule(ModelExecutePlan([range(0, 2)], [range(2, 4), range(0, 2)]), RunType.FUSED)


def seconds(tasks, update_s, tail, num_microbatch=4, costs=EQUAL, grain="stage"):
    return step_s(tasks, costs, update_s, EXACT, Overlap(tail), num_microbatch=num_microbatch, grain=grain)


def best_tail(tasks, costs, update_s, *, num_microbatch, longest):
    sizes = {"num_microbatch": num_microbatch, "longest_tail": longest, "room_bytes": None}
    overlap, seconds = best_overlap(tasks, costs, update_s, EXACT, **sizes)
    assert overlap.wave == NO_WAVE, "the caller waits for the update"
    return overlap.tail, seconds


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
            whole_s = seconds(tasks, update_s, tail, num_microbatch, costs, grain)
            compute_s = seconds(tasks, [0.0] * 4, tail, num_microbatch, costs, grain)
            assert compute_s <= whole_s * (1 + 1e-9)
            assert sum(update_s) <= whole_s * (1 + 1e-9)
            assert whole_s <= (compute_s + sum(update_s)) * (1 + 1e-9)


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

    def best_s(plan):
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
    assert best_s(chosen) <= min(best_s(plan) for plan in fine if fits(plan)) * 1.01


def test_with_several_devices_the_steady_step_decides():
    plan = choose_exact_plan(ModelProfile(EQUAL * 3, 3, 4), [1.0] * 12)
    assert len(plan.bwd_plan) > 1


# Steps that publish layer by layer: the next call begins at once and waits for one layer at a time.

CLIPPED = UpdateTiming(is_exact=True, by_layer=True, after_norm=True)
UNCLIPPED = UpdateTiming(is_exact=True, by_layer=True)


def ahead_s(tasks, update_s, timing, overlap=Overlap(), num_microbatch=4, costs=EQUAL):
    return step_s(tasks, costs, update_s, timing, overlap, num_microbatch=num_microbatch)


@pytest.mark.parametrize(
    ("wave", "expected"),
    [
        (
            NO_WAVE,
            4 * 5 + 1 + 3 * 4 + 4 * 8,
        ),  # the last layer is ready after four updates, and the first forward with it
        (Wave(4, 1), 4 * 5 + 1 + 3 * 3 + 4 * 8),  # meanwhile three microbatches have run the first layer
        (Wave(4, 4), 4 * 5 + 4 + 4 * 8),  # or all layers but the last one
        (Wave(2, 4), 4 * 5 + 2 + 2 * 4 + 4 * 8),
    ],
)
def test_a_clipped_update_hides_behind_the_next_forward(wave, expected):
    assert ahead_s(ONE_STAGE, [5.0] * 4, CLIPPED, Overlap(1, wave)) == expected


def test_forward_tasks_run_all_microbatches_before_the_next_layer():
    update_s = [5.0, 5.0, 0.0, 0.0]
    # Layer 1 is ready after 10 s: the first microbatch leaves the forward task at 11 s and the last one at 17 s.
    assert ahead_s(TWO_HALVES, update_s, CLIPPED) == 17 + 4 * 6 + 4 * 6
    # Meanwhile all microbatches run layer 0, and layer 1 runs for them from 10 s to 14 s.
    assert ahead_s(TWO_HALVES, update_s, CLIPPED, Overlap(1, Wave(4))) == 14 + 4 * 6 + 4 * 6


def test_without_a_norm_the_update_hides_behind_both_calls():
    clipped, unclipped = (ahead_s(ONE_STAGE, [5.0] * 4, timing, Overlap(4)) for timing in (CLIPPED, UNCLIPPED))
    assert 48 <= unclipped < clipped


@for_all(layer_costs(min_size=4, max_size=4), st.integers(1, 6), st.lists(st.floats(0, 9), min_size=4, max_size=4))
def test_publishing_by_layer_is_never_slower_and_no_faster_than_its_parts(costs, num_microbatch, update_s):
    for plan in legal_plans(4, RunType.FUSED):
        tasks = build_schedule(plan, RunType.FUSED)
        compute_s = seconds(tasks, [0.0] * 4, 1, num_microbatch, costs)
        for timing in (CLIPPED, UNCLIPPED):
            waits = UpdateTiming(is_exact=True, after_norm=timing.after_norm)
            for wave in (NO_WAVE, Wave(num_microbatch), Wave(num_microbatch, 2), Wave(2, 4)):
                options = {"num_microbatch": num_microbatch, "costs": costs}
                whole_s = ahead_s(tasks, update_s, timing, Overlap(1, wave), **options)
                assert compute_s <= whole_s * (1 + 1e-9)
                assert whole_s <= ahead_s(tasks, update_s, waits, Overlap(1, wave), **options) * (1 + 1e-9)


@pytest.mark.parametrize("room", [None, 1000, 250, 0])
def test_the_chosen_wave_fits_and_is_worth_its_memory(room):
    costs = (LayerCost(1.0, 1.0, 2.0, 100, 100, 100, 5),) * 4
    sizes = {"num_microbatch": 4, "longest_tail": 4, "room_bytes": room}
    overlap, best_s = best_overlap(ONE_STAGE, costs, [5.0] * 4, CLIPPED, **sizes)
    assert overlap.tail == 1, "a tail gains nothing if the update begins after the last gradient"
    assert room is None or wave_bytes(ONE_STAGE, costs, overlap.wave) <= room
    assert (overlap.wave == NO_WAVE) == (room == 0)
    assert best_s == ahead_s(ONE_STAGE, [5.0] * 4, CLIPPED, overlap)
    assert best_overlap(ONE_STAGE, costs, [0.0] * 4, CLIPPED, **sizes)[0] == Overlap()
