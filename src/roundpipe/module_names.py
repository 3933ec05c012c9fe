"""The names of parameters and modules in the user's model, for messages and checkpoints.

In a layer of a split or converted model the same objects have other names. Knows nn.Module: no layers and no devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

# Name of an attribute of stubs and of copied modules. Its value is the path of the module in the user's model.
PATH = "stub_path"


def user_names(model: nn.Module) -> dict[int, str]:
    """The name of every parameter and the path of every module in the user's model, by the id of the object."""
    names = {id(module): path for path, module in model.named_modules()}
    return names | {id(param): name for name, param in model.named_parameters()}


def path_of(module: nn.Module, names: Mapping[int, str], local_path: str) -> str:
    """The path of a module in the user's model.

    A copy or stub that splitting made has the path of the module it was made from. For other modules that are not part
    of the user's model this is `local_path`, the path of the module in its layer.
    """
    path: str = module.__dict__.get(PATH, local_path)
    return names.get(id(module), path)


def joined(path: str, key: str) -> str:
    """The path of member `key` of the module at `path`. An empty `path` is the model itself."""
    return f"{path}.{key}" if path else key
