"""The same training in plain PyTorch: transformers' model, torch.optim.AdamW, one device, no RoundPipe.

The losses of `roundpipe train` are compared with these.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demo.chats import Chat, read_chats

IGNORED = -100  # the label of a token without loss


@dataclass(frozen=True)
class Recipe:
    """The settings that both trainings share."""

    steps: int
    batch: int
    peak_lr: float
    warmup_steps: int
    max_grad_norm: float = 1.0

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to zero."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


def plain_losses(
    model_folder: Path, data: Path, recipe: Recipe, device: str, *, num_step: int, is_stale: bool
) -> list[float]:
    """Losses of the first `num_step` steps. `is_stale`: each step's gradients are those of weights one update old."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(device).train()
    older = copy.deepcopy(model) if is_stale else model  # the weights that compute
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    losses = []
    for input_ids, labels in batches(data, AutoTokenizer.from_pretrained(model_folder), recipe.batch, num_step):
        mask = input_ids != model.config.pad_token_id
        loss = older(input_ids.to(device), attention_mask=mask.to(device), labels=labels.to(device)).loss
        loss.backward()
        losses.append(loss.item())
        if len(losses) % 25 == 0 or len(losses) == num_step:
            weights = "  (gradients of weights one update old)" if is_stale else ""
            print(f"step {len(losses)}/{num_step}  loss {losses[-1]:.4g}{weights}", flush=True)
        if is_stale:
            hand_over(model, older)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def hand_over(model: nn.Module, older: nn.Module) -> None:
    """Move the gradients to the model, and its weights, without the update to come, to the older one."""
    with torch.no_grad():
        for weight, old in zip(model.parameters(), older.parameters(), strict=True):
            weight.grad, old.grad = old.grad, None
            old.copy_(weight)


def batches(data: Path, tokenizer: Any, batch: int, num_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and labels of the chats, in the order of the file. Only the assistant's tokens have a label."""
    chats = read_chats(data)
    for first in range(0, num_batch * batch, batch):
        rows = [tokens_and_labels(tokenizer, chat) for chat in chats[first : first + batch]]
        longest = max(len(tokens) for tokens, _ in rows)
        yield (
            torch.tensor([tokens + [tokenizer.pad_token_id] * (longest - len(tokens)) for tokens, _ in rows]),
            torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]),
        )


def tokens_and_labels(tokenizer: Any, chat: Chat) -> tuple[list[int], list[int]]:
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    tokens = list(encoded["input_ids"])
    is_trained = encoded["assistant_masks"]
    return tokens, [token if trained else IGNORED for token, trained in zip(tokens, is_trained, strict=True)]
