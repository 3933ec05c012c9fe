"""Inputs small enough to calibrate with: cut down from a call's own, or made up from what a model's config says.

Used by the splitter. What is computed from them does not matter, only which code runs; so labels that would be ignored
are made to count.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_TOKENS = 8
_ROWS = 2
# Inputs with a row for each sample and a column for each token, all of which can be cut down alike.
_BY_TOKEN = frozenset(
    (
        *("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "inputs_embeds"),
        *("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids"),
    )
)
_IGNORED = -100


def cut_down(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first tokens of the first rows; None where the inputs are not of that kind, or small already."""
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.dim()}
    rows = {tensor.shape[0] for tensor in tensors.values()}
    if not tensors or not tensors.keys() <= _BY_TOKEN or len(rows) > 1:
        return None
    if all(tensor.shape[0] <= _ROWS and tensor[0].numel() <= _TOKENS for tensor in tensors.values()):
        return None
    small = {
        name: tensor[:_ROWS] if tensor.dim() == 1 else tensor[:_ROWS, :_TOKENS] for name, tensor in tensors.items()
    }
    for name in small.keys() & {"attention_mask", "decoder_attention_mask"}:
        if small[name].dim() == 2:
            small[name] = torch.ones_like(small[name])
    if "labels" in small and not small["labels"].is_floating_point():
        small["labels"] = small["labels"].clamp(min=0)
    return {**kwargs, **small}


def made_up(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Guesses at inputs a model takes, the most telling first; a model may raise on any of them."""
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    has_rest = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    inputs: dict[str, Any] = {}
    if "input_ids" in parameters:
        inputs["input_ids"] = _token_ids(config)
    elif "pixel_values" in parameters:
        inputs["pixel_values"] = _images(config)
    if not inputs:
        return
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    if "labels" in parameters or has_rest:
        if "input_ids" in inputs:
            if "decoder_input_ids" in parameters:
                yield {
                    **inputs,
                    "decoder_input_ids": inputs["input_ids"].clone(),
                    "labels": inputs["input_ids"].clone(),
                }
            yield {**inputs, "labels": inputs["input_ids"].clone()}
        yield {**inputs, "labels": torch.zeros(_ROWS, dtype=torch.long)}
    yield inputs


def _token_ids(config: Any) -> torch.Tensor:
    """Ordinary tokens: none that a config gives a meaning to."""
    text = getattr(config, "text_config", None) or config
    size = getattr(text, "vocab_size", None)
    size = size if isinstance(size, int) and size > 1 else 100
    special = (
        {
            value
            for part in (config, text)
            for name, value in vars(part or object()).items()
            if "token" in name and isinstance(value, int)
        }
        if config is not None
        else set()
    )
    plain = [token for token in range(min(size, 64)) if token not in special] or [0]
    return torch.tensor(plain).repeat(-(-_ROWS * _TOKENS // len(plain)))[: _ROWS * _TOKENS].view(_ROWS, _TOKENS)


def _images(config: Any) -> torch.Tensor:
    size = getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", None) or 3
    return torch.linspace(-1, 1, _ROWS * channels * height * width).view(_ROWS, channels, height, width)
