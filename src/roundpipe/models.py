"""The registry of presets: functions that convert models of one class into an nn.Sequential.

The nn.Sequential computes the same as the model and holds the model's parameters. Its first layer takes the model's
inputs, every other layer takes the output of the layer before it, and the last layer returns the model's outputs.
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
    """Register `convert` as the preset of `model_class`; replaces an earlier preset of this class.

    Without `convert`, returns a decorator that registers the decorated function.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ArgumentTypeError(f"a preset must be registered for a subclass of nn.Module, got {model_class!r}.")
    if convert is None:
        return lambda decorated: register(model_class, decorated)
    if not callable(convert):
        raise ArgumentTypeError(
            f"a preset must be a function that takes a model and returns an nn.Sequential, got {convert!r}."
        )
    _presets[model_class] = convert
    return convert


def find_preset(model: nn.Module) -> Convert | None:
    """Return the preset registered for the model's class, or None.

    Presets of base classes are not used: a subclass may override the forward pass.
    """
    return _presets.get(type(model))
