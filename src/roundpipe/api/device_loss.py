"""The loss of a Hugging Face model, computed on a device although the model's own forward runs on the host.

Used by api.wrap. A `PreTrainedModel` calls `self.loss_function(...)` on whole logits, which is slow on a CPU.
Recognises such models by name: transformers is not imported.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

from torch import nn


class LossModule(nn.Module):
    """A loss function as a module, so that a RoundPipe can run it."""

    def __init__(self, loss_function: Callable[..., Any]) -> None:
        super().__init__()
        self._loss_function = loss_function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._loss_function(*args, **kwargs)


class DeviceLoss:
    """What stands for the model's loss function. No nn.Module, so that it adds nothing to the model's modules."""

    def __init__(self, run: nn.Module, plain: Callable[..., Any]) -> None:
        self._run, self._plain = run, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of the model has the plain loss function, and so has a pickle of it."""
        return copy.deepcopy(self._plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.itemgetter(0), ((self._plain,),)

    def put_into(self, model: Any) -> None:
        model.loss_function = self

    def take_out_of(self, model: Any) -> None:
        if model.loss_function is self:
            model.loss_function = self._plain


def loss_function_of(model: nn.Module) -> Callable[..., Any] | None:
    """The loss function of a Hugging Face model; None for any other model, and for one without."""
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
        return None
    loss_function = getattr(model, "loss_function", None)
    return loss_function if callable(loss_function) else None
