"""GradScaler: multiplies losses by a scale, divides gradients by it, and adapts the scale so that it does not overflow.

`scale` is called in loss_fn on device threads, `unscale_` and `step` in step_fn on the optimizer thread, and all other
methods on the main thread. Without RoundPipe one thread calls everything. Knows iterations, never models or schedules.
The scale is stored as the float32 value by which losses are multiplied; its inverse must be a finite float32 number
too.

[Note: one scale per iteration] The first loss of an iteration stores the current scale in `iteration.loss_scales`. All
losses of the iteration, and the step that consumes their gradients, use this scale. `update()` changes only the scale
of iterations that start later. So a gradient is always divided by the scale of its loss.

[Note: windows] A window is the set of steps issued between two update() calls. The update() that ends a window makes
one decision about the scale from the results of these steps. A step may still be running when that update() is called,
so with is_async=True the decision takes effect at the next update():

    main thread      step 1   update 1          step 2   update 2            step 3   update 3
    optimizer        [ step 1 ....... ]         [ step 2 ....... ]           [ step 3 ....... ]
    window           1                          2                            3
    async: applies            -                          window 1                     window 2
    sync:  applies            window 1                   window 2                     window 3
"""

from __future__ import annotations

import enum
import math
import os
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
from roundpipe.monitor import Alarm, process_lock, shielded
from roundpipe.optim.gradients import unscale

# Checks and arithmetic of scales.


def host_tensor(scale: float) -> Tensor:
    """A float32 scalar tensor in host memory."""
    with torch.inference_mode(False):  # autograd cannot save an inference tensor for the backward pass
        return torch.tensor(scale, dtype=torch.float32, device="cpu")


def _float32(value: float) -> float:
    return host_tensor(value).item()


def _usable_scale(scale: float) -> bool:
    return math.isfinite(scale) and scale > 0.0 and math.isfinite(_float32(1.0 / scale))


def product_or_same(scale: float, factor: float) -> float:
    """`scale * factor` as a float32 number; `scale` if the product or its inverse is not a usable float32 number."""
    product = _float32(scale * factor)
    return product if _usable_scale(product) else scale


def checked_new_scale(new_scale: float | Tensor) -> float:
    """The `new_scale` argument of update() as a float32 number; raises ConfigError if it is not usable."""
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
    """`value` as a float32 number; raises ConfigError if it is not a usable scale."""
    scale = _float32(_checked_number(name, value))
    if not _usable_scale(scale):
        raise ConfigError(
            f"GradScaler: {name}={value!r} is not a usable scale; give a number greater than 0 that is a finite "
            "float32 value, as must be its inverse."
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
    """`value` as an int; raises ArgumentTypeError if it is not an integer, ConfigError if it is below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"GradScaler: {name}={value!r} is a {type(value).__name__}; give an integer.")
    if value < at_least:
        raise ConfigError(f"GradScaler: {name}={value!r}; give an integer of at least {at_least}.")
    return int(value)


def check_keys(what: str, entries: Mapping[str, Any], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise ConfigError if `entries` of a state dict lack required keys or have unknown ones."""
    missing = sorted(set(required) - set(entries))
    unknown = sorted(set(entries) - set(required) - set(optional))
    if missing or unknown:
        raise ConfigError(f"The GradScaler {what} lacks the keys {missing} and has the unknown keys {unknown}.")


# Windows: the steps between two updates.

_WAIT_SLICE_S = 60.0  # waits are divided, because the watchdog limit may exceed the longest wait that a lock supports
_DEFERRED_KEYS = ("stepped", "found_inf", "new_scale")


class LastCall(enum.Enum):
    """Which method of the GradScaler was last called for an optimizer in one iteration."""

    UNSCALE = "unscale_"
    STEP = "step"


@dataclass
class OptimizerProgress:
    """Which method was last called for one optimizer in one iteration, and whether a gradient was not finite."""

    last_call: LastCall = LastCall.UNSCALE
    found_inf: bool = False


StepRecord = dict[torch.optim.Optimizer, OptimizerProgress]


@dataclass
class Window:
    """The steps between two update() calls and their results; see [Note: windows]."""

    running: list[Iteration] = field(default_factory=list)  # iterations whose step is not counted yet
    stepped: bool = False  # whether any scaler.step() has returned
    found_inf: bool = False  # whether any gradient was not finite

    def count(self, record: StepRecord) -> None:
        """Add the results of one iteration to those of the window."""
        self.stepped |= any(progress.last_call is LastCall.STEP for progress in record.values())
        self.found_inf |= any(progress.found_inf for progress in record.values())


@dataclass
class Decision:
    """The decision of one update(): `new_scale` if the user gave one, else the results of the steps in `window`."""

    window: Window
    new_scale: float | None = None


def loaded_decision(deferred: Mapping[str, Any] | None) -> Decision | None:
    """The decision stored in the `_deferred` entry of a state dict; None if there is none."""
    if deferred is None:
        return None
    check_keys("state dict's _deferred", deferred, _DEFERRED_KEYS)
    window = Window(stepped=bool(deferred["stepped"]), found_inf=bool(deferred["found_inf"]))
    new_scale = deferred["new_scale"]
    return Decision(window, None if new_scale is None else checked_scale("new_scale", new_scale))


def wait_for_steps(method: str, iterations: Iterable[Iteration]) -> None:
    """Block until the steps of all iterations are done. Logs a stall each time the watchdog limit has passed.

    The caller holds no lock. In a forked child, steps of the parent process are ignored: they never finish there.
    Raises StallError after the user's wait limit: see [Note: stalls] in monitor.
    """
    alarm = Alarm(f"an optimizer step that was issued and has not finished, in GradScaler.{method}()", {})
    for iteration in [iteration for iteration in iterations if iteration.pid == os.getpid()]:
        while not iteration.step_finished.wait(min(alarm.due_in_s(), _WAIT_SLICE_S)):
            alarm.ring_if_due()


_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_NOT_COPIED = ("_lock", "_window", "_records", "_main_record", "_loss_factor")  # each copy makes new ones in `_open`


class GradScaler:
    """Dynamic loss scaling across RoundPipe's threads, used like `torch.amp.GradScaler`.

    Differs from torch's GradScaler in four points: `update()` has the argument `is_async`; an `update()` without a step
    before it does nothing; `step()` steps an optimizer even if it has no gradients; and a scale without a finite
    float32 inverse is refused.
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
        """Create the fields that are neither copied nor saved, and register for `step_issued` notifications."""
        self._lock = process_lock()  # guards every field; released while gradients are unscaled or steps awaited
        self._window = Window()
        self._records: weakref.WeakKeyDictionary[Iteration, StepRecord] = weakref.WeakKeyDictionary()
        self._main_record: StepRecord = {}  # for steps outside any iteration; these are done when step() returns
        self._loss_factor = host_tensor(self._scale)
        if self._enabled:
            context.observe_steps(self)

    # ---- called in loss_fn -------------------------------------------------------------------------------------------

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
        """The scale of the current iteration in loss_fn and step_fn; elsewhere the scale of the next iteration."""
        if not self._enabled:
            return 1.0
        with self._lock:
            return self._scale_in_use()

    def _scale_in_use(self) -> float:
        """The scale that applies now, see [Note: one scale per iteration]. The caller holds the lock."""
        iteration = context.current_iteration()
        return self._scale if iteration is None else iteration.loss_scales.setdefault(self, self._scale)

    # ---- called in step_fn -------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale of their losses. At most once per iteration, before step()."""
        if not self._enabled:
            return
        _check_optimizer("unscale_", optimizer)
        with self._lock:
            record = self._current_record()
            if optimizer in record:
                raise UsageError(
                    f"unscale_() was called after {record[optimizer].last_call.value}() of the same optimizer in one "
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
        """Call `unscale_` unless that was done, then `optimizer.step(*args, **kwargs)` if all gradients are finite."""
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
        elif progress.last_call is LastCall.STEP:
            raise UsageError(
                "step() was called twice for the same optimizer in one iteration; call it once. Outside RoundPipe's "
                "step_fn, update() ends an iteration."
            )
        step_result = None if progress.found_inf else optimizer.step(*args, **kwargs)
        with self._lock:
            progress.last_call = LastCall.STEP
        return step_result

    def _current_record(self) -> StepRecord:
        """The record of the current iteration. The caller holds the lock."""
        iteration = context.current_iteration()
        return self._main_record if iteration is None else self._records.setdefault(iteration, {})

    # ---- called on the main thread -----------------------------------------------------------------------------------

    def step_issued(self, iteration: Iteration) -> None:
        """Add a step to the window. RoundPipe calls this when it gives the step to the optimizer thread."""
        with self._lock:
            iteration.loss_scales.setdefault(self, self._scale)
            self._window.running.append(iteration)
            self._count_finished(self._window)  # if update() is never called, `running` must not grow forever

    def update(self, new_scale: float | Tensor | None = None, is_async: bool = True) -> None:
        """Set the scale to `new_scale`, or adapt it to the results of the steps since the last update().

        A window is the set of steps between two update() calls. One with a gradient that is not finite multiplies the
        scale by backoff_factor. After growth_interval consecutive windows without one, the scale is multiplied by
        growth_factor. A window without a step of this scaler changes nothing. `is_async=True`: the change takes effect
        at the next update(). `is_async=False`: update() waits for all steps, and the change takes effect at once. Uses
        the factors and the interval that are set at the time when the change takes effect.
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
                # Another thread may have issued steps since this call waited for all steps: the new window keeps them.
                self._window.running = decision.window.running

    def _end_window(self, given_scale: float | None) -> Decision:
        """Return the decision of the current window and start a new window. The caller holds the lock."""
        self._window.count(self._main_record)
        decision = Decision(self._window, given_scale)
        self._window, self._main_record = Window(), {}
        return decision

    def _count_finished(self, window: Window) -> None:
        """Add the results of finished steps to the window and remove them from `running`. The caller holds the lock."""
        for iteration in window.running:
            if iteration.step_finished.is_set():
                window.count(self._records.pop(iteration, {}))
        window.running = [iteration for iteration in window.running if not iteration.step_finished.is_set()]

    def _apply(self, decision: Decision) -> None:
        """Change the scale and the growth tracker as `decision` says. The caller holds the lock."""
        self._count_finished(decision.window)
        if decision.new_scale is not None:
            self._scale = decision.new_scale  # as in torch, the growth tracker keeps its count
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

    # ---- state dicts and copies --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries and `_deferred`, the decision of the last asynchronous update(); {} if disabled.

        Call it after update(), as in torch: the results of steps after the last update() are not included. Waits for
        the steps of the deferred decision but does not apply the decision. So training gets the same scales whether it
        continues or loads the dict.
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
        """The deferred decision as plain values. The caller holds the lock; the steps of the decision are done."""
        if self._deferred is None:
            return None
        window = self._deferred.window
        self._count_finished(window)
        return {"stepped": window.stepped, "found_inf": window.found_inf, "new_scale": self._deferred.new_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class or of torch's GradScaler.

        Steps issued before keep their scale, but their results do not change the scale any more.
        """
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
        """The state for copies and pickles. As in `state_dict()`, steps after the last update() are not included."""
        deferred = loaded_decision(self.state_dict().get("_deferred"))
        with self._lock:
            kept = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return kept | {"_deferred": deferred}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _multiply(outputs: Any, factor: Tensor) -> Any:
    """Multiply a tensor, or each tensor of a nested iterable, by `factor`.

    `factor` is a scalar tensor in host memory. Kernels on any device receive such a tensor by value, so one tensor
    serves all devices and streams without copies or waits. Types are promoted as in torch.
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
    """Raise ArgumentTypeError unless `optimizer` has parameter groups.

    It need not be a torch.optim.Optimizer, so that wrappers of optimizers are accepted.
    """
    if isinstance(optimizer, torch.nn.Module) or not hasattr(optimizer, "param_groups"):
        raise ArgumentTypeError(
            f"GradScaler.{method}() got a {type(optimizer).__name__}; pass the torch.optim.Optimizer that was built on "
            "model.optim_parameters()."
        )


def _refuse_inside_iteration(method: str) -> None:
    if context.current_iteration() is not None:
        raise UsageError(f"GradScaler.{method}() was called in loss_fn or step_fn; call it on the main thread.")
