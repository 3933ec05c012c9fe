"""The state that models stepped together share: the call lock, the optimizer steps, failures and closing.

A RoundPipe alone is a group of one. An AutoRoundPipe and the RoundPipes inside it are one group: one step updates all
of them, a failure of one model is raised by the next call of any model, and they close together. Knows no layer and no
device.

[Note: calls inside calls]
While a call is in progress, a second call on the same thread comes from a signal handler, a finalizer or a hook. It
would wait for work that only the interrupted call can do, or change state that the interrupted call has just read.
Such a call is refused. Exception: a call runs some user code on the calling thread at points where its own state is
consistent (split and merge functions, a forward on the host, the autograd graph that computed the inputs). This code
runs inside `run_user_code`, where other calls are accepted.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch

from roundpipe.api.calls import figures_of
from roundpipe.api.failures import IN_BACKGROUND, Recovery
from roundpipe.compiled import Compiling, compilations
from roundpipe.context import current_iteration
from roundpipe.devices import Device
from roundpipe.distributed.machines import Machines
from roundpipe.distributed.settings import Settings
from roundpipe.errors import ClosedError, MachineError, StallError, UsageError, add_note
from roundpipe.monitor import (
    WAIT_LIMIT_VARIABLE,
    WATCHDOG_VARIABLE,
    CallLock,
    InnerCall,
    Latch,
    stall_of_process,
    stalls,
    wait_limit_s,
    watchdog_limit_s,
)
from roundpipe.optim.stepper import StepJob, Stepper, no_readers
from roundpipe.param_groups import with_present_settings
from roundpipe.plan.overlap import STALE, UpdateTiming
from roundpipe.runtime.run import Trace, WeightScope
from roundpipe.stats import DeviceMemory, StepLog, StepStats
from roundpipe.store import LayerStore, ParameterRecord
from roundpipe.store.surroundings import GradientOwner
from roundpipe.store.update import StepMode

logger = logging.getLogger("roundpipe")
_T = TypeVar("_T")
_GENERATIONS_LOGGED = 4  # asynchronous steps are done late: the last one that is done may be that old
_MOST_FAILURES_LOGGED = 10  # failures that close() logs; it waits for the remaining work after each


class Member(Protocol):
    """A model of a group, as the group sees it."""

    name: str
    store: LayerStore
    compiling: Compiling | None  # what is compiled in its calls
    num_writes: int  # how often code other than the group's steps has written into parameters
    is_unreachable: bool  # whether the user has no reference to the model any more

    def follow_user(self) -> None:
        """Adopt what the user changed since the last call. Raises if the model's structure has changed."""

    def learn(self) -> None:
        """Pass the measurements of finished runs to the planner, and forget these runs."""

    def plan_smaller(self) -> bool:
        """Plan with less device memory from now on. Returns whether a smaller plan exists."""

    def release(self) -> None:
        """Drop all references to the device pool and to runs, and close the store."""


class OpenStep(GradientOwner, Protocol):
    """The step of an ordinary training loop: see api.plain_loop."""

    def publish_masters(self, store: LayerStore) -> bool:
        """Publish what code outside of steps has written into the masters of a model; returns whether it has."""

    def leave(self) -> None:
        """Prepare for a call of a model: end views of gradients. Raises inside `optimizer.step()`."""

    def close(self) -> None:
        """End an open step, because the models are being closed."""


class BackgroundSave(Protocol):
    """A checkpoint that is being written: see checkpoint.save."""

    def wait_until_done(self) -> None:
        """Block until the checkpoint is complete or has failed. A failure is then in the stepper's errors."""


class Group:
    """The models that are stepped together. Decides whether a call may begin, and keeps the state that they share."""

    def __init__(
        self,
        name: str,
        member: Member,
        open_loop: Callable[[Group], OpenStep],
        machines: Machines | None = None,
        staleness: int = 1,
    ) -> None:
        """`name`: of the model that leads the group. `open_loop`: makes the group's PlainLoop.

        staleness: how many updates old the weights of a call may be after an asynchronous step.

        machines: the machines that train the group together; None if this machine is alone.
        """
        self.name = name
        self.members: list[Member] = [member]
        self.monitor = member.store.monitor
        self.lock = CallLock()
        self.stepper = Stepper(member.store)
        self.stores: Sequence[LayerStore] = self.stepper.stores  # the stores of all members, in the stepper's list
        # The recovery refers to the list of members, not to the group: see `dissolve`.
        self.recovery = Recovery(self.stepper, self.monitor, functools.partial(_plan_smaller, self.members))
        self.machines = machines
        self.staleness = staleness
        self._has_said_that_steps_wait = False
        self.timing = STALE  # of the last step: a guess for the next one
        self.scope: WeightScope | None = None  # in which weights stay on devices between calls
        self.pending_save: BackgroundSave | None = None
        self.stop_requested = False
        self.is_closed = False  # whether all calls are refused
        self.traces: list[Trace] = []  # of finished runs, not yet in the log
        self._step_log = StepLog()
        self._is_shut_down = False  # whether all threads and memory are released
        self._has_warned_of_precision = False
        self._pid = os.getpid()
        self.plain_loop = open_loop(self)
        member.store.gradient_owner = self.plain_loop

    def add(self, member: Member) -> None:
        """Add a model, which is then stepped and closed together with the others. Call before the first call of any."""
        self.stepper.add(member.store)
        self.members.append(member)
        member.store.gradient_owner = self.plain_loop

    # Beginning a call.

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the process that made the models.

        The child has none of the parent's threads, and its copies of the locks may be held forever. So the child must
        not use the group.
        """
        return os.getpid() != self._pid

    def raise_inherited(self, name: str) -> NoReturn:
        """Raise the UsageError for a call in a forked child."""
        raise UsageError(
            f"{name} was made in process {self._pid} and cannot be used in process {os.getpid()}, a forked "
            'child: its threads do not exist here. Wrap the model again in the child, or use the "spawn" start '
            "method and build it there."
        )

    def call_lock(self, name: str, verb: str = "called") -> AbstractContextManager[bool]:
        """Return the lock to hold during a call of the model `name`; raise if the call cannot begin on this thread.

        Entering the lock gives True if this is the outermost call of the thread.
        """
        if os.getpid() != self._pid:
            self.raise_inherited(name)
        # User code on a worker or on the optimizer thread is part of a task or step. A call would wait for itself.
        if threading.current_thread() is self.stepper.thread or current_iteration() is not None:
            raise UsageError(f"{name} was {verb} from inside step_fn, loss_fn or a layer; do that outside.")
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            return self.lock
        if not self.lock.runs_user_code:
            raise UsageError(
                f"{name} was {verb} while another call into it is in progress on the same thread, as from a signal "
                "handler or a finalizer; only set a flag there (model.request_stop() is one) and call the model when "
                "the present call has returned."
            )
        return InnerCall(self.lock)

    def begin_call(self, name: str, is_outermost: bool, members: Sequence[Member], *, ends_views: bool = True) -> None:
        """Raise failures that happened in the background; adopt what the user changed in `members` since the last call.

        ends_views: False in calls of the plain loop, which keep views of gradients and an open step as they are.
        """
        if self.is_closed:
            raise ClosedError(f"{name} was closed; wrap the model again to go on using it.")
        if stalls:
            raise stall_of_process()
        # An invalid value raises here instead of in a background thread.
        if WATCHDOG_VARIABLE in os.environ:
            watchdog_limit_s()
        if WAIT_LIMIT_VARIABLE in os.environ:
            wait_limit_s()
        if is_outermost:
            # A Ctrl-C may have left the flag set, and runs whose calls never returned.
            self.lock.runs_user_code = False
            self.recovery.settle_interrupted()
        self.recovery.raise_failures(IN_BACKGROUND)
        if ends_views:
            self.plain_loop.leave()
        for member in members:
            member.follow_user()

    # Calls that all machines of a process group make together.

    def everywhere(
        self,
        name: str,
        what: str,
        is_outermost: bool,
        members: Sequence[Member],
        function: Callable[[], _T],
        *,
        ends_views: bool = True,
    ) -> _T:
        """Begin a call of the model `name` and return `function()`, together with all machines.

        If this machine fails, all others raise in this call or in the next. If another one fails, this one raises.
        Either way, all machines drop the gradients gathered since the last step: a part of their sum is missing.
        """
        machines = self.machines
        if machines is None:
            self.begin_call(name, is_outermost, members, ends_views=ends_views)
            return function()
        if is_outermost:
            machines.is_told = False
        try:
            self.begin_call(name, is_outermost, members, ends_views=ends_views)
            self._open_machines(machines)
            flags = Settings.of_flags([record for member in members for record in member.store.parameters])
            self._check_equal(machines.agree(f"{what} of {name}", self._state(), flags))
            return function()
        except BaseException as error:
            machines.tell(error)
            self.recovery.drop_generation(error)
            if isinstance(error, MachineError):
                self._absorb_failed_steps()
                add_note(error, "gradients gathered since the last optimizer step were dropped on all machines")
            raise

    def mode_of_step(self, *, is_async: bool, staleness: int) -> StepMode:
        """The mode of a step; see [Note: publishing layer by layer] in store/update."""
        if is_async and staleness:
            return StepMode.STALE
        if is_async and self.stepper.publishes_by_layer is False and not self._has_said_that_steps_wait:
            self._has_said_that_steps_wait = True
            logger.info(
                "%s: step() waits for every step, although staleness is 0: step_fn writes the optimizer's master of %r "
                "other than by one update of roundpipe.optim, so the next call cannot begin before step_fn has ended.",
                self.name,
                self.stepper.writer_besides,
            )
        return StepMode.BY_LAYER if is_async and self.stepper.publishes_by_layer else StepMode.EXACT

    def issue(self, step_fn: Callable[[], object], mode: StepMode, may_overlap: bool) -> StepJob:
        """Give a step to the optimizer thread, on all machines or on none."""
        step_fn = with_present_settings(step_fn, [each for store in self.stores for each in store.optimizers])
        if self.machines is None:
            return self.stepper.issue(step_fn, mode, may_overlap)
        num_threads = torch.get_num_threads()
        return self.machines.together(
            f"{'an asynchronous' if mode is StepMode.STALE else 'an exact'} step of {self.name}",
            {"overlaps": may_overlap, "mode": mode.value},
            lambda answers: self.stepper.issue(
                step_fn,
                mode if all(each["mode"] == mode.value for each in answers) else StepMode.EXACT,
                all(each["overlaps"] for each in answers),
                num_threads=num_threads,
            ),
        )

    def _open_machines(self, machines: Machines) -> None:
        """Connect to the other machines at the first call."""
        if self.stepper.exchange is not None:
            return
        members = list(self.members)
        structure = {
            f"{record.name} (parameter {at} of {member.name}, model {i})": (
                f"{tuple(record.weights.shape)} {record.weights.dtype} requires_grad={record.param.requires_grad} "
                f"optim_dtype={member.store.masters.optim_dtype} master_bits={member.store.masters.bits} "
                f"is_read_on_host={member.store.is_read_on_host}"
            )
            for i, member in enumerate(members)
            for at, record in enumerate(member.store.parameters)
        }
        records = {f"{i}.{r.name}": r for i, member in enumerate(members) for r in member.store.parameters}

        def values() -> list[tuple[str, torch.Tensor]]:
            buffers = [
                (f"{i}.{buffer.name}", tensor)
                for i, member in enumerate(members)
                for layer in member.store.layers
                for buffer in layer.buffers
                if (tensor := buffer.tensor()) is not None
            ]
            return [*((name, record.weights) for name, record in records.items()), *buffers]

        def replaced(names: set[str]) -> None:
            for i, member in enumerate(members):
                own = [record for name, record in records.items() if name in names and name.startswith(f"{i}.")]
                member.store.adopt_written(own)

        structure["staleness"] = str(self.staleness)
        structure["the number of parameters and buffers"] = str(len(values()))
        machines.open(Settings.of(structure), values, replaced)
        self.stepper.exchange = machines.exchange

    def _state(self) -> dict[str, int]:
        """What must be equal on all machines when a call begins."""
        return {
            "generation": self.stepper.generation,
            "version of the weights": self.stepper.visible_version,
            "number of writes into parameters": sum(member.num_writes for member in self.members),
        }

    def _check_equal(self, states: Sequence[dict[str, int]]) -> None:
        """Raise MachineError, on all machines, if their states differ."""
        for rank, state in enumerate(states):
            for what, value in state.items():
                if value != states[0][what]:
                    assert self.machines is not None
                    self.machines.is_told = True
                    raise MachineError(
                        rank,
                        f"the machines have diverged: the {what} is {value} on rank {rank} and {states[0][what]} on "
                        "rank 0. Call step(), synchronize(), state_dict() and load_state_dict(), and write into "
                        "parameters, on all machines or on none.",
                    )

    def _absorb_failed_steps(self) -> None:
        """Forget that steps have failed on another machine, whose failure is being raised now. Raises own failures."""
        self.stepper.wait_until_idle()
        with self.monitor:
            self.stepper.errors = [error for error in self.stepper.errors if not isinstance(error, MachineError)]
        self.recovery.raise_failures(IN_BACKGROUND)

    def report(self, error: BaseException) -> None:
        """Let the next call into the group raise an error of the background."""
        self.stepper.report(error)

    # Waiting for work, and showing weights and gradients.

    def expect_step(self, mode: StepMode) -> None:
        """Prepare for a step, which takes the gathered gradients: remove them from `.grad` of the parameters."""
        for store in self.stores:
            store.gradients.conceal()
        self.timing = UpdateTiming(
            is_exact=mode is not StepMode.STALE,
            by_layer=mode is StepMode.BY_LAYER,
            after_norm=mode is not StepMode.STALE and self.stepper.reads_gradients_first,
        )

    def notify(self) -> None:
        """Wake threads in `wait_in_step`. Called in step_fn."""
        with self.monitor:
            self.monitor.changed()

    def wait_in_step(self, ready: Callable[[], bool], ended: Latch, what: str) -> None:
        """Wait until `ready()`, which step_fn makes true before it calls `notify`, or until the step has ended."""
        with self.monitor:
            self.monitor.wait_until(lambda: ready() or ended.is_set(), what)

    def wait_for_everything(self) -> None:
        """Wait for all runs, steps and checkpoints, and raise their failures."""
        self.recovery.wait_for_runs()
        self.recovery.raise_failures(IN_BACKGROUND)
        self.stepper.wait_until_idle()
        save = self.pending_save
        if save is not None:
            save.wait_until_done()
        self.recovery.raise_failures(IN_BACKGROUND)

    def wait_until_quiet(self) -> None:
        """Wait for all runs and steps. Parameters then hold the weights that calls read, maybe not the newest ones."""
        self.wait_for_everything()
        self.stepper.show_visible()

    def show_newest(self) -> None:
        """Wait for all runs and steps. Parameters then hold the newest weights, and `.grad` the gathered gradients."""
        self.settle()
        for store in self.stores:
            store.gradients.expose()

    def settle(self) -> None:
        """Wait for all runs and steps, make the newest weights visible, and forget finished runs."""
        self.wait_for_everything()
        self.stepper.publish_latest()
        for member in self.members:
            member.learn()

    def read_traces(self) -> None:
        """Add the figures of finished runs to the log. Drops those of steps that `stats` no longer reports."""
        oldest = self.stepper.generation - _GENERATIONS_LOGGED
        traces, self.traces = self.traces, []
        for trace in traces:
            if trace.generation >= oldest:
                self._step_log.add(figures_of(trace))

    def stats(self, devices: Sequence[Device]) -> StepStats:
        """The figures of the last step that is done, on these devices."""
        done = list(self.stepper.done)
        if done:  # its gradients have landed, but a worker may be about to report the end of its task
            self.recovery.wait_for_runs(before_generation=done[-1].step)
        for member in self.members:
            member.learn()
        self.read_traces()
        memory = {device.name: _memory_of(device) for device in devices}
        compiled = compilations()
        stats = self._step_log.stats(done, list(memory), memory)
        stats = dataclasses.replace(stats, compiled_graphs=compiled.graphs, compile_s=compiled.seconds)
        if len(self.members) == 1:
            return stats
        return dataclasses.replace(stats, rows=None, tokens=None)  # each part of the model has counted them

    def adopt_written(self, records: Sequence[ParameterRecord]) -> None:
        """Adopt what an optimizer wrote into the models' own parameters.

        Called for all parameters that the optimizer holds: some kernels do not increment version counters.
        """
        for member in self.members:
            own = [record for record in records if member.store.owns(record.param)]
            member.store.adopt_written(own)
            member.num_writes += bool(own)

    def end_host_graphs(self) -> None:
        """Make autograd refuse the backward of graphs that the host has built from weights that are outdated now.

        A late backward then raises, as in PyTorch after an optimizer has changed weights in place.
        """
        for store in [store for store in self.stores if store.is_read_on_host]:
            version = self.stepper.visible_version
            if store.graphs_version != version:
                store.graphs_version = version
                for record in store.parameters:
                    with self.monitor:  # a step compares the two versions
                        torch.autograd.graph.increment_version(record.param)
                        record.seen_version = record.param._version

    def check_training(self) -> None:
        """Refuse training that does not fit into memory; warn once if low precision loses updates."""
        for store in self.stores:
            store.check_training_memory()
        if self._has_warned_of_precision:
            return
        losing = [record for store in self.stores for record in store.masters.losing_updates()]
        if losing:
            self._has_warned_of_precision = True
            dtype = losing[0].weights.dtype
            logger.warning(
                "%s: %d trainable parameters (%r is one) are %s, and the optimizer updates them in that precision: an "
                "update smaller than the spacing of its numbers is lost, and at a learning rate of 1e-5 most weights "
                "never change. Wrap the model with optim_dtype=torch.float32, or with optim_dtype=%s if that is what "
                "you want.",
                self.name,
                len(losing),
                losing[0].name,
                dtype,
                dtype,
            )

    # Stopping and closing.

    def request_stop(self) -> None:
        """Set `stop_requested`. Takes no lock: a signal handler may interrupt any call to do this."""
        self.stop_requested = True

    def close(self, name: str) -> None:
        """Finish pending work, then release threads and pinned memory. Logs failures of the background.

        Does nothing in a forked child: threads and pinned memory belong to the parent process.
        """
        if self.is_inherited:
            return
        with self.call_lock(name, "closed") as is_outermost:
            if self._is_shut_down:
                return
            try:
                if not self.is_closed and not stalls:
                    self.plain_loop.close()
                if is_outermost:
                    self.recovery.settle_interrupted()
                # If an earlier close() was interrupted, `is_closed` is set, and this close() waits for nothing. After a
                # stall the work may never end: see [Note: stalls] in monitor.
                for _ in range(0 if self.is_closed or stalls else _MOST_FAILURES_LOGGED):
                    if self._settles(name):
                        break
            finally:
                self._shut_down(name)

    def abort(self, name: str) -> None:
        """If the user can reach no member any more, close without finishing pending work. For finalizers and exit."""
        if not self.is_inherited and not self._is_shut_down and all(member.is_unreachable for member in self.members):
            self.recovery.log_failures("when the last reference to the model was gone")
            self._shut_down(name)

    def _settles(self, name: str) -> bool:
        """Wait for all runs and steps. If one fails, log it and return False: other work may still be pending."""
        try:
            self.settle()
        except (KeyboardInterrupt, StallError):
            raise
        except BaseException:
            logger.exception("%s: a failure in the background came to light when the model was closed", name)
            return False
        return True

    def _shut_down(self, name: str) -> None:
        """Cancel pending work and release all threads and memory. Can be repeated if it was interrupted."""
        self.recovery.cancel_all(ClosedError(f"{name} was closed while this was running"))
        self.is_closed = True
        if self.machines is not None:
            self.machines.close("its process closed the model")
        self.stepper.close()
        self.recovery.forget_all()
        for member in self.members:
            member.release()
        self.dissolve()
        self._is_shut_down = True

    def dissolve(self) -> None:
        """Break the reference cycles, so that closed models and their memory are freed without a garbage collection."""
        self.members.clear()
        self.stepper.fail_readers = no_readers
        self.__dict__.pop("plain_loop", None)


def _memory_of(device: Device) -> DeviceMemory:
    use = device.memory_use()
    return DeviceMemory(None if use is None else use.peak, device.memory_limit_bytes())


def _plan_smaller(members: Sequence[Member]) -> None:
    for member in members:
        member.plan_smaller()


# The calls of the API.


class Caller(Member, Protocol):
    """A member whose methods are calls of the API."""

    group: Group


_Caller = TypeVar("_Caller", bound=Caller)
_P = ParamSpec("_P")


class Scope(enum.Enum):
    """Whose parameters and gradients a call concerns. What the user has changed in them is adopted first."""

    MODEL = enum.auto()
    GROUP = enum.auto()
    NOTHING = enum.auto()  # calls that only read figures


def api_call(
    scope: Scope, *, everywhere: bool = False
) -> Callable[[Callable[Concatenate[_Caller, _P], _T]], Callable[Concatenate[_Caller, _P], _T]]:
    """Return a decorator that makes a method one of the calls of the API.

    The method then runs with the group's call lock held. Failures of earlier calls are raised before the method runs.
    everywhere: all machines of a process group must make this call together.
    """

    def decorate(function: Callable[Concatenate[_Caller, _P], _T]) -> Callable[Concatenate[_Caller, _P], _T]:
        @functools.wraps(function)
        def call(self: _Caller, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            group, is_enabled = self.group, torch.is_grad_enabled()
            try:
                with group.call_lock(self.name) as is_outermost:
                    members: Sequence[Member] = ()
                    if scope is not Scope.NOTHING:
                        members = group.members if scope is Scope.GROUP else (self,)
                    if everywhere and group.machines is not None:
                        bound = functools.partial(function, self, *args, **kwargs)
                        name = f"{function.__name__.lstrip('_')}()"
                        return group.everywhere(self.name, name, is_outermost, members, bound)
                    group.begin_call(self.name, is_outermost, members)
                    return function(self, *args, **kwargs)
            except BaseException:
                torch._C._set_grad_enabled(is_enabled)  # see restoring_grad_mode
                raise

        return call

    return decorate
