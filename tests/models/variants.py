"""Variants of tiny cases: the same class with one option of its configuration changed.

Every boolean flag is flipped, depths are one more and one less, and features are taken from other layers. Not all
variants can be built or trained: the plain model decides.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from tiny_cases import Case, config_of

SEED = 20261118  # of the sample that `make test` tries
# Flags that say nothing about what a training call computes.
_WITHOUT_EFFECT = frozenset(("return_dict", "torchscript", "use_cache", "is_training"))
_DEPTHS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "encoder_", "decoder_", "num_encoder_", "num_decoder_")
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "depth")
)
_FEATURE_LAYERS = {"vision_feature_layer": (-2, -1, 0)}


def variants_of(case: Case) -> list[Case]:
    """All variants of a case. Their keys have the changed option in brackets: `llama:...[attention_bias=True]`."""
    case = dataclasses.replace(case, config=_without_cache(case.config))
    return [
        _with_option(case, path, name, other)
        for path, name, value in _options(config_of(case))
        for other in _others(name, value)
    ]


def sample(cases: list[Case], number: int) -> list[Case]:
    """Some of the cases, the same ones every time."""
    return random.Random(SEED).sample(cases, number)


def shuffled_variants(case: Case) -> list[Case]:
    """The variants of a case in a random order, the same one every time."""
    variants = variants_of(case)
    random.Random(f"{SEED} {case.key}").shuffle(variants)
    return variants


def _options(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """The options of a configuration and of those inside it: (names of the configurations, name, value)."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            yield from _options(value, (*path, name))
        elif not name.startswith("_") and name not in _WITHOUT_EFFECT:
            yield path, name, value


def _others(name: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if name in _DEPTHS and isinstance(value, int):
        return [value + 1, value - 1] if value > 1 else [value + 1]
    return [other for other in _FEATURE_LAYERS.get(name, ()) if other != value]


def _with_option(case: Case, path: tuple[str, ...], name: str, value: Any) -> Case:
    config = copy.deepcopy(case.config)
    inner = config
    for part in path:
        inner = inner.setdefault(part, {})
    inner[name] = value
    return dataclasses.replace(case, config=config, key=f"{case.key}[{'.'.join((*path, name))}={value}]")


def _without_cache(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as users have it: with the default of `use_cache`."""
    return {
        name: _without_cache(value) if isinstance(value, dict) else value
        for name, value in copy.deepcopy(config).items()
        if name != "use_cache"
    }
