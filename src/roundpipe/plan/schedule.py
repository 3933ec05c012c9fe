"""The schedule as data: the stage tasks of one call in order, and the device of each task.

Knows no costs, no microbatches and no tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from roundpipe.errors import ConfigError
from roundpipe.plan.execute_plan import ModelExecutePlan, RunType


class TaskKind(enum.Enum):
    """What a task computes. ``FUSED``: forward, loss and backward. ``BACKWARD``: recomputation and backward."""

    FORWARD = "F"
    FUSED = "FB"
    BACKWARD = "B"


@dataclass(frozen=True)
class StageTask:
    """One stage that one device runs for all microbatches of a call. ``index`` is its place in the schedule."""

    kind: TaskKind
    index: int
    layers: range

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"


def build_schedule(plan: ModelExecutePlan, run_type: RunType) -> tuple[StageTask, ...]:
    """Return the tasks of a valid plan in running order, such as F0, F1, FB2, B3, B4."""
    match run_type:
        case RunType.INFER:
            return number_tasks(fwd=plan.fwd_plan)
        case RunType.TRAIN:
            return number_tasks(fwd=plan.fwd_plan, bwd=plan.bwd_plan)
        case RunType.FUSED:  # the first range of bwd_plan is the fused stage
            return number_tasks(fwd=plan.fwd_plan, fused=plan.bwd_plan[:1], bwd=plan.bwd_plan[1:])
        case _:
            assert_never(run_type)


def number_tasks(
    *, fwd: Iterable[range] = (), fused: Iterable[range] = (), bwd: Iterable[range] = ()
) -> tuple[StageTask, ...]:
    """Return forward, fused and backward stages as one numbered schedule; each list is in running order."""
    stages = [(TaskKind.FORWARD, layers) for layers in fwd]
    stages += [(TaskKind.FUSED, layers) for layers in fused]
    stages += [(TaskKind.BACKWARD, layers) for layers in bwd]
    return tuple(StageTask(kind, index, layers) for index, (kind, layers) in enumerate(stages))


def deal(tasks: Sequence[StageTask], first_device: int, num_devices: int) -> tuple[int, ...]:
    """Return the device index of each task: round-robin, starting with ``first_device``."""
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    return tuple((first_device + position) % num_devices for position in range(len(tasks)))
