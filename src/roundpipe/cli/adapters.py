"""LoRA adapters that peft has saved: their settings, and putting them with their weights into a model.

Every tensor of an adapter's file finds its place, and every place its tensor, or the adapter is refused by name.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError

ADAPTER_FILE = "adapter_config.json"
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER = "default"  # peft's name for the one adapter of a model
# Initial values of an adapter that do not change the weights of the model, too.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    """The settings of an adapter. Raises ConfigError if the folder has none."""
    if not adapter.is_dir():
        raise ConfigError(f"there is no folder {adapter}.")
    try:
        config = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{adapter} is not an adapter of peft: it has no {ADAPTER_FILE}.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{adapter / ADAPTER_FILE} is damaged: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{adapter / ADAPTER_FILE} is damaged: it must be a JSON object.")
    return config


def give_memory(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give parameters on the meta device a dtype, and one element of host memory for all of theirs.

    peft makes an adapter in the memory and dtype of the weights that it changes.
    """
    new: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in dtypes:
            dtype = dtypes[name]
            one = torch.zeros((), dtype=dtype)  # the memory of all elements
            new[id(parameter)] = nn.Parameter(one.expand(parameter.shape), requires_grad=dtype.is_floating_point)
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) in new:
                module._parameters[name] = new[id(value)]


def put_adapter(
    model: Any, adapter: Path, option: str, *, is_trainable: bool = False, is_empty: bool = False
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Put an adapter with its weights into a model. peft keeps weights of adapters in float32.

    is_empty: whether `give_memory` has made the model's weights. Then none is written.
    Returns the model of peft, and the weights of the model itself that the adapter's file has, too. Raises ConfigError
    for an adapter that does not fit; `option` is the name of the option that gives the model.
    """
    from peft import PeftConfig, get_peft_model
    from peft.utils.other import ModulesToSaveWrapper
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    advice = f"give the model that it was trained on: {option} DIR."
    places = dict(model.named_parameters(remove_duplicate=False))
    read_adapter_config(adapter)
    if not any((adapter / name).is_file() for name in _WEIGHT_FILES):
        raise ConfigError(f"{adapter} has no weights: there is no {_WEIGHT_FILES[0]}.")
    try:
        config: Any = PeftConfig.from_pretrained(str(adapter))
        weights = load_peft_weights(str(adapter), device="cpu")
    except Exception as error:  # peft, safetensors and pickle raise many kinds of errors for damaged files
        raise ConfigError(f"{adapter} cannot be loaded: {' '.join(str(error).split())}.") from error
    _require_kind(config, model, adapter)
    if config.init_lora_weights not in _PLAIN_STARTS:
        raise ConfigError(
            f"{adapter} was made with init_lora_weights={config.init_lora_weights!r}, which changed the weights of the "
            "model, too. Save it as a plain adapter: save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    config.inference_mode = not is_trainable
    given = {}
    try:
        with warnings.catch_warnings(action="ignore"):  # peft warns of tied embeddings, which this command handles
            wrapped = get_peft_model(model, config)
            found = outermost_modules(model)
            copies = [f"{path}." for path, module in found.items() if isinstance(module, ModulesToSaveWrapper)]
            for key in list(weights):
                name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
                if name in places and not name.startswith(tuple(copies)):
                    given[name] = weights.pop(key)
            report: Any = set_peft_model_state_dict(wrapped, weights)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"{adapter} does not fit to the model: {' '.join(str(error).split())}; {advice}") from error
    missing = [name for name in report.missing_keys if f".{ADAPTER}." in name]
    for fault, names in (("has tensors that the model has no place for", report.unexpected_keys), ("lacks", missing)):
        if names:
            raise ConfigError(f"{adapter} {fault}: {len(names)}, such as {names[0]}; {advice}")
    for name, value in given.items():
        if value.shape != places[name].shape:
            raise ConfigError(
                f"{adapter} has {name} with shape {tuple(value.shape)}, the model with {tuple(places[name].shape)}; "
                f"resize the model's embeddings first, save it, and give the result: {option} DIR."
            )
        if not is_empty:
            places[name].data.copy_(value)
    return wrapped, given


def _require_kind(config: Any, model: nn.Module, adapter: Path) -> None:
    """Refuse other adapters than LoRA, and that of a model with a head of classes for a model that computes tokens."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ConfigError(
            f"{adapter} is an adapter of kind {kind}; only LoRA adapters can be merged and trained further."
        )
    if config.task_type == "SEQ_CLS" and not type(model).__name__.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{adapter} is the adapter of a classifier or reward model, which has a head that models of text lack. "
            "--adapter trains it further with --method classify or reward; peft loads and merges it: "
            "AutoPeftModelForSequenceClassification.from_pretrained(..., num_labels=N).merge_and_unload()."
        )


def on_paper(model: Any, adapter: Path, dtype: torch.dtype, option: str) -> Any:
    """A model on the meta device with the parameters of an adapter. Raises ConfigError if they do not fit together."""
    from peft import PeftConfig, get_peft_model

    empty = copy.deepcopy(model)
    give_memory(empty, {name: dtype for name, _ in empty.named_parameters(remove_duplicate=False)})
    put_adapter(empty, adapter, option, is_empty=True)
    config = PeftConfig.from_pretrained(str(adapter))
    config.inference_mode = False
    return get_peft_model(model, config)


def adapter_digest(adapter: Path) -> str:
    """A checksum of the settings and the weights of an adapter."""
    digest = hashlib.sha256()
    for name in (ADAPTER_FILE, *_WEIGHT_FILES):
        if (adapter / name).is_file():
            digest.update((adapter / name).read_bytes())
    return digest.hexdigest()


def outermost_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that an adapter has put into a model, by their paths, without those inside of others."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        is_inside = path.startswith(tuple(f"{outer}." for outer in found))
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not is_inside:
            found[path] = module
    return found
