"""Loads a state dict as a whole or not at all.

Called by api.face. torch copies what fits before it tells what does not, so the loading is rehearsed first: torch's own
code, hooks included, with copies that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Rehearsal(TorchFunctionMode):
    """Inside it `tensor.copy_(...)` leaves the tensor as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))


def load_whole(module: nn.Module, state_dict: Any, strict: bool) -> Any:
    """`module.load_state_dict(state_dict, strict)`; where it raises, no value has changed."""
    with _Rehearsal():
        module.load_state_dict(state_dict, strict)
    return module.load_state_dict(state_dict, strict)
