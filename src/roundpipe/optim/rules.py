"""The arithmetic of each optimizer: what one pass, memory checks, checkpoints and machines know of an optimizer.

A Rule says which states an optimizer has, which options of a group the kernel can carry out, and the numbers of a step.
The arithmetic itself is a function in native/rules.h. A new optimizer with one pass needs a rule here, its function,
and a class that has torch's interface (OnePassOptimizer in `one_pass`). Knows neither layers nor the memory of tensors.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roundpipe.optim.native.kernel import Kernel, StepNumbers
from roundpipe.store.forms import MOMENTS, PLAIN, SMALLEST, Form, form_of

Group = dict[str, Any]
State = Mapping[str, Any]


def moments_of(group: Group) -> str:
    """The option `moments` of a group."""
    moments: str = group.get("moments", "float32")
    return moments


def has_low_bits(group: Group, param: Tensor) -> bool:
    """Whether the states of a parameter are stored in low bits: the group says so, and the parameter is large.

    Blocks follow row-major order, so parameters in another memory order keep plain states, too.
    """
    if moments_of(group) == "float32":
        return False
    return param.numel() >= SMALLEST and param.dtype is torch.float32 and param.is_contiguous()


def step_after(state: State) -> int:
    """The number of a parameter's next step, counted from 1, as states in low bits need it."""
    return int(state["step"]) + 1 if "step" in state else 1


class Rule(abc.ABC):
    """The arithmetic of one optimizer."""

    has_step_count = False  # whether a state also has the number of its steps, as the scalar tensor `step`
    squares: frozenset[str] = frozenset()  # the states that are means of squares
    can_be_low = True  # whether the states can be stored in low bits: they begin at zero

    @abc.abstractmethod
    def state_names(self, group: Group) -> tuple[str, ...]:
        """The states of a parameter that have its size, such as moments, in the order of the kernel's arguments."""

    def storage(self, group: Group) -> tuple[tuple[str, ...], str | None]:
        """What the forms of the states depend on besides the parameter: if it is equal, they are equal."""
        return self.state_names(group), group.get("moments")

    def forms(self, group: Group, param: Tensor) -> dict[str, Form]:
        """How each state of a parameter is stored. The state has the parts of these forms."""
        names = self.state_names(group)
        if not has_low_bits(group, param):
            return dict.fromkeys(names, PLAIN)
        return {name: form_of(group["moments"], is_square=name in self.squares) for name in names}

    def counts_steps(self, group: Group, param: Tensor) -> bool:
        """Whether the state of a parameter has the number of its steps. States in low bits need it for rounding."""
        return self.has_step_count or has_low_bits(group, param)

    @abc.abstractmethod
    def suits_kernel(self, group: Group) -> bool:
        """Whether the kernel can carry out the options of a group. Its plain optimizer carries out the others."""

    def has_states(self, state: State | None) -> bool:
        """Whether a parameter has states of earlier steps; otherwise its next step makes them, filled with zeros."""
        return bool(state)

    def progress(self, state: State) -> int:
        """What the numbers of the next step depend on besides the options of the group."""
        return 0

    def step_numbers(self, group: Group, progress: int, factors: tuple[float, ...], step: int = 0) -> StepNumbers:
        """The numbers of a step. `factors`: by which gradients are first multiplied, in order.

        `step`: the number of the step, counted from 1, which states in low bits need.
        """
        kernel, numbers = self._numbers(group, progress)
        return StepNumbers(kernel, numbers, (*factors, -1.0) if group["maximize"] else factors, step)

    @abc.abstractmethod
    def _numbers(self, group: Group, progress: int) -> tuple[Kernel, tuple[float, ...]]:
        """The function in rules.h and its numbers, in the order in which it reads them."""


class AdamRule(Rule):
    """Adam and AdamW, as torch's fused kernel computes them."""

    has_step_count = True
    squares = frozenset(("exp_avg_sq", "max_exp_avg_sq"))

    def __init__(self, *, is_decoupled: bool) -> None:
        """`is_decoupled`: True for the weight decay of AdamW, False for that of Adam, if the group does not say it."""
        self._is_decoupled = is_decoupled

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def suits_kernel(self, group: Group) -> bool:
        has_plain_betas = not any(isinstance(beta, Tensor) for beta in group["betas"])
        return bool(group["fused"]) and not group["capturable"] and not group["differentiable"] and has_plain_betas

    def progress(self, state: State) -> int:
        """The number of the next step, counted from 1."""
        return int(state["step"]) + 1 if state else 1

    def _numbers(self, group: Group, progress: int) -> tuple[Kernel, tuple[float, ...]]:
        lr, (beta1, beta2), weight_decay = float(group["lr"]), group["betas"], group["weight_decay"]
        is_decoupled = group.get("decoupled_weight_decay", self._is_decoupled)
        return Kernel.AMSGRAD if group["amsgrad"] else Kernel.ADAM, (
            1 - lr * weight_decay if is_decoupled else 1.0,
            0.0 if is_decoupled else weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            lr / (1 - beta1**progress),
            math.sqrt(1 - beta2**progress),
            group["eps"],
        )


class LionRule(Rule):
    """Lion, as PlainLion computes it."""

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def suits_kernel(self, group: Group) -> bool:
        return True

    def _numbers(self, group: Group, progress: int) -> tuple[Kernel, tuple[float, ...]]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return Kernel.LION, (1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, lr)


class SGDRule(Rule):
    """SGD, as torch computes it with foreach=False and fused=False."""

    can_be_low = False

    def state_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def suits_kernel(self, group: Group) -> bool:
        is_chosen = group["foreach"] or group["fused"] or group["differentiable"]
        has_tensors = any(isinstance(group[key], Tensor) for key in ("momentum", "dampening", "weight_decay"))
        needs_graph = isinstance(group["lr"], Tensor) and group["lr"].requires_grad
        return not is_chosen and not has_tensors and not needs_graph

    def has_states(self, state: State | None) -> bool:
        return bool(state) and state.get("momentum_buffer") is not None  # type: ignore[union-attr]

    def progress(self, state: State) -> int:
        """0 in the first step of a parameter, in which the buffer becomes the gradient."""
        return int(self.has_states(state))

    def _numbers(self, group: Group, progress: int) -> tuple[Kernel, tuple[float, ...]]:
        momentum = group["momentum"]
        numbers = (group["weight_decay"], -float(group["lr"]), momentum, 1 - group["dampening"])
        if not momentum:
            return Kernel.SGD, numbers
        if group["nesterov"]:
            return Kernel.SGD_NEXT_NESTEROV if progress else Kernel.SGD_FIRST_NESTEROV, numbers
        return Kernel.SGD_NEXT if progress else Kernel.SGD_FIRST, numbers


ADAM, ADAMW, LION, SGD = AdamRule(is_decoupled=False), AdamRule(is_decoupled=True), LionRule(), SGDRule()
# The states of torch's optimizers are those of ours. A subclass stands before its base.
_OF_TORCH: Mapping[type[torch.optim.Optimizer], Rule] = {
    torch.optim.AdamW: ADAMW,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: SGD,
}


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The rule of one of our optimizers, or of torch's optimizers with the same states; None if it is not known."""
    own = getattr(optimizer, "rule", None)
    if isinstance(own, Rule):
        return own
    return next((rule for kind, rule in _OF_TORCH.items() if isinstance(optimizer, kind)), None)


def check_moments(group: Group, rule: Rule, kind: str) -> None:
    """Raise ValueError if the states of a group cannot be stored as its option `moments` says."""
    moments = moments_of(group)
    if moments not in MOMENTS:
        raise ValueError(f"{kind} got moments={moments!r}; give one of {', '.join(map(repr, MOMENTS))}.")
    if moments == "float32":
        return
    if not rule.can_be_low:
        raise ValueError(f"{kind} got moments={moments!r} and has no low-bit state; use AdamW, Adam or Lion.")
    for key in ("capturable", "differentiable", "foreach"):
        if group.get(key):
            raise ValueError(f"{kind} got moments={moments!r} and {key}=True, which is torch's own implementation.")
    for param in group["params"]:
        if param.dtype is not torch.float32 or param.device.type != "cpu":
            raise ValueError(
                f"{kind} got moments={moments!r} for a parameter in {param.dtype} on {param.device}; low-bit moments "
                "need float32 parameters in host memory, as optim_parameters() gives with optim_dtype=torch.float32."
            )
