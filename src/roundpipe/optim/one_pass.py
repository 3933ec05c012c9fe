"""Adam over a model's optimizer copies in one pass, layer by layer as their gradients land.

Called by optim.adam in `step()`, on the optimizer thread. Takes the parameters that the kernel can do; all others, and
all where there is no kernel, are torch's. The arithmetic is that of torch's fused kernel, operation by operation.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from roundpipe.optim.native.kernel import MAX_FACTORS, AdamRule, OnePassKernel, Segment, SplitMaster, one_pass_kernel
from roundpipe.optim.reserve import Reserve
from roundpipe.store import LayerUpdate, OptimizerCopy
from roundpipe.store.layer_update import Source
from roundpipe.store.layout import dense_stride

_Item = tuple[OptimizerCopy, Source, dict[str, Any]]


def step_in_one_pass(optimizer: torch.optim.Optimizer, reserve: Reserve | None) -> Iterator[int]:
    """Update what can be updated so; yields the ids of parameters with which the step is done.

    `reserve`: has memory for moments that do not exist yet.
    """
    items = _items_by_update(optimizer)
    kernel = one_pass_kernel() if items else None
    if kernel is None:
        return
    for update in _as_they_land(items):
        yield from _update_layer(optimizer, update, items[update], kernel, reserve or Reserve())


def _as_they_land(updates: Iterable[LayerUpdate]) -> Iterator[LayerUpdate]:
    """In the order in which gradients land; once all have landed, in the order in which calls need the weights."""
    left = deque(sorted(updates, key=lambda update: update.order))
    while left:
        yield left.pop() if all(update.has_landed for update in left) else left.popleft()


def _items_by_update(optimizer: torch.optim.Optimizer) -> dict[LayerUpdate, list[_Item]]:
    items: dict[LayerUpdate, list[_Item]] = defaultdict(list)
    for group in optimizer.param_groups:
        if not group["fused"] or group["capturable"] or group["differentiable"]:
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
        found = (_ready(optimizer, item, reserve) for item in items)
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


def _ready(optimizer: torch.optim.Optimizer, item: _Item, reserve: Reserve) -> _Ready | None:
    copy, source, group = item
    gradient, factors = _gradient_of(copy)
    if gradient is None:
        return None
    state = _state_of(optimizer, copy, reserve, amsgrad=group["amsgrad"])
    moments = [value for key, value in state.items() if key != "step"]
    is_one_layout = _share_layout([copy, gradient, *moments, source.record.weights])
    return _Ready(copy, source, group, gradient, factors, state) if is_one_layout else None


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


def _share_layout(tensors: Sequence[torch.Tensor]) -> bool:
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    stride = tensors[0].stride()
    return dense_stride(tensors[0]) == tuple(stride) and all(tensor.stride() == stride for tensor in tensors)
