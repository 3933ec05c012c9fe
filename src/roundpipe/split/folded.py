"""Trials on the host with narrower linear layers: their time does not depend on how large the weights are.

A trial runs a few tokens through the whole model, so its time is that of reading all weights: tens of seconds for a
large model. Trials compare runs of one model with each other, and what they look for does not depend on what a linear
layer computes, as long as each output depends on every input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_WIDTH = 64  # the number of columns that a folded weight keeps
_LEAST = 16  # inputs at least this many times as wide are folded
_PLAIN = (Tensor, nn.Parameter)  # other classes may hold a weight in a form of their own
_DTYPES = (torch.float32, torch.bfloat16)  # sums of inputs may be too large for float16


class FoldedProducts(TorchFunctionMode):
    """Linear layers with many inputs add their inputs up in groups and read only the first columns of their weights.

    Input i counts as input i modulo `_WIDTH`. If inputs and weights are independent, outputs stay as large as they
    were. Applies to weights in the host's memory. Must be entered before modes that watch the model's calls, so that
    these see the calls as the model makes them.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _can_fold(input, weight):
        return F.linear(input, weight, bias)
    groups = input.unflatten(-1, (-1, _WIDTH))
    return F.linear(groups.sum(-2, dtype=torch.float32).to(input.dtype), weight[:, :_WIDTH], bias)


def _can_fold(input: Tensor, weight: Tensor) -> bool:
    """The number of rows does not matter: a head that is computed in parts must give the logits of the whole one."""
    if type(weight) not in _PLAIN or weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        return False
    is_wide = weight.shape[1] >= _LEAST * _WIDTH and weight.shape[1] % _WIDTH == 0
    return is_wide and weight.device.type == "cpu" and weight.dtype in _DTYPES and input.dtype in _DTYPES
