"""RoundPipe: the wrapped model as the user holds it.

What it shares with AutoRoundPipe is in api.face; here are its calls and the checks of its arguments.
"""

from __future__ import annotations

import copy
import inspect
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from roundpipe.api.engine import ModelEngine
from roundpipe.api.loss_weights import OwnLoss, outputs_alone
from roundpipe.api.proxy import ModelFace
from roundpipe.api.split_model import PreparedCall, SplitModel
from roundpipe.config import ResolvedRunConfig, RoundPipeRunConfig, resolve
from roundpipe.devices import host_pinner, parse_devices, require_device
from roundpipe.errors import ArgumentTypeError, ConfigError, ModelChangedError, UsageError
from roundpipe.microbatch.merge import as_microbatches, is_merging_late, merge_late
from roundpipe.plan import ModelProfile
from roundpipe.runtime.pool import shared_pool
from roundpipe.split.transformers import has_pretrained
from roundpipe.store import PinMode
from roundpipe.store.adopt import refuse_owned
from roundpipe.store.records import user_names
from roundpipe.timeline import Timeline


class RoundPipe(ModelFace):
    """Wraps a model so that it trains with its weights in host memory, pipelined over a pool of devices.

    model: an nn.Sequential becomes one layer per child, anything else one layer.
    optim_dtype: dtype of the optimizer's copies; default each parameter's own.
    name: shown in logs and errors; default the file and line of this call.
    model_run_config: defaults for every call.
    pin_model: "alloc" moves weights into pinned memory, "register" pins them where they are, "off" leaves them.
    devices: the pool, such as ["cuda:0", "cuda:1"] or ["cpu"] * 4; default every GPU, else one virtual CPU device.
    """

    num_layers: int
    model_run_config: RoundPipeRunConfig
    _layers: tuple[nn.Module, ...]
    _merges_late: bool  # inside the forward of an AutoRoundPipe its unmerged outputs are tensors: see LateMerge

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),
        pin_model: Literal["alloc", "register", "off"] = "alloc",
        *,
        devices: Sequence[str | torch.device] | str | None = None,
    ) -> None:
        check_arguments(model, optim_dtype, name, model_run_config)
        names = user_names(model)
        self._open(model, model, names, optim_dtype, name, model_run_config, pin_model, devices=devices)

    @classmethod
    def _over(cls, model: nn.Module, original_model: nn.Module, names: Mapping[int, str], **options: Any) -> RoundPipe:
        """One that runs `model`, which was made of the parameters of `original_model`.

        `names`: see roundpipe.store.records; those of the module the user has wrapped, of which this may be a part.
        """
        wrapped = cls.__new__(cls)
        wrapped._open(model, original_model, names, **options)
        return wrapped

    def _open(
        self,
        model: nn.Module,
        original_model: nn.Module,
        names: Mapping[int, str],
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),
        pin_model: str = "alloc",
        *,
        devices: Sequence[str | torch.device] | str | None = None,
        merges_late: bool = False,
    ) -> None:
        pin_mode = to_pin_mode(pin_model)
        specs = parse_devices(devices)
        layers = _layers_of(model)
        refuse_owned(original_model)
        engine = ModelEngine(
            layers,
            names,
            name=name or call_site(),
            pool=shared_pool(specs),
            optim_dtype=optim_dtype,
            pin_mode=pin_mode,
            pinner=host_pinner(specs),
        )
        super().__init__(
            model,
            original_model,
            engine,
            num_layers=len(layers),
            model_run_config=model_run_config,
            optim_dtype=optim_dtype,
            _layers=tuple(layers),
            _merges_late=merges_late,
        )
        self._learn_of_loss(original_model)

    # Training.

    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(), **kwargs: Any
    ) -> Any:
        """Run the model on a batch; with grad the result can be backpropagated."""
        config = self._resolve(roundpipe_run_config)
        if is_merging_late():
            args, kwargs = as_microbatches((args, kwargs), config.num_microbatch)
        call = self._prepared(args, kwargs, config, is_for_loss_alone=False)
        try:
            outputs = self._engine.forward(call.args, call.kwargs, call.config, call.additions)
        finally:
            self._follow_layers()
        merges_late = self._merges_late and is_merging_late() and roundpipe_run_config.merge_output is None
        return merge_late(outputs) if merges_late else outputs

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] = {},
        label: Any = None,
        loss_fn: Callable[[Any, Any], Sequence[torch.Tensor] | torch.Tensor] = outputs_alone,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),
    ) -> Any:
        """Forward, loss and backward of every microbatch; returns the loss of the batch (and the merged outputs).

        That is the sum of what loss_fn returns, weighed as the run config's loss_reduction says. Without loss_fn a
        model that computes its own loss returns it for the whole batch, see whole_batch_loss.

        Returns when the losses are known; the rest of the backward goes on behind it, and whatever needs the
        gradients waits for them.
        """
        if not isinstance(input_args, tuple | list):
            raise ArgumentTypeError(
                f"input_args must be a tuple, such as (x,) with its comma, got {type(input_args).__name__}."
            )
        if not isinstance(input_kwargs, Mapping):
            raise ArgumentTypeError(f"input_kwargs must be a dict, got {type(input_kwargs).__name__}.")
        for key in input_kwargs:
            if not isinstance(key, str):
                raise ArgumentTypeError(f"input_kwargs: keys must be strings, the names of arguments, got {key!r}.")
        if not callable(loss_fn):
            raise ArgumentTypeError(f"loss_fn must be callable with (outputs, labels), got {type(loss_fn).__name__}.")
        if not isinstance(return_outputs, bool):
            raise ArgumentTypeError(f"return_outputs must be True or False, got {return_outputs!r}.")
        config = self._resolve(run_config)
        call = self._prepared(input_args, dict(input_kwargs), config, is_for_loss_alone=not return_outputs)
        try:
            return self._engine.forward_backward(
                call.args, call.kwargs, label, loss_fn, return_outputs, call.config, call.additions
            )
        finally:
            self._follow_layers()

    def _prepared(
        self, args: Sequence[Any], kwargs: dict[str, Any], config: ResolvedRunConfig, *, is_for_loss_alone: bool
    ) -> PreparedCall:
        split_model = self._engine.split_model
        if split_model is None:
            return PreparedCall(tuple(args), kwargs, config)
        return split_model.prepared(args, kwargs, config, is_for_loss_alone=is_for_loss_alone)

    # Around training.

    def set_original_model(self, original_model: nn.Module) -> None:
        """Let attributes, parameter names and state_dict keys be those of `original_model`."""
        super().set_original_model(original_model)
        self._learn_of_loss(original_model)

    def close(self) -> None:
        """Finish pending work and let go of threads and pinned memory; the weights stay in the wrapped model."""
        super().close()
        if self._engine.split_model is not None:
            self._engine.split_model.take_out()

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's own `generate`, with every forward run on the devices; caches stay there."""
        split_model = self._engine.split_model
        if split_model is None:
            raise UsageError(
                f"{self.name} cannot generate: only models of transformers that are split into layers can. Generate "
                "with the plain model (its .model) after synchronize()."
            )
        self._engine.wait_for_visible_weights()
        return split_model.generating(self.forward).generate(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's own `save_pretrained`, on weights that are up to date."""
        self._engine.synchronize()
        return self._target().save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def _be_split(self, split_model: SplitModel) -> None:
        """The layers are what the original model was split into."""
        self._engine.split_model = split_model
        self._engine.own_loss = split_model.own_loss

    def _learn_of_loss(self, model: nn.Module) -> None:
        """The engine weighs the loss that a model of transformers computes itself by what that is a mean over."""
        self._engine.own_loss = OwnLoss(model) if has_pretrained(model) else None

    def _follow_layers(self) -> None:
        """A call of a form that was not met before may have changed what the model is split into."""
        split_model = self._engine.split_model
        if split_model is not None and list(self._layers) != list(split_model.layers):
            layers = tuple(split_model.layers)
            self.__dict__.update(model=nn.Sequential(*layers), _layers=layers, num_layers=len(layers))

    def __deepcopy__(self, memo: Any) -> Any:
        """Refused, but for a part of an AutoRoundPipe: the copy of a module that contains it is a plain module."""
        if memo and self._engine.is_joined:
            return copy.deepcopy(self.original_model, memo)
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused, but for a part of an AutoRoundPipe, which is pickled as the plain module."""
        if self._engine.is_joined:
            return operator.itemgetter(0), ((self.original_model,),)  # loads without this package
        return super().__reduce_ex__(protocol)

    def timeline(self) -> Timeline:
        """What ran when in the most recent call, measured on the devices."""
        return self._engine.timeline()

    def planning_profile(self) -> ModelProfile:
        """What is known of the layers' sizes and times, for `ModelExecutePlan.auto`."""
        return self._engine.planning_profile()

    def extra_repr(self) -> str:
        return f"name={self.name!r}, layers={self.num_layers}, devices={self._engine.num_devices}"

    def _resolve(self, call: RoundPipeRunConfig) -> ResolvedRunConfig:
        config = resolve(call, self.model_run_config, self._engine.num_devices)
        require_device(config.output_device, "output_device")
        _refuse_other_layers(self.name, self._layers, _layers_of(self.model))
        return config


def check_arguments(model: object, optim_dtype: object, name: object, model_run_config: object) -> None:
    check_options(model, optim_dtype, name, model_run_config)
    assert isinstance(model, nn.Module)
    _refuse_wrapped(model)


def check_options(model: object, optim_dtype: object, name: object, model_run_config: object) -> None:
    if not isinstance(model, nn.Module):
        hint = f" the class {model.__name__}; make one: {model.__name__}(...)" if isinstance(model, type) else ""
        raise ArgumentTypeError(f"RoundPipe wraps an nn.Module, got {type(model).__name__}{hint}.")
    if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
        raise ArgumentTypeError(
            f"optim_dtype must be a floating-point torch.dtype, such as torch.float32, or None, got {optim_dtype!r}."
        )
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a string or None, got {name!r}.")
    if not isinstance(model_run_config, RoundPipeRunConfig):
        raise ArgumentTypeError(
            f"model_run_config must be a RoundPipeRunConfig, got {type(model_run_config).__name__}."
        )


def _refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, ModelFace):
        raise UsageError(f"this model is a {type(model).__name__} already; wrap the plain module (its .model).")
    for path, module in model.named_modules():
        if isinstance(module, ModelFace):
            raise UsageError(
                f"submodule {path!r} of the model is a RoundPipe already ({module.name!r}); build the model of plain "
                "modules (its .model) and wrap the whole."
            )


def to_pin_mode(pin_model: object) -> PinMode:
    try:
        return PinMode(pin_model)
    except ValueError:
        raise ConfigError(f'pin_model must be "alloc", "register" or "off", got {pin_model!r}.') from None


def is_chain(model: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether running its children one after the other is all the model does: a subclass may do something else."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _layers_of(model: nn.Module) -> list[nn.Module]:
    if not is_chain(model):
        return [model]
    layers = list(model)
    if not layers:
        raise ConfigError("the nn.Sequential has no layers; add at least one before wrapping it.")
    return layers


def _refuse_other_layers(name: str, wrapped: Sequence[nn.Module], present: Sequence[nn.Module]) -> None:
    advice = "change the model before wrapping it, or close() and wrap it again."
    if len(wrapped) != len(present):
        raise ModelChangedError(
            f"{name}: the model has {len(present)} layers now but had {len(wrapped)} when it was wrapped; {advice}"
        )
    for layer_id, (then, now) in enumerate(zip(wrapped, present, strict=True)):
        if then is not now:
            raise ModelChangedError(
                f"{name}: layer {layer_id}, a {type(then).__name__}, was replaced after wrapping by another module "
                f"({type(now).__name__}); {advice}"
            )


def call_site() -> str:
    """File and line of the first caller outside this package."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frame = inspect.currentframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(package):
        frame = frame.f_back
    return "RoundPipe" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
