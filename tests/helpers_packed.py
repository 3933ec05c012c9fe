"""The plain model that a model with packed weights must equal: the same values, unpacked."""

from __future__ import annotations

import copy

import torch
from torch import nn

from roundpipe.packed import PackedWeight


def packed_places(model: nn.Module) -> dict[str, PackedWeight]:
    """How each packed weight is packed, by its name before packing."""
    return {
        f"{path}.{name}".removeprefix("."): described
        for path, module in model.named_modules()
        for name, described in getattr(module, "_roundpipe_packed", {}).items()
    }


def unpacked(before: nn.Module, packed: nn.Module) -> nn.Module:
    """A copy of the plain model `before`, with the values of `packed` in place of the weights that are packed."""
    plain = copy.deepcopy(before)
    places = packed_places(packed)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if name in places:
                path, _, key = name.rpartition(".")
                param.copy_(getattr(packed.get_submodule(path), key))
    return plain
