"""The cost model returns measured times and estimates the missing ones in the same unit."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from plan_strategies import for_all

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.plan import CostModel, LayerCost, ModelProfile, Phase
from roundpipe.plan.cost import DEFAULT_SECONDS_PER_BYTE, LAYER_OVERHEAD_BYTES, SMOOTHING

MIB = LAYER_OVERHEAD_BYTES


def observed(costs: CostModel, layer_id: int, phase: Phase, seconds: float) -> None:
    """Add a warm-up measurement, which is dropped, and then one that counts."""
    costs.observe(layer_id, phase, 1e6)
    costs.observe(layer_id, phase, seconds)


def times(cost: LayerCost) -> tuple[float, float, float]:
    return cost.forward_s, cost.recompute_s, cost.backward_s


def test_without_measurements_times_follow_sizes():
    small, large = CostModel([0, 3 * MIB], [0, 5]).layer_costs()
    unit_s = MIB * DEFAULT_SECONDS_PER_BYTE
    assert times(small) == pytest.approx((unit_s, unit_s, 2 * unit_s))
    assert times(large) == pytest.approx((4 * unit_s, 4 * unit_s, 8 * unit_s))
    assert (large.weight_bytes, large.grad_bytes) == (3 * MIB, 5)


def test_the_first_measurement_of_each_layer_and_phase_is_dropped():
    costs = CostModel([0, 0], [0, 0])
    estimate = costs.layer_costs()
    for layer_id in range(2):
        for phase in Phase:
            costs.observe(layer_id, phase, 99.0)
    assert costs.layer_costs() == estimate


def test_later_measurements_are_smoothed():
    costs = CostModel([0], [0])
    observed(costs, 0, Phase.FORWARD, 4.0)
    assert costs.layer_costs()[0].forward_s == 4.0
    costs.observe(0, Phase.FORWARD, 8.0)
    assert costs.layer_costs()[0].forward_s == 4.0 + SMOOTHING * 4.0


def test_forward_and_recompute_replace_each_other_if_one_is_missing():
    costs = CostModel([0, 0], [0, 0])
    observed(costs, 0, Phase.FORWARD, 3.0)
    observed(costs, 1, Phase.RECOMPUTE, 5.0)
    first, second = costs.layer_costs()
    assert times(first) == (3.0, 3.0, 6.0)
    assert times(second) == (5.0, 5.0, 10.0)


def test_measured_phases_are_returned_unchanged():
    costs = CostModel([0], [0])
    for phase, seconds in zip(Phase, (1.0, 1.5, 7.0), strict=True):
        observed(costs, 0, phase, seconds)
    assert times(costs.layer_costs()[0]) == (1.0, 1.5, 7.0)


def test_a_missing_backward_has_the_measured_ratio_to_forward():
    costs = CostModel([0, 0], [0, 0])
    observed(costs, 0, Phase.FORWARD, 2.0)
    observed(costs, 0, Phase.BACKWARD, 6.0)
    observed(costs, 1, Phase.FORWARD, 5.0)
    assert costs.layer_costs()[1].backward_s == 15.0


def test_a_layer_with_only_a_backward_gets_its_forward_by_the_ratio():
    costs = CostModel([0, 0], [0, 0])
    observed(costs, 1, Phase.BACKWARD, 8.0)
    assert times(costs.layer_costs()[1]) == (4.0, 4.0, 8.0)
    observed(costs, 0, Phase.FORWARD, 1.0)
    observed(costs, 0, Phase.BACKWARD, 4.0)
    assert times(costs.layer_costs()[1]) == (2.0, 2.0, 8.0)


def test_unmeasured_layers_get_the_measured_rate_per_byte():
    costs = CostModel([MIB, 3 * MIB, 7 * MIB], [0, 0, 0])
    observed(costs, 0, Phase.FORWARD, 10.0)
    observed(costs, 0, Phase.BACKWARD, 30.0)
    assert [times(cost) for cost in costs.layer_costs()] == [
        pytest.approx(expected) for expected in [(10, 10, 30), (20, 20, 60), (40, 40, 120)]
    ]


def test_zero_seconds_are_a_measurement():
    costs = CostModel([MIB, MIB], [0, 0])
    observed(costs, 0, Phase.FORWARD, 0.0)
    observed(costs, 0, Phase.BACKWARD, 0.0)
    assert [times(cost) for cost in costs.layer_costs()] == [(0.0, 0.0, 0.0)] * 2


def test_with_a_measured_ratio_of_zero_a_missing_forward_comes_from_the_rate():
    costs = CostModel([0, 0], [0, 0])
    observed(costs, 0, Phase.FORWARD, 4.0)
    observed(costs, 0, Phase.BACKWARD, 0.0)
    observed(costs, 1, Phase.BACKWARD, 1.0)
    assert times(costs.layer_costs()[1]) == (4.0, 4.0, 1.0)


def test_the_largest_activation_counts():
    costs = CostModel([0], [0])
    for activation_bytes, input_bytes in [(10, 3), (30, 1), (20, 2)]:
        costs.observe_activation(0, activation_bytes, input_bytes)
    assert (costs.layer_costs()[0].activation_bytes, costs.layer_costs()[0].input_bytes) == (30, 3)


@for_all(
    st.lists(st.integers(0, 10 * MIB), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(Phase), st.floats(1.0, 100.0))),
    st.floats(0.001, 1000.0),
)
def test_units_never_mix(weight_bytes, measurements, unit):
    """Measuring in a different unit scales every time by that unit, estimates included."""
    here, there = CostModel(weight_bytes, weight_bytes), CostModel(weight_bytes, weight_bytes)
    measurements = [entry for entry in measurements if entry[0] < len(weight_bytes)]
    for layer_id, phase, seconds in measurements:
        observed(here, layer_id, phase, seconds)
        there.observe(layer_id, phase, 1e6 * unit)
        there.observe(layer_id, phase, seconds * unit)
    scale = unit if measurements else 1.0
    for mine, other in zip(here.layer_costs(), there.layer_costs(), strict=True):
        assert times(other) == pytest.approx(tuple(scale * seconds for seconds in times(mine)))


@pytest.mark.parametrize("layer_id", [-1, 2])
def test_layers_that_do_not_exist_are_refused(layer_id):
    costs = CostModel([0, 0], [0, 0])
    with pytest.raises(ConfigError, match=f"layer_id {layer_id} does not exist; the model has 2 layers"):
        costs.observe(layer_id, Phase.FORWARD, 1.0)
    with pytest.raises(ConfigError, match="does not exist"):
        costs.observe_activation(layer_id, 1, 1)


def test_wrong_arguments_are_refused():
    costs = CostModel([0], [0])
    with pytest.raises(ArgumentTypeError, match="layer_id must be an int, not bool"):
        costs.observe(False, Phase.FORWARD, 1.0)
    for seconds in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="finite and >= 0"):
            costs.observe(0, Phase.FORWARD, seconds)
    with pytest.raises(ConfigError, match="weight_bytes has 2 layers and grad_bytes 1"):
        CostModel([1, 2], [1])


@pytest.mark.parametrize(
    ("layers", "num_devices", "num_microbatch", "message"),
    [(0, 1, 1, "without layers"), (1, 0, 1, "num_devices must be"), (1, 1, 0, "num_microbatch must be")],
)
def test_a_profile_needs_layers_devices_and_microbatches(layers, num_devices, num_microbatch, message):
    with pytest.raises(ConfigError, match=message):
        ModelProfile((LayerCost(1.0, 1.0, 1.0),) * layers, num_devices, num_microbatch, None)
