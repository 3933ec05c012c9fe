"""Checks, before an optimizer makes the first of its state, that all of it fits into host memory.

Called by optim.adam at the beginning of a step, and by optim.stepper for optimizers of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

import torch
from torch.optim import Optimizer

from roundpipe.store import OptimizerCopy
from roundpipe.store.host_memory import require_host_memory

_WITH_TWO_MOMENTS = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta),
)
_ADVICE = (
    "None of it was made, and no weight was changed. Free memory, train fewer parameters (requires_grad_(False) before "
    "wrapping), or use an optimizer with less state, such as torch.optim.SGD."
)
_checked: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()  # ids of its parameters


def require_state_memory(optimizer: Optimizer, reserved: Container[int] = (), *, in_one_pass: bool = False) -> None:
    """Raise HostMemoryError if state that this step will make does not fit. Each parameter is counted once.

    reserved: ids of parameters whose state has memory already.
    in_one_pass: whether optimizer copies are updated without memory for their full values and gradients.
    """
    checked = _checked.setdefault(optimizer, set())
    needs = {"optimizer state": 0, "optimizer copies": 0, "gradients in the copies' precision": 0}
    found: list[int] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            is_new = id(param) not in checked and id(param) not in reserved and not optimizer.state.get(param)
            if not is_new or param.device.type != "cpu":
                continue
            found.append(id(param))
            needs["optimizer state"] += _num_moments(optimizer, group) * param.nbytes
            if isinstance(param, OptimizerCopy):
                needs["optimizer copies"] += param.bytes_to_come(in_one_pass=in_one_pass)
                if param.has_only_low_gradient and not in_one_pass:
                    needs["gradients in the copies' precision"] += param.nbytes
    if found:
        require_host_memory(needs, f"a step of {type(optimizer).__name__}", _ADVICE)
        checked.update(found)


def _num_moments(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Tensors of a parameter's size that its state holds; 0 for kinds of optimizer that are not known."""
    if isinstance(optimizer, _WITH_TWO_MOMENTS):
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return 0
