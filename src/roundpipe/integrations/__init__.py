"""Trainer classes of transformers and TRL that train through RoundPipe. Importing this package imports neither."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "RoundPipeOptions": "options",
    "RoundPipeMixin": "trainer",
    "RoundPipeTrainer": "trainer",
    "RoundPipeSFTTrainer": "trl",
    "RoundPipeDPOTrainer": "trl",
    "RoundPipeGRPOTrainer": "trl",
    "RoundPipeKTOTrainer": "trl",
    "RoundPipeORPOTrainer": "trl_experimental",
    "RoundPipeRewardTrainer": "trl",
}

__all__ = [
    "RoundPipeDPOTrainer",
    "RoundPipeGRPOTrainer",
    "RoundPipeKTOTrainer",
    "RoundPipeMixin",
    "RoundPipeORPOTrainer",
    "RoundPipeOptions",
    "RoundPipeRewardTrainer",
    "RoundPipeSFTTrainer",
    "RoundPipeTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
