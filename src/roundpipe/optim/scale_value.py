"""The numbers of a GradScaler: which ones are fit to use, and how a scale moves.

Used by optim.grad_scaler and optim.scale_window. A scale is kept as the float32 value losses are multiplied with, and
its inverse must be a finite float32 number too. Knows no step and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from roundpipe.errors import ArgumentTypeError, ConfigError


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
