"""Clips gradients by their total norm.

Called by users in `step_fn`, on the optimizer thread. Takes a model by its `optim_parameters()` and knows nothing else
of it; the arithmetic is torch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.optim.low_gradients import pending_copies, widened
from roundpipe.store import OptimizerCopy


@runtime_checkable
class HasOptimParameters(Protocol):
    """A model whose gradients lie on the optimizer's copies of its parameters."""

    def optim_parameters(self) -> Iterable[Tensor]: ...


def clip_grad_norm_(
    model_or_params: HasOptimParameters | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients down, in place, so that their total norm is at most `max_norm`; returns the norm before.

    As `torch.nn.utils.clip_grad_norm_`, bit for bit. `max_norm=float("inf")` only measures. With a GradScaler call
    `scaler.unscale_(optimizer)` first.
    """
    _check_positive("max_norm", max_norm)
    _check_positive("norm_type", norm_type)
    params = _gradient_owners(model_or_params)
    pending = pending_copies(params)
    if pending and len(pending) == len(params) and len({copy.dtype for copy in pending}) == 1:
        norm = _clip_pending(pending, float(max_norm), float(norm_type), error_if_nonfinite)
        if norm is not None:
            return norm
    return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)


@torch.no_grad()
def _clip_pending(
    copies: list[OptimizerCopy], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor | None:
    """As torch does it, operation by operation, without making the gradients tensors.

    None, and nothing is done, if there are no gradients or torch would refuse their norm.
    """
    norms = {id(copy): torch.linalg.vector_norm(values, norm_type) for copy, values in widened(copies)}
    if not norms:
        return None
    in_order = [norms[id(copy)] for copy in copies if id(copy) in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
    if error_if_nonfinite and not total.isfinite():
        return None
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for copy in copies:
        copy.scale_gradient(float(factor))
    return total


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"clip_grad_norm_() got {name}={value!r} of type {type(value).__name__}; pass a number."
        )
    if not float(value) > 0.0:
        raise ConfigError(f"clip_grad_norm_() got {name}={value!r}; pass a number greater than 0.")


def _gradient_owners(model_or_params: Any) -> list[Tensor]:
    if isinstance(model_or_params, Tensor):
        return [model_or_params]
    if isinstance(model_or_params, HasOptimParameters):
        return list(model_or_params.optim_parameters())
    if not isinstance(model_or_params, Iterable):
        raise ArgumentTypeError(
            f"clip_grad_norm_() got a {type(model_or_params).__name__}, which has no optim_parameters() and is not "
            "iterable; pass a RoundPipe model, a tensor, or an iterable of tensors such as module.parameters()."
        )
    params = list(model_or_params)
    for position, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise ArgumentTypeError(
                f"clip_grad_norm_() got a {type(model_or_params).__name__} whose element {position} is a "
                f"{type(param).__name__}, not a tensor; pass an iterable of tensors such as module.parameters()."
            )
    return params
