"""The optimizer of a trainer over a RoundPipe: it steps on masters, when the gradients have arrived.

Knows the optimizers and schedulers of accelerate and transformers. The scheduler sets the next learning rate while a
step runs: see [Note: settings of a step] in param_groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn
from transformers.optimization import AdafactorSchedule

from roundpipe.api.proxy import ModelProxy
from roundpipe.errors import ConfigError, UsageError


class SteppedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Looks like an optimizer of accelerate; `step()` passes the step of the inner optimizer to the model."""

    def __init__(self, optimizer: torch.optim.Optimizer, run_step: Callable[[Callable[[], None]], None]) -> None:
        """`run_step`: runs a function that takes the inner optimizer's step, when the gradients have arrived."""
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True  # accelerate then takes this object as it is
        self._opt_called = False  # a scheduler of torch warns if it is stepped before the optimizer
        self._run_step = run_step

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise UsageError("an optimizer of a RoundPipe trainer takes no closure in step().")
        if self.gradient_state.sync_gradients:
            self._opt_called = True
            self._run_step(self.optimizer.step)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # step() sets _opt_called itself

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: each step clears the gradients that it has used."""


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
    old, optimizer.param_groups = optimizer.param_groups, []
    for group, params in zip(old, groups, strict=True):
        group["params"] = [known[id(param)] for param in params]
        optimizer.add_param_group(group)  # tells the masters
        optimizer.param_groups[-1]["params"] = _Masters(group["params"], known)
