"""The demo's three training loops: plain PyTorch, RoundPipe exact and RoundPipe async.

Knows training loops, not reports or pictures. All three use the same batches, microbatches, loss, torch optimizer and
learning rates, so only the execution differs.
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.corpus import Batch
from demo.meter import Meter
from roundpipe import RoundPipe, RoundPipeRunConfig

PEAK_LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)  # common for language models
WARM_UP_SHARE = 0.1  # fraction of all steps
MAX_GRAD_NORM = 1.0


class StepMode(enum.Enum):
    """Exact: an iteration computes with the update of the previous one. Async: with weights one update old."""

    EXACT = "exact"
    ASYNC = "async"


@dataclass(frozen=True)
class Task:
    """The batches, loss and optimizer that all runs share."""

    batches: list[Batch]
    num_microbatch: int

    def loss_fn(self, scores: Tensor, next_byte_ids: Tensor) -> Tensor:
        """Mean cross-entropy over a microbatch."""
        return functional.cross_entropy(scores.flatten(0, 1), next_byte_ids.flatten())

    def step_fn(self, parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
        """A step function: clips gradients, updates, advances the learning rate and clears gradients."""
        optimizer = torch.optim.AdamW(parameters, lr=PEAK_LEARNING_RATE, betas=BETAS, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)

        def step() -> None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        return step

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, then cosine decay to a tenth."""
        warm_up = min(1.0, (step + 1) / max(1.0, WARM_UP_SHARE * len(self.batches)))
        return warm_up * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / len(self.batches))))


def plain_gradients(model: nn.Module, task: Task, batch: Batch, device: torch.device) -> Tensor:
    """Forward and backward of one batch in plain PyTorch, microbatch by microbatch; returns the batch's loss."""
    losses = []
    inputs = batch.byte_ids.to(device).tensor_split(task.num_microbatch)
    labels = batch.next_byte_ids.to(device).tensor_split(task.num_microbatch)
    for byte_ids, next_byte_ids in zip(inputs, labels, strict=True):
        share = len(byte_ids) / len(batch.byte_ids)
        loss = task.loss_fn(model(byte_ids), next_byte_ids) * share
        loss.backward()
        losses.append(loss.detach().cpu())
    return sum(losses[1:], losses[0])


def train_plain(model: nn.Module, task: Task, device: torch.device) -> Meter:
    """Train in plain PyTorch: the reference for the exact run."""
    model.to(device)
    step = task.step_fn(model.parameters())
    with Meter("plain PyTorch", len(task.batches)) as meter:
        for batch in task.batches:
            loss = plain_gradients(model, task, batch, device)
            step()
            meter.record(loss, batch.byte_ids.numel())
    return meter


def plain_stale_losses(model: nn.Module, task: Task, num_step: int, device: torch.device) -> list[float]:
    """Losses of a plain loop that computes gradients with weights one update old: the reference for the async run."""
    model.to(device)
    old_model = copy.deepcopy(model)
    step = task.step_fn(model.parameters())
    losses = []
    for batch in task.batches[:num_step]:
        losses.append(float(plain_gradients(old_model, task, batch, device)))
        for parameter, old in zip(model.parameters(), old_model.parameters(), strict=True):
            parameter.grad, old.grad = old.grad, None
            old.data.copy_(parameter.data)  # includes the previous update, not the one below
        step()
    return losses


def train_roundpipe(model: RoundPipe, task: Task, mode: StepMode) -> Meter:
    """Train with RoundPipe on a pool of devices."""
    step = task.step_fn(model.optim_parameters())
    config = RoundPipeRunConfig(num_microbatch=task.num_microbatch, loss_reduction="mean")
    with Meter(f"RoundPipe {mode.value}", len(task.batches)) as meter:
        for batch in task.batches:
            loss = model.forward_backward(
                input_args=(batch.byte_ids,), label=batch.next_byte_ids, loss_fn=task.loss_fn, run_config=config
            )
            model.step(step, is_async=mode is StepMode.ASYNC)
            meter.record(loss, batch.byte_ids.numel())
        model.synchronize()
    return meter


@torch.no_grad()
def generate(model: RoundPipe, prompt: str, num_byte: int, context: int, seed: int) -> str:
    """Continue `prompt` byte by byte, sampling from the model's scores at temperature 0.6."""
    generator = torch.Generator().manual_seed(seed)
    byte_ids = torch.tensor([list(prompt.encode())])
    model.eval()
    for _ in range(num_byte):
        scores = model(byte_ids[:, -context:], roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        probabilities = (scores[0, -1] / 0.6).softmax(dim=0)
        next_byte_id = torch.multinomial(probabilities, 1, generator=generator)
        byte_ids = torch.cat([byte_ids, next_byte_id[None]], dim=1)
    model.train()
    return "".join(map(printable, byte_ids[0].tolist()))


def printable(byte_id: int) -> str:
    """The character of a byte, or "?" for bytes that are not printable ASCII."""
    character = chr(byte_id)
    return character if character == "\n" or (character.isascii() and character.isprintable()) else "?"
