"""How a model's forward is cut: which modules are blocks, where its own code must run again, what that code reads.

Made by calibration, read by replays. Modules are named by their paths, so that a plan made on a small twin of a model
holds for the model. Pure data: no module, no tensor.

    call k      the k-th call of a block, a child of a repeated list of modules
    segment s   the model's own code between the return of call s - 1 and call s; the first is the prologue, the last
                the epilogue
    tap t       the t-th call of a module that runs wholly inside a segment: an embedding, a norm, a head
    point s     a segment whose code is replayed by an element of its own; the last point is the epilogue

Tensors that travel between elements have keys: ("in", i) the model's inputs, ("arg", s, n) made by the code of segment
s, ("out", k, j) returned by call k, ("cap", k, kind, i) captured in it, ("tap", t, j) returned by tap t.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from roundpipe.models.fused_loss import FusedHead
from roundpipe.models.values import Key


@dataclasses.dataclass(frozen=True)
class TapCall:
    path: str
    segment: int


@dataclasses.dataclass(frozen=True)
class CallOutline:
    """What call k returned in calibration: the look-ahead hands on markers of this form.

    value: {"ret": ..., "side": ...} with an Outline for each tensor. same_as: by leaf, the argument leaf it *is*.
    like: by leaf, an argument leaf of the same shape and dtype. captured: as value, by kind.
    """

    value: Any
    same_as: tuple[int | None, ...]
    like: tuple[int | None, ...]
    captured: Mapping[str, list[Any]]
    changes_arguments: bool  # in place
    routes: bool  # chooses what is largest, as a router of experts does


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    calls: tuple[str, ...]  # the path of each call's block
    taps: tuple[TapCall, ...]
    outlines: tuple[CallOutline, ...]
    points: tuple[int, ...]
    reads: Mapping[int, frozenset[Key]]  # by point: the earlier tensors its code depends on
    needs: Mapping[int, frozenset[str]]  # by point: names of the parameters it must have
    copying: frozenset[int]  # points whose code changes what it reads in place
    reasons: Mapping[int, str]  # by point: why it is one
    head: FusedHead | None = None  # the head that can be computed together with the loss
    draws_globally: bool = False  # from generators that all threads share
    has_caches: bool = False  # among the arguments of its blocks
    tokenwise: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # by path: parts inside it

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def point_before(self, call: int) -> int:
        return self.points[bisect.bisect_right(self.points, call) - 1]

    def end_of(self, point: int) -> int:
        """The first call whose arguments a replay of `point` does not know."""
        after = bisect.bisect_right(self.points, point)
        return self.points[after] if after < len(self.points) else self.num_calls + 1

    def taps_of(self, point: int) -> frozenset[str]:
        """The modules that a replay of `point` runs."""
        return frozenset(tap.path for tap in self.taps if point <= tap.segment < self.end_of(point))

    def read_after(self, done: float) -> frozenset[Key]:
        """What points after call `done` (or segment `done` + 0.5) read."""
        later = bisect.bisect_right(self.points, done)
        return self._read_from[max(later, 1)]

    @functools.cached_property
    def _read_from(self) -> list[frozenset[Key]]:
        """By position in `points`: what that point and all after it read."""
        found: list[frozenset[Key]] = [frozenset()]
        for point in reversed(self.points):
            found.append(found[-1] | self.reads.get(point, frozenset()))
        return found[::-1]

    @functools.cached_property
    def read_taps(self) -> frozenset[Key]:
        """Outputs of taps that are read after their segment."""
        return frozenset(key for read in self.reads.values() for key in read if key[0] == "tap")

    @functools.cached_property
    def blocks(self) -> frozenset[str]:
        return frozenset(self.calls)

    @property
    def stub_paths(self) -> frozenset[str]:
        return frozenset(self.calls) | {tap.path for tap in self.taps}
