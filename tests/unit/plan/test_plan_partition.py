"""Packing layers into stages, compared with every possible partition of small models."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from plan_strategies import for_all

from helpers_plans import compositions
from roundpipe.plan.partition import KindPacker, PassPacker, lower_bound_s, tightest

layer_seconds = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=7)


@for_all(layer_seconds, st.integers(9, 30), st.integers(1, 7))
def test_packing_uses_the_fewest_stages_within_time_and_memory(seconds, max_s, most_layers):
    packer = KindPacker.of(seconds, lambda layers: len(layers) <= most_layers)
    packed, packed_from_end = packer.pack(len(seconds), max_s), packer.pack_from_end(len(seconds), max_s)
    allowed = [
        stages
        for stages in compositions(len(seconds))
        if all(len(layers) <= most_layers and packer.seconds(layers) <= max_s for layers in stages)
    ]
    assert list(packed) in allowed
    assert list(packed_from_end) in allowed
    assert len(packed) == len(packed_from_end) == min(map(len, allowed))


@for_all(layer_seconds, st.integers(1, 7))
def test_the_tightest_partition_has_the_smallest_slowest_stage(seconds, num_stages):
    packer = PassPacker(len(seconds), fwd=KindPacker.of(seconds))
    (partition,) = tightest([packer], num_stages, math.inf)
    best = min(max(map(packer.fwd.seconds, c)) for c in compositions(len(seconds)) if len(c) <= num_stages)
    assert partition.num_stages <= num_stages
    assert packer.slowest_s(partition) == best


def test_no_partition_exists_below_the_slowest_layer_or_with_too_few_stages():
    packer = PassPacker(3, fwd=KindPacker.of([1.0, 5.0, 1.0]))
    assert tightest([packer], 3, 4.0) is None
    assert tightest([packer], 1, 6.0) is None
    assert tightest([packer], 1, 7.0) is not None


def test_a_layer_that_exceeds_memory_gets_its_own_stage():
    packer = KindPacker.of([1.0] * 4, lambda layers: 2 not in layers)
    assert packer.reach == (2, 2, 3, 4)
    assert packer.pack(4, math.inf) == (range(0, 2), range(2, 3), range(3, 4))
    assert packer.pack_from_end(4, math.inf) == (range(0, 2), range(2, 3), range(3, 4))


def test_the_short_stage_is_last_or_first():
    packer = KindPacker.of([1.0] * 5)
    assert packer.pack(5, 2.0) == (range(0, 2), range(2, 4), range(4, 5))
    assert packer.pack_from_end(5, 2.0) == (range(0, 1), range(1, 3), range(3, 5))


def test_the_fused_stage_starts_as_early_as_time_and_memory_allow():
    assert KindPacker.of([1.0] * 5).last_stage_start(3.0) == 2
    assert KindPacker.of([1.0] * 5).last_stage_start(math.inf) == 0
    assert KindPacker.of([1.0] * 5).last_stage_start(0.5) == 4, "at least one layer"
    assert KindPacker.of([1.0] * 5, lambda layers: len(layers) <= 2).last_stage_start(math.inf) == 3


def test_the_lower_bound_counts_only_the_recomputation_that_is_needed():
    """One stage: all layers fused, 6 s. Two or more stages: one layer fused, the other one recomputed."""
    fwd, fused, bwd = KindPacker.of([1.0, 1.0]), KindPacker.of([3.0, 3.0]), KindPacker.of([3.0, 3.0])
    packer = PassPacker(2, fwd, fused, bwd)
    assert lower_bound_s([packer], 1) == 6.0
    assert lower_bound_s([packer], 2) == (1.0 + 3.0 + 3.0) / 2
    assert lower_bound_s([packer], 100) == 3.0
