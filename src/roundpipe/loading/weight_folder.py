"""The tensors of a folder that `from_pretrained` reads, and the parameters of the model that they become.

Names and contents of both may differ: transformers renames tensors of older files, and joins the experts of a layer
into one parameter. `conversions` says what becomes what, by transformers' own rules. Knows nothing of adapters.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.checkpoint.format import DTYPE_OF
from roundpipe.errors import ConfigError
from roundpipe.packed.taken import Taken
from roundpipe.store.host_memory import forget_file_pages

INDEX_FILE = "model.safetensors.index.json"


class WeightFolder:
    """The safetensors of a model folder. Reads one tensor at a time; files are mapped into memory, not loaded.

    shards: the names of the tensors in each file, by the name of the file.
    shapes: shape and dtype of every tensor, as tensors on the meta device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self.shards: dict[str, list[str]] = {}
        self.shapes: dict[str, torch.Tensor] = {}
        for name in _weight_files(path):
            self._open(name)

    def _open(self, name: str) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._files[name] = safe_open(self.path / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self.path / name} is damaged: {error}; copy or download it again.") from error
        self.shards[name] = list(file.keys())
        for key in self.shards[name]:
            if key in self.shapes:
                raise ConfigError(f"{self.path} has the tensor {key} in two files; keep only the files of one model.")
            self._file_of[key] = name
            part = file.get_slice(key)
            dtype = DTYPE_OF.get(part.get_dtype())
            if dtype is None:
                raise ConfigError(f"{self.path / name} has {key} as {part.get_dtype()}, a dtype that is not supported.")
            self.shapes[key] = torch.empty(part.get_shape(), dtype=dtype, device="meta")

    @property
    def metadata(self) -> dict[str, str]:
        """What the headers of all files say besides names and shapes."""
        return {name: text for file in self._files.values() for name, text in (file.metadata() or {}).items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor with this name, over the mapped file: a copy is needed before it is written into."""
        return self._mapped(name)

    def _mapped(self, name: str) -> torch.Tensor:
        """A tensor of a file, over the mapped file."""
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def release(self, names: Sequence[str]) -> None:
        """Give the memory of tensors that were read back to the system."""
        for name in names:
            forget_file_pages(self._mapped(name))

    def taken(self, each: Conversion, model: Any) -> dict[str, Taken]:
        """The parameters that these tensors become and that come quantised, by name; none if the tensors are plain."""
        return {}

    def packed(self, each: Conversion, model: Any) -> dict[str, torch.Tensor]:
        """The packed bytes of the parameters that these tensors become and that come quantised, by name."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Size, time and checksum of the header of each file: they differ if the weights do."""
        found = {}
        for name in self.shards:
            status = (self.path / name).stat()
            with open(self.path / name, "rb") as file:
                header = file.read(int.from_bytes(file.read(8), "little"))
            found[name] = [status.st_size, status.st_mtime_ns, hashlib.sha256(header).hexdigest()]
        return found

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.shapes.values())


def _weight_files(path: Path) -> list[str]:
    """The names of the weight files of a folder: those of the index if there is one, else the one file."""
    index = path / INDEX_FILE
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged: {error!r}; copy or download it again.") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ConfigError(f"{path} is incomplete: {INDEX_FILE} names {missing[0]}, which does not exist.")
        return names
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise ConfigError(
        f"{path} has no model.safetensors and no {INDEX_FILE}. Weights in other formats become safetensors with "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
    )


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Tensors of a folder that become parameters of the model together.

    tensors, parameters: their names in the folder and in the model.
    rule: of transformers, with a pattern for each tensor; None if one tensor is one parameter as it is.
    """

    tensors: tuple[str, ...]
    parameters: tuple[str, ...]
    rule: Any = None
    patterns: tuple[str, ...] = ()

    def to_parameters(self, values: Sequence[torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """The parameters by name, from the values of all tensors."""
        if self.rule is None:
            return dict(zip(self.parameters, values, strict=True))
        return _converted(self.rule, self.parameters[0], self.tensors, self.patterns, values, model)

    def to_tensors(self, parameters: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """The tensors of the folder by name, from the values of all parameters."""
        if self.rule is None:
            return {self.tensors[0]: parameters[self.parameters[0]]}
        return tensors_of({name: parameters[name] for name in self.parameters}, model)


def tensors_of(parameters: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Parameters as save_pretrained() writes them: by the names, and in the form, that the model's files have."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(parameters)))


def _converted(
    rule: Any,
    first: str,
    names: Sequence[str],
    patterns: Sequence[str],
    values: Sequence[torch.Tensor],
    model: Any,
) -> dict[str, torch.Tensor]:
    rule = copy.deepcopy(rule)
    for name, pattern, value in zip(names, patterns, values, strict=True):
        rule.add_tensor(first, name, pattern, value)
    made = rule.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def conversions(model: Any, shapes: Mapping[str, torch.Tensor]) -> list[Conversion]:
    """What the tensors of a folder become in a model, by the rules of from_pretrained().

    Tensors for which the model has no parameter are left out, as from_pretrained() ignores them. The model
    then writes its parameters by the names of this folder, as after from_pretrained().
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, own = model.base_model_prefix, model.state_dict()
    found, joined = [], dict[str, list[tuple[str, str]]]()
    for tensor in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, own)
        if name not in own and tensor in own:
            name, pattern = tensor, None
        if name not in own:
            continue
        if pattern is None:
            found.append(Conversion((tensor,), (name,)))
        else:
            joined.setdefault(name, []).append((tensor, pattern))
    for first, parts in joined.items():
        names, patterns = tuple(tensor for tensor, _ in parts), tuple(pattern for _, pattern in parts)
        rule = by_pattern[patterns[0]]
        made = _converted(rule, first, names, patterns, [shapes[name] for name in names], model)
        found.append(Conversion(names, tuple(made), rule, patterns))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return found


def require_fit(model: nn.Module, found: Sequence[Conversion], shapes: Mapping[str, torch.Tensor], path: Path) -> None:
    """Refuse a folder that has tensors of other shapes than the model, or none for some of its parameters."""
    made: dict[str, torch.Tensor] = {}
    for each in found:
        made |= each.to_parameters([shapes[name] for name in each.tensors], model)
    present = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in made}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in present]
    if missing:
        raise ConfigError(
            f"{path} has no weights for {len(missing)} parameters of its config.json, such as {missing[0]}; copy or "
            "download the model again."
        )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in made and made[name].shape != parameter.shape:
            raise ConfigError(
                f"{path} has {name} with shape {tuple(made[name].shape)}, its config.json says "
                f"{tuple(parameter.shape)}; copy or download the model again."
            )
