"""One model among those that are stepped together: it shares their lock, their steps and their failures.

The base of api.engine.ModelEngine; a model that is alone is a group of one. Every public verb enters `call_lock`,
which serialises calls, and begins with `_begin_call`, which surfaces failures of the background.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from roundpipe.api.calls import CallInputs
from roundpipe.api.failures import CallLock, Recovery, restoring_grad_mode
from roundpipe.api.plain_loop import PlainLoop
from roundpipe.api.planner import Scheduler
from roundpipe.context import current_iteration
from roundpipe.devices import DeviceSpec
from roundpipe.errors import ClosedError, UsageError
from roundpipe.monitor import watchdog_limit_s
from roundpipe.optim.stepper import Stepper
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.run import GradientParcel, Parcel, Run, RunCancelled
from roundpipe.store import LayerStore, ParameterRecord

logger = logging.getLogger("roundpipe")
_Result = TypeVar("_Result")
_FAILURES_HEARD_OUT = 10  # by close(), which logs failures of the background one after the other


class Member:
    def __init__(self, name: str, store: LayerStore, pool: DevicePool) -> None:
        self.name = name
        self._pid = os.getpid()
        self.store = store
        self._pool = pool
        self.specs: Sequence[DeviceSpec] = pool.specs
        self._scheduler = Scheduler(store, pool, name)
        self.stepper = Stepper(store)
        self._recovery = Recovery(self.stepper, pool.monitor)
        self._plain_loop = PlainLoop(self)
        store.gradient_owner = self._plain_loop
        self._lock = CallLock()
        self._last_run: Run | None = None
        self._num_writes = 0  # how often parameters were written by others than our own steps
        self._steps_are_exact = False  # the last one was; the next one most likely is what that was
        self._joined: list[Member] = []  # all that share steps, failures and lock; empty where this one is alone
        self._closed = False  # no call is accepted any more
        self._is_shut_down = False  # nothing is left to be let go
        self._unreachable = False
        self._has_warned_of_precision = False
        self.stop_requested = False

    def join(self, lead: Member) -> None:
        """Be stepped together with `lead` and its members, fail and close with them. Only before the first call."""
        assert not self._joined
        assert self._last_run is None
        lead.stepper.add(self.store)
        lead._joined[:] = [*lead._members, self]
        self.stepper, self._recovery = lead.stepper, lead._recovery
        self._lock, self._joined = lead._lock, lead._joined
        self._plain_loop = self.store.gradient_owner = lead._plain_loop

    @property
    def was_used(self) -> bool:
        """Whether it was called or stepped."""
        return self._last_run is not None or self.stepper.steps_issued > 0

    @property
    def is_joined(self) -> bool:
        """Whether it is stepped together with others."""
        return bool(self._joined)

    @property
    def _members(self) -> list[Member]:
        return self._joined or [self]

    def request_stop(self) -> None:
        """Only sets flags: a signal handler may interrupt any call to do this."""
        for member in self._members:
            member.stop_requested = True

    @property
    def is_closed(self) -> bool:
        return self._closed

    @restoring_grad_mode
    def close(self) -> None:
        """Finish what is pending, then let go of threads and pinned memory. Never raises what the background did."""
        if self._is_inherited:
            return  # nothing of it is this process's
        self._refuse_inside_user_code("closed")
        with self._lock.for_call(self.name) as is_outermost:
            if self._is_shut_down:
                return
            if not self._closed:
                self._plain_loop.close()
            try:
                if is_outermost:
                    self._recovery.settle_interrupted()
                for _ in range(0 if self._closed else _FAILURES_HEARD_OUT):
                    if self._settles():
                        break
            finally:  # also when interrupted: then nothing more is waited for
                self._recovery.cancel_all(ClosedError(f"{self.name} was closed while this was running"))
                self._shut_down()

    def abort(self) -> None:
        """Close without finishing anything: when the model is collected, and at exit."""
        self._unreachable = True
        if not self._is_inherited and not self._is_shut_down and all(member._unreachable for member in self._members):
            self._recovery.log_failures("when nobody could reach the model any more")
            self._recovery.cancel_all(ClosedError(f"{self.name} was closed while this was running"))
            self._shut_down()

    # Entering and leaving.

    def call_lock(self) -> AbstractContextManager[bool]:
        """To be entered around every call; gives True if no other call is around it. See [Note: calls inside calls]."""
        self._refuse_inherited()
        self._refuse_inside_user_code("called")
        watchdog_limit_s()  # a limit that cannot be read is refused here, before any thread meets it
        return self._lock.for_call(self.name)

    def _begin_call(self, is_outermost: bool, *members: Member) -> None:
        """`members`: whose parameters and gradients the call is about; this engine's alone by default."""
        self._surface_failures(is_outermost)
        self._plain_loop.leave()
        self._follow(members or (self,))

    def _surface_failures(self, is_outermost: bool) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} was closed; wrap the model again to go on using it.")
        if is_outermost:
            self._lock.runs_user_code = False
            self._recovery.settle_interrupted()
        self.raise_failures("it happened in the background after the call that caused it had returned")

    def _carry_out(
        self, run: Run, inputs: CallInputs | Sequence[GradientParcel], finish: Callable[[], _Result]
    ) -> _Result:
        """Start the run and return `finish()`; whatever goes wrong until then, here or on a worker, ends the run."""
        self._last_run = run
        own: BaseException | None = None
        try:
            self._recovery.watch(run)
            run.check()
            run.announce()
            self._pool.submit(run)
            parcels: Sequence[Parcel | GradientParcel] = inputs.parcels() if isinstance(inputs, CallInputs) else inputs
            for microbatch, parcel in enumerate(parcels):
                run.post(run.first_task_index, microbatch, parcel)
            result = finish()
            run.has_returned = True  # if this is not reached the next call settles the run
            return result
        except RunCancelled:
            pass
        except BaseException as error:
            run.fail(error)
            own = error
        # Outside the handlers, so that the failure is raised as it came and not as a consequence of our own signal.
        self._last_run = None
        self._recovery.raise_failures(None, own, run)
        raise AssertionError(f"{run!r} was cancelled without a failure")

    def _follow(self, members: Sequence[Member]) -> None:
        for member in members:
            member._learn()
            member.store.check_unchanged()
            member._follow_writes()
            member._follow_gradients()

    # What the plain loop needs of its models.

    def begin_loop_call(self, is_outermost: bool) -> None:
        """As `_begin_call` for all members, but views of gradients and an open step stay as they are."""
        self._surface_failures(is_outermost)
        self._follow(self._members)

    def is_entered(self) -> bool:
        """Whether the calling thread is inside a call."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    @property
    def num_runs(self) -> int:
        return self._recovery.num_runs

    def expect_exact_step(self) -> None:
        for member in self._members:
            member.store.gradients.conceal()
            member._steps_are_exact = True

    def show_newest(self) -> None:
        """Let parameters be the newest weights and `.grad` what is gathered, for an optimizer that writes into them."""
        self._settle()
        for member in self._members:
            member.store.gradients.expose()

    def end_host_graphs(self) -> None:
        """Where code on the host reads parameters, let autograd know when calls read other weights than before.

        So a backward that comes too late is refused, as it is after a step of an optimizer in place.
        """
        version = self.stepper.visible_version
        for store in self.stepper.stores:
            if store.is_read_on_host and store.graphs_version != version:
                store.graphs_version = version
                for record in store.parameters:
                    torch.autograd.graph.increment_version(record.param)
                    record.seen_version = record.param._version

    def adopt_own(self, records: Sequence[ParameterRecord]) -> None:
        """An optimizer has written into these parameters; not every kernel leaves a trace in version counters."""
        for member in self._members:
            member.store.adopt_written([record for record in records if member.store.owns(record.param)])
        self._num_writes += 1

    @property
    def _is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made the model.

        Then its threads do not exist, and its locks may be held by threads that do not: none may be touched.
        """
        return os.getpid() != self._pid

    def _refuse_inherited(self) -> None:
        if self._is_inherited:
            raise UsageError(
                f"{self.name} was made in process {self._pid} and cannot be used in process {os.getpid()}, a forked "
                'child: its threads do not exist here. Wrap the model again in the child, or use the "spawn" start '
                "method and build it there."
            )

    def _refuse_inside_user_code(self, what: str) -> None:
        """A call from step_fn, loss_fn or a layer would wait for the call that runs it."""
        if self.stepper.is_current_thread() or current_iteration() is not None:
            raise UsageError(f"{self.name} was {what} from inside step_fn, loss_fn or a layer; do that outside.")

    def _follow_writes(self) -> None:
        """What the user did to parameters between calls is as good as what we did."""
        written = self.store.written_by_user()
        if written:
            self._num_writes += 1
            self._recovery.wait_for_runs()  # their uploads may read the memory that is about to change
            self.stepper.wait_until_idle()
            self.store.adopt_written(written)

    def _follow_gradients(self) -> None:
        touched = self.store.gradients.touched_by_user()
        if touched:
            self.store.wait_until_landed(self.stepper.generation)
            self.store.gradients.adopt_touched(touched)

    def _check_training(self) -> None:
        """Called before anything trains. Refuses what cannot fit; warns once if low precision loses updates."""
        for member in self._members:
            member.store.check_training_memory()
        lead = self._members[0]
        if lead._has_warned_of_precision:
            return
        losing = [record for member in self._members for record in member.store.masters.losing_updates()]
        if losing:
            lead._has_warned_of_precision = True
            dtype = losing[0].weights.dtype
            logger.warning(
                "%s: %d trainable parameters (%r is one) are %s, and the optimizer updates them in that precision: an "
                "update smaller than the spacing of its numbers is lost, and at a learning rate of 1e-5 most weights "
                "never change. Wrap the model with optim_dtype=torch.float32, or with optim_dtype=%s if that is what "
                "you want.",
                lead.name,
                len(losing),
                losing[0].name,
                dtype,
                dtype,
            )

    def _come_to_rest(self) -> None:
        """Wait for everything; calls read the same weights as before, which are those the user sees."""
        self._wait_for_everything()
        self.stepper.show_visible()

    def _wait_for_everything(self) -> None:
        self._recovery.wait_for_runs()
        self.raise_failures("it happened in the background after the call that caused it had returned")
        self.stepper.wait_until_idle()
        self.raise_failures("it happened in the background after the call that caused it had returned")

    def _settle(self) -> None:
        """Wait for everything and make the newest weights the visible ones."""
        self._wait_for_everything()
        self.stepper.publish_latest()
        for member in self._members:
            member._learn()  # which lets go of the runs

    def _settles(self) -> bool:
        """Whether all went well; if not, there may be more to wait for behind the failure, which is only logged."""
        try:
            self._settle()
        except KeyboardInterrupt:
            raise
        except BaseException:
            logger.exception("%s: a failure in the background came to light when the model was closed", self.name)
            return False
        return True

    def _wait_for_visible_weights(self) -> None:
        self.stepper.show_visible()

    def raise_failures(self, remark: str | None) -> None:
        try:
            self._recovery.raise_failures(remark)
        except torch.OutOfMemoryError:
            for member in self._members:
                member._scheduler.plan_smaller()
            raise

    def _shut_down(self) -> None:
        """Can be repeated if it was interrupted."""
        for member in self._members:
            member._closed = True
        self.stepper.close()
        self._recovery.forget_finished()
        for member in self._members:
            member._last_run = None
            member.store.close()
        for member in self._members:
            # The last model to let go of a pool closes it; the loop refers back to us.
            for attribute in ("_pool", "_scheduler", "_plain_loop"):
                member.__dict__.pop(attribute, None)
        for member in self._members:
            member._is_shut_down = True

    def _learn(self) -> None:
        for run in self._recovery.take_finished(self.store):
            self._scheduler.learn(run)
