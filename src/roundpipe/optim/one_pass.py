"""Adam by the C kernel: over a model's optimizer copies layer by layer as their gradients land, and over tensors.

Called by optim.adam in `step()`. Takes the parameters that the kernel can do: float32 in host memory, with gradient and
moments in the same layout. torch updates all others, and every parameter where there is no kernel. The arithmetic is
that of torch's fused kernel in whole vectors, operation by operation, and the same for copies and ordinary tensors, for
every size, instruction set and number of threads.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from roundpipe.optim.native.kernel import (
    MAX_FACTORS,
    AdamRule,
    OnePassKernel,
    Segment,
    SplitMaster,
    one_pass_kernel,
    share_layout,
)
from roundpipe.optim.reserve import Reserve
from roundpipe.store import LayerUpdate, OptimizerCopy
from roundpipe.store.layer_update import Source

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
