"""What a layer is made of, and whether it still is what was wrapped.

Used by LayerStore before every call. Devices run copies made of the modules found at wrapping time, so a parameter or
submodule put in later would be left out in silence. Looks at identities only, never at values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from roundpipe.errors import ModelChangedError
from roundpipe.store.names import joined, path_of
from roundpipe.store.records import LayerRecord

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class _ModuleParts:
    path: str
    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    children: dict[str, nn.Module | None]
    buffer_names: frozenset[str]

    def are_the_same(self) -> bool:
        module = self.module
        return (
            _same(module._parameters, self.parameters)
            and _same(module._modules, self.children)
            and module._buffers.keys() == self.buffer_names
        )


class Composition:
    """The modules of one layer, and what each of them held when the model was wrapped."""

    def __init__(self, layer: LayerRecord, names: Mapping[int, str]) -> None:
        """`names`: what the user calls parameters and modules, by id."""
        self._layer_id = layer.layer_id
        self._names = {id(record.param): record.name for record in layer.parameters}
        self._parts = [
            _ModuleParts(
                path_of(module, names, path),
                module,
                dict(module._parameters),
                dict(module._modules),
                frozenset(module._buffers.keys()),
            )
            for path, module in layer.module.named_modules()
        ]

    def check(self) -> None:
        for parts in self._parts:
            if not parts.are_the_same():
                self._raise_change(parts)

    def _raise_change(self, parts: _ModuleParts) -> None:
        module, where = parts.module, f"of layer {self._layer_id}"
        for key, param in parts.parameters.items():
            if param is not None and module._parameters.get(key) is not param:
                raise ModelChangedError(
                    f"parameter {self._names[id(param)]!r} {where} was replaced or removed after wrapping; copy new "
                    "values into the parameter (or load_state_dict without assign=True). To resize or exchange it, do "
                    "so before wrapping, or close() and wrap the model again."
                )
        added = [f"parameter {joined(parts.path, key)!r}" for key in _other_keys(module._parameters, parts.parameters)]
        added += [f"submodule {joined(parts.path, key)!r}" for key in _other_keys(module._modules, parts.children)]
        added += [f"buffer {joined(parts.path, key)!r}" for key in sorted(module._buffers.keys() ^ parts.buffer_names)]
        raise ModelChangedError(
            f"{added[0]} {where} was added, replaced or removed after wrapping; change the model before wrapping it, "
            "or close() and wrap it again."
        )


def _same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return len(now) == len(then) and all(now.get(key, _MISSING) is value for key, value in then.items())


def _other_keys(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    keys = {**now, **then}
    return [key for key in keys if now.get(key, _MISSING) is not then.get(key, _MISSING)]
