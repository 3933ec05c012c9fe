"""The optimizer thread: runs step functions on the masters and publishes the new weights.

One Stepper serves one model, or several that are stepped together. Knows stores, never devices or schedules.

[Note: exactly one step old]
Step n consumes the gradients of generation n - 1 and makes the weights of version n. Its job calls step_fn without
waiting for all gradients: code that uses a gradient waits for it, layer by layer if the optimizer can do that. The new
weights of a layer are written when the uploads that read the same memory have run. Calls after an asynchronous step n
read version n - 1, calls after a synchronous step n read version n. So the version depends only on the order of calls
and steps, never on timing. While version n is written, calls may still have to read version n - 1, so asynchronous
steps keep both in two buffers (LayerWeights). If the host itself computes with the user's parameters, there is only one
buffer, and job n + 1 writes version n from the masters before it calls its step_fn. A step that fails makes a
void version: a version number with the weights of the version before.

[Note: handed steps]
`optimizer.step()` in the user's own loop is a synchronous step whose body runs on the user's thread, the caller. As in
any other step, the optimizer thread moves weights and gradients between store and copies. The step function that it
runs is `HandedStep.wait_for_caller`, which tells the caller that all gradients have landed and waits until the caller
ends the step. So a Ctrl-C on the user's thread never leaves the store half updated.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from roundpipe.context import Iteration, within_step
from roundpipe.errors import UsageError, add_note
from roundpipe.monitor import THREAD_PREFIX, Monitor, end_threads, shielded, start_thread
from roundpipe.stats import StepTime
from roundpipe.store import LayerStore
from roundpipe.store.surroundings import StepExchange
from roundpipe.store.update import LayerUpdate, StepAbandoned, StepMode

T = TypeVar("T")


class MachineSteps(StepExchange, Protocol):
    """The other machines of a process group, which carry out every step together with this one."""

    def begin(self, step: int) -> None:
        """Begin a step."""

    def end(self) -> None:
        """The step is over: exchanges from now on are outside of steps."""

    def meet(self, what: str) -> None:
        """Wait until all machines are at the same place of the step; raises MachineError if one has failed."""

    def failed(self, reason: str, updates: Sequence[LayerUpdate]) -> None:
        """End a step that has failed on this or on another machine, so that all machines have equal weights."""


class HandedStep:
    """A step whose body runs on the thread that made this object; see [Note: handed steps]."""

    def __init__(self, monitor: Monitor, *, fails_with_work: bool = False) -> None:
        """`fails_with_work`: the step fails as soon as work of the caller raises, so that other machines learn it."""
        self.thread = threading.get_ident()
        self._fails_with_work = fails_with_work
        self.error: BaseException | None = None
        self.is_open = False  # whether the gradients have landed and the caller may run the body
        self.is_over = False  # whether the optimizer thread has finished the step
        self._monitor = monitor
        self._has_ended = False  # whether the caller has run the body
        self._is_abandoned = False  # whether the step must end because the model is being closed
        # A function that the optimizer thread runs for the caller; returns its error, if any.
        self._work: Callable[[], BaseException | None] | None = None

    # Called on the caller's thread.

    def wait_until_open(self) -> bool:
        """Block until the caller may run the body. Returns False if the step has ended because a call failed."""
        with self._monitor:
            self._monitor.wait_until(lambda: self.is_open or self.is_over, "gradients of the pending calls")
            return self.is_open and not self.is_over

    def end(self) -> None:
        """Report that the body has ended, and block until the optimizer thread has finished the step. Repeatable."""
        with self._monitor:
            self._has_ended = True
            self._monitor.changed()
            self._monitor.wait_until(lambda: self.is_over, "the optimizer thread to end a step")

    def abandon(self) -> None:
        """Make the step end without publishing it, because the model is being closed. Call under the monitor."""
        self._is_abandoned = True

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work` on the optimizer thread, where no signal handler can interrupt it; returns its result."""
        done: list[tuple[T | None, BaseException | None]] = []

        def run() -> BaseException | None:
            try:
                done.append((work(), None))
            except BaseException as error:
                done.append((None, error))
            return done[0][1]

        with self._monitor:
            self._work = run
            self._monitor.changed()
            self._monitor.wait_until(lambda: bool(done), "the optimizer's update")
        result, error = done[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    # Called on the optimizer thread.

    def wait_for_caller(self) -> None:
        """The step function of a handed step: open the step, then run the caller's work until the caller ends the step.

        The body of the step may take any time, so the watchdog does not report this wait.
        """
        with self._monitor:
            self.is_open = True
            self._monitor.changed()
        while (work := self._next_work()) is not None:
            error = work()
            with self._monitor:
                self._monitor.changed()
            del work
            if error is not None and self._fails_with_work:
                raise error
        if self._is_abandoned:
            raise StepAbandoned

    def _next_work(self) -> Callable[[], Any] | None:
        with self._monitor:
            self._monitor.idle_until(lambda: self._work is not None or self._has_ended or self._is_abandoned)
            work, self._work = self._work, None
            return work

    def finished(self, error: BaseException | None) -> None:
        """Record that the optimizer thread has finished the step, with `error` if it failed. Call under the monitor."""
        self.error, self.is_open, self.is_over = error, False, True


_JOIN_S = 5.0


class StepJob:
    """One optimizer step that was given to the optimizer thread."""

    def __init__(
        self,
        number: int,
        step_fn: Callable[[], object],
        mode: StepMode,
        may_overlap: bool,
        iteration: Iteration,
        handed: HandedStep | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.number = number  # the first step has number 1
        self.issued_s = time.perf_counter()
        self.step_fn = step_fn
        self.mode = mode
        self.may_overlap = may_overlap  # whether step_fn may begin before all gradients have landed
        self.iteration = iteration
        self.handed = handed
        # Of the user's thread: results on the CPU depend on it.
        self.num_threads = num_threads or torch.get_num_threads()
        # The version that calls after this step read.
        self.visible_version = number - 1 if mode is StepMode.STALE else number
        self.next_iteration = Iteration()  # the iteration of calls issued after this step
        self.abandoned = False  # whether a call that the step depends on failed, so that the step must not complete
        self.begun = False  # whether step_fn runs or has run
        self.done = False
        # Whether a caller waits for the step and raises its error. Otherwise the next call raises the error.
        self.is_awaited = handed is not None
        self.error: BaseException | None = None

    @classmethod
    def before_the_first(cls) -> StepJob:
        """A finished job with number 0, from which the state before the first step is derived."""
        job = cls(0, _nothing, StepMode.EXACT, False, Iteration())
        job.done = True
        return job

    def raise_error(self) -> None:
        """Raise the error of the step, if it has one, and forget it."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class Stepper:
    """Issues optimizer steps and runs them on the optimizer thread, one after the other."""

    def __init__(self, store: LayerStore) -> None:
        self.stores = [store]
        self._monitor = store.monitor
        self.errors: list[BaseException] = []  # errors of steps for which no caller waits; the next call raises them
        # In the order of issue. The last job stays when it is done, because `steps_issued`, `visible_version`
        # and `generation` are read from it. So the single append in `issue` changes all of them at once.
        self._jobs: deque[StepJob] = deque([StepJob.before_the_first()])
        self._void_versions: set[int] = set()  # versions of failed steps, see [Note: exactly one step old]
        self._lost_since: int | None = None  # the first generation whose gradients are incomplete and not yet dropped
        self.half_done: str | None = None  # describes what an abandoned step has changed, for the error message
        self.exchange: MachineSteps | None = None  # the other machines that take part in every step
        self.reason_of_loss = ""  # why the gradients of `_lost_since` are incomplete, for the other machines
        self.done: deque[StepTime] = deque(maxlen=2)  # the latest steps that are done, the last one at the end
        # Whether steps may publish layer by layer; None until a step has shown it.
        self.publishes_by_layer: bool | None = None
        self.writer_besides: str | None = None  # a parameter that step_fn writes besides the one-pass optimizer
        # Whether the last step function has read all gradients before it updated a layer, as clipping does.
        self.reads_gradients_first = False
        # The first failed step of mode BY_LAYER whose error no call has raised yet, with that error.
        self.lost_version: tuple[int, BaseException] | None = None
        # Fails the runs that read this version or a later one; the error is None if a failed call is the cause.
        self.fail_readers: Callable[[int, BaseException | None], None] = no_readers
        self.thread: threading.Thread | None = None
        self._closing = False

    # Called on the caller's thread.

    def add(self, store: LayerStore) -> None:
        """Step `store` together with the other stores. Only before the first step."""
        assert not self.steps_issued
        assert store.monitor is self._monitor
        self.stores.append(store)

    @property
    def last_job(self) -> StepJob:
        """The step issued last, on which depends what calls issued now read, and in which generation they gather."""
        return self._jobs[-1]

    @property
    def steps_issued(self) -> int:
        """The number of steps issued so far, which is the number of the last one."""
        return self._jobs[-1].number

    @property
    def visible_version(self) -> int:
        """The version that calls issued now read."""
        return self._jobs[-1].visible_version

    @property
    def generation(self) -> int:
        """The generation of calls issued now."""
        return self._jobs[-1].number

    def issue(
        self,
        step_fn: Callable[[], object],
        mode: StepMode,
        may_overlap: bool,
        handed: HandedStep | None = None,
        num_threads: int | None = None,
    ) -> StepJob:
        """Give a step to the optimizer thread. `num_threads`: of the user's thread, if another thread calls this.

        If an interrupt comes before the append, there is no step. After the append the step is completely issued.
        """
        with self._monitor:
            self._start()
            last = self.last_job
            job = StepJob(last.number + 1, step_fn, mode, may_overlap, last.next_iteration, handed, num_threads)
            job.abandoned = self._lost_since is not None and last.number >= self._lost_since
            self._jobs.append(job)
            self._monitor.changed()
        return job

    def hand_over(self, handed: HandedStep, num_threads: int | None = None) -> None:
        """Issue a step whose body runs on the caller's thread. The step opens when all gradients have landed."""
        self.issue(handed.wait_for_caller, StepMode.EXACT, False, handed, num_threads)

    def was_issued(self, handed: HandedStep) -> bool:
        """Whether `hand_over` has issued the step; an interrupt may have prevented it."""
        return handed.is_over or any(job.handed is handed for job in list(self._jobs))

    def wait_for(self, job: StepJob) -> None:
        """Block until the step is done. The caller must raise the step's error, if any: no later call will."""
        with self._monitor:
            job.is_awaited = True
            self._monitor.wait_until(lambda: job.done, f"optimizer step {job.number}")
            self.errors = [error for error in self.errors if error is not job.error]

    def forsake(self, job: StepJob) -> None:
        """Record that the caller has stopped waiting for a synchronous step, so that the next call raises its error."""
        with self._monitor:
            job.is_awaited = False
            if job.error is not None and job.error not in self.errors:
                self.errors.append(job.error)

    def report(self, error: BaseException) -> None:
        """Let the next call raise an error of the background."""
        with self._monitor:
            self.errors.append(error)

    def take_errors(self) -> list[BaseException]:
        """Return the errors that the next call must raise, and forget them."""
        with self._monitor:
            errors, self.errors, self.lost_version = self.errors, [], None
        return errors

    def was_raised(self, error: BaseException) -> None:
        """Record that a call raises an error of a step, so that no later call does."""
        with self._monitor:
            self.errors = [other for other in self.errors if other is not error]
            if self.lost_version is not None and self.lost_version[1] is error:
                self.lost_version = None

    @property
    def is_idle(self) -> bool:
        """Whether all issued steps are done."""
        with self._monitor:
            return self._pending() is None

    def wait_until_idle(self) -> None:
        """Block until all issued steps are done."""
        with self._monitor:
            self._monitor.wait_until(lambda: self._pending() is None, "the optimizer's pending steps")

    def publish_latest(self) -> None:
        """Make calls read the newest version, and show it in the user's parameters. Only while no step is pending."""
        self._publish_late(self.steps_issued)
        self._jobs[-1].visible_version = self.steps_issued
        for store in self.stores:
            store.weights.show(self.visible_version)

    def show_visible(self) -> None:
        """Show the version that calls read in the user's parameters."""
        for store in self.stores:
            # If the host reads the parameters, there is one buffer, and `show` waits until it holds the version.
            if not store.is_read_on_host:
                self.wait_until_idle()
            store.weights.show(self.visible_version)

    def abandon(self, generation: int) -> None:
        """Cancel steps that would consume gradients of `generation` or later, because these are incomplete.

        Steps issued later are cancelled too, until `losses_are_dropped`: a caller may not know of the failure yet.
        """
        with self._monitor:
            self._lost_since = generation if self._lost_since is None else min(generation, self._lost_since)
            for job in self._jobs:
                if not job.done and job.number - 1 >= generation:
                    job.abandoned = True
            self._monitor.changed()

    def losses_are_dropped(self) -> None:
        """Record that the incomplete gradients were dropped, so that steps issued from now on run again."""
        with self._monitor:
            self._lost_since = None

    def wait_until_abandoned_are_gone(self, timeout_s: float | None) -> None:
        """Block until all abandoned steps are done, at most for `timeout_s`."""
        with self._monitor:
            self._monitor.wait_until(
                lambda: not any(job.abandoned and not job.done for job in self._jobs),
                "abandoned optimizer steps",
                timeout_s,
            )

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self.thread

    def close(self) -> None:
        """Abandon steps that have not begun, and end the optimizer thread."""
        with self._monitor:
            self._closing = True
            for job in self._jobs:
                job.abandoned = job.abandoned or not job.begun
                if job.handed is not None:
                    job.handed.abandon()
            self._monitor.changed()
        # `close` may run in a finalizer on any thread. If that thread holds the monitor, the optimizer thread cannot
        # end, so `close` must not wait for it.
        if self.thread is not None and not self._monitor.is_held():
            end_threads([self.thread], _JOIN_S)

    # Called on the optimizer thread.

    def _start(self) -> None:
        if self.thread is None:
            thread = threading.Thread(target=self._loop, name=f"{THREAD_PREFIX}optimizer", daemon=True)
            self.thread = thread
            try:
                start_thread(thread)
            except BaseException:
                self.thread = None  # a thread that has started despite the error sees this and ends
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
        """Block until a step is pending and return it; None when the thread must end."""
        with self._monitor:
            self._monitor.idle_until(
                lambda: self._pending() is not None or self._closing or not self.is_current_thread()
            )
            return self._pending() if self.is_current_thread() else None

    def _pending(self) -> StepJob | None:
        """The first step that is not done; it may be running."""
        return next((job for job in self._jobs if not job.done), None)

    def _finish(self, job: StepJob) -> None:
        # step_fn may hold the last reference to a model. It is freed outside the monitor, because the model's finalizer
        # may take long.
        step_fn, job.step_fn = job.step_fn, _nothing
        with self._monitor:
            if job.error is not None and not job.is_awaited:
                self.errors.append(job.error)
                if job.mode is not StepMode.EXACT:
                    job.error = None  # `_jobs` keeps the last job, which must not keep the traceback alive
            job.done = True
            self.done.append(StepTime(job.number, job.issued_s, time.perf_counter(), job.mode is not StepMode.EXACT))
            if job.handed is not None:
                job.handed.finished(job.error)
            job.iteration.step_finished.set()
            while len(self._jobs) > 1 and self._jobs[0].done:
                self._jobs.popleft()
            self._monitor.changed()
        del step_fn

    def _carry_out(self, job: StepJob) -> None:
        layers = [(store, layer.layer_id) for store in self.stores for layer in store.layers]
        updates = [
            LayerUpdate(
                store,
                layer_id,
                order,
                step=job.number,
                mode=job.mode,
                abandoned=lambda: job.abandoned,
                caller=job.handed,
                exchange=self.exchange,
            )
            for order, (store, layer_id) in enumerate(reversed(layers))  # reversed: the order in which gradients land
        ]
        if self.exchange is not None:
            self.exchange.begin(job.number)
        try:
            self._run(job, updates)
        except BaseException as error:
            if self.exchange is not None:
                is_abandoned = isinstance(error, StepAbandoned)
                reason = self.reason_of_loss or "the model is being closed"
                self.exchange.failed(reason if is_abandoned else repr(error), updates)
            self._void_versions.add(job.number)
            is_abandoned = isinstance(error, StepAbandoned)
            if not is_abandoned:
                num_replaced = sum(update.has_replaced_weights for update in updates)
                what = "running step_fn of" if job.begun else "preparing"
                add_note(
                    error,
                    f"while {what} optimizer step {job.number} on the optimizer thread; {_published(num_replaced)}, "
                    "and its gradients were dropped",
                )
            # Before `revoke`, which gives the version of this step to layers that it has not updated.
            is_reported = job.mode is StepMode.BY_LAYER
            if is_reported:
                self._report(job, None if is_abandoned else error)
            _for_all(updates, LayerUpdate.revoke)
            if is_abandoned:
                self._note_half_done(job, updates)
            elif not is_reported:
                raise
        finally:
            if self.exchange is not None:
                self.exchange.end()
            if job.mode is not StepMode.STALE:
                self._publish_late(job.number)

    def _report(self, job: StepJob, error: BaseException | None) -> None:
        """End the runs that read the weights of a failed step of mode BY_LAYER, and let a call raise the error.

        Not left to `_finish`: a run that fails now is raised at once, on another thread.
        """
        with self._monitor:
            if error is not None:
                self.errors.append(error)
                self.lost_version = self.lost_version or (job.number, error)
            self.fail_readers(job.number, error)

    def _run(self, job: StepJob, updates: Sequence[LayerUpdate]) -> None:
        if job.number == 1:
            for store in self.stores:
                store.adopt_written_through_data()
        _for_all(updates, LayerUpdate.prepare)
        self._publish_late(job.number - 1)
        if not job.may_overlap:
            for update in updates:
                # The body of a handed step may write parameters directly, so no checkpoint may read them any more.
                update.wait_until_landed() if job.handed is None else update.wait_for_gradients()
            if self.exchange is not None:
                self.exchange.meet("all gradients have landed")
        with self._monitor:
            job.begun = not job.abandoned
        if not job.begun:
            raise StepAbandoned
        if torch.get_num_threads() != job.num_threads:
            torch.set_num_threads(job.num_threads)
        with within_step(job.iteration):
            job.step_fn()
        self.reads_gradients_first = any(update.reads_gradients_first for update in updates)
        if job.mode is not StepMode.STALE:
            self._judge(job, updates)
        _for_all(updates, LayerUpdate.end_step)
        if self.exchange is not None:
            self.exchange.meet("the end")
        _for_all(updates, LayerUpdate.publish)

    def _judge(self, job: StepJob, updates: Sequence[LayerUpdate]) -> None:
        """Learn from a step of mode EXACT whether later steps may publish by layer, and check those that do.

        See [Note: publishing layer by layer].
        """
        if job.mode is StepMode.BY_LAYER:
            try:
                _for_all(updates, LayerUpdate.check_published)
            except UsageError:
                self.publishes_by_layer = False
                raise
        elif self.publishes_by_layer is None and job.mode is StepMode.EXACT and job.handed is None:
            found = next((name for update in updates if (name := update.written_besides()) is not None), None)
            if found is not None:
                self.publishes_by_layer = False
                self.writer_besides = found
            elif any(update.updated for update in updates):
                self.publishes_by_layer = True

    def _note_half_done(self, job: StepJob, updates: Sequence[LayerUpdate]) -> None:
        count = sum(bool(update.updated) for update in updates)
        if count:
            self.half_done = (
                f"optimizer step {job.number} was under way: {count} of {len(updates)} layers were updated with this "
                "call's gradients and stay so, the others, and all buffers, are as before; gradients gathered since "
                "the last optimizer step were dropped. Load a checkpoint to be sure of what you train"
            )

    def _publish_late(self, version: int) -> None:
        """Write the weights of `version` in layers where its own step did not; see LayerUpdate.publishes_late."""
        copy = version not in self._void_versions
        for store in self.stores:
            for slot, layer in zip(store.slots, store.layers, strict=True):
                if slot.newest_version < version:
                    shielded(functools.partial(store.weights.publish, layer.layer_id, version, copy=copy))
        self._void_versions.discard(version - 1)


def _for_all(updates: Sequence[LayerUpdate], do: Callable[[LayerUpdate], None]) -> None:
    """Call `do` for every update, even if some calls raise, then raise the first error.

    Every layer must reach the next generation and version even if the step fails: otherwise calls would wait forever.
    """
    errors: list[BaseException] = []
    for update in updates:
        try:
            do(update)
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _published(num_replaced: int) -> str:
    if not num_replaced:
        return "nothing of this step is published to the model"
    return f"{num_replaced} layers that were updated in place are published to the model, the others are not"


def _nothing() -> None:
    return


def no_readers(version: int, error: BaseException | None) -> None:
    return
