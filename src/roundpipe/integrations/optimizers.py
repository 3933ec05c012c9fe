"""Which optimizer a trainer's `optim`, `moments` and `state_folder` stand for.

RoundPipe's optimizers take the place of torch's with the same name, and of those of other libraries that keep the
state in 8 bits, page it, or compute Lion. Knows names and arguments, neither models nor steps.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from roundpipe.errors import ArgumentTypeError, ConfigError
from roundpipe.optim import SGD, Adam, AdamW, Lion
from roundpipe.store.forms import MOMENTS

_OURS: Mapping[Any, Any] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD}
_WITH_MOMENTS = (AdamW, Adam, Lion)
Folder = str | os.PathLike[str]
_GROUPS = ("params", "optimizer_dict")  # names under which Trainer takes groups of parameters
# Names of transformers for optimizers of bitsandbytes and torchao, the class of ours, and its moments.
_REPLACED: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), (AdamW, "8bit")),
    "paged_adamw_32bit": (AdamW, "float32"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (Lion, "8bit")),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), (Lion, "float32")),
}


def is_replaced(optim: Any) -> bool:
    """Whether an optimizer of ours takes the place of another library's optimizer with this name."""
    return getattr(optim, "value", optim) in _REPLACED


def chosen_moments(optim: Any, moments: str | None) -> str:
    """How moments are stored: as `moments` says, if it is given, else as the name of the optimizer says."""
    _, by_name = _REPLACED.get(getattr(optim, "value", optim), (None, "float32"))
    return by_name if moments is None else moments


def check_moments(moments: str | None) -> None:
    """Raise ConfigError for an unknown form of moments. None leaves the choice to the name of the optimizer."""
    if moments is not None and moments not in MOMENTS:
        raise ConfigError(f"moments must be one of {', '.join(map(repr, MOMENTS))}, got {moments!r}.")


def check_state_folder(folder: Folder | None) -> None:
    """Raise unless this is the name of a folder, or None."""
    if folder is None:
        return
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentTypeError(f"state_folder must be the name of a folder, or None, got {type(folder).__name__}.")
    if not os.fspath(folder):
        raise ConfigError("state_folder must be the name of a folder, got ''.")


def class_and_arguments(
    args: Any,
    moments: str | None,
    chosen_by: Callable[[Any], tuple[Any, dict[str, Any]]],
    **more: Any,
) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer and its arguments. `chosen_by`: Trainer's own choice by its arguments.

    more: arguments that the optimizers of `roundpipe.optim` alone have, by name. None and False ask for nothing.
    """
    name = getattr(args.optim, "value", args.optim)
    if name in _REPLACED:
        kind, _ = _REPLACED[name]
        plain = copy.copy(args)
        plain.optim = type(args.optim)("adamw_torch")  # for its learning rate and betas
        _, arguments = chosen_by(plain)
        keys = ("lr", "betas", *(("eps",) if kind is AdamW else ()), *_GROUPS)
        arguments = {key: arguments[key] for key in keys if key in arguments}
    else:
        kind, arguments = chosen_by(args)
        # Groups that a trainer makes for an optimizer of torch are parameters of the model, or refused as unknown.
        of_gpu = _GROUPS if kind not in _OURS else ()
        if {"model", *of_gpu} & arguments.keys() or "bitsandbytes" in str(kind):
            raise ConfigError(
                f"optim={name!r} works on the parameters of a model on a GPU, and RoundPipe steps in host memory; use "
                'optim="adamw_torch", "adamw_8bit" or another optimizer of torch.'
            )
        if kind in _OURS:
            kind, arguments = _OURS[kind], {key: value for key, value in arguments.items() if key != "fused"}
    chosen = chosen_moments(args.optim, moments)
    if chosen != "float32" and kind not in _WITH_MOMENTS:
        raise ConfigError(
            f'moments={chosen!r} is for optim="adamw_torch", "lion_32bit" and their relatives, not for optim={name!r}.'
        )
    if chosen != "float32":
        arguments = {**arguments, "moments": chosen}
    asked = {argument: value for argument, value in more.items() if value is not None and value is not False}
    if asked and kind not in (*_OURS.values(), Lion):
        raise ConfigError(
            f'{next(iter(asked))} is for optim="adamw_torch", "sgd", "lion_32bit" and their relatives, not for '
            f"optim={name!r}."
        )
    return kind, {**arguments, **asked}
