"""Keeps watch over the runs of one model: what failed, what must be undone, what is finished.

Owned by api.engine. After a failure weights, buffers and optimizer state are as before the failed call, gradients
gathered since the last step are gone, and the next call works.
"""

from __future__ import annotations

import logging

import torch

from roundpipe.optim.stepper import Stepper
from roundpipe.runtime.run import Run
from roundpipe.store import BufferRecord, LayerStore

logger = logging.getLogger("roundpipe")
_UNWIND_S = 1.0  # how long a failed call waits for workers that are inside user code


class Recovery:
    def __init__(self, store: LayerStore, stepper: Stepper) -> None:
        self._store = store
        self._stepper = stepper
        self._monitor = store.monitor
        self._runs: list[Run] = []
        self._written: dict[int, list[tuple[BufferRecord, torch.Tensor | None]]] = {}
        self._drop_generation: int | None = None

    def watch(self, run: Run) -> None:
        with self._monitor:
            self._runs.append(run)

    def run_failed(self, run: Run) -> None:
        """Called under the monitor by the first thread that meets the failure. Later runs stand on sand: end them."""
        if not run.trains:
            return
        self._stepper.abandon(run.generation)
        for other in self._runs:
            if other.trains and other.generation >= run.generation and run.failure is not None:
                other.fail(run.failure)

    def wait_for_runs(self) -> None:
        for run in list(self._runs):
            run.wait_until_finished()

    def take_finished(self) -> list[Run]:
        with self._monitor:
            finished = [run for run in self._runs if run.finished and not run.failed]
            self._runs = [run for run in self._runs if run not in finished]
        for run in finished:
            self._written.pop(run.number, None)
        return finished

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
            for record, value in zip(self._store.layers[layer_id].buffers, values.tensors, strict=True):
                undo.append((record, record.frozen()))
                record.write(value)

    # Failures.

    def raise_failures(self, remark: str | None) -> None:
        """Raise what went wrong since the last look, once, after putting everything right."""
        self._drop_overdue_gradients()
        failed = [run for run in self._runs if run.failed]
        if failed:
            self._clean_up(failed)
            error = failed[0].failure
            assert error is not None
            if remark:
                error.add_note(remark)
            raise error
        if self._stepper.errors:
            first, *others = self._stepper.errors
            self._stepper.errors.clear()
            for other in others:
                logger.error("another optimizer step failed too", exc_info=other)
            raise first

    def _clean_up(self, failed: list[Run]) -> None:
        for run in failed:
            run.wait_until_finished(_UNWIND_S)
            for record, before in reversed(self._written.pop(run.number, [])):
                record.write(before)
        self._runs = [run for run in self._runs if not run.failed]
        trained = [run for run in failed if run.trains]
        if trained:
            self._drop_generation = min(run.generation for run in trained)
            self._drop_overdue_gradients(_UNWIND_S)
            assert failed[0].failure is not None
            failed[0].failure.add_note(
                "weights, buffers and optimizer state are as before this call; gradients gathered since the last "
                "optimizer step were dropped"
            )

    def _drop_overdue_gradients(self, timeout_s: float | None = None) -> None:
        """Steps issued before the failed call still take theirs first; what is left then belongs to failed calls."""
        generation = self._drop_generation
        if generation is None:
            return
        with self._monitor:
            taken = self._monitor.wait_until(
                lambda: all(slot.open_generation >= generation for slot in self._store.slots),
                "earlier optimizer steps to take their gradients",
                timeout_s,
            )
        if taken:
            self._stepper.wait_until_abandoned_are_gone(timeout_s)
            self._store.gradients.drop()
            self._drop_generation = None
