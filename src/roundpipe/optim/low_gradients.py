"""Gradients that lie in host memory in low precision, looked at without a float32 copy of all of them.

Used by optim.clip and optim.unscaling inside a step. One gradient at a time is widened into memory that is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from roundpipe.store import LowGradient, OptimizerCopy


def pending_copies(params: Iterable[Any]) -> list[OptimizerCopy]:
    """Those whose gradient nobody has made a tensor yet, in this step or in one before."""
    return [param for param in params if isinstance(param, OptimizerCopy) and param.has_only_low_gradient]


def widened(copies: Sequence[OptimizerCopy]) -> Iterator[tuple[OptimizerCopy, Tensor]]:
    """Each copy that has a gradient, and its values, valid until the next one; in the order in which they land."""
    scratch = torch.empty(0)
    for copy in reversed(copies):
        low = copy.low_gradient()
        if low is None:
            continue
        if scratch.numel() < copy.numel() or scratch.dtype is not copy.dtype:
            scratch = torch.empty(copy.numel(), dtype=copy.dtype)
        yield copy, _into(scratch, low)


def _into(scratch: Tensor, low: LowGradient) -> Tensor:
    values = scratch[: low.tensor.numel()].as_strided(low.tensor.shape, low.tensor.stride())
    values.copy_(low.tensor)
    for factor in low.factors:
        values.mul_(factor)
    return values
