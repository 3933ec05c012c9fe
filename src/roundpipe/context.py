"""What the code that runs now belongs to: the layer run on a device thread, the iteration, the optimizer's side.

User code (layers, loss_fn, step_fn) asks; the runtime and the optimizer thread answer by entering these contexts.
Everything is a context variable, so threads never see each other's. Knows no device, store or schedule.
"""

from __future__ import annotations

import contextlib
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
    """Why a layer's forward runs."""

    INFERENCE = "inference"  # nobody will ask for gradients
    FORWARD = "forward"  # gradients will come from a later recomputation
    RECOMPUTE = "recompute"
    FUSED = "fused"  # forward, loss and backward together: never recomputed


class LayerRun:
    """One execution of one layer on one microbatch; while entered, `save_for_recompute` and its kin refer to it."""

    def __init__(self, phase: LayerPhase, recompute_data: tuple[Any, ...] | None = None) -> None:
        self.phase = phase
        self.recompute_data = recompute_data  # in: what RECOMPUTE gets; out: what FORWARD saved
        self.saved = False

    def __enter__(self) -> LayerRun:
        self._token = _layer_run.set(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _layer_run.reset(self._token)


class Iteration:
    """All calls between two optimizer steps, and the step that consumes their gradients: one object for both.

    A GradScaler keeps in `loss_scales` the scale the losses of this iteration were multiplied with.
    """

    def __init__(self) -> None:
        self.step_finished = Latch()
        self.pid = os.getpid()  # a step that a forked child has inherited never finishes there
        self.loss_scales: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


class StepObserver(Protocol):
    """Somebody who must know, on the calling thread, that a step was handed to the optimizer."""

    def step_issued(self, iteration: Iteration) -> None: ...


_layer_run: ContextVar[LayerRun | None] = ContextVar("roundpipe_layer_run", default=None)
_iteration: ContextVar[Iteration | None] = ContextVar("roundpipe_iteration", default=None)
_gradient_hook: ContextVar[bool] = ContextVar("roundpipe_gradient_hook", default=False)
_optimizer_side: ContextVar[bool] = ContextVar("roundpipe_optimizer_side", default=False)
_step_observers: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def within_iteration(iteration: Iteration) -> Iterator[None]:
    token = _iteration.set(iteration)
    try:
        yield
    finally:
        _iteration.reset(token)


def gradient_hook_context() -> Context:
    """A context like the present one for hooks of parameters, which autograd may run on a thread of its own."""
    context = copy_context()
    context.run(_gradient_hook.set, True)
    return context


def in_gradient_hook() -> bool:
    """Whether a gradient hook of a parameter runs on this thread, during a device's backward."""
    return _gradient_hook.get()


def current_iteration() -> Iteration | None:
    """The iteration of the loss_fn or step_fn that runs on this thread; None on the user's own threads."""
    return _iteration.get()


def observe_steps(observer: StepObserver) -> None:
    """Tell `observer` (held weakly) of every step from now on."""
    _step_observers.add(observer)


def announce_step(iteration: Iteration) -> None:
    for observer in list(_step_observers):
        observer.step_issued(iteration)


class OptimizerCtx:
    """Inside it `parameters()` and `named_parameters()` of a RoundPipe give the optimizer's copies."""

    def __enter__(self) -> OptimizerCtx:
        self._token = _optimizer_side.set(True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _optimizer_side.reset(self._token)


def on_optimizer_side() -> bool:
    return _optimizer_side.get()


def _current_layer_run(caller: str) -> LayerRun:
    run = _layer_run.get()
    if run is None:
        raise RecomputeError(f"{caller}() was called outside a layer's forward; call it from a layer run by RoundPipe.")
    return run


def save_for_recompute(*data: Any) -> None:
    """Keep `data` for the recomputation of this layer and microbatch; see `get_recompute_data`.

    At most once per layer and forward; tensors in it must not require grad. Does nothing where no recomputation
    will follow (inference, the fused stage) and in the recomputation itself.
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
    run.saved = True
    if run.phase is LayerPhase.FORWARD:
        run.recompute_data = data


def get_recompute_data() -> tuple[Any, ...]:
    """What this layer saved for this microbatch in its forward pass; only while `doing_recompute()`."""
    run = _current_layer_run("get_recompute_data")
    if run.phase is not LayerPhase.RECOMPUTE:
        raise RecomputeError(
            f"get_recompute_data() was called in the {run.phase.value} phase; ask doing_recompute() first."
        )
    if run.recompute_data is None:
        raise RecomputeError(
            "get_recompute_data() was called but this layer's forward saved nothing; call save_for_recompute() there."
        )
    return run.recompute_data


def doing_recompute() -> bool:
    """Whether the layer that runs on this thread is being recomputed for the backward pass."""
    run = _layer_run.get()
    return run is not None and run.phase is LayerPhase.RECOMPUTE
