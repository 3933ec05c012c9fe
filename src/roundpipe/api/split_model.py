"""Prepares calls for a model of repeated blocks that is split into layers, or for one that runs as one layer.

The layers receive what the model's own forward would receive. Before a call is split into microbatches, it gets a rule
for inputs whose rows are not samples, and use_cache=False where a cache would be useless.

[Note: generating] While generate() runs, nothing trains and the devices are empty. If all weights fit on one device, a
ResidentForward copies the model's modules onto it and runs the model's own forward there: a token takes one forward, as
in the plain model, and no upload. Values and caches are those of calls that upload layer by layer, and whatever fails
on the device goes on that way.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from roundpipe.api.loss_trials import OwnLoss
from roundpipe.config import ResolvedRunConfig
from roundpipe.devices import Device
from roundpipe.errors import ArgumentTypeError, ModelSplitError, UsageError
from roundpipe.host_facts import available_host_bytes
from roundpipe.microbatch import MicrobatchInputs, RoundPipePackedData
from roundpipe.microbatch.hf_inputs import ModelInputSplit
from roundpipe.module_copy import copy_tree
from roundpipe.runtime.run import WeightScope
from roundpipe.split.caches import CacheContents
from roundpipe.split.determinism import OUT_OF_MEMORY
from roundpipe.split.layers import KEEPS_LOGITS
from roundpipe.split.plan import KeepLogits
from roundpipe.split.splitter import ModelSplitter
from roundpipe.split.transformers import CacheSwitch, caches_in, has_pretrained, is_cache, is_pretrained, move_cache

logger = logging.getLogger("roundpipe")
_WEIGHTS_SHARE = 0.7  # of a device's memory that the weights may take; the rest is for caches and activations
# Settings of modules whose forward draws random numbers in training mode, if they are not 0.
_DRAWS = re.compile(r"drop|jitter|noise")
_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """A call before it is split. `additions`: further keyword arguments that every microbatch gets as they are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: ResolvedRunConfig
    additions: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The parameters of a model's forward that can be given by position."""

    model_type: str
    names: Sequence[str]

    @classmethod
    def of(cls, model: nn.Module) -> _Arguments:
        parameters = inspect.signature(model.forward).parameters
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return cls(type(model).__name__, [name for name, each in parameters.items() if each.kind is by_position])

    def by_name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
        """The call with its positional arguments by name, as far as they have names."""
        by_position = dict(zip(self.names, args, strict=False))
        if twice := by_position.keys() & kwargs.keys():
            raise ArgumentTypeError(
                f"{self.model_type}.forward() got multiple values for argument {min(twice)!r}: one by position and one "
                "by name."
            )
        return tuple(args)[len(self.names) :], {**by_position, **kwargs}


class UnsplitModel:
    """Prepares calls for a module that runs as one layer, if it is a model of transformers or contains one."""

    def __init__(self, module: nn.Module, *, is_part: bool) -> None:
        """is_part: whether the module is a part of the user's model. Its inputs are then no batch of the user."""
        self._cache_switch = CacheSwitch(module)
        self._config = getattr(module, "config", None)
        is_model = not is_part and has_pretrained(module) and hasattr(self._config, "model_type")
        self._arguments = _Arguments.of(module) if is_model else None  # None: the inputs are split like any others

    def prepared(
        self, args: Sequence[Any], kwargs: dict[str, Any], config: ResolvedRunConfig, *, is_for_loss_alone: bool
    ) -> PreparedCall:
        """The call with a rule for splitting it: as for a split model, a list such as `labels` has an entry per row."""
        args = tuple(args)
        if self._arguments is not None and config.split_input is None and not _is_packed((args, kwargs)):
            others, named = self._arguments.by_name(args, kwargs)
            if not others:
                args, kwargs = others, named
                config = dataclasses.replace(config, split_input=ModelInputSplit(self._config))
        return PreparedCall(args, kwargs, config, self._cache_switch.off(args, kwargs))


class SplitModel:
    """A model and the layers that it is split into. A call of a new form can change `layers`."""

    def __init__(self, model: nn.Module, splitter: ModelSplitter) -> None:
        self._model = model
        self._splitter = splitter
        self._config = getattr(model, "config", None)
        self.own_loss = OwnLoss(model, on_the_host=splitter.on_the_host)
        self._arguments = _Arguments.of(model)
        self._cache_switch = CacheSwitch(model)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self._splitter.layers

    @property
    def is_training(self) -> bool:
        return self._model.training

    def take_out(self) -> None:
        """Make the model a plain module again."""
        self._splitter.take_out()

    # Preparing a call before it is split into microbatches.

    def prepared(
        self, args: Sequence[Any], kwargs: dict[str, Any], config: ResolvedRunConfig, *, is_for_loss_alone: bool
    ) -> PreparedCall:
        """The call with its arguments by name and a rule for splitting them. A call that fills a cache is not split.

        is_for_loss_alone: the user gets only the loss, so large logits need not be kept.
        """
        args, kwargs = self._arguments.by_name(args, kwargs)
        if any(map(is_cache, kwargs.values())) or kwargs.get("use_cache") is True:
            return PreparedCall(args, kwargs, dataclasses.replace(config, num_microbatch=1, split_input=_in_one_piece))
        if config.split_input is None and not args and not _is_packed(kwargs):
            config = dataclasses.replace(config, split_input=ModelInputSplit(self._config))
        return PreparedCall(args, kwargs, config, self._additions(kwargs, config, is_for_loss_alone))

    def _additions(self, kwargs: dict[str, Any], config: ResolvedRunConfig, is_for_loss_alone: bool) -> dict[str, Any]:
        """Keyword arguments that each microbatch gets beside its share of the inputs."""
        additions = self._cache_switch.off((), kwargs)
        if config.keep_logits is False:
            additions[KEEPS_LOGITS] = KeepLogits.NEVER
        elif config.keep_logits is None and is_for_loss_alone:
            additions[KEEPS_LOGITS] = KeepLogits.UNLESS_LARGE
        return additions

    # Running the model's own generate().

    def generating(self, forward: Callable[..., Any]) -> Any:
        """A model like the wrapped one that calls `forward`: its own `generate` then runs on the devices."""
        inner = next((m for m in self._model.modules() if is_pretrained(m) and hasattr(m, "generate")), None)
        if inner is None:
            raise UsageError(f"{type(self._model).__name__} has no generate().")

        @functools.wraps(type(inner).forward)
        def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=()):  # sampling then draws the same numbers as in the plain model
                return forward(*args, **kwargs)

        cls: Any = type(inner)
        stand_in = cls.__new__(type(cls.__name__, (cls,), {"forward": run, "__module__": cls.__module__}))
        stand_in.__dict__.update({name: value for name, value in inner.__dict__.items() if name != "forward"})
        return stand_in

    # Making split plans before a call is planned.

    def unknown_calls(self, batches: MicrobatchInputs) -> list[_Call]:
        """The microbatches of a form of call that has no split plan yet."""
        self._splitter.refresh()
        return [call for call in _calls(batches) if not self._splitter.knows(*call)]

    def learn(self, calls: Sequence[_Call]) -> bool:
        """Make split plans for calls like these; returns whether the layers have changed. Only while nothing runs."""
        changed = False
        for call in calls:
            if not self._splitter.knows(*call):  # an earlier call may have had the same form
                try:
                    changed = self._splitter.learn(*call) or changed
                except ModelSplitError as error:
                    error.add_note(
                        "the model cannot be split into layers for this call; wrap it with "
                        "use_sequential_preset=False to run its own forward on the host and its parts on devices"
                    )
                    raise
                except OUT_OF_MEMORY:
                    raise
                except Exception as error:  # of the model's own code
                    self._refuse_without_cache(call, error)
                    raise
        return changed

    def _refuse_without_cache(self, call: _Call, error: Exception) -> None:
        """Raise ModelSplitError if the model raises `error` only because the call is without a cache."""
        args, kwargs = call
        with_cache = {name: value for name, value in kwargs.items() if name != "use_cache"}
        if kwargs.get("use_cache") is not False or not self._splitter.runs_on_the_host(args, with_cache):
            return
        raise ModelSplitError(
            f"the forward of {type(self._model).__name__} raises {error!r} without a cache for this call, and does not "
            "with one. Training needs calls without a cache, because the microbatches and recomputations of a call "
            "would all write to it. The plain model raises the same with use_cache=False. Try inputs of other sizes, "
            "or another num_microbatch."
        ) from error

    def distrust(self, batches: MicrobatchInputs) -> bool:
        """From now on, look up the split plans of such calls by more details of the arguments: their plan was wrong.

        Returns False if there are no more details to look at.
        """
        return True in [self._splitter.distrust(*call) for call in _calls(batches)]


# Generating.


class GeneratingEngine(Protocol):
    """What generating needs of the engine of its model."""

    name: str

    @property
    def weights_read(self) -> tuple[int, int]:
        """What identifies the weights that calls read now."""

    def host_forward(self, forward: Callable[[], Any]) -> Any:
        """Return `forward()`, which reads the parameters in host memory; no other call can begin meanwhile."""


class ResidentForward:
    """The forward of one generate(): see [Note: generating]. Gives the device's memory back when it is left."""

    def __init__(
        self,
        engine: GeneratingEngine,
        model: nn.Module,
        device: Device,
        streamed: Callable[..., Any],
        scope: WeightScope,
        *,
        is_alone: bool,
    ) -> None:
        """model: that of the user, with weights in host memory.

        streamed: the forward that uploads layer by layer. scope: in which layers then stay.
        is_alone: whether no other machine takes part in each forward.
        """
        self._engine, self._model, self._device, self._streamed, self._scope = engine, model, device, streamed, scope
        self._copy: nn.Module | None = None
        self._weights_read: tuple[int, int] | None = None  # what identifies the weights in `_copy`
        self._has_run = False
        self._is_resident = is_alone and _can_be_resident(model) and self._fits()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leave_device()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_resident:
            contents = CacheContents(args, kwargs)
            try:
                outputs = self._engine.host_forward(lambda: self._run(args, kwargs))
            except Exception as error:
                is_for_us = isinstance(error, torch.OutOfMemoryError) or not self._has_run
                if not (is_for_us and contents.restore(error)):
                    raise
                self._is_resident = False
                self._leave_device()
                logger.info(
                    "%s: generate() uploads layer by layer, because the model could not run on %s as a whole: %s",
                    self._engine.name,
                    self._device.name,
                    str(error).split("\n")[0],
                )
            else:
                self._has_run = True
                return outputs
        return self._streamed(*args, **kwargs)

    def _fits(self) -> bool:
        limit = self._device.memory_limit_bytes()
        limit = available_host_bytes() if limit is None else limit
        tensors = {id(t): t.nbytes for t in (*self._model.parameters(), *self._model.buffers())}
        return limit is None or sum(tensors.values()) <= _WEIGHTS_SHARE * limit

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward on the device. Called on the user's thread, while no other call can begin."""
        with self._device.computing():
            newest = self._engine.weights_read
            if self._copy is None or self._weights_read != newest:
                self._leave_device()
                self._scope.drop_images()  # of earlier calls of an evaluation around this generate()
                self._copy, self._weights_read = _on(self._device, self._model), newest
            for cache in caches_in(args, kwargs):
                move_cache(cache, self._device.torch_device)
            args, kwargs = _moved((args, kwargs), self._device.torch_device)
            return _moved(self._copy(*args, **kwargs), torch.device("cpu"))

    def _leave_device(self) -> None:
        if self._copy is not None:
            self._copy = None
            self._device.release_unused()


def _can_be_resident(model: nn.Module) -> bool:
    """Whether a forward of the whole model on a device gives what the layers give: it draws and writes nothing."""
    if not model.training:
        return True
    return not any(module.training and (_draws(module) or _writes_buffers(module)) for module in model.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    settings = vars(module).items()
    return any(isinstance(value, float) and value > 0 and _DRAWS.search(name) for name, value in settings)


def _writes_buffers(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def _on(device: Device, model: nn.Module) -> nn.Module:
    """A copy of the module tree with weights and buffers on a device; it shares everything else with the model."""

    def uploaded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device.torch_device, copy=True)

    def parameter(param: nn.Parameter) -> nn.Parameter:
        # torch chooses some kernels by this flag, also without grad.
        return nn.Parameter(uploaded(param), requires_grad=param.requires_grad)

    copy, _ = copy_tree(model, parameter=parameter, buffer=uploaded)
    return copy


def _moved(values: Any, device: torch.device) -> Any:
    """The same nest with its tensors on a device. Caches stay as they are."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values, is_leaf=is_cache)


# Helpers.


def _in_one_piece(args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any:
    """A split function that makes one microbatch of the whole call."""
    return [args], [kwargs]


def _is_packed(arguments: Any) -> bool:
    return any(map(_is_packed_data, tree_leaves(arguments, is_leaf=_is_packed_data)))


def _is_packed_data(value: Any) -> bool:
    return isinstance(value, RoundPipePackedData)


def _calls(batches: MicrobatchInputs) -> list[_Call]:
    """The arguments of each microbatch, without our own additions and the wrappers of packed data."""
    return [
        (tuple(map(_arrived, args)), {name: _arrived(v) for name, v in kwargs.items() if name != KEEPS_LOGITS})
        for args, kwargs in zip(batches.args, batches.kwargs, strict=True)
    ]


def _arrived(value: Any) -> Any:
    """The tensor inside an `Arriving`, without waiting for it; any other value as it is."""
    arriving = getattr(value, "value", value)
    return arriving if isinstance(arriving, torch.Tensor) else value
