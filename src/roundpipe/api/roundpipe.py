"""RoundPipe: the wrapper of a model that runs as a sequence of layers. Its calls, and the checks of its arguments."""

from __future__ import annotations

import copy
import inspect
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeGuard

import torch
from torch import nn

from roundpipe.api.engine import ModelEngine
from roundpipe.api.loss_trials import OwnLoss
from roundpipe.api.loss_weights import outputs_alone
from roundpipe.api.proxy import ModelProxy, like_the_models, refuse_config_among, refuse_tracing
from roundpipe.api.split_model import ResidentForward, SplitModel, UnsplitModel
from roundpipe.compiled import CompileOptions, Compiling
from roundpipe.config import ResolvedRunConfig, RoundPipeRunConfig, resolve
from roundpipe.devices import host_pinner, parse_devices, require_device
from roundpipe.errors import ArgumentTypeError, ConfigError, ModelChangedError, UsageError
from roundpipe.microbatch.merge import as_microbatches, is_merging_late, merge_late
from roundpipe.module_copy import num_hooks
from roundpipe.module_names import user_names
from roundpipe.plan import ModelProfile
from roundpipe.runtime.pool import shared_pool
from roundpipe.runtime.run import weights_stay
from roundpipe.split.transformers import install_capturing_hooks, refuse_lost_captures
from roundpipe.store import PinMode
from roundpipe.store.adopt import refuse_owned
from roundpipe.store.values import MASTER_BITS
from roundpipe.timeline import Timeline

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RoundPipe(ModelProxy):
    """Wraps a model so that it trains with its weights in host memory, pipelined over a pool of devices.

    model: an nn.Sequential becomes one layer per child, anything else one layer.
    optim_dtype: dtype of the masters; default each parameter's own.
    name: shown in logs and errors; default the file and line of this call.
    model_run_config: defaults for every call.
    pin_model: "alloc" moves weights into pinned memory, "register" pins them where they are, "off" leaves them.
    devices: the pool, such as ["cuda:0", "cuda:1"] or ["cpu"] * 4; default every GPU, else one virtual CPU device.
    process_group: the machines that train this model together, such as torch.distributed.group.WORLD. Each runs the
        same script on its part of every batch and holds a part of the optimizer. None: this process trains alone.
    staleness: how many updates old the weights of a call may be after `step(..., is_async=True)`. With 0 the call
        computes with the new weights: the upload of each layer waits for the update of that layer.
    compile: True to run layers compiled by torch.compile, once for all layers of a kind; or a dict of its arguments.
        Layers that cannot be compiled run eagerly and are named in the log.
    master_bits: 24 stores float32 masters of bfloat16 weights with 8 bits beside the weight instead of 16. What an
        optimizer computes is rounded stochastically. Needs optim_dtype=torch.float32; masters of float32 weights stay
        whole.
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
        process_group: ProcessGroup | None = None,
        staleness: Literal[0, 1] = 1,
        compile: bool | Mapping[str, Any] = False,
        master_bits: Literal[32, 24] = 32,
    ) -> None:
        check_arguments(model, optim_dtype, name, model_run_config)
        check_master_bits(model, master_bits, optim_dtype)
        self._open(
            model,
            model,
            user_names(model),
            optim_dtype,
            name,
            model_run_config,
            pin_model,
            devices=devices,
            process_group=process_group,
            staleness=staleness,
            compile=compile,
            master_bits=master_bits,
        )

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
        process_group: ProcessGroup | None = None,
        staleness: int = 1,
        compile: bool | Mapping[str, Any] | CompileOptions = False,
        master_bits: int = 32,
        merges_late: bool = False,
        split_model: SplitModel | None = None,
        is_part: bool = False,
    ) -> None:
        """Initialise the wrapper. `model` is the module that runs, `original_model` the user's; they may differ.

        split_model: the model that the layers of `model` were split from, if there is one.
        is_part: whether the module is a part of a model whose own forward calls it.
        """
        pin_mode = to_pin_mode(pin_model)
        specs = parse_devices(devices)
        layers = _layers_of(model)
        refuse_owned(original_model)  # checked before the engine moves any weight
        if split_model is None:
            install_capturing_hooks(model)
        engine = ModelEngine(
            layers,
            names,
            name=name or call_site(),
            pool=shared_pool(specs),
            optim_dtype=optim_dtype,
            pin_mode=pin_mode,
            pinner=host_pinner(specs),
            split_model=split_model,
            own_loss=OwnLoss(original_model, layers) if split_model is None else split_model.own_loss,
            unsplit_model=UnsplitModel(model, is_part=is_part) if split_model is None and not is_chain(model) else None,
            process_group=process_group,
            staleness=checked_staleness(staleness),
            master_bits=master_bits,
            compiling=Compiling.of(CompileOptions.of(compile), original_model),
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
        refuse_tracing()
        refuse_config_among(kwargs)
        config = self._resolve(roundpipe_run_config)
        if self._engine.is_joined:
            self._refuse_hooks_of_the_call(config)
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
        refuse_tracing()
        if not isinstance(input_args, tuple | list):
            raise ArgumentTypeError(
                f"input_args must be a tuple, such as (x,) with its comma, got {type(input_args).__name__}; arguments "
                "by name, such as a batch in a dict, are input_kwargs=batch."
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
        self._engine.losses.own = OwnLoss(original_model, self._layers)

    def close(self) -> None:
        """Finish pending work and release threads and pinned memory; the weights stay in the wrapped model."""
        super().close()
        if self._engine.split_model is not None:
            self._engine.split_model.take_out()

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model's own `generate` with every forward on the devices; caches stay there.

        Weights stay on the devices, too, until `generate` returns: all on one device if they fit there, else the layers
        that fit. Code that runs meanwhile must not write weights through `.data`.
        """
        split_model = self._engine.split_model
        if split_model is None:
            raise UsageError(
                f"{self.name} cannot generate: only models of transformers that are split into layers can. Generate "
                "with the plain model (its .model) after synchronize()."
            )
        self._engine.wait_for_visible_weights()  # generate() runs code on the host, which may read parameters
        engine, device = self._engine, shared_pool(self._engine.specs).devices()[0]
        is_alone = engine.group.machines is None
        with (
            weights_stay(engine.group) as scope,
            ResidentForward(engine, self.original_model, device, self.forward, scope, is_alone=is_alone) as forward,
        ):
            return split_model.generating(forward).generate(*args, **kwargs)

    def _refuse_hooks_of_the_call(self, config: ResolvedRunConfig) -> None:
        """Raise if the forward of the model around this part has set up hooks for this call that cannot work here."""
        refuse_lost_captures(self.model)
        outside = self._engine.num_hooks_outside
        if config.num_microbatch > 1 and outside is not None and num_hooks(self.model) != outside:
            raise UsageError(
                f"{self.name}: the forward of the model around this part has registered hooks on it for this call, as "
                "adapters with settings for each row do (aLoRA, adapter_names). They are made for the whole batch, and "
                f"the part runs in {config.num_microbatch} microbatches. Wrap the model with "
                "model_run_config=RoundPipeRunConfig(num_microbatch=1)."
            )

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


def checked_staleness(staleness: object) -> int:
    """Return the option `staleness`, or raise if it is not 0 or 1."""
    if isinstance(staleness, bool) or not isinstance(staleness, int):
        raise ArgumentTypeError(f"staleness must be 0 or 1, got {staleness!r} of type {type(staleness).__name__}.")
    if staleness not in (0, 1):
        raise ConfigError(
            f"staleness must be 0 (calls compute with the newest weights) or 1 (after an asynchronous step, with those "
            f"before it), got {staleness}."
        )
    return staleness


def check_master_bits(model: nn.Module, master_bits: object, optim_dtype: torch.dtype | None) -> None:
    """Raise unless the masters of the model can have so many bits."""
    if isinstance(master_bits, bool) or not isinstance(master_bits, int):
        raise ArgumentTypeError(
            f"master_bits must be 32 or 24, got {master_bits!r} of type {type(master_bits).__name__}."
        )
    if master_bits not in MASTER_BITS:
        raise ConfigError(f"master_bits must be 32 (masters are float32) or 24 (with rounding), got {master_bits}.")
    if master_bits == 32:
        return
    if optim_dtype is not torch.float32:
        raise ConfigError(
            f"master_bits={master_bits} is for float32 masters of bfloat16 weights, and optim_dtype is {optim_dtype}; "
            "give optim_dtype=torch.float32, too."
        )
    trained = {param.dtype: name for name, param in reversed(list(model.named_parameters())) if param.requires_grad}
    if torch.float16 in trained or (trained and torch.bfloat16 not in trained):
        dtype = torch.float16 if torch.float16 in trained else next(iter(trained))
        raise ConfigError(
            f"master_bits={master_bits} is for float32 masters of bfloat16 weights: the master is the weight and 8 "
            f"bits more. The parameter {trained[dtype]!r}, which trains, is {dtype}. Load the model in torch.bfloat16, "
            "or leave master_bits out."
        )


def _refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, ModelProxy):
        raise UsageError(
            f"this model is a {type(model).__name__} already; use it as it is, or close() it and wrap the plain "
            "module, its .original_model."
        )
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


def call_site() -> str:
    """File and line of the first caller outside this package."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frame = inspect.currentframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(package):
        frame = frame.f_back
    return "RoundPipe" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
