"""Adam and AdamW: torch's, updated by the library's C kernel, or by torch's fused kernel where that is right.

Built by users, on a model's optimizer copies or on ordinary tensors. Signatures, state and state dicts are torch's own.
optim.one_pass updates float32 parameters in host memory, copies and ordinary tensors alike.

[Note: fused layout] torch's fused CPU kernel walks parameter, gradient and moments as flat memory and looks neither at
strides nor at shapes: a transposed parameter with a contiguous gradient gets a wrong update, and moments of another
model are written out of bounds, in silence (the CUDA kernel refuses). Layouts are only known once a gradient is there,
so a group is chosen by type when it is added, and its layouts are checked in every step. A group that fails the check
takes torch's default implementation in that step, which handles strides and raises on wrong shapes.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from roundpipe.optim.one_pass import all_states_match, step_in_one_pass, update_tensors
from roundpipe.optim.reserve import Reserve
from roundpipe.optim.state_memory import require_state_memory
from roundpipe.store import OptimizerCopy

_FUSED_DEVICES = ("cpu", "cuda")
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _FusedByDefault(torch.optim.Optimizer):
    """What both optimizers add to torch's: `fused=True` for a group for which neither foreach nor fused was given."""

    _updated: frozenset[int] | None = None  # ids of the parameters that this step has updated; None: torch updates all
    _unfused: Sequence[dict[str, Any]] = ()  # groups that take torch's default implementation in this step
    _reserve: Reserve | None = None  # until the first step

    @_disable_dynamo  # a trace of it would contain what the kernel does not do
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step; a copy whose gradient is still on its way is waited for."""
        require_state_memory(self, self._reserve or (), in_one_pass=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        num_states = len(self.state)
        # torch's own step, without the hooks around it, which are around this one already.
        torchs = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        self._unfused = []
        try:
            if all_states_match(self):
                with torch.no_grad():
                    self._updated = frozenset(step_in_one_pass(self, self._reserve))
                self._reserve = None
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                torchs(self)
        finally:
            self._updated = None
            for group in self._unfused:
                group["fused"] = True
            self._unfused = ()
        if len(self.state) != num_states:
            self._order_states()
        return loss

    def _order_states(self) -> None:
        """As torch makes them, parameter by parameter, and not as gradients came: checkpoints depend on it."""
        for group in self.param_groups:
            for param in group["params"]:
                if param in self.state:
                    self.state[param] = self.state.pop(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, without waiting for gradients that nobody has asked for."""
        if set_to_none:
            for group in self.param_groups:
                for param in group["params"]:
                    if isinstance(param, OptimizerCopy):
                        param.grad = None
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _choose_fused(self.param_groups[-1])
        for param in self.param_groups[-1]["params"]:
            if isinstance(param, OptimizerCopy):
                param.when_training = _weakly(self._get_memory_ready)

    def _get_memory_ready(self) -> None:
        """The model begins to train: moments will be needed soon."""
        copies = {id(p): p for group in self.param_groups for p in group["params"] if isinstance(p, OptimizerCopy)}
        for copy in copies.values():
            copy.when_training = None
        self._reserve = Reserve()
        num_moments = 3 if any(group["amsgrad"] for group in self.param_groups) else 2
        self._reserve.fill([copy for copy in copies.values() if not self.state.get(copy)], num_moments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the end of `load_state_dict`: a state dict of an unfused optimizer is continued fused."""
        super().__setstate__(state)
        for group in self.param_groups:
            if _choose_fused(group):
                self._move_step_counts(group["params"])

    def _move_step_counts(self, params: Sequence[Tensor]) -> None:
        for param in params:
            param_state = self.state.get(param, {})
            if "step" in param_state:
                param_state["step"] = torch.as_tensor(param_state["step"], dtype=torch.float32, device=param.device)

    def _init_group(self, group: dict[str, Any], *lists: Any, **named_lists: Any) -> Any:
        """torch's step calls this per group, closure done, then updates the tensors in `lists`."""
        rest = group["params"]
        if self._updated is not None:
            rest = [param for param in rest if id(param) not in self._updated]
            self._make_states(group, rest, len(lists) + len(named_lists))
            with torch.no_grad():
                done = update_tensors(self, group, rest)
            rest = [param for param in rest if id(param) not in done]
        has_complex = super()._init_group({**group, "params": rest}, *lists, **named_lists)  # type: ignore[misc]
        if group["fused"] and not all(self._one_layout(param) for param in rest):
            group["fused"] = None  # see [Note: fused layout]
            self._unfused = [*self._unfused, group]
        return has_complex

    def _make_states(self, group: dict[str, Any], params: Sequence[Tensor], num_lists: int) -> None:
        """As torch makes them at a parameter's first step; raises where torch refuses a gradient."""
        super()._init_group({**group, "params": params}, *([] for _ in range(num_lists)))  # type: ignore[misc]

    def _one_layout(self, param: Tensor) -> bool:
        if param.grad is None:
            return True
        moments = (value for key, value in self.state[param].items() if key.startswith(("exp_avg", "max_exp_avg")))
        return _share_dense_layout([param, param.grad, *moments])


class Adam(_FusedByDefault, torch.optim.Adam):
    """`torch.optim.Adam` for host memory: same arguments, state and results."""


class AdamW(_FusedByDefault, torch.optim.AdamW):
    """`torch.optim.AdamW` for host memory: same arguments, state and results."""


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Does nothing once the method's object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _choose_fused(group: dict[str, Any]) -> bool:
    """Set `fused` if the user left the kernel open and the fused one can do the group; whether it was set."""
    left_open = group.get("foreach") is None and group.get("fused") is None
    plain = not group.get("differentiable") and not group.get("capturable")
    plain = plain and not any(isinstance(beta, Tensor) for beta in group.get("betas", ()))
    if not (left_open and plain and all(_fusable(param) for param in group["params"])):
        return False
    group["fused"] = True
    return True


def _fusable(param: Tensor) -> bool:
    return param.device.type in _FUSED_DEVICES and param.dtype in _FUSED_DTYPES and param.layout is torch.strided


def _share_dense_layout(tensors: Sequence[Tensor]) -> bool:
    kinds = {(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}
    if len(kinds) > 1:
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    return all(tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)
