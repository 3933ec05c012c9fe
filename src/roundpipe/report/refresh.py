"""Draws the report of a run while it runs, on a thread beside the training.

Drawing holds the interpreter lock, which the threads that launch work on devices need. So it takes at most one percent
of the time: the next one waits for a hundred times the processor time of the last one. Knows no run and no page.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("roundpipe")
REFRESH_S = 30.0
_SHARE = 0.01  # of the time that drawing may take
THREAD_NAME = "roundpipe-report"


class Refresh:
    """Calls `draw` now and then. A failure of it is logged, the first one of several, and changes nothing else."""

    def __init__(self, draw: Callable[[], object], every_s: float = REFRESH_S) -> None:
        self._draw = draw
        self._every_s = every_s
        self._last_s = time.monotonic()  # when the last drawing ended; at first the start of the run
        self._pause_s = every_s  # from there to the next one, at least
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def offer(self, *, is_event: bool = False) -> None:
        """Draw if it is time to. After an event, such as an evaluation, only the share of the time counts."""
        if self._thread is not None:
            if self._thread.is_alive():
                return
            self._thread = None
        pause_s = self._pause_s if is_event else max(self._pause_s, self._every_s)
        if time.monotonic() - self._last_s < pause_s:
            return
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        if "matplotlib.pyplot" in sys.modules:
            self._thread.join()  # its settings are those of the process: the user's code may draw, too

    def close(self) -> None:
        """Wait until nothing is drawn."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        begun_s = time.thread_time()
        try:
            self._draw()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "The report could not be refreshed: %s: %s. Training goes on; the report is tried again.",
                    type(error).__name__,
                    error,
                )
        self._pause_s = (time.thread_time() - begun_s) / _SHARE
        self._last_s = time.monotonic()
