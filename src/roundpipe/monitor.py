"""Locks, waits and threads that survive Ctrl-C and fork, with a watchdog for long waits.

A Monitor guards state that several threads share. Every wait has a description; a wait longer than the watchdog limit
is logged together with the stacks of the library's threads. Knows no tensors, devices or schedules.

[Note: stalls] If the user has set a wait limit, a longer wait of a thread of the user raises StallError. It interrupts
an operation at a point where its state may be inconsistent, and the thread that was waited for may be stuck forever. So
a stall is final: `stalls` makes every model of the process refuse calls, later waits of the user's threads raise at
once, and closing a model does not wait for its work. Threads of the library go on waiting: they end when the model is
closed. Waits with a timeout end by themselves and never raise.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import logging
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from roundpipe.errors import ConfigError, StallError

logger = logging.getLogger("roundpipe")

THREAD_PREFIX = "roundpipe-"
WATCHDOG_VARIABLE = "ROUNDPIPE_WATCHDOG_S"
DEFAULT_WATCHDOG_S = 300.0
WAIT_LIMIT_VARIABLE = "ROUNDPIPE_WAIT_LIMIT_S"
IDLE_SLEEP_S = 1.0
# The main thread runs signal handlers when it wakes up. A signal may be delivered to a different thread and then does
# not wake the main thread, so no sleep may be longer than this.
_LONGEST_SLEEP_S = 0.5
_LAST_JOIN_S = 1.0
_POLL_FIRST_S = 20e-6
_POLL_LAST_S = 1e-3


stalls: list[str] = []  # what the waits that have raised StallError were for; see [Note: stalls]
_process_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_frees_locks_in_children = False


def process_lock() -> _thread.LockType:
    """Return a lock that is free in a forked child, even if a thread of the parent held it during the fork."""
    lock = _thread.allocate_lock()
    _process_locks.add(lock)
    return lock


def process_rlock() -> _thread.RLock:
    """As `process_lock`, but re-entrant."""
    lock = _thread.RLock()
    _process_locks.add(lock)
    return lock


def follow_forks() -> None:
    """Free all process locks in forked children from now on.

    Call this before the first thread starts: until then, no lock can be held by a thread that a fork loses.
    """
    global _frees_locks_in_children
    if not _frees_locks_in_children and hasattr(os, "register_at_fork"):
        _frees_locks_in_children = True
        os.register_at_fork(after_in_child=_free_locks)


def _free_locks() -> None:
    """Reset all process locks and forget stalls; runs in a forked child, which has one thread."""
    for lock in list(_process_locks):
        lock._at_fork_reinit()
    stalls.clear()


def watchdog_limit_s() -> float:
    """Return the seconds after which a wait is logged, from `ROUNDPIPE_WATCHDOG_S` or the default."""
    return _seconds_from(WATCHDOG_VARIABLE, DEFAULT_WATCHDOG_S)


def wait_limit_s() -> float:
    """Return the seconds after which a wait raises StallError, from `ROUNDPIPE_WAIT_LIMIT_S`; infinity if unset."""
    return _seconds_from(WAIT_LIMIT_VARIABLE, math.inf)


def _seconds_from(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise ConfigError(f"{variable}={text!r} is not a positive number of seconds; set one, or unset it.")
    return limit


def stall_of_process() -> StallError:
    """The error for a call after a stall."""
    return StallError(
        f"RoundPipe cannot be used in this process any more: the wait for {stalls[0]} took longer than "
        f"{WAIT_LIMIT_VARIABLE}. End the process and resume from the last checkpoint."
    )


class Monitor(_thread.RLock):  # type: ignore[misc]
    """A re-entrant lock with one condition. Code that changes the guarded state calls `changed()`.

    [Note: locks and Ctrl-C] A signal handler's exception is raised in the main thread between two instructions of
    Python code, never inside C code. A Monitor subclasses RLock: a Python-level `__enter__` interrupted after acquiring
    would leak the lock; the C one cannot be interrupted. `threading.Condition`, `threading.Event` and `queue.Queue`
    acquire their locks in Python code, so code that the main thread runs must not use them.
    """

    def __init__(self) -> None:
        super().__init__()
        # One lock per sleeping thread, released to wake it, and the condition the thread waits for.
        self._sleepers: dict[_thread.LockType, Callable[[], bool]] = {}
        self._waits: dict[int, str] = {}

    def is_held(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return self._is_owned()  # type: ignore[attr-defined, no-any-return]

    def changed(self) -> None:
        """Wake every thread whose condition holds now; the caller holds the lock.

        The caller evaluates the conditions, because waking a thread that goes back to sleep takes the interpreter lock
        from the thread that launches kernels.
        """
        for sleeper, ready in list(self._sleepers.items()):
            try:
                holds = ready()
            except Exception:  # a condition that raises must do so on the thread that waits for it
                holds = True
            # A finalizer may call this in between: only one of the two gets the sleeper from `pop`.
            if holds and self._sleepers.pop(sleeper, None) is not None:
                sleeper.release()

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> bool:
        """Block until `ready()` is true; return False if that takes longer than `timeout_s`.

        The caller holds the lock; it is released while this thread sleeps. `what` describes the wait in logs. Without
        `timeout_s`, raises StallError if the wait takes longer than the user's limit: see [Note: stalls].
        """
        if ready():
            return True
        alarm = Alarm(what, self._waits, may_raise=timeout_s is None)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        ident = _thread.get_ident()
        outer = self._waits.get(ident)  # waits may nest: `ready` may wait itself
        try:
            self._waits[ident] = what
            while not ready():
                now = time.monotonic()
                if now >= deadline:
                    return False
                alarm.ring_if_due()
                self._sleep(ready, min(deadline - now, alarm.due_in_s(), _LONGEST_SLEEP_S))
        finally:
            if outer is None:
                self._waits.pop(ident, None)
            else:
                self._waits[ident] = outer
        return True

    @contextlib.contextmanager
    def announced(self, what: str) -> Iterator[None]:
        """Show in reports of stalls that this thread waits for `what`. For waits outside of the monitor."""
        ident = _thread.get_ident()
        self._waits[ident] = what
        try:
            yield
        finally:
            self._waits.pop(ident, None)

    def idle_until(self, ready: Callable[[], bool]) -> None:
        """Block until `ready()` is true, without the watchdog: for service threads that wait for work.

        It calls `ready()` again every `IDLE_SLEEP_S`: a finalizer may run on this thread between `ready()` and the
        sleep, and its `changed()` then has no sleeper to wake.
        """
        while not ready():
            self._sleep(ready, IDLE_SLEEP_S)

    def _sleep(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Release the lock until `changed()` finds `ready()` true, at most for `timeout_s`.

        The lock is held when this returns or raises, as the `with` around it requires: after `release` all code is
        inside the `try`, and `restore` is C code that signals cannot interrupt. [Note: locks and Ctrl-C]
        """
        sleeper = _thread.allocate_lock()
        sleeper.acquire()
        held = (_depth_of(self), _thread.get_ident())
        release, restore = self._release_save, self._acquire_restore  # type: ignore[attr-defined]
        self._sleepers[sleeper] = ready
        try:
            release()
            sleeper.acquire(True, timeout_s)
        finally:
            restore(held)
            self._sleepers.pop(sleeper, None)


def _depth_of(lock: _thread.RLock) -> int:
    """Return how often the calling thread has acquired a lock that it holds."""
    count: Callable[[], int] = getattr(lock, "_recursion_count", lambda: 1)  # missing in early releases of 3.11
    return count()


class Latch:
    """A flag that is set once and that threads can wait for.

    Replaces `threading.Event`, whose lock an interrupted waiter could leak. [Note: locks and Ctrl-C]
    """

    def __init__(self) -> None:
        self._is_set = False
        self._sleepers: deque[_thread.LockType] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(IndexError):
            while self._sleepers:
                self._sleepers.popleft().release()

    def wait(self, timeout_s: float) -> bool:
        """Block until the latch is set, at most `timeout_s`; return whether it is set."""
        if not self._is_set:
            sleeper = _thread.allocate_lock()
            sleeper.acquire()
            self._sleepers.append(sleeper)
            # Look again: `set` may have emptied the deque before this sleeper was in it.
            if not self._is_set and not sleeper.acquire(True, max(timeout_s, 0.0)):
                with contextlib.suppress(ValueError):
                    self._sleepers.remove(sleeper)
        return self._is_set


def shielded(action: Callable[[], object]) -> None:
    """Run a short `action` to its end even if a signal handler raises; raise that exception afterwards.

    Only the main thread runs signal handlers, so on the main thread the action runs on a helper thread. If no thread
    can be started, the action runs unshielded. If the action is stuck, raises StallError: see [Note: stalls].
    """
    if _thread.get_ident() != threading.main_thread().ident:
        action()
        return
    # `turn` has one entry, so that only one thread runs the action; list.pop is atomic.
    turn, outcome, done = [None], list[BaseException | None](), Latch()

    def run() -> bool:
        """Run the action unless it has been started already; return whether this call ran it."""
        try:
            turn.pop()
        except IndexError:
            return False
        error: BaseException | None = None
        try:
            action()
        except BaseException as raised:
            error = raised
        outcome.append(error)
        done.set()
        return True

    # The action's own waits name what they wait for, so they raise first.
    alarm = Alarm("an action that must not be interrupted", {}, grace_s=2 * _LONGEST_SLEEP_S)
    begun, interrupt, stall = False, None, None
    while not outcome and stall is None:
        try:
            if not begun:
                # CPython handles signals after calls and backward jumps, so none interrupts between these two lines.
                begun = True
                _thread.start_new_thread(run, ())  # Thread.start uses a threading.Event [Note: locks and Ctrl-C]
            if not done.wait(_LONGEST_SLEEP_S):
                alarm.ring_if_due()
        except StallError as error:
            stall = error
        except BaseException as error:
            # RuntimeError: no thread could be started, so run the action here.
            if not (isinstance(error, RuntimeError) and run()):
                interrupt = error
    if interrupt is not None:
        raise interrupt
    if stall is not None:
        raise stall
    if outcome[0] is not None:
        raise outcome[0]


def has_started(thread: threading.Thread) -> bool:
    """Return whether a thread was started, even if an exception interrupted `Thread.start`."""
    return thread.ident is not None or thread in threading.enumerate()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise what `Thread.start` raises. After a KeyboardInterrupt the thread may have started."""
    shielded(thread.start)


class Alarm:
    """Logs a wait when the watchdog limit has passed, and again after each further limit.

    On a thread of the user, raises StallError when the wait limit has passed: see [Note: stalls].
    """

    def __init__(self, what: str, waits: dict[int, str], *, may_raise: bool = True, grace_s: float = 0.0) -> None:
        """`waits`: what the threads wait for. `grace_s`: added to the wait limit."""
        self._what, self._waits = what, waits
        self._limit_s = watchdog_limit_s()
        self._since = time.monotonic()
        self._due = self._since + self._limit_s
        wait_s = math.inf if not may_raise else 0.0 if stalls else wait_limit_s()
        self._end = self._since + wait_s + grace_s

    def due_in_s(self) -> float:
        return max(min(self._due, self._end) - time.monotonic(), 1e-3)

    def ring_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._end:
            if threading.current_thread().name.startswith(THREAD_PREFIX):
                self._end = math.inf
            elif stalls:
                raise stall_of_process()
            else:
                stalls.append(self._what)
                raise StallError(stall_report(self._what, now - self._since, self._waits, _STALLED))
        if now >= self._due:
            self._due = now + self._limit_s
            logger.warning("%s", stall_report(self._what, now - self._since, self._waits))


_STALLED = (
    f"this is longer than {WAIT_LIMIT_VARIABLE} allows. RoundPipe cannot be used in this process any more: end the "
    "process and resume from the last checkpoint"
)


def end_threads(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Wait for threads that were asked to end, at most `timeout_s` in total: one may be stuck in user code.

    [Note: ending with the process] A daemon thread that returns from C++ code during interpreter shutdown aborts the
    process. So when the process ends, threads that still run the user's Python code get a SystemExit raised in that
    code. It has no effect on threads that sleep.
    """
    others = [thread for thread in threads if thread.is_alive() and thread is not threading.current_thread()]
    process_ends = not threading.main_thread().is_alive()  # true in atexit handlers
    _join(others, min(timeout_s, _LAST_JOIN_S) if process_ends else timeout_s)
    if process_ends:
        for thread in others:
            if thread.is_alive() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        _join(others, _LAST_JOIN_S)


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Join all threads, at most `timeout_s` in total."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def wait_for_event(done: Callable[[], bool], what: str) -> None:
    """Poll a device event until `done()`, without holding a lock; the watchdog logs long waits.

    Raises StallError if the wait takes longer than the user's limit: see [Note: stalls].
    """
    pause = _POLL_FIRST_S  # most events are done soon; longer waits poll less often
    alarm = Alarm(what, {})
    while not done():
        time.sleep(pause)
        pause = min(2 * pause, _POLL_LAST_S)
        alarm.ring_if_due()


def stall_report(what: str, waited_s: float, waits: dict[int, str], then: str = "it continues to wait") -> str:
    """Return a message: what each thread waits for, and the stacks of the library's threads. `then`: what follows."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me = names.get(threading.get_ident(), "?")
    lines = [f"{me} has waited {waited_s:.1f} s for {what}; {then}."]
    # Copies: other threads change `waits` meanwhile.
    lines += [f"  {names.get(ident, ident)} waits for {other}" for ident, other in list(waits.items())]
    for ident, frame in sys._current_frames().items():
        # Threads without a Thread object are those of `shielded`.
        name = names.get(ident, f"{THREAD_PREFIX}thread {ident}")
        if name.startswith(THREAD_PREFIX) or ident == threading.main_thread().ident:
            lines.append(f"  stack of {name}:")
            lines += ["    " + text.rstrip().replace("\n", "\n    ") for text in traceback.format_stack(frame)]
    return "\n".join(lines)


class CallLock(_thread.RLock):  # type: ignore[misc]
    """Serialises the calls of a group. Entered and left by C code only: see [Note: locks and Ctrl-C]."""

    runs_user_code = False  # see [Note: calls inside calls] in api/group

    def is_held(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._is_owned()  # type: ignore[attr-defined, no-any-return]

    def run_user_code(self, function: Callable[[], Any]) -> Any:
        """Return `function()`. While the function runs, this thread may make other calls."""
        self.runs_user_code = True
        try:
            return function()
        finally:
            self.runs_user_code = False


class InnerCall(AbstractContextManager[bool]):
    """The context of a call that user code makes inside an outer call, which holds the lock.

    While the inner call is in progress, further calls on this thread are refused.
    """

    def __init__(self, lock: CallLock) -> None:
        self._lock = lock

    def __enter__(self) -> bool:
        self._lock.runs_user_code = False
        return False

    def __exit__(self, *exc_info: object) -> None:
        self._lock.runs_user_code = True
