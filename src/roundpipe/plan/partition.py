"""Cuts a model into stages: contiguous runs of layers, each within a time and a memory bound.

Called by plan.auto and plan.planner. Knows prefix sums and ranges, never plans, schedules or devices.

[Note: greedy is enough] Filling each stage as far as its bounds allow gives the fewest stages, and the smallest fused
stage start that fits gives the fewest forward and backward layers, hence the fewest stages too. The count never grows
with the time bound, so the smallest bound for a given count is found by bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

TOLERANCE = 1e-9
"""Relative slack of every time bound: sums of equal parts must compare as equal whatever their rounding."""


@dataclass(frozen=True)
class Line:
    """One kind of stage over all layers.

    ``prefix_s[i]`` is the time of the layers before i; ``reach[i]`` the furthest stop that memory allows a stage that
    starts at layer i. ``reach`` never falls and is at least i + 1: a layer that does not fit stands alone.
    """

    prefix_s: tuple[float, ...]
    reach: tuple[int, ...]

    def seconds(self, layers: range) -> float:
        return self.prefix_s[layers.stop] - self.prefix_s[layers.start]

    def pack(self, stop: int, max_s: float) -> tuple[range, ...]:
        """The fewest ascending stages over layers 0 to stop - 1 within the bounds."""
        stages = []
        start = 0
        bound_s = max_s * (1 + TOLERANCE)
        while start < stop:
            in_time = bisect_right(self.prefix_s, self.prefix_s[start] + bound_s, start + 1, stop + 1) - 1
            end = max(start + 1, min(in_time, self.reach[start]))
            stages.append(range(start, end))
            start = end
        return tuple(stages)

    def pack_down(self, stop: int, max_s: float) -> tuple[range, ...]:
        """As `pack`, filled from the last layers on: what is left over becomes a short first stage, not a last one."""
        stages: list[range] = []
        bound_s = max_s * (1 + TOLERANCE)
        while stop > 0:
            in_time = bisect_left(self.prefix_s, self.prefix_s[stop] - bound_s, 0, stop)
            start = min(stop - 1, max(in_time, bisect_left(self.reach, stop)))
            stages.append(range(start, stop))
            stop = start
        return tuple(reversed(stages))

    def tail_start(self, max_s: float) -> int:
        """The first layer of the largest stage that ends with the model and is within the bounds."""
        num_layers = len(self.reach)
        in_time = bisect_left(self.prefix_s, self.prefix_s[-1] - max_s * (1 + TOLERANCE))
        return min(num_layers - 1, max(in_time, bisect_left(self.reach, num_layers)))


def make_line(layer_seconds: Iterable[float], fits: Callable[[range], bool] | None = None) -> Line:
    """``fits`` must hold for every part of a range for which it holds; ``None`` = no memory bound."""
    prefix_s = (0.0, *accumulate(layer_seconds))
    num_layers = len(prefix_s) - 1
    if fits is None:
        return Line(prefix_s, (num_layers,) * num_layers)
    reach = []
    stop = 0
    for start in range(num_layers):
        stop = max(stop, start + 1)
        while stop < num_layers and fits(range(start, stop + 1)):
            stop += 1
        reach.append(stop)
    return Line(prefix_s, tuple(reach))


@dataclass(frozen=True)
class Cut:
    """The stages of one pass: all lists ascend; ``fused`` is None in a pass without a fused stage."""

    fwd: tuple[range, ...] = ()
    fused: range | None = None
    bwd: tuple[range, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.fwd) + (self.fused is not None) + len(self.bwd)

    @property
    def bwd_plan(self) -> list[range]:
        """The backward list as a plan has it: the fused stage first, then from the last layers to the first."""
        return [*([self.fused] if self.fused is not None else []), *reversed(self.bwd)]


@dataclass(frozen=True)
class Packer:
    """One pass over one model. A line that is None is a kind of stage the pass does not have.

    With a fused line it has all three: the fused stage takes the last layers, forward and backward stages the others.
    """

    num_layers: int
    fwd: Line | None = None
    fused: Line | None = None
    bwd: Line | None = None

    def cut(self, max_s: float) -> Cut:
        """The fewest stages within ``max_s`` and memory [Note: greedy is enough]."""
        stop, fused = self.num_layers, None
        if self.fused is not None:
            stop = self.fused.tail_start(max_s)
            fused = range(stop, self.num_layers)
        fwd = self.fwd.pack(stop, max_s) if self.fwd is not None else ()
        bwd = self.bwd.pack(stop, max_s) if self.bwd is not None else ()
        return Cut(fwd, fused, bwd)

    def bwd_down(self, cut: Cut) -> Cut:
        """The same with backward stages filled from the last layers on."""
        if self.bwd is None:
            return cut
        stop = self.num_layers if cut.fused is None else cut.fused.start
        return Cut(cut.fwd, cut.fused, self.bwd.pack_down(stop, self.slowest_s(cut)))

    def slowest_s(self, cut: Cut) -> float:
        return max(seconds for seconds, _ in self.timed(cut))

    def total_s(self, cut: Cut) -> float:
        return sum(seconds for seconds, _ in self.timed(cut))

    def timed(self, cut: Cut) -> list[tuple[float, range]]:
        """Every stage with its time."""
        stages = [(self.fwd, layers) for layers in cut.fwd] + [(self.bwd, layers) for layers in cut.bwd]
        if cut.fused is not None:
            stages.append((self.fused, cut.fused))
        return [(line.seconds(layers), layers) for line, layers in stages if line is not None]

    def finest(self) -> Cut:
        """Every layer a stage of its own; the last layer of a fused pass is always in the fused stage."""
        singles = tuple(range(layer, layer + 1) for layer in range(self.num_layers))
        fused = None if self.fused is None else singles[-1]
        sides = singles if self.fused is None else singles[:-1]
        return Cut(sides if self.fwd is not None else (), fused, sides if self.bwd is not None else ())

    def fused_seconds(self) -> list[float]:
        """The times that the fused stage can have within memory, ``[0.0]`` when there is none."""
        if self.fused is None:
            return [0.0]
        first = self.fused.tail_start(math.inf)
        return [self.fused.seconds(range(start, self.num_layers)) for start in range(first, self.num_layers)]


def lower_bound_s(packers: Sequence[Packer], num_stages: int) -> float:
    """No cut into ``num_stages`` stages in all has a slowest stage below this, unless it avoids the slowest layer.

    The total depends on how much is fused (what is fused is not recomputed), and what can be fused on the bound.
    """
    by_total_s = min(
        max(bound_s, sum(packer.total_s(packer.cut(bound_s)) for packer in packers) / num_stages)
        for bound_s in {seconds for packer in packers for seconds in packer.fused_seconds()}
    )
    return max(by_total_s, *(packer.slowest_s(packer.finest()) for packer in packers))


def tightest(
    packers: Sequence[Packer], num_stages: int, max_s: float, min_s: float = 0.0, precision: float = TOLERANCE
) -> list[Cut] | None:
    """At most ``num_stages`` stages in all, with the smallest slowest stage; ``None`` if ``max_s`` is too small.

    ``min_s`` is any bound below which there is no such cut; ``precision`` the relative error allowed.
    """
    cuts = _cuts_within(packers, num_stages, max_s)
    if cuts is None:
        return None
    low_s, high_s = min_s, _slowest_s(packers, cuts)
    while high_s - low_s > precision * high_s:
        middle_s = (low_s + high_s) / 2
        found = _cuts_within(packers, num_stages, middle_s)
        if found is None:
            low_s = middle_s
        else:
            cuts, high_s = found, min(middle_s, _slowest_s(packers, found))
    return cuts


def _cuts_within(packers: Sequence[Packer], num_stages: int, max_s: float) -> list[Cut] | None:
    cuts = [packer.cut(max_s) for packer in packers]
    if sum(cut.num_stages for cut in cuts) > num_stages:
        return None
    # A layer that is longer than max_s stands alone in its stage and breaks the bound.
    return cuts if _slowest_s(packers, cuts) <= max_s * (1 + 2 * TOLERANCE) else None


def _slowest_s(packers: Sequence[Packer], cuts: Sequence[Cut]) -> float:
    return max(packer.slowest_s(cut) for packer, cut in zip(packers, cuts, strict=True))


def balance(packers: Sequence[Packer], min_stages: int, upper_threshold: float) -> list[Cut]:
    """One cut per packer, balanced together.

    No stage is longer than ``upper_threshold`` times the lower bound. Among such cuts: the fewest stages, but
    ``min_stages`` in all if the layers suffice, then the smallest slowest stage.
    """
    max_s = upper_threshold * lower_bound_s(packers, min_stages)
    fewest = sum(packer.cut(max_s).num_stages for packer in packers)
    cuts = tightest(packers, max(fewest, min_stages), max_s)
    assert cuts is not None, f"{fewest} stages within {max_s} s were just counted"
    while sum(cut.num_stages for cut in cuts) < min_stages and _split_slowest(packers, cuts):
        pass
    return cuts


def _split_slowest(packers: Sequence[Packer], cuts: list[Cut]) -> bool:
    """Splits the slowest stage of several layers in place; False if every stage is a single layer."""
    several = [
        (seconds, number)
        for number, (packer, cut) in enumerate(zip(packers, cuts, strict=True))
        for seconds, layers in packer.timed(cut)
        if len(layers) > 1
    ]
    if not several:
        return False
    number = max(several, key=lambda entry: entry[0])[1]
    cuts[number] = _split_once(packers[number], cuts[number])
    return True


def _split_once(packer: Packer, cut: Cut) -> Cut:
    """The most even split of the slowest stage of several layers."""
    options = [*_side_splits(cut), *_fused_splits(cut)]
    slowest = max((entry for entry in packer.timed(cut) if len(entry[1]) > 1), key=lambda entry: entry[0])[1]
    fitting = [option for split, option in options if split == slowest]
    return min(fitting, key=lambda option: sorted((seconds for seconds, _ in packer.timed(option)), reverse=True))


def _side_splits(cut: Cut) -> list[tuple[range, Cut]]:
    """Every way to split one forward or one backward stage in two."""
    fwd = [(layers, Cut(stages, cut.fused, cut.bwd)) for layers, stages in _splits(cut.fwd)]
    return fwd + [(layers, Cut(cut.fwd, cut.fused, stages)) for layers, stages in _splits(cut.bwd)]


def _splits(stages: tuple[range, ...]) -> list[tuple[range, tuple[range, ...]]]:
    return [
        (layers, (*stages[:i], range(layers.start, at), range(at, layers.stop), *stages[i + 1 :]))
        for i, layers in enumerate(stages)
        for at in layers[1:]
    ]


def _fused_splits(cut: Cut) -> list[tuple[range, Cut]]:
    """Every way to move the first layers of the fused stage into a forward and a backward stage of their own."""
    if cut.fused is None:
        return []
    fused = cut.fused
    return [
        (fused, Cut((*cut.fwd, moved), range(moved.stop, fused.stop), (*cut.bwd, moved)))
        for moved in (range(fused.start, at) for at in fused[1:])
    ]
