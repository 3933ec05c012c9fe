"""Loss shares: the factor of each microbatch's loss in the loss of the batch.

They are applied to the output of a model that computes its own loss, to the result of loss_fn, and when outputs are
merged. All three use `weighted`, so the loss is the same number in each of these ways.
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
    """The factors of the losses of a call, one per microbatch; None instead of a tuple: all factors are 1.

    own: factors of the loss that the model computes itself. An entry None: the factor is needed but unknown.
    returned: factors of the result of loss_fn.
    rows: each microbatch's share of the batch's rows; None if unknown.
    covers_own: the model's own losses, with their factors, add up to the loss of the batch.
    merged: factors of the model's own loss when outputs are merged; None: it is averaged like any other number.
    place: the key or position of the model's own loss in its output.
    """

    own: tuple[float | None, ...] | None = None
    returned: Shares | None = None
    rows: Shares | None = None
    covers_own: bool = False
    merged: Shares | None = None
    place: str | int = "loss"

    def apply_to_output(self, value: Any, microbatch: int) -> Any:
        """Return a model's output with its own loss, if it has one, multiplied by the microbatch's share."""
        if self.own is None:
            return value
        # A loss with dimensions is one loss per row: it is not a mean, so it has no share.
        loss = own_loss(value, self.place)
        node = open_node(value)
        if loss is None or node is None or loss.dim() > 0 or not loss.is_floating_point():
            return value
        share = self.own[microbatch]
        if share is None:
            raise ConfigError(
                "the model returns a `loss`, but the number of rows of each microbatch cannot be told from how this "
                "call was split, so the losses cannot be averaged. Set whole_batch_loss=False to add them up, or split "
                "the call with split_input specs such as Chunk(0)."
            )
        changed = [weighted(loss, share) if child is loss else child for child in node.children]
        return node.rebuild(changed)  # the same type, such as ModelOutput

    def of_returned(self, microbatch: int, *, is_own: bool) -> float | None:
        """Return the factor of the result of loss_fn. `is_own`: the result is the loss in the model's output."""
        # The model's own loss has its factor already if the shares cover it.
        return None if self.returned is None or (is_own and self.covers_own) else self.returned[microbatch]


def own_loss(value: Any, place: str | int = "loss") -> torch.Tensor | None:
    """Return the loss in the output of a model that computes its own loss; None if there is none."""
    if isinstance(place, str):
        loss = value.get(place) if isinstance(value, Mapping) else None
    else:
        loss = value[place] if isinstance(value, tuple) and len(value) > place else None
    return loss if isinstance(loss, torch.Tensor) else None


def weighted(loss: torch.Tensor, share: float) -> torch.Tensor:
    """Return a loss times its share. With a share of 0 the result is 0, without gradients, even if the loss is NaN."""
    counted: torch.Tensor = _Zero.apply(loss) if share == 0 else loss * share
    return counted


class _Zero(torch.autograd.Function):
    """Replaces a loss by 0. A mean over no labels is NaN; multiplying it by 0 would keep NaN, also in gradients."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None
