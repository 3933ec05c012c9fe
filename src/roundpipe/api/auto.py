"""AutoRoundPipe: the wrapper of a model whose own forward runs on the host and calls RoundPipes among its submodules.

The RoundPipes inside and the parameters outside of them form one group. The parameters outside have a separate engine
and stay in host memory. Models of transformers are recognised by class names; transformers is never imported.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn

from roundpipe.api.engine import ModelEngine
from roundpipe.api.proxy import ModelProxy, like_the_models, refuse_tracing
from roundpipe.api.roundpipe import RoundPipe, call_site, check_master_bits, check_options, checked_staleness
from roundpipe.config import RoundPipeRunConfig
from roundpipe.devices import DeviceSpec, host_pinner, parse_devices
from roundpipe.errors import ClosedError, ConfigError, UsageError, add_note
from roundpipe.microbatch.merge import merged_now, merging_late
from roundpipe.module_copy import num_hooks
from roundpipe.module_names import user_names
from roundpipe.runtime.pool import shared_pool
from roundpipe.split.transformers import CacheSwitch
from roundpipe.store import PinMode
from roundpipe.store.adopt import refuse_owned

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("roundpipe")


class AutoRoundPipe(ModelProxy):
    """A model whose own forward runs on the CPU and calls the RoundPipes among its submodules.

    Trains with forward(), backward() and step(). One step updates all its parts. `wrap_model_to_roundpipe` makes an
    AutoRoundPipe and replaces submodules by RoundPipes. An AutoRoundPipe made directly wraps no submodule: it uses the
    RoundPipes that the model contains. These must not have been called before.

    model: a module, with or without RoundPipes among its submodules.
    optim_dtype: dtype of the masters of parameters outside of the RoundPipes; default each parameter's own.
    name: shown in logs and errors; default the file and line of this call.
    model_run_config: kept as an attribute; each RoundPipe inside has its own.
    devices: the pool; default that of the RoundPipes inside, else every GPU, else one virtual CPU device.
    process_group: the machines that train this model together, as for `RoundPipe`; the RoundPipes inside need the same.
        Every machine keeps the whole optimizer. The loss that the model returns is that of this machine's part of the
        batch, and gradients are added over all machines: divide a mean by the number of machines.
    staleness: as for `RoundPipe`; counts for the RoundPipes inside, too.
    master_bits: as for `RoundPipe`, of the masters of parameters outside of the RoundPipes.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),
        *,
        devices: Sequence[str | torch.device] | str | None = None,
        process_group: ProcessGroup | None = None,
        staleness: Literal[0, 1] = 1,
        master_bits: Literal[32, 24] = 32,
    ) -> None:
        check_options(model, optim_dtype, name, model_run_config)
        parts = _parts_of(model)
        check_master_bits(outside_of(model, parts), master_bits, optim_dtype)
        specs = parse_devices(devices) if devices is not None or not parts else parts[0]._engine.specs
        for part in parts:
            _refuse_to_join(part, specs)
        refuse_owned(outside_of(model, parts))  # parameters inside the parts have their owner already
        self._open(
            model,
            {part: part for part in parts},
            None,
            name=name or call_site(),
            specs=specs,
            optim_dtype=optim_dtype,
            model_run_config=model_run_config,
            process_group=process_group,
            staleness=staleness,
            master_bits=master_bits,
        )

    @classmethod
    def _of_parts(
        cls, model: nn.Module, parts: Mapping[nn.Module, RoundPipe], loss: DeviceLoss | None, **options: Any
    ) -> AutoRoundPipe:
        """An AutoRoundPipe over RoundPipes that are not in the model yet.

        parts: the RoundPipe that replaces each submodule until the AutoRoundPipe is closed.
        loss: replaces the model's loss function until the AutoRoundPipe is closed.
        """
        wrapped = cls.__new__(cls)
        wrapped._open(model, parts, loss, **options)
        return wrapped

    def _open(
        self,
        model: nn.Module,
        parts: Mapping[nn.Module, RoundPipe],
        loss: DeviceLoss | None,
        *,
        name: str,
        specs: Sequence[DeviceSpec],
        optim_dtype: torch.dtype | None,
        model_run_config: RoundPipeRunConfig,
        process_group: ProcessGroup | None = None,
        staleness: int = 1,
        master_bits: int = 32,
        advice: str | None = None,
    ) -> None:
        """Initialise the wrapper. `advice`: how to wrap the model better, for the log and for calls that fail."""
        if advice is not None:
            logger.warning("%s (%s): %s", name, type(model).__name__, advice)
        engine = ModelEngine(
            [outside_of(model, parts)],
            user_names(model),
            name=name,
            pool=shared_pool(specs),
            optim_dtype=optim_dtype,
            pin_mode=PinMode.OFF,  # parameters outside of the parts are never uploaded
            pinner=host_pinner(specs),
            process_group=process_group,
            staleness=checked_staleness(staleness),
            master_bits=master_bits,
        )
        if engine.group.machines is not None:
            logger.warning(
                "%s: %d machines train this model, and its own forward runs on the host: the loss that it returns is "
                "that of this machine's part of the batch, and gradients are added over the machines. Divide a mean by "
                "%d.",
                name,
                engine.group.machines.share.size,
                engine.group.machines.share.size,
            )
        for part in parts.values():
            _refuse_other_machines(part, engine)
            part._engine.join(engine)
        # The model is changed only after every part has joined: until then a failure leaves it as it was.
        _exchange(model, parts)
        if loss is not None:
            loss.put_into(model)
        for store in engine.group.stores:
            store.is_read_on_host = True  # in all stores: code between the parts may read any parameter
        super().__init__(
            model,
            model,
            engine,
            _parts=dict(parts),
            _loss=loss,
            _cache_switch=CacheSwitch(model),
            _advice=advice,
            optim_dtype=optim_dtype,
            model_run_config=model_run_config,
        )

    # Calls for training and inference.

    @like_the_models
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on the calling thread; RoundPipes inside it run on the devices."""
        refuse_tracing()
        if "roundpipe_run_config" in kwargs:
            raise UsageError(
                "an AutoRoundPipe takes no roundpipe_run_config in a call, since its parts are called one by one; give "
                "model_run_config or override_config to wrap_model_to_roundpipe."
            )
        additions = self._cache_switch.off(args, kwargs)
        for part in self._parts.values():
            part._engine.num_hooks_outside = num_hooks(part.model)
        forward = self._engine.host_forward
        try:
            with merging_late():
                return forward(lambda: merged_now(self.model(*args, **kwargs, **additions)))
        # Errors of these types may come from code on the CPU between the parts. The advice may help to avoid them.
        except (ConfigError, TypeError, RuntimeError) as error:
            if self._advice is not None:
                add_note(error, f"{self.name}: {self._advice}")
            raise

    def forward_backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises UsageError: microbatches cannot be pipelined through a forward that runs on the host."""
        raise UsageError(
            f"{self.name} is an AutoRoundPipe: its forward is Python code on the CPU between several RoundPipes, so "
            "microbatches cannot be pipelined through forward and backward together. Call the model, then backward() "
            "on the loss. To use forward_backward(), pass example_inputs to wrap_model_to_roundpipe, which then splits "
            "the model at its repeated blocks, or write the model as an nn.Sequential."
        )

    def close(self) -> None:
        """Finish pending work, release threads and pinned memory, and make the model a plain module again."""
        super().close()
        _exchange(self.model, {part: module for module, part in self._parts.items()})
        if self._loss is not None:
            self._loss.take_out_of(self.model)

    def extra_repr(self) -> str:
        return f"name={self.name!r}, parts={len(self._parts)}, devices={self._engine.num_devices}"


def _parts_of(model: nn.Module) -> list[RoundPipe]:
    """The RoundPipes among the submodules of a model, each once. Refuses wrappers inside wrappers."""
    if isinstance(model, ModelProxy):
        raise UsageError(f"this model is a {type(model).__name__} already; it is trained as it is.")
    parts: list[RoundPipe] = []
    for path, module in model.named_modules():
        if isinstance(module, AutoRoundPipe):
            raise UsageError(
                f"submodule {path!r} of the model is an AutoRoundPipe already ({module.name!r}); put plain modules and "
                "RoundPipes into the model, and make the whole one AutoRoundPipe."
            )
        if isinstance(module, RoundPipe):
            parts.append(module)
    return parts


def _refuse_to_join(part: RoundPipe, specs: Sequence[DeviceSpec]) -> None:
    """Raise if a RoundPipe cannot become a part of an AutoRoundPipe on these devices."""
    engine = part._engine
    if engine.group.is_closed:
        raise ClosedError(f"{part.name}, a part of the model, was closed; wrap its module again.")
    if engine.is_joined:
        raise UsageError(f"{part.name} is a part of another AutoRoundPipe already; close that one first.")
    if engine.was_used:
        raise UsageError(
            f"{part.name} was called or stepped before the model around it became an AutoRoundPipe; make the "
            "AutoRoundPipe first, so that one step counts for all its parts."
        )
    if list(part._engine.specs) != list(specs):
        raise ConfigError(
            f"{part.name} runs on {_shown(part._engine.specs)}, the model around it on {_shown(specs)}; give all parts "
            "of an AutoRoundPipe the same devices."
        )


def _refuse_other_machines(part: RoundPipe, lead: ModelEngine) -> None:
    """Raise if other machines train a part than train the model around it."""
    given = [None if e.group.machines is None else e.group.machines.process_group for e in (part._engine, lead)]
    if given[0] is not given[1]:
        raise ConfigError(
            f"{part.name}, a part of the model, has process_group={given[0]}, the model around it {given[1]}; give "
            "both the same."
        )


def _shown(specs: Sequence[DeviceSpec]) -> str:
    return ", ".join(f"{spec.kind}:{spec.index}" for spec in specs)


def outside_of(model: nn.Module, parts: Container[nn.Module]) -> nn.Module:
    """A new module with the parameters and buffers that belong to no part.

    It has one child, without submodules, for each bare module: a module of `model` that is neither a part nor inside
    one. Parameters are shared by reference.
    """
    outside = nn.Module()
    for path, module in bare_modules(model, parts):
        shallow = nn.Module()
        shallow.__dict__["_parameters"] = module._parameters
        shallow.__dict__["_buffers"] = dict(module._buffers)  # a copy: code on the host may add buffers at any time
        outside._modules[path] = shallow
    return outside


def _exchange(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each submodule of `model` that is a key of `replacements` by the value of that key."""
    for _, module in list(bare_modules(model, replacements)):
        module._compiled_call_impl = None  # code that the user compiled calls the modules that were there when he did
        for name, child in module._modules.items():
            if child is not None and child in replacements:
                module._modules[name] = replacements[child]


# Running the loss function of a model of transformers on a device.


class LossModule(nn.Module):
    """A loss function as a module, for a RoundPipe to run."""

    def __init__(self, loss_function: Callable[..., Any]) -> None:
        super().__init__()
        self._loss_function = loss_function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._loss_function(*args, **kwargs)


class DeviceLoss:
    """Replaces `model.loss_function`, which is slow on a CPU, by a RoundPipe that computes the loss on a device.

    Not an nn.Module: as one it would become a submodule of the model.
    """

    def __init__(self, run: nn.Module, plain: Callable[..., Any]) -> None:
        self._run, self._plain = run, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return the plain loss function: copies and pickles of the model contain it instead of this object."""
        return copy.deepcopy(self._plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.itemgetter(0), ((self._plain,),)

    def put_into(self, model: Any) -> None:
        model.loss_function = self

    def take_out_of(self, model: Any) -> None:
        if model.loss_function is self:
            model.loss_function = self._plain


def loss_function_of(model: nn.Module) -> Callable[..., Any] | None:
    """The loss function of a model of transformers; None for other models."""
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
        return None
    loss_function = getattr(model, "loss_function", None)
    return loss_function if callable(loss_function) else None


def bare_modules(
    root: nn.Module, wrapped: Container[nn.Module], path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The bare modules with their paths: the root and its submodules, each once, that are in no wrapped module."""
    seen = set() if seen is None else seen
    if root in seen or root in wrapped:
        return
    seen.add(root)
    yield path, root
    for name, child in root.named_children():
        yield from bare_modules(child, wrapped, f"{path}.{name}" if path else name, seen)
