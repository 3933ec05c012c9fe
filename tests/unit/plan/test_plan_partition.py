"""Packing, checked against every possible cut."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from plan_strategies import for_all

from helpers_plans import compositions
from roundpipe.plan.partition import Packer, lower_bound_s, make_line, tightest

layer_seconds = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=7)


@for_all(layer_seconds, st.integers(9, 30), st.integers(1, 7))
def test_packing_uses_the_fewest_stages_within_time_and_memory(seconds, max_s, most_layers):
    line = make_line(seconds, lambda layers: len(layers) <= most_layers)
    packed, packed_down = line.pack(len(seconds), max_s), line.pack_down(len(seconds), max_s)
    allowed = [
        cut
        for cut in compositions(len(seconds))
        if all(len(layers) <= most_layers and line.seconds(layers) <= max_s for layers in cut)
    ]
    assert list(packed) in allowed
    assert list(packed_down) in allowed
    assert len(packed) == len(packed_down) == min(map(len, allowed))


@for_all(layer_seconds, st.integers(1, 7))
def test_the_tightest_cut_has_the_smallest_slowest_stage(seconds, num_stages):
    packer = Packer(len(seconds), fwd=make_line(seconds))
    (cut,) = tightest([packer], num_stages, math.inf)
    best = min(max(map(packer.fwd.seconds, c)) for c in compositions(len(seconds)) if len(c) <= num_stages)
    assert cut.num_stages <= num_stages
    assert packer.slowest_s(cut) == best


def test_there_is_no_cut_below_the_slowest_layer_or_with_too_few_stages():
    packer = Packer(3, fwd=make_line([1.0, 5.0, 1.0]))
    assert tightest([packer], 3, 4.0) is None
    assert tightest([packer], 1, 6.0) is None
    assert tightest([packer], 1, 7.0) is not None


def test_a_layer_that_fits_nowhere_stands_alone():
    line = make_line([1.0] * 4, lambda layers: 2 not in layers)
    assert line.reach == (2, 2, 3, 4)
    assert line.pack(4, math.inf) == (range(0, 2), range(2, 3), range(3, 4))
    assert line.pack_down(4, math.inf) == (range(0, 2), range(2, 3), range(3, 4))


def test_what_is_left_over_is_last_or_first():
    line = make_line([1.0] * 5)
    assert line.pack(5, 2.0) == (range(0, 2), range(2, 4), range(4, 5))
    assert line.pack_down(5, 2.0) == (range(0, 1), range(1, 3), range(3, 5))


def test_the_fused_stage_starts_as_early_as_time_and_memory_allow():
    assert make_line([1.0] * 5).tail_start(3.0) == 2
    assert make_line([1.0] * 5).tail_start(math.inf) == 0
    assert make_line([1.0] * 5).tail_start(0.5) == 4, "one layer at least"
    assert make_line([1.0] * 5, lambda layers: len(layers) <= 2).tail_start(math.inf) == 3


def test_the_lower_bound_counts_only_the_recomputation_that_is_needed():
    """Two stages at best: fused 6 s of 6, or more stages of less with recomputation. One stage: everything fused."""
    fwd, fused, bwd = make_line([1.0, 1.0]), make_line([3.0, 3.0]), make_line([3.0, 3.0])
    packer = Packer(2, fwd, fused, bwd)
    assert lower_bound_s([packer], 1) == 6.0
    assert lower_bound_s([packer], 2) == (1.0 + 3.0 + 3.0) / 2
    assert lower_bound_s([packer], 100) == 3.0
