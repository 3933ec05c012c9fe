"""Folders whose weights come quantised. The config of such a folder names the format; `packed/sources` knows which of
the tensors are one weight, and what they mean. No library of any format is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.loading.weight_folder import Conversion, WeightFolder
from roundpipe.packed import FORMS
from roundpipe.packed.sources import METADATA, OWN, SOURCES, Settings, is_own
from roundpipe.packed.taken import Taken, joined

_IGNORED = (".activation_scale", ".input_scale")  # activations are not quantised in training
_CODE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def open_folder(path: Path, config: Any, dtype: torch.dtype | None = None) -> WeightFolder:
    """The tensors of a folder. `dtype`: of weights that come quantised when they are expanded, default the config's.

    Raises ConfigError for a format that is not known.
    """
    kind = quantised_as(config, path)
    if kind is None:
        return WeightFolder(path)
    return QuantisedFolder(path, kind, _settings(config), dtype or config.dtype or torch.bfloat16)


def quantised_as(config: Any, path: Path | str) -> str | None:
    """The name of the format in which the weights of a model come; None if they are plain.

    Raises ConfigError for a format that is not known.
    """
    settings = _settings(config)
    if not settings:
        return None
    kind = OWN if is_own(settings) else settings.get("quant_method")
    if kind is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        kind = "bitsandbytes"  # of files of early versions
    kind = str(getattr(kind, "value", kind))
    if kind not in SOURCES:
        raise ConfigError(
            f"{path} has weights that are quantised as {kind}, which is not known; known are "
            f"{', '.join(SOURCES)}. {ADVICE}"
        )
    return kind


def _settings(config: Any) -> Settings:
    found = getattr(config, "quantization_config", None) or {}
    settings: Settings = found if isinstance(found, Mapping) else found.to_dict()
    return settings


ADVICE = (
    "Give the model that it was made from, with frozen_weights, one of "
    f"{', '.join(map(repr, FORMS))}, which packs it in few bits."
)


class QuantisedFolder(WeightFolder):
    """A folder with quantised weights. It shows each of them as one tensor with the shape that it stands for."""

    def __init__(self, path: Path, kind: str, settings: Settings, dtype: torch.dtype) -> None:
        """kind: the name of the format. dtype: of the weights when they are expanded."""
        super().__init__(path)
        self.kind, self._dtype = kind, dtype
        try:
            self._sources = dict(SOURCES[kind](self.shapes, {**settings, METADATA: self.metadata}))
        except ConfigError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{path}: what config.json or the headers say of weights quantised as {kind} is damaged ({error!r}). "
                "Copy or download the folder again."
            ) from error
        if not self._sources:
            raise ConfigError(
                f"{path}: config.json says that weights are quantised as {kind}, but there are no scales of this "
                "format. If the weights are plain, remove quantization_config from config.json."
            )
        for name, source in self._sources.items():
            missing = [each for each in source.names if each not in self.shapes]
            if missing:
                raise ConfigError(f"{path} is incomplete: {name} is quantised as {kind}, but there is no {missing[0]}.")
        hidden = {each for source in self._sources.values() for each in source.names}
        hidden |= {name for name in self.shapes if name.endswith(_IGNORED)}
        left = [name for name, shape in self.shapes.items() if name not in hidden and shape.dtype in _CODE_DTYPES]
        if left:
            raise ConfigError(
                f"{path}: {left[0]} has codes ({self.shapes[left[0]].dtype}) without the scales of {kind}; the folder "
                f"is damaged, or of another format. {ADVICE}"
            )
        for file, names in self.shards.items():
            self.shards[file] = [name for name in names if name not in hidden]
        for name, source in self._sources.items():
            self.shards[self._file_of[source.names[0]]].append(name)
        self.shapes = {name: shape for name, shape in self.shapes.items() if name not in hidden}
        for name in self._sources:
            described = self._taken(name).described
            self.shapes[name] = torch.empty(described.shape, dtype=described.dtype, device="meta")

    def _taken(self, name: str) -> Taken:
        """A quantised weight. Its bytes are read when it is packed."""
        source = self._sources[name]
        try:
            return source.take([self._mapped(each) for each in source.names], self._dtype)
        except ConfigError as error:
            raise self._refusal(name, error) from error

    def read(self, name: str) -> torch.Tensor:
        """The tensor with this name; a quantised weight is expanded."""
        return self._value(name, self._taken(name).expanded) if name in self._sources else super().read(name)

    def _value(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return make()
        except ConfigError as error:
            raise self._refusal(name, error) from error

    def release(self, names: Sequence[str]) -> None:
        sources = self._sources
        super().release([each for name in names for each in (sources[name].names if name in sources else [name])])

    def taken(self, each: Conversion, model: Any) -> dict[str, Taken]:
        quantised = [name for name in each.tensors if name in self._sources]
        if not quantised:
            return {}
        if len(quantised) < len(each.tensors) or len(each.parameters) > 1:
            raise ConfigError(
                f"{self.path}: {each.parameters[0]} is made of {len(each.tensors)} tensors, of which {len(quantised)} "
                f"are quantised as {self.kind}, such as {quantised[0]}. A parameter must be quantised as a whole. "
                f"{ADVICE}"
            )
        (name,) = each.parameters
        if each.rule is None:
            return {name: self._taken(quantised[0])}
        shape = each.to_parameters([self.shapes[tensor] for tensor in each.tensors], model)[name].shape
        try:
            return {name: joined([self._taken(each.tensors[at]) for at in self._order(each, model)], tuple(shape))}
        except ConfigError as error:
            raise self._refusal(name, error) from error

    def packed(self, each: Conversion, model: Any) -> dict[str, torch.Tensor]:
        return {name: self._value(name, taken.packed) for name, taken in self.taken(each, model).items()}

    def _order(self, each: Conversion, model: Any) -> list[int]:
        """The order in which a rule of transformers joins matrices. Two numbered rows stand for each of them."""
        rows = [torch.tensor([[2.0 * number], [2.0 * number + 1]]) for number in range(len(each.tensors))]
        (found,) = each.to_parameters(rows, model).values()
        numbers = found.flatten().int().tolist()
        if found.shape[-1] != 1 or any(odd != even + 1 for even, odd in zip(numbers[::2], numbers[1::2], strict=True)):
            raise ConfigError("it does not consist of whole matrices one after the other")
        return [even // 2 for even in numbers[::2]]

    def _refusal(self, name: str, error: ConfigError) -> ConfigError:
        return ConfigError(
            f"{self.path}: {name}, which is quantised as {self.kind}, cannot be taken: {error}. Copy or download the "
            f"folder again. {ADVICE}"
        )
