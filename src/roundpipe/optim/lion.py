"""Lion (evolved sign momentum) in one pass over masters and other float32 tensors, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from roundpipe.optim import rules
from roundpipe.optim.one_pass import OnePassOptimizer
from roundpipe.optim.rules import Group


class PlainLion(torch.optim.Optimizer):
    """Lion in plain PyTorch, in the precision of each parameter: what the kernel computes, operation by operation."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not float(lr) >= 0.0:
            raise ValueError(f"Lion got lr={lr!r}; give a number of at least 0.")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Lion got betas={betas!r}; give two numbers of at least 0 and below 1.")
        if not weight_decay >= 0.0:
            raise ValueError(f"Lion got weight_decay={weight_decay!r}; give a number of at least 0.")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = []
            gradients: list[Tensor] = []
            moments: list[Tensor] = []
            self._init_group(group, params, gradients, moments)
            for param, gradient, moment in zip(params, gradients, moments, strict=True):
                _update(group, param, -gradient if group["maximize"] else gradient, moment)
        return loss

    def _init_group(self, group: Group, params: list[Tensor], gradients: list[Tensor], moments: list[Tensor]) -> None:
        """Append the parameters of a group that have a gradient, with gradients and moments; make missing moments."""
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError("Lion does not support sparse gradients; build the embedding with sparse=False.")
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            params.append(param)
            gradients.append(param.grad)
            moments.append(state["exp_avg"])


def _update(group: Group, param: Tensor, gradient: Tensor, moment: Tensor) -> None:
    """Every product and every sum is rounded for itself, on all processors alike."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    mixed = (moment * beta1).add_(gradient * (1 - beta1))
    # torch.sign(NaN) is 0, with which a parameter would stand still in silence.
    direction = torch.where(mixed.isnan(), mixed, mixed.sign())
    param.mul_(1 - lr * group["weight_decay"]).sub_(direction.mul_(lr))
    moment.mul_(beta2).add_(gradient * (1 - beta2))


class Lion(OnePassOptimizer, PlainLion):
    """Lion, with one float32 moment per parameter, in one pass: half the state of Adam.

    With gradient g and moment m: the update is the sign of beta1 * m + (1 - beta1) * g, the parameter becomes
    (1 - lr * weight_decay) times itself minus lr times the update, then m becomes beta2 * m + (1 - beta2) * g. Every
    element moves by lr, so lr is usually 3 to 10 times smaller than for AdamW, and weight_decay larger by as much.
    """

    rule = rules.LION
