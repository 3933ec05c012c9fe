"""What a trainer does on several machines: rows of each machine, counts and losses of all of them, checks.

Knows the interface of Trainer and the loaders of accelerate; nothing of layers and steps.

[Note: a trainer on several machines] If torchrun has started several processes, each machine trains on its rows of
every batch and the model is wrapped with the process group. A wrapped model weighs by the counts
of all machines and returns the loss of the whole batch, so Trainer's own averaging over processes is off. A loss that
Trainer or TRL computes itself from outputs is a loss of this machine's rows: gradients of all machines are added, so it
is divided by the number of labels or machines of all of them.

[Note: rows of machines] accelerate gives each process other batches of the sampler, and repeats rows so that all
batches are full. Here the machines divide batches instead: with N machines and batches of b rows, the batch of all
machines has the next N * b rows of the sampler, as on one machine with batches of N * b rows, and the last batch may be
shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed
from torch.utils.data import BatchSampler
from transformers import Trainer

from roundpipe.api.proxy import ModelProxy
from roundpipe.api.roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.runtime.run import weights_stay

_HOST = torch.device("cpu")
_Base: Any = object  # for the type checker: the mixin has all methods of the class that it is put before


class MachinesMixin(_Base):  # type: ignore[misc]
    """The part of a trainer that knows of other machines: see [Note: a trainer on several machines]."""

    args: Any
    accelerator: Any
    model: Any
    label_smoother: Any
    compute_loss_func: Any
    compute_metrics: Any
    gather_function: Any
    current_gradient_accumulation_steps: Any
    _given: ModelProxy | None
    is_predicting = False  # while a batch of an evaluation is computed
    _has_count = False  # whether the labels of the present batch were counted

    @property
    def process_group(self) -> Any:
        """The process group of the machines that train together; None on one machine."""
        return distributed.group.WORLD if self.args.world_size > 1 else None

    def summed_over_machines(self, values: torch.Tensor) -> torch.Tensor:
        """The sums of a tensor's values over all machines, in host memory."""
        if self.args.world_size == 1:
            return values
        gathered: torch.Tensor = self.accelerator.gather(values.detach().to(self.args.device).unsqueeze(0))
        return gathered.sum(0).cpu()

    def _number_for_machines(self, number: int, num_machines: int) -> int:
        """The number of microbatches on each machine with which a batch has as many as in a run on `num_machines`."""
        return max(1, number * num_machines // int(self.args.world_size))

    def check_machines(self) -> None:
        """Raise for what does not work on several machines; prepare the arguments for them."""
        args, name = self.args, type(self).__name__
        if args.accelerator_config.dispatch_batches or args.accelerator_config.split_batches:
            raise ConfigError(
                f"{name} gives each of the {args.world_size} machines its rows itself; leave dispatch_batches and "
                "split_batches out of accelerator_config."
            )
        if self._given is not None and self._given._engine.group.machines is None:
            raise ConfigError(
                f"{name} got a model that was wrapped for one machine, but {args.world_size} processes were launched; "
                "pass the plain model, or wrap it with process_group=torch.distributed.group.WORLD."
            )
        if not self._computes_known_loss():
            raise ConfigError(
                f"{name} has its own compute_loss(), and on {args.world_size} machines it cannot be told whether its "
                "loss is that of the whole batch or of this machine's rows; use compute_loss_func, or one machine."
            )
        # The model counts labels over all machines. Trainer would count them once more, and scale the loss.
        args.average_tokens_across_devices = False

    def _computes_known_loss(self) -> bool:
        """Whether it is known how a loss of compute_loss() depends on the rows of other machines."""
        return type(self).compute_loss is Trainer.compute_loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The labels of this machine's batches, which the model adds up; of all machines if Trainer divides by them."""
        number = super()._get_num_items_in_batch(batch_samples, _HOST)
        if isinstance(number, torch.Tensor) and self._computes_loss_itself():
            number = self.summed_over_machines(number)
        self._has_count = number is not None
        return number

    def _computes_loss_itself(self) -> bool:
        """Whether the loss is computed on the host, so that it is one of this machine's rows."""
        is_own = self.label_smoother is None and self.compute_loss_func is None and isinstance(self.model, RoundPipe)
        return not is_own

    def _weight_of_mean(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The weight of a loss that is a mean over this machine's rows, in the mean over the rows of all machines."""
        return torch.tensor(1.0)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loader; on several machines each gets its part of every batch of all machines."""
        loader = super()._get_dataloader(*args, **kwargs)
        is_training = kwargs.get("is_training", False)
        if self.args.world_size > 1 and (is_training or self._evaluates_losses_alone()):
            share_rows(loader, self.args.process_index, self.args.world_size)
        return loader

    def _evaluates_losses_alone(self) -> bool:
        return self.compute_metrics is None or self.args.prediction_loss_only

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.world_size > 1 and self._evaluates_losses_alone():
            self.gather_function = self._gathered_losses
        with weights_stay(self.model._engine.group):
            return super().evaluation_loop(*args, **kwargs)

    def _gathered_losses(self, losses: torch.Tensor) -> torch.Tensor:
        """The losses of all machines, one per row of the batch of all machines, as accelerate gives them on one."""
        state = self.accelerator.gradient_state
        gathered: torch.Tensor = self.accelerator.gather(losses)
        rest = state.active_dataloader.total_dataset_length % len(gathered) if state.end_of_dataloader else 0
        return gathered[:rest] if rest else gathered

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; the loss is that of the whole batch of all machines."""
        self.is_predicting, self._has_count = True, False
        try:
            loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
            if self.args.world_size > 1 and loss is not None and self._computes_loss_itself():
                weight = torch.tensor(1.0) if self._has_count else self._weight_of_mean(inputs)
                total = self.summed_over_machines(torch.stack([loss.detach().cpu() * weight, weight]))
                loss = (total[0] if self._has_count else total[0] / total[1]).to(loss.device)
        finally:
            self.is_predicting = False
        return (loss, *others)

    def plain_training_step(self, inputs: dict[str, Any], num_items: torch.Tensor | int | None) -> torch.Tensor:
        """Let Trainer train on a batch; returns the loss of all machines: see [Note: a trainer on several machines]."""
        if self.args.world_size == 1 or not self._computes_loss_itself():
            loss: torch.Tensor = super().training_step(self.model, inputs, num_items)
            return loss
        num_calls: int = self.current_gradient_accumulation_steps
        if self.compute_loss_func is not None and num_items is None:
            raise ConfigError(
                "compute_loss_func gets no num_items_in_batch, so its loss cannot be that of all machines; add labels "
                "to the rows, or train on one machine."
            )
        if not self.model_accepts_loss_kwargs or num_items is None:
            # A mean over this machine's rows, which Trainer divides by this number.
            self.current_gradient_accumulation_steps = num_calls * self.args.world_size
        try:
            loss = super().training_step(self.model, inputs, num_items)
        finally:
            self.current_gradient_accumulation_steps = num_calls
        return self.summed_over_machines(loss)


# Rows.


def num_labels(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The number of labels that count in a loss of next tokens, in host memory."""
    labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][..., 1:]
    number: torch.Tensor = (labels != -100).sum()
    return number.cpu()


class SharedBatches:
    """Batches of one machine: its part of the rows of each batch of all machines.

    The parts are consecutive, in the order of ranks, and their sizes differ by at most one. If the last batch has fewer
    rows than there are machines, its rows are repeated, so that every machine has one.
    """

    def __init__(self, sampler: BatchSampler, rank: int, size: int) -> None:
        """`sampler`: gives the batches of one machine, of which the batch of all machines has `size`."""
        self.batch_size, self.drop_last = sampler.batch_size, sampler.drop_last
        self.sampler = sampler.sampler  # accelerate sets its epoch
        self._batches, self._rank, self._size = sampler, rank, size

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self._size * self.batch_size)  # type: ignore[arg-type]
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in self.sampler:
            rows.append(row)
            if len(rows) == self._size * self.batch_size:
                yield self._part(rows)
                rows = []
        if rows and not self.drop_last:
            yield self._part(rows)

    def _part(self, rows: list[int]) -> list[int]:
        while len(rows) < self._size:
            rows = [*rows, *rows[: self._size - len(rows)]]
        start, stop = (len(rows) * rank // self._size for rank in (self._rank, self._rank + 1))
        return rows[start:stop]


def share_rows(loader: Any, rank: int, size: int) -> None:
    """Make a loader that accelerate has prepared give this machine's part of every batch of all machines."""
    shard = getattr(loader, "batch_sampler", None)
    plain = getattr(shard, "batch_sampler", None)
    if not isinstance(plain, BatchSampler):
        raise ConfigError(
            f"the data cannot be divided between {size} machines: it must be a dataset with a length and without a "
            f"custom batch sampler, got a loader over {type(getattr(loader, 'dataset', loader)).__name__}."
        )
    assert shard is not None
    shard.batch_sampler = SharedBatches(plain, rank, size)
    shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False  # passes all batches through
