"""Chooses a plan: the one the simulator predicts to be the fastest among those that fit the devices.

Called by the api when the user gave no plan. Knows profiles, partitions and the simulator; never fails for memory,
whose figures are estimates: when nothing fits it returns the finest plan.

Predicts a step whose update is waited for, on one device: when gradients become final decides what it hides.

Called by plan.planner and the api. Knows tasks, costs and the seconds an update takes per layer; no optimizer.

[Note: gradients become final] A layer's gradients are final once its last microbatch has gone backward. In a backward
stage that is when the stage ends; in the fused stage it is the very end of the call, unless the last microbatches (the
tail) go backward together, layer by layer. The optimizer takes one layer after the other as they become final.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from roundpipe.plan.cost import LayerCost, ModelProfile
from roundpipe.plan.execute_plan import ModelExecutePlan, RunType
from roundpipe.plan.memory import Grain, StageMemory
from roundpipe.plan.partition import Cut, Line, Packer, make_line, tightest
from roundpipe.plan.schedule import StageTask, TaskKind, number_tasks
from roundpipe.plan.simulator import steady_step_s

_MOST_TAILS = 8  # that are tried
_WORTH_MEMORY = 0.01  # a longer tail must save this share of the step


def exact_step_s(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    update_s: Sequence[float],
    *,
    num_microbatch: int,
    tail: int,
    grain: Grain = "stage",
) -> float:
    """Seconds from the beginning of a call to the end of its update. [Note: gradients become final]"""
    now_s = updated_s = 0.0
    for task in tasks:
        for layer_id, seconds in _pieces(task, costs, num_microbatch, tail, grain):
            now_s += seconds
            if layer_id is not None:
                updated_s = max(updated_s, now_s) + update_s[layer_id]
    return max(now_s, updated_s)


def best_tail(
    tasks: Sequence[StageTask],
    costs: Sequence[LayerCost],
    update_s: Sequence[float],
    *,
    num_microbatch: int,
    longest: int,
    grain: Grain = "stage",
) -> tuple[int, float]:
    """The tail with the shortest step, and that step; the shorter tail where it makes no difference."""
    best, best_s = 1, float("inf")
    for tail in _spread(longest):
        step_s = exact_step_s(tasks, costs, update_s, num_microbatch=num_microbatch, tail=tail, grain=grain)
        if step_s < best_s * (1 - _WORTH_MEMORY):
            best, best_s = tail, step_s
    return best, best_s


def _pieces(
    task: StageTask, costs: Sequence[LayerCost], num_microbatch: int, tail: int, grain: Grain
) -> Iterator[tuple[int | None, float]]:
    """Seconds one after the other, each with the layer whose gradients are final after them."""
    layers = costs[task.layers.start : task.layers.stop]
    forward_s = sum(cost.forward_s for cost in layers)
    backward_s = sum(cost.backward_s for cost in layers)
    recompute_s = sum(cost.recompute_s for cost in layers)
    if task.kind is TaskKind.FORWARD:
        yield None, num_microbatch * forward_s
        return
    if task.kind is TaskKind.FUSED:
        together = min(tail, num_microbatch)
        yield None, (num_microbatch - together) * (forward_s + backward_s) + together * forward_s
    else:
        together = 1
        yield None, (num_microbatch - 1) * (recompute_s + backward_s) + (recompute_s if grain == "stage" else 0.0)
    for layer_id in reversed(task.layers):
        of_layer_s = costs[layer_id].backward_s
        if task.kind is TaskKind.BACKWARD and grain == "layer":
            of_layer_s += costs[layer_id].recompute_s
        yield layer_id, together * of_layer_s


def _spread(longest: int) -> list[int]:
    if longest <= _MOST_TAILS:
        return list(range(1, longest + 1))
    return sorted({1 + round((longest - 1) * i / (_MOST_TAILS - 1)) for i in range(_MOST_TAILS)})


TIE = 0.01
"""Predictions closer than this are equal; then fewer tasks win, for each task has a small cost of its own."""

RUNNING_SHARES = (1 / 2, 2 / 3, 5 / 6)
"""How memory may be divided: this share for the running stage, the rest for the prefetched weights of the next."""

_MOST_FUSED_SIZES = 32  # that are tried

PRECISION = 0.005
"""How closely stages are balanced, relative to the slowest; far below what cost estimates are good for."""


def choose_plan(run_type: RunType, profile: ModelProfile, grain: Grain = "stage") -> ModelExecutePlan:
    """The fastest plan in steady state; predicted ties go to fewer tasks.

    Forward and backward of ``train`` are separate calls and chosen one by one.
    """
    forward, backward = (TaskKind.FORWARD,), (TaskKind.BACKWARD,)
    match run_type:
        case RunType.INFER:
            return ModelExecutePlan(_Search(profile, grain, forward).fastest().fwd)
        case RunType.TRAIN:
            fwd = _Search(profile, grain, forward).fastest().fwd
            return ModelExecutePlan(fwd, _Search(profile, grain, backward).fastest().bwd_plan)
        case RunType.FUSED:
            search = _Search(profile, grain, tuple(TaskKind))
            cut = search.fastest() if profile.num_devices > 1 else search.largest_fused()
            return ModelExecutePlan(cut.fwd, cut.bwd_plan)
        case _:
            assert_never(run_type)


def choose_exact_plan(profile: ModelProfile, update_s: Sequence[float], grain: Grain = "stage") -> ModelExecutePlan:
    """The fastest fused plan for steps whose update is waited for; `update_s`: the seconds it takes for each layer."""
    if profile.num_devices > 1:
        return choose_plan(RunType.FUSED, profile, grain)
    cut = _Search(profile, grain, tuple(TaskKind)).fastest_exact(update_s)
    return ModelExecutePlan(cut.fwd, cut.bwd_plan)


class _Search:
    """The candidates of one pass over one model. ``kinds`` are the kinds of stage that the pass has."""

    def __init__(self, profile: ModelProfile, grain: Grain, kinds: Sequence[TaskKind]) -> None:
        self._profile = profile
        self._kinds = kinds
        self._grain = grain
        self._memory = StageMemory(profile.layers, grain, profile.num_microbatch)
        self._num_layers = len(profile.layers)
        self._limit_bytes = math.inf if profile.memory_limit_bytes is None else profile.memory_limit_bytes
        self._unbounded = self._packer(None)
        self._finest = self._unbounded.finest()

    def fastest(self) -> Cut:
        """Balanced cuts of several stage counts, first without regard to memory.

        Counts whose cut is too large for memory are tried again within each division of it.
        """
        counts = _stage_counts(self._profile.num_devices, self._finest.num_stages)
        cuts = self._balanced(self._unbounded, counts)
        too_large = max((cut.num_stages for cut in cuts if not self._fits(cut)), default=0)
        if too_large:
            counts = [count for count in counts if count <= too_large]
            cuts += [cut for share in RUNNING_SHARES for cut in self._balanced(self._packer(share), counts)]
        fitting = [cut for cut in dict.fromkeys([*cuts, self._finest]) if self._fits(cut)]
        return self._best(fitting) if fitting else self._finest

    def largest_fused(self) -> Cut:
        """For one device: nothing to balance, so fuse as much as memory allows; what is fused is not recomputed.

        The other stages, as large as memory allows, are found for each division of memory; at last they are single
        layers.
        """
        packers = [self._unbounded, *(self._packer(share) for share in RUNNING_SHARES)]
        for start in range(self._num_layers):
            fused = range(start, self._num_layers)
            if not self._fused_leaves_room(fused):
                continue
            cuts = [self._around(fused, packer) for packer in packers]
            fitting = [cut for cut in (*cuts, _layer_by_layer(fused)) if self._fits(cut)]
            if fitting:
                return min(fitting, key=lambda cut: cut.num_stages)
        return self._finest

    def fastest_exact(self, update_s: Sequence[float]) -> Cut:
        """For one device: how much is fused, and how finely the rest goes backward, by the predicted step."""
        packers = [self._unbounded, *(self._packer(share) for share in RUNNING_SHARES)]
        step_s: dict[Cut, float] = {}
        for start in range(0, self._num_layers, -(-self._num_layers // _MOST_FUSED_SIZES)):
            fused = range(start, self._num_layers)
            if self._fused_leaves_room(fused):
                coarse = [self._around(fused, packer) for packer in packers]
                fine = _layer_by_layer(fused)
                finer = [Cut(cut.fwd, fused, fine.bwd) for cut in coarse]
                cuts = (*coarse, *finer, fine)
                step_s |= {cut: self._exact_s(cut, update_s) for cut in cuts if self._fits(cut)}
        if not step_s:
            return self._finest
        equal_s = min(step_s.values()) * (1 + TIE)
        fast = [cut for cut, seconds in step_s.items() if seconds <= equal_s]
        return min(fast, key=lambda cut: (cut.num_stages, step_s[cut]))

    def _exact_s(self, cut: Cut, update_s: Sequence[float]) -> float:
        profile, tasks = self._profile, _tasks(cut)
        longest = self._memory.longest_tail(tasks, profile.num_devices, profile.memory_limit_bytes)
        num_microbatch, grain = profile.num_microbatch, self._grain
        return best_tail(tasks, profile.layers, update_s, num_microbatch=num_microbatch, longest=longest, grain=grain)[
            1
        ]

    def _balanced(self, packer: Packer, counts: Iterable[int]) -> list[Cut]:
        """For each candidate number of stages the cut with the smallest slowest stage, without repetitions."""
        coarsest = packer.cut(math.inf)
        least_s = packer.total_s(coarsest)
        cuts = {coarsest: None}
        max_s = math.inf
        for num_stages in counts:
            if num_stages <= coarsest.num_stages:
                continue
            found = tightest([packer], num_stages, max_s, least_s / num_stages, PRECISION)
            if found is not None:
                cuts[found[0]] = None
                if num_stages <= 2 * self._profile.num_devices:
                    # With few stages it matters whether the short one runs first or last.
                    cuts[packer.bwd_down(found[0])] = None
                # More stages never need a longer slowest one, so the next search starts here.
                max_s = packer.slowest_s(found[0])
        return list(cuts)

    def _best(self, cuts: Sequence[Cut]) -> Cut:
        profile = self._profile
        step_s = {
            cut: steady_step_s(
                _tasks(cut),
                profile.layers,
                num_devices=profile.num_devices,
                num_microbatch=profile.num_microbatch,
            )
            for cut in cuts
        }
        equal_s = min(step_s.values()) * (1 + TIE)
        return min((cut for cut in cuts if step_s[cut] <= equal_s), key=lambda cut: (cut.num_stages, step_s[cut]))

    def _fits(self, cut: Cut) -> bool:
        return (
            self._limit_bytes == math.inf
            or self._memory.peak_bytes(_tasks(cut), self._profile.num_devices) <= self._limit_bytes
        )

    def _packer(self, running_share: float | None) -> Packer:
        layers = self._profile.layers
        seconds = {
            TaskKind.FORWARD: [cost.forward_s for cost in layers],
            TaskKind.FUSED: [cost.forward_s + cost.backward_s for cost in layers],
            TaskKind.BACKWARD: [cost.recompute_s + cost.backward_s for cost in layers],
        }
        lines = {kind: self._line(kind, seconds[kind], running_share) for kind in self._kinds}
        return Packer(
            self._num_layers, lines.get(TaskKind.FORWARD), lines.get(TaskKind.FUSED), lines.get(TaskKind.BACKWARD)
        )

    def _line(self, kind: TaskKind, seconds: Iterable[float], running_share: float | None) -> Line:
        if running_share is None:
            return make_line(seconds)
        running_bytes = running_share * self._limit_bytes
        next_bytes = self._limit_bytes - running_bytes
        memory = self._memory
        return make_line(
            seconds,
            lambda layers: (
                memory.range_bytes(kind, layers) <= running_bytes and memory.weight_bytes(layers) <= next_bytes
            ),
        )

    def _fused_leaves_room(self, fused: range) -> bool:
        """Whether the fused stage fits beside the weights of at least one layer of the backward stage after it."""
        neighbour = range(max(0, fused.start - 1), fused.start)
        held = self._memory.range_bytes(TaskKind.FUSED, fused) + self._memory.weight_bytes(neighbour)
        return held <= self._limit_bytes

    def _around(self, fused: range, packer: Packer) -> Cut:
        """Forward and backward stages beside a given fused one, those next to it small enough for it."""
        assert packer.fwd is not None
        assert packer.bwd is not None
        beside_weights = self._limit_bytes - self._memory.weight_bytes(fused)
        beside_fused = self._limit_bytes - self._memory.range_bytes(TaskKind.FUSED, fused)
        fwd = packer.fwd.pack(fused.start, math.inf)
        bwd = packer.bwd.pack(fused.start, math.inf)
        return Cut(
            _shed(fwd, [self._memory.range_bytes(TaskKind.FORWARD, part) <= beside_weights for part in _tails(fwd)]),
            fused,
            _shed(bwd, [self._memory.weight_bytes(part) <= beside_fused for part in _tails(bwd)]),
        )


def _tasks(cut: Cut) -> tuple[StageTask, ...]:
    return number_tasks(fwd=cut.fwd, fused=() if cut.fused is None else (cut.fused,), bwd=reversed(cut.bwd))


def _layer_by_layer(fused: range) -> Cut:
    """Stages of one layer beside a fused one: the fewest buffers."""
    layers = tuple(range(i, i + 1) for i in range(fused.start))
    return Cut(layers, fused, layers)


def _tails(stages: Sequence[range]) -> list[range]:
    """The parts of the last stage that hold its last layer, largest first."""
    return [range(start, stages[-1].stop) for start in stages[-1]] if stages else []


def _shed(stages: tuple[range, ...], fits: Sequence[bool]) -> tuple[range, ...]:
    """Splits the last stage so that its last part is the largest tail that fits, a single layer at least."""
    if not stages or fits[0]:
        return stages
    last = stages[-1]
    at = next((start for start, fit in zip(last, fits, strict=True) if fit), last.stop - 1)
    return stages if at == last.start else (*stages[:-1], range(last.start, at), range(at, last.stop))


def _stage_counts(num_devices: int, finest: int) -> list[int]:
    """Candidate numbers of stages, ascending: every small one, then a few large ones, and the finest."""
    counts = {*range(1, 2 * num_devices + 2), *range(1, 10)}
    growing = 3 * num_devices
    while growing < finest:
        counts |= {growing, growing + num_devices // 2}
        growing = growing * 3 // 2
    return sorted(count for count in counts | {finest} if count <= finest)
