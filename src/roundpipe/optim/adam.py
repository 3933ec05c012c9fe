"""Adam, AdamW and SGD with torch's interface, in one pass over masters and other float32 tensors.

Signatures, state and state dicts are those of torch. For Adam and AdamW the kernel repeats, operation by operation,
what torch's fused kernel does for whole vectors; for SGD what torch does by default.

[Note: fused layout] torch's fused CPU kernel walks parameter, gradient and moments as flat memory and ignores strides
and shapes: a transposed parameter with a contiguous gradient gets a wrong update, and moments loaded from another model
are silently written out of bounds (the CUDA kernel raises). The layout of a gradient is known only once it exists. So a
group is marked as fused when it is added, if its devices and dtypes allow that, and its layouts are checked in every
step. A group that fails the check uses torch's default implementation in that step, which handles strides and raises on
wrong shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roundpipe.optim import rules
from roundpipe.optim.one_pass import OnePassOptimizer
from roundpipe.optim.rules import Group

_FUSED_DEVICES = ("cpu", "cuda")
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _FusedByDefault(OnePassOptimizer):
    """Sets `fused=True` unless a group sets foreach or fused."""

    def add_param_group(self, param_group: Group) -> None:
        """As in torch. Also marks the group as fused if that is possible."""
        super().add_param_group(param_group)
        _choose_fused(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state. `load_state_dict` calls this too; a group saved without `fused` becomes fused."""
        super().__setstate__(state)
        for group in self.param_groups:
            if _choose_fused(group):
                self._move_step_counts(group["params"])

    def _move_step_counts(self, params: Sequence[Tensor]) -> None:
        """Convert each step count to a float32 tensor on its parameter's device, as fused kernels expect."""
        for param in params:
            param_state = self.state.get(param, {})
            if "step" in param_state:
                param_state["step"] = torch.as_tensor(param_state["step"], dtype=torch.float32, device=param.device)

    def _options_for(self, group: Group, params: Sequence[Tensor]) -> dict[str, Any]:
        """The default implementation for a group whose layouts torch's fused kernel gets wrong."""
        has_wrong_layout = group["fused"] and not all(self._has_one_layout(param) for param in params)
        return {"fused": None} if has_wrong_layout else {}  # see [Note: fused layout]

    def _has_one_layout(self, param: Tensor) -> bool:
        """Whether torch's fused kernel updates a parameter correctly; see [Note: fused layout]."""
        if param.grad is None:
            return True
        moments = (value for key, value in self.state[param].items() if key.startswith(("exp_avg", "max_exp_avg")))
        tensors = [param, param.grad, *moments]
        if len({(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}) > 1:
            return False
        if all(tensor.is_contiguous() for tensor in tensors):
            return True
        return all(tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)


class Adam(_FusedByDefault, torch.optim.Adam):
    """`torch.optim.Adam`, faster in host memory: same arguments, state and results."""

    rule = rules.ADAM


class AdamW(_FusedByDefault, torch.optim.AdamW):
    """`torch.optim.AdamW`, faster in host memory: same arguments, state and results."""

    rule = rules.ADAMW


def _choose_fused(group: Group) -> bool:
    """Set `fused` if the user chose no implementation and the group allows it. Returns whether `fused` was set."""
    left_open = group.get("foreach") is None and group.get("fused") is None
    plain = not group.get("differentiable") and not group.get("capturable")
    plain = plain and not any(isinstance(beta, Tensor) for beta in group.get("betas", ()))
    if not (left_open and plain and all(_fusable(param) for param in group["params"])):
        return False
    group["fused"] = True
    return True


def _fusable(param: Tensor) -> bool:
    return param.device.type in _FUSED_DEVICES and param.dtype in _FUSED_DTYPES and param.layout is torch.strided


class SGD(OnePassOptimizer, torch.optim.SGD):
    """`torch.optim.SGD`, faster in host memory: same arguments and state, with and without momentum.

    Results are those of torch with foreach=False and fused=False, its default in host memory. Groups with foreach=True,
    fused=True or differentiable=True are updated by torch.
    """

    rule = rules.SGD
