"""The optimizer's copy of a parameter, whose gradient comes down in low precision and is made a tensor on demand.

Made by Masters, handed to users by `optim_parameters()`. Inside a step its gradient may still be on its way: whoever
asks for `.grad` waits for it and gets it in the copy's own precision; an optimizer that can use it as it lies asks for
`low_gradient()`. Knows where its gradient comes from only by GradientSource.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import nn

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


@dataclasses.dataclass(frozen=True)
class LowGradient:
    """A gradient in host memory, in the precision it was computed in, and what it is still to be multiplied by."""

    tensor: torch.Tensor
    factors: tuple[float, ...] = ()

    def materialised(self, dtype: torch.dtype) -> torch.Tensor:
        value = self.tensor.to(dtype, copy=True)
        for factor in self.factors:
            value.mul_(factor)
        return value


class GradientSource(Protocol):
    """Where one step's gradient of one copy comes from."""

    def is_usable(self) -> bool:
        """Whether the calling thread carries the step out."""

    def get(self) -> torch.Tensor | None:
        """Wait for it; None if there is none. The memory stays valid until `release`."""

    def release(self) -> None:
        """It is not needed any more."""


class OptimizerCopy(nn.Parameter):
    """A parameter like any other, until it has a gradient source."""

    source: GradientSource | None = None  # of the step that is being carried out
    is_pending = False  # whether its gradient is still the source's
    _factors: tuple[float, ...] = ()
    _seen_version = 0
    _data_was_handed_out = False

    # What the step does.

    def begin_step(self, source: GradientSource) -> None:
        self.source, self.is_pending, self._factors = source, True, ()

    def end_step(self) -> None:
        """A gradient that nobody has cleared stays, as torch has it: the next step's is added to it."""
        if self.is_pending:
            self._materialise()
        self.source = None

    # What an optimizer does that works in one pass.

    def low_gradient(self) -> LowGradient | None:
        """The gradient as it lies in host memory; None if there is none, or if `.grad` is a tensor by now."""
        if not self.is_pending or _GRAD.__get__(self) is not None:
            return None
        assert self.source is not None
        tensor = self.source.get()
        return None if tensor is None else LowGradient(tensor, self._factors)

    def scale_gradient(self, factor: float) -> None:
        """As `grad.mul_(factor)`, without making it a tensor."""
        self._factors += (factor,)

    # Whether somebody else may have written into it.

    def was_touched(self) -> bool:
        return self._data_was_handed_out or self._version != self._seen_version

    def forget_touches(self) -> None:
        self._data_was_handed_out, self._seen_version = False, self._version

    def mark_touched(self) -> None:
        self._data_was_handed_out = True

    @property
    def data(self) -> torch.Tensor:
        self._data_was_handed_out = True  # writes through it leave no trace
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._data_was_handed_out = True
        _DATA.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        if self.is_pending and self.source is not None and self.source.is_usable():
            self._materialise()
        grad: torch.Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._let_go()
        _GRAD.__set__(self, value)

    def _materialise(self) -> None:
        assert self.source is not None
        tensor, own = self.source.get(), _GRAD.__get__(self)
        if tensor is not None:
            with torch.no_grad():
                value = LowGradient(tensor, self._factors).materialised(self.dtype)
                _GRAD.__set__(self, value if own is None else own.add_(value))
        self._let_go()

    def _let_go(self) -> None:
        was_pending, self.is_pending, self._factors = self.is_pending, False, ()
        if was_pending and self.source is not None:
            self.source.release()
