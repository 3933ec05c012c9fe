"""Adam and AdamW with torch's interface. RoundPipe's C kernel updates the parameters it supports, torch the others.

Both optimizers work on a model's masters and on ordinary tensors. Signatures, state and state dicts are those
of torch. The C kernel updates float32 parameters in host memory whose gradient and moments have the same memory layout:
masters layer by layer as their gradients land, ordinary tensors one by one. torch updates all other
parameters. The kernel repeats, operation by operation, what torch's fused kernel does for whole vectors; the results do
not depend on the number of elements, the instruction set or the number of threads.

[Note: fused layout] torch's fused CPU kernel walks parameter, gradient and moments as flat memory and ignores strides
and shapes: a transposed parameter with a contiguous gradient gets a wrong update, and moments loaded from another model
are silently written out of bounds (the CUDA kernel raises). The layout of a gradient is known only once it exists. So a
group is marked as fused when it is added, if its devices and dtypes allow that, and its layouts are checked in every
step. A group that fails the check uses torch's default implementation in that step, which handles strides and raises on
wrong shapes.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from roundpipe.optim.native.kernel import (
    MAX_FACTORS,
    AdamRule,
    KernelParameter,
    OnePassKernel,
    can_read,
    one_pass_kernel,
    share_layout,
)
from roundpipe.optim.state_memory import Reserve, moment_count, require_state_memory
from roundpipe.store import HalvedMaster, OptimizerCopy
from roundpipe.store.update import LayerUpdate, next_to_change
from roundpipe.store.values import flat

_Group = dict[str, Any]
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, OptimizerCopy)  # other subclasses may store values elsewhere


class _CheckedState:
    """The tensors in the state of one master when they were last checked, and the KernelParameter over them.

    The user may load, replace or move these tensors. Comparing identities and addresses detects such a change and takes
    less time than checking the state again.
    """

    __slots__ = ("addresses", "parameter", "tensors")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.parameter: KernelParameter | None = None

    def is_current(self, tensors: Sequence[Any]) -> bool:
        """Whether `tensors` are the tensors that were checked, at the same addresses."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors))
            and [tensor.data_ptr() for tensor in tensors] == self.addresses
        )


def _state_names(group: _Group) -> tuple[str, ...]:
    names = ("step", "exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def all_states_match(optimizer: torch.optim.Optimizer, checked: dict[int, _CheckedState]) -> bool:
    """Whether every existing state has all moments, each with the shape, dtype, device and layout of its parameter.

    A state loaded from another model may not match; torch's default implementation then raises. `checked` is a cache of
    the states of masters that match, by the id of the copy.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            names = _state_names(group)
            for param in group["params"]:
                state = optimizer.state.get(param)
                if not state:
                    checked.pop(id(param), None)
                    continue
                tensors = [state.get(name) for name in names]
                known = checked.get(id(param))
                if known is None or not known.is_current(tensors):
                    if not _state_matches(param, tensors):
                        return False
                    # States with tensor subclasses are not cached: such tensors may have no address to compare.
                    if isinstance(param, OptimizerCopy) and all(type(tensor) is Tensor for tensor in tensors):
                        checked[id(param)] = _CheckedState(tensors)
    return True


def _state_matches(param: torch.Tensor, tensors: Sequence[Any]) -> bool:
    step, *moments = tensors
    is_divided = isinstance(param, OptimizerCopy) and param.share is not None
    return isinstance(step, torch.Tensor) and all(
        isinstance(moment, torch.Tensor)
        and (moment.shape == param.shape or (is_divided and moment.shape == (moment_count(param),)))
        and moment.dtype == param.dtype
        and moment.device == param.device
        and moment.layout == param.layout
        for moment in moments
    )


def _is_for_kernel(optimizer: torch.optim.Optimizer, group: _Group) -> bool:
    """Whether the kernel supports a group's options. torch updates the groups that it does not support.

    These include all groups while torch's GradScaler has set grad_scale or found_inf: it then expects the optimizer
    to unscale gradients, which the kernel does not do.
    """
    if not group["fused"] or group["capturable"] or group["differentiable"]:
        return False
    if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return False
    return getattr(optimizer, "grad_scale", None) is None and getattr(optimizer, "found_inf", None) is None


def divides_moments(optimizer: torch.optim.Optimizer, group: _Group) -> bool:
    """Whether each of several machines has a range of the moments of a group: the kernel updates the group."""
    is_ours = isinstance(optimizer, _FusedByDefault)
    return is_ours and _is_for_kernel(optimizer, group) and one_pass_kernel() is not None


def _rule(optimizer: torch.optim.Optimizer, group: _Group, step: int, factors: tuple[float, ...]) -> AdamRule:
    beta1, beta2 = group["betas"]
    return AdamRule(
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        is_decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
        step=step,
        gradient_factors=(*factors, -1.0) if group["maximize"] else factors,
    )


# Updates of ordinary tensors.


def update_tensors(optimizer: torch.optim.Optimizer, group: _Group, params: Iterable[torch.Tensor]) -> frozenset[int]:
    """Update the ordinary tensors of a group that the kernel supports; returns the ids of the updated ones.

    The states of all `params` exist. Updates one tensor after the other, as torch does, because parameters may share
    memory.
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
                assert param.grad is not None
                step, *moments = (optimizer.state[param][name] for name in _state_names(group))
                written += [param, *moments]
                rule = _rule(optimizer, group, int(step), ())
                first, second, largest = (*moments, None)[:3]
                kernel.adam([KernelParameter(param.data, param.grad, first, second, largest, None, rule)])
        finally:
            for tensor in written:  # makes autograd raise if it has saved the old values for a backward pass
                torch.autograd.graph.increment_version(tensor)
    return frozenset(id(param) for param in ready)


def _is_ready(optimizer: torch.optim.Optimizer, group: _Group, param: torch.Tensor) -> bool:
    """Whether a parameter has a gradient, and the kernel can use the memory of parameter, gradient and moments."""
    if param.grad is None:
        return False
    tensors = [param, param.grad, *(optimizer.state[param][name] for name in _state_names(group)[1:])]
    return all(_is_plain_float(tensor) for tensor in tensors) and share_layout(tensors)


def _is_plain_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are stored as plain float32 numbers in host memory.

    False for sparse tensors, lazily negated tensors, zero tensors without memory and most tensor subclasses.
    """
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


# Updates of masters.


class _OnePass:
    """One step of an optimizer over its masters, layer by layer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kernel: OnePassKernel,
        reserve: Reserve | None,
        checked: dict[int, _CheckedState],
    ) -> None:
        """`reserve`: memory for moments of a first step, if any. `checked`: the checked states, by id of the copy."""
        self._optimizer, self._kernel = optimizer, kernel
        self._reserve, self._checked = reserve, checked
        self._rules: dict[tuple[int, int, tuple[float, ...]], AdamRule] = {}  # most copies of a step share one rule

    def update_layer(self, update: LayerUpdate, items: Sequence[tuple[OptimizerCopy, _Group]]) -> list[int]:
        """Update the copies of one layer that the kernel can update; returns the ids of the updated copies."""
        update.wait_for_gradients()
        locked: list[OptimizerCopy] = []
        ready: list[OptimizerCopy] = []  # the copies that the kernel can update, in the order of `parameters`
        parameters: list[KernelParameter] = []
        # Disables __torch_function__ of the copies: it would take longer than everything else in this function.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                for copy, group in items:
                    copy.lock.acquire()  # held until the kernel is done: no other thread may join or move the halves
                    locked.append(copy)
                    parameter = self._kernel_parameter(update, copy, group)
                    if parameter is not None:
                        ready.append(copy)
                        parameters.append(parameter)
                if parameters:
                    torch._foreach_add_([self._optimizer.state[copy]["step"] for copy in ready], 1)
                    self._kernel.adam(parameters)
                for copy, parameter in zip(ready, parameters, strict=True):
                    if copy.share is not None:
                        copy.weight_was_written(copy.record.memory(update.target))
                    elif parameter.weight is not None:
                        copy.weight_was_written(parameter.weight)
                    update.updated.add(copy.record)
            finally:
                for parameter in parameters:
                    parameter.forget_memory()
                for copy in locked:
                    copy.lock.release()
        return list(map(id, ready))

    def _kernel_parameter(self, update: LayerUpdate, copy: OptimizerCopy, group: _Group) -> KernelParameter | None:
        """The kernel's arguments for updating a copy; None if it has no gradient or the kernel does not support it."""
        share = copy.share if update.exchange is not None else None
        found, factors = (copy.gradient_sources() if share else _listed(copy.low_gradient())), copy.factors
        if found is None or len(factors) >= MAX_FACTORS:
            found, factors = _listed(copy.grad), ()
            if found is not None and share is not None:
                found = [_own_range(found[0], copy)]
        if found is None:
            return None
        gradient, *more = found
        state = _state_of(self._optimizer, copy, self._reserve, amsgrad=group["amsgrad"])
        weight = update.new_weight_of(copy.record)
        step = int(state["step"]) + 1
        rule = self._rules.get((id(group), step, factors))
        if rule is None:
            rule = self._rules[id(group), step, factors] = _rule(self._optimizer, group, step, factors)
        known = self._checked.get(id(copy))
        parameter = None if known is None else known.parameter
        if share is not None:
            # The whole update works on this machine's range, as flat tensors.
            _cut_moments(state, _state_names(group)[1:], copy)
            assert weight is not None
            master, weight = copy.sharded().own_values(), flat(weight)[share.range_of(weight.numel())]
        else:
            master = _master_of(copy, weight)
        if parameter is not None and parameter.renew(master, gradient, weight, rule, more):
            return parameter
        moments = [state[name] for name in _state_names(group)[1:]]
        if share is not None:
            first, second, largest = (*moments, None)[:3]
            parameter = KernelParameter(master, gradient, first, second, largest, weight, rule, more)
            if known is not None:
                known.parameter = parameter
            return parameter
        read = [gradient] if weight is None else [gradient, weight]
        if not all(map(can_read, read)) or not share_layout([copy, *read, *moments]):
            return None
        first, second, largest = (*moments, None)[:3]
        parameter = KernelParameter(master, gradient, first, second, largest, weight, rule)
        if known is not None:
            known.parameter = parameter
        return parameter


def _master_of(copy: OptimizerCopy, weight: torch.Tensor | None) -> torch.Tensor | HalvedMaster:
    """The values of a copy in the form that the kernel updates: its two halves if possible, else a float32 tensor.

    Halves need a `weight` that receives the new high halves. Without one the copy allocates memory for its values.
    """
    halves = copy.halves
    return copy.values() if weight is None or not isinstance(halves, HalvedMaster) else halves


def _listed(gradient: Tensor | None) -> list[Tensor] | None:
    return None if gradient is None else [gradient]


def _own_range(whole: Tensor, copy: OptimizerCopy) -> Tensor:
    """This machine's range of a whole gradient, flat, in the order of the weight's memory."""
    assert copy.share is not None
    weights = copy.record.weights
    ordered = torch.empty_strided(weights.shape, weights.stride(), dtype=whole.dtype).copy_(whole)
    return flat(ordered)[copy.share.range_of(weights.numel())]


def _cut_moments(state: dict[str, Any], names: Sequence[str], copy: OptimizerCopy) -> None:
    """Replace whole moments, such as those of a state dict that one machine has saved, by this machine's range."""
    for name in names:
        if state[name].shape == copy.shape and state[name].shape != (moment_count(copy),):
            state[name] = _own_range(state[name], copy).clone()


def _state_of(
    optimizer: torch.optim.Optimizer, copy: OptimizerCopy, reserve: Reserve | None, *, amsgrad: bool
) -> dict[str, Any]:
    """The state of a copy. In the copy's first step, creates the same state that torch would create."""
    state: dict[str, Any] = optimizer.state[copy]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())):
            state[key] = (reserve or Reserve()).moment_for(copy)
    return state


def step_in_one_pass(
    optimizer: torch.optim.Optimizer, reserve: Reserve | None, checked: dict[int, _CheckedState]
) -> frozenset[int]:
    """Update the masters that the kernel can update; returns the ids of the updated copies."""
    items: dict[LayerUpdate, list[tuple[OptimizerCopy, _Group]]] = defaultdict(list)
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            if _is_for_kernel(optimizer, group):
                for param in group["params"]:
                    source = param.source if isinstance(param, OptimizerCopy) else None
                    if isinstance(source, LayerUpdate) and param.dtype is torch.float32:
                        items[source].append((param, group))
    left = sorted((update for update in items if update.is_usable()), key=lambda update: update.order)
    kernel = one_pass_kernel() if left else None
    if kernel is None:
        return frozenset()
    one_pass = _OnePass(optimizer, kernel, reserve, checked)
    done: list[int] = []
    # With several machines, all of them update the layers in the same order, and the gradients of the next layer are
    # exchanged while this layer is updated.
    for position, update in enumerate(left if left[0].exchange is not None else ()):
        for ahead in left[position : position + 2]:
            ahead.fetch()
        ids = update.carry_out(functools.partial(one_pass.update_layer, update, items[update]))
        divided = [copy.record for copy, _ in items[update] if copy.share is not None and id(copy) in ids]
        update.gather(divided)
        done += ids
    while left and left[0].exchange is None:
        update = next_to_change(left)
        left.remove(update)
        done += update.carry_out(functools.partial(one_pass.update_layer, update, items[update]))
    return frozenset(done)


_FUSED_DEVICES = ("cpu", "cuda")
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _FusedByDefault(torch.optim.Optimizer):
    """Adds the kernel to an optimizer of torch, and sets `fused=True` unless a group sets foreach or fused."""

    _updated: frozenset[int] | None = None  # ids of parameters that this step has updated; None if torch updates all
    _unfused: Sequence[_Group] = ()  # groups that use torch's default implementation in this step
    _reserve: Reserve | None = None  # exists from the beginning of training until the first step
    _checked: dict[int, _CheckedState] | None = None  # by id of the copy, which the optimizer keeps alive

    @_disable_dynamo  # a trace by torch.compile would miss the kernel's updates
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. Waits for gradients of masters that have not landed yet."""
        require_state_memory(self, self._reserve or (), in_one_pass=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        num_states = len(self.state)
        # The step method of torch without its wrapper, which runs hooks: this method is wrapped in the same hooks.
        torchs = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        self._unfused = []
        if self._checked is None:
            self._checked = {}
        try:
            if all_states_match(self, self._checked):
                with torch.no_grad():
                    self._updated = step_in_one_pass(self, self._reserve, self._checked)
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
        """Put the states in the order of parameters, as torch does. Checkpoints depend on this order.

        New states were created in the order in which gradients landed.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param in self.state:
                    self.state[param] = self.state.pop(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. `set_to_none=True` does not wait for gradients that have not landed."""
        params = [param for group in self.param_groups for param in group["params"]]
        copies = [param for param in params if isinstance(param, OptimizerCopy)] if set_to_none else []
        # Outside steps, the gradients gathered so far must be dropped too. see_gradients() makes all copies of a model
        # show them, so one call for each model is enough. It must not read gradients that are dropped: with several
        # machines that would be an exchange, and after a failure not all of them have such gradients.
        dropped = frozenset(map(id, copies))
        for copy in {copy.home: copy for copy in copies}.values():
            copy.see_gradients(dropped)
        with torch._C.DisableTorchFunctionSubclass():
            for copy in copies:
                copy.drop_gradient()
        if len(copies) < len(params):
            super().zero_grad(set_to_none)

    def add_param_group(self, param_group: _Group) -> None:
        """As in torch. Also marks the group as fused if that is possible."""
        super().add_param_group(param_group)
        _choose_fused(self.param_groups[-1])
        for param in self.param_groups[-1]["params"]:
            if isinstance(param, OptimizerCopy):
                param.when_training = _weakly(self._get_memory_ready)

    def _get_memory_ready(self) -> None:
        """Create the pages of all moments in the background: the model begins to train, so a step will follow."""
        copies = {id(p): p for group in self.param_groups for p in group["params"] if isinstance(p, OptimizerCopy)}
        for copy in copies.values():
            copy.when_training = None
        self._reserve = Reserve()
        num_moments = 3 if any(group["amsgrad"] for group in self.param_groups) else 2
        self._reserve.fill([copy for copy in copies.values() if not self.state.get(copy)], num_moments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state. `load_state_dict` calls this too; a group saved without `fused` becomes fused."""
        super().__setstate__(state)
        self._checked = None  # the old entries would keep the old moments alive
        for group in self.param_groups:
            if _choose_fused(group):
                self._move_step_counts(group["params"])

    def _move_step_counts(self, params: Sequence[Tensor]) -> None:
        """Convert each step count to a float32 tensor on its parameter's device, as fused kernels expect."""
        for param in params:
            param_state = self.state.get(param, {})
            if "step" in param_state:
                param_state["step"] = torch.as_tensor(param_state["step"], dtype=torch.float32, device=param.device)

    def _init_group(self, group: _Group, *lists: Any, **named_lists: Any) -> Any:
        """Fill `lists` with the tensors of a group that torch is to update. torch's step calls this for each group.

        First updates ordinary tensors with the kernel. Parameters that the kernel has updated are left out of `lists`.
        """
        rest = group["params"]
        if self._updated is not None:
            rest = [param for param in rest if id(param) not in self._updated]
            if rest:
                # This call lets torch create missing states and raise on gradients that it refuses.
                unused: list[list[Any]] = [[] for _ in range(len(lists) + len(named_lists))]
                super()._init_group({**group, "params": rest}, *unused)  # type: ignore[misc]
                with torch.no_grad():
                    done = update_tensors(self, group, rest)
                rest = [param for param in rest if id(param) not in done]
        has_complex = super()._init_group({**group, "params": rest}, *lists, **named_lists)  # type: ignore[misc]
        if group["fused"] and not all(self._has_one_layout(param) for param in rest):
            group["fused"] = None  # see [Note: fused layout]
            self._unfused = [*self._unfused, group]
        return has_complex

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


class AdamW(_FusedByDefault, torch.optim.AdamW):
    """`torch.optim.AdamW`, faster in host memory: same arguments, state and results."""


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `method` without keeping its object alive. Does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _choose_fused(group: _Group) -> bool:
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
