"""ModelProxy: what RoundPipe and AutoRoundPipe have in common, a wrapper that looks like the module it wraps.

Attributes, parameters and state dicts are those of the wrapped module. Every call goes to the engine.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe.api.engine import ModelEngine
from roundpipe.config import RoundPipeRunConfig
from roundpipe.context import on_optimizer_side
from roundpipe.errors import ArgumentTypeError, UsageError
from roundpipe.packed import plain_state
from roundpipe.stats import StepStats

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


def refuse_tracing() -> None:
    """Raise UsageError if torch.compile traces the code that called a wrapper. A wrapper's calls begin with it."""
    if torch.compiler.is_dynamo_compiling():
        torch.compiler.disable(_refuse_compiling)()  # disabled: it runs, and raises, instead of being traced


def refuse_config_among(kwargs: Mapping[str, Any]) -> None:
    """Raise ArgumentTypeError for a run config among the model's arguments: a model that takes any would ignore it."""
    for name, value in kwargs.items():
        if isinstance(value, RoundPipeRunConfig):
            raise ArgumentTypeError(
                f"{name}= is passed on to the model; a call of the model takes its RoundPipeRunConfig as "
                "roundpipe_run_config=, and forward_backward() as run_config=."
            )


def _refuse_compiling() -> NoReturn:
    raise UsageError(
        "torch.compile cannot trace a wrapped model or code that calls it: its layers run on threads of their devices. "
        "For compiled layers wrap the plain module with compile=True; compile only code that does not call the model."
    )


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
        """Run `step_fn(*args, **kwargs)` on the optimizer thread, over the gradients gathered since the last step.

        is_async: whether to return at once. Calls after the step then compute with weights that are one step old; with
            staleness=0 with the new ones, each layer as soon as it is updated.
        """
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

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter that `named_parameters()` has under this name: the master inside `OptimizerCtx` and step_fn."""
        owner, name = self._owner_and_name(target)
        param: nn.Parameter = owner.get_parameter(name)
        if on_optimizer_side() and param.requires_grad:
            return next(self._engine.named_masters([(target, param)]))[1]
        self._engine.show_gradients_without_copies()
        return param

    # Methods of nn.Module, which make the proxy look like the wrapped model.

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped model: isinstance(wrapper, Model) is True, beside isinstance(wrapper, RoundPipe).

        Code asks for classes to decide what to compute: TRL calls a PeftModel without its adapter for a reference, and
        forwards of hybrid models pass each kind of block other arguments.
        """
        return type(self.__dict__.get("original_model", self))

    def _get_name(self) -> str:
        return type(self).__name__

    # The base class walks along attributes. Those of a proxy hide submodules of the same name, such as `model`.

    def get_submodule(self, target: str) -> nn.Module:
        module: nn.Module = self
        for name in target.split(".") if target else ():
            module = _wrapped_in(module).get_submodule(name)
        return module

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        owner, name = self._owner_and_name(target)
        owner.set_submodule(name, module, strict)

    def get_buffer(self, target: str) -> torch.Tensor:
        owner, name = self._owner_and_name(target)
        buffer: torch.Tensor = owner.get_buffer(name)
        return buffer

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
        """Run the wrapped model's own `save_pretrained` on the newest weights; packed ones are written expanded."""
        self._engine.synchronize()
        target = self._target()
        if kwargs.get("state_dict") is None and not hasattr(target, "peft_config"):  # PEFT writes the adapter alone
            expanded = plain_state(target)
            kwargs |= {} if expanded is None else {"state_dict": expanded}
        return target.save_pretrained(*args, **kwargs)  # type: ignore[operator]

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

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raise UsageError: layers are compiled by the wrapper's argument `compile`."""
        _refuse_compiling()

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing but log the reason."""
        logger.info("%s: gradient checkpointing stays off: RoundPipe recomputes layers by its own plan", self.name)

    activation_checkpointing_enable = gradient_checkpointing_enable  # the name since transformers 5.23

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

    def _owner_and_name(self, target: str) -> tuple[nn.Module, str]:
        """The plain module that has a submodule, parameter or buffer, given its dotted name, and its last name."""
        path, _, name = target.rpartition(".")
        return _wrapped_in(self.get_submodule(path)), name

    def _target(self) -> nn.Module:
        target: nn.Module = self.__dict__["original_model"]
        return target

    def _share_content_of(self, module: nn.Module) -> None:
        """Make this proxy use the dicts in which `module` keeps its parameters, buffers and submodules."""
        for key in _CONTENT:
            self.__dict__[key] = module.__dict__[key]


def _wrapped_in(module: nn.Module) -> nn.Module:
    """The module that a proxy wraps; any other module as it is."""
    return module._target() if isinstance(module, ModelProxy) else module
