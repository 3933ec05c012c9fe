"""RoundPipe: the wrapper of a model that runs as a sequence of layers. Its calls, and the checks of its arguments.

ModelProxy is what RoundPipe and AutoRoundPipe have in common: a wrapper that looks like the module it wraps.
Attributes, parameters and state dicts are those of the wrapped module. Every call goes to the engine.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe.api.engine import ModelEngine
from roundpipe.api.loss_weights import OwnLoss, outputs_alone
from roundpipe.api.split_model import SplitModel
from roundpipe.config import ResolvedRunConfig, RoundPipeRunConfig, resolve
from roundpipe.context import on_optimizer_side
from roundpipe.devices import host_pinner, parse_devices, require_device
from roundpipe.errors import ArgumentTypeError, ConfigError, ModelChangedError, UsageError, call_site
from roundpipe.microbatch.merge import as_microbatches, is_merging_late, merge_late
from roundpipe.plan import ModelProfile
from roundpipe.runtime.pool import shared_pool
from roundpipe.split.transformers import has_pretrained
from roundpipe.stats import StepStats
from roundpipe.store import PinMode
from roundpipe.store.adopt import refuse_owned
from roundpipe.store.records import user_names
from roundpipe.timeline import Timeline

logger = logging.getLogger("roundpipe")

# nn.Module keeps its content in these attributes. The proxy shares them with the wrapped model, so that all names and
# keys are the model's.
_CONTENT = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_post_hooks")
# Attributes that libraries set on the model they call, such as accelerate for autocast. They stay on the proxy: on the
# wrapped model, a forward would replace the code that RoundPipe runs.
_OF_CALLS = frozenset(("forward", "_original_forward", "_is_accelerate_prepared"))


class like_the_models:
    """Decorates `forward` of a wrapper: inspect.signature(wrapper.forward) is then that of the wrapped model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, wrapper: ModelProxy | None, owner: type | None = None) -> Callable[..., Any]:
        return self._function if wrapper is None else _BoundForward(self._function, wrapper)


class _BoundForward(functools.partial[Any]):
    """The `forward` of one wrapper."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].original_model.forward)


class _Rehearsal(TorchFunctionMode):
    """Makes `tensor.copy_(...)` do nothing.

    torch's load_state_dict copies what fits before it raises for what does not. Running it once in this mode raises
    the same errors, hooks included, and changes no tensor.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.copy_ else func(*args, **(kwargs or {}))


class ModelProxy(nn.Module):
    """A module whose attributes are those of the wrapped model, except for the few that are listed here."""

    model: nn.Module  # the module that runs
    original_model: nn.Module  # the module that the user has wrapped
    name: str
    _engine: ModelEngine
    _fixed: frozenset[str]  # names of the proxy's own attributes, which the user cannot set

    def __init__(self, model: nn.Module, original_model: nn.Module, engine: ModelEngine, **attributes: Any) -> None:
        """`attributes`: further attributes of the proxy itself."""
        super().__init__()
        own = self.__dict__
        own.pop("training")  # `training` is read from the wrapped model
        attributes |= {"original_model": original_model, "model": model, "name": engine.name, "_engine": engine}
        own.update(attributes, _fixed=frozenset(attributes))
        own["_finalizer"] = weakref.finalize(self, engine.abort)
        self._share_content_of(original_model)

    def set_original_model(self, original_model: nn.Module) -> None:
        """Take attributes, parameter names and state_dict keys from `original_model`."""
        if not isinstance(original_model, nn.Module):
            raise ArgumentTypeError(f"original_model must be an nn.Module, got {type(original_model).__name__}.")
        self.__dict__["original_model"] = original_model
        self._share_content_of(original_model)

    # Optimizer steps, stopping and closing.

    def step(self, step_fn: Callable[..., object], is_async: bool = True, *args: Any, **kwargs: Any) -> None:
        """Run `step_fn(*args, **kwargs)` on the optimizer thread, over the gradients gathered since the last step."""
        if not callable(step_fn):
            raise ArgumentTypeError(
                "step_fn must be callable, such as a function that calls optimizer.step(), got "
                f"{type(step_fn).__name__}."
            )
        if not isinstance(is_async, bool):
            raise ArgumentTypeError(
                f"is_async must be True or False, got {type(is_async).__name__}; arguments of step_fn come after it."
            )
        self._engine.step(functools.partial(step_fn, *args, **kwargs), is_async)

    def synchronize(self) -> None:
        """Wait for all calls and steps. Parameters then hold the newest weights, `.grad` the gradients not yet used."""
        self._engine.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the optimizer last took them."""
        self._engine.zero_grad()

    def request_stop(self) -> None:
        """Set `stop_requested`, which a training loop checks after each step.

        Safe at any moment, in a signal handler or on another thread: it takes no lock and interrupts nothing.
        """
        self._engine.group.request_stop()

    @property
    def stop_requested(self) -> bool:
        """Whether `request_stop()` was called, on this model or on one that is stepped together with it."""
        return self._engine.group.stop_requested

    def stats(self) -> StepStats:
        """The figures of the last optimizer step that is done; of all finished calls, if no step is done yet.

        Does not wait for the devices: while an asynchronous step is pending, these are the figures of the step before.
        """
        return self._engine.stats()

    def close(self) -> None:
        """Finish pending work and release threads and pinned memory; the weights stay in the wrapped model."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Parameters and the masters of them.

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The masters of the parameters that require grad."""
        for _, param in self.optim_named_parameters():
            yield param

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The names of `named_parameters()` with the masters of the parameters that require grad."""
        return self._engine.named_masters(list(self._own_named_parameters(prefix, True, remove_duplicate)))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters; the masters inside `OptimizerCtx` and step_fn."""
        own = self._own_named_parameters(prefix, recurse, remove_duplicate)
        if on_optimizer_side():
            return self._engine.named_masters(list(own))
        self._engine.show_gradients_without_copies()
        return own

    def _own_named_parameters(
        self, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self._target().named_parameters(prefix, recurse, remove_duplicate)

    # Methods of nn.Module, which make the proxy look like the wrapped model.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the wrapped model, with the weights that calls read now.

        They are one step old while an asynchronous step is pending. Call `synchronize()` first for the newest.
        """
        if not self._engine.group.is_closed:
            self._engine.wait_for_visible_weights()
        return self._target().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the wrapped model and the masters. If it raises, no value has changed."""
        if assign:
            raise UsageError(
                "load_state_dict(assign=True) would replace parameters that live in RoundPipe's memory; load without "
                "assign, or load into the model before wrapping it."
            )
        self._engine.synchronize()
        with _Rehearsal():
            self._target().load_state_dict(state_dict, strict)
        result = self._target().load_state_dict(state_dict, strict)
        self._engine.synchronize()
        return result

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model's own `save_pretrained` on the newest weights."""
        self._engine.synchronize()
        return self._target().save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model's own `push_to_hub` on the newest weights."""
        self._engine.synchronize()
        return self._target().push_to_hub(*args, **kwargs)  # type: ignore[operator]

    def train(self, mode: bool = True) -> Self:
        """Set training mode in the module that runs and in the user's module, which may be two modules."""
        for module in {id(m): m for m in (self.model, self._target())}.values():
            module.train(mode)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load into the wrapped model. Called by load_state_dict() of a module that contains this one."""
        self._target()._load_from_state_dict(*args)

    def __getattr__(self, name: str) -> Any:
        if "original_model" not in self.__dict__ or name in _OF_CALLS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "accepts_loss_kwargs":  # only the constructor of transformers' Trainer asks for it
            raise UsageError(
                f"{self.name} is a {type(self).__name__}, which the Trainer of transformers and the trainers of TRL "
                "cannot train. Use RoundPipeTrainer, RoundPipeSFTTrainer or RoundPipeDPOTrainer of "
                "roundpipe.integrations, or put RoundPipeMixin before your own trainer class."
            )
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Write an attribute of the wrapped model; attributes of the proxy itself cannot be set."""
        if "_finalizer" not in self.__dict__:
            super().__setattr__(name, value)
        elif name in self._fixed:
            raise UsageError(
                f"{name!r} of a {type(self).__name__} cannot be set; wrap the model again with what you want."
            )
        elif name == "forward" and isinstance(getattr(value, "__func__", None), _BoundForward):
            self.__dict__.pop("forward", None)  # accelerate binds what it has unwrapped: forward is the usual one again
        elif name in self.__dict__ or name in _OF_CALLS:
            super().__setattr__(name, value)  # attributes that nn.Module keeps in the proxy, such as hooks
        else:
            setattr(self._target(), name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._fixed:
            raise UsageError(f"{name!r} of a {type(self).__name__} cannot be deleted; close() it to free the model.")
        if name in _OF_CALLS:
            super().__delattr__(name)
        else:
            delattr(self._target(), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._target())})

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Always raise UsageError. nn.Module calls this method in .to(), .cuda(), .half() and the like."""
        raise UsageError(
            "a RoundPipe cannot be moved or cast (.to(), .cuda(), .half(), ...): weights stay in host memory and are "
            "uploaded when needed. Cast the model before wrapping it, choose devices with devices=[...], and the "
            "optimizer's precision with optim_dtype. A Trainer that moves its model is replaced by RoundPipeTrainer or "
            "another class of roundpipe.integrations."
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the model itself for .to("cpu"); raises for any other device or dtype."""
        asked: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, memory_format = asked
        if device == torch.device("cpu") and dtype is None and memory_format is None:
            return self  # the weights are in host memory already
        return self._apply(lambda tensor: tensor)

    def cpu(self) -> Self:
        return self

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        logger.info("%s: gradient checkpointing stays off: RoundPipe recomputes layers by its own plan", self.name)

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> Self:
        raise UsageError(
            f"a {type(self).__name__} cannot be copied; call synchronize(), copy the network itself with "
            "copy.deepcopy(wrapper.original_model), and wrap the copy if it is to be trained."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"a {type(self).__name__} cannot be pickled; call synchronize() and save state_dict(), or the network "
            "itself: torch.save(wrapper.original_model, file)."
        )

    # Private helpers of the proxy.

    def _target(self) -> nn.Module:
        target: nn.Module = self.__dict__["original_model"]
        return target

    def _share_content_of(self, module: nn.Module) -> None:
        """Make this proxy use the dicts in which `module` keeps its parameters, buffers and submodules."""
        for key in _CONTENT:
            self.__dict__[key] = module.__dict__[key]


class RoundPipe(ModelProxy):
    """Wraps a model so that it trains with its weights in host memory, pipelined over a pool of devices.

    model: an nn.Sequential becomes one layer per child, anything else one layer.
    optim_dtype: dtype of the masters; default each parameter's own.
    name: shown in logs and errors; default the file and line of this call.
    model_run_config: defaults for every call.
    pin_model: "alloc" moves weights into pinned memory, "register" pins them where they are, "off" leaves them.
    devices: the pool, such as ["cuda:0", "cuda:1"] or ["cpu"] * 4; default every GPU, else one virtual CPU device.
    """

    num_layers: int
    model_run_config: RoundPipeRunConfig
    _layers: tuple[nn.Module, ...]
    _merges_late: bool  # whether unmerged outputs become LateMerge tensors inside the forward of an AutoRoundPipe

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
        """A RoundPipe that runs `model`, whose parameters are those of `original_model`.

        names: paths of parameters and modules by id, in the module that the user wraps. `original_model` may be a part
            of that module.
        options: see `_open`.
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
        split_model: SplitModel | None = None,
    ) -> None:
        """Initialise the wrapper. `model` is the module that runs, `original_model` the user's; they may differ.

        split_model: the model that the layers of `model` were split from, if there is one.
        """
        pin_mode = to_pin_mode(pin_model)
        specs = parse_devices(devices)
        layers = _layers_of(model)
        refuse_owned(original_model)  # checked before the engine moves any weight
        engine = ModelEngine(
            layers,
            names,
            name=name or call_site(),
            pool=shared_pool(specs),
            optim_dtype=optim_dtype,
            pin_mode=pin_mode,
            pinner=host_pinner(specs),
            split_model=split_model,
            own_loss=_own_loss_of(original_model) if split_model is None else split_model.own_loss,
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

    # Calls for training and inference.

    @like_the_models
    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(), **kwargs: Any
    ) -> Any:
        """Run the model on a batch; with grad the result can be backpropagated."""
        config = self._resolve(roundpipe_run_config)
        if is_merging_late():  # arguments may be LateMerge tensors of other parts: take their microbatches as they are
            args, kwargs = as_microbatches((args, kwargs), config.num_microbatch)
        try:
            outputs = self._engine.forward(args, kwargs, config)
        finally:  # also after a failure: the failed call may have split the model again
            if self._engine.split_model is not None:
                self._follow_layers(self._engine.split_model)
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
        """Run forward, loss and backward of every microbatch; return the loss, or (loss, outputs).

        The loss is the sum of what loss_fn returns for the microbatches, weighed as the run config's loss_reduction
        says. Without loss_fn it is the loss that the model computes itself, for the whole batch (see whole_batch_loss).

        Returns when the losses are known. The rest of the backward pass goes on in the background, and everything that
        needs the gradients waits for them.
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
        try:
            return self._engine.forward_backward(
                tuple(input_args), dict(input_kwargs), label, loss_fn, return_outputs, config
            )
        finally:
            if self._engine.split_model is not None:
                self._follow_layers(self._engine.split_model)

    # Options, generating, closing and inspecting.

    def set_run_config(self, model_run_config: RoundPipeRunConfig) -> None:
        """Use other defaults for all calls from now on."""
        check_options(self.model, None, None, model_run_config)
        self.__dict__["model_run_config"] = model_run_config  # `__setattr__` protects it

    def set_original_model(self, original_model: nn.Module) -> None:
        """Take attributes, parameter names and state_dict keys from `original_model`."""
        super().set_original_model(original_model)
        self._engine.own_loss = _own_loss_of(original_model)

    def close(self) -> None:
        """Finish pending work and release threads and pinned memory; the weights stay in the wrapped model."""
        super().close()
        if self._engine.split_model is not None:
            self._engine.split_model.take_out()

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model's own `generate` with every forward on the devices; caches stay there."""
        split_model = self._engine.split_model
        if split_model is None:
            raise UsageError(
                f"{self.name} cannot generate: only models of transformers that are split into layers can. Generate "
                "with the plain model (its .model) after synchronize()."
            )
        self._engine.wait_for_visible_weights()  # generate() runs code on the host, which may read parameters
        return split_model.generating(self.forward).generate(*args, **kwargs)

    def _follow_layers(self, split_model: SplitModel) -> None:
        """Set this wrapper's layers to those of the split model, which a call of a new form may have changed."""
        layers = tuple(split_model.layers)
        if layers != self._layers:
            # `__setattr__` protects these attributes.
            self.__dict__.update(model=nn.Sequential(*layers), _layers=layers, num_layers=len(layers))

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the plain module if this is a part of an AutoRoundPipe that is being copied; otherwise raise."""
        if memo and self._engine.is_joined:
            return copy.deepcopy(self.original_model, memo)
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the plain module if this is a part of an AutoRoundPipe; otherwise raise."""
        if self._engine.is_joined:
            return operator.itemgetter(0), ((self.original_model,),)  # the pickle loads without this package
        return super().__reduce_ex__(protocol)

    def timeline(self) -> Timeline:
        """When each task of the most recent call ran, as the devices measured it."""
        return self._engine.timeline()

    def planning_profile(self) -> ModelProfile:
        """Sizes and times of the layers as far as they are known, for `ModelExecutePlan.auto`."""
        return self._engine.planning_profile()

    def extra_repr(self) -> str:
        return f"name={self.name!r}, layers={self.num_layers}, devices={self._engine.num_devices}"

    def _resolve(self, call: RoundPipeRunConfig) -> ResolvedRunConfig:
        """Return a call's options: its own, else the model's, else the defaults. Raises if layers were replaced."""
        config = resolve(call, self.model_run_config, self._engine.num_devices)
        if config.output_device.type != "cpu":
            require_device(config.output_device, "output_device")
        # Devices run copies of the layers that were wrapped, so a layer put in later would be ignored.
        present = [self.model] if self._layers[0] is self.model else list(self.model._modules.values())
        if len(present) != len(self._layers) or not all(map(operator.is_, present, self._layers)):
            _raise_other_layers(self.name, self._layers, _layers_of(self.model))
        return config


def _own_loss_of(model: nn.Module) -> OwnLoss | None:
    return OwnLoss(model) if has_pretrained(model) else None


def check_arguments(model: object, optim_dtype: object, name: object, model_run_config: object) -> None:
    """Check the options of a wrapper, and that the model contains no other wrapper."""
    check_options(model, optim_dtype, name, model_run_config)
    assert isinstance(model, nn.Module)
    _refuse_wrapped(model)


def check_options(model: object, optim_dtype: object, name: object, model_run_config: object) -> None:
    """Check the types of the options that all wrappers have."""
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
    if isinstance(model, ModelProxy):
        raise UsageError(f"this model is a {type(model).__name__} already; wrap the plain module (its .model).")
    for path, module in model.named_modules():
        if isinstance(module, ModelProxy):
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
    """Whether the model only runs its children one after the other. A subclass with its own forward does more."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """The children of a plain nn.Sequential; any other model is one layer."""
    if not is_chain(model):
        return [model]
    layers = list(model)
    if not layers:
        raise ConfigError("the nn.Sequential has no layers; add at least one before wrapping it.")
    return layers


def _raise_other_layers(name: str, wrapped: Sequence[nn.Module], present: Sequence[nn.Module]) -> NoReturn:
    advice = "change the model before wrapping it, or close() and wrap it again."
    if len(wrapped) != len(present):
        raise ModelChangedError(
            f"{name}: the model has {len(present)} layers now but had {len(wrapped)} when it was wrapped; {advice}"
        )
    pairs = enumerate(zip(wrapped, present, strict=True))
    layer_id, (then, now) = next((layer_id, pair) for layer_id, pair in pairs if pair[0] is not pair[1])
    raise ModelChangedError(
        f"{name}: layer {layer_id}, a {type(then).__name__}, was replaced after wrapping by another module "
        f"({type(now).__name__}); {advice}"
    )
