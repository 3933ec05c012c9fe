"""The user's names of parameters and modules, for messages.

The layers of a model that was split or converted have other names than the model the user handed in.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from roundpipe.models.stub import PATH


def user_names(model: nn.Module) -> dict[int, str]:
    """By id: the name of every parameter and the path of every module of the user's model."""
    names = {id(module): path for path, module in model.named_modules()}
    return names | {id(param): name for name, param in model.named_parameters()}


def path_of(module: nn.Module, names: Mapping[int, str], local_path: str) -> str:
    """Where the user finds a module; `local_path`, its path in its layer, where the user has no such module."""
    path: str = module.__dict__.get(PATH, local_path)  # of the module that a copy or a stub was made of
    return names.get(id(module), path)


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
