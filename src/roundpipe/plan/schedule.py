"""The schedule as data: the stage tasks of one call, in their order, and the device each is dealt to.

Built by the api from a plan; executed by the runtime, simulated by plan.simulator, drawn and asserted on by tests.
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
    """``FORWARD``; ``FUSED``: forward, loss and backward together; ``BACKWARD``: recompute and backward."""

    FORWARD = "F"
    FUSED = "FB"
    BACKWARD = "B"


@dataclass(frozen=True)
class StageTask:
    """One stage of a call, run for all microbatches by one device. ``index`` is its place in the whole schedule."""

    kind: TaskKind
    index: int
    layers: range

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"


def build_schedule(plan: ModelExecutePlan, run_type: RunType) -> tuple[StageTask, ...]:
    """The tasks of a valid plan in the order in which they are dealt: F0, F1, FB2, B3, B4."""
    match run_type:
        case RunType.INFER:
            return number_tasks(fwd=plan.fwd_plan)
        case RunType.TRAIN:
            return number_tasks(fwd=plan.fwd_plan, bwd=plan.bwd_plan)
        case RunType.FUSED:
            return number_tasks(fwd=plan.fwd_plan, fused=plan.bwd_plan[:1], bwd=plan.bwd_plan[1:])
        case _:
            assert_never(run_type)


def number_tasks(
    *, fwd: Iterable[range] = (), fused: Iterable[range] = (), bwd: Iterable[range] = ()
) -> tuple[StageTask, ...]:
    """Forward, fused and backward stages, each list in its running order, as one numbered schedule."""
    stages = [(TaskKind.FORWARD, layers) for layers in fwd]
    stages += [(TaskKind.FUSED, layers) for layers in fused]
    stages += [(TaskKind.BACKWARD, layers) for layers in bwd]
    return tuple(StageTask(kind, index, layers) for index, (kind, layers) in enumerate(stages))


def deal(tasks: Sequence[StageTask], first_device: int, num_devices: int) -> tuple[int, ...]:
    """The device index of each task, round-robin from ``first_device``."""
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    return tuple((first_device + position) % num_devices for position in range(len(tasks)))
