"""Adam and AdamW as in torch, updated by the library's C kernel where it can, else by torch.

Both work on a model's optimizer copies and on ordinary tensors. Signatures, state and state dicts are torch's. The C
kernel updates float32 parameters in host memory whose gradient and moments have the same memory layout: optimizer
copies layer by layer as their gradients land, ordinary tensors one by one. torch updates all other parameters. The
kernel's arithmetic is that of whole vectors in torch's fused kernel, operation by operation, and is the same for every
size, instruction set and number of threads.

[Note: fused layout] torch's fused CPU kernel walks parameter, gradient and moments as flat memory and ignores strides
and shapes: a transposed parameter with a contiguous gradient gets a wrong update, and moments of another model are
silently written out of bounds (the CUDA kernel raises). Layouts are known only when a gradient is there. So a group is
marked as fused by device and dtype when it is added, and its layouts are checked in every step. A group that fails the
check uses torch's default implementation in that step, which handles strides and raises on wrong shapes.

[Note: memory for state] Host memory for the moments is checked before any of it is allocated. The system creates fresh
pages slowly, and the moments of a large model are many pages. So a Reserve creates them in the background while the
first call still computes.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from roundpipe.monitor import THREAD_PREFIX, start_thread
from roundpipe.optim.native.kernel import (
    MAX_FACTORS,
    AdamRule,
    KernelParameter,
    OnePassKernel,
    can_read,
    one_pass_kernel,
    share_layout,
    usable_cores,
)
from roundpipe.store import HalvedMaster, OptimizerCopy
from roundpipe.store.host_memory import (
    HUGE_PAGE_BYTES,
    available_host_bytes,
    host_zeros_like,
    make_pages_ready,
    require_host_memory,
)
from roundpipe.store.store import LayerUpdate

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
    """Raise HostMemoryError if the state that this step will allocate does not fit. Counts each parameter once.

    `reserved`: ids of parameters whose state has memory already. `in_one_pass`: optimizer copies are updated without
    memory for their full values and gradients.
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
    """The number of tensors of a parameter's size in its state; 0 for unknown kinds of optimizer."""
    if isinstance(optimizer, _WITH_TWO_MOMENTS):
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return 0


_MOST_THREADS = 4
_CORES_PER_THREAD = 4  # with few cores there is no thread: the first call needs the cores itself


class Reserve:
    """Moments, filled with zeros, for the first step of optimizer copies."""

    def __init__(self) -> None:
        self._moments: dict[int, list[torch.Tensor]] = {}  # by id of the copy

    def fill(self, copies: Sequence[OptimizerCopy], num_moments: int) -> None:
        """Allocate moments for all large copies, and start threads that create their pages.

        From the last copy to the first, as gradients land. Does nothing if there are too few cores or too little
        memory; the first step then allocates the moments.
        """
        num_threads = min(_MOST_THREADS, usable_cores() // _CORES_PER_THREAD)
        worthwhile = [copy for copy in reversed(copies) if copy.nbytes >= HUGE_PAGE_BYTES]
        available = available_host_bytes()
        needed = sum((num_moments + 1) * copy.nbytes for copy in worthwhile)  # 1: for gradients and low halves
        if not num_threads or (available is not None and needed > available):
            return
        memory: list[torch.Tensor] = []
        for copy in worthwhile:
            self._moments[id(copy)] = [host_zeros_like(copy) for _ in range(num_moments)]
            memory += [*self._moments[id(copy)], *copy.memory_of_step()]
        for first in range(num_threads if memory else 0):
            name = f"{THREAD_PREFIX}pages-{first}"
            thread = threading.Thread(target=_make_ready, args=(memory[first::num_threads],), name=name, daemon=True)
            try:
                start_thread(thread)
            except RuntimeError:  # the system starts no more threads: pages are created when the first step writes
                return

    def __contains__(self, copy_id: object) -> bool:
        return copy_id in self._moments

    def moment_for(self, copy: OptimizerCopy) -> torch.Tensor:
        """A new tensor of zeros with the shape, dtype and strides of a copy; from the reserve if it has one."""
        mine = self._moments.get(id(copy))
        return mine.pop() if mine else host_zeros_like(copy)


def _make_ready(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        make_pages_ready(tensor)


_Group = dict[str, Any]
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, OptimizerCopy)  # other subclasses may keep their values elsewhere


class _CheckedState:
    """The state of one optimizer copy as it was when it was last checked, and what the kernel needs of it.

    A state changes when the user loads, replaces or moves its tensors. Comparing identities and addresses detects that
    and takes less time than another check.
    """

    __slots__ = ("addresses", "parameter", "tensors")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.parameter: KernelParameter | None = None

    def is_current(self, tensors: Sequence[Any]) -> bool:
        """Whether these are still the tensors that were checked, in the same memory."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors))
            and [tensor.data_ptr() for tensor in tensors] == self.addresses
        )


def _state_names(group: _Group) -> tuple[str, ...]:
    names = ("step", "exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def all_states_match(optimizer: torch.optim.Optimizer, checked: dict[int, _CheckedState]) -> bool:
    """Whether every existing state has all moments, each in its parameter's shape, dtype and place.

    A state loaded from another model may not match; torch's default implementation raises on it. `checked` remembers
    states of optimizer copies that match, by the id of the copy.
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
                    # Tensor subclasses may have no address.
                    if isinstance(param, OptimizerCopy) and all(type(tensor) is Tensor for tensor in tensors):
                        checked[id(param)] = _CheckedState(tensors)
    return True


def _state_matches(param: torch.Tensor, tensors: Sequence[Any]) -> bool:
    step, *moments = tensors
    return isinstance(step, torch.Tensor) and all(
        isinstance(moment, torch.Tensor)
        and moment.shape == param.shape
        and moment.dtype == param.dtype
        and moment.device == param.device
        and moment.layout == param.layout
        for moment in moments
    )


def _is_for_kernel(optimizer: torch.optim.Optimizer, group: _Group) -> bool:
    """Whether the kernel supports a group's options.

    torch's GradScaler sets grad_scale and found_inf and expects the fused optimizer to unscale; torch does that.
    """
    if not group["fused"] or group["capturable"] or group["differentiable"]:
        return False
    if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return False
    return getattr(optimizer, "grad_scale", None) is None and getattr(optimizer, "found_inf", None) is None


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


# Ordinary tensors.


def update_tensors(optimizer: torch.optim.Optimizer, group: _Group, params: Iterable[torch.Tensor]) -> frozenset[int]:
    """Update ordinary tensors of a group, whose states exist; returns the ids of those that were updated.

    One after the other, as torch does, because parameters may share memory.
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
            for tensor in written:  # autograd raises if it has saved the old values for a backward pass
                torch.autograd.graph.increment_version(tensor)
    return frozenset(id(param) for param in ready)


def _is_ready(optimizer: torch.optim.Optimizer, group: _Group, param: torch.Tensor) -> bool:
    """Whether the kernel can read and write the memory of a parameter, its gradient and its moments."""
    if param.grad is None:
        return False
    tensors = [param, param.grad, *(optimizer.state[param][name] for name in _state_names(group)[1:])]
    return all(_is_plain_float(tensor) for tensor in tensors) and share_layout(tensors)


def _is_plain_float(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its values, as float32 on the host."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


# Optimizer copies.


class _OnePass:
    """One step over the optimizer copies of an optimizer, layer by layer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kernel: OnePassKernel,
        reserve: Reserve | None,
        checked: dict[int, _CheckedState],
    ) -> None:
        """`reserve`: may have memory for moments that do not exist yet. `checked`: current states by id of the copy."""
        self._optimizer, self._kernel = optimizer, kernel
        self._reserve, self._checked = reserve, checked
        self._rules: dict[tuple[int, int, tuple[float, ...]], AdamRule] = {}  # most copies of a step share one rule

    def update_layer(self, update: LayerUpdate, items: Sequence[tuple[OptimizerCopy, _Group]]) -> list[int]:
        """Update the copies of one layer that the kernel can update; returns their ids."""
        update.wait_for_gradients()
        locked: list[OptimizerCopy] = []
        ready: list[OptimizerCopy] = []  # those with an entry in `parameters`
        parameters: list[KernelParameter] = []
        # Attributes of a copy are read without __torch_function__, which would take longer than everything else here.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                for copy, group in items:
                    copy.lock.acquire()  # until the kernel is done: no other thread may join or exchange the halves
                    locked.append(copy)
                    parameter = self._kernel_parameter(update, copy, group)
                    if parameter is not None:
                        ready.append(copy)
                        parameters.append(parameter)
                if parameters:
                    torch._foreach_add_([self._optimizer.state[copy]["step"] for copy in ready], 1)
                    self._kernel.adam(parameters)
                for copy, parameter in zip(ready, parameters, strict=True):
                    if parameter.weight is not None:
                        copy.weight_was_written(parameter.weight)
                    update.updated.add(copy.record)
            finally:
                for parameter in parameters:
                    parameter.forget_memory()
                for copy in locked:
                    copy.lock.release()
        return list(map(id, ready))

    def _kernel_parameter(self, update: LayerUpdate, copy: OptimizerCopy, group: _Group) -> KernelParameter | None:
        """What the kernel needs to update a copy; None if there is no gradient or the kernel cannot update it."""
        gradient, factors = copy.low_gradient(), copy.factors
        if gradient is None or len(factors) >= MAX_FACTORS:
            gradient, factors = copy.grad, ()
        if gradient is None:
            return None
        state = _state_of(self._optimizer, copy, self._reserve, amsgrad=group["amsgrad"])
        weight = update.new_weight_of(copy.record)
        step = int(state["step"]) + 1
        rule = self._rules.get((id(group), step, factors))
        if rule is None:
            rule = self._rules[id(group), step, factors] = _rule(self._optimizer, group, step, factors)
        known = self._checked.get(id(copy))
        parameter = None if known is None else known.parameter
        master = _master_of(copy, weight)
        if parameter is not None and parameter.renew(master, gradient, weight, rule):
            return parameter
        moments = [state[name] for name in _state_names(group)[1:]]
        read = [gradient] if weight is None else [gradient, weight]
        if not all(map(can_read, read)) or not share_layout([copy, *read, *moments]):
            return None
        first, second, largest = (*moments, None)[:3]
        parameter = KernelParameter(master, gradient, first, second, largest, weight, rule)
        if known is not None:
            known.parameter = parameter
        return parameter


def _master_of(copy: OptimizerCopy, weight: torch.Tensor | None) -> torch.Tensor | HalvedMaster:
    """The values of a copy: its two halves, or its memory if it has some or there is no weight to hold high halves."""
    return copy.values() if weight is None or copy.halves is None else copy.halves


def _state_of(
    optimizer: torch.optim.Optimizer, copy: OptimizerCopy, reserve: Reserve | None, *, amsgrad: bool
) -> dict[str, Any]:
    """The state of a copy, created as torch does it in a parameter's first step."""
    state: dict[str, Any] = optimizer.state[copy]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())):
            state[key] = (reserve or Reserve()).moment_for(copy)
    return state


def step_in_one_pass(
    optimizer: torch.optim.Optimizer, reserve: Reserve | None, checked: dict[int, _CheckedState]
) -> frozenset[int]:
    """Update the optimizer copies that the kernel can update; returns the ids of those whose step is done."""
    items: dict[LayerUpdate, list[tuple[OptimizerCopy, _Group]]] = defaultdict(list)
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            if _is_for_kernel(optimizer, group):
                for param in group["params"]:
                    source = param.source if isinstance(param, OptimizerCopy) else None
                    if isinstance(source, LayerUpdate) and param.dtype is torch.float32:
                        items[source].append((param, group))
    left = deque(sorted((update for update in items if update.is_usable()), key=lambda update: update.order))
    kernel = one_pass_kernel() if left else None
    if kernel is None:
        return frozenset()
    one_pass = _OnePass(optimizer, kernel, reserve, checked)
    done: list[int] = []
    while left:
        # In the order in which gradients land; once all have landed, in the order in which calls need the weights.
        update = left.pop() if all(update.has_landed for update in left) else left.popleft()
        done += update.carry_out(functools.partial(one_pass.update_layer, update, items[update]))
    return frozenset(done)


_FUSED_DEVICES = ("cpu", "cuda")
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _FusedByDefault(torch.optim.Optimizer):
    """What both optimizers add to torch's: the kernel, and `fused=True` unless a group sets foreach or fused."""

    _updated: frozenset[int] | None = None  # ids of parameters that this step has updated; None: torch updates all
    _unfused: Sequence[_Group] = ()  # groups that use torch's default implementation in this step
    _reserve: Reserve | None = None  # until the first step
    _checked: dict[int, _CheckedState] | None = None  # by id of the copy, which the optimizer keeps alive

    @_disable_dynamo  # a trace would not contain what the kernel does
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. Waits for gradients of optimizer copies that have not landed yet."""
        require_state_memory(self, self._reserve or (), in_one_pass=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        num_states = len(self.state)
        # torch's own step without the hooks around it: this step runs inside these hooks already.
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
        """Order states by parameter, as torch does, and not by the arrival of gradients: checkpoints depend on it."""
        for group in self.param_groups:
            for param in group["params"]:
                if param in self.state:
                    self.state[param] = self.state.pop(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. `set_to_none=True` does not wait for gradients that have not landed."""
        params = [param for group in self.param_groups for param in group["params"]]
        copies = [param for param in params if isinstance(param, OptimizerCopy)] if set_to_none else []
        # Gradients gathered outside steps are dropped too. One copy of each model is enough to see all of them.
        for copy in {copy.home: copy for copy in copies}.values():
            copy.see_gradients()
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
        """Restore a state; `load_state_dict` ends here too. The state dict of an unfused optimizer continues fused."""
        super().__setstate__(state)
        self._checked = None  # would keep the old moments alive
        for group in self.param_groups:
            if _choose_fused(group):
                self._move_step_counts(group["params"])

    def _move_step_counts(self, params: Sequence[Tensor]) -> None:
        """Make step counts tensors on the parameter's device, where fused kernels expect them."""
        for param in params:
            param_state = self.state.get(param, {})
            if "step" in param_state:
                param_state["step"] = torch.as_tensor(param_state["step"], dtype=torch.float32, device=param.device)

    def _init_group(self, group: _Group, *lists: Any, **named_lists: Any) -> Any:
        """Called by torch's step for each group after the closure; torch then updates the tensors in `lists`.

        Leaves out what this step has updated already, and updates ordinary tensors with the kernel first.
        """
        rest = group["params"]
        if self._updated is not None:
            rest = [param for param in rest if id(param) not in self._updated]
            if rest:
                # torch creates the states of a first step, and raises on gradients that it refuses.
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
        """Whether torch's fused kernel would treat a parameter, its gradient and its moments right."""
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
    """`torch.optim.Adam` for host memory: same arguments, state and results."""


class AdamW(_FusedByDefault, torch.optim.AdamW):
    """`torch.optim.AdamW` for host memory: same arguments, state and results."""


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `method`, or does nothing once the method's object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _choose_fused(group: _Group) -> bool:
    """Set `fused` if the user left the implementation open and the fused one supports the group; whether it was set."""
    left_open = group.get("foreach") is None and group.get("fused") is None
    plain = not group.get("differentiable") and not group.get("capturable")
    plain = plain and not any(isinstance(beta, Tensor) for beta in group.get("betas", ()))
    if not (left_open and plain and all(_fusable(param) for param in group["params"])):
        return False
    group["fused"] = True
    return True


def _fusable(param: Tensor) -> bool:
    return param.device.type in _FUSED_DEVICES and param.dtype in _FUSED_DTYPES and param.layout is torch.strided
