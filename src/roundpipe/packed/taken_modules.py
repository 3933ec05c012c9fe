"""Modules in memory whose weights other libraries have quantised: they become linear modules with packed weights.

The module stays the same object, so adapters and hooks keep it; its class and its weight change. Codes and scales are
taken as they are. No library is imported: modules and tensors are known by the names of their classes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.module_names import joined
from roundpipe.packed.module import install
from roundpipe.packed.sources import SOURCES
from roundpipe.packed.taken import Taken, fp8_tiles, int8_tiles

_OF_TORCHAO = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")  # those of CUDA kernels have their own order
logger = logging.getLogger("roundpipe")
# Attributes of modules that hold what packing makes superfluous, or describe it.
_OF_LIBRARIES = (
    *("quant_state", "state", "compute_dtype", "compute_type_is_set", "quant_storage"),
    *("weight_scale_inv", "activation_scale", "extra_repr"),
)
_ADVICE = (
    "Load the model's folder with roundpipe.load(folder), which takes fp8, mxfp4 and bitsandbytes weights as they are, "
    'or load the model that it was made from, in bfloat16, and pass frozen_weights="nf4", "int8" or "fp8".'
)


class CastingLinear(nn.Linear):
    """A linear module that computes in `compute_dtype` and returns the dtype of its input, as bitsandbytes'.

    compute_dtype: None for the dtype of the input.
    """

    compute_dtype: torch.dtype | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias).to(input.dtype)


def take_quantised(model: nn.Module, name: str) -> None:
    """Pack the weights of a model that come quantised, in place. `name`: of the model, for the log.

    Raises ConfigError, before anything changes, for modules and tensors of known libraries that cannot be taken.
    """
    dtype = _dtype_of(model)
    found = [(path, module) for path, module in model.named_modules() if _library_of(module) is not None]
    for path, module in found:
        _refuse_other_kinds(path, module)
    num_bytes = 0
    for path, module in found:
        try:
            taken = _taken(module, dtype)
            packed = nn.Parameter(taken.packed(), requires_grad=False)
        except ConfigError as error:
            what = f"{joined(path, 'weight')!r}, which {_library_of(module)} has quantised,"
            raise ConfigError(f"{what} cannot be taken: {error}. {_ADVICE}") from error
        _become_linear(module)
        install(module, {"weight": (taken.described, packed)})
        num_bytes += packed.nbytes
    if found:
        logger.info("%s: %d weights come quantised and stay as they are, %.3f GB", name, len(found), num_bytes / 1e9)


def _library_of(module: nn.Module) -> str | None:
    """The library that has quantised the weights of this module; None if it is plain."""
    for cls in type(module).__mro__:
        package, _, rest = cls.__module__.partition(".")
        if package == "bitsandbytes":
            return "bitsandbytes"
        if package == "transformers" and rest in ("integrations.finegrained_fp8", "integrations.mxfp4"):
            return "transformers"
    weight = module._parameters.get("weight")
    if weight is not None and type(weight).__module__.partition(".")[0] == "torchao":
        return "torchao"
    return None


def _refuse_other_kinds(path: str, module: nn.Module) -> None:
    """Raise ConfigError for what cannot be taken: other modules than linear ones, and other tensors."""
    library, weight = _library_of(module), module._parameters.get("weight")
    if library == "torchao":
        given = vars(weight)
        others = [each for each in ("act_quant_kwargs", "activation_quantization", "act_pre_scale") if given.get(each)]
        is_known = type(weight).__name__ in _OF_TORCHAO and not others
    else:
        is_known = type(weight).__name__ in ("Params4bit", "Int8Params") or type(module).__name__ == "FP8Linear"
    if not is_known or not isinstance(module, nn.Linear):
        what = f"{type(module).__name__} of {library}, with a weight of the class {type(weight).__name__}"
        raise ConfigError(f"{path!r} is a {what}, which cannot be taken as it is. {_ADVICE}")
    if weight is not None and weight.device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"{joined(path, 'weight')!r} is on {weight.device}; RoundPipe keeps weights in host memory: load the model "
            'with device_map="cpu".'
        )


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of weights that say none themselves: that of the model's first plain floating parameter."""
    plain = (module for module in model.modules() if _library_of(module) is None)
    params = (param for module in plain for param in module._parameters.values() if param is not None)
    return next((param.dtype for param in params if param.is_floating_point()), torch.bfloat16)


def _taken(module: Any, dtype: torch.dtype) -> Taken:
    """The weight of a module. `dtype`: that it gets if it says none itself."""
    weight = module._parameters["weight"]
    library = _library_of(module)
    if library == "torchao":
        return _of_torchao(weight)
    if library == "transformers":
        kind, settings = "fp8", {"weight_block_size": module.block_size}
    else:
        kind, settings = "bitsandbytes", {}
        state = getattr(weight, "quant_state", None)
        dtype = getattr(module, "compute_dtype", None) or (dtype if state is None else state.dtype)
    tensors = module.state_dict()  # as the library writes them into files
    source = dict(SOURCES[kind](tensors, settings)).get("weight")
    if source is None or any(each not in tensors for each in source.names):
        raise ConfigError("it has no codes and scales yet; they are made when the module is moved to a device")
    return source.take([tensors[each] for each in source.names], dtype)


def _of_torchao(weight: Any) -> Taken:
    tile: tuple[int, int] = tuple(weight.block_size)
    if weight.qdata.dtype is torch.float8_e4m3fn:
        return fp8_tiles(weight.qdata, weight.scale, tile, weight.dtype)
    return int8_tiles(weight.qdata, weight.scale, weight.zero_point, tile, weight.dtype)


def _become_linear(module: Any) -> None:
    """Make a plain linear module of one of another library."""
    library, compute_dtype = _library_of(module), getattr(module, "compute_dtype", None)
    for name in _OF_LIBRARIES:
        for held in (module.__dict__, module._parameters):
            held.pop(name, None)
    if library == "bitsandbytes":
        module.__class__ = CastingLinear
        module.compute_dtype = compute_dtype
    elif library == "transformers":
        module.__class__ = nn.Linear
