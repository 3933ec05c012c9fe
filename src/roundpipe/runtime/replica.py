"""A layer's module on one device: the user's code, hooks and settings over device tensors.

The modules are shallow copies, so hooks and attributes are the user's own. The parameters are stand-ins: `bind` points
them to the weights that a task uploaded, `unbind` releases these. Buffers are set for each microbatch.

[Note: attributes]
Attributes that the user changes on a module (training mode, a dropout rate) reach the replica at each `bind`.
Attributes that a forward sets stay on the replica, where a cache of device tensors belongs. Only plain numbers, strings
and None (a counter, a flag) are written back to the user's module, after the forward of the last microbatch and before
the call returns. Attributes that a recomputation or a failed forward set are dropped, so that nothing counts twice.

[Note: gradient hooks]
A run takes the gradient hooks that the user has registered on parameters when it is made: removing one during a
backward does not change that backward. While a replica is bound the hooks are registered on its stand-ins, so autograd
runs them as in a plain model, once per microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from roundpipe.context import gradient_hook_context
from roundpipe.errors import UsageError
from roundpipe.module_copy import copy_tree
from roundpipe.runtime.transfer import Bundle, duplicate
from roundpipe.store import LayerRecord, Layout, ParameterRecord

Hook = Callable[[torch.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class ParameterHooks:
    """The hooks of one parameter, each kind in the order of registration."""

    record: ParameterRecord
    position: int  # among the parameters of its layer
    on_gradient: tuple[Hook, ...]  # register_hook
    after_accumulation: tuple[Hook, ...]  # register_post_accumulate_grad_hook

    def attach(self, stand_in: nn.Parameter) -> list[RemovableHandle]:
        """Register the hooks on a stand-in, which also gets the attributes of the user's parameter."""
        stand_in.__dict__.update(self.record.param.__dict__)
        context = gradient_hook_context()
        handles = [stand_in.register_hook(functools.partial(_run_in, context, hook)) for hook in self.on_gradient]
        for hook in self.after_accumulation:
            run = functools.partial(self._run_after_accumulation, context, hook)
            handles.append(stand_in.register_post_accumulate_grad_hook(run))
        return handles

    def _run_after_accumulation(self, context: Context, hook: Hook, stand_in: torch.Tensor) -> Any:
        version = stand_in._version
        try:
            result = _run_in(context, hook, stand_in)
        except KeyError as error:
            if error.args and error.args[0] is stand_in:
                raise self._refusal("looked up the parameter it was given, which is the device's copy") from error
            raise
        if stand_in.grad is None:
            raise self._refusal("set .grad to None")
        if stand_in._version != version:
            raise self._refusal("wrote to the parameter's values")
        return result

    def _refusal(self, what: str) -> UsageError:
        return UsageError(
            f"a post-accumulate-grad hook of parameter {self.record.name!r} {what}. Hooks run on the device, where "
            "they may read and change gradients; the optimizer's parameters are on the host. Update weights and clear "
            "gradients in step_fn."
        )


def _run_in(context: Context, hook: Hook, tensor: torch.Tensor) -> Any:
    return context.run(hook, tensor)


def hooks_of(layer: LayerRecord, requires_grad: Sequence[bool]) -> tuple[ParameterHooks, ...]:
    """Return the gradient hooks of the layer's parameters that train; raise for hooks that cannot work."""
    found = []
    for position, (record, trains) in enumerate(zip(layer.parameters, requires_grad, strict=True)):
        on_gradient, after = record.param._backward_hooks, record.param._post_accumulate_grad_hooks
        if trains and (on_gradient or after):
            hooks = ParameterHooks(record, position, tuple((on_gradient or {}).values()), tuple((after or {}).values()))
            _refuse_multi_grad_hooks(hooks)
            found.append(hooks)
    return tuple(found)


def refuse_hooks_on_shared(
    hooks: Mapping[int, tuple[ParameterHooks, ...]], contributors: Mapping[ParameterRecord, Sequence[int]]
) -> None:
    """Raise for a gradient hook on a parameter of several layers. contributors: the layers of each such parameter."""
    for of_parameter in (each for of_layer in hooks.values() for each in of_layer):
        layers = contributors.get(of_parameter.record)
        if layers is not None:
            raise UsageError(
                f"parameter {of_parameter.record.name!r} has gradient hooks and is used by layers "
                f"{', '.join(map(str, sorted(layers)))}. Each layer computes its part of the gradient by itself, so a "
                "hook cannot get the sum of all parts as in plain PyTorch. Give the layers separate parameters, or "
                "remove the hook and change .grad of the optimizer's parameter in step_fn."
            )


def _refuse_multi_grad_hooks(hooks: ParameterHooks) -> None:
    for hook in hooks.on_gradient:
        code = getattr(hook, "__code__", None)
        if code is not None and code.co_filename == torch.autograd.graph.__file__:
            raise UsageError(
                f"parameter {hooks.record.name!r} has a hook of torch.autograd.graph.register_multi_grad_hook. Layers "
                "go backward one by one, so it cannot wait for the gradients of several parameters. Use "
                "Tensor.register_hook on each parameter, or look at the gradients in step_fn."
            )


@dataclasses.dataclass(frozen=True)
class LayerSettings:
    """Settings of a layer when a call began. Its recomputation uses them, whatever the user has changed since."""

    requires_grad: tuple[bool, ...]  # by parameter of the record
    training: tuple[bool, ...]  # by module

    @classmethod
    def of(cls, record: LayerRecord) -> LayerSettings:
        return cls(
            tuple(parameter.param.requires_grad for parameter in record.parameters),
            tuple(module.training for module in record.modules),
        )

    @property
    def trains(self) -> bool:
        return any(self.requires_grad)


@dataclasses.dataclass
class Behaviour:
    """What forwards of a layer have shown with certain training flags. Until the first one the worst is assumed."""

    is_known: bool = False
    changes_input: bool = True
    draws_on_host: bool = True
    writes_buffers: bool | None = None  # None: not known
    returns_own_memory: bool = True  # outputs lie in its weights or buffers, which the task does not keep
    # Of forwards with grad; None before the first one.
    leaves_device: bool | None = None  # its autograd graph has nodes on another device
    calls_autograd: bool | None = None  # its forward computes gradients

    @property
    def suits_one_graph(self) -> bool:
        """Whether the layer may share an autograd graph with the layers around it."""
        knows_graph = self.leaves_device is False and self.calls_autograd is False
        return knows_graph and not (self.changes_input or self.returns_own_memory)


class Replica:
    """A layer's module on one device. Between `bind` and `unbind` it can run."""

    def __init__(self, record: LayerRecord, image_layout: Layout, device: torch.device) -> None:
        self.record = record
        self.image_layout = image_layout
        self.parameters = [_stand_in(p.param, device) for p in record.parameters]
        self._nothing = [p.data for p in self.parameters]
        stand_ins = {id(p.param): new for p, new in zip(record.parameters, self.parameters, strict=True)}
        self.module, self._pairs = copy_tree(
            record.module,
            parameter=lambda param: stand_ins.get(id(param), param),
            unwrap=_uncompiled,
            not_followed=frozenset({"training"}),  # set by `bind`
        )
        copies = {id(pair.original): pair.copy for pair in self._pairs}
        # In the order of LayerSettings.training. The store refuses models whose modules have changed.
        self._modules = [copies[id(_uncompiled(module))] for module in record.modules]
        self._buffer_homes = [(copies[id(buffer.owner)], buffer.key) for buffer in record.buffers]
        self._device_type = device.type
        self.behaviour = Behaviour()  # with the training flags it is bound with
        self.has_run = False  # since attributes were last written back
        self._image_address = 0
        self._hook_handles: list[RemovableHandle] = []

    def behaviour_with(self, settings: LayerSettings) -> Behaviour:
        """Return what is known of the layer with these training flags. Devices of one type share it.

        Two workers may note the same forward behaviour at the same time. Each only sets flags, so no lock is needed.
        """
        key = self._device_type, settings.training
        known: Behaviour | None = self.record.observed.get(key)
        if known is None:
            known = Behaviour(writes_buffers=None if self.record.buffers else False)
            known = self.record.observed.setdefault(key, known)
        return known

    def bind(
        self, views: Sequence[torch.Tensor], settings: LayerSettings, hooks: Sequence[ParameterHooks] = ()
    ) -> None:
        """Point the parameters to `views` of the layer's image, with the call's settings and the user's attributes."""
        self._image_address = views[0].untyped_storage().data_ptr() if views else 0
        for stand_in, view, trains in zip(self.parameters, views, settings.requires_grad, strict=True):
            stand_in.data = view
            if stand_in.requires_grad is not trains:
                stand_in.requires_grad_(trains)
        for of_parameter in hooks:
            self._hook_handles += of_parameter.attach(self.parameters[of_parameter.position])
        for pair in self._pairs:
            pair.sync()
        self.has_run = False
        for module, training in zip(self._modules, settings.training, strict=True):
            module.__dict__["training"] = training
        self.behaviour = self.behaviour_with(settings)

    def unbind(self) -> None:
        """Release the image, gradients, hooks and buffers, and drop attributes that were not written back."""
        for stand_in, nothing in zip(self.parameters, self._nothing, strict=True):
            stand_in.data = nothing
            stand_in.grad = None
        while self._hook_handles:
            self._hook_handles.pop().remove()
        if self.has_run:
            for pair in self._pairs:
                pair.drop_changes()
        for module, key in self._buffer_homes:
            module._buffers[key] = None

    def note_forward(self, *, changed_input: bool, drew_on_host: bool | None, returned_own_memory: bool) -> None:
        """Remember what a forward did. `drew_on_host` is None where that was not watched."""
        known = self.behaviour
        if changed_input:
            self.refuse_new_change_of_input()
        known.changes_input = changed_input or (known.is_known and known.changes_input)
        known.returns_own_memory = returned_own_memory or (known.is_known and known.returns_own_memory)
        if drew_on_host is not None:
            known.draws_on_host = drew_on_host or (known.is_known and known.draws_on_host)
        known.is_known = True

    def refuse_new_change_of_input(self) -> None:
        """Raise if a layer that never changed its input in place has now done so: its input may be copied late."""
        if self.behaviour.is_known and not self.behaviour.changes_input:
            raise UsageError(
                f"layer {self.record.layer_id} changed its input in place, which it had not done before; a layer must "
                "either always or never do so. Use an out-of-place operation."
            )

    def write_attributes_back(self) -> None:
        """Write plain values that a forward has set to the user's modules; see [Note: attributes]."""
        for pair in self._pairs:
            pair.write_back()
        self.has_run = False

    def set_buffers(self, values: Sequence[torch.Tensor | None]) -> None:
        for (module, key), value in zip(self._buffer_homes, values, strict=True):
            module._buffers[key] = value

    def get_buffers(self) -> list[torch.Tensor | None]:
        return [module._buffers.get(key) for module, key in self._buffer_homes]

    def copy_own_memory(self, bundle: Bundle) -> tuple[Bundle, bool]:
        """Return the bundle with copies of tensors in the layer's weights or buffers, and whether there are any.

        Weights and buffers may be overwritten once the task is done with the layer.
        """
        own = {b.untyped_storage().data_ptr() for b in self.get_buffers() if b is not None} | {self._image_address}
        own.discard(0)
        is_own = [_memory_of(tensor) in own for tensor in bundle.tensors]
        if not any(is_own):
            return bundle, False
        pairs = zip(bundle.tensors, is_own, strict=True)
        return bundle.with_tensors([duplicate(tensor) if mine else tensor for tensor, mine in pairs]), True


def _stand_in(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=param.dtype, device=device), requires_grad=param.requires_grad)


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None for nested and sparse tensors, which have no single one."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_plain else None


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside a torch.compile wrapper: compiled code is tied to the original's tensors."""
    inner = module._modules.get("_orig_mod")
    return inner if inner is not None and type(module).__name__ == "OptimizedModule" else module
