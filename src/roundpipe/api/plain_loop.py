"""Supports the ordinary training loop: `loss.backward(); optimizer.step(); optimizer.zero_grad()` outside step_fn.

One PlainLoop serves the models of a group. Hooks around the `step()` of every torch optimizer find the groups whose
parameters the optimizer holds. Knows optimizers and gradients, never runs or plans.

[Note: gradients outside steps]
When code outside a step reads, scales, sets or clears the gradient of a master, the gradients of all copies
become views of the gradients gathered so far. The next call of a model ends the views. A gradient that was not changed
stays in the gathered sums, so later sums are the same as without a view. A changed gradient moves to its copy.
`optimizer.step()` uses the views as they are, so clipping and unscaling before the step need no float32 gradients.

[Note: values outside steps]
Code outside a step may write masters: an update by hand, a `clamp_` after `optimizer.step()`. Using a master there
waits for pending steps, so that no step writes it at the same time. The next call of any kind compares the masters that
were used with the newest weights and publishes those that differ. Calls that read the newest weights then read what was
written; after an asynchronous step, the calls after the next step do. A write counts as a change of weights: a graph
from before it is stale.

[Note: an optimizer that raises]
torch does not call the post hook if `optimizer.step()` raises. So a step remembers the frame of its `step()` call. Once
this frame is no longer on the stack of its thread, the next call of a model ends the step. As in torch, changes that
the optimizer made before it raised stay, and gradients stay until they are cleared.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Container, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from roundpipe.api.failures import IN_BACKGROUND, restoring_grad_mode
from roundpipe.api.group import Group
from roundpipe.context import current_iteration, in_gradient_hook
from roundpipe.distributed.settings import OptimizerSettings
from roundpipe.errors import ClosedError, UsageError
from roundpipe.monitor import process_lock
from roundpipe.optim.one_pass import OnePassOptimizer
from roundpipe.optim.states import require_state_memory
from roundpipe.optim.stepper import HandedStep
from roundpipe.store import LayerRecord, LayerStore, OptimizerCopy, ParameterRecord
from roundpipe.store.adopt import owner_of
from roundpipe.store.surroundings import GradientSource
from roundpipe.store.update import SharedSums, StepMode

logger = logging.getLogger("roundpipe")


class PlainLoop:
    """Gives code outside of step_fn access to the gradients of one group, and carries out `optimizer.step()` there."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # Running calls of optimizers' step(), the outermost first: an optimizer may step another one.
        self._calls: list[_StepCall] = []
        self._step: HandedStep | None = None  # the open step of an optimizer on copies
        self._own: Sequence[ParameterRecord] = ()  # the model's own parameters that an optimizer is updating
        self._viewed: list[OptimizerCopy] = []
        self._seen: object = None  # the value of `_gathered_so_far()` when the views were made
        self._settings = OptimizerSettings(group.stepper.stores)  # for comparisons with other machines
        _install_hooks()

    # Showing gradients outside of steps.

    @restoring_grad_mode
    def gradients_wanted(self, dropped: Container[int] = ()) -> None:
        """Make the gradients of all copies views of the gathered ones: see [Note: gradients outside steps].

        Waits for pending gradients. Does nothing inside a step, which sets the gradients of the copies itself, and
        inside a layer or a loss function. `dropped`: see GradientOwner.
        """
        group = self._group
        if group.is_closed or self._is_inside() or self._seen == self._gathered_so_far():
            return
        with group.call_lock(group.name) as is_outermost:
            self._begin_call(is_outermost)
            self._end_forsaken_step()
            if self._step is None:
                self._view(dropped)

    def values_wanted(self, masters: Sequence[OptimizerCopy]) -> None:
        """Wait for pending steps and note the use of masters: see [Note: values outside steps]."""
        if self.wait_for_steps():
            _home_of(masters[0]).masters.note_use(masters)

    def wait_for_steps(self) -> bool:
        """Wait until all steps that were issued are done. Inside a step, or if there is no model any more: False."""
        group = self._group
        if group.is_closed or group.is_inherited or self._is_inside():
            return False
        group.stepper.wait_until_idle()
        return True

    def publish_masters(self, store: LayerStore) -> bool:
        """Publish what code outside of steps has written into the masters of a model; returns whether it has."""
        stepper, masters = self._group.stepper, store.masters
        # Inside an open step, which publishes masters itself, nothing is to be done. Memory that is only shared is
        # looked at when no wait is needed for it.
        if self._step is not None or not (masters.used or (masters.shared and stepper.is_idle)):
            return False
        stepper.wait_until_idle()
        newest = stepper.steps_issued
        written = masters.written(store.slots, newest)
        if written:
            self._group.recovery.wait_for_runs()  # uploads of these runs may read the memory that changes below
            masters.publish_written(written, store.slots, newest)
        masters.forget_uses()  # last: after an interrupt the next call repeats all of this
        return bool(written)

    def _view(self, dropped: Container[int]) -> None:
        """Give all copies a view of their gathered gradients. Waits for pending steps and gradients."""
        stepper = self._group.stepper
        stepper.wait_until_idle()
        self._end_views()
        for store in stepper.stores:
            store.wait_until_landed(stepper.generation)
        self._group.recovery.raise_failures(IN_BACKGROUND)
        for store in stepper.stores:
            for layer in store.layers:
                self._view_layer(store, layer, dropped)
        self._seen = self._gathered_so_far()

    def _view_layer(self, store: LayerStore, layer: LayerRecord, dropped: Container[int]) -> None:
        exchange = self._group.stepper.exchange
        sums: GradientSource = (
            store.gradients
            if exchange is None
            else SharedSums(store, layer.layer_id, exchange, self._group.recovery.drop_generation)
        )
        for record in layer.at_home:
            # With several machines, one of the others may have a gradient that this one lacks.
            has_gradient = record.gathered is not None or (exchange is not None and record.param.requires_grad)
            if record.master is not None and has_gradient:
                record.master.begin_view(sums, record, drops_earlier=id(record.master) in dropped)
                self._viewed.append(record.master)

    def _end_views(self) -> None:
        for copy in self._viewed:
            copy.end_view()
        self._viewed.clear()
        self._seen = None

    def _gathered_so_far(self) -> object:
        """A value that changes with every gathered gradient, every call that may gather one, and every step."""
        stepper = self._group.stepper
        additions = sum(store.gradients.num_additions for store in stepper.stores)
        return additions, self._group.recovery.num_runs, stepper.steps_issued

    def _is_inside(self) -> bool:
        """Whether this thread is inside a step or a call of these models."""
        if self._step is not None and self._step.is_open and self._step.thread == threading.get_ident():
            return True
        if in_gradient_hook() or current_iteration() is not None:
            return True
        return self._group.stepper.is_current_thread() or self._group.lock.is_held()

    # Steps of optimizers outside of step_fn.

    @restoring_grad_mode
    def before_step(self, frame: FrameType, own: Sequence[ParameterRecord]) -> None:
        """Open a step for an optimizer whose step() begins.

        frame: the frame of the step() call.
        own: the model's own parameters that the optimizer holds; empty if the optimizer holds copies.
        """
        if self._calls and self._calls[-1].is_running_on_this_thread():
            self._calls.append(_StepCall(frame))  # an optimizer's step() has called another optimizer's step()
            return

        def begin() -> None:
            self._end_forsaken_step()
            self._calls.append(_StepCall(frame))
            self._begin_step(own)

        group = self._group
        with group.call_lock(group.name) as is_outermost:
            group.everywhere(group.name, "optimizer.step()", is_outermost, group.members, begin, ends_views=False)

    @restoring_grad_mode
    def after_step(self) -> None:
        """Note that the step() of an optimizer has returned. End the open step if this was the outermost step()."""
        if self._calls:
            self._calls.pop()
        if not self._calls:
            with self._group.call_lock(self._group.name) as is_outermost:
                self._begin_call(is_outermost)
                self._end_step()

    @restoring_grad_mode
    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Return `closure()`, which the optimizer calls inside its step() and which calls the model.

        Ends the open step before the closure runs, because a model cannot be called during a step. Opens a new step
        afterwards.
        """
        own = self._own
        calls, self._calls = self._calls, []
        with self._group.call_lock(self._group.name) as is_outermost:
            self._begin_call(is_outermost)
            self._end_step()
        try:
            return closure()
        finally:
            with self._group.call_lock(self._group.name) as is_outermost:
                self._begin_call(is_outermost)
                self._calls = calls
                self._begin_step(own)

    @property
    def order(self) -> int:
        """The position of the group among those that several machines train; equal on all machines."""
        return 0 if self._group.machines is None else self._group.machines.number

    def note(self, optimizer: Optimizer) -> None:
        """Note an optimizer that was given masters behind torch's back. See [Note: settings of a step]."""
        stores = self._group.stores
        if not any(optimizer in store.optimizers for store in stores):
            stores[0].note_optimizer(optimizer)

    def compare(self, optimizer: Optimizer) -> None:
        """Raise MachineError on all machines if the optimizer, whose step() begins, differs on one of them."""
        machines, step = self._group.machines, self._step
        if machines is None or machines.exchange is None:
            return
        work = functools.partial(machines.exchange.compare, "the optimizer", self._settings.of(optimizer))
        step.carry_out(work) if step is not None else work()

    def leave(self) -> None:
        """Prepare for a call of a model: end the views, and end a step whose optimizer has raised.

        Raises UsageError if the step() of an optimizer is running on this thread.
        """
        if self._calls or self._own or self._step is not None:
            self._end_forsaken_step()
        if self._calls:
            raise UsageError(
                f"{self._group.name} was called during optimizer.step() of an optimizer on its parameters; call it "
                "before or after the step, or in a closure that is given to step()."
            )
        if self._viewed or self._seen is not None:
            self._end_views()

    def close(self) -> None:
        """End an open step, because the models are being closed."""
        self._viewed.clear()
        if self._step is not None and self._group.stepper.was_issued(self._step):
            self._step.end()
        self._step = None

    def _begin_call(self, is_outermost: bool) -> None:
        group = self._group
        group.begin_call(group.name, is_outermost, group.members, ends_views=False)

    def _begin_step(self, own: Sequence[ParameterRecord]) -> None:
        """Prepare the parameters or copies for an optimizer.

        An optimizer on the model's own parameters gets the newest weights and gradients in them. For an optimizer on
        copies, this issues a step that the optimizer thread keeps open until `_end_step`.
        """
        group = self._group
        if own:
            self._end_views()
            group.show_newest()
            self._own = own
            return
        group.expect_step(StepMode.EXACT)
        self._step = step = HandedStep(group.monitor, fails_with_work=group.machines is not None)
        if group.machines is None:
            group.stepper.hand_over(step)
        else:
            num_threads = torch.get_num_threads()
            try:
                group.machines.together(
                    f"optimizer.step() on the parameters of {group.name}",
                    None,
                    lambda _: group.stepper.hand_over(step, num_threads),
                )
            except BaseException:
                with group.monitor:  # the step may still be issued: see `together`
                    step.abandon()
                raise
        # The step does not open if a call whose gradients it needs has failed, or if the models were closed.
        if not step.wait_until_open():
            self._step = None
            self._calls.clear()
            group.recovery.raise_failures("the step was not carried out")
            raise step.error or ClosedError(f"{group.name} was closed during optimizer.step().")
        self._viewed.clear()  # the step uses the views and ends them
        for store in group.stores:
            store.open_step = step

    def _end_step(self) -> None:
        """End the open step: adopt the values that the optimizer has changed, and raise the step's error, if any."""
        step, self._seen = self._step, None
        if self._own:
            self._group.adopt_written(self._own)
            self._own = ()
        if step is not None:
            if self._group.stepper.was_issued(step):
                step.end()
            self._step = None
            if step.error is not None:
                raise step.error
        self._group.end_host_graphs()

    def _end_forsaken_step(self) -> None:
        """End a step that is still open after its optimizer has raised: see [Note: an optimizer that raises].

        If the optimizer's step() is running on another thread, waits for its end. If it is running on this thread, does
        nothing.
        """
        monitor = self._group.monitor
        while self._calls and self._calls[-1].is_running():
            if self._calls[-1].is_running_on_this_thread():
                return
            with monitor:
                monitor.wait_until(
                    lambda: not (self._calls and self._calls[-1].is_running()), "optimizer.step() on another thread"
                )
        if self._calls or self._own or self._step is not None:
            self._calls.clear()
            try:
                self._end_step()
            except Exception as error:
                if self._group.machines is None:
                    raise
                # No machine publishes a step that has raised on one of them, and the user has seen the exception.
                logger.info("a step that had raised has ended on all machines: %s", error)


class _StepCall:
    """A call of an optimizer's step(), recognised by its frame."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._thread = threading.get_ident()

    def is_running(self) -> bool:
        """Whether the frame is still on the stack of its thread."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def is_running_on_this_thread(self) -> bool:
        return self._thread == threading.get_ident() and self.is_running()


# Hooks around every optimizer's step().

_hooks_lock = process_lock()
_hooks: list[Any] = []


def _install_hooks() -> None:
    """Install the hooks once per process. They are never removed: an optimizer of a closed model must raise."""
    with _hooks_lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Hook before `optimizer.step()`: begin a step of every group that the optimizer trains.

    Returns new arguments for step() if it was called with a closure, else None.
    """
    held = _held_by(optimizer)
    if not held:
        return None
    is_in_step_fn = current_iteration() is not None  # then Stepper opens and ends the step
    # All checks come before the first step opens: an error then leaves every model as it was.
    if is_in_step_fn:
        _check_inside_step_fn(optimizer, held)
    else:
        for loop, own in held.items():
            _refuse_mixture(optimizer, loop, own)
    frame = sys._getframe(1)  # torch's wrapper around step(), which is on the stack as long as the step runs
    for loop, own in held.items():
        if is_in_step_fn:
            loop.note(optimizer)
        else:
            loop.before_step(frame, own)
        loop.compare(optimizer)
    if not isinstance(optimizer, OnePassOptimizer):  # RoundPipe's optimizers check it themselves
        require_state_memory(optimizer)
    return None if is_in_step_fn else _with_closure(args, kwargs, list(held))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Hook after `optimizer.step()`, which torch skips if step() raises."""
    if current_iteration() is None:  # inside step_fn, Stepper opens and ends the step
        for loop in _held_by(optimizer):
            loop.after_step()


def _held_by(optimizer: Optimizer) -> dict[PlainLoop, list[ParameterRecord]]:
    """The loops of all groups that an optimizer trains, each with the models' own parameters that it holds.

    The list of a loop is empty if the optimizer holds only copies.
    """
    held: dict[PlainLoop, list[ParameterRecord]] = {}
    homes: set[int] = set()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param, OptimizerCopy):
            if param.home is not None and id(param.home) not in homes:  # `home` is None if no model has made this copy
                homes.add(id(param.home))
                loop = _home_of(param).gradient_owner
                assert isinstance(loop, PlainLoop)
                held.setdefault(loop, [])
            continue
        store = owner_of(param)
        if isinstance(store, LayerStore) and isinstance(store.gradient_owner, PlainLoop):
            held.setdefault(store.gradient_owner, []).append(store.record_of(param))
    # Other machines may have the parameters in another order: they must open the steps of the groups in the same one.
    return held if len(held) == 1 else dict(sorted(held.items(), key=lambda item: item[0].order))


def _home_of(copy: OptimizerCopy) -> LayerStore:
    """The store of a master; raises if its model was closed."""
    store = None if copy.home is None else copy.home()
    if not isinstance(store, LayerStore) or store.gradient_owner is None:
        raise ClosedError(
            f"the optimizer holds a copy of shape {tuple(copy.shape)} from a RoundPipe that was closed, so it would "
            "train nothing; build an optimizer on the parameters of the model that you train now."
        )
    return store


def _check_inside_step_fn(optimizer: Optimizer, held: dict[PlainLoop, list[ParameterRecord]]) -> None:
    """In step_fn, refuse an optimizer on a model's own parameters, or on copies of a model that is not stepped now.

    This function also runs if a gradient hook calls optimizer.step(). No optimizer may step there.
    """
    for own in held.values():
        if own:
            _refuse_gradient_hook()
            raise UsageError(
                f"the optimizer was built on the model's own parameters ({own[0].name!r} is one); build it on "
                "model.optim_parameters() or model.optim_named_parameters()."
            )
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        is_master = isinstance(param, OptimizerCopy) and param.home is not None
        # The step that runs now has given its masters their gradient sources.
        if is_master and (param.source is None or not param.source.is_usable()):
            _refuse_gradient_hook()
            raise UsageError(
                f"the optimizer holds a copy of shape {tuple(param.shape)} of another model than the one whose step "
                "runs, so it would get no gradient; give each model an optimizer and a step, or call "
                "optimizer.step() outside step_fn, which steps all of them."
            )


def _refuse_gradient_hook() -> None:
    if in_gradient_hook():
        raise UsageError(
            "optimizer.step() was called in a gradient hook of a parameter; step in step_fn, or after backward()."
        )


def _refuse_mixture(optimizer: Optimizer, loop: PlainLoop, own: Sequence[ParameterRecord]) -> None:
    """Raise if an optimizer on a model's own parameters also holds copies, or if optim_dtype requires copies."""
    if not own:
        return
    for record in own:
        store = owner_of(record.param)
        assert isinstance(store, LayerStore)
        if store.share is not None:
            raise UsageError(
                f"the optimizer was built on the model's own parameters ({record.name!r} is one), but a process group "
                f"of {store.share.size} machines trains the model, and their `.grad` is this machine's part of the "
                "gradient; build it on model.optim_parameters()."
            )
        masters = store.masters
        if masters.has_own_precision(record):
            raise UsageError(
                f"the optimizer was built on the model's own parameters ({record.name!r} is one, "
                f"{record.weights.dtype}), but the model was wrapped with optim_dtype={masters.optim_dtype}; build it "
                "on model.optim_parameters(), which are in that precision."
            )
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if isinstance(param, OptimizerCopy) and param.home is not None and _home_of(param).gradient_owner is loop:
            raise UsageError(
                f"the optimizer holds parameters of the model itself ({own[0].name!r} is one) and copies from "
                "optim_parameters(); build it on one of the two."
            )


def _with_closure(args: Any, kwargs: Any, loops: Sequence[PlainLoop]) -> tuple[Any, Any] | None:
    """The arguments of step() with its closure wrapped in `run_closure`; None if step() has no closure."""
    optimizer, *rest = args
    closure = kwargs.get("closure", rest[0] if rest else None)
    if not callable(closure):
        return None
    for loop in loops:
        closure = functools.partial(loop.run_closure, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (optimizer, closure, *rest[1:]), kwargs
