"""Modules in memory whose weights other libraries have quantised: they become plain modules with packed weights.

The module stays the same object, so adapters and hooks keep it; its class and its weights change. Codes and scales are
taken as they are. No library is imported: modules and tensors are known by the names of their classes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.module_names import joined
from roundpipe.packed.module import install
from roundpipe.packed.sources import INPUTS_OF_TORCHAO, SOURCES, TENSORS_OF_TORCHAO, of_torchao
from roundpipe.packed.taken import Taken

Result = TypeVar("Result")
_EXPERTS = "FP8Experts"  # of transformers, in place of the experts of any model
logger = logging.getLogger("roundpipe")
# Attributes of modules that hold what packing makes superfluous, or describe it.
_OF_LIBRARIES = (
    *("quant_state", "state", "compute_dtype", "compute_type_is_set", "quant_storage"),
    *("weight_scale_inv", "activation_scale", "extra_repr"),
)
# Attributes of models of transformers.
_OF_QUANTISERS = (
    *("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"),
    *("is_4bit_serializable", "is_8bit_serializable"),
)
_ADVICE = (
    "Load the model's folder with roundpipe.load(folder), which takes weights of fp8, mxfp4, bitsandbytes and torchao "
    'as they are, or load the model that it was made from, in bfloat16, and pass frozen_weights="nf4", "int8" or "fp8".'
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
    found = [(path, module) for path, module in model.named_modules() if _library_of(module) is not None]
    adapted = _with_adapted_parameters(model)
    for path, module in found:
        _refuse_other_kinds(path, module, adapted)
    plain = _plain_experts(model, found)
    dtype = _dtype_of(model)
    weights = [(path, module, _checked(path, module, partial(_taken, module, plain, dtype))) for path, module in found]
    num_weights = num_bytes = 0
    for path, module, taken in weights:
        parts = {
            place: (each.described, nn.Parameter(_checked(path, module, each.packed), requires_grad=False))
            for place, each in taken.items()
        }
        if id(module) in plain:
            _become_experts(module, plain[id(module)])
        else:
            _become_linear(module)
        install(module, parts)
        num_weights, num_bytes = num_weights + len(parts), num_bytes + sum(part.nbytes for _, part in parts.values())
    if found:
        _forget_quantisers(model)
        logger.info("%s: %d weights come quantised and stay as they are, %.3f GB", name, num_weights, num_bytes / 1e9)


def _forget_quantisers(model: nn.Module) -> None:
    """Let models of transformers be plain ones, whose weights need no library, for saving, casting and trainers."""
    for owner in model.modules():
        if hasattr(type(owner), "_from_config"):
            vars(owner.config).pop("quantization_config", None)
            for name in _OF_QUANTISERS:
                vars(owner).pop(name, None)


def _checked(path: str, module: nn.Module, make: Callable[[], Result]) -> Result:
    """What `make` returns; its ConfigError gets the name of the module."""
    try:
        return make()
    except ConfigError as error:
        what = f"{path!r}, which {_library_of(module)} has quantised,"
        raise ConfigError(f"{what} cannot be taken: {error}. {_ADVICE}") from error


def _library_of(module: nn.Module) -> str | None:
    """The library that has quantised the weights of this module; None if it is plain."""
    for cls in type(module).__mro__:
        package, _, rest = cls.__module__.partition(".")
        if package == "bitsandbytes":
            return "bitsandbytes"
        if package == "transformers" and rest in ("integrations.finegrained_fp8", "integrations.mxfp4"):
            return "transformers"
    if any(type(param).__module__.partition(".")[0] == "torchao" for param in module._parameters.values()):
        return "torchao"
    return None


def _holds_experts(module: nn.Module) -> bool:
    return _library_of(module) == "transformers" and type(module).__name__ == _EXPERTS


def _with_adapted_parameters(model: nn.Module) -> set[int]:
    """The ids of modules of which an adapter of PEFT's target_parameters replaces a parameter while it runs."""
    modules: Iterator[Any] = model.modules()
    return {
        id(module.get_base_layer())
        for module in modules
        if hasattr(module, "adapter_layer_names") and getattr(module, "parameter_name", None) is not None
    }


def _refuse_other_kinds(path: str, module: nn.Module, adapted: set[int]) -> None:
    """Raise ConfigError for what cannot be taken: other modules than linear ones and experts, and other tensors.

    adapted: the ids of modules with an adapter of single parameters.
    """
    library, weight = _library_of(module), module._parameters.get("weight")
    if library == "torchao":
        given = {} if weight is None else vars(weight)
        is_known = type(weight).__name__ in TENSORS_OF_TORCHAO and not any(map(given.get, INPUTS_OF_TORCHAO))
    else:
        is_known = type(weight).__name__ in ("Params4bit", "Int8Params") or type(module).__name__ == "FP8Linear"
    if not _holds_experts(module) and not (is_known and isinstance(module, nn.Linear)):
        of_weight = "" if weight is None else f", with a weight of the class {type(weight).__name__}"
        what = f"{type(module).__name__} of {library}{of_weight}"
        raise ConfigError(f"{path!r} is a {what}, which cannot be taken as it is. {_ADVICE}")
    if id(module) in adapted:
        raise ConfigError(
            f"{path!r} is quantised and has an adapter of PEFT's target_parameters, which replaces a whole weight "
            "while it runs. Adapt modules instead (target_modules), or load the model that it was made from, in "
            "bfloat16."
        )
    for name, param in module._parameters.items():
        if param is not None and param.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"{joined(path, name)!r} is on {param.device}; RoundPipe keeps weights in host memory: load the model "
                'with device_map="cpu".'
            )


def _plain_experts(model: nn.Module, found: Sequence[tuple[str, nn.Module]]) -> dict[int, nn.Module]:
    """What quantised experts are in the plain model, on the meta device, by the ids of the quantised ones."""
    plain: dict[int, nn.Module] = {}
    twins: dict[str, nn.Module] = {}
    owners = [(path, each) for path, each in model.named_modules() if hasattr(type(each), "_from_config")]
    for path, module in found:
        if not _holds_experts(module):
            continue
        above = [each for each in owners if not each[0] or path.startswith(f"{each[0]}.")]
        if not above:
            raise ConfigError(f"{path!r} is a {_EXPERTS} outside of a model of transformers, so its code is not known.")
        at, owner = above[0]
        if at not in twins:
            twins[at] = _twin(owner)
        twin = twins[at].get_submodule(path[len(at) :].removeprefix("."))
        settings = [getattr(twin, each, None) for each in ("is_transposed", "is_concatenated", "has_bias")]
        if settings != [False, True, False]:  # those that FP8Experts computes with
            raise ConfigError(
                f"{path!r} is a {_EXPERTS} in place of a {type(twin).__name__}, which keeps its weights in another "
                f"order, so it cannot be taken. {_ADVICE}"
            )
        plain[id(module)] = twin
    return plain


def _twin(owner: Any) -> nn.Module:
    """The plain model of a quantised one, on the meta device."""
    config = copy.deepcopy(owner.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        made: nn.Module = owner._from_config(config)
    return made


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of weights that say none themselves: that of the model's first plain floating parameter."""
    plain = (module for module in model.modules() if _library_of(module) is None)
    params = (param for module in plain for param in module._parameters.values() if param is not None)
    return next((param.dtype for param in params if param.is_floating_point()), torch.bfloat16)


def _taken(module: Any, plain: Mapping[int, nn.Module], dtype: torch.dtype) -> dict[str, Taken]:
    """The weights of a module by name. `plain`: what experts become. `dtype`: of weights that say none themselves."""
    library = _library_of(module)
    if library == "torchao":
        weight = module._parameters["weight"]
        parts = [weight.qdata, weight.scale, getattr(weight, "zero_point", None)]
        values = [part for part in parts if part is not None]
        return {"weight": of_torchao(tuple(weight.block_size), values, weight.dtype)}
    kind, settings = "bitsandbytes", {}
    if library == "transformers":
        kind, settings = "fp8", {"weight_block_size": module.block_size}
    else:
        state = getattr(module._parameters["weight"], "quant_state", None)
        dtype = getattr(module, "compute_dtype", None) or (dtype if state is None else state.dtype)
    tensors = module.state_dict()  # as the library writes them into files
    sources = dict(SOURCES[kind](tensors, settings))
    twin = plain.get(id(module))
    shapes = {"weight": None} if twin is None else {name: tuple(each.shape) for name, each in twin.named_parameters()}
    if sources.keys() != shapes.keys() or any(each not in tensors for src in sources.values() for each in src.names):
        raise ConfigError("it has no codes and scales yet; they are made when the module is moved to a device")
    found = {name: source.take([tensors[each] for each in source.names], dtype) for name, source in sources.items()}
    for name, shape in shapes.items():
        if shape is not None and found[name].described.shape != shape:
            raise ConfigError(
                f"its {name} has the shape {found[name].described.shape}, its model's config says {shape}"
            )
    return found


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


def _become_experts(module: Any, plain: nn.Module) -> None:
    """Make the experts of the plain model of quantised ones. The config stays, so the way to compute them does."""
    for name in [*module._parameters]:
        if name not in plain._parameters:
            del module._parameters[name]
    settings = {name: value for name, value in vars(plain).items() if not name.startswith("_")}
    for name in [each for each in vars(module) if not each.startswith("_") and each not in settings]:
        del module.__dict__[name]
    module.__dict__.update(settings, training=module.training, config=module.config)
    module._modules.update((name, each) for name, each in plain._modules.items() if name not in module._modules)
    module.__class__ = type(plain)
