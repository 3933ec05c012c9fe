"""Fused GPU kernels of the package liger-kernel in a model of transformers, when the user asks for them.

Used by api.wrap and the splitter. The package patches modules of the model and functions of its library. Its kernels
run on GPUs only, so what it changed is set aside while a model is calibrated on the host.

What transformers keeps beside a model's tensors and modules: outputs it captures on the way, and caches.

Used by the splitter. transformers is never imported here: where it is not loaded there is nothing of this.

[Note: captured outputs] A forward of transformers may ask for router logits, hidden states or attentions. Hooks on
submodules then put them into a collector, a context variable. A block that runs outside the model's forward has no
collector, so a private one is set around it, and what it caught is handed to the real one by whoever replays the call.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError, ModelSplitError
from roundpipe.module_copy import ModulePair

logger = logging.getLogger("roundpipe")

Captured = dict[str, list[Any]]
# In the configs of transformers: how attention and experts are computed, and the ways that need nothing but torch.
_ATTENTION, _EXPERTS = "_attn_implementation_internal", "_experts_implementation_internal"
_TORCH_ALONE = (None, "eager", "sdpa", "batched_mm", "grouped_mm")


def _collector_variable() -> Any:
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def active_collector() -> Captured | None:
    """What the running forward collects, by kind of output; None outside of any."""
    variable = _collector_variable()
    collector = None if variable is None else variable.get()
    if collector and "_hidden_states_layers" in collector:
        raise ModelSplitError("output_hidden_states with a list of layers; ask for all of them with True")
    return collector or None


def wanted_captures(collector: Captured | None) -> dict[str, int]:
    """Kinds of output a block is to collect; 1 where an earlier one was there, since the first is treated apart."""
    return {kind: min(1, len(found)) for kind, found in (collector or {}).items()}


def call_capturing(call: Any, wanted: Mapping[str, int]) -> tuple[Any, Captured]:
    """`call()`, and what its submodules' hooks have caught."""
    if not wanted:
        return call(), {}
    variable = _collector_variable()
    collector: Captured = {kind: [None] * earlier for kind, earlier in wanted.items()}
    token = variable.set(collector)
    try:
        value = call()
    finally:
        variable.reset(token)
    return value, {kind: found[wanted[kind] :] for kind, found in collector.items()}


def keep_hook_marks(pairs: Sequence[ModulePair]) -> None:
    """Let originals know that hooks were installed through their copies, which share them: once is enough."""
    mark = "_output_capturing_hooks_installed"
    for pair in pairs:
        if pair.copy.__dict__.get(mark):
            pair.original.__dict__[mark] = True


def is_cache(value: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    cache_class = getattr(module, "Cache", None)
    return cache_class is not None and isinstance(value, cache_class)


def caches_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [value for value in (*args, *kwargs.values()) if is_cache(value)]


def own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a copy of each cache: what one block writes into it no other block and no replay may see."""
    if not caches_in(args, kwargs):
        return args, kwargs
    return tuple(map(copied_cache, args)), {name: copied_cache(value) for name, value in kwargs.items()}


def copied_cache(value: Any) -> Any:
    """A copy of a cache, in host memory; anything else as it is."""
    if not is_cache(value):
        return value
    try:
        own = copy.deepcopy(value)
    except RuntimeError as error:
        raise ModelSplitError("a cache that gradients flow through is handed to its blocks") from error
    move_cache(own, torch.device("cpu"))
    return own


def is_filled(cache: Any) -> bool:
    """Whether a cache holds anything yet."""
    return any(
        is_filled(value) if is_cache(value) else isinstance(value, torch.Tensor) and bool(value.numel())
        for holder in _holders(cache)
        for value in holder.values()
    )


def move_cache(cache: Any, device: torch.device) -> None:
    """Let what a cache holds lie on a device."""
    for holder in _holders(cache):
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                holder[name] = value.to(device)
            elif isinstance(value, torch.device):
                holder[name] = device
            elif is_cache(value):
                move_cache(value, device)


def _holders(cache: Any) -> list[dict[Any, Any]]:
    """The attributes of a cache and its layers, and dicts among them: whatever holds its tensors."""
    attributes = [vars(part) for part in (cache, *getattr(cache, "layers", ()))]
    return [*attributes, *(value for own in attributes for value in own.values() if isinstance(value, dict))]


def is_pretrained(module: Any) -> bool:
    """Whether a module is one of transformers' models, by name: a class of that library need not be at hand."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def has_pretrained(module: nn.Module) -> bool:
    """Whether a module is such a model or wraps one, as an adapter does."""
    return any(map(is_pretrained, module.modules()))


@contextlib.contextmanager
def with_torch_alone(model: nn.Module) -> Iterator[None]:
    """Inside it models of transformers do themselves what they let kernels for GPUs do. Only while nothing runs.

    Which way attention is computed changes masks, which come from inputs alone, and nothing else of the code between
    blocks: what is found out about a split holds for all of them.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        own = vars(module.config) if is_pretrained(module) else {}
        if own.get(_ATTENTION) == "flex_attention":
            raise ModelSplitError(
                "flex_attention compiles itself, which torch does not allow inside of a layer; load the model with "
                "attn_implementation='sdpa' or 'flash_attention_2'"
            )
        instead = "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"
        for name, other in ((_ATTENTION, instead), (_EXPERTS, "eager")):
            if own.get(name) not in _TORCH_ALONE:
                before.append((own, name, own[name]))
                own[name] = other
    try:
        yield
    finally:
        for own, name, value in before:
            own[name] = value


def fill_from_meta(model: nn.Module) -> None:
    """Give a model of transformers that was made on the meta device memory, and the weights of a new model."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    empty = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty and (len(empty) < len(tensors) or not is_pretrained(model)):
        raise ConfigError(
            f"{empty[0]} of {type(model).__name__} is on the meta device and holds no values ({len(empty)} of "
            f"{len(tensors)} tensors do not); load the whole model, buffers that are not in its checkpoint included, "
            "before wrapping it."
        )
    if empty:
        logger.warning(
            "%s is on the meta device: its weights are made anew, at random; load yours with load_state_dict()",
            type(model).__name__,
        )
        model.to_empty(device="cpu")
        model.init_weights()  # type: ignore[operator]


def stop_checkpointing(model: nn.Module) -> None:
    """Let a model not recompute by itself what is recomputed anyway."""
    for module in model.modules():
        if is_pretrained(module) and getattr(module, "is_gradient_checkpointing", False):
            logger.info(
                "gradient checkpointing of %s is turned off: layers are recomputed as planned", type(module).__name__
            )
            module.gradient_checkpointing_disable()  # type: ignore[operator]


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
