"""Context of the running user code: its layer and phase, its iteration, and whether it is inside an `OptimizerCtx`.

Functions such as `doing_recompute` read the context; the runtime and the optimizer thread set it around layers, loss_fn
and step_fn. All state is in context variables, so each thread has its own. Knows no devices, stores or schedules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import weakref
from collections.abc import Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

import torch

from roundpipe.errors import RecomputeError
from roundpipe.monitor import Latch


class LayerPhase(enum.Enum):
    """The purpose of one forward of a layer."""

    INFERENCE = "inference"  # no backward will follow
    FORWARD = "forward"  # a recomputation and a backward will follow
    RECOMPUTE = "recompute"  # the repeated forward before a backward
    FUSED = "fused"  # a backward follows directly, without recomputation


@dataclasses.dataclass
class LayerRun:
    """One execution of one layer on one microbatch.

    While it is entered, `save_for_recompute`, `get_recompute_data` and `doing_recompute` refer to it.
    recompute_data: in the phase FORWARD the data that the layer saves; in the phase RECOMPUTE the data saved before.
    """

    phase: LayerPhase
    recompute_data: tuple[Any, ...] | None = None
    saved: bool = False

    def __enter__(self) -> LayerRun:
        self._token = _layer_run.set(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _layer_run.reset(self._token)


@dataclasses.dataclass(eq=False)
class Iteration:
    """One generation of calls together with the optimizer step that uses their gradients.

    loss_scales: for each GradScaler, the scale of the losses of this iteration.
    """

    step_finished: Latch = dataclasses.field(default_factory=Latch)
    pid: int = dataclasses.field(default_factory=os.getpid)  # in a forked child, a step of the parent never finishes
    loss_scales: weakref.WeakKeyDictionary[Any, float] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)


class StepObserver(Protocol):
    """An object that is notified, on the calling thread, when a step is given to the optimizer."""

    def step_issued(self, iteration: Iteration) -> None: ...


_layer_run: ContextVar[LayerRun | None] = ContextVar("roundpipe_layer_run", default=None)
_iteration: ContextVar[Iteration | None] = ContextVar("roundpipe_iteration", default=None)
_gradient_hook: ContextVar[bool] = ContextVar("roundpipe_gradient_hook", default=False)
_optimizer_side: ContextVar[bool] = ContextVar("roundpipe_optimizer_side", default=False)
_trial: ContextVar[bool] = ContextVar("roundpipe_trial", default=False)
_step_observers: weakref.WeakSet[Any] = weakref.WeakSet()  # one set for the process, not per thread


@contextlib.contextmanager
def within_iteration(iteration: Iteration) -> Iterator[None]:
    """Context manager that sets the current iteration."""
    token = _iteration.set(iteration)
    try:
        yield
    finally:
        _iteration.reset(token)


def gradient_hook_context() -> Context:
    """Return a copy of the current context for gradient hooks, which autograd may run on a different thread."""
    context = copy_context()  # autograd's threads do not inherit context variables
    context.run(_gradient_hook.set, True)
    return context


def in_gradient_hook() -> bool:
    """Return whether this thread is running a parameter's gradient hook, during a backward on a device."""
    return _gradient_hook.get()


def current_iteration() -> Iteration | None:
    """Return the iteration of the layer, loss_fn or step_fn that runs on this thread; None outside of these."""
    return _iteration.get()


def observe_steps(observer: StepObserver) -> None:
    """Notify `observer` of every step from now on; only a weak reference to it is kept."""
    _step_observers.add(observer)


def announce_step(iteration: Iteration) -> None:
    """Notify all observers that the step of `iteration` was given to the optimizer."""
    for observer in list(_step_observers):  # a copy: observers may be added or collected meanwhile
        observer.step_issued(iteration)


class OptimizerCtx:
    """While entered, `parameters()` and `named_parameters()` of a RoundPipe return the masters."""

    def __enter__(self) -> OptimizerCtx:
        self._token = _optimizer_side.set(True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _optimizer_side.reset(self._token)


@contextlib.contextmanager
def within_step(iteration: Iteration) -> Iterator[None]:
    """The context of step_fn: sets the iteration of the step, and what an OptimizerCtx sets."""
    tokens = _iteration.set(iteration), _optimizer_side.set(True)
    try:
        yield
    finally:
        _iteration.reset(tokens[0])
        _optimizer_side.reset(tokens[1])


@contextlib.contextmanager
def trying_out() -> Iterator[None]:
    """While entered, models run only to find out what their code does, and what large weights hold does not matter."""
    token = _trial.set(True)
    try:
        yield
    finally:
        _trial.reset(token)


def is_trying_out() -> bool:
    """Whether this thread is inside `trying_out`."""
    return _trial.get()


def on_optimizer_side() -> bool:
    """Return whether this thread is inside an `OptimizerCtx`."""
    return _optimizer_side.get()


def save_for_recompute(*data: Any) -> None:
    """Save `data` for the recomputation of this layer and microbatch; `get_recompute_data` returns it there.

    Call it at most once in a layer's forward, with tensors that do not require grad. It does nothing if no
    recomputation will follow (inference, fused stage), and in the recomputation itself.
    """
    run = _layer_run.get()
    if run is None or run.phase is LayerPhase.INFERENCE or run.phase is LayerPhase.RECOMPUTE:
        return
    if run.saved:
        raise RecomputeError(
            "save_for_recompute() was called twice in one forward of a layer; save everything in one call."
        )
    for leaf in torch.utils._pytree.tree_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise RecomputeError(
                f"save_for_recompute() got a tensor of shape {tuple(leaf.shape)} that requires grad; gradients do not "
                "flow through saved data: detach() it, or let the recomputation compute it again."
            )
    # The fused phase has the same checks but keeps nothing: its backward needs no recomputation.
    run.saved = True
    if run.phase is LayerPhase.FORWARD:
        run.recompute_data = data


def get_recompute_data() -> tuple[Any, ...]:
    """Return the data that this layer saved for this microbatch in its forward; only while `doing_recompute()`."""
    run = _layer_run.get()
    if run is None:
        raise RecomputeError(
            "get_recompute_data() was called outside a layer's forward; call it from a layer run by RoundPipe."
        )
    if run.phase is not LayerPhase.RECOMPUTE:
        raise RecomputeError(
            f"get_recompute_data() was called in the {run.phase.value} phase; check doing_recompute() first."
        )
    if run.recompute_data is None:
        raise RecomputeError(
            "get_recompute_data() was called but this layer's forward saved nothing; call save_for_recompute() there."
        )
    return run.recompute_data


def doing_recompute() -> bool:
    """Return whether the layer that runs on this thread is being recomputed for the backward pass."""
    run = _layer_run.get()
    return run is not None and run.phase is LayerPhase.RECOMPUTE
