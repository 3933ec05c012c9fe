"""What layers cost: the measured or estimated seconds and bytes that planning works with.

`CostModel` is fed by the runtime and read by the api, which builds a `ModelProfile` for the planner. Knows layers by
number only; knows no tensors, devices or plans.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from roundpipe.errors import ArgumentTypeError, ConfigError

SMOOTHING = 0.25
"""Weight of a new measurement: time = (1 - SMOOTHING) * time so far + SMOOTHING * new."""

DEFAULT_SECONDS_PER_BYTE = 1e-11
"""Forward rate before anything is measured. Only proportions matter then, the value just keeps them plausible."""

LAYER_OVERHEAD_BYTES = 1 << 20
"""Added to every layer's weight bytes in estimates, so that layers without weights are not free."""

DEFAULT_BACKWARD_RATIO = 2.0
"""Backward seconds per forward second where no layer has both measured: two matrix products instead of one."""


@dataclass(frozen=True)
class LayerCost:
    """One layer: seconds per microbatch, and bytes.

    ``activation_bytes`` is what one microbatch keeps on the device between forward and backward of this layer.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    weight_bytes: int = 0
    grad_bytes: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0


@dataclass(frozen=True)
class ModelProfile:
    """Everything a plan is chosen from. ``memory_limit_bytes`` is per device, ``None`` = unlimited."""

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
    """What `ModelExecutePlan.auto` needs of a model."""

    def planning_profile(self) -> ModelProfile: ...


class Phase(enum.Enum):
    """What was timed: a first forward, the repeated forward before a backward, or the backward itself."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class CostModel:
    """Gathers measurements of layers and fills what is not measured yet, always in one unit.

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
        self._warm: set[tuple[int, Phase]] = set()

    def observe(self, layer_id: int, phase: Phase, seconds: float) -> None:
        """One microbatch of one layer took so long. The first of each (layer, phase) is dropped: it holds warm-up."""
        self._check_layer(layer_id)
        if not math.isfinite(seconds) or seconds < 0:
            raise ConfigError(f"seconds of layer {layer_id} {phase.value} must be finite and >= 0, not {seconds}")
        key = (layer_id, phase)
        if key not in self._warm:
            self._warm.add(key)
            return
        so_far = self._seconds.get(key, seconds)
        self._seconds[key] = (1 - SMOOTHING) * so_far + SMOOTHING * seconds

    def observe_activation(self, layer_id: int, activation_bytes: int, input_bytes: int) -> None:
        """One microbatch kept so much on the device; the largest ever seen counts."""
        self._check_layer(layer_id)
        self._activation_bytes[layer_id] = max(self._activation_bytes[layer_id], activation_bytes)
        self._input_bytes[layer_id] = max(self._input_bytes[layer_id], input_bytes)

    def reset_times(self) -> None:
        """Forgets all seconds (another batch shape, say); bytes stay. The next measurements are warm-up again."""
        self._seconds.clear()
        self._warm.clear()

    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Measured where measured, else estimated from the measured rates, or from sizes when nothing is measured."""
        ratio = self._backward_ratio()
        known = [self._forward_from_layer(layer_id, ratio) for layer_id in range(len(self._weight_bytes))]
        rate = self._seconds_per_byte(known)
        return tuple(self._layer_cost(layer_id, known[layer_id], rate, ratio) for layer_id in range(len(known)))

    def _layer_cost(self, layer_id: int, known_s: float | None, rate: float, ratio: float) -> LayerCost:
        forward_s = known_s if known_s is not None else rate * self._estimate_bytes(layer_id)
        return LayerCost(
            forward_s=forward_s,
            recompute_s=self._seconds.get((layer_id, Phase.RECOMPUTE), forward_s),
            backward_s=self._seconds.get((layer_id, Phase.BACKWARD), ratio * forward_s),
            weight_bytes=self._weight_bytes[layer_id],
            grad_bytes=self._grad_bytes[layer_id],
            activation_bytes=self._activation_bytes[layer_id],
            input_bytes=self._input_bytes[layer_id],
        )

    def _measured_forward(self, layer_id: int) -> float | None:
        """Forward and recompute do the same work, so either stands in for the other."""
        forward_s = self._seconds.get((layer_id, Phase.FORWARD))
        return forward_s if forward_s is not None else self._seconds.get((layer_id, Phase.RECOMPUTE))

    def _forward_from_layer(self, layer_id: int, ratio: float) -> float | None:
        """Forward seconds from this layer's own measurements, ``None`` if it has none."""
        forward_s = self._measured_forward(layer_id)
        if forward_s is not None:
            return forward_s
        backward_s = self._seconds.get((layer_id, Phase.BACKWARD))
        return None if backward_s is None or ratio == 0 else backward_s / ratio

    def _backward_ratio(self) -> float:
        """Backward seconds per forward second over the layers that have both."""
        forward_sum_s = backward_sum_s = 0.0
        for layer_id in range(len(self._weight_bytes)):
            forward_s = self._measured_forward(layer_id)
            backward_s = self._seconds.get((layer_id, Phase.BACKWARD))
            if forward_s is not None and backward_s is not None:
                forward_sum_s += forward_s
                backward_sum_s += backward_s
        return backward_sum_s / forward_sum_s if forward_sum_s > 0 else DEFAULT_BACKWARD_RATIO

    def _seconds_per_byte(self, known_forward_s: Sequence[float | None]) -> float:
        """The forward rate of the measured layers; the default only when no layer is measured at all."""
        known = [(seconds, layer_id) for layer_id, seconds in enumerate(known_forward_s) if seconds is not None]
        if not known:
            return DEFAULT_SECONDS_PER_BYTE
        return sum(seconds for seconds, _ in known) / sum(self._estimate_bytes(layer_id) for _, layer_id in known)

    def _estimate_bytes(self, layer_id: int) -> int:
        return self._weight_bytes[layer_id] + LAYER_OVERHEAD_BYTES

    def _check_layer(self, layer_id: int) -> None:
        if isinstance(layer_id, bool) or not isinstance(layer_id, int):
            raise ArgumentTypeError(f"layer_id must be an int, not {type(layer_id).__name__} ({layer_id!r})")
        if not 0 <= layer_id < len(self._weight_bytes):
            raise ConfigError(f"layer_id {layer_id} does not exist; the model has {len(self._weight_bytes)} layers")
