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
import functools
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError, ModelSplitError, UsageError
from roundpipe.module_copy import ModulePair

logger = logging.getLogger("roundpipe")

TESTED_RELEASES = ((5, 17), (5, 23))  # the oldest and the newest: see docs/models.md
Captured = dict[str, list[Any]]  # captured outputs by kind; a collector may also hold which layers are selected
_MISSING = object()
_CAPTURING = "transformers.utils.output_capturing"  # the module that defines the hooks and the collector
# Attributes of configs that say how attention and experts are computed, and the values that need no GPU kernels.
_ATTENTION, _EXPERTS = "_attn_implementation_internal", "_experts_implementation_internal"
_USE_CACHE = "use_cache"  # the argument that turns caches on and off
_OPTION_TYPES = (bool, int, float, str, list, tuple, type(None))  # types of values in a config that are options
_TORCH_ALONE = (None, "eager", "sdpa", "batched_mm", "grouped_mm")


def _collector_variable() -> Any:
    return getattr(sys.modules.get(_CAPTURING), "_active_collector", None)


def active_collector() -> Captured | None:
    """Return the collector of the running forward; None if no outputs are being collected."""
    variable = _collector_variable()
    return (None if variable is None else variable.get()) or None


def wanted_captures(collector: Captured | None) -> dict[str, Any]:
    """Return what a block must capture: by kind of output, the number of outputs captured before in this forward.

    The number matters because the hooks of transformers count: they treat the first output differently, and skip
    layers that the caller did not select. A selection of layers is an entry of the collector, which is passed on.
    """
    return {kind: len(found) if isinstance(found, list) else found for kind, found in (collector or {}).items()}


def call_capturing(call: Any, wanted: Mapping[str, Any]) -> tuple[Any, Captured]:
    """Return the result of `call()` and the outputs that hooks captured in it. See [Note: captured outputs]."""
    if not wanted:
        return call(), {}
    variable = _collector_variable()
    # None replaces each output that earlier blocks captured. These entries are removed from the result below.
    collector = {kind: [None] * given if type(given) is int else given for kind, given in wanted.items()}
    token = variable.set(collector)
    try:
        value = call()
    finally:
        variable.reset(token)
    return value, {kind: found[wanted[kind] :] for kind, found in collector.items() if isinstance(found, list)}


def install_capturing_hooks(module: nn.Module) -> None:
    """Install the hooks of the transformers models in a module now instead of in the first forward that needs them.

    For modules whose copies run on several devices: copies share their hooks with the original, but each copy would
    install them again. A forward of split layers never installs hooks, because calibration has done so.
    """
    install = getattr(sys.modules.get(_CAPTURING), "maybe_install_capturing_hooks", None)
    if install is not None:
        for part in module.modules():
            if is_pretrained(part):
                install(part)


def refuse_lost_captures(module: nn.Module) -> None:
    """Raise if a forward on this thread collects outputs by hooks inside `module`, which runs on another thread."""
    collector = active_collector()
    if collector is None:
        return
    for part in module.modules():
        if any(getattr(hook, "__module__", "") == _CAPTURING for hook in part._forward_hooks.values()):
            raise UsageError(
                f"the model collects {' and '.join(kind for kind in collector if kind[0] != '_')} of its layers, and "
                f"they would be lost: a {type(module).__name__} inside it runs on a device by itself. Let the whole "
                "model be split into layers (leave use_sequential_preset out), or turn the outputs off in the call or "
                "the config."
            )


def adopt_capturing_hooks(pairs: Sequence[ModulePair]) -> None:
    """Install capturing hooks on the originals of modules whose copies have installed theirs in a forward."""
    mark = "_output_capturing_hooks_installed"
    for pair in pairs:
        if pair.copy.__dict__.get(mark) and not pair.original.__dict__.get(mark):
            install_capturing_hooks(pair.original)


class TrainedCache(ModelSplitError):
    """Gradients flow through the model's cache. Such a model can neither be split nor be wrapped part by part."""


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
        raise TrainedCache(
            "it trains a cache that it passes to its blocks (prefix tuning, cartridges), which is not supported; use "
            "LoRA or another adapter of weights, or prompt tuning"
        ) from error
    move_cache(own, torch.device("cpu"))
    return own


class CacheSwitch:
    """Turns the caches of a transformers model off in calls that do not ask for them.

    Caches serve generating. The microbatches of a call and the recomputations of a layer would all write to one cache.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        # A model with **kwargs passes arguments on to the models inside it.
        readers = [model, *filter(is_pretrained, model.modules())] if passes_on else [model]
        self._is_there = has_pretrained(model) and any(
            _USE_CACHE in inspect.signature(r.forward).parameters for r in readers
        )
        self._position = list(parameters).index(_USE_CACHE) if _USE_CACHE in parameters else len(parameters)

    def off(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments to add to a call with these arguments."""
        is_given = _USE_CACHE in kwargs or len(args) > self._position or bool(caches_in(tuple(args), kwargs))
        return {_USE_CACHE: False} if self._is_there and not is_given else {}


def is_filled(cache: Any) -> bool:
    """Whether a cache contains a tensor with elements."""
    return any(
        is_filled(value) if is_cache(value) else isinstance(value, torch.Tensor) and bool(value.numel())
        for holder in holders_of(cache)
        for value in holder.values()
    )


def move_cache(cache: Any, device: torch.device) -> None:
    """Move the tensors of a cache to a device."""
    for holder in holders_of(cache):
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                holder[name] = value.to(device)
            elif isinstance(value, torch.device):  # the device on which the cache will allocate its tensors
                holder[name] = device
            elif is_cache(value):
                move_cache(value, device)


def holders_of(cache: Any) -> list[dict[Any, Any]]:
    """Return all dicts that may hold tensors of a cache.

    These are the `__dict__`s of the cache and of its layers, and all dicts among their attributes.
    """
    attributes = [vars(part) for part in (cache, *getattr(cache, "layers", ()))]
    return [*attributes, *(value for own in attributes for value in own.values() if isinstance(value, dict))]


def is_pretrained(module: Any) -> bool:
    """Whether a module is a transformers model. Compares names of classes, because transformers is not imported."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def has_config(module: Any) -> bool:
    """Whether a module is a transformers model with a config."""
    return is_pretrained(module) and getattr(module, "config", None) is not None


def has_pretrained(module: nn.Module) -> bool:
    """Whether a module is a transformers model or contains one, as a PEFT adapter does."""
    return any(map(is_pretrained, module.modules()))


class ConfigStates:
    """Numbers the states of a transformers model's configs: a forward may do something else after a change."""

    def __init__(self, model: nn.Module) -> None:
        configs = {id(module.config): module.config for module in model.modules() if has_config(module)}
        self._configs = list(configs.values())
        self._seen: list[list[dict[str, Any]]] = []

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Undo changes of the configs on leaving: a classifier notes in its config what kind of labels it got first."""
        before = [dict(vars(config)) for config in self._configs]
        try:
            yield
        finally:
            for config, values in zip(self._configs, before, strict=True):
                vars(config).clear()
                vars(config).update(values)

    def number(self) -> int:
        """Return the number of the present state. Equal states have equal numbers."""
        state = [
            {name: value for name, value in vars(config).items() if isinstance(value, _OPTION_TYPES)}
            for config in self._configs
        ]
        if state not in self._seen:
            self._seen.append([{**values} for values in state])
        return self._seen.index(state)


@functools.cache
def warn_of_untested_release() -> None:
    """Warn, once per process, if the loaded release of transformers is not one that all models were tested with."""
    release = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    numbers = tuple(int(part) for part in release.split(".")[:2] if part.isdigit())
    if numbers and not TESTED_RELEASES[0] <= numbers <= TESTED_RELEASES[1]:
        oldest, newest = (".".join(map(str, tested)) for tested in TESTED_RELEASES)
        logger.warning(
            "transformers %s is not a release that this version of RoundPipe was tested with (%s to %s). Compare the "
            "first loss with that of the plain model, or install a tested release.",
            release,
            oldest,
            newest,
        )


def refuse_flex_attention(model: nn.Module) -> None:
    """Raise ConfigError for a model whose attention fails inside of layers."""
    for module in model.modules():
        if has_config(module) and vars(module.config).get(_ATTENTION) == "flex_attention":
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
        own = vars(module.config) if has_config(module) else {}
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
