"""Partitions a model into stages of consecutive layers, each within a time bound and a memory bound.

Works on prefix sums and ranges. Knows no plans, schedules or devices.

[Note: greedy is enough] Filling each stage as far as its bounds allow gives the fewest stages. The fused stage starts
at the first layer from which it fits: this leaves the fewest forward and backward layers, hence the fewest stages. The
number of stages never grows with the time bound, so bisection finds the smallest bound for a given number.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

# Relative slack of every time bound: sums of the same times in a different order differ by rounding.
TOLERANCE = 1e-9


def single_layers(layers: range) -> tuple[range, ...]:
    """Return one stage per layer, ascending."""
    return tuple(range(layer_id, layer_id + 1) for layer_id in layers)


@dataclass(frozen=True)
class Partition:
    """The stages of one pass over one model. All lists ascend; ``fused`` is None in a pass without a fused stage."""

    fwd: tuple[range, ...] = ()
    fused: range | None = None
    bwd: tuple[range, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.fwd) + (self.fused is not None) + len(self.bwd)

    @property
    def bwd_plan(self) -> list[range]:
        """The ``bwd_plan`` of an execute plan: the fused stage, then backward stages from last layers to first."""
        return [*([self.fused] if self.fused is not None else []), *reversed(self.bwd)]


@dataclass(frozen=True)
class KindPacker:
    """Packs layers into stages of one kind: forward, fused or backward.

    ``prefix_s[i]`` is the time of all layers before layer i. ``reach[i]`` is the furthest stop that memory allows for a
    stage starting at layer i. ``reach`` never decreases and is at least i + 1: a layer that does not fit into memory
    still gets a stage.
    """

    prefix_s: tuple[float, ...]
    reach: tuple[int, ...]

    @classmethod
    def of(cls, layer_seconds: Iterable[float], fits: Callable[[range], bool] | None = None) -> KindPacker:
        """Build the prefix sums. ``fits`` says whether a range fits into memory; ``None`` means no memory bound.

        If ``fits`` holds for a range, it must hold for every part of that range.
        """
        prefix_s = (0.0, *accumulate(layer_seconds))
        num_layers = len(prefix_s) - 1
        if fits is None:
            return cls(prefix_s, (num_layers,) * num_layers)
        reach = []
        stop = 0
        # Two pointers: reach never decreases, so `stop` never moves back.
        for start in range(num_layers):
            stop = max(stop, start + 1)
            while stop < num_layers and fits(range(start, stop + 1)):
                stop += 1
            reach.append(stop)
        return cls(prefix_s, tuple(reach))

    def seconds(self, layers: range) -> float:
        return self.prefix_s[layers.stop] - self.prefix_s[layers.start]

    def pack(self, stop: int, max_s: float) -> tuple[range, ...]:
        """Return the fewest ascending stages over layers 0 to stop - 1 within the bounds."""
        stages = []
        start = 0
        bound_s = max_s * (1 + TOLERANCE)
        while start < stop:
            in_time = bisect_right(self.prefix_s, self.prefix_s[start] + bound_s, start + 1, stop + 1) - 1
            end = max(start + 1, min(in_time, self.reach[start]))  # at least one layer, even beyond the bounds
            stages.append(range(start, end))
            start = end
        return tuple(stages)

    def pack_from_end(self, stop: int, max_s: float) -> tuple[range, ...]:
        """As `pack`, but fill stages from the last layer on: the first stage becomes the short one, not the last."""
        stages: list[range] = []
        bound_s = max_s * (1 + TOLERANCE)
        while stop > 0:
            in_time = bisect_left(self.prefix_s, self.prefix_s[stop] - bound_s, 0, stop)
            # bisect on reach: the first layer from which a stage may extend to `stop`.
            start = min(stop - 1, max(in_time, bisect_left(self.reach, stop)))
            stages.append(range(start, stop))
            stop = start
        return tuple(reversed(stages))

    def last_stage_start(self, max_s: float) -> int:
        """Return the first layer of the largest stage that ends with the model's last layer within the bounds."""
        num_layers = len(self.reach)
        in_time = bisect_left(self.prefix_s, self.prefix_s[-1] - max_s * (1 + TOLERANCE))
        return min(num_layers - 1, max(in_time, bisect_left(self.reach, num_layers)))


@dataclass(frozen=True)
class PassPacker:
    """Packs all stages of one pass over one model. A kind that is None does not occur in the pass.

    A pass with a fused kind has all three kinds: the fused stage takes the last layers, forward and backward stages
    take the layers before it.
    """

    num_layers: int
    fwd: KindPacker | None = None
    fused: KindPacker | None = None
    bwd: KindPacker | None = None

    def pack(self, max_s: float) -> Partition:
        """Return the fewest stages within ``max_s`` and memory [Note: greedy is enough]."""
        stop, fused = self.num_layers, None
        if self.fused is not None:
            stop = self.fused.last_stage_start(max_s)
            fused = range(stop, self.num_layers)
        fwd = self.fwd.pack(stop, max_s) if self.fwd is not None else ()
        bwd = self.bwd.pack(stop, max_s) if self.bwd is not None else ()
        return Partition(fwd, fused, bwd)

    def repack_backward_from_end(self, partition: Partition) -> Partition:
        """Return the same partition with its backward stages filled from the last layer on."""
        if self.bwd is None:
            return partition
        stop = self.num_layers if partition.fused is None else partition.fused.start
        bwd = self.bwd.pack_from_end(stop, self.slowest_s(partition))
        return Partition(partition.fwd, partition.fused, bwd)

    def timed_stages(self, partition: Partition) -> list[tuple[float, range]]:
        """Return every stage with its seconds."""
        stages = [(self.fwd, layers) for layers in partition.fwd] + [(self.bwd, layers) for layers in partition.bwd]
        if partition.fused is not None:
            stages.append((self.fused, partition.fused))
        return [(kind.seconds(layers), layers) for kind, layers in stages if kind is not None]

    def slowest_s(self, partition: Partition) -> float:
        return max(seconds for seconds, _ in self.timed_stages(partition))

    def total_s(self, partition: Partition) -> float:
        return sum(seconds for seconds, _ in self.timed_stages(partition))

    def finest(self) -> Partition:
        """Return one stage per layer. In a fused pass the fused stage is the last layer."""
        singles = single_layers(range(self.num_layers))
        fused = None if self.fused is None else singles[-1]
        beside = singles if self.fused is None else singles[:-1]
        return Partition(beside if self.fwd is not None else (), fused, beside if self.bwd is not None else ())

    def fused_seconds(self) -> list[float]:
        """Return the seconds of every fused stage that fits into memory; ``[0.0]`` in a pass without one."""
        if self.fused is None:
            return [0.0]
        first = self.fused.last_stage_start(math.inf)
        return [self.fused.seconds(range(start, self.num_layers)) for start in range(first, self.num_layers)]


def lower_bound_s(packers: Sequence[PassPacker], num_stages: int) -> float:
    """Return a lower bound for the time of the slowest stage, if all passes together have ``num_stages`` stages.

    The bound is the larger of the slowest layer and the total time divided by ``num_stages``. The total depends on the
    size of the fused stages, because fused layers are not recomputed. The time bound in turn limits that size.
    """
    # Each possible fused time is tried as the time bound: between two of them the total does not change.
    by_total_s = min(
        max(bound_s, sum(packer.total_s(packer.pack(bound_s)) for packer in packers) / num_stages)
        for bound_s in {seconds for packer in packers for seconds in packer.fused_seconds()}
    )
    return max(by_total_s, *(packer.slowest_s(packer.finest()) for packer in packers))


def tightest(
    packers: Sequence[PassPacker], num_stages: int, max_s: float, min_s: float = 0.0, precision: float = TOLERANCE
) -> list[Partition] | None:
    """Return partitions with at most ``num_stages`` stages in total whose slowest stage is as fast as possible.

    Return ``None`` if no such partition is within ``max_s``. The search covers the range from ``min_s`` to ``max_s``:
    ``min_s`` is a lower bound for the slowest stage of every partition. ``precision`` is the allowed relative error.
    """
    partitions = _pack_within(packers, num_stages, max_s)
    if partitions is None:
        return None
    # Invariant: `partitions` has the slowest stage `high_s`; no partition is within `low_s`.
    low_s, high_s = min_s, max(map(PassPacker.slowest_s, packers, partitions))
    while high_s - low_s > precision * high_s:
        middle_s = (low_s + high_s) / 2
        found = _pack_within(packers, num_stages, middle_s)
        if found is None:
            low_s = middle_s
        else:
            partitions, high_s = found, min(middle_s, max(map(PassPacker.slowest_s, packers, found)))
    return partitions


def _pack_within(packers: Sequence[PassPacker], num_stages: int, max_s: float) -> list[Partition] | None:
    """Return partitions of at most ``num_stages`` stages within ``max_s``; ``None`` if there are none."""
    partitions = [packer.pack(max_s) for packer in packers]
    if sum(partition.num_stages for partition in partitions) > num_stages:
        return None
    # A single layer slower than max_s gets a stage that exceeds the bound.
    slowest_s = max(map(PassPacker.slowest_s, packers, partitions))
    return partitions if slowest_s <= max_s * (1 + 2 * TOLERANCE) else None


def balance(packers: Sequence[PassPacker], min_stages: int, upper_threshold: float) -> list[Partition]:
    """Return one partition per packer, all balanced to the same stage time.

    No stage is slower than ``upper_threshold`` times the lower bound. Among such partitions this returns the one with
    the fewest stages (at least ``min_stages`` in total, if there are enough layers), then the fastest slowest stage.
    """
    max_s = upper_threshold * lower_bound_s(packers, min_stages)
    fewest = sum(packer.pack(max_s).num_stages for packer in packers)
    partitions = tightest(packers, max(fewest, min_stages), max_s)
    assert partitions is not None, f"{fewest} stages within {max_s} s were just counted"
    # Greedy packing gives the fewest stages within a bound, which may be fewer than requested.
    while sum(partition.num_stages for partition in partitions) < min_stages and _split_slowest(packers, partitions):
        pass
    return partitions


def _split_slowest(packers: Sequence[PassPacker], partitions: list[Partition]) -> bool:
    """Split the slowest stage of at least two layers, in place; return False if every stage is a single layer."""
    splittable = [
        (seconds, layers, number)
        for number, (packer, partition) in enumerate(zip(packers, partitions, strict=True))
        for seconds, layers in packer.timed_stages(partition)
        if len(layers) > 1
    ]
    if not splittable:
        return False
    _, slowest, number = max(splittable, key=lambda entry: entry[0])
    packer, partition = packers[number], partitions[number]
    options = [option for stage, option in _splits(partition) if stage == slowest]
    # The most even split has the smallest stage times when they are compared from the slowest on.
    partitions[number] = min(
        options, key=lambda option: sorted((seconds for seconds, _ in packer.timed_stages(option)), reverse=True)
    )
    return True


def _splits(partition: Partition) -> list[tuple[range, Partition]]:
    """Return every way to split one stage in two, each with the stage that it splits.

    Splitting the fused stage moves its first layers into a new forward and a new backward stage.
    """
    fwd, fused, bwd = partition.fwd, partition.fused, partition.bwd
    options = [(layers, Partition(stages, fused, bwd)) for layers, stages in _list_splits(fwd)]
    options += [(layers, Partition(fwd, fused, stages)) for layers, stages in _list_splits(bwd)]
    if fused is not None:
        for at in fused[1:]:
            moved = range(fused.start, at)
            options.append((fused, Partition((*fwd, moved), range(at, fused.stop), (*bwd, moved))))
    return options


def _list_splits(stages: tuple[range, ...]) -> list[tuple[range, tuple[range, ...]]]:
    """Return every way to split one stage of a list in two, each with the stage that it splits."""
    return [
        (layers, (*stages[:i], range(layers.start, at), range(at, layers.stop), *stages[i + 1 :]))
        for i, layers in enumerate(stages)
        for at in layers[1:]
    ]
