"""RoundPipe: the wrapped model as the user holds it.

A face only: it looks like the module it wraps and hands every call to its engine.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from roundpipe.api.engine import ModelEngine
from roundpipe.config import ResolvedRunConfig, RoundPipeRunConfig, resolve
from roundpipe.context import on_optimizer_side
from roundpipe.devices import host_pinner, parse_devices
from roundpipe.errors import ArgumentTypeError, ConfigError, UsageError
from roundpipe.plan import ModelProfile
from roundpipe.runtime.pool import shared_pool
from roundpipe.store import PinMode
from roundpipe.store.adoption import refuse_owned
from roundpipe.timeline import Timeline

# Attributes of the face itself; everything else that is written goes to the wrapped model.
_FACE = frozenset(
    {"model", "original_model", "num_layers", "name", "model_run_config", "optim_dtype", "_engine", "_finalizer"}
)
# nn.Module keeps its content in these; the face shares them with the wrapped model, so that all keys are the model's.
_CONTENT = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class RoundPipe(nn.Module):
    """Wraps a model so that it trains with its weights in host memory, pipelined over a pool of devices.

    model: an nn.Sequential becomes one layer per child, anything else one layer.
    optim_dtype: dtype of the optimizer's copies; default each parameter's own.
    name: shown in logs and errors; default the file and line of this call.
    model_run_config: defaults for every call.
    pin_model: "alloc" moves weights into pinned memory, "register" pins them where they are, "off" leaves them.
    devices: the pool, such as ["cuda:0", "cuda:1"] or ["cpu"] * 4; default every GPU, else one virtual CPU device.
    """

    model: nn.Module
    original_model: nn.Module | None
    num_layers: int
    name: str
    model_run_config: RoundPipeRunConfig
    _engine: ModelEngine

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
        _check_arguments(model, optim_dtype, name, model_run_config)
        pin_mode = _to_pin_mode(pin_model)
        specs = parse_devices(devices)
        layers = _layers_of(model)
        refuse_owned(model)
        name = name or _call_site()
        engine = ModelEngine(
            layers,
            {id(param): key for key, param in model.named_parameters()},
            name=name,
            pool=shared_pool(specs),
            optim_dtype=optim_dtype,
            pin_mode=pin_mode,
            pinner=host_pinner(specs),
        )
        super().__init__()
        own = self.__dict__
        own.pop("training")  # read from the wrapped model
        own["original_model"] = None
        own["model"] = model
        own["num_layers"] = len(layers)
        own["name"] = name
        own["model_run_config"] = model_run_config
        own["optim_dtype"] = optim_dtype
        own["_engine"] = engine
        own["_finalizer"] = weakref.finalize(self, engine.abort)
        self._share_content_of(model)

    # Training.

    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(), **kwargs: Any
    ) -> Any:
        """Run the model on a batch; with grad the result can be backpropagated."""
        return self._engine.forward(args, kwargs, self._resolve(roundpipe_run_config))

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] = {},
        label: Any = None,
        loss_fn: Callable[[Any, Any], Sequence[torch.Tensor] | torch.Tensor] = lambda outputs, labels: outputs,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),
    ) -> Any:
        """Forward, loss and backward of every microbatch; returns the sum of the losses (and the merged outputs).

        Returns when the losses are known; the rest of the backward goes on behind it, and whatever needs the
        gradients waits for them.
        """
        if not isinstance(input_args, tuple | list):
            raise ArgumentTypeError(
                f"input_args must be a tuple, such as (x,) with its comma, got {type(input_args).__name__}."
            )
        if not isinstance(input_kwargs, dict):
            raise ArgumentTypeError(f"input_kwargs must be a dict, got {type(input_kwargs).__name__}.")
        if not callable(loss_fn):
            raise ArgumentTypeError(f"loss_fn must be callable with (outputs, labels), got {type(loss_fn).__name__}.")
        config = self._resolve(run_config)
        return self._engine.forward_backward(
            tuple(input_args), input_kwargs, label, loss_fn, bool(return_outputs), config
        )

    def step(self, step_fn: Callable[..., object], is_async: bool = True, *args: Any, **kwargs: Any) -> None:
        """Run `step_fn(*args, **kwargs)` on the optimizer thread, over the gradients gathered since the last step."""
        if not callable(step_fn):
            raise ArgumentTypeError(f"step_fn must be callable, got {type(step_fn).__name__}.")
        self._engine.step(functools.partial(step_fn, *args, **kwargs), bool(is_async))

    def synchronize(self) -> None:
        """Wait for everything. Then parameters are the optimizer's, and `.grad` holds what is not yet consumed."""
        self._engine.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the optimizer last took them."""
        self._engine.zero_grad()

    def close(self) -> None:
        """Finish pending work and let go of threads and pinned memory; the weights stay in the wrapped model."""
        self._engine.close()

    def __enter__(self) -> RoundPipe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # The optimizer's side.

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the parameters that require grad."""
        for _, param in self.optim_named_parameters():
            yield param

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names, as `named_parameters()` gives them, with the optimizer's copies."""
        return self._engine.named_masters(list(self._own_named_parameters(prefix, True, remove_duplicate)))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters; inside `OptimizerCtx` and step_fn the optimizer's copies."""
        own = self._own_named_parameters(prefix, recurse, remove_duplicate)
        return self._engine.named_masters(list(own)) if on_optimizer_side() else own

    def _own_named_parameters(
        self, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self._target().named_parameters(prefix, recurse, remove_duplicate)

    # Looking like the wrapped model.

    def set_original_model(self, original_model: nn.Module) -> None:
        """Let attributes, parameter names and state_dict keys be those of `original_model`."""
        if not isinstance(original_model, nn.Module):
            raise ArgumentTypeError(f"original_model must be an nn.Module, got {type(original_model).__name__}.")
        self.__dict__["original_model"] = original_model
        self._share_content_of(original_model)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's, with its keys. As of the last `synchronize()`."""
        return self._target().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As on the wrapped model; the optimizer's copies follow."""
        if assign:
            raise UsageError(
                "load_state_dict(assign=True) would replace parameters that live in RoundPipe's memory; load without "
                "assign, or load into the model before wrapping it."
            )
        self._engine.synchronize()
        result = self._target().load_state_dict(state_dict, strict)
        self._engine.synchronize()
        return result

    def train(self, mode: bool = True) -> RoundPipe:
        for module in {id(m): m for m in (self.model, self._target())}.values():
            module.train(mode)
        return self

    def timeline(self) -> Timeline:
        """What ran when in the most recent call, measured on the devices."""
        return self._engine.timeline()

    def planning_profile(self) -> ModelProfile:
        """What is known of the layers' sizes and times, for `ModelExecutePlan.auto`."""
        return self._engine.planning_profile()

    def extra_repr(self) -> str:
        return f"name={self.name!r}, layers={self.num_layers}, devices={self._engine.num_devices}"

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        target = own.get("original_model") or own.get("model")
        if target is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_finalizer" not in self.__dict__:
            super().__setattr__(name, value)
        elif name in _FACE:
            raise UsageError(f"{name!r} of a RoundPipe cannot be set; wrap the model again with what you want.")
        else:
            setattr(self._target(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._target(), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._target())})

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RoundPipe:
        raise UsageError(
            "a RoundPipe cannot be moved or cast (.to(), .cuda(), .half(), ...): weights live in host memory and visit "
            "devices by themselves. Cast the model before wrapping it, choose devices with devices=[...], and the "
            "optimizer's precision with optim_dtype."
        )

    def to(self, *args: Any, **kwargs: Any) -> RoundPipe:
        if args == ("cpu",) or args == (torch.device("cpu"),):
            return self
        return self._apply(lambda tensor: tensor)

    def cpu(self) -> RoundPipe:
        return self

    def __deepcopy__(self, memo: Any) -> RoundPipe:
        raise UsageError(
            "a RoundPipe cannot be copied; deepcopy(roundpipe.model) after synchronize() and wrap the copy."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a RoundPipe cannot be pickled; call synchronize() and save state_dict() instead.")

    # Inside.

    def _target(self) -> nn.Module:
        target: nn.Module = self.__dict__["original_model"] or self.__dict__["model"]
        return target

    def _share_content_of(self, module: nn.Module) -> None:
        for key in _CONTENT:
            self.__dict__[key] = module.__dict__[key]

    def _resolve(self, call: RoundPipeRunConfig) -> ResolvedRunConfig:
        return resolve(call, self.model_run_config, self._engine.num_devices)


def _check_arguments(model: object, optim_dtype: object, name: object, model_run_config: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"RoundPipe wraps an nn.Module, got {type(model).__name__}.")
    if isinstance(model, RoundPipe):
        raise UsageError("this model is a RoundPipe already; wrap the plain module (its .model).")
    if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
        raise ArgumentTypeError(f"optim_dtype must be a floating-point torch.dtype or None, got {optim_dtype!r}.")
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a string or None, got {name!r}.")
    if not isinstance(model_run_config, RoundPipeRunConfig):
        raise ArgumentTypeError(
            f"model_run_config must be a RoundPipeRunConfig, got {type(model_run_config).__name__}."
        )


def _to_pin_mode(pin_model: object) -> PinMode:
    try:
        return PinMode(pin_model)
    except ValueError:
        raise ConfigError(f'pin_model must be "alloc", "register" or "off", got {pin_model!r}.') from None


def _layers_of(model: nn.Module) -> list[nn.Module]:
    if not isinstance(model, nn.Sequential):
        return [model]
    layers = list(model)
    if not layers:
        raise ConfigError("the nn.Sequential has no layers; there is nothing to run.")
    return layers


def _call_site() -> str:
    """File and line of the first caller outside this package."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frame = inspect.currentframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(package):
        frame = frame.f_back
    return "RoundPipe" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
