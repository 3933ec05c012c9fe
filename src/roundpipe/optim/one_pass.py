"""One pass over the parameters of a step: the C kernel updates those that it supports, the plain optimizer the others.

An optimizer is a OnePassOptimizer and a plain one of torch's kind, which has arguments, state and state dict; its rule
(`rules`) says what the kernel computes. It works on a model's masters and on ordinary tensors. The kernel updates
float32 parameters in host memory whose gradient and states have the same memory layout: masters layer by layer as their
gradients land, ordinary tensors one by one. The plain optimizer updates all other parameters. The results of the kernel
do not depend on the number of elements, the instruction set or the number of threads.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from roundpipe.context import current_iteration
from roundpipe.optim.device_share import DeviceShare
from roundpipe.optim.native.kernel import (
    MAX_FACTORS,
    KernelParameter,
    OnePassKernel,
    StepNumbers,
    can_read,
    one_pass_kernel,
    share_layout,
)
from roundpipe.optim.rules import Group, Rule, check_moments, has_low_bits, step_after
from roundpipe.optim.states import (
    Reserve,
    StateFolder,
    cut_moments,
    first_element,
    move_to_folder,
    new_parts,
    own_range,
    parts_of,
    require_state_memory,
    restore_parts,
    round_masters,
    state_fits,
    state_placement,
    update_expanded,
)
from roundpipe.param_groups import present_settings
from roundpipe.store import OptimizerCopy
from roundpipe.store.forms import PLAIN, Form
from roundpipe.store.update import LayerUpdate, in_order_of_change
from roundpipe.store.values import WholeMaster, flat

Folder = str | os.PathLike[str]
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, OptimizerCopy)  # other subclasses may store values elsewhere


class _StoredState:
    """How the state of one master is stored, its tensors, and the KernelParameter over them.

    Kept from step to step for a state that was checked. The user may load, replace or move its tensors, or change the
    options of its group. Comparing identities and addresses detects that and takes less time than another check.
    """

    __slots__ = ("addresses", "counts_steps", "exists", "forms", "is_low", "parameter", "storage", "values")

    def __init__(self, rule: Rule, group: Group, param: Tensor, state: dict[str, Any]) -> None:
        self.storage = rule.storage(group)
        self.forms = rule.forms(group, param)
        self.is_low = has_low_bits(group, param)
        self.counts_steps = rule.counts_steps(group, param)
        self.exists = rule.has_states(state)  # otherwise the next step makes it
        self.values = tuple(state.values())
        self.addresses: list[int] = []
        self.parameter: KernelParameter | None = None

    def can_be_kept(self, param: Tensor) -> bool:
        """Whether `is_current` can tell later that nothing has changed. Notes the addresses of the tensors.

        It cannot with tensor subclasses, which may have no address.
        """
        is_comparable = isinstance(param, OptimizerCopy) and all(type(value) is Tensor for value in self.values)
        if is_comparable:
            self.addresses = [value.data_ptr() for value in self.values]
        return is_comparable

    def is_current(self, storage: object, state: dict[str, Any]) -> bool:
        """Whether the state has the tensors that were checked, at the same addresses, and is to be stored so."""
        return (
            self.storage == storage
            and len(state) == len(self.values)
            and all(map(operator.is_, state.values(), self.values))
            and [value.data_ptr() for value in self.values] == self.addresses
        )


def all_states_match(optimizer: OnePassOptimizer, kept: dict[int, _StoredState]) -> bool:
    """Whether all states that exist have the tensors of the rule, in shape, dtype, device and layout of the parameter.

    A state loaded from another model may not match; the plain optimizer then raises. `kept`: the states of masters that
    match, by the id of the master, from earlier calls.
    """
    rule = optimizer.rule
    with torch._C.DisableTorchFunctionSubclass():
        for group in map(present_settings, optimizer.param_groups):
            storage = rule.storage(group)
            for param in group["params"]:
                state = optimizer.state.get(param) or {}
                known = kept.get(id(param))
                if known is not None and known.is_current(storage, state):
                    continue
                kept.pop(id(param), None)
                if not rule.has_states(state):
                    continue
                stored = _StoredState(rule, group, param, state)
                if not _state_matches(param, state, stored):
                    return False
                if stored.can_be_kept(param):
                    kept[id(param)] = stored
    return True


def _state_matches(param: torch.Tensor, state: dict[str, Any], stored: _StoredState) -> bool:
    found = parts_of(state, stored.forms)
    tensors = [*(part for parts in found for part in parts), *([state.get("step")] if stored.counts_steps else [])]
    is_divided = isinstance(param, OptimizerCopy) and param.share is not None
    return (
        all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        and state_fits(param, state, stored.forms, is_divided=is_divided)
        and all(part.device == param.device and part.layout == param.layout for parts in found for part in parts)
    )


def _is_for_kernel(optimizer: OnePassOptimizer, group: Group) -> bool:
    """Whether the kernel supports a group's options. The plain optimizer updates the groups that it does not support.

    These include all groups while torch's GradScaler has set grad_scale or found_inf: it then expects the optimizer
    to unscale gradients, which the kernel does not do.
    """
    has_scale = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    return optimizer.rule.suits_kernel(group) and not has_scale


def divides_moments(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether each of several machines has a range of the moments of a group: the kernel updates the group."""
    if not isinstance(optimizer, OnePassOptimizer):
        return False
    return _is_for_kernel(optimizer, group) and one_pass_kernel() is not None


# Updates of ordinary tensors.


def update_tensors(optimizer: OnePassOptimizer, group: Group, params: Iterable[torch.Tensor]) -> frozenset[int]:
    """Update the ordinary tensors of a group that the kernel supports; returns the ids of the updated ones.

    Updates one tensor after the other, as torch does, because parameters may share memory.
    """
    rule = optimizer.rule
    if not _is_for_kernel(optimizer, group):
        return frozenset()
    with torch._C.DisableTorchFunctionSubclass():
        ready = [param for param in params if _is_ready(optimizer, group, param)]
        kernel = one_pass_kernel() if ready else None
        if kernel is None:
            return frozenset()
        written: list[torch.Tensor] = []
        try:
            for param in ready:
                assert param.grad is not None
                old = optimizer.state.get(param) or {}
                step = step_after(old) if has_low_bits(group, param) else 0
                numbers = rule.step_numbers(group, rule.progress(old), (), step)
                stored = _StoredState(rule, group, param, old)
                state = old if stored.exists else _new_state(old, stored, functools.partial(_new_parts_like, param))
                moments, scales = _memory_of(state, stored.forms)
                written += [param, *moments, *scales]
                kernel.update(
                    [KernelParameter(WholeMaster(param.data), param.grad, moments, None, numbers, (), scales)]
                )
                if state:
                    optimizer.state[param] = state
        finally:
            for tensor in written:  # makes autograd raise if it has saved the old values for a backward pass
                torch.autograd.graph.increment_version(tensor)
        counts = [optimizer.state[param]["step"] for param in ready if rule.counts_steps(group, param)]
        if counts:
            torch._foreach_add_(counts, 1)
    return frozenset(id(param) for param in ready)


def _new_state(
    old: dict[str, Any], stored: _StoredState, new_parts: Callable[[Form], Sequence[Tensor]]
) -> dict[str, Any]:
    """A state of zeros, with what `old` has besides. It counts only once the kernel has used it."""
    state = {**old, **({"step": torch.zeros((), dtype=torch.float32)} if stored.counts_steps else {})}
    for name, form in stored.forms.items():
        state.update(zip(form.part_names(name), new_parts(form), strict=True))
    return state


def _new_parts_like(param: Tensor, form: Form) -> Sequence[Tensor]:
    """A state of zeros for an ordinary tensor, which may lie in memory with gaps."""
    return [torch.zeros_like(param, memory_format=torch.preserve_format)] if form is PLAIN else new_parts(form, param)


def _memory_of(state: dict[str, Any], forms: dict[str, Form]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a state for the kernel: those with an entry per element, and scales."""
    found = parts_of(state, forms)
    return [parts[0] for parts in found], [part for parts in found for part in parts[1:]]


def _is_ready(optimizer: OnePassOptimizer, group: Group, param: torch.Tensor) -> bool:
    """Whether a parameter has a gradient, and the kernel can use the memory of parameter, gradient and states."""
    if param.grad is None:
        return False
    tensors, state = [param, param.grad], optimizer.state.get(param)
    kinds = [torch.float32, torch.float32]
    if state is not None and optimizer.rule.has_states(state):
        forms = optimizer.rule.forms(group, param)
        tensors += _memory_of(state, forms)[0]
        kinds += [form.dtypes(torch.float32)[0] for form in forms.values()]
    return all(map(_is_plain, tensors, kinds)) and share_layout(tensors)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's elements are stored as plain numbers of a dtype in host memory.

    False for sparse tensors, lazily negated tensors, zero tensors without memory and most tensor subclasses.
    """
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype is dtype
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


# Updates of masters.


class _Ready(NamedTuple):
    """A master that the kernel can update."""

    master: OptimizerCopy
    state: dict[str, Any]
    parameter: KernelParameter
    weight: Tensor | None  # the memory that receives the rounded values; of the whole parameter


class _OnePass:
    """One step of an optimizer over its masters, layer by layer."""

    def __init__(
        self,
        optimizer: OnePassOptimizer,
        kernel: OnePassKernel,
        reserve: Reserve | None,
        kept: dict[int, _StoredState],
    ) -> None:
        """`reserve`: memory for moments of a first step, if any. `kept`: the checked states, by id of the master."""
        self._optimizer, self._kernel, self._share = optimizer, kernel, optimizer.device_share
        self._reserve, self._kept = reserve, kept
        # By group, progress, factors and step: most masters of a step share the same numbers.
        self._numbers: dict[tuple[int, int, tuple[float, ...], int], StepNumbers] = {}

    def update_layer(self, update: LayerUpdate, items: Sequence[tuple[OptimizerCopy, Group]]) -> list[int]:
        """Update the masters of one layer that the kernel can update; returns their ids."""
        update.wait_for_gradients()
        locked: list[OptimizerCopy] = []
        ready: list[_Ready] = []
        # Disables __torch_function__ of the masters: it would take longer than everything else in this function.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                for copy, group in items:
                    copy.lock.acquire()  # held until the kernel is done: no other thread may join or move the halves
                    locked.append(copy)
                    found = self._prepared(update, copy, group)
                    if found is not None:
                        ready.append(found)
                if ready:
                    parameters = [each.parameter for each in ready]
                    if self._share is None:
                        self._kernel.update(parameters)
                    else:
                        self._share.update(self._kernel, parameters, [each.master for each in ready], update)
                    counts = [each.state["step"] for each in ready if "step" in each.state]
                    if counts:
                        torch._foreach_add_(counts, 1)
                for copy, state, _, written in ready:
                    if state:  # a first step has made it
                        self._optimizer.state[copy] = state
                    if written is not None:
                        copy.weight_was_written(written)
            finally:
                for each in ready:
                    each.parameter.forget_memory()
                for copy in locked:
                    copy.lock.release()
        update.masters_updated([each.master.record for each in ready])
        return [id(each.master) for each in ready]

    def _prepared(self, update: LayerUpdate, copy: OptimizerCopy, group: Group) -> _Ready | None:
        """What the kernel needs to update a master; None if there is no gradient or the kernel does not support it."""
        rule, share, factors = self._optimizer.rule, copy.share, copy.factors
        found = copy.gradient_sources(whole=share is None)
        if found is None or len(factors) >= MAX_FACTORS:
            whole, factors = copy.grad, ()
            if whole is None:
                return None
            found = [whole if share is None else own_range(whole, copy)]
        gradient, *more = found
        old = self._optimizer.state.get(copy) or {}
        kept = self._kept.get(id(copy))
        stored = kept or _StoredState(rule, group, copy, old)
        key = id(group), rule.progress(old), factors, step_after(old) if stored.is_low else 0
        numbers = self._numbers.get(key) or self._numbers.setdefault(key, rule.step_numbers(group, *key[1:]))
        state = old if stored.exists else _new_state(old, stored, functools.partial(self._new_parts, copy))
        weight = whole_weight = update.new_weight_of(copy.record)
        master = copy.values_for_kernel(writes_weight=weight is not None)
        if share is not None:  # the whole update works on this machine's range, as flat tensors
            cut_moments(state, stored.forms, copy)
            assert weight is not None
            weight = flat(weight)[share.range_of(weight.numel())]
        parameter = stored.parameter
        if parameter is None or not parameter.renew(master, gradient, weight, numbers, more):
            moments, scales = _memory_of(state, stored.forms)
            read = [gradient] if weight is None else [gradient, weight]
            if share is None and not (all(map(can_read, read)) and share_layout([copy, *read, *moments])):
                return None
            first = first_element(copy)
            parameter = KernelParameter(master, gradient, moments, weight, numbers, more, scales, first, copy.rounding)
            stored.parameter = parameter
        return _Ready(copy, state, parameter, whole_weight)

    def _new_parts(self, copy: OptimizerCopy, form: Form) -> list[Tensor]:
        with state_placement(self._optimizer):  # here, because another thread than that of the step may run this
            return new_parts(form, copy) if self._reserve is None else self._reserve.parts_for(form, copy)


def step_in_one_pass(
    optimizer: OnePassOptimizer, reserve: Reserve | None, kept: dict[int, _StoredState]
) -> frozenset[int]:
    """Update the masters that the kernel can update; returns their ids."""
    items: dict[LayerUpdate, list[tuple[OptimizerCopy, Group]]] = defaultdict(list)
    with torch._C.DisableTorchFunctionSubclass():
        for group in map(present_settings, optimizer.param_groups):
            if _is_for_kernel(optimizer, group):
                for param in group["params"]:
                    source = param.source if isinstance(param, OptimizerCopy) else None
                    if isinstance(source, LayerUpdate) and param.dtype is torch.float32:
                        items[source].append((param, group))
    left = sorted((update for update in items if update.is_usable()), key=lambda update: update.order)
    kernel = one_pass_kernel() if left else None
    if kernel is None:
        return frozenset()
    one_pass, folder = _OnePass(optimizer, kernel, reserve, kept), optimizer.state_folder
    done: list[int] = []
    for update, ahead in in_order_of_change(left):
        if folder is not None and ahead is not None:
            folder.read_ahead(optimizer.state.get(copy, {}) for copy, _ in items[ahead])
        done += update.carry_out(functools.partial(one_pass.update_layer, update, items[update]))
    return frozenset(done)


class OnePassOptimizer(torch.optim.Optimizer):
    """Adds the kernel to a plain optimizer, which comes next in the order of base classes.

    The plain optimizer has an `_init_group` that lists the parameters of a group to update, as those of torch have.
    """

    rule: ClassVar[Rule]
    _updated: frozenset[int] | None = None  # ids of parameters that this step has updated; None if the plain one does
    _reserve: Reserve | None = None  # exists from the beginning of training until the first step
    _checked: dict[int, _StoredState] | None = None  # by id of the master, which the optimizer keeps alive
    _moments = "float32"
    state_folder: StateFolder | None = None  # where large states lie; None for host memory
    device_share: DeviceShare | None = None  # updates masters on the host and on devices; None: on the host alone
    # In a step: what the kernel has left to the plain optimizer, and options that groups get back after the step.
    _rest: Sequence[tuple[Group, Tensor]] = ()
    _options: Sequence[tuple[Group, str, Any]] = ()
    _only: Tensor | None = None  # the one parameter that the plain optimizer is to update; None for all

    def __init_subclass__(cls) -> None:
        """Give the class the signature of its plain optimizer, with the arguments that this class adds."""
        super().__init_subclass__()
        if hasattr(cls, "rule"):
            plain = inspect.signature(cls.__mro__[cls.__mro__.index(OnePassOptimizer) + 1])
            own = inspect.signature(OnePassOptimizer.__init__).parameters
            names = ("moments", "state_folder", "on_devices")
            added = [own[name] for name in names if name != "moments" or cls.rule.can_be_low]
            cls.__signature__ = plain.replace(parameters=[*plain.parameters.values(), *added])  # type: ignore[attr-defined]

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        moments: str = "float32",
        state_folder: Folder | None = None,
        on_devices: bool = False,
        **options: Any,
    ) -> None:
        """As in torch. `moments`: "float32", "bfloat16" or "8bit", for groups that do not say it themselves.

        state_folder: a folder on a fast disk in which large states lie, instead of in host memory.
        on_devices: whether the model's devices update a share of each layer while their links are idle.
        """
        self.device_share = DeviceShare(state_folder) if on_devices else None
        self._moments = moments  # first: the plain optimizer adds the groups while it is being made
        self.state_folder = None if state_folder is None else StateFolder(state_folder)
        super().__init__(params, *args, **options)
        if self.device_share is not None:  # here: the class has chosen the implementation of its groups by now
            self.device_share.check_options(self.param_groups, self.rule, type(self).__name__)

    @_disable_dynamo  # a trace by torch.compile would miss the kernel's updates
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. Waits for gradients of masters that have not landed yet."""
        with state_placement(self):
            if not all(map(self.state.get, (param for group in self.param_groups for param in group["params"]))):
                require_state_memory(self, self._reserve or (), in_one_pass=True)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            num_states, self._rest, self._options = len(self.state), [], []
            # The plain optimizer's method without its wrapper, which runs hooks: this one is in the same hooks.
            plain_step = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
            if self._checked is None:
                self._checked = {}
            try:
                if all_states_match(self, self._checked):
                    with torch.no_grad():
                        self._updated = step_in_one_pass(self, self._reserve, self._checked)
                    self._reserve = None
                if len(self._updated or ()) < sum(len(group["params"]) for group in self.param_groups):
                    with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
                        plain_step(self)
                    with torch.no_grad():
                        self._complete_rest(functools.partial(plain_step, self))
            finally:
                for group, name, value in self._options:
                    group[name] = value
                self._updated, self._rest, self._options = None, (), ()
            if len(self.state) != num_states:
                self._order_states()
            return loss

    def _complete_rest(self, plain_step: Callable[[], Any]) -> None:
        """After the plain optimizer: update those of `_rest` that have states in low bits, and round masters."""
        rest = self._rest
        for group, param in rest:
            if has_low_bits(group, param):
                self._only = param
                try:
                    update_expanded(self, self.rule, group, param, plain_step)
                finally:
                    self._only = None
        round_masters([param for _, param in rest])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Moments in another form than that of a group are converted, and the group's `moments` stays."""
        moments = [group.get("moments") for group in self.param_groups]
        super().load_state_dict(state_dict)
        with state_placement(self):
            restore_parts(self, state_dict, moments, self.rule)
            move_to_folder(self.state.values())
        self._checked = None

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
        if current_iteration() is None:
            for copy in {copy.home: copy for copy in copies}.values():
                copy.see_gradients(dropped)
        with torch._C.DisableTorchFunctionSubclass():
            for copy in copies:
                copy.drop_gradient()
        if len(copies) < len(params):
            super().zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """As in torch."""
        if self._moments != "float32":
            self.defaults["moments"] = self._moments
        super().add_param_group(param_group)
        try:
            check_moments(self.param_groups[-1], self.rule, type(self).__name__)
        except ValueError:
            self.param_groups.pop()
            raise
        for param in self.param_groups[-1]["params"]:
            if isinstance(param, OptimizerCopy):
                param.when_training = _weakly(self._get_memory_ready)

    def _get_memory_ready(self) -> None:
        """Create the pages of all moments in the background: the model begins to train, so a step will follow."""
        copies = {id(p): p for group in self.param_groups for p in group["params"] if isinstance(p, OptimizerCopy)}
        for copy in copies.values():
            copy.when_training = None
        if self.state_folder is not None:
            return  # files have no pages to create
        self._reserve = Reserve()
        groups = {id(param): group for group in self.param_groups for param in group["params"]}
        new = [copy for copy in copies.values() if not self.state.get(copy)]
        self._reserve.fill(new, lambda copy: self.rule.forms(groups[id(copy)], copy).values())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state. `load_state_dict` calls this too."""
        super().__setstate__(state)
        self._checked = None  # the old entries would keep the old moments alive

    def _init_group(self, group: Group, *lists: Any, **named_lists: Any) -> Any:
        """Fill `lists` with the tensors of a group that the plain optimizer is to update; its step calls this.

        First updates ordinary tensors with the kernel. Parameters that the kernel has updated are left out of `lists`.
        """
        if self._only is not None:
            return self._leave(group, [param for param in group["params"] if param is self._only], lists, named_lists)
        rest = group["params"]
        if self._updated is not None:
            rest = [param for param in rest if id(param) not in self._updated]
        low = [param for param in rest if has_low_bits(group, param)]
        if low:
            rest = [param for param in rest if not has_low_bits(group, param)]
            low = self._without_tensors(group, low)
        if self._updated is not None and rest:
            # This call lets torch create missing states and raise on gradients that it refuses.
            unused: list[list[Any]] = [[] for _ in range(len(lists) + len(named_lists))]
            super()._init_group({**group, "params": rest}, *unused)  # type: ignore[misc]
            rest = self._without_tensors(group, rest)
        self._rest = [*self._rest, *((group, param) for param in (*low, *rest))]
        return self._leave(group, rest, lists, named_lists)

    def _without_tensors(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """Update the ordinary tensors that the kernel supports, and return the other parameters."""
        if self._updated is None:
            return params
        with torch.no_grad():
            done = update_tensors(self, group, params)
        return [param for param in params if id(param) not in done]

    def _leave(self, group: Group, params: list[Tensor], lists: Any, named_lists: Any) -> Any:
        """Leave parameters of a group to the plain optimizer, with the options that it needs for them."""
        result = super()._init_group({**group, "params": params}, *lists, **named_lists)  # type: ignore[misc]
        for name, value in (self._options_for(group, params) if params else {}).items():
            self._options = [*self._options, (group, name, group[name])]
            group[name] = value
        return result

    def _options_for(self, group: Group, params: Sequence[Tensor]) -> dict[str, Any]:
        """Options that a group must have while the plain optimizer updates `params`."""
        return {}


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `method` without keeping its object alive. Does nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call
