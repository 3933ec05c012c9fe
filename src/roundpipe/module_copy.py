"""Shallow copies of module trees: the same code, hooks and settings over other parameters or submodules.

Used by runtime.replica for a layer on a device and by the splitter for its stub trees. Copies share every attribute
with their originals except the modules and parameters that were exchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# What nn.Module itself manages; a copy has its own.
CONTENT = ("_parameters", "_buffers", "_modules")


def copy_tree(
    root: nn.Module,
    stand_in: Callable[[nn.Module], nn.Module | None] = lambda module: None,
    parameter: Callable[[nn.Parameter], nn.Parameter | None] = lambda param: param,
    buffer: Callable[[torch.Tensor], torch.Tensor] = lambda buffer: buffer,
) -> tuple[nn.Module, list[tuple[nn.Module, nn.Module]]]:
    """A copy of the tree, and (original, copy) of every module copied.

    stand_in: what takes a module's place, with all below it; None to copy it.
    parameter: what takes a parameter's place; None to leave it out. buffer: what takes a buffer's.
    """
    exchanged: dict[int, Any] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []

    def copied(module: nn.Module) -> nn.Module:
        if id(module) not in exchanged:
            instead = stand_in(module)  # which may be false: an empty list of modules is
            exchanged[id(module)] = copy(module) if instead is None else instead
        found: nn.Module = exchanged[id(module)]
        return found

    def copy(module: nn.Module) -> nn.Module:
        new = module.__class__.__new__(module.__class__)
        exchanged[id(module)] = new
        new.__dict__["_parameters"] = _exchanged_parameters(module, parameter, exchanged)
        new.__dict__["_buffers"] = {
            name: None if held is None else exchanged.setdefault(id(held), buffer(held))
            for name, held in module._buffers.items()
        }
        children = module._modules.items()
        new.__dict__["_modules"] = {name: None if child is None else copied(child) for name, child in children}
        pairs.append((module, new))
        return new

    result = copied(root)
    for original, new in pairs:
        for name, value in original.__dict__.items():
            if name not in CONTENT:
                new.__dict__[name] = translated(value, original, new, exchanged)
    return result, pairs


def _exchanged_parameters(
    module: nn.Module, parameter: Callable[[nn.Parameter], nn.Parameter | None], exchanged: dict[int, Any]
) -> dict[str, nn.Parameter | None]:
    chosen: dict[str, nn.Parameter | None] = {}
    for name, param in module._parameters.items():
        if param is None:
            chosen[name] = None
            continue
        if id(param) not in exchanged:
            exchanged[id(param)] = parameter(param)
        if exchanged[id(param)] is not None:
            chosen[name] = exchanged[id(param)]
    return chosen


def translated(value: Any, original: nn.Module, copy: nn.Module, exchanged: Mapping[int, Any]) -> Any:
    """An attribute as the copy must see it: its own modules and parameters in place of the original's."""
    if isinstance(value, types.MethodType) and value.__self__ is original:
        return types.MethodType(value.__func__, copy)
    if isinstance(value, nn.Module | nn.Parameter):
        return exchanged.get(id(value), value)
    if type(value) in (list, tuple) and any(isinstance(item, nn.Module | nn.Parameter) for item in value):
        return type(value)(exchanged.get(id(item), item) for item in value)
    if type(value) is dict and any(isinstance(item, nn.Module | nn.Parameter) for item in value.values()):
        return {key: exchanged.get(id(item), item) for key, item in value.items()}
    return value
