"""Chooses the execute plan with the shortest predicted step among those that fit into device memory.

Knows profiles, partitions and the simulator. Memory figures are estimates, so the search never fails for memory: if
nothing fits, it returns the plan with one layer per stage.

A step is *exact* if the next call computes with the new weights; otherwise the update runs beside the whole next call.
For exact steps on one device `plan/overlap` predicts how much of the update runs beside the calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import assert_never

from roundpipe.plan.cost import ModelProfile
from roundpipe.plan.execute_plan import ModelExecutePlan, RunType, StageTask, TaskKind, number_tasks
from roundpipe.plan.overlap import EXACT, Overlap, UpdateTiming, best_overlap
from roundpipe.plan.partition import KindPacker, Partition, PassPacker, single_layers, tightest
from roundpipe.plan.predict import Grain, StageMemory, steady_step_s

# Predictions within this relative distance count as equal. Fewer tasks then win, because each task has an overhead.
TIE = 0.01

# Divisions of device memory to try: this share for the running stage, the rest for the next stage's weights.
RUNNING_SHARES = (1 / 2, 2 / 3, 5 / 6)

# Relative precision of balancing, far below the error of the cost estimates.
PRECISION = 0.005

_MAX_FUSED_SIZES = 32  # sizes of the fused stage that `fastest_exact` tries at most


def choose_plan(run_type: RunType, profile: ModelProfile, grain: Grain = "stage") -> ModelExecutePlan:
    """Return the plan with the shortest predicted step of repeated calls; among ties, the one with the fewest tasks.

    Forward and backward of ``TRAIN`` are separate calls, so they are chosen separately.
    """
    match run_type:
        case RunType.INFER:
            return ModelExecutePlan(_Search(profile, grain, (TaskKind.FORWARD,)).fastest().fwd)
        case RunType.TRAIN:
            fwd = _Search(profile, grain, (TaskKind.FORWARD,)).fastest().fwd
            return ModelExecutePlan(fwd, _Search(profile, grain, (TaskKind.BACKWARD,)).fastest().bwd_plan)
        case RunType.FUSED:
            # On one device no other device has to be kept busy, so the stages need not be balanced.
            search = _Search(profile, grain, tuple(TaskKind))
            partition = search.fastest() if profile.num_devices > 1 else search.largest_fused()
            return ModelExecutePlan(partition.fwd, partition.bwd_plan)
        case _:
            assert_never(run_type)


def choose_exact_plan(
    profile: ModelProfile, update_s: Sequence[float], grain: Grain = "stage", timing: UpdateTiming = EXACT
) -> ModelExecutePlan:
    """Return the fastest fused plan for exact steps. `update_s` has the seconds of each layer's update."""
    # With several devices, balanced stages matter more than the overlap with the update.
    if profile.num_devices > 1:
        return choose_plan(RunType.FUSED, profile, grain)
    partition = _Search(profile, grain, tuple(TaskKind)).fastest_exact(update_s, timing)
    return ModelExecutePlan(partition.fwd, partition.bwd_plan)


def overlap_and_step_s(
    tasks: Sequence[StageTask],
    profile: ModelProfile,
    memory: StageMemory,
    update_s: Sequence[float],
    timing: UpdateTiming,
    grain: Grain,
) -> tuple[Overlap, float]:
    """Return the best tail and wave that fit into memory, and the seconds of an exact step with them, on one device."""
    limit = profile.memory_limit_bytes
    return best_overlap(
        tasks,
        profile.layers,
        update_s,
        timing,
        num_microbatch=profile.num_microbatch,
        longest_tail=memory.longest_tail(tasks, profile.num_devices, limit),
        room_bytes=None if limit is None else max(limit - memory.peak_bytes(tasks, profile.num_devices), 0),
        grain=grain,
    )


class _Search:
    """Searches the partitions of one pass over one model. ``kinds``: the kinds of stages in the pass."""

    def __init__(self, profile: ModelProfile, grain: Grain, kinds: Sequence[TaskKind]) -> None:
        self._profile = profile
        self._kinds = kinds
        self._grain = grain
        self._memory = StageMemory(profile.layers, grain, profile.num_microbatch)
        self._num_layers = len(profile.layers)
        self._limit_bytes = math.inf if profile.memory_limit_bytes is None else profile.memory_limit_bytes
        self._unbounded = self._packer(None)  # packs stages without a memory bound
        self._finest = self._unbounded.finest()

    def fastest(self) -> Partition:
        """Return the partition that fits into memory and has the shortest step by `steady_step_s`.

        Candidates are balanced partitions of several stage counts without a memory bound. Stage counts whose partition
        does not fit are tried again within each division of memory.
        """
        counts = _stage_counts(self._profile.num_devices, self._finest.num_stages)
        found = self._balanced(self._unbounded, counts)
        too_large = max((partition.num_stages for partition in found if not self._fits(partition)), default=0)
        if too_large:
            counts = [count for count in counts if count <= too_large]
            found += [each for share in RUNNING_SHARES for each in self._balanced(self._packer(share), counts)]
        fitting = [partition for partition in dict.fromkeys([*found, self._finest]) if self._fits(partition)]
        if not fitting:
            return self._finest
        profile = self._profile
        step_s = {
            partition: steady_step_s(
                _tasks(partition),
                profile.layers,
                num_devices=profile.num_devices,
                num_microbatch=profile.num_microbatch,
            )
            for partition in fitting
        }
        return _fewest_tasks_of_fastest(step_s)

    def largest_fused(self) -> Partition:
        """For one device: return the partition with the largest fused stage that fits into memory.

        One device has nothing to balance, and fused layers are not recomputed. The stages before the fused one are as
        large as a division of memory allows; if no division fits, they are single layers.
        """
        packers = [self._unbounded, *(self._packer(share) for share in RUNNING_SHARES)]
        for start in range(self._num_layers):  # largest fused stage first
            fused = range(start, self._num_layers)
            if not self._fused_leaves_room(fused):
                continue
            candidates = [self._around(fused, packer) for packer in packers]
            fitting = [each for each in (*candidates, _single_layers_around(fused)) if self._fits(each)]
            if fitting:
                return min(fitting, key=lambda partition: partition.num_stages)
        return self._finest

    def fastest_exact(self, update_s: Sequence[float], timing: UpdateTiming) -> Partition:
        """For one device: return the partition with the shortest exact step.

        Candidates differ in the size of the fused stage and in the size of the backward stages.
        """
        packers = [self._unbounded, *(self._packer(share) for share in RUNNING_SHARES)]
        step_s: dict[Partition, float] = {}
        for start in range(0, self._num_layers, -(-self._num_layers // _MAX_FUSED_SIZES)):
            fused = range(start, self._num_layers)
            if self._fused_leaves_room(fused):
                coarse = [self._around(fused, packer) for packer in packers]
                fine = _single_layers_around(fused)
                mixed = [Partition(partition.fwd, fused, fine.bwd) for partition in coarse]
                for each in dict.fromkeys([*coarse, *mixed, fine]):  # many are equal
                    if self._fits(each):
                        step_s[each] = self._exact_s(each, update_s, timing)
        return _fewest_tasks_of_fastest(step_s) if step_s else self._finest

    def _exact_s(self, partition: Partition, update_s: Sequence[float], timing: UpdateTiming) -> float:
        """Return the seconds of an exact step with its best tail and wave."""
        return overlap_and_step_s(_tasks(partition), self._profile, self._memory, update_s, timing, self._grain)[1]

    def _balanced(self, packer: PassPacker, counts: Iterable[int]) -> list[Partition]:
        """Return, for each stage count, the partition whose slowest stage is fastest. Equal partitions appear once."""
        coarsest = packer.pack(math.inf)
        least_s = packer.total_s(coarsest)  # the coarsest partition has the least recomputation
        found = {coarsest: None}
        max_s = math.inf
        for num_stages in counts:
            if num_stages <= coarsest.num_stages:
                continue
            tight = tightest([packer], num_stages, max_s, least_s / num_stages, PRECISION)
            if tight is not None:
                found[tight[0]] = None
                if num_stages <= 2 * self._profile.num_devices:
                    # With few stages the step depends on whether the short backward stage runs first or last.
                    found[packer.repack_backward_from_end(tight[0])] = None
                # More stages never need a slower slowest stage, so the next search starts from this bound.
                max_s = packer.slowest_s(tight[0])
        return list(found)

    def _fits(self, partition: Partition) -> bool:
        """Return whether the partition's peak fits into device memory."""
        return (
            self._limit_bytes == math.inf
            or self._memory.peak_bytes(_tasks(partition), self._profile.num_devices) <= self._limit_bytes
        )

    def _packer(self, running_share: float | None) -> PassPacker:
        """Return a packer without a memory bound (None), or one for a division of memory.

        With a division, a stage takes at most `running_share` of the memory while it runs. Its weights fit into the
        rest, because they arrive while the previous stage runs.
        """
        layers, memory = self._profile.layers, self._memory
        seconds = {
            TaskKind.FORWARD: [cost.forward_s for cost in layers],
            TaskKind.FUSED: [cost.fused_s for cost in layers],
            TaskKind.BACKWARD: [cost.recompute_backward_s for cost in layers],
        }
        if running_share is None:
            packers = {kind: KindPacker.of(seconds[kind]) for kind in self._kinds}
        else:
            running_bytes = running_share * self._limit_bytes
            next_bytes = self._limit_bytes - running_bytes

            def fits(kind: TaskKind, part: range) -> bool:
                return memory.range_bytes(kind, part) <= running_bytes and memory.weight_bytes(part) <= next_bytes

            packers = {kind: KindPacker.of(seconds[kind], partial(fits, kind)) for kind in self._kinds}
        return PassPacker(
            self._num_layers, packers.get(TaskKind.FORWARD), packers.get(TaskKind.FUSED), packers.get(TaskKind.BACKWARD)
        )

    def _fused_leaves_room(self, fused: range) -> bool:
        """Return whether the fused stage fits beside the weights of one layer of the backward stage after it."""
        neighbour = range(max(0, fused.start - 1), fused.start)
        held = self._memory.range_bytes(TaskKind.FUSED, fused) + self._memory.weight_bytes(neighbour)
        return held <= self._limit_bytes

    def _around(self, fused: range, packer: PassPacker) -> Partition:
        """Return forward and backward stages for a given fused stage.

        The fused stage's weights arrive while the last forward stage runs, and the first backward stage's weights
        arrive while the fused stage runs. Each of these two neighbours is split until it fits beside the fused stage.
        """
        assert packer.fwd is not None
        assert packer.bwd is not None
        beside_weights = self._limit_bytes - self._memory.weight_bytes(fused)
        beside_fused = self._limit_bytes - self._memory.range_bytes(TaskKind.FUSED, fused)
        fwd = packer.fwd.pack(fused.start, math.inf)
        bwd = packer.bwd.pack(fused.start, math.inf)
        return Partition(
            _shrink_last(
                fwd, [self._memory.range_bytes(TaskKind.FORWARD, part) <= beside_weights for part in _ends(fwd)]
            ),
            fused,
            _shrink_last(bwd, [self._memory.weight_bytes(part) <= beside_fused for part in _ends(bwd)]),
        )


def _tasks(partition: Partition) -> tuple[StageTask, ...]:
    """Return the schedule of a partition."""
    fused = () if partition.fused is None else (partition.fused,)
    return number_tasks(fwd=partition.fwd, fused=fused, bwd=reversed(partition.bwd))


def _fewest_tasks_of_fastest(step_s: dict[Partition, float]) -> Partition:
    """Return the partition with the fewest stages among those that tie with the shortest step."""
    equal_s = min(step_s.values()) * (1 + TIE)
    fast = [partition for partition, seconds in step_s.items() if seconds <= equal_s]
    return min(fast, key=lambda partition: (partition.num_stages, step_s[partition]))


def _single_layers_around(fused: range) -> Partition:
    """Return a given fused stage with single layers before it: this needs the fewest buffers."""
    layers = single_layers(range(fused.start))
    return Partition(layers, fused, layers)


def _ends(stages: Sequence[range]) -> list[range]:
    """Return the parts of the last stage that contain its last layer, largest first."""
    return [range(start, stages[-1].stop) for start in stages[-1]] if stages else []


def _shrink_last(stages: tuple[range, ...], fits: Sequence[bool]) -> tuple[range, ...]:
    """Split the last stage in two, so that the second part is as large as fits, and at least one layer.

    fits: for each part in `_ends(stages)`, whether it fits.
    """
    if not stages or fits[0]:
        return stages
    last = stages[-1]
    at = next((start for start, fit in zip(last, fits, strict=True) if fit), last.stop - 1)
    return stages if at == last.start else (*stages[:-1], range(last.start, at), range(at, last.stop))


def _stage_counts(num_devices: int, finest: int) -> list[int]:
    """Return the numbers of stages to try, ascending: every small one, a few large ones, and the finest."""
    counts = {*range(1, 2 * num_devices + 2), *range(1, 10)}
    growing = 3 * num_devices
    while growing < finest:
        counts |= {growing, growing + num_devices // 2}
        growing = growing * 3 // 2
    return sorted(count for count in counts | {finest} if count <= finest)
