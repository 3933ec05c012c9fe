"""Adam and SGD in numpy, with every operation rounded as the library promises: the reference for its C kernel.

numpy's float32 operations and square roots are correctly rounded on every machine. torch's are not: its square root
comes from a vector library, and its fused Adam rounds differently without FMA instructions and in incomplete vectors,
as its SGD does without FMA instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from roundpipe.optim import rules
from roundpipe.optim.native.kernel import StepNumbers

Floats = npt.NDArray[np.float32]


def fmaf(a: Any, b: Any, c: Any) -> Floats:
    """a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded to odd, so that rounding it again to float32 is right.
    """
    with np.errstate(all="ignore"):
        product, addend = np.float64(a) * np.float64(b), np.float64(c)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        to_odd = (error != 0) & (np.atleast_1d(total).view(np.int64).reshape(np.shape(total)) % 2 == 0)
        total = np.where(to_odd, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
        return total.astype(np.float32)


class _InNumpy(torch.optim.Optimizer):
    """torch's arguments, state and state dicts; `step` computed in numpy. For float32 parameters on the CPU."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, amsgrad = self.state[param], group["amsgrad"]
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in names})
        state["step"] += 1
        is_decoupled = group.get("decoupled_weight_decay", isinstance(self, torch.optim.AdamW))
        gradient = -param.grad.numpy() if group["maximize"] else param.grad.numpy()
        old = [param.detach().numpy(), *(state[name].numpy() for name in names)]
        new = updated(gradient, *old, **_numbers(group, int(state["step"]), is_decoupled))
        for tensor, values in zip([param, *(state[name] for name in names)], new, strict=True):
            tensor.copy_(torch.from_numpy(np.asarray(values)))


class NumpyAdam(_InNumpy, torch.optim.Adam):
    pass


class NumpyAdamW(_InNumpy, torch.optim.AdamW):
    pass


def _numbers(group: dict[str, Any], step: int, is_decoupled: bool) -> dict[str, np.float32]:
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    numbers = {
        "shrink": 1 - lr * decay if is_decoupled else 1.0,
        "decay": 0.0 if is_decoupled else decay,
        "beta1_rest": 1 - beta1,
        "beta2": beta2,
        "beta2_rest": 1 - beta2,
        "step_size": lr / (1 - beta1**step),
        "correction": math.sqrt(1 - beta2**step),
        "eps": group["eps"],
    }
    return {name: np.float32(number) for name, number in numbers.items()}


def updated(
    gradient: Floats,
    master: Floats,
    first: Floats,
    second: Floats,
    largest: Floats | None = None,
    *,
    shrink: np.float32,
    decay: np.float32,
    beta1_rest: np.float32,
    beta2: np.float32,
    beta2_rest: np.float32,
    step_size: np.float32,
    correction: np.float32,
    eps: np.float32,
) -> list[Floats]:
    """The new master and moments, in the order in which they were given."""
    with np.errstate(all="ignore"):
        value = master * shrink
        g = fmaf(decay, value, gradient) if decay else gradient
        m = fmaf(beta1_rest, g - first, first)
        v = fmaf(beta2_rest * g, g, second * beta2)
        most = v if largest is None else np.maximum(largest, v)
        new = value - step_size * m / (np.sqrt(most) / correction + eps)
    return [new, m, v] if largest is None else [new, m, v, most]


def adam_numbers(
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    is_decoupled: bool = True,
    amsgrad: bool = False,
    factors: tuple[float, ...] = (),
) -> StepNumbers:
    """What the kernel gets for step number `step` of a group with these options."""
    group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": False}
    return (rules.ADAMW if is_decoupled else rules.ADAM).step_numbers(group, step, factors)


class NumpySGD(torch.optim.SGD):
    """torch's arguments, state and state dicts; `step` computed in numpy. For float32 parameters on the CPU."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        decay, momentum, minus_lr = (np.float32(x) for x in (group["weight_decay"], group["momentum"], -group["lr"]))
        rest, value = np.float32(1 - group["dampening"]), param.detach().numpy()
        g = -param.grad.numpy() if group["maximize"] else param.grad.numpy()
        g = fmaf(decay, value, g) if decay else g
        if momentum:
            old = self.state[param].get("momentum_buffer")
            buffer = np.array(g) if old is None else fmaf(rest, g, old.numpy() * momentum)
            made = torch.empty_like(param, memory_format=torch.preserve_format) if old is None else old
            self.state[param]["momentum_buffer"] = made.copy_(torch.from_numpy(np.asarray(buffer)))
            g = fmaf(momentum, buffer, g) if group["nesterov"] else buffer
        param.copy_(torch.from_numpy(np.asarray(fmaf(minus_lr, g, value))))
