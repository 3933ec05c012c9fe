"""A float32 value kept as the bfloat16 number it rounds to, and the 16 bits which that one lacks.

What an optimizer's copy is while nobody looks at it: devices need the bfloat16 weight anyway, so the copy costs half of
what it would. Joining gives back every bit; the C source of the one-pass kernel explains how, and does the same.
"""

from __future__ import annotations

import torch

from roundpipe.store.host_buffer import HostBuffer

_HALF = 0x8000


class SplitValue:
    def __init__(self, weight: torch.Tensor) -> None:
        """The value of `weight` itself; memory for the lower bits is taken when they are first needed."""
        self.weight = weight
        self._low: torch.Tensor | None = None
        self._ties: torch.Tensor | None = None

    @property
    def low(self) -> torch.Tensor:
        """The lower 16 bits, in the order in which the weight lies in memory."""
        if self._low is None:
            self._low = HostBuffer(2 * self.weight.numel(), None).tensor.view(torch.int16)
        return self._low

    @property
    def low_bytes_to_come(self) -> int:
        return 2 * self.weight.numel() if self._low is None else 0

    @property
    def ties(self) -> torch.Tensor:
        """A bit for each number; it counts where the lower bits are just half of the upper ones' last."""
        if self._ties is None:
            self._ties = HostBuffer(-(-self.weight.numel() // 8), None).tensor
        return self._ties

    def become(self, weight: torch.Tensor) -> None:
        """The value is that of `weight` from now on."""
        self.weight, self._low, self._ties = weight, None, None

    def joined(self) -> torch.Tensor:
        """The value as a tensor of its own, with the strides of the weight."""
        if self._low is None:
            return self.weight.to(torch.float32)
        upper = _flat(self.weight).view(torch.int16).to(torch.int32) & 0xFFFF
        lower = self._low.to(torch.int32) & 0xFFFF
        went_up = (lower > _HALF) | ((lower == _HALF) & self._tie_bits())
        value = (((upper - went_up.to(torch.int32)) << 16) | lower).view(torch.float32)
        return value.as_strided(self.weight.shape, self.weight.stride())

    def _tie_bits(self) -> torch.Tensor:
        bits = (self.ties.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.flatten()[: self.weight.numel()].bool()


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,))
