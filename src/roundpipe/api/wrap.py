"""wrap_model_to_roundpipe: makes a RoundPipe, or an AutoRoundPipe with several RoundPipes, of any model.

A model is wrapped, in this order of preference, by its preset, as layers that it is split into, or part by part by the
rules below.

The rules decide which submodules become RoundPipes, by sizes, types and shared parameters. The first that applies to a
module:

    is in skip_modules                                stays as it is
    is an nn.Sequential                               becomes a RoundPipe with one layer per child
    has a forward, and its own parameters take
    lower_threshold or more, or all its parameters
    take upper_threshold or less                      becomes a RoundPipe with one layer
    is an nn.ModuleList                               each element with a forward becomes a RoundPipe
    any other                                         the rules apply to its children

[Note: one owner] A parameter belongs to at most one RoundPipe. If these rules would put a parameter into two
RoundPipes, or into one and outside of all, then the smallest module that contains all places of the parameter and has a
forward becomes a RoundPipe with one layer.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from roundpipe.api.auto import AutoRoundPipe, DeviceLoss, LossModule, bare_modules, loss_function_of, outside_of
from roundpipe.api.roundpipe import RoundPipe, call_site, check_arguments, check_master_bits, is_chain, to_pin_mode
from roundpipe.api.split_model import SplitModel
from roundpipe.compiled import CompileOptions, PartsToCompile, inside_of, without_wrappers
from roundpipe.config import RoundPipeRunConfig
from roundpipe.devices import parse_devices
from roundpipe.errors import ArgumentTypeError, ConfigError, ModelSplitError, OwnershipError
from roundpipe.models import Convert, find_preset
from roundpipe.module_names import user_names
from roundpipe.packed import checked_form, pack_frozen, take_quantised
from roundpipe.split.discovery import block_paths
from roundpipe.split.kernels import GpuKernels
from roundpipe.split.splitter import ModelSplitter, rare_collections
from roundpipe.split.transformers import (
    TrainedCache,
    fill_from_meta,
    has_pretrained,
    refuse_flex_attention,
    stop_checkpointing,
    warn_of_untested_release,
)
from roundpipe.store.adopt import refuse_owned, refuse_special_tensors
from roundpipe.store.training_memory import require_training_memory

logger = logging.getLogger("roundpipe")
_WORTH_COLLECTING_BYTES = 64 << 20  # collecting garbage takes up to a second in a large process
_OPTIONS = ("compile", "devices", "master_bits", "optim_dtype", "pin_model", "process_group", "staleness")
_SPLIT_OPTIONS = ("example_inputs", "liger_kernels")
_ADVICE = (
    "it is wrapped part by part, and its own forward runs on the CPU between the parts. To run the whole model on the "
    "devices, give wrap_model_to_roundpipe(..., example_inputs={...}), the keyword arguments of a call: then it is "
    "split into layers that compute exactly what it computes"
)


@dataclasses.dataclass(frozen=True)
class SplitOptions:
    """The user's options for splitting a model, checked at construction."""

    example_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    liger_kernels: bool | Mapping[str, bool]

    def __post_init__(self) -> None:
        if not isinstance(self.liger_kernels, bool | Mapping):
            raise ArgumentTypeError(
                "liger_kernels must be True or False, or a dict that turns kernels on and off, got "
                f"{self.liger_kernels!r}."
            )
        given = self.example_inputs
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not isinstance(given, Mapping) and not (is_list and all(isinstance(each, Mapping) for each in given)):
            raise ArgumentTypeError(
                "example_inputs must be the keyword arguments of a call, a dict, or a list of such dicts, got "
                f"{type(self.example_inputs).__name__}."
            )

    def examples(self) -> list[Mapping[str, Any]]:
        given = self.example_inputs
        return [given] if isinstance(given, Mapping) else list(given)


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Container[nn.Module] = [],
    override_config: dict[nn.Module, RoundPipeRunConfig] = {},
    model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),
    name: str | None = None,
    frozen_weights: Literal["nf4", "int8", "fp8"] | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe | AutoRoundPipe:
    """Wrap any model: by its preset, as layers that it is split into, or submodule by submodule.

    use_sequential_preset: False always wraps submodule by submodule; True raises where that would be needed.
    lower_threshold: bytes. A module whose own parameters take at least this is wrapped as a whole. A module that is
        wrapped as a whole and takes less runs in one microbatch.
    upper_threshold: bytes. A module that takes at most this is wrapped as a whole. Default: model size / (devices + 1).
    skip_modules: modules that are not wrapped; they run on the CPU.
    override_config: run options of single modules; they override all others.
    model_run_config: run options of all RoundPipes that are made.
    name: shown in logs and errors; default the file and line of this call. Names of parts begin with it.
    frozen_weights: the form in which linear weights and experts that do not train are packed, in place. Layers compute
        with the values that the packed weights stand for. Embeddings, norms and heads stay as they are. Weights of
        linear modules that come quantised are packed in any case, with their own codes and scales.
    roundpipe_kwargs: optim_dtype, master_bits, pin_model, devices, process_group, staleness and compile, as for
        `RoundPipe`; and for models that are split:
        example_inputs: keyword arguments of a call, or a list of such dicts. The model is split for these calls now.
            For calls of another form it is split again when the first one is made.
        liger_kernels: True to let a model of transformers use the kernels of the package liger-kernel on GPUs; a dict
            says which, such as {"rope": False}.

    Returns a RoundPipe if the model is wrapped as a whole. Otherwise returns an AutoRoundPipe: the model itself, in
    which RoundPipes replace submodules until it is closed.
    """
    thresholds = {"lower_threshold": lower_threshold}
    if upper_threshold is not None:
        thresholds["upper_threshold"] = upper_threshold
    _check(use_sequential_preset, thresholds, skip_modules, override_config, roundpipe_kwargs)
    check_arguments(model, roundpipe_kwargs.get("optim_dtype"), name, model_run_config)
    check_master_bits(model, roundpipe_kwargs.get("master_bits", 32), roundpipe_kwargs.get("optim_dtype"))
    form = checked_form(frozen_weights)
    refuse_owned(model)
    options = dict(roundpipe_kwargs, name=name or call_site())
    take_quantised(model, options["name"])
    refuse_special_tensors(model)  # checked before splitting, which runs the model
    refuse_flex_attention(model)
    override_config = {inside_of(module): config for module, config in override_config.items()}
    model = without_wrappers(model)
    if form is not None:
        pack_frozen(model, form, options["name"])
    split_options = SplitOptions(options.pop("example_inputs", ()), options.pop("liger_kernels", False))
    if use_sequential_preset is not False:
        config = override_config.get(model, AS_USUAL).over(model_run_config)
        wrapped = _wrap_as_layers(model, split_options, config, options, is_required=use_sequential_preset is True)
        if wrapped is not None:
            return wrapped
    if upper_threshold is None:
        upper_threshold = size_bytes(model) // (len(parse_devices(options.get("devices"))) + 1)
    parts = WrapRules(lower_threshold, upper_threshold, skip_modules).parts(model)
    _warn_of_unused(model, parts, skip_modules, override_config)
    _warn_of_one_microbatch(parts, override_config)
    if [part.module for part in parts] == [model]:
        config = override_config.get(model, AS_USUAL).over(parts[0].config).over(model_run_config)
        return RoundPipe(model, model_run_config=config, **options)
    # A model of repeated blocks trains faster if it is split into layers. If the user did not ask for wrapping part by
    # part and no other message explains it, advise how to have the model split.
    is_explained = use_sequential_preset is False or bool(split_options.example_inputs) or has_pretrained(model)
    advice = _ADVICE if not is_explained and block_paths(model) else None
    return _wrap_parts(model, parts, override_config, model_run_config, options, advice)


def _wrap_as_layers(
    model: nn.Module,
    split_options: SplitOptions,
    config: RoundPipeRunConfig,
    options: dict[str, Any],
    *,
    is_required: bool,
) -> RoundPipe | None:
    """A RoundPipe over the layers of the model's preset, or over those it is split into.

    If the model has no preset and cannot be split, raises if `is_required` or if it cannot be wrapped in any way, else
    returns None.
    """
    model_type = type(model).__name__
    preset = find_preset(model)
    if preset is not None:  # the user has registered it, so it is preferred to splitting
        if not is_required:
            logger.info(
                "%s: using the preset for %s; pass use_sequential_preset=False to do without, True to require it",
                options["name"],
                model_type,
            )
        return _wrap_preset(model, preset, config, options)
    try:
        return _wrap_split(model, split_options, config, options)
    except TrainedCache as error:
        raise ModelSplitError(f"{model_type} cannot be wrapped: {error}") from error
    except ModelSplitError as error:
        if is_required:
            raise NotImplementedError(
                f"there is no preset for {model_type}, and it is not split into layers: {error}. Leave "
                "use_sequential_preset out, register a preset with roundpipe.models.register, or build an "
                "nn.Sequential."
            ) from error
        if has_pretrained(model) or split_options.example_inputs:
            logger.warning("%s: %s is wrapped part by part, for %s", options["name"], model_type, error)
        return None


def _wrap_preset(model: nn.Module, preset: Convert, config: RoundPipeRunConfig, options: dict[str, Any]) -> RoundPipe:
    """A RoundPipe over the preset's nn.Sequential, which must consist of the model's parameters."""
    sequential = preset(model)
    if not isinstance(sequential, nn.Sequential):
        raise ArgumentTypeError(
            f"the preset for {type(model).__name__} must return an nn.Sequential, got {type(sequential).__name__}."
        )
    # A parameter that the preset leaves out would silently not be trained.
    given, made = dict(model.named_parameters()), set(sequential.parameters())
    lost = [key for key, param in given.items() if param not in made]
    if lost or len(given) != len(made):
        raise ConfigError(
            f"the preset for {type(model).__name__} returned an nn.Sequential with other parameters than the model's "
            f"({len(made)} instead of {len(given)}; not in it: {', '.join(lost[:5]) or 'none'}); it must reuse them."
        )
    return RoundPipe._over(sequential, model, user_names(model), model_run_config=config, **options)


def _wrap_split(
    model: nn.Module, split_options: SplitOptions, config: RoundPipeRunConfig, options: dict[str, Any]
) -> RoundPipe:
    """A RoundPipe over the layers that the model is split into. Raises ModelSplitError if it cannot be split."""
    examples = split_options.examples()
    if not examples and not has_pretrained(model):
        raise ModelSplitError("for a model that is not one of transformers, example_inputs must be given")
    if has_pretrained(model):
        warn_of_untested_release()
    # Memory is checked first: the next steps allocate weights that are on the meta device, and run the model. The
    # layers are not known yet and each of them moves by itself, so children come before their parents here.
    _check_memory(list(reversed(list(model.modules()))), options)
    fill_from_meta(model)
    stop_checkpointing(model)
    kernels = GpuKernels(model)
    if split_options.liger_kernels is not False:
        kernels.apply_liger({} if split_options.liger_kernels is True else split_options.liger_kernels)
    with rare_collections():
        split_model = _split(model, kernels, split_options, options["name"])
        layers = nn.Sequential(*split_model.layers)
        if size_bytes(model) >= _WORTH_COLLECTING_BYTES:
            gc.collect()  # copies of modules, which splitting has left in cycles, hold the weights, which move next
    names = user_names(model)
    return RoundPipe._over(layers, model, names, model_run_config=config, split_model=split_model, **options)


def _split(model: nn.Module, kernels: GpuKernels, split_options: SplitOptions, name: str) -> SplitModel:
    """Split the model for the calls of the examples or, if there are none, for a likely one."""
    splitter = ModelSplitter(model, kernels)
    examples = split_options.examples()
    with torch.enable_grad():  # the grad mode is part of a form of call: examples are training calls
        for example in examples:
            splitter.learn((), dict(example))
        if not examples and not splitter.learn_by_guess():
            logger.info("%s: the first call decides how %s is split into layers", name, type(model).__name__)
    logger.info(
        "%s: %s is split into %d layers; pass use_sequential_preset=False to do without, True to insist",
        name,
        type(model).__name__,
        len(splitter.layers),
    )
    return SplitModel(model, splitter)


def _wrap_parts(
    model: nn.Module,
    parts: Sequence[Part],
    override_config: Mapping[nn.Module, RoundPipeRunConfig],
    model_run_config: RoundPipeRunConfig,
    options: dict[str, Any],
    advice: str | None,
) -> AutoRoundPipe:
    """An AutoRoundPipe in which a RoundPipe replaces each part.

    Makes all RoundPipes before it changes the model, so that a failure leaves the model unchanged.
    advice: how to wrap the model better, for the log and for calls that fail.
    """
    optim_dtype, name = options.get("optim_dtype"), options["name"]
    modules = [part.module for part in parts]
    compiled = PartsToCompile(CompileOptions.of(options.get("compile", False)), model)
    _check_memory([*modules, outside_of(model, set(modules))], options)
    made: dict[nn.Module, RoundPipe] = {}
    names = user_names(model)

    def make(part: Part, base: RoundPipeRunConfig = AS_USUAL) -> RoundPipe:
        own = override_config.get(part.module, AS_USUAL)
        made[part.module] = RoundPipe._over(
            part.module,
            part.module,
            names,
            # If the user sets merge_output=False for this module, the model's forward gets packed data, not tensors.
            merges_late=part.config.merge_output is False and own.merge_output is None,
            is_part=True,
            **dict(
                options,
                name=f"{name}.{part.path}",
                model_run_config=own.over(part.config).over(base),
                compile=compiled.whole(part.module) or False,
            ),
        )
        return made[part.module]

    try:
        for part in parts:
            make(part, model_run_config)
        # The loss function of transformers gets whole logits and would be slow on the host.
        plain_loss = loss_function_of(model)
        loss = plain_loss and DeviceLoss(make(Part("loss_function", LossModule(plain_loss), IN_ONE_PIECE)), plain_loss)
        return AutoRoundPipe._of_parts(
            model,
            made,
            loss,
            name=name,
            specs=parse_devices(options.get("devices")),
            optim_dtype=optim_dtype,
            model_run_config=model_run_config,
            **{key: options[key] for key in ("master_bits", "process_group", "staleness") if key in options},
            advice=advice,
        )
    except BaseException:
        for wrapped in made.values():  # closing releases the parameters, so that the user can wrap them again
            wrapped.close()
        raise


def _check_memory(modules: Sequence[nn.Module], options: Mapping[str, Any]) -> None:
    """Raise if training does not fit into host memory. A tensor is counted in the first of `modules` that has it."""
    require_training_memory(
        modules,
        options.get("optim_dtype"),
        to_pin_mode(options.get("pin_model", "alloc")),
        trains=torch.is_grad_enabled(),
        warns_of_async=False,
        master_bits=options.get("master_bits", 32),
    )


def _check(
    use_sequential_preset: object,
    thresholds: Mapping[str, object],
    skip_modules: object,
    override_config: object,
    roundpipe_kwargs: Mapping[str, object],
) -> None:
    """Check the arguments that only wrap_model_to_roundpipe has."""
    if use_sequential_preset not in (None, True, False):
        raise ArgumentTypeError(f"use_sequential_preset must be True, False or None, got {use_sequential_preset!r}.")
    for name, value in thresholds.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(f"{name} must be a number of bytes, an int, got {value!r}.")
        if value < 0:
            raise ConfigError(f"{name} must not be negative, got {value}.")
    if not isinstance(skip_modules, Container):
        raise ArgumentTypeError(f"skip_modules must be a list of modules, got {type(skip_modules).__name__}.")
    if not isinstance(override_config, Mapping):
        raise ArgumentTypeError(
            f"override_config must be a dict from modules to run configs, got {type(override_config).__name__}."
        )
    for module, config in override_config.items():
        if not isinstance(module, nn.Module) or not isinstance(config, RoundPipeRunConfig):
            raise ArgumentTypeError(
                "override_config must map modules of the model to RoundPipeRunConfigs, got "
                f"{type(module).__name__}: {type(config).__name__}."
            )
    CompileOptions.of(roundpipe_kwargs.get("compile", False))
    unknown = sorted(roundpipe_kwargs.keys() - {*_OPTIONS, *_SPLIT_OPTIONS})
    if unknown:
        raise ArgumentTypeError(
            f"wrap_model_to_roundpipe() got an unknown argument {unknown[0]!r}; RoundPipe takes {', '.join(_OPTIONS)}."
        )


def _warn_of_one_microbatch(parts: Sequence[Part], override_config: Mapping[nn.Module, RoundPipeRunConfig]) -> None:
    """Warn of parts that run in one microbatch because the batch dimension of a layer is not the first one."""
    found = {part.path: layer_with_batch_elsewhere(part.module) for part in parts}
    overridden = {part.path for part in parts if override_config.get(part.module, AS_USUAL).num_microbatch is not None}
    paths = [path or "the model" for path, layer in found.items() if layer is not None and path not in overridden]
    if paths:
        logger.warning(
            "%s: run in one microbatch, because %s has its batch in another dimension than the first, in its inputs, "
            "outputs or states; override_config={module: RoundPipeRunConfig(num_microbatch=...)} splits it anyway",
            ", ".join(paths[:3]) + (" and others" if len(paths) > 3 else ""),
            ", ".join(sorted({type(layer).__name__ for layer in found.values() if layer is not None})),
        )


def _warn_of_unused(
    model: nn.Module,
    parts: Sequence[Part],
    skip_modules: Container[nn.Module],
    override_config: Mapping[nn.Module, RoundPipeRunConfig],
) -> None:
    """Warn of entries in skip_modules and override_config that have no effect."""
    for part in parts:
        for path, module in part.module.named_modules(prefix=part.path):
            if module in skip_modules:
                logger.warning(
                    "%r is in skip_modules but inside %r, which is wrapped as a whole, so it is not skipped; skip "
                    "the whole instead",
                    path,
                    part.path or "the model",
                )
    wrapped = {part.module for part in parts}
    paths = {module: path or "the model" for path, module in model.named_modules()}
    for module in override_config:
        if module not in wrapped:
            place = paths.get(module, f"a {type(module).__name__} outside the model")
            logger.warning("override_config of %r is not used: this module does not become a RoundPipe", place)


# Which submodules become RoundPipes. Changes no module and starts nothing.

AS_USUAL = RoundPipeRunConfig()
IN_ONE_PIECE = RoundPipeRunConfig(num_microbatch=1)
UNMERGED = RoundPipeRunConfig(merge_output=False)  # the forward of the whole model gets LateMerge tensors


@dataclasses.dataclass(frozen=True)
class Part:
    """A module that becomes a RoundPipe. `path`: its dotted name in the root; empty for the root itself."""

    path: str
    module: nn.Module
    config: RoundPipeRunConfig = AS_USUAL


@dataclasses.dataclass(frozen=True)
class WrapRules:
    """The options that decide which parts of a model are wrapped, and how. The module docstring states the rules."""

    lower_threshold: int
    upper_threshold: int
    skip_modules: Container[nn.Module]

    def parts(self, root: nn.Module) -> list[Part]:
        """The modules that become RoundPipes: the root alone, or submodules none of which contains another."""
        parts = self._parts(root, "")
        # A parameter can still have two owners after [Note: one owner]: a root such as a ModuleList has no forward.
        shared = shared_parameter(root, parts)
        if shared is not None:
            raise OwnershipError(
                f"{shared[0]!r} and {shared[1]!r} are one parameter, but no module with a forward contains both; a "
                "parameter can be in one RoundPipe only: give each its own parameter, or skip both modules."
            )
        return parts

    def _parts(self, module: nn.Module, path: str) -> list[Part]:
        """The parts in one module. `path`: its dotted name in the root."""
        if module in self.skip_modules:
            return []
        if is_chain(module):
            return [Part(path, module, _config_of(module))] if len(module) else []
        own_bytes, total_bytes = size_bytes(module, recurse=False), size_bytes(module)
        if has_forward(module) and (own_bytes >= self.lower_threshold or total_bytes <= self.upper_threshold):
            return [self._whole(module, path)]
        if isinstance(module, nn.ModuleList):
            parts = self._elements(module, path)
        else:
            parts = [p for name, child in module.named_children() for p in self._parts(child, join(path, name))]
        return self._with_one_owner(module, path, unique(parts))

    def _whole(self, module: nn.Module, path: str) -> Part:
        # In a small module the work of splitting and merging would exceed the gain.
        is_small = size_bytes(module) < self.lower_threshold
        return Part(path, module, IN_ONE_PIECE if is_small else _config_of(module))

    def _elements(self, elements: nn.ModuleList, path: str) -> list[Part]:
        """The parts in a list of modules. An element followed by another RoundPipe passes its outputs on unmerged."""
        children = [(name, child) for name, child in elements._modules.items() if child is not None]
        wrapped = [child not in self.skip_modules and can_run(child) for _, child in children]
        parts = []
        for i, (name, child) in enumerate(children):
            if wrapped[i]:
                is_followed = any(wrapped[i + 1 : i + 2])
                config = _config_of(child)
                parts.append(Part(join(path, name), child, UNMERGED.over(config) if is_followed else config))
            else:
                parts += self._parts(child, join(path, name))
        return parts

    def _with_one_owner(self, module: nn.Module, path: str, parts: list[Part]) -> list[Part]:
        """The given parts of the module, or the module as one part: see [Note: one owner]."""
        shared = shared_parameter(module, parts)
        if shared is None or not has_forward(module):
            return parts  # without a forward the module cannot run as a whole; its parent decides
        first, second = (join(path, name) for name in shared)
        for name, inner in module.named_modules():
            if inner in self.skip_modules:
                raise OwnershipError(
                    f"{first!r} and {second!r} are one parameter, so {path or 'the model'!r} must be wrapped as a "
                    f"whole, but it contains {join(path, name)!r}, which is in skip_modules: skip the modules that "
                    "share the parameter as well, or do not skip this one."
                )
        logger.warning(
            "%s is wrapped as one layer because %r and %r in it are one parameter", path or "the model", first, second
        )
        return [self._whole(module, path)]


def has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def can_run(module: nn.Module) -> bool:
    """Whether the module can be a RoundPipe: it has a forward and is not an empty nn.Sequential."""
    return has_forward(module) and not (is_chain(module) and len(module) == 0)


def _config_of(module: nn.Module) -> RoundPipeRunConfig:
    """One microbatch if the module cannot be split along the first dimension, else the defaults."""
    return AS_USUAL if layer_with_batch_elsewhere(module) is None else IN_ONE_PIECE


def layer_with_batch_elsewhere(module: nn.Module) -> nn.Module | None:
    """The first layer of torch.nn in the module whose batch dimension is not the first one; None if there is none.

    These are recurrent layers, because of their states, and layers made with batch_first=False. The function does not
    look into classes of the user: their inputs and outputs need not be those of the layers inside.
    """
    for layer in list(module) if is_chain(module) else [module]:
        if type(layer).__module__.startswith("torch.nn.") and not is_chain(layer):
            for inner in layer.modules():
                if isinstance(inner, nn.RNNBase) or getattr(inner, "batch_first", True) is False:
                    return layer
    return None


def size_bytes(module: nn.Module, recurse: bool = True) -> int:
    """Bytes of the module's parameters, each counted once."""
    return sum(param.nbytes for param in module.parameters(recurse))


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def unique(parts: list[Part]) -> list[Part]:
    """The parts with each module once. A module in several places merges its outputs if one place needs them merged."""
    found: dict[nn.Module, Part] = {}
    for part in parts:
        first = found.setdefault(part.module, part)
        if first.config.merge_output is False:  # earlier places need no merged outputs; this one may
            found[part.module] = dataclasses.replace(part, path=first.path)
    return list(found.values())


def shared_parameter(root: nn.Module, parts: Collection[Part]) -> tuple[str, str] | None:
    """Two names, in `root`, of a parameter that would have two owners; None if there is no such parameter."""
    wrapped = {part.module for part in parts}
    holders: list[tuple[nn.Module | None, nn.Module]] = [(module, module) for module in wrapped]
    holders += [(None, module) for _, module in bare_modules(root, wrapped)]  # None: outside of all parts
    owners: dict[nn.Parameter, nn.Module | None] = {}
    for owner, module in holders:
        for param in module.parameters(recurse=owner is not None):
            if owners.setdefault(param, owner) is not owner:
                names = [name for name, other in root.named_parameters(remove_duplicate=False) if other is param]
                return names[0], names[-1]
    return None
