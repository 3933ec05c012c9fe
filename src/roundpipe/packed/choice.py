"""Chooses the weights of a model that are packed, and packs them.

Packed are frozen weights of linear modules, and frozen parameters with three dimensions, which hold the matrices of
experts. Left as they are: everything that trains, embeddings, norms and biases, convolutions, output heads, weights
that such a module shares, and adapters.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.module_names import joined
from roundpipe.packed.forms import FORMS, BlockForm, PackedWeight
from roundpipe.packed.module import PackedModule, install, part_name

logger = logging.getLogger("roundpipe")
_HEAD = "lm_head"  # of transformers' causal language models
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Place:
    """A place of a weight in the model: `module.name`."""

    path: str
    module: nn.Module
    name: str


def checked_form(frozen_weights: object) -> BlockForm | None:
    """The form of this name; None for None."""
    if frozen_weights is None:
        return None
    if not isinstance(frozen_weights, str):
        raise ArgumentTypeError(
            f"frozen_weights must be one of {', '.join(map(repr, FORMS))}, or None, got "
            f"{type(frozen_weights).__name__}."
        )
    if frozen_weights not in FORMS:
        raise ConfigError(f"frozen_weights must be one of {', '.join(map(repr, FORMS))}, got {frozen_weights!r}.")
    return FORMS[frozen_weights]


def form_asked_for(quantization_config: object) -> str | None:
    """The form that a BitsAndBytesConfig of transformers asks for by its usual names; None for any other config.

    What it says about double quantisation and dtypes has no counterpart: scales have two bytes, and layers compute in
    the model's dtype.
    """
    given = quantization_config
    settings: Any = given if isinstance(given, Mapping) else vars(given) if hasattr(given, "__dict__") else {}
    # As attributes the two flags are properties over these names.
    in_4_bits, in_8_bits = (
        bool(settings.get(f"load_in_{bits}bit") or settings.get(f"_load_in_{bits}bit")) for bits in (4, 8)
    )
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if in_4_bits and kind != "nf4":
        raise ConfigError(
            f'the quantization_config has bnb_4bit_quant_type={kind!r}, which weights are not packed in; give "nf4", '
            f"or leave quantization_config out and give frozen_weights, one of {', '.join(map(repr, FORMS))}."
        )
    kept = [name for name in settings.get("llm_int8_skip_modules") or () if name != _HEAD]
    if kept and (in_4_bits or in_8_bits):
        raise ConfigError(
            f"the quantization_config has llm_int8_skip_modules={kept}, but frozen linear weights are packed in all "
            "modules; leave it out. Embeddings, norms and the output head are never packed."
        )
    return "nf4" if in_4_bits else "int8" if in_8_bits else None


def pack_frozen(model: nn.Module, form: BlockForm, name: str | None = None) -> None:
    """Pack the frozen weights of a model in place. `name`: of the model, for the log; None logs nothing.

    Weights that are packed already, in whatever form, stay as they are. Raises ConfigError if there is nothing to pack.
    """
    places = places_to_pack(model, form)
    if not places:
        return
    before = after = 0
    for same in places:
        param = getattr(same[0].module, same[0].name)
        described = PackedWeight.of(form, param)
        try:
            part = nn.Parameter(form.pack(param), requires_grad=False)
        except ConfigError as error:
            raise ConfigError(
                f"{same[0].path!r} cannot be packed as {form.name}: {error}. Load the model again without "
                "frozen_weights, or repair this weight."
            ) from error
        before, after = before + param.nbytes, after + part.nbytes
        for place in same:  # modules that share a weight share its bytes
            install(place.module, {place.name: (described, part)})
    if name is None:
        return
    logger.info(
        "%s: %d frozen weights are packed as %s, %.3f GB instead of %.3f GB",
        name,
        len(places),
        form.name,
        after / 1e9,
        before / 1e9,
    )
    warn_of_unpacked(model, name)


def pack_on_paper(model: nn.Module, described: Mapping[int, PackedWeight]) -> dict[int, nn.Parameter]:
    """Put packed bytes on the meta device in place of parameters, in all their places. `described`: by their ids.

    Returns the bytes by the ids of the parameters.
    """
    places, parts = places_of(model), dict[int, nn.Parameter]()
    for key, each in described.items():
        parts[key] = nn.Parameter(each.empty("meta"), requires_grad=False)
        for place in places[key]:
            install(place.module, {place.name: (each, parts[key])})
    return parts


def num_elements(model: nn.Module) -> int:
    """The number of elements of a model's parameters; of packed ones that of the weights they stand for."""
    params = {id(param): param.numel() for param in model.parameters()}
    for module in model.modules():
        if isinstance(module, PackedModule):
            for name, described in module._roundpipe_packed.items():
                params[id(module._parameters[part_name(name, described)])] = described.num_elements
    return sum(params.values())


def places_to_pack(model: nn.Module, form: BlockForm) -> list[list[Place]]:
    """The places of each weight to pack; none if the model is packed already. Raises ConfigError if there are none.

    A weight is packed only if it would be in all its places.
    """
    found: dict[int, list[Place]] = {}
    for place in _candidates(model, "", _modules_of_heads(model), set()):
        found.setdefault(id(place.module._parameters[place.name]), []).append(place)
    everywhere = places_of(model)
    places = [same for key, same in found.items() if len(everywhere[key]) == len(same)]
    if not places and not any(isinstance(module, PackedModule) for module in model.modules()):
        raise ConfigError(_nothing_to_pack(model, form))
    return places


def places_of(model: nn.Module) -> dict[int, list[Place]]:
    """All places of each parameter, by its id."""
    found: dict[int, list[Place]] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append(Place(joined(path, name), module, name))
    return found


def _candidates(module: nn.Module, path: str, heads: set[int], seen: set[int]) -> Iterator[Place]:
    if id(module) in heads or id(module) in seen:
        return
    seen.add(id(module))
    if hasattr(module, "adapter_layer_names"):  # of PEFT: its own modules are adapters, also those that rest now
        base = module._modules.get("base_layer")
        if base is None:
            return
        wrapped = getattr(module, "parameter_name", None)  # a parameter that the adapter replaces while it runs
        for place in _candidates(base, joined(path, "base_layer"), heads, seen):
            if place.module is base and place.name == wrapped:
                raise ConfigError(
                    f"{place.path!r} has an adapter of PEFT's target_parameters, which replaces the whole weight while "
                    "it runs, so the weight cannot be packed. Leave frozen_weights out, or adapt modules instead "
                    "(target_modules)."
                )
            yield place
        return
    for name, param in module._parameters.items():
        if param is not None and not param.requires_grad and param.dtype in _DTYPES and _is_matrix(module, name, param):
            yield Place(joined(path, name), module, name)
    for name, child in module._modules.items():
        if child is not None:
            yield from _candidates(child, joined(path, name), heads, seen)


def _is_matrix(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    """Whether a parameter is the matrix of a linear module or a stack of matrices, as of experts."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.modules.conv._ConvNd) or not param.numel():
        return False
    is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # of transformers: a linear module
    return (is_linear and name == "weight") or (param.dim() == 3 and param.shape[0] > 1)


def _modules_of_heads(model: nn.Module) -> set[int]:
    """The ids of output heads as transformers names them, and of the modules inside."""
    found: set[int] = set()
    for module in model.modules():
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            found.update(map(id, head.modules()))
    return found


_LARGE_BYTES = 16 << 20


def warn_of_unpacked(model: nn.Module, name: str) -> None:
    """Name large frozen weights that are not packed, of modules other than embeddings, heads and convolutions."""
    heads = _modules_of_heads(model)
    left = [
        joined(path, name)
        for path, module in model.named_modules()
        if id(module) not in heads and not isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        for name, param in module._parameters.items()
        if param is not None and not param.requires_grad and param.is_floating_point() and param.nbytes >= _LARGE_BYTES
    ]
    if left:
        logger.warning("%s: these frozen weights are not packed: %s", name, ", ".join(left))


def _nothing_to_pack(model: nn.Module, form: BlockForm) -> str:
    trains = sum(isinstance(module, nn.Linear) and module.weight.requires_grad for module in model.modules())
    return (
        f"frozen_weights={form.name!r} packs weights that do not train, but the model has no frozen linear weight"
        f"{f' ({trains} train)' if trains else ''}. Freeze the base before adding adapters "
        "(model.requires_grad_(False); peft.get_peft_model does it), or leave frozen_weights out."
    )
