"""The cost of each layer: measured or estimated seconds and bytes that planning works with.

Knows layers by number. Knows no tensors, devices or plans.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from roundpipe.errors import ArgumentTypeError, ConfigError

# Weight of a new measurement: time = (1 - SMOOTHING) * previous time + SMOOTHING * measured time.
SMOOTHING = 0.25

# Forward rate before any measurement. Plans then depend on proportions only; the value is a plausible one.
DEFAULT_SECONDS_PER_BYTE = 1e-11

# Added to the weight bytes of every layer in time estimates, so that layers without weights are not free.
LAYER_OVERHEAD_BYTES = 1 << 20

# Backward seconds per forward second while no layer has both measured: two matrix products instead of one.
DEFAULT_BACKWARD_RATIO = 2.0


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer: seconds per microbatch, and bytes.

    ``activation_bytes``: device memory that one microbatch occupies between forward and backward of this layer.
    ``input_bytes``: the layer's inputs of one microbatch.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    weight_bytes: int = 0
    grad_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0

    @property
    def fused_s(self) -> float:
        """Seconds in a fused stage: forward and backward, without recomputation."""
        return self.forward_s + self.backward_s

    @property
    def recompute_backward_s(self) -> float:
        """Seconds in a backward stage: recomputation and backward."""
        return self.recompute_s + self.backward_s


@dataclass(frozen=True)
class ModelProfile:
    """All inputs of the plan search. ``memory_limit_bytes`` is per device; ``None`` means unlimited."""

    layers: tuple[LayerCost, ...]
    num_devices: int
    num_microbatch: int
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a model without layers cannot be planned; wrap a model with at least one layer")
        if self.num_devices < 1:
            raise ConfigError(f"num_devices must be at least 1, not {self.num_devices}")
        if self.num_microbatch < 1:
            raise ConfigError(f"num_microbatch must be at least 1, not {self.num_microbatch}")


class Plannable(Protocol):
    """A model that `ModelExecutePlan.auto` can plan."""

    def planning_profile(self) -> ModelProfile: ...


class Phase(enum.Enum):
    """What a time measurement covers. RECOMPUTE is the repeated forward before a backward."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class CostModel:
    """Collects measurements of layers and estimates the missing ones.

    Not thread-safe: the caller holds a lock around every method.
    """

    def __init__(self, weight_bytes: Sequence[int], grad_bytes: Sequence[int]) -> None:
        if len(weight_bytes) != len(grad_bytes):
            raise ConfigError(
                f"weight_bytes has {len(weight_bytes)} layers and grad_bytes {len(grad_bytes)}; give each layer both"
            )
        self._weight_bytes = tuple(weight_bytes)
        self._grad_bytes = tuple(grad_bytes)
        self._activation_bytes = [0] * len(weight_bytes)
        self._input_bytes = [0] * len(weight_bytes)
        self._seconds: dict[tuple[int, Phase], float] = {}
        self._warm: set[tuple[int, Phase]] = set()  # layers and phases that have had their warm-up

    def observe(self, layer_id: int, phase: Phase, seconds: float) -> None:
        """Add the measured seconds of one microbatch of one layer.

        The first measurement of each layer and phase is dropped because it includes warm-up.
        """
        self._check_layer(layer_id)
        if not math.isfinite(seconds) or seconds < 0:
            raise ConfigError(f"seconds of layer {layer_id} {phase.value} must be finite and >= 0, not {seconds}")
        key = (layer_id, phase)
        if key not in self._warm:
            self._warm.add(key)
            return
        previous_s = self._seconds.get(key, seconds)
        self._seconds[key] = (1 - SMOOTHING) * previous_s + SMOOTHING * seconds

    def observe_activation(self, layer_id: int, activation_bytes: int, input_bytes: int) -> None:
        """Add the measured bytes of one microbatch of one layer; the cost model keeps the largest of each."""
        self._check_layer(layer_id)
        self._activation_bytes[layer_id] = max(self._activation_bytes[layer_id], activation_bytes)
        self._input_bytes[layer_id] = max(self._input_bytes[layer_id], input_bytes)

    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Return the cost of every layer: measured, else estimated from measured layers, else from weight bytes."""
        seconds, num_layers = self._seconds, len(self._weight_bytes)
        backward = [seconds.get((layer_id, Phase.BACKWARD)) for layer_id in range(num_layers)]
        # Forward and recomputation do the same work, so a missing forward time is replaced by the recompute time.
        forward = [
            seconds.get((layer_id, Phase.FORWARD), seconds.get((layer_id, Phase.RECOMPUTE)))
            for layer_id in range(num_layers)
        ]
        ratio = _backward_ratio(forward, backward)
        # A layer with a backward time only gets its forward time from the ratio of the other layers.
        if ratio > 0:
            forward = [
                backward_s / ratio if forward_s is None and backward_s is not None else forward_s
                for forward_s, backward_s in zip(forward, backward, strict=True)
            ]
        estimate_bytes = [weight_bytes + LAYER_OVERHEAD_BYTES for weight_bytes in self._weight_bytes]
        # Unmeasured layers get the rate of the measured ones: all costs stay in one unit, so they can be compared.
        rate = _seconds_per_byte(forward, estimate_bytes)
        costs = []
        for layer_id, measured_s in enumerate(forward):
            forward_s = measured_s if measured_s is not None else rate * estimate_bytes[layer_id]
            cost = LayerCost(
                forward_s=forward_s,
                recompute_s=seconds.get((layer_id, Phase.RECOMPUTE), forward_s),
                backward_s=seconds.get((layer_id, Phase.BACKWARD), ratio * forward_s),
                weight_bytes=self._weight_bytes[layer_id],
                grad_bytes=self._grad_bytes[layer_id],
                activation_bytes=self._activation_bytes[layer_id],
                input_bytes=self._input_bytes[layer_id],
            )
            costs.append(cost)
        return tuple(costs)

    def _check_layer(self, layer_id: int) -> None:
        if isinstance(layer_id, bool) or not isinstance(layer_id, int):
            raise ArgumentTypeError(f"layer_id must be an int, not {type(layer_id).__name__} ({layer_id!r})")
        if not 0 <= layer_id < len(self._weight_bytes):
            raise ConfigError(f"layer_id {layer_id} does not exist; the model has {len(self._weight_bytes)} layers")


def _backward_ratio(forward: Sequence[float | None], backward: Sequence[float | None]) -> float:
    """Return backward seconds per forward second over the layers that have both."""
    both = [(f, b) for f, b in zip(forward, backward, strict=True) if f is not None and b is not None]
    forward_sum_s = sum(forward_s for forward_s, _ in both)
    return sum(backward_s for _, backward_s in both) / forward_sum_s if forward_sum_s > 0 else DEFAULT_BACKWARD_RATIO


def _seconds_per_byte(forward: Sequence[float | None], estimate_bytes: Sequence[int]) -> float:
    """Return the forward rate over the layers with a time; the default rate if no layer has one."""
    measured = [(seconds, size) for seconds, size in zip(forward, estimate_bytes, strict=True) if seconds is not None]
    if not measured:
        return DEFAULT_SECONDS_PER_BYTE
    return sum(seconds for seconds, _ in measured) / sum(size for _, size in measured)
