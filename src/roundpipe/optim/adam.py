"""Adam and AdamW: torch's, updated by the library's C kernel, or by torch's fused kernel where that is right.

Built by users, on a model's optimizer copies or on ordinary tensors. Signatures, state and state dicts are torch's own.
optim.one_pass updates float32 parameters in host memory, copies and ordinary tensors alike.

[Note: fused layout] torch's fused CPU kernel walks parameter, gradient and moments as flat memory and looks neither at
strides nor at shapes: a transposed parameter with a contiguous gradient gets a wrong update, and moments of another
model are written out of bounds, in silence (the CUDA kernel refuses). Layouts are only known once a gradient is there,
so a group is chosen by type when it is added, and its layouts are checked in every step. A group that fails the check
takes torch's default implementation in that step, which handles strides and raises on wrong shapes.

Adam by the C kernel: over a model's optimizer copies layer by layer as their gradients land, and over tensors.

Called by optim.adam in `step()`. Takes the parameters that the kernel can do: float32 in host memory, with gradient and
moments in the same layout. torch updates all others, and every parameter where there is no kernel. The arithmetic is
that of torch's fused kernel in whole vectors, operation by operation, and the same for copies and ordinary tensors, for
every size, instruction set and number of threads.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from roundpipe.optim.native.kernel import (
    MAX_FACTORS,
    AdamRule,
    OnePassKernel,
    Segment,
    SplitMaster,
    one_pass_kernel,
    share_layout,
)
from roundpipe.optim.state import Reserve, require_state_memory
from roundpipe.store import LayerUpdate, OptimizerCopy
from roundpipe.store.update import Source

_Item = tuple[OptimizerCopy, Source, dict[str, Any]]
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, OptimizerCopy)  # the memory of other subclasses may lie elsewhere


def all_states_match(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every state that exists has all moments, each in its parameter's shape, dtype and place.

    A state loaded from another model need not. torch's default implementation raises on it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return all(
            _state_matches(param, optimizer.state[param], _moment_names(group))
            for group in optimizer.param_groups
            for param in group["params"]
            if optimizer.state.get(param)
        )


def _moment_names(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _state_matches(param: torch.Tensor, state: dict[str, Any], names: Sequence[str]) -> bool:
    moments = [state.get(name) for name in names]
    return isinstance(state.get("step"), torch.Tensor) and all(
        isinstance(moment, torch.Tensor)
        and moment.shape == param.shape
        and moment.dtype == param.dtype
        and moment.device == param.device
        and moment.layout == param.layout
        for moment in moments
    )


def _is_for_kernel(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's options are the kernel's. torch's GradScaler lets fused optimizers unscale: torch does that."""
    if not group["fused"] or group["capturable"] or group["differentiable"]:
        return False
    if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return False
    return getattr(optimizer, "grad_scale", None) is None and getattr(optimizer, "found_inf", None) is None


def update_tensors(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: Iterable[torch.Tensor]
) -> frozenset[int]:
    """Update ordinary tensors of a group, whose states exist; the ids of those that were updated.

    One after the other, as torch does: parameters may share memory.
    """
    if not _is_for_kernel(optimizer, group):
        return frozenset()
    with torch._C.DisableTorchFunctionSubclass():
        ready = [param for param in params if _is_ready(optimizer, group, param)]
        kernel = one_pass_kernel() if ready else None
        if kernel is None:
            return frozenset()
        torch._foreach_add_([optimizer.state[param]["step"] for param in ready], 1)
        written: list[torch.Tensor] = []
        try:
            for param in ready:
                written += [param, *(optimizer.state[param][name] for name in _moment_names(group))]
                kernel.adam([_tensor_segment(optimizer, group, param)])
        finally:
            for tensor in written:  # so that autograd notices when it has saved a value
                torch.autograd.graph.increment_version(tensor)
    return frozenset(id(param) for param in ready)


def _is_ready(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor) -> bool:
    """Whether the kernel can read and write the memory of a parameter, its gradient and its moments."""
    if param.grad is None:
        return False
    tensors = [param, param.grad, *(optimizer.state[param][name] for name in _moment_names(group))]
    return all(_is_plain_float(tensor) for tensor in tensors) and share_layout(tensors)


def _is_plain_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor's float32 values are what lies at its address in host memory."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def _tensor_segment(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor) -> Segment:
    assert param.grad is not None
    state = optimizer.state[param]
    return Segment(
        master=param.data,
        gradient=param.grad,
        first=state["exp_avg"],
        second=state["exp_avg_sq"],
        largest=state["max_exp_avg_sq"] if group["amsgrad"] else None,
        weight=None,
        rule=_rule(group, _is_decoupled(optimizer, group), int(state["step"]), ()),
    )


def step_in_one_pass(optimizer: torch.optim.Optimizer, reserve: Reserve | None) -> Iterator[int]:
    """Update what can be updated so; yields the ids of parameters with which the step is done.

    `reserve`: has memory for moments that do not exist yet.
    """
    items = _items_by_update(optimizer)
    kernel = one_pass_kernel() if items else None
    if kernel is None:
        return
    reserve = reserve or Reserve()
    for update in _as_they_land(items):
        yield from update.carry_out(
            lambda update=update: list(_update_layer(optimizer, update, items[update], kernel, reserve))  # type: ignore[misc]
        )


def _as_they_land(updates: Iterable[LayerUpdate]) -> Iterator[LayerUpdate]:
    """In the order in which gradients land; once all have landed, in the order in which calls need the weights."""
    left = deque(sorted(updates, key=lambda update: update.order))
    while left:
        yield left.pop() if all(update.has_landed for update in left) else left.popleft()


def _items_by_update(optimizer: torch.optim.Optimizer) -> dict[LayerUpdate, list[_Item]]:
    items: dict[LayerUpdate, list[_Item]] = defaultdict(list)
    for group in optimizer.param_groups:
        if not _is_for_kernel(optimizer, group):
            continue
        for param in group["params"]:
            source = param.source if isinstance(param, OptimizerCopy) and param.dtype is torch.float32 else None
            if isinstance(source, Source) and source.is_usable():
                items[source.update].append((param, source, group))
    return items


class _Ready(NamedTuple):
    """A copy that the kernel can update, with all that takes."""

    copy: OptimizerCopy
    source: Source
    group: dict[str, Any]
    gradient: torch.Tensor
    factors: tuple[float, ...]
    state: dict[str, Any]


def _update_layer(
    optimizer: torch.optim.Optimizer,
    update: LayerUpdate,
    items: Sequence[_Item],
    kernel: OnePassKernel,
    reserve: Reserve,
) -> Iterator[int]:
    update.wait_for_gradients()
    # Here copies are asked for shapes and addresses only, or for their values by name.
    with torch._C.DisableTorchFunctionSubclass(), contextlib.ExitStack() as held:
        for copy, _, _ in items:
            held.enter_context(copy.lock)
        found = (_ready(optimizer, item, update, reserve) for item in items)
        ready = [one for one in found if one is not None]
        if not ready:
            return
        torch._foreach_add_([one.state["step"] for one in ready], 1)
        segments = [_segment(one, update.target_of(one.source.record), optimizer) for one in ready]
        kernel.adam(segments)
        for one, segment in zip(ready, segments, strict=True):
            if segment.weight is not None:
                one.copy.weight_was_written(segment.weight)
            update.was_updated(one.source.record)
            yield id(one.copy)


def _ready(optimizer: torch.optim.Optimizer, item: _Item, update: LayerUpdate, reserve: Reserve) -> _Ready | None:
    copy, source, group = item
    gradient, factors = _gradient_of(copy)
    if gradient is None:
        return None
    state = _state_of(optimizer, copy, reserve, amsgrad=group["amsgrad"])
    weight = update.target_of(source.record)
    tensors = [copy, gradient, *(state[name] for name in _moment_names(group)), *([] if weight is None else [weight])]
    return _Ready(copy, source, group, gradient, factors, state) if share_layout(tensors) else None


def _segment(one: _Ready, weight: torch.Tensor | None, optimizer: torch.optim.Optimizer) -> Segment:
    state, group = one.state, one.group
    return Segment(
        master=_master_of(one.copy, weight),
        gradient=one.gradient,
        first=state["exp_avg"],
        second=state["exp_avg_sq"],
        largest=state["max_exp_avg_sq"] if group["amsgrad"] else None,
        weight=weight,
        rule=_rule(group, _is_decoupled(optimizer, group), int(state["step"]), one.factors),
    )


def _master_of(copy: OptimizerCopy, weight: torch.Tensor | None) -> torch.Tensor | SplitMaster:
    if weight is None or copy.split_value is None:  # nowhere to put the upper half, or it has memory already
        return copy.values()
    return SplitMaster(copy.split_value.weight, copy.split_value.low, copy.split_value.ties)


def _gradient_of(copy: OptimizerCopy) -> tuple[torch.Tensor | None, tuple[float, ...]]:
    low = copy.low_gradient()
    if low is None or len(low.factors) >= MAX_FACTORS:
        return copy.grad, ()
    return low.tensor, low.factors


def _state_of(
    optimizer: torch.optim.Optimizer, copy: OptimizerCopy, reserve: Reserve, *, amsgrad: bool
) -> dict[str, Any]:
    """As torch makes it at a parameter's first step."""
    state: dict[str, Any] = optimizer.state[copy]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())):
            state[key] = reserve.moment_for(copy)
    return state


def _is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _rule(group: dict[str, Any], is_decoupled: bool, step: int, factors: tuple[float, ...]) -> AdamRule:
    beta1, beta2 = group["betas"]
    return AdamRule(
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        is_decoupled=is_decoupled,
        step=step,
        gradient_factors=(*factors, -1.0) if group["maximize"] else factors,
    )


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
