"""Looks at a model before anything of it is taken, and refuses what could not be kept or trained.

Called once by LayerStore, before adoption moves the first weight. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from roundpipe.errors import ConfigError
from roundpipe.store.names import joined, path_of


def refuse_unusable(layers: Sequence[nn.Module], names: Mapping[int, str]) -> None:
    """`names`: what the user calls each parameter and module, by id."""
    for layer_id, layer in enumerate(layers):
        for local_path, module in layer.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                where = f"submodule {path_of(module, names, local_path)!r} of layer" if local_path else "layer"
                raise ConfigError(
                    f"{where} {layer_id} is a {type(module).__name__}, whose code is tied to its own tensors; wrap the "
                    "plain module it was made from."
                )
        for local_name, param in layer.named_parameters():
            _check_tensor(f"parameter {names.get(id(param), local_name)!r} of layer {layer_id}", param)
        for local_path, module in layer.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full_name = joined(path_of(module, names, local_path), name)
                _check_tensor(f"buffer {full_name!r} of layer {layer_id}", buffer)
    _refuse_shared_memory({id(p): p for layer in layers for p in layer.parameters()}.values(), names)


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ConfigError(f"{what} is not initialised; run the model once on a small batch before wrapping it.")
    if tensor.device.type == "meta":
        raise ConfigError(
            f"{what} is on meta and holds no values; load the model on the CPU, or call model.to_empty(device='cpu') "
            "and fill it, before wrapping it."
        )
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"{what} is on {tensor.device}; RoundPipe keeps weights in host memory: build or load the model on the CPU."
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{what} is {tensor.layout}; only dense tensors can travel: make it one with to_dense().")


def _refuse_shared_memory(params: Iterable[nn.Parameter], names: Mapping[int, str]) -> None:
    """Two parameters over one memory would be trained apart; one parameter in two places is trained once."""
    by_address: dict[int, nn.Parameter] = {}
    for param in params:
        first = by_address.setdefault(param.data_ptr(), param) if param.numel() else param
        if first is not param and (first.requires_grad or param.requires_grad):
            raise ConfigError(
                f"parameters {names.get(id(first))!r} and {names.get(id(param))!r} are two over the same memory; make "
                "them one before wrapping: assign the same nn.Parameter in both places, or clone() the second."
            )
