"""Trainers of TRL over a RoundPipe: SFT, DPO, KTO, reward models, GRPO.

TRL replaces the forward of a model by one that returns log-probabilities of the labels and builds no logits. RoundPipe
splits the model with this forward into layers, so the losses and metrics are computed by TRL's code.
"""

from __future__ import annotations

from typing import Any

import torch
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_trainer import SFTTrainer

from roundpipe.api.roundpipe import RoundPipe
from roundpipe.integrations.machines import num_labels
from roundpipe.integrations.trainer import RoundPipeMixin


class RoundPipeSFTTrainer(RoundPipeMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer over a RoundPipe. Takes the same arguments, and the option `roundpipe`."""

    def _trains_in_one_call(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """Whether the loss is the mean over tokens, so that forward_backward() of the fused head computes it."""
        is_mean = self.args.loss_type == "nll" and self.label_smoother is None and not self.aux_loss_enabled
        is_own = self.compute_loss_func is None and self._trains_like(SFTTrainer)
        has_count = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return isinstance(self.model, RoundPipe) and is_mean and is_own and has_count

    def _forward_backward(self, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
        """Let TRL compute the loss and its metrics, from outputs whose gradients are computed already."""
        assert num_items_in_batch is not None
        losses: list[torch.Tensor] = []

        def run(**kwargs: Any) -> Any:
            # As TRL's own loss: a batch without labels has the loss 0, not 0 / 0.
            kwargs["num_items_in_batch"] = torch.as_tensor(num_items_in_batch).clamp(min=1)
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


class RoundPipeDPOTrainer(RoundPipeMixin, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer over a RoundPipe. The reference model is wrapped, too."""

    ref_model: Any

    def _computes_known_loss(self) -> bool:
        return type(self).compute_loss is DPOTrainer.compute_loss

    def _computes_loss_itself(self) -> bool:
        return True


class RoundPipeGRPOTrainer(RoundPipeMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer over a RoundPipe.

    Completions come from the wrapper's generate(), which keeps the weights on a device while nothing trains. The
    reference is the model without its adapter, or, for a full model with beta > 0, a second wrapped model without
    optimizer state.
    """

    ref_model: Any


class RoundPipeKTOTrainer(RoundPipeMixin, KTOTrainer):  # type: ignore[misc]
    """TRL's KTOTrainer over a RoundPipe. The reference model is wrapped, too."""

    ref_model: Any


class RoundPipeRewardTrainer(RoundPipeMixin, RewardTrainer):  # type: ignore[misc]
    """TRL's RewardTrainer over a RoundPipe."""
