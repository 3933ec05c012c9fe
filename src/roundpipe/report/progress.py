"""How far a run is, by its files: running, complete, stopped, or silent since some time.

A killed process cannot say that it has ended, so a run without an end is silent once its metrics have not grown for
several of its steps. Knows rows and the record of a run, no page.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.report.figures import duration
from roundpipe.report.live_view import RunState
from roundpipe.report.metrics import Row, RunRecord

_SILENT_AFTER_S = 120.0
_SILENT_STEPS = 10.0  # a run with longer steps may be quiet for as long as this number of them
_RATE_ROWS = 21


class State(enum.Enum):
    """What the files say of a run."""

    RUNNING = "running"
    COMPLETE = "complete"
    STOPPED = "stopped"
    SILENT = "no news"


@dataclass(frozen=True)
class Progress:
    """The state of a run at one time.

    max_steps: None if the run does not say it.
    left_s: seconds until the last step, of a run that is running; None if unknown.
    quiet_s: seconds since the last news.
    """

    state: State
    step: int
    max_steps: int | None
    left_s: float | None
    quiet_s: float

    @property
    def steps(self) -> str:
        """Such as `120 of 500`."""
        return f"{self.step:,}" + (f" of {self.max_steps:,}" if self.max_steps else "")

    @property
    def _quiet(self) -> str:
        days = int(self.quiet_s // 86400)
        return duration(self.quiet_s) if days < 2 else f"{days:,} days"

    @property
    def short(self) -> str:
        """The state in a few words."""
        if self.state is State.SILENT:
            return f"no news for {self._quiet}"
        return str(self.state.value)

    @property
    def sentence(self) -> str:
        """The state as a sentence of a page."""
        if self.state is State.RUNNING:
            left = "" if self.left_s is None else f", about {duration(self.left_s)} left"
            return f"Running: step {self.steps}{left}."
        if self.state is State.SILENT:
            return (
                f"No news for {self._quiet}, at step {self.steps}: the run was killed, or its last step is a long one."
            )
        return f"{self.state.value.capitalize()} at step {self.steps}."


def progress_of(rows: Sequence[Row], record: RunRecord, now: float | None = None) -> Progress:
    """The progress of a run at the time `now`, by default the present."""
    now = time.time() if now is None else now
    run = RunState(max_steps=record.max_steps)
    for row in [row for row in rows if row.get("type") != "eval"][-_RATE_ROWS:]:
        run.add({"time": 0.0, **row})
    begins = [start["time"] for start in record.starts if isinstance(start.get("time"), int | float)]
    news = max([*begins[-1:], *(row["time"] for row in rows[-1:] if "time" in row)], default=now)
    quiet_s = max(now - news, 0.0)
    if record.ended is not None:
        is_complete = record.max_steps is None or run.step >= record.max_steps
        state = State.COMPLETE if is_complete else State.STOPPED
    else:
        steps_s = [row["step_s"] for row in rows[-_RATE_ROWS:] if row.get("step_s")]
        limit_s = max(_SILENT_AFTER_S, _SILENT_STEPS * statistics.median(steps_s or [0.0]))
        state = State.RUNNING if quiet_s <= limit_s else State.SILENT
    left_s = run.eta_s if state is State.RUNNING else None
    return Progress(state, run.step, record.max_steps, left_s, quiet_s)
