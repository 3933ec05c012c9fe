"""One model among those that are stepped together: it shares their lock, their steps and their failures.

The base of api.engine.ModelEngine; a model that is alone is a group of one. Every public verb enters through
`_entered`, which serialises calls and surfaces failures of the background.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from roundpipe.api.entering import entering
from roundpipe.api.plain_loop import PlainLoop
from roundpipe.api.recovery import Recovery
from roundpipe.api.scheduling import Scheduler
from roundpipe.context import current_iteration
from roundpipe.devices import DeviceSpec
from roundpipe.errors import ClosedError, UsageError
from roundpipe.optim.stepper import Stepper
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.run import Run
from roundpipe.store import LayerStore, ParameterRecord
from roundpipe.waiting import watchdog_limit_s

logger = logging.getLogger("roundpipe")
_FAILURES_HEARD_OUT = 10  # by close(), which logs failures of the background one after the other


class Member:
    def __init__(self, name: str, store: LayerStore, pool: DevicePool) -> None:
        self.name = name
        self.store = store
        self._pool = pool
        self.specs: Sequence[DeviceSpec] = pool.specs
        self._scheduler = Scheduler(store, pool, name)
        self.stepper = Stepper(store)
        self._recovery = Recovery(self.stepper, pool.monitor)
        self._plain_loop = PlainLoop(self)
        store.gradient_owner = self._plain_loop
        self._lock = threading.RLock()
        self._last_run: Run | None = None
        self._num_writes = 0  # how often parameters were written by others than our own steps
        self._steps_are_exact = False  # the last one was; the next one most likely is what that was
        self._joined: list[Member] = []  # all that share steps, failures and lock; empty where this one is alone
        self._closed = False
        self._unreachable = False
        self._has_warned_of_precision = False

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

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Finish what is pending, then let go of threads and pinned memory. Never raises what the background did."""
        self._refuse_inside_user_code("closed")
        with self._lock:
            if self._closed:
                return
            self._plain_loop.close()
            try:
                for _ in range(_FAILURES_HEARD_OUT):
                    if self._settles():
                        break
            finally:  # also when interrupted: then nothing more is waited for
                self._recovery.cancel_all(ClosedError(f"{self.name} was closed while this was running"))
                self._shut_down()

    def abort(self) -> None:
        """Close without finishing anything: for a model nobody can reach any more, and at exit."""
        self._unreachable = True
        if not self._closed and all(member._unreachable for member in self._members):
            self._recovery.log_failures("when nobody could reach the model any more")
            self._recovery.cancel_all(ClosedError(f"{self.name} was closed while this was running"))
            self._shut_down()

    # Entering and leaving.

    @entering
    def _entered(self, *members: Member) -> Iterator[None]:
        """`members`: whose parameters and gradients the call is about; this engine's alone by default."""
        with self._serialised():
            self._plain_loop.leave()
            self._follow(members or (self,))
            yield

    @entering
    def _serialised(self) -> Iterator[None]:
        self._refuse_inside_user_code("called")
        watchdog_limit_s()  # a limit that cannot be read is refused here, before any thread meets it
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} was closed; wrap the model again to go on using it.")
            self.raise_failures("it happened in the background after the call that caused it had returned")
            yield

    def _follow(self, members: Sequence[Member]) -> None:
        for member in members:
            member._learn()
            member.store.check_unchanged()
            member._follow_writes()
            member._follow_gradients()

    # What the plain loop needs of its models.

    @entering
    def entered_by_loop(self) -> Iterator[None]:
        """As `_entered` for all members, but views of gradients and an open step stay as they are."""
        with self._serialised():
            self._follow(self._members)
            yield

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

    def _refuse_inside_user_code(self, what: str) -> None:
        """Whoever calls from there would wait for itself."""
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
        self.stepper.close()
        self._recovery.forget_finished()
        for member in self._members:
            member._closed = True
            member._last_run = None
            member.store.close()
            del member._pool, member._scheduler  # the last model to let go of a pool closes it

    def _learn(self) -> None:
        for run in self._recovery.take_finished(self.store):
            self._scheduler.learn(run)
