"""What a trainer uses besides its model, kept in host memory: the optimizer, loaders of batches, and other models.

Also prepares models that TRL or an earlier trainer has changed, so that they can be wrapped. Knows the classes of
accelerate and the changes of TRL; nothing of batches.

[Note: settings of a step]
An asynchronous step runs while Trainer goes on and its scheduler sets the next learning rate. So the scheduler works on
the param groups of a SteppedOptimizer, and each step gets a copy of their settings as they are when it is issued.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import nn
from transformers.optimization import AdafactorSchedule

from roundpipe.api.proxy import ModelProxy
from roundpipe.errors import ConfigError, UsageError

logger = logging.getLogger("roundpipe")
_HOST = torch.device("cpu")
_Base: Any = object  # for the type checker: the mixin has all methods of the class that it is put before


# The optimizer.


class SteppedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Looks like an optimizer of accelerate; `step()` passes the step of the inner optimizer to the model.

    Has its own param groups: see [Note: settings of a step].
    """

    def __init__(self, optimizer: torch.optim.Optimizer, run_step: Callable[[Callable[[], None]], None]) -> None:
        """`run_step`: runs a function that takes the inner optimizer's step, when the gradients have arrived."""
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True  # accelerate then takes this object as it is
        self._opt_called = False  # a scheduler of torch warns if it is stepped before the optimizer
        self._run_step = run_step
        self._groups = [dict(group) for group in optimizer.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise UsageError("an optimizer of a RoundPipe trainer takes no closure in step().")
        if self.gradient_state.sync_gradients:
            self._opt_called = True
            settings = [_settings_of(group) for group in self._groups]

            def take_step() -> None:
                self._set_inner(settings)
                self.optimizer.step()

            self._run_step(take_step)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # step() sets _opt_called itself

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        self._groups.append(dict(self.optimizer.param_groups[-1]))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: each step clears the gradients that it has used."""

    def state_dict(self) -> dict[str, Any]:
        self.set_inner_settings()
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.take_inner_settings()

    def set_inner_settings(self) -> None:
        """Write the present settings to the inner optimizer. Only while no step runs."""
        self._set_inner([_settings_of(group) for group in self._groups])

    def take_inner_settings(self) -> None:
        """Take over settings that were loaded into the inner optimizer."""
        for group, inner in zip(self._groups, self.optimizer.param_groups, strict=True):
            group.update(_settings_of(inner))

    def _set_inner(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def give_optimizer(
    scheduler: Any, old: torch.optim.Optimizer, new: SteppedOptimizer, *, is_async: bool = False
) -> None:
    """Make a scheduler that the user has passed, and those that it contains, set the rates of another optimizer."""
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    if isinstance(scheduler, AdafactorSchedule):
        if is_async:
            raise ConfigError(
                "AdafactorSchedule reads the state of the optimizer, which an asynchronous step may be changing; use "
                "RoundPipeOptions(is_async=False), or another scheduler."
            )
        scheduler.__class__ = _AdafactorSchedule
    for part in getattr(scheduler, "_schedulers", ()):
        give_optimizer(part, old, new, is_async=is_async)


class _AdafactorSchedule(AdafactorSchedule):
    """Returns the rates of the last step. The base class looks for gradients, which a step has cleared here."""

    def get_lr(self) -> list[Any]:
        inner: Any = self.optimizer.optimizer  # type: ignore[attr-defined]
        firsts = [(group, group["params"][0]) for group in self.optimizer.param_groups]
        rates = [inner._get_lr(group, inner.state[first]) for group, first in firsts if first in inner.state]
        return rates or self.base_lrs


class _Masters(list[nn.Parameter]):
    """The masters in a param group. `in` also finds them by the model's own parameters."""

    def __init__(self, masters: Iterable[nn.Parameter], known: Mapping[int, nn.Parameter]) -> None:
        """`known`: the masters by id of the model's parameter."""
        super().__init__(masters)
        self._known = known

    def __contains__(self, param: object) -> bool:
        wanted = self._known.get(id(param), param)
        return any(master is wanted for master in self)


def put_masters_into(optimizer: torch.optim.Optimizer, model: ModelProxy) -> None:
    """Make an optimizer on the model's own parameters one on their masters."""
    masters = dict(model.optim_named_parameters())
    known = {id(master): master for master in masters.values()}
    frozen = set()
    for name, param in model.named_parameters():
        if name in masters:
            known[id(param)] = masters[name]
        else:
            frozen.add(id(param))
    groups = [[param for param in group["params"] if id(param) not in frozen] for group in optimizer.param_groups]
    unknown = [param for params in groups for param in params if id(param) not in known]
    if unknown:
        raise UsageError(
            f"the optimizer holds a parameter of shape {tuple(unknown[0].shape)} that is none of the "
            "model's. Leave `optimizers` out, pass optimizer_cls_and_kwargs, or build the optimizer on "
            "trainer.model.optim_parameters() and set trainer.optimizer."
        )
    changed = [param for params in groups for param in params if known[id(param)] is not param]
    if changed and optimizer.state:
        raise UsageError(
            "the optimizer has taken steps on the model's own parameters, and RoundPipe steps on their masters; build "
            "it anew, or on trainer.model.optim_parameters()."
        )
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = _Masters((known[id(param)] for param in params), known)


# Loaders and models that accelerate prepares.


@dataclasses.dataclass(frozen=True)
class _OneProcess:
    """The state of a DataLoaderDispatcher that leaves its batches in host memory."""

    process_index: int = 0
    num_processes: int = 1
    device: torch.device = _HOST


def keep_in_host_memory(accelerator: Any, wrapped: Callable[[nn.Module], ModelProxy]) -> None:
    """Make an Accelerator leave models, optimizers and batches in host memory.

    wrapped: wraps a model that only computes outputs, such as a reference, a teacher or a reward model.
    """
    accelerator.device_placement = False
    prepare_data_loader, prepare_model = accelerator.prepare_data_loader, accelerator.prepare_model

    def data_loader(given: Any, device_placement: bool | None = None, **options: Any) -> Any:
        # accelerate chooses the class of a loader by this flag. The metrics of an evaluation depend on the class: a
        # dispatcher knows how many rows the last batch of a stream has.
        is_as_usual = device_placement is None and accelerator.num_processes == 1
        loader = prepare_data_loader(given, device_placement=True if is_as_usual else device_placement, **options)
        if isinstance(loader, DataLoaderDispatcher) and is_as_usual:
            loader.state = _OneProcess()
        elif isinstance(loader, DataLoaderShard):
            loader.device = None
        return loader

    def model(given: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if evaluation_mode and not isinstance(given, ModelProxy):
            given = wrapped(given)
        return prepare_model(given, device_placement=False, evaluation_mode=evaluation_mode)

    accelerator.prepare_data_loader, accelerator.prepare_model = data_loader, model


# Models that TRL has changed.

_FUSED_HEAD = "add_fused_lm_head.<locals>._fused_forward"
_HEAD_IN_FLOAT32 = "cast_forward_to_fp32"


def let_copies_run(model: nn.Module) -> None:
    """Replace the forwards that TRL has given a model and its head by forwards that copies of the model can run.

    TRL's forward computes log-probabilities of the labels without logits if it is called with fused_lm_head=True. It
    has the original's own forward in its closure, so a copy would run the layers of the original. The same holds for
    the forward of a head with cast_lm_head_to_fp32.
    """
    if is_peft_model(model):
        model = model.get_base_model()  # type: ignore[operator]
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Linear) and getattr(vars(head).get("forward"), "__name__", None) == _HEAD_IN_FLOAT32:
        head.forward = types.MethodType(_linear_in_float32, head)  # type: ignore[method-assign]
    fused: Any = getattr(vars(model).get("forward"), "__func__", None)
    if not _is_fused_head(fused) or not _is_over_own_forward(fused, model):
        return

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    _let_copies_run.add(forward)
    model.forward = types.MethodType(forward, model)


_let_copies_run: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # the forwards that were made


def _linear_in_float32(self: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    bias = None if self.bias is None else self.bias.float()
    return nn.functional.linear(hidden_states.float(), self.weight.float(), bias)


def _is_fused_head(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and function.__code__.co_qualname == _FUSED_HEAD


def _is_over_own_forward(fused: Any, model: nn.Module) -> bool:
    """Whether TRL has replaced the forward of the model's class, maybe several times, and not one of the user."""
    while _is_fused_head(fused):
        fused = getattr(inspect.getclosurevars(fused).nonlocals["original_forward"], "__func__", None)
    return fused is type(model).forward or fused in _let_copies_run


def prepare_callbacks(callbacks: Iterable[Any]) -> None:
    """Let callbacks of TRL do to the plain model what they could not do to a wrapper, before the model is wrapped."""
    for callback in callbacks:
        if hasattr(callback, "_initialize_teacher_adapter"):  # PEFTAdapterEMACallback, which adds an adapter
            callback._initialize_teacher_adapter()
        if hasattr(callback, "_unwrap_model"):  # BEMACallback, which makes another model of type(model)
            callback._unwrap_model = _original_model


def _original_model(model: nn.Module) -> nn.Module:
    return model.original_model if isinstance(model, ModelProxy) else model


# Models that an earlier trainer has wrapped.

_of_trainers: weakref.WeakSet[ModelProxy] = weakref.WeakSet()


def note_made(wrapper: ModelProxy) -> None:
    """Note that a trainer has wrapped a model itself, so that a later trainer may take the model over."""
    _of_trainers.add(wrapper)


def take_over(given: Iterable[Any]) -> None:
    """Close the wrappers that earlier trainers have made for the models among the arguments of a trainer."""
    params = {id(param) for model in _models_in(given) for param in model.parameters()}
    for wrapper in list(_of_trainers):
        if not wrapper._engine.group.is_closed and any(id(param) in params for param in wrapper.parameters()):
            logger.warning("%s is closed: another trainer has taken its model over", wrapper.name)
            wrapper.close()


def _models_in(given: Iterable[Any]) -> Iterator[nn.Module]:
    for value in given:
        for model in value if isinstance(value, list | tuple) else (value,):
            if isinstance(model, nn.Module) and not isinstance(model, ModelProxy):
                yield model


# What the trainers of TRL do besides training.

# Trainers that cannot train through RoundPipe, and trainers to use instead.
_REFUSED = {"AsyncGRPOTrainer": "GRPOTrainer", "AsyncDistillationTrainer": "DistillationTrainer"}
# Trainers that compute losses where the model's outputs are: in host memory.
_FOLLOW_OUTPUTS = frozenset(("SFTTrainer", "DPOTrainer", "RewardTrainer"))
_ENTROPY_STATE = ("entropy_coef", "_last_world_entropy")  # of GRPOTrainer with use_adaptive_entropy


class TrlMixin(_Base):  # type: ignore[misc]
    """The part of a trainer that knows of TRL. With a trainer of transformers, its methods do nothing."""

    args: Any
    accelerator: Any
    roundpipe: Any
    _knows_both_forms = False

    @property
    def _class_of_trl(self) -> str | None:
        """The name of the trainer class of TRL that this class is made of; None if there is none."""
        return next((cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith("trl.")), None)

    # Checks.

    def check_class_of_trl(self) -> None:
        """Raise for trainers that cannot train through RoundPipe."""
        name = self._class_of_trl
        if name in _REFUSED:
            raise ConfigError(
                f"{type(self).__name__}: {name} sends weights from GPU memory to vLLM while it trains, and RoundPipe "
                f"keeps them in host memory; use {_REFUSED[name]} of TRL with RoundPipeMixin, which generates on "
                "RoundPipe's devices."
            )

    def refused_of_trl(self) -> dict[str, tuple[Any, str]]:
        """The arguments of TRL that do not go with RoundPipe: whether they are set, and what to use instead."""
        advice = {
            "use_vllm": "use_vllm=False, which generates on RoundPipe's devices: vLLM takes weights from GPU memory",
            "use_transformers_continuous_batching": "the usual generate(), which runs on RoundPipe's devices",
        }
        return {name: (getattr(self.args, name, False), instead) for name, instead in advice.items()}

    def check_device(self) -> None:
        """Raise if the trainer computes with the model's outputs on a device."""
        name = self._computes_on_device()
        if name is not None and self.accelerator.device.type != "cpu":
            raise ConfigError(
                f"{name} of TRL computes on {self.accelerator.device}, but RoundPipe's outputs are in host memory; add "
                "use_cpu=True to the arguments: RoundPipe trains on the GPUs all the same."
            )

    def _computes_on_device(self) -> str | None:
        """What computes with the model's outputs on Trainer's device; None if the outputs decide where."""
        return None if self._class_of_trl in _FOLLOW_OUTPUTS else self._class_of_trl

    def check_reference(self, model: Any) -> None:
        """Raise if the reference is the model without its prompt, for which peft replaces the model's forward."""
        is_reference = self._class_of_trl in ("DPOTrainer", "KTOTrainer") and self.ref_model is None
        if is_reference and is_peft_model(model) and model.active_peft_config.is_prompt_learning:
            raise ConfigError(
                f"{type(self).__name__} has no ref_model and a {model.active_peft_config.peft_type.value} adapter, "
                "without which RoundPipe cannot run the model; pass ref_model, or use LoRA."
            )

    def turn_offloading_off(self) -> None:
        if getattr(self.args, "activation_offloading", False):
            self.args.activation_offloading = False
            logger.info("activation_offloading stays off: RoundPipe keeps activations in host memory by its own plan")

    def warn_of_the_host(self) -> None:
        """Say that DistillationTrainer calls submodules of the model, which then do not run on devices."""
        if self._class_of_trl != "DistillationTrainer":
            return
        name = type(self).__name__
        if self.roundpipe.is_async:
            raise ConfigError(
                f"{name} reads the model's weights itself, while asynchronous steps change them; use "
                "RoundPipeOptions(is_async=False)."
            )
        logger.warning(
            "%s calls the model's backbone and reads the weights of its head instead of calling the model: losses and "
            "gradients are computed on the CPU. RoundPipe's devices only generate.",
            name,
        )

    # Calls of TRL, and what it saves.

    def leave_margin_out(self, model: ModelProxy) -> None:
        """Make the model ignore `margin`, which RewardTrainer passes it with one entry for two rows of the batch."""
        if self._class_of_trl != "RewardTrainer":
            return
        call = model.forward

        @functools.wraps(call)
        def forward(*args: Any, margin: Any = None, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        model.forward = forward

    def learn_both_forms(self, inputs: Any) -> None:
        """Run the model once as SFTTrainer runs it for metrics, between the forward and backward pass of another loss.

        The first call of that form may split the model into other layers, which must not happen at that point.
        """
        makes_two_calls = type(self).compute_loss.__qualname__ == "SFTTrainer.compute_loss" and (
            self.compute_loss_func is not None or self.label_smoother is not None
        )
        if self._knows_both_forms or not makes_two_calls:
            return
        self._knows_both_forms = True
        self.begin_training_step()
        inputs = {**self._prepare_inputs(inputs), "use_cache": False, "fused_lm_head": True}
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        with torch.no_grad(), torch.random.fork_rng(devices=()), self.accelerator.autocast():
            self.model(**inputs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self.wrap_model()  # TRL computes the log-probabilities of the reference in its constructor
        return super()._precompute_ref_logps(*args, **kwargs)

    def write_model_card(self) -> None:
        """Write the card that trainers of TRL write with every checkpoint."""
        if self._class_of_trl is None:
            return
        name = self.args.hub_model_id
        try:
            self.create_model_card(model_name=Path(self.args.output_dir).name if name is None else name.split("/")[-1])
        except (OSError, ValueError) as error:  # a full disk; a locale in which its template cannot be read
            logger.warning("the model card could not be written: %s", error)

    def values_of_trl(self) -> dict[str, Any]:
        """The attributes that a resumed run needs, by name."""
        adapts_entropy = getattr(self, "use_adaptive_entropy", False)
        return {name: getattr(self, name) for name in _ENTROPY_STATE} if adapts_entropy else {}

    def take_values_of_trl(self, saved: Mapping[str, Any]) -> None:
        for name in self.values_of_trl().keys() & saved.keys():
            setattr(self, name, saved[name])
