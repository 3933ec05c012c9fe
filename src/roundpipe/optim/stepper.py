"""The optimizer thread: runs step functions on the optimizer's copies and publishes what they made.

Owned by api for one model, or for several that are stepped together. Knows the stores' gates, never devices or
schedules.

[Note: exactly one step old]
Step n consumes generation n - 1 and makes version n. Its job runs step_fn at once: gradients are waited for where they
are used, layer by layer where the optimizer can, and each layer's new weights are written when the uploads that read
what they replace have run. After an asynchronous step n calls read version n - 1 and after a synchronous one version n,
always: it is the number of the version that is asked for, not the time. While version n is written calls may still
have to read n - 1, so asynchronous steps keep both (LayerWeights). Where the host itself reads the parameters there is
one memory only, and job n + 1 makes the weights of version n from the optimizer's copies before it does anything else.
A step that fails makes a void version: it is numbered, and is what the one before was.

A synchronous step whose body runs on the caller's thread: between two calls of ours the user's loop has its turn.

The optimizer thread does everything that moves weights and gradients between the store and the optimizer's copies, as
in any other step. Its step function is `HandedStep.wait_for_caller`: it tells the caller that all gradients are there
and waits until the caller says how the step ended. So a Ctrl-C in the caller never leaves the store half way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from roundpipe.context import Iteration, OptimizerCtx, within_iteration
from roundpipe.errors import add_note
from roundpipe.monitor import THREAD_PREFIX, Monitor, end_threads, shielded, start_thread
from roundpipe.store import LayerStore, LayerUpdate, StepAbandoned

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


logger = logging.getLogger("roundpipe")
_JOIN_S = 5.0


class StepJob:
    def __init__(
        self,
        number: int,
        step_fn: Callable[[], object],
        is_async: bool,
        may_overlap: bool,
        iteration: Iteration,
        handed: HandedStep | None = None,
    ) -> None:
        self.number = number
        self.step_fn = step_fn
        self.is_async = is_async
        self.may_overlap = may_overlap  # with calls whose gradients it takes
        self.iteration = iteration
        self.handed = handed
        self.num_threads = torch.get_num_threads()  # sums on the CPU depend on it
        self.publishes = not is_async
        self.visible_version = number - 1 if is_async else number  # what calls read after it was issued
        self.next_iteration = Iteration()  # of calls after it was issued
        self.abandoned = False  # a call it depends on failed; step_fn will not run
        self.begun = False  # step_fn runs or has run
        self.done = False
        self.is_awaited = (
            handed is not None
        )  # by a caller, who raises the error; any other error is raised by the next call
        self.error: BaseException | None = None

    @classmethod
    def before_the_first(cls) -> StepJob:
        job = cls(0, _nothing, False, False, Iteration())
        job.done = True
        return job

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class Stepper:
    def __init__(self, store: LayerStore) -> None:
        self.stores = [store]
        self._monitor = store.monitor
        self.errors: list[BaseException] = []  # of steps that nobody awaits, to be raised by the next call
        # In the order of issue. The last one stays when it is done: all that `issue` changes is derived from it.
        self._jobs: deque[StepJob] = deque([StepJob.before_the_first()])
        self._void_versions: set[int] = set()
        self._lost_since: int | None = None  # the first generation whose gradients are lost and not yet dropped
        self.half_done: str | None = None  # what an abandoned step has left, for whoever reports the failure
        self._thread: threading.Thread | None = None
        self._closing = False

    # The caller's side.

    def add(self, store: LayerStore) -> None:
        """Step `store` together with the others; only before the first step."""
        assert not self.steps_issued
        assert store.monitor is self._monitor
        self.stores.append(store)

    @property
    def steps_issued(self) -> int:
        return self._jobs[-1].number

    @property
    def visible_version(self) -> int:
        """What calls read from now on."""
        return self._jobs[-1].visible_version

    @property
    def iteration(self) -> Iteration:
        """The iteration of calls from now on."""
        return self._jobs[-1].next_iteration

    @property
    def generation(self) -> int:
        """The generation calls issued now belong to."""
        return self.steps_issued

    def issue(
        self, step_fn: Callable[[], object], is_async: bool, may_overlap: bool, handed: HandedStep | None = None
    ) -> StepJob:
        """Hand a step to the optimizer thread.

        The append alone makes it a step: an interrupt before it leaves nothing of the step, a later one all of it.
        """
        with self._monitor:
            self._start()
            job = StepJob(self.steps_issued + 1, step_fn, is_async, may_overlap, self.iteration, handed)
            job.abandoned = self._lost_since is not None and job.number - 1 >= self._lost_since
            self._jobs.append(job)
            self._monitor.changed()
        return job

    def hand_over(self, handed: HandedStep) -> None:
        """Issue a step that the caller carries out; it opens when all gradients have landed."""
        self.issue(handed.wait_for_caller, False, False, handed)

    def was_issued(self, handed: HandedStep) -> bool:
        return handed.is_over or any(job.handed is handed for job in list(self._jobs))

    def wait_for(self, job: StepJob) -> None:
        """Its error is the caller's to raise from now on."""
        with self._monitor:
            job.is_awaited = True
            self._monitor.wait_until(lambda: job.done, f"optimizer step {job.number}")
            self.errors = [error for error in self.errors if error is not job.error]

    def forsake(self, job: StepJob) -> None:
        """The caller stopped waiting for a synchronous step: its error is the next call's to raise."""
        with self._monitor:
            job.is_awaited = False
            if job.error is not None and job.error not in self.errors:
                self.errors.append(job.error)

    def wait_until_idle(self) -> None:
        with self._monitor:
            self._monitor.wait_until(lambda: self._pending() is None, "the optimizer's pending steps")

    def publish_latest(self) -> None:
        """Make the newest update what calls and the user see. Only while idle."""
        self._publish_late(self.steps_issued)
        self._jobs[-1].visible_version = self.steps_issued
        for store in self.stores:
            store.weights.show(self.visible_version)

    def show_visible(self) -> None:
        """Let the user's parameters be what calls read."""
        for store in self.stores:
            if not store.is_read_on_host:  # there that is so by itself, once it is published
                self.wait_until_idle()
            store.weights.show(self.visible_version)

    def abandon(self, generation: int) -> None:
        """Gradients of `generation` and later are lost: steps that would consume them must not run.

        Nor may one that is just being issued, by a caller who has not met the failure yet.
        """
        with self._monitor:
            self._lost_since = generation if self._lost_since is None else min(generation, self._lost_since)
            for job in self._jobs:
                if not job.done and job.number - 1 >= generation:
                    job.abandoned = True
            self._monitor.changed()

    def losses_are_dropped(self) -> None:
        """What is gathered from now on is whole again."""
        with self._monitor:
            self._lost_since = None

    def wait_until_abandoned_are_gone(self, timeout_s: float | None) -> None:
        with self._monitor:
            self._monitor.wait_until(
                lambda: not any(job.abandoned and not job.done for job in self._jobs),
                "abandoned optimizer steps",
                timeout_s,
            )

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        with self._monitor:
            self._closing = True
            for job in self._jobs:
                job.abandoned = job.abandoned or not job.begun
                if job.handed is not None:
                    job.handed.abandon()
            self._monitor.changed()
        # A finalizer may come at any point of any thread; one that holds the monitor would keep ours from ending.
        if self._thread is not None and not self._monitor.is_held():
            end_threads([self._thread], _JOIN_S)

    # The thread's side.

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=f"{THREAD_PREFIX}optimizer", daemon=True)
            self._thread = thread
            try:
                start_thread(thread)
            except BaseException:
                self._thread = None  # one that has come up all the same sees this and ends
                raise

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._carry_out(job)
            except BaseException as error:
                job.error = error
            finally:
                self._finish(job)
                del job

    def _next(self) -> StepJob | None:
        with self._monitor:
            self._monitor.idle_until(
                lambda: self._pending() is not None or self._closing or not self.is_current_thread()
            )
            return self._pending() if self.is_current_thread() else None

    def _pending(self) -> StepJob | None:
        """The first step that is not done; it may be running."""
        return next((job for job in self._jobs if not job.done), None)

    def _finish(self, job: StepJob) -> None:
        # What the user's function holds is not ours to keep, and may be a model: let go of it outside the monitor.
        step_fn, job.step_fn = job.step_fn, _nothing
        with self._monitor:
            if job.error is not None and not job.is_awaited:
                self.errors.append(job.error)
                if job.is_async:
                    job.error = None  # the job may be kept for long
            job.done = True
            if job.handed is not None:
                job.handed.finished(job.error)
            job.iteration.step_finished.set()
            while len(self._jobs) > 1 and self._jobs[0].done:
                self._jobs.popleft()
            self._monitor.changed()
        del step_fn

    def _carry_out(self, job: StepJob) -> None:
        updates = self._updates(job)
        try:
            self._for_all(updates, LayerUpdate.prepare)
            self._publish_late(job.number - 1)
            if not job.may_overlap:
                for update in updates:
                    update.wait_for_gradients()
            if not self._may_begin(job):
                raise StepAbandoned
            self._run_step_fn(job)
            self._for_all(updates, LayerUpdate.end_step)
            self._for_all(updates, LayerUpdate.publish)
        except BaseException as error:
            self._void_versions.add(job.number)
            replaced = sum(update.has_replaced_weights for update in updates)
            self._for_all(updates, LayerUpdate.revoke)
            if isinstance(error, StepAbandoned):
                self._note_half_done(job, updates)
                return
            what = "running step_fn of" if job.begun else "preparing"
            add_note(
                error,
                f"while {what} optimizer step {job.number} on the optimizer thread; {_published(replaced)}, and its "
                "gradients were dropped",
            )
            raise
        finally:
            if job.publishes:
                self._publish_late(job.number)

    def _note_half_done(self, job: StepJob, updates: Sequence[LayerUpdate]) -> None:
        count = sum(bool(update.updated) for update in updates)
        if count:
            self.half_done = (
                f"optimizer step {job.number} was under way: {count} of {len(updates)} layers were updated with this "
                "call's gradients and stay so, the others, and all buffers, are as before; gradients gathered since "
                "the last optimizer step were dropped. Load a checkpoint to be sure of what you train"
            )

    def _updates(self, job: StepJob) -> list[LayerUpdate]:
        """Of all layers, in the order in which their gradients land."""
        layers = enumerate(reversed(self._all_layers()))
        return [
            LayerUpdate(
                store,
                layer_id,
                order,
                step=job.number,
                is_async=not job.publishes,
                abandoned=lambda: job.abandoned,
                caller=job.handed,
            )
            for order, (store, layer_id) in layers
        ]

    def _may_begin(self, job: StepJob) -> bool:
        with self._monitor:
            job.begun = not job.abandoned
            return job.begun

    def _run_step_fn(self, job: StepJob) -> None:
        if torch.get_num_threads() != job.num_threads:
            torch.set_num_threads(job.num_threads)
        with OptimizerCtx(), within_iteration(job.iteration):
            job.step_fn()

    def _for_all(self, updates: Sequence[LayerUpdate], do: Callable[[LayerUpdate], None]) -> None:
        """Whatever goes wrong with one layer, all of them pass to the next generation and version: calls need it."""
        errors: list[BaseException] = []
        for update in updates:
            with _collecting(errors):
                do(update)
        if errors:
            raise errors[0]

    def _publish_late(self, version: int) -> None:
        """Where this could not be done by the step that made it."""
        copy = version not in self._void_versions
        for store, layer_id in self._all_layers():
            if store.slots[layer_id].newest_version < version:
                shielded(functools.partial(store.weights.publish, layer_id, version, copy=copy))
        self._void_versions.discard(version - 1)

    def _all_layers(self) -> list[tuple[LayerStore, int]]:
        return [(store, layer.layer_id) for store in self.stores for layer in store.layers]


def _published(num_replaced: int) -> str:
    if not num_replaced:
        return "nothing of this step is published to the model"
    return f"{num_replaced} layers that were updated in place are published to the model, the others are not"


@contextlib.contextmanager
def _collecting(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        errors.append(error)


def _nothing() -> None:
    return
