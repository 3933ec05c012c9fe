"""Divides an optimizer's gradients by the scale of their losses, and says whether all of them are finite.

Used by optim.grad_scaler. Refuses all gradients before it changes any. Knows no iteration and no scaler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from roundpipe.errors import UsageError
from roundpipe.optim.low_gradients import pending_copies, widened
from roundpipe.store import OptimizerCopy

_UNSCALABLE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def unscale(optimizer: torch.optim.Optimizer, inverse_scale: float) -> bool:
    """Multiply every gradient by `inverse_scale` (rounded to float32); whether any element is not finite."""
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    pending = [copy for copy in pending_copies(params.values()) if copy.dtype in _UNSCALABLE_DTYPES]
    others = [param for key, param in params.items() if key not in {id(copy) for copy in pending}]
    found_inf = unscale_in_place(dense_gradients(others), inverse_scale)
    return _unscale_pending(pending, inverse_scale) or found_inf


def _unscale_pending(copies: Sequence[OptimizerCopy], inverse_scale: float) -> bool:
    """For gradients that nobody has made tensors: they are looked at, and multiplied when they are used."""
    factor = float(torch.full((), inverse_scale, dtype=torch.float32))
    found_inf = False
    for copy, values in widened(copies):
        found_inf |= unscale_in_place([values], inverse_scale)
        copy.scale_gradient(factor)
    return found_inf


def dense_gradients(params: Iterable[Any]) -> list[Tensor]:
    """Every gradient, a sparse one by its coalesced values; refuses all before any is changed."""
    with_grad = [param for param in params if param.grad is not None]
    for param in with_grad:
        _check_can_unscale(param.grad)
    return [_coalesced_values(param) if param.grad.is_sparse else param.grad for param in with_grad]


def _check_can_unscale(grad: Tensor) -> None:
    if grad.dtype is torch.float16:
        raise UsageError(
            f"GradScaler cannot unscale float16 gradients (shape {tuple(grad.shape)}): small ones would vanish. Wrap "
            "the model with RoundPipe(model, optim_dtype=torch.float32), so that the optimizer sees float32 ones."
        )
    if grad.dtype not in _UNSCALABLE_DTYPES or grad.layout not in (torch.strided, torch.sparse_coo):
        raise UsageError(
            f"GradScaler cannot unscale a gradient of {grad.dtype} and {grad.layout} (shape {tuple(grad.shape)}); it "
            "takes bfloat16, float32 and float64 ones, strided or sparse COO."
        )


def _coalesced_values(param: Tensor) -> Tensor:
    """Coalesced, because only the sums of duplicate entries show whether the gradient is finite."""
    assert param.grad is not None
    param.grad = param.grad.coalesce()
    return param.grad._values()


def unscale_in_place(grads: Iterable[Tensor], inverse_scale: float) -> bool:
    """Multiply all by `inverse_scale` (rounded to float32) in place; whether any element is not finite."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    found_infs = []
    with torch.no_grad():
        for (device, _), kind_grads in by_kind.items():
            found_infs.append(torch.zeros((), dtype=torch.float32, device=device))
            factor = torch.full((), inverse_scale, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(kind_grads, found_infs[-1], factor)
    return any(found_inf.item() != 0.0 for found_inf in found_infs)
