"""What the trainers of TRL do besides training, for RoundPipe's trainers: checks, calls of the model, what they save.

Knows the names of TRL's classes and arguments. Does not import TRL.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import nn

from roundpipe.api.proxy import ModelProxy
from roundpipe.errors import ConfigError

logger = logging.getLogger("roundpipe")
_Base: Any = object  # for the type checker: the mixin has all methods of the class that it is put before

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


def prepare_callbacks(callbacks: Iterable[Any]) -> None:
    """Let callbacks of TRL do to the plain model what they could not do to a wrapper, before the model is wrapped."""
    for callback in callbacks:
        if hasattr(callback, "_initialize_teacher_adapter"):  # PEFTAdapterEMACallback, which adds an adapter
            callback._initialize_teacher_adapter()
        if hasattr(callback, "_unwrap_model"):  # BEMACallback, which makes another model of type(model)
            callback._unwrap_model = _original_model


def _original_model(model: nn.Module) -> nn.Module:
    return model.original_model if isinstance(model, ModelProxy) else model
