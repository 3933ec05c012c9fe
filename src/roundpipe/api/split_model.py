"""Prepares calls for a model of repeated blocks that is split into layers.

The layers receive what the model's own forward would receive. Before a call is split into microbatches, it gets a rule
for inputs whose rows are not samples, and use_cache=False where a cache would be useless. Knows no device.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.api.loss_trials import OwnLoss
from roundpipe.config import ResolvedRunConfig
from roundpipe.errors import ArgumentTypeError, ModelSplitError, UsageError
from roundpipe.microbatch import MicrobatchInputs, RoundPipePackedData
from roundpipe.microbatch.hf_inputs import ModelInputSplit
from roundpipe.split.layers import KEEPS_LOGITS
from roundpipe.split.plan import KeepLogits
from roundpipe.split.splitter import ModelSplitter
from roundpipe.split.transformers import CacheSwitch, is_cache, is_pretrained

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """A call before it is split. `additions`: further keyword arguments that every microbatch gets as they are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: ResolvedRunConfig
    additions: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class SplitModel:
    """A model and the layers that it is split into. A call of a new form can change `layers`."""

    def __init__(self, model: nn.Module, splitter: ModelSplitter) -> None:
        self._model = model
        self._splitter = splitter
        self._config = getattr(model, "config", None)
        self.own_loss = OwnLoss(model, on_the_host=splitter.on_the_host)
        parameters = inspect.signature(model.forward).parameters
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._parameters = [name for name, parameter in parameters.items() if parameter.kind is by_position]
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
        by_position = dict(zip(self._parameters, args, strict=False))
        if twice := by_position.keys() & kwargs.keys():
            raise ArgumentTypeError(
                f"{type(self._model).__name__}.forward() got multiple values for argument {min(twice)!r}: one by "
                "position and one by name."
            )
        kwargs = {**by_position, **kwargs}
        args = tuple(args)[len(self._parameters) :]
        if any(map(is_cache, kwargs.values())) or kwargs.get("use_cache") is True:
            return PreparedCall(args, kwargs, dataclasses.replace(config, num_microbatch=1, split_input=_in_one_piece))
        is_packed = any(isinstance(leaf, RoundPipePackedData) for leaf in (*args, *kwargs.values()))
        if config.split_input is None and not args and not is_packed:
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

    def unknown_calls(self, batches: MicrobatchInputs) -> list[_Arguments]:
        """The microbatches of a form of call that has no split plan yet."""
        self._splitter.refresh()
        return [call for call in _calls(batches) if not self._splitter.knows(*call)]

    def learn(self, calls: Sequence[_Arguments]) -> bool:
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
        return changed

    def distrust(self, batches: MicrobatchInputs) -> bool:
        """From now on, look up the split plans of such calls by more details of the arguments: their plan was wrong.

        Returns False if there are no more details to look at.
        """
        return True in [self._splitter.distrust(*call) for call in _calls(batches)]


def _in_one_piece(args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any:
    """A split function that makes one microbatch of the whole call."""
    return [args], [kwargs]


def _calls(batches: MicrobatchInputs) -> list[_Arguments]:
    """The arguments of each microbatch, without our own additions and the wrappers of packed data."""
    return [
        (tuple(map(_arrived, args)), {name: _arrived(v) for name, v in kwargs.items() if name != KEEPS_LOGITS})
        for args, kwargs in zip(batches.args, batches.kwargs, strict=True)
    ]


def _arrived(value: Any) -> Any:
    """The tensor inside an `Arriving`, without waiting for it; any other value as it is."""
    arriving = getattr(value, "value", value)
    return arriving if isinstance(arriving, torch.Tensor) else value
