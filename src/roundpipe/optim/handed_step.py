"""A synchronous step whose body runs on the caller's thread: between two calls of ours the user's loop has its turn.

The optimizer thread does everything that moves weights and gradients between the store and the optimizer's copies, as
in any other step. Its step function is `HandedStep.wait_for_caller`: it tells the caller that all gradients are there
and waits until the caller says how the step ended. So a Ctrl-C in the caller never leaves the store half way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from roundpipe.store import StepAbandoned
from roundpipe.waiting import Monitor

T = TypeVar("T")


class HandedStep:
    def __init__(self, monitor: Monitor) -> None:
        self.thread = threading.get_ident()
        self.error: BaseException | None = None
        self.is_open = False  # the gradients are there and the caller has its turn
        self.is_over = False  # the optimizer thread is done with it
        self._monitor = monitor
        self._has_ended = False  # the caller has had its turn
        self._is_abandoned = False  # the model is being closed
        self._work: Callable[[], object] | None = None

    # The caller's side.

    def wait_until_open(self) -> bool:
        """Whether the step opened; False if it ended before, because a call it depends on failed."""
        with self._monitor:
            self._monitor.wait_until(lambda: self.is_open or self.is_over, "gradients of the pending calls")
            return self.is_open and not self.is_over

    def end(self) -> None:
        """End the caller's turn; returns when the optimizer thread has published the step. Can be repeated."""
        with self._monitor:
            self._has_ended = True
            self._monitor.changed()
            self._monitor.wait_until(lambda: self.is_over, "the optimizer thread to end a step")

    def abandon(self) -> None:
        """End the step without publishing it and without waiting: the model is being closed. Under the monitor."""
        self._is_abandoned = True

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work` on the optimizer thread, where no signal handler can interrupt it; returns its result."""
        done: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                done.append((work(), None))
            except BaseException as error:
                done.append((None, error))

        with self._monitor:
            self._work = run
            self._monitor.changed()
            self._monitor.wait_until(lambda: bool(done), "the optimizer's update")
        result, error = done[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    # The optimizer thread's side.

    def wait_for_caller(self) -> None:
        """The step function. The caller may take its time, so this wait is not reported as a stall."""
        with self._monitor:
            self.is_open = True
            self._monitor.changed()
        while (work := self._next_work()) is not None:
            work()
            with self._monitor:
                self._monitor.changed()
            del work
        if self._is_abandoned:
            raise StepAbandoned

    def _next_work(self) -> Callable[[], Any] | None:
        with self._monitor:
            self._monitor.idle_until(lambda: self._work is not None or self._has_ended or self._is_abandoned)
            work, self._work = self._work, None
            return work

    def finished(self, error: BaseException | None) -> None:
        """The optimizer thread is done; called under the monitor."""
        self.error, self.is_open, self.is_over = error, False, True
