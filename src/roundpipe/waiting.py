"""One lock, one condition, and waits that never stay silent.

A Monitor guards the state that device workers, the landing thread, the optimizer thread and callers share. Whoever
waits says what for; a wait longer than the watchdog limit is logged together with the stacks of our threads.
Knows no tensor, device or schedule.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from roundpipe.errors import ConfigError

logger = logging.getLogger("roundpipe")

THREAD_PREFIX = "roundpipe-"
DEFAULT_WATCHDOG_S = 300.0
IDLE_SLEEP_S = 1.0
_LONGEST_SLEEP_S = 0.5  # the main thread looks for signals when it wakes, and one may have reached another thread
_LAST_JOIN_S = 1.0
_POLL_FIRST_S = 20e-6
_POLL_LAST_S = 1e-3


def watchdog_limit_s() -> float:
    """Seconds after which a wait is reported; `ROUNDPIPE_WATCHDOG_S` sets it."""
    text = os.environ.get("ROUNDPIPE_WATCHDOG_S")
    if not text:
        return DEFAULT_WATCHDOG_S
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise ConfigError(f"ROUNDPIPE_WATCHDOG_S={text!r} is not a positive number of seconds; set one, or unset it.")
    return limit


class Monitor(_thread.RLock):  # type: ignore[misc]
    """A re-entrant lock with one condition; every change of the guarded state ends in `changed()`.

    It is a lock, and does not have one, because entering and leaving must be the interpreter's own: a Ctrl-C that
    struck inside of a method of ours, when the lock is taken and the block not yet entered, would leave it taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(self)
        self._waits: dict[int, str] = {}

    def is_held(self) -> bool:
        """Whether the calling thread is inside."""
        return self._is_owned()  # type: ignore[attr-defined, no-any-return]

    def changed(self) -> None:
        """Wake everybody who waits; the caller holds the lock."""
        self._condition.notify_all()

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> bool:
        """Block until `ready()`; give up after `timeout_s`, report after the watchdog limit. Returns `ready()`."""
        if ready():
            return True
        alarm = _Alarm(what, self._waits)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._announced(what):
            while not ready():
                now = time.monotonic()
                if now >= deadline:
                    return False
                self._condition.wait(min(deadline - now, alarm.due_in_s(), _LONGEST_SLEEP_S))
                alarm.ring_if_due()
        return True

    def idle_until(self, ready: Callable[[], bool]) -> None:
        """For a service thread with nothing to do: waits in silence, which is no stall.

        It looks again now and then: a finalizer may strike this very thread between its last look and its sleep, and
        what that changes wakes nobody.
        """
        while not ready():
            self._condition.wait(IDLE_SLEEP_S)

    def _announced(self, what: str) -> _Announcement:
        return _Announcement(self._waits, what)


class _Announcement:
    def __init__(self, waits: dict[int, str], what: str) -> None:
        self._waits, self._what = waits, what

    def __enter__(self) -> None:
        ident = threading.get_ident()
        self._outer = self._waits.get(ident)
        self._waits[ident] = self._what

    def __exit__(self, *exc_info: object) -> None:
        if self._outer is None:
            self._waits.pop(threading.get_ident(), None)
        else:
            self._waits[threading.get_ident()] = self._outer


class _Alarm:
    """Reports a wait once the watchdog limit has passed, and again after each further limit."""

    def __init__(self, what: str, waits: dict[int, str]) -> None:
        self._what, self._waits = what, waits
        self._limit_s = watchdog_limit_s()
        self._since = time.monotonic()
        self._due = self._since + self._limit_s

    def due_in_s(self) -> float:
        return max(self._due - time.monotonic(), 1e-3)

    def ring_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._limit_s
            logger.warning("%s", stall_report(self._what, now - self._since, self._waits))


def end_threads(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Wait for threads that were told to end; `timeout_s` is for all of them, since one may be stuck in user code.

    [Note: ending with the process] A daemon thread that comes out of C++ while the interpreter is being taken down ends
    the process with an abort. So when the process ends, one that still runs the user's Python code gets an exception
    there. One that sleeps is left alone.
    """
    others = [thread for thread in threads if thread is not threading.current_thread()]
    process_ends = not threading.main_thread().is_alive()
    _join(others, min(timeout_s, _LAST_JOIN_S) if process_ends else timeout_s)
    if process_ends:
        for thread in others:
            if thread.is_alive() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        _join(others, _LAST_JOIN_S)


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def wait_for_event(done: Callable[[], bool], what: str) -> None:
    """Poll a device event without holding any lock; reported like every other wait."""
    pause = _POLL_FIRST_S
    alarm = _Alarm(what, {})
    while not done():
        time.sleep(pause)
        pause = min(2 * pause, _POLL_LAST_S)
        alarm.ring_if_due()


def stall_report(what: str, waited_s: float, waits: dict[int, str]) -> str:
    """Who waits for what, and where every thread of ours stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me = names.get(threading.get_ident(), "?")
    lines = [f"{me} has waited {waited_s:.0f} s for {what}; it goes on waiting."]
    lines += [f"  {names.get(ident, ident)} waits for {other}" for ident, other in list(waits.items())]
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "")
        if name.startswith(THREAD_PREFIX) or ident == threading.main_thread().ident:
            lines.append(f"  stack of {name}:")
            lines += ["    " + text.rstrip().replace("\n", "\n    ") for text in traceback.format_stack(frame)]
    return "\n".join(lines)
