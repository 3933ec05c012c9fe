"""Keeps watch over the runs of models that are stepped together: what failed, what must be undone, what is finished.

Owned by api.member, one for a group. After a failure weights, buffers and optimizer state are as before the failed call
(but see Stepper.half_done), gradients gathered since the last step are gone, and the next call works.

The lock that serialises calls into models that are stepped together, and what may enter it twice.

[Note: calls inside calls]
A call must not begin while another is half done on the same thread: a signal handler, a finalizer or a hook would wait
for what only the interrupted call can do, or change what it has just read. Such a call is refused. Some calls run the
user's code on the calling thread at points where nothing is half done: split and merge functions, a forward on the
host, autograd behind the inputs. They do so through `run_user_code`, and there other calls are welcome.
"""

from __future__ import annotations

import _thread
import functools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from roundpipe.errors import ClosedError, UsageError, add_note
from roundpipe.monitor import Monitor
from roundpipe.optim.stepper import Stepper
from roundpipe.runtime.run import Run
from roundpipe.store import BufferRecord, LayerStore

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallLock(_thread.RLock):  # type: ignore[misc]
    """Entered and left by C code alone, see [Note: locks and Ctrl-C]."""

    runs_user_code = False  # the call that holds the lock lets others in

    def for_call(self, name: str) -> AbstractContextManager[bool]:
        """What to enter around a call of the model `name`; gives True if no other call is around it."""
        if not self._is_owned():  # type: ignore[attr-defined]
            return self
        if not self.runs_user_code:
            raise UsageError(
                f"{name} was called while another call into it is in progress on the same thread, as from a signal "
                "handler or a finalizer; only set a flag there (model.request_stop() is one) and call the model when "
                "the present call has returned."
            )
        return _InnerCall(self)

    def run_user_code(self, function: Callable[[], Any]) -> Any:
        self.runs_user_code = True
        try:
            return function()
        finally:
            self.runs_user_code = False


class _InnerCall(AbstractContextManager[bool]):
    """The lock is held by the outer call; it is closed to others while the inner one runs."""

    def __init__(self, lock: CallLock) -> None:
        self._lock = lock

    def __enter__(self) -> bool:
        self._lock.runs_user_code = False
        return False

    def __exit__(self, *exc_info: object) -> None:
        self._lock.runs_user_code = True


def restoring_grad_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Give the calling thread its grad mode back when the call raises.

    `torch.no_grad()` is left by Python code: a Ctrl-C inside of it leaves gradients off. What restores them here is C.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        is_enabled = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except BaseException:
            torch._C._set_grad_enabled(is_enabled)
            raise

    return call


def raise_as_it_came(error: BaseException) -> NoReturn:
    """Raise an exception of another thread; what is being handled here (our own signal) is not its context."""
    context = error.__context__
    try:
        raise error
    finally:
        BaseException.__setattr__(error, "__context__", context)  # even of one that calls itself frozen


logger = logging.getLogger("roundpipe")
_UNWIND_S = 1.0  # how long a failed call waits for workers that are inside user code
_PUT_RIGHT = (
    "weights, buffers and optimizer state are as before this call; gradients gathered since the last optimizer step "
    "were dropped"
)


class Recovery:
    def __init__(self, stepper: Stepper, monitor: Monitor) -> None:
        self._stepper = stepper
        self._monitor = monitor
        self._runs: list[Run] = []
        self.num_runs = 0  # watched so far
        self._written: dict[int, list[tuple[BufferRecord, torch.Tensor | None]]] = {}
        self._drop_generation: int | None = None
        self._failed_by_themselves: set[int] = set()  # numbers of runs; others were only dragged along
        self._dragging = False
        self._proven: set[Hashable] = set()  # signatures of runs that have come through

    def watch(self, run: Run) -> None:
        with self._monitor:
            self.num_runs += 1
            self._runs.append(run)
            for other in self._runs:
                if other.failed and other.trains:  # since the caller looked last: nothing has been put right yet
                    self._drag_along(other)

    def run_failed(self, run: Run) -> None:
        """Called under the monitor by the first thread that meets the failure."""
        if not run.trains or self._dragging or run not in self._runs:
            return
        self._failed_by_themselves.add(run.number)
        self._stepper.abandon(run.generation)
        self._drag_along(run)

    def _drag_along(self, bad: Run) -> None:
        """Later runs stand on sand, and what others of this generation gather is lost: end them."""
        assert bad.failure is not None
        self._dragging = True
        try:
            for other in self._runs:
                if other is not bad and other.trains and other.generation >= bad.generation:
                    other.fail(bad.failure)
        finally:
            self._dragging = False

    def wait_for_runs(self) -> None:
        for run in list(self._runs):
            run.wait_until_finished()

    def take_finished(self, store: LayerStore) -> list[Run]:
        with self._monitor:
            finished = [
                run for run in self._runs if run.store is store and run.finished and run.has_returned and not run.failed
            ]
            self._runs = [run for run in self._runs if run not in finished]
        for run in finished:
            self._written.pop(run.number, None)
            if run.signature is not None:
                self._proven.add((run.store, run.signature))
        return finished

    def all_are_proven(self) -> bool:
        """Whether every run on its way is like one that has come through before.

        An optimizer that works while such a run goes on can hardly be left half way by its failure.
        """
        with self._monitor:
            return all(run.finished or (run.store, run.signature) in self._proven for run in self._runs)

    def is_proven(self, run: Run) -> bool:
        """Whether a run like it has come through before."""
        return (run.store, run.signature) in self._proven

    def is_gathering(self, generation: int) -> bool:
        """Whether gradients of that generation are on their way."""
        with self._monitor:
            return any(run.trains and run.generation == generation for run in self._runs)

    def forget_finished(self) -> None:
        self._runs.clear()
        self._written.clear()

    def cancel_all(self, error: BaseException) -> None:
        for run in list(self._runs):
            if not run.finished:
                run.fail(error)

    # Buffers.

    def commit_buffers(self, run: Run) -> None:
        """The forward part is done: what layers wrote into buffers becomes the host's, until the run turns out bad."""
        undo = self._written.setdefault(run.number, [])
        for layer_id, values in run.buffer_results.items():
            values.event.wait()
            for record, value in zip(run.store.layers[layer_id].buffers, values.tensors, strict=True):
                undo.append((record, record.frozen()))
                record.write(value)

    def undoing_buffers(self, stores: Sequence[LayerStore], function: Callable[[], Any]) -> Any:
        """Call the function; if it raises, roll back what it has written into buffers."""
        records = [record for store in stores for layer in store.layers for record in layer.buffers]
        before = [record.frozen() for record in records]
        try:
            return function()
        except BaseException:
            for record, value in zip(records, before, strict=True):
                if record.frozen() is not value:
                    record.write(value)
            raise

    # Failures.

    def settle_interrupted(self) -> None:
        """Put right what calls have left that were interrupted so that they could not do it themselves.

        No call is in progress. The caller has got an exception from them: nothing is raised again.
        """
        if all(run.has_returned for run in self._runs):
            return
        for run in [run for run in self._runs if not run.has_returned]:
            run.fail(run.failure or RuntimeError("the call was interrupted"))
        with self._monitor:
            causes = [run.failure for run in self._runs if not run.has_returned]
            failed = [run for run in self._runs if any(run.failure is cause for cause in causes)]
        self._clean_up(failed)

    def drop_gradients(self, generation: int) -> None:
        """Forget what calls of this generation have gathered; what an interrupt leaves the next call drops."""
        self._drop_generation = generation
        self._drop_overdue_gradients()

    def raise_failures(self, remark: str | None, own: BaseException | None = None, run: Run | None = None) -> None:
        """Raise what went wrong since the last look, once, after putting everything right.

        `own`: what the caller itself met, raised even if it is not the failure of any run. `run`: the one that the
        caller carries out; others whose calls have not returned are theirs to settle.
        """
        self._drop_overdue_gradients()
        with self._monitor:
            failed = [one for one in self._runs if one.failed and (one.has_returned or run is not None)]
        errors = [run.failure for run in failed if run.failure is not None] + ([own] if own is not None else [])
        if errors:
            lost_gradients = self._clean_up(failed)
            # An interrupt goes first; it must not be taken for a failure that one can go on from.
            first = next((error for error in errors if not isinstance(error, Exception)), errors[0])
            for other in {id(error): error for error in errors if error is not first}.values():
                logger.error("this failed too", exc_info=other)
            if lost_gradients:
                half_done, self._stepper.half_done = self._stepper.half_done, None
                add_note(first, half_done or _PUT_RIGHT)
            if remark:
                add_note(first, remark)
            raise_as_it_came(first)
        with self._monitor:
            of_steps, self._stepper.errors = self._stepper.errors, []
        for other in of_steps[1:]:
            logger.error("another optimizer step failed too", exc_info=other)
        if of_steps:
            raise_as_it_came(of_steps[0])

    def log_failures(self, when: str) -> None:
        """For failures that nobody will ask for any more."""
        failures = [run.failure for run in self._runs if run.has_returned and run.failure is not None]
        errors = failures + self._stepper.errors
        for error in {id(error): error for error in errors if not isinstance(error, ClosedError)}.values():
            logger.error("a failure in the background came to light %s", when, exc_info=error)

    def _clean_up(self, failed: Sequence[Run]) -> bool:
        """Put right what failed runs have done; returns whether gradients were lost. Takes at most `_UNWIND_S`.

        A run is forgotten last: what is interrupted before is repeated by the next call.
        """
        deadline = time.monotonic() + _UNWIND_S
        for run in failed:
            run.wait_until_finished(max(deadline - time.monotonic(), 0.0))
        self._undo_writes(failed)
        trained = [run for run in failed if run.trains]
        if trained:
            self._drop_generation = min(run.generation for run in trained)
        with self._monitor:  # one that has failed meanwhile stays for the next call to meet
            self._runs = [run for run in self._runs if run not in failed]
        for run in failed:
            self._written.pop(run.number, None)
        self._failed_by_themselves -= {run.number for run in failed}
        if trained:
            self._drop_overdue_gradients(max(deadline - time.monotonic(), 0.0))
        return bool(trained)

    def _undo_writes(self, failed: Sequence[Run]) -> None:
        """The youngest first. A call before the one that failed was only dragged along: what it wrote stays."""
        first_bad = min(self._failed_by_themselves & {run.number for run in failed}, default=0)
        for run in reversed(failed):
            if run.number >= first_bad or not run.trains:
                for record, before in reversed(self._written.get(run.number, [])):
                    record.write(before)

    def _drop_overdue_gradients(self, timeout_s: float | None = None) -> None:
        """Steps issued before the failed call still take theirs first; what is left then belongs to failed calls."""
        generation = self._drop_generation
        if generation is None:
            return
        stores = self._stepper.stores
        with self._monitor:
            taken = self._monitor.wait_until(
                lambda: all(slot.open_generation >= generation for store in stores for slot in store.slots),
                "earlier optimizer steps to take their gradients",
                timeout_s,
            )
        if taken:
            self._stepper.wait_until_abandoned_are_gone(timeout_s)
            for store in stores:
                store.gradients.drop()
            self._stepper.losses_are_dropped()
            self._drop_generation = None
