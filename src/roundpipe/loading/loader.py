"""Fills a model without weights from a folder: each tensor is read, packed if it is to be packed, and released.

Host memory holds the model as it will train and the tensors of one parameter, never the model twice. Names, joined
experts and values of buffers are those of from_pretrained(). Knows nothing of wrapping.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.loading.quantised import open_folder
from roundpipe.loading.weight_file import WeightFile, WeightWriter, mapped_folder
from roundpipe.loading.weight_folder import Conversion, WeightFolder, conversions, require_fit
from roundpipe.packed import FORMS, PackedWeight, checked_form, form_asked_for, pack_frozen
from roundpipe.packed.choice import Place, pack_on_paper, places_to_pack, warn_of_unpacked
from roundpipe.packed.forms import BlockForm
from roundpipe.packed.module import install
from roundpipe.store.host_memory import forget_freed_memory, host_zeros_like, require_host_memory

logger = logging.getLogger("roundpipe")
_NEEDED = ("*.safetensors", "*.json", "*.py", "*.jinja")  # of a repository of the hub
_MEMORY_ADVICE = "Load it with frozen_weights, which packs it in 4 or 8 bits, or use a machine with more memory."
_OF_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # others are codes
_LOADED = "_is_hf_initialized"  # transformers initialises no tensor that has this attribute


def load(
    folder: str | Path,
    *,
    frozen_weights: str | None = None,
    weights_folder: str | Path | None = None,
    lora: Any = None,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
) -> Any:
    """Load a model of transformers from a folder, or from the hub, without ever holding it twice.

    frozen_weights: None, or the form in which all linear weights and experts are packed: "nf4", "int8" or "fp8". The
        whole model is frozen then, and adapters train.
    weights_folder: with frozen_weights, a folder on a fast disk. The packed model is written there once and mapped, so
        that it takes no memory; later loads map what is there. Wrap the model with pin_model="off".
    lora: None, the rank of a LoRA adapter for all linear layers, or a config of PEFT.
    dtype: of the weights; default that of the folder. Weights that come quantised stay as they are, and this is the
        dtype to which layers expand them. Then, too, the whole model is frozen.
    quantization_config: a BitsAndBytesConfig, as for from_pretrained(): frozen_weights="nf4" for load_in_4bit, "int8"
        for load_in_8bit.

    Returns the plain model, or a PeftModel, for `wrap_model_to_roundpipe` or a trainer.
    """
    from transformers import AutoConfig

    form = checked_form(_asked_for(frozen_weights, quantization_config))
    if weights_folder is not None and form is None:
        raise ConfigError(
            f"weights_folder={str(weights_folder)!r} is for packed weights: give frozen_weights, too, one of "
            f"{', '.join(map(repr, FORMS))}."
        )
    adapter = _adapter_config(lora)
    path = local_folder(folder)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        raise ConfigError(f"cannot load the config of {path}: {' '.join(str(error).split())}") from error
    options: dict[str, Any] = {"dtype": _dtype_given(dtype) or config.dtype or _stored_dtype(path)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model = empty_model(config, path, trust_remote_code=trust_remote_code, **options)
    fill(model, path, form, weights_folder)
    if adapter is None:
        return model
    from peft import get_peft_model

    if isinstance(lora, int):
        adapter.task_type = _task_of(model)
    return get_peft_model(model, adapter)


def _dtype_given(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype by its name, too; None for "auto", the dtype of the folder."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in _OF_WEIGHTS:
        known = ", ".join(str(each).removeprefix("torch.") for each in _OF_WEIGHTS)
        raise ConfigError(f'dtype must be "auto" or one of {known}, got {dtype!r}.')
    return found


def _stored_dtype(path: Path) -> torch.dtype:
    """The dtype of the first weight in a folder whose config does not say it."""
    dtypes = (stored.dtype for stored in WeightFolder(path).shapes.values())
    return next((dtype for dtype in dtypes if dtype in _OF_WEIGHTS), torch.float32)


def _asked_for(frozen_weights: str | None, quantization_config: Any) -> str | None:
    if quantization_config is None:
        return frozen_weights
    form = form_asked_for(quantization_config)
    if form is None:
        raise ConfigError(
            f"quantization_config is a {type(quantization_config).__name__}; load() knows BitsAndBytesConfig with "
            "load_in_4bit or load_in_8bit. Leave it out: weights that come quantised are taken as they are, and "
            f"frozen_weights, one of {', '.join(map(repr, FORMS))}, packs plain ones."
        )
    if frozen_weights not in (None, form):
        raise ConfigError(f"frozen_weights is {frozen_weights!r}, but quantization_config asks for {form!r}; give one.")
    return form


def _adapter_config(lora: Any) -> Any:
    """The config of PEFT for an adapter; None for None."""
    if lora is None:
        return None
    from peft import LoraConfig, PeftConfig

    if isinstance(lora, PeftConfig):
        return lora
    if not isinstance(lora, int) or isinstance(lora, bool):
        raise ArgumentTypeError(
            f"lora must be the rank of an adapter or a config of PEFT such as LoraConfig(...), got "
            f"{type(lora).__name__}."
        )
    if lora < 1:
        raise ConfigError(f"lora must be at least 1, the rank of the adapter, got {lora}.")
    return LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear")


def _task_of(model: Any) -> str | None:
    """PEFT's name for the kind of a model, by which it chooses the class of the adapted model."""
    if not model.can_generate():
        return None
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def local_folder(folder: str | Path) -> Path:
    """The folder of a model; a model of the hub is downloaded."""
    path = Path(folder)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"{path} is not the folder of a model: it has no config.json.")
        return path
    if path.is_absolute() or str(folder).startswith(".") or str(folder).count("/") != 1:
        raise ConfigError(f"there is no folder {folder}.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder), allow_patterns=list(_NEEDED)))
    except Exception as error:  # of the hub, the network and the cache
        raise ConfigError(
            f"there is no folder {folder}, and the hub does not give it: {' '.join(str(error).split())}"
        ) from error


def empty_model(config: Any, path: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The model of a config on the meta device. Its class is the one that the config names."""
    import transformers

    kind = getattr(transformers, (config.architectures or ["of no class"])[0], None)
    try:
        with torch.device("meta"):
            if kind is not None:
                return kind._from_config(config, **options)
            auto = transformers.AutoModelForCausalLM
            return auto.from_config(config, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # of the model's code, for a configuration that does not fit together
        raise ConfigError(f"cannot build the model of {path}: {' '.join(str(error).split())}") from error


def fill(model: Any, path: Path, form: BlockForm | None, weights_folder: str | Path | None = None) -> None:
    """Give a model of transformers on the meta device the weights of a folder.

    Weights that come quantised stay as they are. If there are any, or with a form, all of the model is frozen.
    weights_folder: with a form, the weights lie in a mapped file there: see [Note: mapped weights].
    """
    _keep_float32(model)
    folder = open_folder(path, model.config, model.dtype)
    found = conversions(model, folder.shapes)
    require_fit(model, found, folder.shapes, path)
    _make_buffers(model, {name for each in found for name in each.parameters})
    params = dict(model.named_parameters(remove_duplicate=False))
    parts = pack_on_paper(model, _taken(model, folder, found))
    taken = {name: parts[id(param)] for name, param in params.items() if id(param) in parts}
    if form is not None or taken:
        model.requires_grad_(False)
    if form is None or weights_folder is None:
        _read_all(model, folder, found, form, taken)
    else:
        _fill_from_file(model, folder, found, form, taken, Path(weights_folder))
    if parts:
        vars(model.config).pop("quantization_config", None)  # the model needs no library of its format
        gigabytes = sum(part.nbytes for part in parts.values()) / 1e9
        logger.info("%s: %d weights come quantised and stay as they are, %.3f GB", path, len(parts), gigabytes)
    if form is not None or taken:
        warn_of_unpacked(model, str(path))
    if model.can_generate() and (path / "generation_config.json").exists():
        model.generation_config = type(model.generation_config).from_pretrained(path)
    model.eval()


Parts = dict[str, nn.Parameter]  # on the meta device: the packed bytes of weights that come quantised, by name


def _fill_from_file(
    model: Any, folder: WeightFolder, found: list[Conversion], form: BlockForm, taken: Parts, parent: Path
) -> None:
    """Map the packed weights, after writing them if they are not there."""
    key = {
        "files": folder.facts(),
        "quantised": str(getattr(model.config, "quantization_config", None)),
        "form": form.name,
        "class": type(model).__name__,
        "dtype": str(model.dtype),
    }
    mapped = mapped_folder(parent, f"{folder.path.resolve().name}-{form.name}", key)
    if not mapped.exists():
        most_bytes = folder.num_bytes + sum(tensor.nbytes for tensor in _tensors(model).values())
        with WeightWriter(mapped, key, most_bytes) as file:
            _read_all(model, folder, found, form, taken, file.keep)
            file.complete(_tensors(model).items())
        return
    stored = WeightFile(mapped, key)
    pack_frozen(model, form)  # on the meta device
    holders = _holders(model)
    for name, old in _tensors(model).items():
        if id(old) in holders:  # not if a tied parameter has been placed by another name
            _put(holders.pop(id(old)), old, stored.tensor(name, old))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, by all their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


Keep = Callable[[torch.Tensor], torch.Tensor]


def _in_memory(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _read_all(
    model: Any,
    folder: WeightFolder,
    found: list[Conversion],
    form: BlockForm | None,
    taken: Parts,
    keep: Keep = _in_memory,
) -> None:
    """Read, pack and place all tensors. `keep`: gives a weight in new memory the memory in which it stays."""
    places = {} if form is None else {id(_placeholder(same[0])): same for same in places_to_pack(model, form)}
    _require_memory(model, form, set(places), is_mapped=keep is not _in_memory)
    tensors = {**_tensors(model), **taken}
    holders = _holders(model)
    for each in _with_progress(found):
        for name, value in _read(folder, each, model):
            old = tensors[name]
            if form is not None and id(old) in places:
                _pack(places.pop(id(old)), form, value, name, keep)
            elif id(old) in holders:  # not if a tied parameter has been read by another name
                _put(holders.pop(id(old)), old, keep(value if name in taken else host_zeros_like(old).copy_(value)))
            del value
        folder.release(each.tensors)
        forget_freed_memory()


def _keep_float32(model: Any) -> None:
    """Give the tensors that the model's class keeps in float32 that dtype, as from_pretrained() does."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    holders = _holders(model)
    for name, tensor in _tensors(model).items():
        for pattern, dtype in plan.items():
            if id(tensor) in holders and re.search(pattern.replace("*", ".*"), name):
                _put(holders.pop(id(tensor)), tensor, torch.empty_like(tensor, dtype=dtype))


def quantised_parameters(model: Any, path: Path) -> dict[int, PackedWeight]:
    """How the parameters of a model on the meta device that come quantised in a folder are packed, by their ids."""
    folder = open_folder(path, model.config, model.dtype)
    return _taken(model, folder, conversions(model, folder.shapes))


def _taken(model: nn.Module, folder: WeightFolder, found: list[Conversion]) -> dict[int, PackedWeight]:
    params = dict(model.named_parameters(remove_duplicate=False))
    return {
        id(params[name]): weight.described
        for each in found
        for name, weight in folder.taken(each, model).items()
        if name in params
    }


def _placeholder(place: Place) -> nn.Parameter:
    param = place.module._parameters[place.name]
    assert param is not None
    return param


def _require_memory(model: nn.Module, form: BlockForm | None, packed: set[int], *, is_mapped: bool) -> None:
    """Raise HostMemoryError if the model, unless it is mapped, and its largest parameter do not fit."""
    params = {id(param): param for param in model.parameters()}
    weights = sum(
        PackedWeight.of(form, param).num_bytes if form is not None and key in packed else param.nbytes
        for key, param in params.items()
    )
    largest = max((param.nbytes for param in params.values()), default=0)
    weights = 0 if is_mapped else weights
    require_host_memory({"weights": weights, "the largest parameter": largest}, "loading this model", _MEMORY_ADVICE)


def _make_buffers(model: Any, loaded: set[str]) -> None:
    """Make the buffers that the folder does not have, by the model's own code for missing tensors."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for name, tensor in named.items():
        if isinstance(tensor, nn.Parameter) or name in loaded:
            setattr(tensor, _LOADED, True)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and not getattr(buffer, _LOADED, False):
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()


Holder = tuple[dict[str, Any], str]  # the dict of parameters or buffers of a module, and a name in it


def _holders(model: nn.Module) -> dict[int, list[Holder]]:
    """Where each tensor on the meta device is held, by its id."""
    holders: dict[int, list[Holder]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    holders.setdefault(id(tensor), []).append((held, name))
    return holders


def _put(holders: list[Holder], old: torch.Tensor, new: torch.Tensor) -> None:
    """Put a tensor in place of one on the meta device."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for held, name in holders:
        held[name] = new


def _pack(same: list[Place], form: BlockForm, value: torch.Tensor, name: str, keep: Keep) -> None:
    described = PackedWeight.of(form, _placeholder(same[0]))
    try:
        part = nn.Parameter(keep(form.pack(value, described.dtype)), requires_grad=False)
    except ConfigError as error:
        raise ConfigError(f"{name!r} cannot be packed as {form.name}: {error}.") from error
    for place in same:
        install(place.module, {place.name: (described, part)})


def _read(folder: WeightFolder, each: Conversion, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that tensors become, in the memory of the file or in their own; of packed ones their bytes."""
    made = folder.packed(each, model) or each.to_parameters([folder.read(name) for name in each.tensors], model)
    if each.rule is not None:  # parameters that are joined from several tensors have their own memory
        folder.release(each.tensors)
    while made:
        yield made.popitem()


def _with_progress(found: list[Conversion]) -> Iterator[Conversion]:
    from transformers.utils import logging as transformers_logging

    bar: Callable[..., Any] = transformers_logging.tqdm
    yield from bar(found, desc="Loading weights", unit="tensor")
