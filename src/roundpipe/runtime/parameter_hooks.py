"""Gradient hooks that the user has registered on parameters, carried over to the devices' stand-ins.

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
from roundpipe.store import LayerRecord, ParameterRecord

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
