"""Watches the runs of models that are stepped together and restores their state when a run fails.

After a failure, weights, buffers and optimizer state are as before the failed call (exception: Stepper.half_done), the
gradients gathered since the last step are dropped, and the next call works. Knows runs and stores, never a device.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from roundpipe.errors import ClosedError, add_note
from roundpipe.monitor import Monitor
from roundpipe.optim.stepper import Stepper
from roundpipe.runtime.run import Run
from roundpipe.store import BufferRecord, LayerStore

_P = ParamSpec("_P")
_T = TypeVar("_T")

logger = logging.getLogger("roundpipe")
IN_BACKGROUND = "it happened in the background after the call that caused it had returned"
_UNWIND_S = 1.0  # a failed call waits at most this long for workers that still run user code
_STATE_RESTORED = (
    "weights, buffers and optimizer state are as before this call; gradients gathered since the last optimizer step "
    "were dropped"
)


def restoring_grad_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Restore the grad mode of the calling thread if the function raises.

    `torch.no_grad()` restores the grad mode in Python code, so a Ctrl-C inside of it can leave gradients disabled. The
    setter used here is C code, which a signal handler cannot interrupt.
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


class Recovery:
    """Keeps the runs of one group until they have finished and were evaluated, and undoes the runs that fail."""

    def __init__(self, stepper: Stepper, monitor: Monitor, on_out_of_memory: Callable[[], None]) -> None:
        """`on_out_of_memory`: called before an out-of-memory error that happened in the background is raised."""
        self._stepper = stepper
        self._on_out_of_memory = on_out_of_memory
        self._monitor = monitor
        self._runs: list[Run] = []
        self.num_runs = 0  # number of runs watched so far
        # By run number: the buffers that the run wrote, with their earlier values.
        self._written: dict[int, list[tuple[BufferRecord, torch.Tensor | None]]] = {}
        # Gradients of this and later generations must be dropped before the next call begins.
        self._drop_generation: int | None = None
        # Numbers of failed runs, without runs that were only cancelled because another run had failed.
        self._failed_on_their_own: set[int] = set()
        self._is_cancelling = False
        self._proven: set[Hashable] = set()  # (store, signature) of runs that finished without a failure
        stepper.fail_readers = self._fail_readers

    # Watching runs and cancelling those that depend on a failed run.

    def watch(self, run: Run) -> None:
        """Add a run that is about to start. Cancels it if an earlier run has failed and is not cleaned up yet."""
        with self._monitor:
            self.num_runs += 1
            self._runs.append(run)
            for other in self._runs:
                if other.failed and other.trains:
                    self._cancel_dependent(other)
            lost = self._stepper.lost_version
            if lost is not None and run.version >= lost[0]:
                self._fail_readers(*lost)

    def _fail_readers(self, version: int, error: BaseException | None) -> None:
        """Fail the runs that read weights of `version` or later: its step has failed. Called with the monitor held.

        error: of the step; None if the step was abandoned because of a failed call, whose failure is the cause.
        """
        readers = [run for run in self._runs if run.version >= version and (run.trains or not run.finished)]
        cause = error or next((run.failure for run in self._runs if run.failed and run.generation < version), None)
        cause = cause or ClosedError("the model was closed before an optimizer step had ended")
        if error is not None:  # else the failed call drops its gradients and all later ones
            self._stepper.abandon(version)
            self._drop_generation = version
        self._is_cancelling = True
        try:
            for run in readers:
                run.fail(cause)
        finally:
            self._is_cancelling = False

    def run_failed(self, run: Run) -> None:
        """Cancel the steps and runs that depend on a failed run. Called on any thread, with the monitor held."""
        if not run.trains or self._is_cancelling or run not in self._runs:
            return
        self._failed_on_their_own.add(run.number)
        self._stepper.reason_of_loss = f"{run.failure!r} in a call before the step"
        self._stepper.abandon(run.generation)
        self._cancel_dependent(run)

    def _cancel_dependent(self, bad: Run) -> None:
        """Cancel runs of this and later generations: their gradients or weights depend on the failed run."""
        assert bad.failure is not None
        self._is_cancelling = True
        try:
            for other in self._runs:
                gathers_with_bad = other.trains and other.generation >= bad.generation
                # Version g + 1 is made from the gradients of generation g.
                reads_result = other.version > bad.generation and not other.finished
                if other is not bad and (gathers_with_bad or reads_result):
                    other.fail(bad.failure)
        finally:
            self._is_cancelling = False

    def wait_for_runs(self, before_generation: int | None = None) -> None:
        """Wait until all runs (of earlier generations) have finished or failed, without raising failures."""
        for run in list(self._runs):
            if before_generation is None or run.generation < before_generation:
                run.wait_until_finished()

    def take_finished(self, store: LayerStore) -> list[Run]:
        """Return the runs of one model that finished without a failure. Stops watching them; drops their undo data."""
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

    def is_proven(self, run: Run) -> bool:
        """Whether a run of the same model with the same signature has finished without a failure."""
        return (run.store, run.signature) in self._proven

    def all_are_proven(self) -> bool:
        """Whether every unfinished run is proven: see `is_proven`.

        If so, an optimizer may update layers whose gradients are complete while a run is still in progress: a proven
        run is unlikely to fail and leave the update half done.
        """
        with self._monitor:
            return all(run.finished or self.is_proven(run) for run in self._runs)

    def has_gradients(self) -> bool:
        """Whether gradients were gathered since the last step, or may still arrive."""
        generation = self._stepper.last_job.number
        with self._monitor:
            is_gathering = any(run.trains and run.generation == generation for run in self._runs)
        return is_gathering or any(store.has_gradients(generation) for store in self._stepper.stores)

    def cancel_all(self, error: BaseException) -> None:
        """Fail all unfinished runs with `error`."""
        for run in list(self._runs):
            if not run.finished:
                run.fail(error)

    def forget_all(self) -> None:
        """Drop all references to runs and buffers: the models are closed."""
        self._runs.clear()
        self._written.clear()

    # Writing buffers to host memory, and undoing these writes.

    def commit_buffers(self, run: Run) -> None:
        """Write the buffers that the run's layers changed to host memory, and remember the earlier values."""
        undo = self._written.setdefault(run.number, [])
        for layer_id, values in run.buffer_results.items():
            values.event.wait()
            for record, value in zip(run.store.layers[layer_id].buffers, values.tensors, strict=True):
                undo.append((record, record.frozen()))
                record.write(value)

    def undoing_buffers(self, stores: Sequence[LayerStore], function: Callable[[], Any]) -> Any:
        """Return `function()`. Roll back buffer writes if it raises."""
        records = [record for store in stores for layer in store.layers for record in layer.buffers]
        before = [record.frozen() for record in records]
        try:
            return function()
        except BaseException:
            for record, value in zip(records, before, strict=True):
                if record.frozen() is not value:
                    record.write(value)
            raise

    # Cleaning up after failures and raising them.

    def settle_interrupted(self) -> None:
        """Clean up after calls that a Ctrl-C ended before they could clean up themselves.

        Must be called while no call is in progress. Raises nothing: those calls have raised their exceptions already.
        """
        interrupted = [run for run in self._runs if not run.has_returned]
        if not interrupted:
            return
        for run in interrupted:
            run.fail(run.failure or RuntimeError("the call was interrupted"))
        with self._monitor:
            causes = [run.failure for run in self._runs if not run.has_returned]
            failed = [run for run in self._runs if any(run.failure is cause for cause in causes)]
        self._clean_up(failed)

    def drop_gradients(self, generation: int) -> None:
        """Drop the gradients that calls of this generation have gathered.

        If this is interrupted, the next call completes it.
        """
        self._drop_generation = generation
        self._drop_overdue_gradients()

    def drop_generation(self, error: BaseException) -> None:
        """Cancel the runs since the last step with `error` and drop their gradients: other machines lack their part."""
        generation = self._stepper.generation
        with self._monitor:
            runs = [run for run in self._runs if run.trains and run.generation >= generation and not run.finished]
        for run in runs:
            run.fail(error)
        if runs:
            self._clean_up(runs)
        self._drop_generation = generation
        self._drop_overdue_gradients(_UNWIND_S)

    def raise_failures(self, remark: str | None, own: BaseException | None = None, run: Run | None = None) -> None:
        """If there are new failures, restore the state, raise one of them and log the others. Each is reported once.

        remark: a note for the exception.
        own: the caller's own exception, which is raised even if no run has failed with it.
        run: the run of the calling thread. If given, failures of calls that have not returned yet are raised as well;
            if None, those calls raise them.
        """
        if self._drop_generation is not None:
            self._drop_overdue_gradients()
        with self._monitor:
            failed = [one for one in self._runs if one.failed and (one.has_returned or run is not None)]
        errors = [one.failure for one in failed if one.failure is not None] + ([own] if own is not None else [])
        if errors:
            lost_gradients = self._clean_up(failed)
            # KeyboardInterrupt and SystemExit go first: a handler of ordinary failures must not hide them.
            first = next((error for error in errors if not isinstance(error, Exception)), errors[0])
            for other in {id(error): error for error in errors if error is not first}.values():
                logger.error("a second failure, beside the one that is raised", exc_info=other)
            if lost_gradients and not any(first is error for error in self._stepper.errors):
                half_done, self._stepper.half_done = self._stepper.half_done, None
                add_note(first, half_done or _STATE_RESTORED)
            self._stepper.was_raised(first)
            if remark:
                add_note(first, remark)
            if run is None and isinstance(first, torch.OutOfMemoryError):
                self._on_out_of_memory()
            _raise_unchanged(first)
        has_errors = self._stepper.errors or self._stepper.lost_version is not None
        of_steps = self._stepper.take_errors() if has_errors else []
        if of_steps:
            for other in of_steps[1:]:
                logger.error("another step or checkpoint failed, beside the one whose error is raised", exc_info=other)
            if run is None and isinstance(of_steps[0], torch.OutOfMemoryError):
                self._on_out_of_memory()
            _raise_unchanged(of_steps[0])

    def log_failures(self, when: str) -> None:
        """Log the failures that no later call can raise, because the models are closing. `when`: ends the message."""
        failures = [run.failure for run in self._runs if run.has_returned and run.failure is not None]
        errors = failures + self._stepper.errors
        for error in {id(error): error for error in errors if not isinstance(error, ClosedError)}.values():
            logger.error("a failure in the background came to light %s", when, exc_info=error)

    def _clean_up(self, failed: Sequence[Run]) -> bool:
        """Undo what failed runs have done; returns whether gradients were lost. Takes at most `_UNWIND_S`.

        Failed runs stay in `_runs` until their writes are undone. If an interrupt comes before, the next call repeats
        the clean-up.
        """
        deadline = time.monotonic() + _UNWIND_S
        for run in failed:
            run.wait_until_finished(max(deadline - time.monotonic(), 0.0))
        self._undo_writes(failed)
        trained = [run for run in failed if run.trains]
        if trained:
            self._drop_generation = min(run.generation for run in trained)
        with self._monitor:  # runs that failed in the meantime stay in the list for the next call
            self._runs = [run for run in self._runs if run not in failed]
        for run in failed:
            self._written.pop(run.number, None)
        self._failed_on_their_own -= {run.number for run in failed}
        if trained:
            self._drop_overdue_gradients(max(deadline - time.monotonic(), 0.0))
        return bool(trained)

    def _undo_writes(self, failed: Sequence[Run]) -> None:
        """Restore the buffers that failed runs have written, the latest write first.

        Training runs that are older than the first run that failed on its own were only cancelled: their writes stay.
        """
        first_bad = min(self._failed_on_their_own & {run.number for run in failed}, default=0)
        for run in reversed(failed):
            if run.number >= first_bad or not run.trains:
                for record, before in reversed(self._written.get(run.number, [])):
                    record.write(before)

    def _drop_overdue_gradients(self, timeout_s: float | None = None) -> None:
        """Drop gradients of `_drop_generation` and later, after earlier steps have taken their gradients.

        Steps that were issued before the failed call still run. The gradients that they leave belong to failed calls.
        After a timeout `_drop_generation` stays set, and the next call continues here.
        """
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
            with self._monitor:  # a step may fail now and want later gradients to be dropped
                self._stepper.losses_are_dropped()
                if self._drop_generation == generation:
                    self._drop_generation = None


def _raise_unchanged(error: BaseException) -> NoReturn:
    """Raise an exception of another thread and keep its `__context__`, which a plain `raise` would replace."""
    context = error.__context__
    try:
        raise error
    finally:
        BaseException.__setattr__(error, "__context__", context)  # also works for frozen exception classes
