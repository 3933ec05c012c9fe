"""How much the loss of each microbatch counts in the loss of the batch.

Made by api for each call; applied by the last layer, where a model computes its own loss, after loss_fn, and where
outputs are merged. All of them use `weighted`, so that a loss is the same number whichever way it is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.microbatch.tree import open_node

Shares = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class LossShares:
    """Factors by microbatch; None instead of a tuple: every loss counts as it is.

    own: of the loss that a model computes itself, applied to its output. An entry None: it is needed and unknown.
    returned: of what loss_fn returns.
    rows: the share of the batch's rows; None where they are unknown.
    covers_own: the model's own losses, with their factors, add up to the loss of the batch.
    merged: of the model's own loss where outputs are merged; None: it is averaged like any number.
    place: the key or position of the model's own loss in its output.
    """

    own: tuple[float | None, ...] | None = None
    returned: Shares | None = None
    rows: Shares | None = None
    covers_own: bool = False
    merged: Shares | None = None
    place: str | int = "loss"

    def apply_to_output(self, value: Any, microbatch: int) -> Any:
        """The output of a model with its own loss, if it has one, times the microbatch's share."""
        if self.own is None:
            return value
        loss = own_loss(value, self.place)
        node = open_node(value)
        if loss is None or node is None or loss.dim() > 0 or not loss.is_floating_point():
            return value
        share = self.own[microbatch]
        if share is None:
            raise ConfigError(
                "the model returns a `loss`, and how many rows each microbatch has cannot be told from how this call "
                "was cut, so the losses cannot be averaged. Set whole_batch_loss=False to add them up, or cut the call "
                "with split_input specs such as Chunk(0)."
            )
        changed = [weighted(loss, share) if child is loss else child for child in node.children]
        return node.rebuild(changed)

    def of_returned(self, microbatch: int, *, is_own: bool) -> float | None:
        """The factor of what loss_fn returned; `is_own`: that is the loss in the model's output."""
        return None if self.returned is None or (is_own and self.covers_own) else self.returned[microbatch]


def own_loss(value: Any, place: str | int = "loss") -> torch.Tensor | None:
    """The loss in the output of a model that computes one itself."""
    if isinstance(place, str):
        loss = value.get(place) if isinstance(value, Mapping) else None
    else:
        loss = value[place] if isinstance(value, tuple) and len(value) > place else None
    return loss if isinstance(loss, torch.Tensor) else None


def weighted(loss: torch.Tensor, share: float) -> torch.Tensor:
    """The part of a loss that counts. A share of 0 makes it 0, without gradients, even where it is NaN."""
    counted: torch.Tensor = _Nothing.apply(loss) if share == 0 else loss * share
    return counted


class _Nothing(torch.autograd.Function):
    """Zero in place of a mean over no labels: multiplying that by 0 would leave NaN, in the gradients too."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None
