"""Which preset belongs to which class of models.

A preset takes a model and returns an equivalent nn.Sequential made of the model's own parameters: the first layer
receives what the model receives, every other the output of the one before, and the last returns what the model returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import nn

from roundpipe.errors import ArgumentTypeError

Convert = Callable[[Any], nn.Sequential]
_ConvertT = TypeVar("_ConvertT", bound=Convert)

_presets: dict[type[nn.Module], Convert] = {}


@overload
def register(model_class: type[nn.Module], convert: _ConvertT) -> _ConvertT: ...
@overload
def register(model_class: type[nn.Module], convert: None = None) -> Callable[[_ConvertT], _ConvertT]: ...
def register(model_class: type[nn.Module], convert: Convert | None = None) -> Any:
    """Let `convert` be the preset of `model_class`; without it, a decorator. A later one replaces an earlier one."""
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ArgumentTypeError(f"a preset belongs to a class of nn.Modules, got {model_class!r}.")
    if convert is None:
        return lambda decorated: register(model_class, decorated)
    if not callable(convert):
        raise ArgumentTypeError(f"a preset is a function from a model to an nn.Sequential, got {convert!r}.")
    _presets[model_class] = convert
    return convert


def find_preset(model: nn.Module) -> Convert | None:
    """The preset of the model's very class: a subclass may compute something else."""
    return _presets.get(type(model))
