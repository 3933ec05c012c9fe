"""RoundPipeSFTTrainer and RoundPipeDPOTrainer: trainers of TRL over a RoundPipe.

TRL replaces the forward of a model by one that returns log-probabilities of the labels and builds no logits. RoundPipe
splits the model with this forward into layers, so the losses and metrics are computed by TRL's code.
"""

from __future__ import annotations

import functools
import logging
import types
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import nn
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import use_adapter

from roundpipe.api.proxy import ModelProxy
from roundpipe.api.roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.integrations.machines import num_labels
from roundpipe.integrations.trainer import RoundPipeMixin

logger = logging.getLogger("roundpipe")


class _TrlMixin(RoundPipeMixin):
    """What the trainers of TRL have in common."""

    def wrapped(self, model: nn.Module, *, trains: bool = True) -> ModelProxy:
        _let_copies_run(model.get_base_model() if is_peft_model(model) else model)  # type: ignore[operator]
        return super().wrapped(model, trains=trains)

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.activation_offloading:
            self.args.activation_offloading = False
            logger.info("activation_offloading stays off: RoundPipe keeps activations in host memory by its own plan")
        super().create_accelerator_and_postprocess()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        name = self.args.hub_model_id
        try:
            self.create_model_card(model_name=Path(self.args.output_dir).name if name is None else name.split("/")[-1])
        except (OSError, ValueError) as error:  # a full disk; a locale in which its template cannot be read
            logger.warning("the model card could not be written: %s", error)
        super()._save_checkpoint(model, trial)


class RoundPipeSFTTrainer(_TrlMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer over a RoundPipe. Takes the same arguments, and the option `roundpipe`."""

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.args.label_smoothing_factor:
            raise ConfigError(
                f"{type(self).__name__} does not support label_smoothing_factor={self.args.label_smoothing_factor}: "
                "TRL then runs two different forward passes before one backward pass; use RoundPipeTrainer, or 0."
            )

    def _trains_in_one_call(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """Whether the loss is the mean over tokens, so that forward_backward() of the fused head computes it."""
        is_mean = self.args.loss_type == "nll" and self.label_smoother is None and not self.aux_loss_enabled
        is_own = self.compute_loss_func is None and self._trains_like(SFTTrainer)
        has_count = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return isinstance(self.model, RoundPipe) and is_mean and is_own and has_count

    def _forward_backward(self, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
        """Let TRL compute the loss and its metrics, from outputs whose gradients are computed already."""

        losses: list[torch.Tensor] = []

        def run(**kwargs: Any) -> Any:
            kwargs["num_items_in_batch"] = num_items_in_batch
            with self.accelerator.autocast():
                loss, outputs = self.model.forward_backward(input_kwargs=kwargs, return_outputs=True)
            losses.append(loss)
            return outputs

        self.begin_training_step()
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(run, self._prepare_inputs(inputs), False, num_items_in_batch)
        # On several machines, TRL's loss is that of this machine's rows.
        return loss.detach() if self.args.world_size == 1 else losses[0].detach()

    def _computes_known_loss(self) -> bool:
        return type(self).compute_loss is SFTTrainer.compute_loss

    def _computes_loss_itself(self) -> bool:
        """True unless forward_backward() computes the loss: TRL computes it from the log-probabilities of labels."""
        return self.is_predicting or not self._trains_in_one_call(1)

    def _weight_of_mean(self, inputs: dict[str, Any]) -> torch.Tensor:
        return num_labels(inputs).float()


class RoundPipeDPOTrainer(_TrlMixin, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer over a RoundPipe. The reference model is wrapped, too."""

    ref_model: Any

    def _computes_known_loss(self) -> bool:
        return type(self).compute_loss is DPOTrainer.compute_loss

    def _computes_loss_itself(self) -> bool:
        return True

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        on_device = {
            "ld_alpha": self.args.ld_alpha is not None,
            'loss_type="exo_pair"': "exo_pair" in self.args.loss_type,
        }
        if self.accelerator.device.type != "cpu" and any(on_device.values()):
            named = next(name for name, is_used in on_device.items() if is_used)
            raise ConfigError(
                f"with {named} TRL computes on {self.accelerator.device}, but RoundPipe's outputs are in host memory; "
                "add use_cpu=True to the arguments: RoundPipe trains on the GPUs all the same."
            )

    def wrap_model(self) -> None:
        if self._is_wrapped:
            return
        plain = self.model
        super().wrap_model()
        if self.ref_model is not None:
            self._wrap_reference()
        elif is_peft_model(plain):
            self.ref_model = _AdapterSetAside(plain, self.model)

    def _wrap_reference(self) -> None:
        reference = self.ref_model
        if "_original_forward" in vars(reference):  # accelerate has put autocast around it, which goes to the wrapper
            reference.forward = vars(reference).pop("_original_forward")
        vars(reference).pop("_is_accelerate_prepared", None)
        reference.requires_grad_(False)
        self.ref_model = self.accelerator.prepare_model(self.wrapped(reference, trains=False), evaluation_mode=True)
        self.ref_model.eval()

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        self.wrap_model()  # TRL computes them at the end of its constructor
        return super()._precompute_ref_logps(dataset, name, batch_size)


class _AdapterSetAside:
    """The reference model of a model with an adapter: the same model without it, or with TRL's copy of it."""

    def __init__(self, plain: Any, model: ModelProxy) -> None:
        self._plain, self._model = plain, model
        self._adapter = "ref" if "ref" in plain.peft_config else None

    def __call__(self, **kwargs: Any) -> Any:
        with use_adapter(self._plain, self._adapter):
            return self._model(**kwargs)


def _let_copies_run(model: nn.Module) -> None:
    """Replace TRL's forward of a model by one that copies of the model can run.

    TRL's forward has the original's own forward in its closure, so a copy would run the layers of the original.
    """
    replaced = vars(model).get("forward")
    if not isinstance(replaced, types.MethodType):
        return
    fused = replaced.__func__

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    model.forward = types.MethodType(forward, model)
