"""The phases of preparing a training, for users who wait for the first step.

A phase is a line in the log when it begins, and its time when it ends after more than a second. The live view shows the
present phase. `watched_by` passes the lines to programs that do not show the log. Knows nothing of what the phases do.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

logger = logging.getLogger("roundpipe")
_WORTH_A_LINE_S = 1.0


class Phase(NamedTuple):
    what: str
    began_s: float  # on the clock of time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began_s


_running: list[Phase] = []  # on all threads; a phase inside another one comes after it
_watchers: list[Callable[[str], object]] = []


def present_phase() -> Phase | None:
    """The phase that has begun last and runs; None if nothing is being prepared."""
    running = tuple(_running)
    return running[-1] if running else None


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    """Show what is being done inside the block."""
    own = Phase(what, time.perf_counter())
    _tell(what)
    _running.append(own)
    try:
        yield
    finally:
        _running.remove(own)
    if (seconds := own.seconds) >= _WORTH_A_LINE_S:
        _tell(f"{what}: done in {seconds:.1f} s")


@contextlib.contextmanager
def watched_by(watcher: Callable[[str], object]) -> Iterator[None]:
    """Also pass each line to `watcher`, which is called on the thread of the phase."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _tell(line: str) -> None:
    logger.info("%s", line)
    for watcher in tuple(_watchers):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream must not fail the training
            watcher(line)
