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
    return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)


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
