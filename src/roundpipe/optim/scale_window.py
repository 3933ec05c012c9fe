"""The steps between two updates of a GradScaler, what they found, and what that decides about the scale.

Used by optim.grad_scaler under its lock, except for the waiting. Knows steps by their iteration, never gradients.

[Note: windows] Every update() ends a window: the steps issued since the update() before it. The window yields one
decision. A step may still be running when its update() is called, so an async decision is put off by one update():

    main thread      step 1   update 1          step 2   update 2            step 3   update 3
    optimizer        [ step 1 ....... ]         [ step 2 ....... ]           [ step 3 ....... ]
    window           1                          2                            3
    async: applies            -                          window 1                     window 2
    sync:  applies            window 1                   window 2                     window 3
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.context import Iteration
from roundpipe.optim.scale_value import check_keys, checked_scale
from roundpipe.waiting import stall_report, watchdog_limit_s

logger = logging.getLogger("roundpipe")

_WAIT_SLICE_S = 60.0  # a limit may be longer than a lock can wait in one go
_DEFERRED_KEYS = ("stepped", "found_inf", "new_scale")


class Stage(enum.Enum):
    """How far one optimizer is in one iteration."""

    UNSCALED = "unscale_"
    STEPPED = "step"


@dataclass
class OptimizerProgress:
    stage: Stage = Stage.UNSCALED
    found_inf: bool = False


StepRecord = dict[torch.optim.Optimizer, OptimizerProgress]


@dataclass
class Window:
    """The steps between two update() calls, and what is known of them; see [Note: windows]."""

    running: list[Iteration] = field(default_factory=list)
    stepped: bool = False  # whether any scaler.step() ran to its end
    found_inf: bool = False

    def count(self, record: StepRecord) -> None:
        self.stepped |= any(progress.stage is Stage.STEPPED for progress in record.values())
        self.found_inf |= any(progress.found_inf for progress in record.values())


@dataclass
class Decision:
    """What one update() decided: a scale given by the user, or whatever the steps of its window say."""

    window: Window
    new_scale: float | None = None


def loaded_decision(deferred: Mapping[str, Any] | None) -> Decision | None:
    if deferred is None:
        return None
    check_keys("state dict's _deferred", deferred, _DEFERRED_KEYS)
    window = Window(stepped=bool(deferred["stepped"]), found_inf=bool(deferred["found_inf"]))
    new_scale = deferred["new_scale"]
    return Decision(window, None if new_scale is None else checked_scale("new_scale", new_scale))


def wait_for_steps(method: str, iterations: Iterable[Iteration]) -> None:
    """Block, holding no lock, until all steps are done; each watchdog limit that passes is reported."""
    limit_s = watchdog_limit_s()
    what = f"an optimizer step that was issued and has not finished, in GradScaler.{method}()"
    for iteration in [iteration for iteration in iterations if iteration.pid == os.getpid()]:
        begin_s = time.monotonic()
        due_s = begin_s + limit_s
        while not iteration.step_finished.wait(min(due_s - time.monotonic(), _WAIT_SLICE_S)):
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = now_s + limit_s
                logger.warning("%s", stall_report(what, now_s - begin_s, {}))
