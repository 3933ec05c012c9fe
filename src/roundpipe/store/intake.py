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

# What a subclass of nn.Parameter may define and still be an ordinary parameter on a device.
_HARMLESS_NAMES = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate_func__"),
        *("__new__", "__init__", "__repr__", "__reduce__", "__reduce_ex__", "__deepcopy__", "__slots__"),
        *("__firstlineno__", "__static_attributes__", "__orig_bases__", "__parameters__"),
    }
)
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)


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


def refuse_special_tensors(model: nn.Module) -> None:
    """Refuse weights that lose their meaning when their bytes are copied: quantised ones, and tensor subclasses."""
    for name, param in model.named_parameters():
        _check_kind(f"parameter {name!r}", param)
    for name, buffer in model.named_buffers():
        _check_kind(f"buffer {name!r}", buffer)


def _check_kind(what: str, tensor: torch.Tensor) -> None:
    """A device gets the bytes of a tensor in a plain tensor, so the tensor must be a plain one here, too."""
    if is_lazy(tensor):
        return
    if tensor.is_quantized:
        raise ConfigError(
            f"{what} is a quantised tensor ({tensor.dtype}); its scales do not travel to devices. Wrap the model "
            "before quantising it, or replace the weight by its dequantize()."
        )
    lost = _lost_on_a_device(tensor)
    if lost:
        kind = type(tensor)
        raise ConfigError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass that adds {lost}; a plain copy on a "
            "device does not have that, and layers would compute with the wrong numbers or fail. Load the model in "
            "a plain dtype such as torch.bfloat16 (without quantization_config), call model.dequantize() if it "
            "has that, or convert the weight to an ordinary nn.Parameter, before wrapping it."
        )


def _lost_on_a_device(tensor: torch.Tensor) -> str:
    """Attributes and methods that a tensor subclass has and a plain tensor lacks; empty if there are none."""
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        return ""
    own = [cls for cls in kind.__mro__ if issubclass(cls, torch.Tensor) and cls not in _PLAIN_TYPES]
    members = {name: value for cls in own for name, value in vars(cls).items() if name not in _HARMLESS_NAMES}
    names = [name for name, value in members.items() if value is not torch._C._disabled_torch_function_impl]
    attributes = [name for name in vars(tensor) if not name.startswith(("_is_", "_roundpipe_"))]
    return ", ".join([*sorted(attributes), *sorted(names)][:5])


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ConfigError(f"{what} is not initialised; run the model once on a small batch before wrapping it.")
    _check_kind(what, tensor)
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
