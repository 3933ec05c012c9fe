"""The head of a language model and its loss in one, where the logits are large and nobody asks for them.

Used by the stub trees. A model of transformers calls `self.loss_function(logits=..., labels=...)`; in a tree that is a
stub, too. Where calibration has shown that the logits go straight from a linear head into a cross entropy over shifted
or unshifted labels, a replay can leave them out: the head returns a placeholder, and the loss is computed from the
head's input, a chunk of tokens at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from roundpipe.models.library_state import is_pretrained
from roundpipe.models.linear_loss import LOGITS_BYTES, linear_cross_entropy
from roundpipe.models.stub import current_director
from roundpipe.models.trial import succeeds
from roundpipe.models.values import Outline, map_leaves, placeholder

_CLOSE = 1e-5


@dataclasses.dataclass(frozen=True)
class FusedHead:
    """Which tap is the head, whether position i is to predict label i + 1, and the loss function that showed it."""

    tap: int
    shift: bool
    loss_function: Any = dataclasses.field(compare=False)


class LossStub:
    """Stands for the loss function of `original`, which is looked up when it is called: not every model has one."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return current_director().loss(self._original.loss_function, args, kwargs)


def watch_loss(original: nn.Module, copy: nn.Module) -> None:
    """Let a copy of one of transformers' models have a stub for its loss function."""
    if is_pretrained(copy) and hasattr(type(copy), "loss_function"):
        copy.__dict__["_loss_function"] = LossStub(original)


class _Marker(torch.Tensor):
    """Stands for the logits until the loss function gets it; whatever is computed from it is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Itself, as of logits a linear layer returned."""
        return self


class HeadLoss:
    """The fused computation in one replay of an epilogue."""

    def __init__(self, head: FusedHead) -> None:
        self.head = head
        self._hidden: torch.Tensor | None = None
        self._module: nn.Linear | None = None
        self._marker: torch.Tensor | None = None

    def call_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        assert isinstance(module, nn.Linear)
        (self._hidden,) = args or tuple(kwargs.values())
        self._module = module
        outline = Outline(torch.Size([*self._hidden.shape[:-1], module.out_features]), self._hidden.dtype)
        self._marker = placeholder(outline, self._hidden.device).as_subclass(_Marker)
        return self._marker

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._marker is not None and (
            kwargs.get("logits") is self._marker or (bool(args) and args[0] is self._marker)
        )

    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        assert self._hidden is not None
        assert self._module is not None
        given = {**dict(zip(("logits", "labels", "vocab_size"), args, strict=False)), **kwargs}
        shifted = given.get("shift_labels")
        return linear_cross_entropy(
            self._hidden,
            self._module.weight,
            self._module.bias,
            given["labels"] if shifted is None else shifted,
            ignore_index=given.get("ignore_index", -100),
            num_items=given.get("num_items_in_batch"),
            shift=self.head.shift and shifted is None,
        )

    def plain_loss(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By another function than the one it was tried with: on the logits, which are made after all."""
        assert self._module is not None
        logits = self._module(self._hidden)

        def instead(value: Any) -> Any:
            return logits if value is self._marker else value

        return plain(*map(instead, args), **{name: instead(value) for name, value in kwargs.items()})

    def without_marker(self, returned: Any) -> Any:
        """What the model returned, with None for the logits."""
        return map_leaves(lambda leaf: None if leaf is self._marker else leaf, returned)


def are_large(hidden: torch.Tensor, module: nn.Module) -> bool:
    """Whether logits would take more memory than is set for them."""
    num_rows = hidden.numel() // max(hidden.shape[-1], 1)
    return isinstance(module, nn.Linear) and num_rows * module.out_features * 8 > LOGITS_BYTES


def can_be_fused(head: nn.Module) -> bool:
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


def find_head(
    logits: torch.Tensor,
    loss: torch.Tensor,
    taps: list[tuple[nn.Module, torch.Tensor, torch.Tensor]],
    given: dict[str, Any],
    loss_function: Any,
) -> FusedHead | None:
    """The head whose very output `logits` is, if `loss` is the cross entropy that can be fused with it.

    taps: (module, its first argument, its output), in the order of their calls.
    """
    labels = given.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    for t, (module, hidden, output) in enumerate(taps):
        if output is logits and can_be_fused(module) and labels.shape == logits.shape[:-1]:
            for shift in (True, False):
                fused = HeadLoss(FusedHead(t, shift, loss_function))
                if succeeds("the head is fused with the loss", partial(_gives, fused, module, hidden, given, loss)):
                    return fused.head
    return None


def _gives(fused: HeadLoss, module: nn.Module, hidden: torch.Tensor, given: dict[str, Any], loss: torch.Tensor) -> bool:
    """Whether the fused computation gives the loss."""
    fused.call_head(module, (hidden,), {})
    with torch.no_grad():
        found = fused.loss((), given)
    return bool((found.double() - loss.double()).abs() <= _CLOSE * loss.double().abs())
