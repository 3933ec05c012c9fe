"""A layer's module as one device runs it: the same code, hooks and settings over other tensors.

Made once per layer and device, used by runtime.stage. Modules are shallow copies, so hooks and attributes are the
user's own; parameters are stand-ins that are pointed into an uploaded image; buffers are set per microbatch.

[Note: attributes]
What the user changes on a module (training mode, a dropout rate) reaches the replica before each stage. What a
forward sets on its module stays with the replica, where a cache of device tensors belongs, except plain numbers,
strings and None (a counter, a flag): those go back to the user's module after the last microbatch's forward, before
anybody can see the call's result. What a recomputation or a failed forward set is dropped: nothing counts twice.

Gradient hooks that the user has registered on parameters, carried over to the devices' stand-ins.

A run takes the hooks when it is made, so that removing one while a backward still runs changes nothing. A replica
carries them while it is bound: autograd runs them there as it does for a plain model, once per microbatch.
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
from roundpipe.module_copy import translated
from roundpipe.runtime.transfer import duplicate
from roundpipe.runtime.values import Bundle
from roundpipe.store import BufferRecord, LayerRecord, ParameterRecord

Hook = Callable[[torch.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class ParameterHooks:
    """The hooks of one parameter, each kind in the order of registration."""

    record: ParameterRecord
    position: int  # among the parameters of its layer
    on_gradient: tuple[Hook, ...]  # register_hook
    after_accumulation: tuple[Hook, ...]  # register_post_accumulate_grad_hook

    def attach(self, stand_in: nn.Parameter) -> list[RemovableHandle]:
        """Let autograd run the hooks on a device's stand-in, which gets the attributes of the user's parameter."""
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
    """The hooks of a layer's parameters that train."""
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
    """`contributors`: the layers of each parameter that several layers use."""
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


# Set elsewhere, or tied to the original's tensors.
_NOT_SYNCED = frozenset({"_parameters", "_buffers", "_modules", "training", "_compiled_call_impl"})
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class LayerSettings:
    """What a call fixes of a layer when it begins: later changes by the user must not reach its recomputation."""

    requires_grad: tuple[bool, ...]  # by parameter of the record
    training: tuple[bool, ...]  # by module

    @classmethod
    def of(cls, record: LayerRecord) -> LayerSettings:
        return cls(
            tuple(parameter.param.requires_grad for parameter in record.parameters),
            tuple(module.training for module in record.module.modules()),
        )

    @property
    def trains(self) -> bool:
        return any(self.requires_grad)


class Replica:
    def __init__(self, record: LayerRecord, device: torch.device) -> None:
        self.record = record
        self.parameters = [_stand_in(p.param, device) for p in record.parameters]
        self._nothing = [p.data for p in self.parameters]
        swaps: dict[int, Any] = {
            id(original.param): stand_in for original, stand_in in zip(record.parameters, self.parameters, strict=True)
        }
        self._pairs: list[_ModulePair] = []
        self.module = self._replicate(_uncompiled(record.module), swaps)
        for pair in self._pairs:
            pair.sync(swaps)
        self._swaps = swaps
        self._buffer_homes = {id(pair.original): pair.replica for pair in self._pairs}
        self._changes_input: dict[bool, bool] = {}
        self._draws_on_host: dict[bool, bool] = {}
        self._writes_buffers: dict[tuple[bool, ...], bool] = {}
        self._image_address = 0
        self._hook_handles: list[RemovableHandle] = []

    # What runs so far have shown of the layer, apart for training and evaluation; until then the worst is assumed.

    def has_run(self) -> bool:
        return self.module.training in self._changes_input

    def may_change_input(self) -> bool:
        return self._changes_input.get(self.module.training, True)

    def may_draw_on_host(self) -> bool:
        return self._draws_on_host.get(self.module.training, True)

    def may_write_buffers(self, training: tuple[bool, ...]) -> bool:
        """`training`: the modes of its modules, as in LayerSettings."""
        return bool(self.record.buffers) and self._writes_buffers.get(training, True)

    def note_buffers(self, training: tuple[bool, ...], *, were_written: bool) -> None:
        self._writes_buffers[training] = were_written or self._writes_buffers.get(training, False)

    def note_behaviour(self, *, changed_input: bool, drew_on_host: bool | None) -> None:
        if changed_input and not self.may_change_input():
            raise UsageError(
                f"layer {self.record.layer_id} changed its input in place, which it had not done before; a layer must "
                "either always or never do so. Use an out-of-place operation."
            )
        mode = self.module.training
        self._changes_input[mode] = changed_input or self._changes_input.get(mode, False)
        if drew_on_host is not None:
            self._draws_on_host[mode] = drew_on_host or self._draws_on_host.get(mode, False)

    def bind(self, image: torch.Tensor, settings: LayerSettings, hooks: Sequence[ParameterHooks] = ()) -> None:
        """Point the parameters into `image`, with the settings the call began with and the user's attributes of now."""
        views = self.record.image.views(image)
        self._image_address = image.untyped_storage().data_ptr()
        for stand_in, view, trains in zip(self.parameters, views, settings.requires_grad, strict=True):
            stand_in.data = view
            stand_in.grad = None
            stand_in.requires_grad_(trains)
        for of_parameter in hooks:
            self._hook_handles += of_parameter.attach(self.parameters[of_parameter.position])
        for pair in self._pairs:
            pair.sync(self._swaps)
        for module, training in zip(self.record.module.modules(), settings.training, strict=True):
            self._swaps[id(_uncompiled(module))].__dict__["training"] = training

    def unbind(self) -> None:
        for stand_in, nothing in zip(self.parameters, self._nothing, strict=True):
            stand_in.data = nothing
            stand_in.grad = None
        while self._hook_handles:
            self._hook_handles.pop().remove()
        for pair in self._pairs:
            pair.drop_changes()
        self.set_buffers([None] * len(self.record.buffers))

    def write_attributes_back(self) -> None:
        for pair in self._pairs:
            pair.write_back()

    def set_buffers(self, values: Sequence[torch.Tensor | None]) -> None:
        for record, value in zip(self.record.buffers, values, strict=True):
            self._home(record)._buffers[record.key] = value

    def get_buffers(self) -> list[torch.Tensor | None]:
        return [self._home(record)._buffers.get(record.key) for record in self.record.buffers]

    def apart(self, bundle: Bundle) -> Bundle:
        """The bundle, with copies of what lies in the layer's own weights or buffers: those outlive no stage."""
        own = {b.untyped_storage().data_ptr() for b in self.get_buffers() if b is not None} | {self._image_address}
        own.discard(0)
        return bundle.map(lambda t: duplicate(t) if _memory_of(t) in own else t)

    def _home(self, record: BufferRecord) -> nn.Module:
        return self._buffer_homes[id(record.owner)]

    def _replicate(self, module: nn.Module, swaps: dict[int, Any]) -> nn.Module:
        if id(module) in swaps:
            known: nn.Module = swaps[id(module)]
            return known
        copy = module.__class__.__new__(module.__class__)
        swaps[id(module)] = copy
        own = copy.__dict__
        own["_parameters"] = {k: _swap(p, swaps) for k, p in module._parameters.items()}
        own["_buffers"] = dict(module._buffers)
        own["_modules"] = {
            k: None if child is None else self._replicate(_uncompiled(child), swaps)
            for k, child in module._modules.items()
        }
        self._pairs.append(_ModulePair(module, copy))
        return copy


class _ModulePair:
    """A module of the user's and its replica; `_synced` is what both had when they last agreed."""

    def __init__(self, original: nn.Module, replica: nn.Module) -> None:
        self.original, self.replica = original, replica
        self._synced: dict[str, Any] = {}
        self._given: dict[str, Any] = {}

    def sync(self, swaps: dict[int, Any]) -> None:
        """User to replica: whatever the user has changed since the last time."""
        source = self.original.__dict__
        for key, value in source.items():
            if key in _NOT_SYNCED or self._synced.get(key, _MISSING) is value:
                continue
            self._synced[key] = value
            self._given[key] = translated(value, self.original, self.replica, swaps)
            self.replica.__dict__[key] = self._given[key]
        for key in [key for key in self._synced if key not in source]:
            del self._synced[key], self._given[key]
            self.replica.__dict__.pop(key, None)

    def write_back(self) -> None:
        """Replica to user: plain values a forward has set. See [Note: attributes]."""
        for key, value in self._changes().items():
            self._synced[key] = self._given[key] = value
            self.original.__dict__[key] = value

    def drop_changes(self) -> None:
        """Forget plain values that were set since the replica and the user's module last agreed."""
        for key in self._changes():
            if key in self._given:
                self.replica.__dict__[key] = self._given[key]
            else:
                del self.replica.__dict__[key]

    def _changes(self) -> dict[str, Any]:
        given = self._given
        return {
            key: value
            for key, value in self.replica.__dict__.items()
            if given.get(key, _MISSING) is not value and key not in _NOT_SYNCED and isinstance(value, _PLAIN)
        }


def _stand_in(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=param.dtype, device=device), requires_grad=param.requires_grad)


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Where a tensor's memory begins; None for kinds of tensor that have none of their own."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_plain else None


def _uncompiled(module: nn.Module) -> nn.Module:
    """A module wrapped by torch.compile runs eagerly: its compiled code is tied to the original's tensors."""
    inner = module._modules.get("_orig_mod")
    return inner if inner is not None and type(module).__name__ == "OptimizedModule" else module


def _swap(value: Any, swaps: dict[int, Any]) -> Any:
    return swaps.get(id(value), value)
