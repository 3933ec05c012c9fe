"""Random layers, profiles and models for the property tests of plan/.

Seconds are whole numbers, so sums are exact and tests can compare optima with ==.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.plan import LayerCost, ModelProfile, RunType
from roundpipe.plan.predict import StageMemory

seconds = st.integers(1, 20).map(float)
sizes = st.integers(0, 1000)
run_types = st.sampled_from(RunType)
grains = st.sampled_from(["stage", "layer"])


def for_all(*strategies):
    """``given`` without a deadline: a busy machine must not fail a test."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


@st.composite
def layer_costs(draw, min_size=1, max_size=10):
    one = st.builds(LayerCost, seconds, seconds, seconds, sizes, sizes, sizes, sizes)
    return tuple(draw(st.lists(one, min_size=min_size, max_size=max_size)))


@st.composite
def profiles(draw, max_size=10, limits=st.none() | st.integers(1, 20000)):
    return ModelProfile(
        draw(layer_costs(max_size=max_size)), draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(limits)
    )


@dataclass
class FakeModel:
    """The part of a RoundPipe that ``auto`` uses."""

    profile: ModelProfile

    def planning_profile(self) -> ModelProfile:
        return self.profile


def equal_layers(num_layers: int, forward_s: float = 1.0, **sizes: int) -> tuple[LayerCost, ...]:
    return (LayerCost(forward_s, forward_s, 2 * forward_s, **sizes),) * num_layers


def peak_bytes(tasks, costs, grain="stage", num_devices=1, num_microbatch=1) -> int:
    return StageMemory(costs, grain, num_microbatch).peak_bytes(tasks, num_devices)
