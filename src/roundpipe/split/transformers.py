"""Everything that is special to models of the transformers library: captured outputs, caches, kernels, options.

transformers is never imported here: as long as the library is not loaded, no model can be one of its models.

[Note: captured outputs]
The caller of a transformers model may ask for router logits, hidden states or attentions. Hooks on submodules then add
these outputs to a collector, a dict of lists in a context variable. A block that runs outside of the model's forward
has no collector. Therefore `call_capturing` sets a private collector while the block runs. When the model's code is
replayed, the replay adds the captured outputs to the collector of the replayed forward.
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

Captured = dict[str, list[Any]]  # captured outputs by kind
_MISSING = object()
# Attributes of configs that say how attention and experts are computed, and the values that need no GPU kernels.
_ATTENTION, _EXPERTS = "_attn_implementation_internal", "_experts_implementation_internal"
_TORCH_ALONE = (None, "eager", "sdpa", "batched_mm", "grouped_mm")


def _collector_variable() -> Any:
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def active_collector() -> Captured | None:
    """Return the collector of the running forward; None if no outputs are being collected."""
    variable = _collector_variable()
    collector = None if variable is None else variable.get()
    if collector and "_hidden_states_layers" in collector:
        raise ModelSplitError(
            "output_hidden_states is a list of layers, which is not supported; pass True for all layers"
        )
    return collector or None


def wanted_captures(collector: Captured | None) -> dict[str, int]:
    """Return the kinds of output that a block must capture, each with 0 or 1.

    0: no output of this kind was captured before in this forward. 1: some were. The number matters because the hooks of
    transformers treat the first captured output of a forward differently.
    """
    return {kind: min(1, len(found)) for kind, found in (collector or {}).items()}


def call_capturing(call: Any, wanted: Mapping[str, int]) -> tuple[Any, Captured]:
    """Return the result of `call()` and the outputs that hooks captured in it. See [Note: captured outputs]."""
    if not wanted:
        return call(), {}
    variable = _collector_variable()
    # One entry None replaces all outputs that earlier blocks captured. It is removed from the result below.
    collector: Captured = {kind: [None] * earlier for kind, earlier in wanted.items()}
    token = variable.set(collector)
    try:
        value = call()
    finally:
        variable.reset(token)
    return value, {kind: found[wanted[kind] :] for kind, found in collector.items()}


def keep_hook_marks(pairs: Sequence[ModulePair]) -> None:
    """Copy the mark that capturing hooks are installed from copied modules to their originals.

    Copies and originals share their hooks, so the hooks must not be installed a second time.
    """
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
    """Return the arguments with a copy of each cache, so that other blocks and replays do not see a block's writes."""
    if not caches_in(args, kwargs):
        return args, kwargs
    return tuple(map(copied_cache, args)), {name: copied_cache(value) for name, value in kwargs.items()}


def copied_cache(value: Any) -> Any:
    """Return a copy in host memory if `value` is a cache. All other values are returned as is."""
    if not is_cache(value):
        return value
    try:
        own = copy.deepcopy(value)
    except RuntimeError as error:  # deepcopy refuses tensors that are not leaves of a graph
        raise ModelSplitError("a cache that gradients flow through is handed to its blocks") from error
    move_cache(own, torch.device("cpu"))
    return own


def is_filled(cache: Any) -> bool:
    """Whether a cache contains a tensor with elements."""
    return any(
        is_filled(value) if is_cache(value) else isinstance(value, torch.Tensor) and bool(value.numel())
        for holder in _holders(cache)
        for value in holder.values()
    )


def move_cache(cache: Any, device: torch.device) -> None:
    """Move the tensors of a cache to a device."""
    for holder in _holders(cache):
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                holder[name] = value.to(device)
            elif isinstance(value, torch.device):  # the device on which the cache will allocate its tensors
                holder[name] = device
            elif is_cache(value):
                move_cache(value, device)


def _holders(cache: Any) -> list[dict[Any, Any]]:
    """Return all dicts that may hold tensors of a cache.

    These are the `__dict__`s of the cache and of its layers, and all dicts among their attributes.
    """
    attributes = [vars(part) for part in (cache, *getattr(cache, "layers", ()))]
    return [*attributes, *(value for own in attributes for value in own.values() if isinstance(value, dict))]


def is_pretrained(module: Any) -> bool:
    """Whether a module is a transformers model. Compares names of classes, because transformers is not imported."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def has_pretrained(module: nn.Module) -> bool:
    """Whether a module is a transformers model or contains one, as a PEFT adapter does."""
    return any(map(is_pretrained, module.modules()))


def refuse_flex_attention(model: nn.Module) -> None:
    """Raise ConfigError for a model whose attention fails inside of layers."""
    for module in model.modules():
        if is_pretrained(module) and vars(module.config).get(_ATTENTION) == "flex_attention":
            raise ConfigError(
                "flex_attention compiles itself, which torch does not support inside a layer; load the model with "
                "attn_implementation='sdpa', 'eager' or 'flash_attention_2', which work."
            )


@contextlib.contextmanager
def with_torch_alone(model: nn.Module) -> Iterator[None]:
    """While entered, a transformers model computes attention and experts with plain torch, so it can run on the host.

    Changes the model's configs, so no other thread may run the model meanwhile. A plan made this way is also valid with
    GPU kernels: outside of blocks the implementation of attention affects only masks, which depend on the inputs alone.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []  # (attributes of a config, name of one, its old value)
    for module in model.modules():
        own = vars(module.config) if is_pretrained(module) else {}
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
    """Allocate and initialise a transformers model that is on the meta device.

    Does nothing if no tensor is on the meta device. Raises ConfigError if only some tensors are on the meta device, or
    if the model is not a transformers model.
    """
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
    """Turn off the model's gradient checkpointing: RoundPipe recomputes layers itself."""
    for module in model.modules():
        if is_pretrained(module) and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
            logger.info(
                "gradient checkpointing of %s is turned off: layers are recomputed as planned", type(module).__name__
            )
            # transformers 5.23 has another name for this method, and warns about the old one.
            is_renamed = hasattr(type(module), "activation_checkpointing_disable")
            disable: Any = getattr(module, f"{'activation' if is_renamed else 'gradient'}_checkpointing_disable")
            disable()


class FusedKernels:
    """Fused GPU kernels of the package liger-kernel in a transformers model.

    The package patches modules of the model and functions in the Python modules that define the model. The kernels run
    on GPUs only, so the patches are removed while the model runs on the host.
    """

    def __init__(self, model: nn.Module) -> None:
        """Patch rotary embeddings, norms and gated feed-forward parts, but not the loss: see split/head_loss.py."""
        try:
            apply = importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
        except ImportError as error:
            raise ConfigError(
                "liger_kernels=True needs the package liger-kernel: pip install liger-kernel, or leave the option out."
            ) from error
        # liger-kernel cannot undo its patches. To find them, compare all dicts that it may change, before and after.
        holders = [sys.modules[name].__dict__ for name in {type(m).__module__ for m in model.modules()}]
        holders += [module.__dict__ for module in model.modules()]
        before = [dict(holder) for holder in holders]
        inner = next((module for module in model.modules() if is_pretrained(module)), model)
        apply(model=inner, fused_linear_cross_entropy=False, cross_entropy=False)
        # Each patch is (changed dict, key, value before, value after).
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
        """Undo the patches while entered. No other thread may run the model meanwhile."""
        self.remove()
        try:
            yield
        finally:
            for holder, name, _, new in self._patches:
                _put(holder, name, new)

    def remove(self) -> None:
        """Undo the patches."""
        for holder, name, old, _ in self._patches:
            _put(holder, name, old)


def _put(holder: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value
