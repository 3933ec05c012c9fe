"""Scales losses up and gradients down again, and looks for the largest scale that does not overflow.

Called by users: `scale` in loss_fn (device threads), `unscale_` and `step` in step_fn (optimizer thread), everything
else on the main thread; or all of it on one thread, without RoundPipe. Knows iterations, never models or schedules.

[Note: one scale per iteration] The first scale an iteration's losses are multiplied with is written into
`iteration.loss_scales` and counts until the step that consumes their gradients. `update()` moves only the scale that
later iterations start with, so a change can never fall between a loss and its gradient.

What steps decide and when it counts: [Note: windows] in optim.scale_window.

The numbers of a GradScaler: which ones are fit to use, and how a scale moves.

Used by optim.grad_scaler and optim.scale_window. A scale is kept as the float32 value losses are multiplied with, and
its inverse must be a finite float32 number too. Knows no step and no gradient.

The steps between two updates of a GradScaler, what they found, and what that decides about the scale.

Used by optim.grad_scaler under its lock, except for the waiting. Knows steps by their iteration, never gradients.

[Note: windows] Every update() ends a window: the steps issued since the update() before it. The window yields one
decision. A step may still be running when its update() is called, so an async decision is put off by one update():

    main thread      step 1   update 1          step 2   update 2            step 3   update 3
    optimizer        [ step 1 ....... ]         [ step 2 ....... ]           [ step 3 ....... ]
    window           1                          2                            3
    async: applies            -                          window 1                     window 2
    sync:  applies            window 1                   window 2                     window 3
"""

from __future__ import annotations

import enum
import logging
import math
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, overload

import torch
from torch import Tensor

from roundpipe import context
from roundpipe.context import Iteration
from roundpipe.errors import ArgumentTypeError, ConfigError, UsageError
from roundpipe.monitor import process_lock, shielded, stall_report, watchdog_limit_s
from roundpipe.optim.gradients import unscale


def host_tensor(scale: float) -> Tensor:
    with torch.inference_mode(False):  # it is kept, and backward passes must be able to save it
        return torch.tensor(scale, dtype=torch.float32, device="cpu")


def _float32(value: float) -> float:
    return host_tensor(value).item()


def _usable_scale(scale: float) -> bool:
    return math.isfinite(scale) and scale > 0.0 and math.isfinite(_float32(1.0 / scale))


def product_or_same(scale: float, factor: float) -> float:
    """The product, as float32; the old scale where that could no longer be multiplied and divided with."""
    product = _float32(scale * factor)
    return product if _usable_scale(product) else scale


def checked_new_scale(new_scale: float | Tensor) -> float:
    if isinstance(new_scale, Tensor):
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ConfigError(
                f"GradScaler.update() got a new_scale of shape {tuple(new_scale.shape)} and requires_grad="
                f"{new_scale.requires_grad}; pass a number or a tensor of one element that does not require grad."
            )
        return checked_scale("new_scale", new_scale.item())
    return checked_scale("new_scale", new_scale)


def _checked_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"GradScaler: {name}={value!r} is a {type(value).__name__}; give a number.")
    return float(value)


def checked_scale(name: str, value: Any) -> float:
    scale = _float32(_checked_number(name, value))
    if not _usable_scale(scale):
        raise ConfigError(
            f"GradScaler: {name}={value!r} is no scale; give a number greater than 0 that has, like its inverse, a "
            "finite float32 value."
        )
    return scale


def checked_growth_factor(value: Any) -> float:
    factor = _checked_number("growth_factor", value)
    if not 1.0 < factor < math.inf:
        raise ConfigError(f"GradScaler: growth_factor={value!r}; give a finite number greater than 1.")
    return factor


def checked_backoff_factor(value: Any) -> float:
    factor = _checked_number("backoff_factor", value)
    if not 0.0 < factor < 1.0:
        raise ConfigError(f"GradScaler: backoff_factor={value!r}; give a number between 0 and 1, both excluded.")
    return factor


def checked_growth_interval(value: Any) -> int:
    return checked_count("growth_interval", value, at_least=1)


def checked_count(name: str, value: Any, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"GradScaler: {name}={value!r} is a {type(value).__name__}; give an integer.")
    if value < at_least:
        raise ConfigError(f"GradScaler: {name}={value!r}; give an integer of at least {at_least}.")
    return int(value)


def check_keys(what: str, entries: Mapping[str, Any], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    missing = sorted(set(required) - set(entries))
    unknown = sorted(set(entries) - set(required) - set(optional))
    if missing or unknown:
        raise ConfigError(f"The GradScaler {what} lacks the keys {missing} and has the unknown keys {unknown}.")


logger = logging.getLogger("roundpipe")

_WAIT_SLICE_S = 60.0  # a limit may be longer than a lock can wait in one go
_DEFERRED_KEYS = ("stepped", "found_inf", "new_scale")


class Stage(enum.Enum):
    """How far one optimizer is in one iteration."""

    UNSCALED = "unscale_"
    STEPPED = "step"


@dataclass
class OptimizerProgress:
    stage: Stage = Stage.UNSCALED
    found_inf: bool = False


StepRecord = dict[torch.optim.Optimizer, OptimizerProgress]


@dataclass
class Window:
    """The steps between two update() calls, and what is known of them; see [Note: windows]."""

    running: list[Iteration] = field(default_factory=list)
    stepped: bool = False  # whether any scaler.step() ran to its end
    found_inf: bool = False

    def count(self, record: StepRecord) -> None:
        self.stepped |= any(progress.stage is Stage.STEPPED for progress in record.values())
        self.found_inf |= any(progress.found_inf for progress in record.values())


@dataclass
class Decision:
    """What one update() decided: a scale given by the user, or whatever the steps of its window say."""

    window: Window
    new_scale: float | None = None


def loaded_decision(deferred: Mapping[str, Any] | None) -> Decision | None:
    if deferred is None:
        return None
    check_keys("state dict's _deferred", deferred, _DEFERRED_KEYS)
    window = Window(stepped=bool(deferred["stepped"]), found_inf=bool(deferred["found_inf"]))
    new_scale = deferred["new_scale"]
    return Decision(window, None if new_scale is None else checked_scale("new_scale", new_scale))


def wait_for_steps(method: str, iterations: Iterable[Iteration]) -> None:
    """Block, holding no lock, until all steps are done; each watchdog limit that passes is reported."""
    limit_s = watchdog_limit_s()
    what = f"an optimizer step that was issued and has not finished, in GradScaler.{method}()"
    for iteration in [iteration for iteration in iterations if iteration.pid == os.getpid()]:
        begin_s = time.monotonic()
        due_s = begin_s + limit_s
        while not iteration.step_finished.wait(min(due_s - time.monotonic(), _WAIT_SLICE_S)):
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = now_s + limit_s
                logger.warning("%s", stall_report(what, now_s - begin_s, {}))


_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_NOT_COPIED = ("_lock", "_window", "_records", "_main_record", "_loss_factor")  # made by GradScaler._open


class GradScaler:
    """Dynamic loss scaling; used like `torch.amp.GradScaler`, across RoundPipe's threads.

    Differs from torch's in four points: `update()` takes `is_async`, an `update()` without any step before it does
    nothing, an optimizer without any gradient is stepped, and no scale is taken whose inverse is not a float32 number.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._scale = checked_scale("init_scale", init_scale) if enabled else 1.0
        self._growth_factor = checked_growth_factor(growth_factor) if enabled else growth_factor
        self._backoff_factor = checked_backoff_factor(backoff_factor) if enabled else backoff_factor
        self._growth_interval = checked_growth_interval(growth_interval) if enabled else growth_interval
        self._growth_tracker = 0
        self._deferred: Decision | None = None
        self._open()

    def _open(self) -> None:
        """Make what is neither copied nor saved, and listen for steps."""
        self._lock = process_lock()  # guards every field; never held while gradients are worked on or steps awaited
        self._window = Window()
        self._records: weakref.WeakKeyDictionary[Iteration, StepRecord] = weakref.WeakKeyDictionary()
        self._main_record: StepRecord = {}  # of steps outside any iteration; they are done when they return
        self._loss_factor = host_tensor(self._scale)
        if self._enabled:
            context.observe_steps(self)

    # ---- loss_fn -----------------------------------------------------------------------------------------------------

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: list[Tensor]) -> list[Tensor]: ...
    @overload
    def scale(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Tensor | Iterable[Tensor]:
        """Multiply a loss, or an iterable of losses, by the scale of this iteration."""
        if not self._enabled:
            return outputs
        with self._lock:
            scale = self._scale_in_use()
            if self._loss_factor.item() != scale:
                self._loss_factor = host_tensor(scale)
            factor = self._loss_factor
        scaled: Tensor | Iterable[Tensor] = _multiply(outputs, factor)
        return scaled

    def get_scale(self) -> float:
        """The scale of the losses at hand: in loss_fn and step_fn their iteration's, elsewhere the current one."""
        if not self._enabled:
            return 1.0
        with self._lock:
            return self._scale_in_use()

    def _scale_in_use(self) -> float:
        """The lock is held. See [Note: one scale per iteration]."""
        iteration = context.current_iteration()
        return self._scale if iteration is None else iteration.loss_scales.setdefault(self, self._scale)

    # ---- step_fn -----------------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale of their losses; at most once per iteration, before step()."""
        if not self._enabled:
            return
        _check_optimizer("unscale_", optimizer)
        with self._lock:
            record = self._current_record()
            if optimizer in record:
                raise UsageError(
                    f"unscale_() was called after {record[optimizer].stage.value}() of the same optimizer in one "
                    "iteration; call it once, before step(). Outside RoundPipe's step_fn, update() ends an iteration."
                )
            progress = record[optimizer] = OptimizerProgress()
            scale = self._scale_in_use()
        try:
            found_inf = unscale(optimizer, 1.0 / scale)
        except BaseException:
            with self._lock:
                del record[optimizer]
            raise
        with self._lock:
            progress.found_inf = found_inf

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients unless that was done, then `optimizer.step(*args, **kwargs)` if all are finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        _check_optimizer("step", optimizer)
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise UsageError("GradScaler.step() got a closure; that is not supported while the scaler is enabled.")
        with self._lock:
            record = self._current_record()
            progress = record.get(optimizer)
        if progress is None:
            self.unscale_(optimizer)
            progress = record[optimizer]
        elif progress.stage is Stage.STEPPED:
            raise UsageError(
                "step() was called twice for the same optimizer in one iteration; call it once. Outside RoundPipe's "
                "step_fn, update() ends an iteration."
            )
        step_result = None if progress.found_inf else optimizer.step(*args, **kwargs)
        with self._lock:
            progress.stage = Stage.STEPPED
        return step_result

    def _current_record(self) -> StepRecord:
        """The lock is held."""
        iteration = context.current_iteration()
        return self._main_record if iteration is None else self._records.setdefault(iteration, {})

    # ---- main thread -------------------------------------------------------------------------------------------------

    def step_issued(self, iteration: Iteration) -> None:
        """RoundPipe tells that the step of `iteration` was handed to the optimizer thread."""
        with self._lock:
            iteration.loss_scales.setdefault(self, self._scale)
            self._window.running.append(iteration)
            self._count_finished(self._window)  # a scaler that nobody updates must not gather iterations

    def update(self, new_scale: float | Tensor | None = None, is_async: bool = True) -> None:
        """Let the steps since the last update(), or `new_scale`, decide about the scale; see [Note: windows].

        A step with a gradient that was not finite multiplies the scale by backoff_factor, growth_interval windows in
        a row without one multiply it by growth_factor; a window in which this scaler stepped nothing changes nothing.
        `is_async=True`: the decision counts from the next update() on. `is_async=False`: waits for all steps; counts
        at once. Factors and interval are those at the time the decision comes to count.
        """
        if not self._enabled:
            return
        _refuse_inside_iteration("update")
        given_scale = None if new_scale is None else checked_new_scale(new_scale)
        with self._lock:
            awaited = list(self._deferred.window.running) if self._deferred else []
            awaited += [] if is_async else self._window.running
        wait_for_steps("update", awaited)
        shielded(lambda: self._update(given_scale, is_async))

    def _update(self, given_scale: float | None, is_async: bool) -> None:
        with self._lock:
            if self._deferred:
                self._apply(self._deferred)
            decision = self._end_window(given_scale)
            self._deferred = decision if is_async else None
            if not is_async:
                self._apply(decision)
                self._window.running = decision.window.running  # issued by another thread since we waited

    def _end_window(self, given_scale: float | None) -> Decision:
        """The lock is held."""
        self._window.count(self._main_record)
        decision = Decision(self._window, given_scale)
        self._window, self._main_record = Window(), {}
        return decision

    def _count_finished(self, window: Window) -> None:
        """The lock is held. Take over the results of the steps that are done and forget the steps."""
        for iteration in window.running:
            if iteration.step_finished.is_set():
                window.count(self._records.pop(iteration, {}))
        window.running = [iteration for iteration in window.running if not iteration.step_finished.is_set()]

    def _apply(self, decision: Decision) -> None:
        """The lock is held."""
        self._count_finished(decision.window)
        if decision.new_scale is not None:
            self._scale = decision.new_scale  # the growth tracker goes on, as torch's does
        elif decision.window.stepped and decision.window.found_inf:
            self._scale = product_or_same(self._scale, self._backoff_factor)
            self._growth_tracker = 0
        elif decision.window.stepped:
            self._growth_tracker += 1
            if self._growth_tracker >= self._growth_interval:
                self._scale = product_or_same(self._scale, self._growth_factor)
                self._growth_tracker = 0

    # ---- settings ----------------------------------------------------------------------------------------------------

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        with self._lock:
            self._growth_factor = checked_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        with self._lock:
            self._backoff_factor = checked_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        with self._lock:
            self._growth_interval = checked_growth_interval(new_interval)

    def is_enabled(self) -> bool:
        return self._enabled

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries and `_deferred`, the decision of the last async update(); {} if disabled.

        Call it after update(), as with torch: steps that no update() covers yet are not in it. Waits for the steps
        the deferred decision covers and applies nothing: the run that goes on and the run that loads the dict see the
        same scales.
        """
        if not self._enabled:
            return {}
        _refuse_inside_iteration("state_dict")
        with self._lock:
            awaited = list(self._deferred.window.running) if self._deferred else []
        wait_for_steps("state_dict", awaited)
        with self._lock:
            return {
                "scale": self._scale,
                "growth_factor": self._growth_factor,
                "backoff_factor": self._backoff_factor,
                "growth_interval": self._growth_interval,
                "_growth_tracker": self._growth_tracker,
                "_deferred": self._deferred_state(),
            }

    def _deferred_state(self) -> dict[str, Any] | None:
        """The lock is held and the covered steps are done."""
        if self._deferred is None:
            return None
        window = self._deferred.window
        self._count_finished(window)
        return {"stepped": window.stepped, "found_inf": window.found_inf, "new_scale": self._deferred.new_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a `state_dict()`, torch's included. Steps issued before keep their scale but decide nothing."""
        if not self._enabled:
            return
        _refuse_inside_iteration("load_state_dict")
        if not state_dict:
            raise UsageError("The GradScaler state dict is empty; it was probably saved from a disabled GradScaler.")
        check_keys("state dict", state_dict, _TORCH_KEYS, optional=("_deferred",))
        scale = checked_scale("scale", state_dict["scale"])
        growth_factor = checked_growth_factor(state_dict["growth_factor"])
        backoff_factor = checked_backoff_factor(state_dict["backoff_factor"])
        growth_interval = checked_growth_interval(state_dict["growth_interval"])
        growth_tracker = checked_count("_growth_tracker", state_dict["_growth_tracker"], at_least=0)
        deferred = loaded_decision(state_dict.get("_deferred"))
        with self._lock:
            self._scale, self._growth_tracker, self._growth_interval = scale, growth_tracker, growth_interval
            self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
            self._deferred, self._window = deferred, Window()

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins where `state_dict()` stands; steps no update() covers yet stay with the original."""
        deferred = loaded_decision(self.state_dict().get("_deferred"))
        with self._lock:
            kept = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return kept | {"_deferred": deferred}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _multiply(outputs: Any, factor: Tensor) -> Any:
    """`factor` is a float32 tensor without dimensions in host memory: kernels on any device take it by value.

    So one tensor serves all devices and streams, without copy, wait or ordering, and types promote as torch's do.
    """
    if isinstance(outputs, Tensor):
        return outputs * factor
    if not isinstance(outputs, Iterable) or isinstance(outputs, str | bytes | Mapping):
        raise ArgumentTypeError(
            f"GradScaler.scale() got a {type(outputs).__name__}; pass a tensor or an iterable of tensors."
        )
    scaled = (_multiply(output, factor) for output in outputs)
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*scaled)
    return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled


def _check_optimizer(method: str, optimizer: object) -> None:
    """Whatever has parameter groups and can step will do: wrappers of optimizers need not be optimizers."""
    if isinstance(optimizer, torch.nn.Module) or not hasattr(optimizer, "param_groups"):
        raise ArgumentTypeError(
            f"GradScaler.{method}() got a {type(optimizer).__name__}; pass the torch.optim.Optimizer that was built on "
            "model.optim_parameters()."
        )


def _refuse_inside_iteration(method: str) -> None:
    if context.current_iteration() is not None:
        raise UsageError(f"GradScaler.{method}() was called in loss_fn or step_fn; call it on the main thread.")
