"""Fused GPU kernels of the package liger-kernel in a model of transformers, when the user asks for them.

Used by api.wrap and the splitter. The package patches modules of the model and functions of its library. Its kernels
run on GPUs only, so what it changed is set aside while a model is calibrated on the host.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.models.library_state import is_pretrained

_MISSING = object()


class FusedKernels:
    def __init__(self, model: nn.Module) -> None:
        """Patch the model: rotary embeddings, norms and gated feed-forward parts; its loss is ours."""
        try:
            apply = importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
        except ImportError as error:
            raise ConfigError(
                "liger_kernels=True needs the package liger-kernel: pip install liger-kernel, or leave the option out."
            ) from error
        holders = [sys.modules[name].__dict__ for name in {type(m).__module__ for m in model.modules()}]
        holders += [module.__dict__ for module in model.modules()]
        before = [dict(holder) for holder in holders]
        inner = next((module for module in model.modules() if is_pretrained(module)), model)
        apply(model=inner, fused_linear_cross_entropy=False, cross_entropy=False)
        self._patches = [
            (holder, name, old.get(name, _MISSING), value)
            for holder, old in zip(holders, before, strict=True)
            for name, value in holder.items()
            if old.get(name, _MISSING) is not value
        ]
        if not self._patches:
            raise ConfigError(
                f"liger_kernels=True: liger-kernel has no kernels for {type(inner).__name__}; leave the option out."
            )

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside it everything is as it was before. Only while nothing runs."""
        for holder, name, old, _ in self._patches:
            _put(holder, name, old)
        try:
            yield
        finally:
            for holder, name, _, new in self._patches:
                _put(holder, name, new)

    def remove(self) -> None:
        for holder, name, old, _ in self._patches:
            _put(holder, name, old)


def _put(holder: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value
