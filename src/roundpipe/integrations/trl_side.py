"""What the trainers of TRL do besides training, for RoundPipe's trainers: checks, calls of the model, what they save.

Knows the names of TRL's classes and arguments. Does not import TRL.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import nn

from roundpipe.api.proxy import ModelProxy
from roundpipe.api.roundpipe import RoundPipe
from roundpipe.config import RoundPipeRunConfig
from roundpipe.devices import parse_devices
from roundpipe.errors import ConfigError
from roundpipe.integrations.vllm_side import HandedOver, client_on
from roundpipe.packed import form_asked_for, take_quantised

logger = logging.getLogger("roundpipe")
_ADAPTED = "_hf_peft_config_loaded"  # of models of transformers with an adapter of their own add_adapter()
_Base: Any = object  # for the type checker: the mixin has all methods of the class that it is put before

# Trainers that cannot train through RoundPipe, and trainers to use instead.
_REFUSED = {"AsyncGRPOTrainer": "GRPOTrainer", "AsyncDistillationTrainer": "DistillationTrainer"}
_ENTROPY_STATE = ("entropy_coef", "_last_world_entropy")  # of GRPOTrainer with use_adaptive_entropy

# Trainers that may generate with a vLLM server, and send it the weights.
_SEND_TO_VLLM = ("GRPOTrainer",)

# These trainers compute with the model's outputs alone. Others read weights of the model, or average them.
_READ_NO_WEIGHTS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")


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
        usual = "the usual generate(), which runs on RoundPipe's devices"
        uses_vllm = getattr(self.args, "use_vllm", False)
        sends = any(cls.__name__ in _SEND_TO_VLLM for cls in type(self).__mro__)
        mode = uses_vllm and sends and self.args.vllm_mode
        return {
            "use_vllm": (uses_vllm and not sends, f"use_vllm=False: {usual}"),
            "vllm_mode": (
                mode if mode != "server" else False,
                f'vllm_mode="server" and `vllm serve` on other GPUs, or use_vllm=False: {usual}',
            ),
            "use_transformers_continuous_batching": (
                getattr(self.args, "use_transformers_continuous_batching", False),
                usual,
            ),
        }

    def take_quantisation(self, model: object, arguments: dict[str, Any]) -> None:
        """Replace a BitsAndBytesConfig by packing the frozen weights when the model is wrapped.

        TRL would load the model with bitsandbytes, onto a GPU. `model`: TRL loads it only if it is a name.
        `arguments`: of the trainer, which change. A model in memory whose library cannot train it is taken now:
        Trainer refuses it. Without an adapter the refusal is right.
        """
        quantizer = getattr(model, "hf_quantizer", None)
        if isinstance(model, nn.Module) and quantizer is not None and not quantizer.is_trainable:
            has_adapter = is_peft_model(model) or getattr(model, _ADAPTED, False)
            if has_adapter or arguments.get("peft_config"):
                take_quantised(model, type(model).__name__)
        if not isinstance(model, str):
            return
        args = arguments.get("args")
        kwargs = getattr(args, "model_init_kwargs", None)
        places = [arguments] + ([kwargs] if isinstance(kwargs, dict) else [])
        for place in places:
            form = form_asked_for(place.get("quantization_config"))
            if form is None:
                continue
            if self.roundpipe.frozen_weights not in (None, form):
                raise ConfigError(
                    f"RoundPipeOptions has frozen_weights={self.roundpipe.frozen_weights!r}, but quantization_config "
                    f"asks for {form!r}; give one of them."
                )
            rest = {name: value for name, value in place.items() if name != "quantization_config"}
            if place is arguments:
                arguments.pop("quantization_config")
            else:
                arguments["args"] = copy.copy(args)  # the arguments are the user's
                arguments["args"].model_init_kwargs = rest
            self.roundpipe = dataclasses.replace(self.roundpipe, frozen_weights=form)
            logger.info("frozen weights are packed as %s, as quantization_config asks", form)

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

    @property
    def reads_weights_between_steps(self) -> bool:
        """Whether a trainer or callback of TRL reads weights without waiting for a step that has returned."""
        is_known = self._class_of_trl is None or self._class_of_trl in _READ_NO_WEIGHTS
        callbacks = self.callback_handler.callbacks
        of_trl = any(cls.__module__.startswith("trl.") for callback in callbacks for cls in type(callback).__mro__)
        return of_trl or not is_known

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

    @property
    def _first_device(self) -> torch.device:
        spec = parse_devices(self.roundpipe.devices)[0]
        return torch.device(spec.kind, spec.index) if spec.kind == "cuda" else torch.device("cpu")

    def client_of_vllm(self) -> contextlib.AbstractContextManager[None]:
        """Make a client of vLLM that TRL constructs inside the block send weights from the first device."""
        return client_on(self._first_device)

    def hand_over_to_vllm(self, model: ModelProxy) -> None:
        """Make TRL send the wrapper's newest weights, if it sends weights to vLLM."""
        generation = getattr(self, "vllm_generation", None)
        if generation is not None:
            generation.model = HandedOver(model, self._first_device)

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

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
        """TRL's log-probabilities of completions; without gradients in one call for all rows.

        TRL gives a batch size where it takes no gradients, and calls the model once for each batch of that size. Here
        each call uploads all weights, so one call takes the microbatches of all of them. It leaves the random generator
        as it is: TRL then shuffles the completions as with the plain model.
        """
        size = options.get("batch_size")
        if size is None or not isinstance(model, RoundPipe):
            return super()._get_per_token_logps_and_entropies(model, *args, **options)
        num_rows = len(args[0])
        number = min(num_rows, -(-num_rows // size) * (model.model_run_config.num_microbatch or 1))
        run = functools.partial(model, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=number))
        with torch.random.fork_rng(devices=()):
            return super()._get_per_token_logps_and_entropies(run, *args, **{**options, "batch_size": None})

    def write_model_card(self) -> None:
        """Write the card that trainers of TRL write with every checkpoint."""
        if self._class_of_trl is None:
            return
        name = self.args.hub_model_id
        try:
            self.create_model_card(model_name=Path(self.args.output_dir).name if name is None else name.split("/")[-1])
            if self.is_world_process_zero():
                self._name_folders_in_card(Path(self.args.output_dir) / "README.md")
        except (OSError, ValueError) as error:  # a full disk; a locale in which its template cannot be read
            logger.warning("the model card could not be written: %s", error)

    def _name_folders_in_card(self, card: Path) -> None:
        """TRL's card calls models that are folders of this machine, and not names on the hub, None."""
        base = getattr(self.model.config, "_name_or_path", "") or "a model of this machine"
        text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", f"`{base}`")
        card.write_text(text.replace('model="None"', f'model="{self.args.output_dir}"'), encoding="utf-8")

    def values_of_trl(self) -> dict[str, Any]:
        """The attributes that a resumed run needs, by name."""
        adapts_entropy = getattr(self, "use_adaptive_entropy", False)
        values = {name: getattr(self, name) for name in _ENTROPY_STATE} if adapts_entropy else {}
        return {**values, **self._completions_in_use()}

    def _completions_in_use(self) -> dict[str, Any]:
        """The completions that further batches train on, and the count of batches that says which they are."""
        if not hasattr(self, "_buffered_inputs"):
            return {}
        is_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {"_step": self._step, "_buffered_inputs": None if is_used_up else self._buffered_inputs}

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
