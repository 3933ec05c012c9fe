"""The optimizer of a trainer over a RoundPipe: it steps on masters, when the gradients have arrived.

Knows the optimizers and schedulers of accelerate and transformers.

[Note: settings of a step]
An asynchronous step runs while Trainer goes on and its scheduler sets the next learning rate. So the scheduler works on
the param groups of a SteppedOptimizer, and each step gets a copy of their settings as they are when it is issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn
from transformers.optimization import AdafactorSchedule

from roundpipe.api.proxy import ModelProxy
from roundpipe.errors import ConfigError, UsageError


class SteppedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Looks like an optimizer of accelerate; `step()` passes the step of the inner optimizer to the model.

    Has its own param groups: see [Note: settings of a step].
    """

    def __init__(self, optimizer: torch.optim.Optimizer, run_step: Callable[[Callable[[], None]], None]) -> None:
        """`run_step`: runs a function that takes the inner optimizer's step, when the gradients have arrived."""
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True  # accelerate then takes this object as it is
        self._opt_called = False  # a scheduler of torch warns if it is stepped before the optimizer
        self._run_step = run_step
        self._groups = [dict(group) for group in optimizer.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise UsageError("an optimizer of a RoundPipe trainer takes no closure in step().")
        if self.gradient_state.sync_gradients:
            self._opt_called = True
            settings = [_settings_of(group) for group in self._groups]

            def take_step() -> None:
                self._set_inner(settings)
                self.optimizer.step()

            self._run_step(take_step)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # step() sets _opt_called itself

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        self._groups.append(dict(self.optimizer.param_groups[-1]))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: each step clears the gradients that it has used."""

    def state_dict(self) -> dict[str, Any]:
        self.set_inner_settings()
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.take_inner_settings()

    def set_inner_settings(self) -> None:
        """Write the present settings to the inner optimizer. Only while no step runs."""
        self._set_inner([_settings_of(group) for group in self._groups])

    def take_inner_settings(self) -> None:
        """Take over settings that were loaded into the inner optimizer."""
        for group, inner in zip(self._groups, self.optimizer.param_groups, strict=True):
            group.update(_settings_of(inner))

    def _set_inner(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)


class KeepsGradients:
    """Stands for the model in Trainer's loop: `zero_grad()` does nothing.

    Steps clear the gradients they have used. The model's own zero_grad() would wait for a running step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def zero_grad(self) -> None:
        pass


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def give_optimizer(
    scheduler: Any, old: torch.optim.Optimizer, new: SteppedOptimizer, *, is_async: bool = False
) -> None:
    """Make a scheduler that the user has passed, and those that it contains, set the rates of another optimizer."""
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    if isinstance(scheduler, AdafactorSchedule):
        if is_async:
            raise ConfigError(
                "AdafactorSchedule reads the state of the optimizer, which an asynchronous step may be changing; use "
                "RoundPipeOptions(is_async=False), or another scheduler."
            )
        scheduler.__class__ = _AdafactorSchedule
    for part in getattr(scheduler, "_schedulers", ()):
        give_optimizer(part, old, new, is_async=is_async)


class _AdafactorSchedule(AdafactorSchedule):
    """Returns the rates of the last step. The base class looks for gradients, which a step has cleared here."""

    def get_lr(self) -> list[Any]:
        inner: Any = self.optimizer.optimizer  # type: ignore[attr-defined]
        firsts = [(group, group["params"][0]) for group in self.optimizer.param_groups]
        rates = [inner._get_lr(group, inner.state[first]) for group, first in firsts if first in inner.state]
        return rates or self.base_lrs


class _Masters(list[nn.Parameter]):
    """The masters in a param group. `in` also finds them by the model's own parameters."""

    def __init__(self, masters: Iterable[nn.Parameter], known: Mapping[int, nn.Parameter]) -> None:
        """`known`: the masters by id of the model's parameter."""
        super().__init__(masters)
        self._known = known

    def __contains__(self, param: object) -> bool:
        wanted = self._known.get(id(param), param)
        return any(master is wanted for master in self)


def put_masters_into(optimizer: torch.optim.Optimizer, model: ModelProxy) -> None:
    """Make an optimizer on the model's own parameters one on their masters."""
    masters = dict(model.optim_named_parameters())
    known = {id(master): master for master in masters.values()}
    frozen = set()
    for name, param in model.named_parameters():
        if name in masters:
            known[id(param)] = masters[name]
        else:
            frozen.add(id(param))
    groups = [[param for param in group["params"] if id(param) not in frozen] for group in optimizer.param_groups]
    unknown = [param for params in groups for param in params if id(param) not in known]
    if unknown:
        raise UsageError(
            f"the optimizer holds a parameter of shape {tuple(unknown[0].shape)} that is none of the "
            "model's. Leave `optimizers` out, pass optimizer_cls_and_kwargs, or build the optimizer on "
            "trainer.model.optim_parameters() and set trainer.optimizer."
        )
    changed = [param for params in groups for param in params if known[id(param)] is not param]
    if changed and optimizer.state:
        raise UsageError(
            "the optimizer has taken steps on the model's own parameters, and RoundPipe steps on their masters; build "
            "it anew, or on trainer.model.optim_parameters()."
        )
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = _Masters((known[id(param)] for param in params), known)
