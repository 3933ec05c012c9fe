"""Makes an ordinary training loop work: `loss.backward(); optimizer.step(); optimizer.zero_grad()` outside step_fn.

One PlainLoop serves all models that are stepped together. Hooks around every torch optimizer's `step()` find the models
whose parameters it holds and tell their PlainLoops.

[Note: gradients outside steps] When the gradient of an optimizer's copy is read, scaled, set or cleared outside a step,
all copies get a view of what was gathered so far. The next call into the model ends the view: a gradient that was not
changed stays gathered, and no later sum differs; one that was changed moves to the copy. `optimizer.step()` takes views
over as they are, so that clipping and unscaling before it cost no float32 gradients.

[Note: an optimizer that raises] Hooks are not told when `optimizer.step()` raises. So a step remembers the frame of the
`step()` call it belongs to; once that frame is no longer on its thread's stack, the next call into the model ends the
step. As in torch, what the optimizer has changed by then counts, and gradients stay until they are cleared.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from roundpipe.api.failures import restoring_grad_mode
from roundpipe.context import current_iteration, in_gradient_hook
from roundpipe.errors import ClosedError, UsageError
from roundpipe.monitor import process_lock
from roundpipe.optim.adam import Adam, AdamW
from roundpipe.optim.state import require_state_memory
from roundpipe.optim.stepper import HandedStep, Stepper
from roundpipe.store import LayerStore, OptimizerCopy, ParameterRecord
from roundpipe.store.adopt import owner_of

_IN_BACKGROUND = "it happened in the background after the call that caused it had returned"


class StepGroup(Protocol):
    """The models that are stepped together, as a PlainLoop needs them. All but the first five need them entered."""

    name: str
    store: LayerStore
    stepper: Stepper

    @property
    def is_closed(self) -> bool: ...

    @property
    def num_runs(self) -> int:
        """Calls carried out so far."""

    def is_entered(self) -> bool:
        """Whether the calling thread is inside a call."""

    def call_lock(self) -> AbstractContextManager[bool]:
        """To be entered around a call; gives True if no other call is around it."""

    def begin_loop_call(self, is_outermost: bool) -> None:
        """Begin a call that leaves views of gradients and an open step as they are."""

    def raise_failures(self, remark: str | None) -> None:
        """Raise what went wrong in the background."""

    def expect_exact_step(self) -> None:
        """An exact step is about to take the gradients."""

    def show_newest(self) -> None:
        """Let parameters be the newest weights and `.grad` what is gathered."""

    def adopt_own(self, records: Sequence[ParameterRecord]) -> None:
        """Follow what an optimizer has written into the model's own parameters."""

    def end_host_graphs(self) -> None:
        """Let autograd refuse graphs made on the host from weights that have changed."""


class PlainLoop:
    def __init__(self, lead: StepGroup) -> None:
        self._lead = lead
        self._calls: list[_StepCall] = []  # of optimizers' step(), the outermost first; one may call another
        self._step: HandedStep | None = None  # of an optimizer on copies
        self._own: Sequence[ParameterRecord] = ()  # parameters that an optimizer on the model itself is updating
        self._viewed: list[OptimizerCopy] = []
        self._looked_at: object = None  # how much had been gathered when gradients were last looked at
        _install_hooks()

    # Gradients outside steps.

    @restoring_grad_mode
    def gradients_wanted(self) -> None:
        """Let all copies show what was gathered; see [Note: gradients outside steps]. Waits for gradients on their way.

        Inside a step, a layer or a loss function there is nothing to do: a step gives the copies their gradients.
        """
        if self._lead.is_closed or self._is_inside() or self._looked_at == self._gathered_so_far():
            return
        with self._lead.call_lock() as is_outermost:
            self._lead.begin_loop_call(is_outermost)
            self._end_forsaken_step()
            if self._step is None:
                self._view()

    def _view(self) -> None:
        stepper = self._lead.stepper
        stepper.wait_until_idle()
        self.end_view()
        for store in stepper.stores:
            store.wait_until_landed(stepper.generation)
        self._lead.raise_failures(_IN_BACKGROUND)
        for store in stepper.stores:
            for record in store.parameters:
                if record.master is not None and record.gathered is not None:
                    record.master.begin_view(store.gradients, record)
                    self._viewed.append(record.master)
        self._looked_at = self._gathered_so_far()

    def end_view(self) -> None:
        """Another call enters the model, or gradients are looked at anew."""
        for copy in self._viewed:
            copy.end_view()
        self._viewed.clear()
        self._looked_at = None

    def _gathered_so_far(self) -> object:
        """Changes when anything is gathered, and when a call that may gather something or a step is made."""
        stepper = self._lead.stepper
        additions = sum(store.gradients.num_additions for store in stepper.stores)
        return additions, self._lead.num_runs, stepper.steps_issued

    def _is_inside(self) -> bool:
        """Whether this thread carries out a step or a call of these models already."""
        if self._step is not None and self._step.is_open and self._step.thread == threading.get_ident():
            return True
        if in_gradient_hook():
            return True
        return current_iteration() is not None or self._lead.stepper.is_current_thread() or self._lead.is_entered()

    # Steps.

    @restoring_grad_mode
    def before_step(self, frame: FrameType, own: Sequence[ParameterRecord]) -> None:
        """An optimizer begins to step; `own`: the parameters it holds, if they are the model's own and not copies."""
        if self._calls and self._calls[-1].is_running_on_this_thread():
            self._calls.append(_StepCall(frame))  # an optimizer that steps another one
            return
        with self._lead.call_lock() as is_outermost:
            self._lead.begin_loop_call(is_outermost)
            self._end_forsaken_step()
            self._calls.append(_StepCall(frame))
            self._begin(own)

    @restoring_grad_mode
    def after_step(self) -> None:
        if self._calls:
            self._calls.pop()
        if not self._calls:
            with self._lead.call_lock() as is_outermost:
                self._lead.begin_loop_call(is_outermost)
                self._end()

    @restoring_grad_mode
    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Run what the optimizer calls during its step, on weights and gradients that are up to date."""
        own = self._own
        calls, self._calls = self._calls, []
        with self._lead.call_lock() as is_outermost:
            self._lead.begin_loop_call(is_outermost)
            self._end()
        try:
            return closure()
        finally:
            with self._lead.call_lock() as is_outermost:
                self._lead.begin_loop_call(is_outermost)
                self._calls = calls
                self._begin(own)

    def leave(self) -> None:
        """Another call enters the model: views end, and a step whose optimizer has raised."""
        self._end_forsaken_step()
        if self._calls:
            raise UsageError(
                f"{self._lead.name} was called during optimizer.step() of an optimizer on its parameters; call it "
                "before or after the step, or in a closure that is given to step()."
            )
        self.end_view()

    def store_of(self, record: ParameterRecord) -> LayerStore:
        return next(store for store in self._lead.stepper.stores if store.owns(record.param))

    def close(self) -> None:
        """The model is being closed: an open step ends."""
        self._viewed.clear()
        if self._step is not None and self._lead.stepper.was_issued(self._step):
            self._step.end()
        self._step = None

    def _begin(self, own: Sequence[ParameterRecord]) -> None:
        lead = self._lead
        if own:
            self.end_view()
            lead.show_newest()
            self._own = own
            return
        lead.expect_exact_step()
        self._step = step = HandedStep(lead.store.monitor)
        lead.stepper.hand_over(step)
        if not step.wait_until_open():
            self._step = None
            self._calls.clear()
            lead.raise_failures("the step was not carried out")
            raise step.error or ClosedError(f"{lead.name} was closed during optimizer.step().")
        self._viewed.clear()  # the step has taken them over

    def _end(self) -> None:
        step, self._looked_at = self._step, None
        if self._own:
            self._lead.adopt_own(self._own)
            self._own = ()
        if step is not None:
            if self._lead.stepper.was_issued(step):
                step.end()
            self._step = None
            if step.error is not None:
                raise step.error
        self._lead.end_host_graphs()

    def _end_forsaken_step(self) -> None:
        """See [Note: an optimizer that raises]. Waits for an optimizer that steps on another thread."""
        monitor = self._lead.store.monitor
        while self._calls and self._calls[-1].is_running():
            if self._calls[-1].is_running_on_this_thread():
                return
            with monitor:
                monitor.wait_until(
                    lambda: not (self._calls and self._calls[-1].is_running()), "optimizer.step() on another thread"
                )
        if self._calls or self._step is not None or self._own:
            self._calls.clear()
            self._end()


class _StepCall:
    """One call of an optimizer's step()."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._thread = threading.get_ident()

    def is_running(self) -> bool:
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
    """Once per process, when the first model is wrapped: a closed model's copies must not be stepped in silence."""
    with _hooks_lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    held = _held_by(optimizer)
    if not held:
        return None
    if in_gradient_hook():
        raise UsageError(
            "optimizer.step() was called in a gradient hook of a parameter; step in step_fn, or after backward()."
        )
    if current_iteration() is not None:
        _check_inside_step_fn(optimizer, held)
        _check_memory(optimizer)
        return None
    for loop, own in held.items():
        _refuse_mixture(optimizer, loop, own)
    frame = sys._getframe(1)
    for loop, own in held.items():
        loop.before_step(frame, own)
    _check_memory(optimizer)
    return _with_closure(args, kwargs, list(held))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if current_iteration() is None:
        for loop in _held_by(optimizer):
            loop.after_step()


def _held_by(optimizer: Optimizer) -> dict[PlainLoop, list[ParameterRecord]]:
    """The loops of the models whose copies or parameters an optimizer holds, with the latter."""
    held: dict[PlainLoop, list[ParameterRecord]] = {}
    for param in _parameters_of(optimizer):
        if isinstance(param, OptimizerCopy):
            if param.home is not None:
                held.setdefault(_loop_of(_home_of(param)), [])
            continue
        store = owner_of(param)
        if isinstance(store, LayerStore) and store.gradient_owner is not None:
            held.setdefault(_loop_of(store), []).append(store.record_of(param))
    return held


def _parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _home_of(copy: OptimizerCopy) -> LayerStore:
    store = None if copy.home is None else copy.home()
    if not isinstance(store, LayerStore) or store.gradient_owner is None:
        raise ClosedError(
            f"the optimizer holds a copy of shape {tuple(copy.shape)} from a RoundPipe that was closed, so it would "
            "train nothing; build an optimizer on the parameters of the model that you train now."
        )
    return store


def _loop_of(store: LayerStore) -> PlainLoop:
    assert isinstance(store.gradient_owner, PlainLoop)
    return store.gradient_owner


def _check_inside_step_fn(optimizer: Optimizer, held: dict[PlainLoop, list[ParameterRecord]]) -> None:
    for own in held.values():
        if own:
            raise UsageError(
                f"the optimizer was built on the model's own parameters ({own[0].name!r} is one); build it on "
                "model.optim_parameters() or model.optim_named_parameters()."
            )
    for param in _parameters_of(optimizer):
        if isinstance(param, OptimizerCopy) and param.home is not None and not _is_being_stepped(param):
            raise UsageError(
                f"the optimizer holds a copy of shape {tuple(param.shape)} of another model than the one whose step "
                "runs, so it would get no gradient; give each model an optimizer and a step, or call "
                "optimizer.step() outside step_fn, which steps all of them."
            )


def _is_being_stepped(copy: OptimizerCopy) -> bool:
    return copy.source is not None and copy.source.is_usable()


def _refuse_mixture(optimizer: Optimizer, loop: PlainLoop, own: Sequence[ParameterRecord]) -> None:
    if not own:
        return
    for record in own:
        masters = loop.store_of(record).masters
        if masters.has_own_precision(record):
            raise UsageError(
                f"the optimizer was built on the model's own parameters ({record.name!r} is one, "
                f"{record.weights.dtype}), but the model was wrapped with optim_dtype={masters.optim_dtype}; build it "
                "on model.optim_parameters(), which are in that precision."
            )
    for param in _parameters_of(optimizer):
        if isinstance(param, OptimizerCopy) and param.home is not None and _loop_of(_home_of(param)) is loop:
            raise UsageError(
                f"the optimizer holds parameters of the model itself ({own[0].name!r} is one) and copies from "
                "optim_parameters(); build it on one of the two."
            )


def _check_memory(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Adam | AdamW):  # ours check by themselves, and need less
        require_state_memory(optimizer)


def _with_closure(args: Any, kwargs: Any, loops: Sequence[PlainLoop]) -> tuple[Any, Any] | None:
    """The arguments of step() with its closure, if it has one, made fit to call these models."""
    optimizer, *rest = args
    closure = kwargs.get("closure", rest[0] if rest else None)
    if not callable(closure):
        return None
    for loop in loops:
        closure = functools.partial(loop.run_closure, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (optimizer, closure, *rest[1:]), kwargs
