"""A float32 value kept as the bfloat16 number it rounds to, and the 16 bits which that one lacks.

What an optimizer's copy is while nobody looks at it: devices need the bfloat16 weight anyway, so the copy costs half of
what it would. Joining gives back every bit; the C source of the one-pass kernel explains how, and does the same.
"""

from __future__ import annotations

import torch

from roundpipe.store.host_buffer import HostBuffer

_HALF = 0x8000
_CHUNK = 1 << 20  # elements that are converted at a time, so that intermediate results stay small


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
        made = torch.empty_like(self.weight, dtype=torch.float32, memory_format=torch.preserve_format)
        self.join_into(made)
        return made

    def join_into(self, to: torch.Tensor) -> None:
        """Write the value into a float32 tensor of the weight's shape and strides."""
        if self._low is None:
            to.copy_(self.weight)
            return
        weight, bits = _flat(self.weight).view(torch.int16), _flat(to).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            lower = self._low[piece].to(torch.int32) & 0xFFFF
            went_up, is_tie = lower > _HALF, lower == _HALF
            if is_tie.any():
                went_up |= is_tie & _unpacked(self.ties[start // 8 : (start + _CHUNK) // 8])[: len(lower)]
            upper = (weight[piece].to(torch.int32) & 0xFFFF) - went_up.to(torch.int32)
            torch.bitwise_or(upper << 16, lower, out=bits[piece])

    def take(self, values: torch.Tensor) -> bool:
        """Be the value of `values`, float32 with the weight's shape and strides; reads the weight, never writes it.

        Returns False, with nothing changed, unless joining would give back every bit: the weight must be `values`
        rounded, and no NaN among them.
        """
        other = SplitValue(self.weight)
        weight, bits = _flat(self.weight).view(torch.int16), _flat(values).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            lower = other.low[piece].copy_(bits[piece])  # the lower half, as a signed number
            rise = weight[piece] - (bits[piece] >> 16).to(torch.int16)
            is_tie, went_up = lower == -_HALF, rise == 1
            if not torch.where(is_tie, went_up | (rise == 0), rise == (lower < 0)).all():
                return False
            if (is_tie & went_up).any():
                other.ties[start // 8 : (start + _CHUNK) // 8] = _packed(is_tie & went_up)
        self._low, self._ties = other._low, other._ties
        return True


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The bits of bytes, lowest first."""
    return ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()


def _packed(flags: torch.Tensor) -> torch.Tensor:
    """Bytes whose bits, lowest first, are `flags`."""
    whole = torch.zeros(-(-len(flags) // 8) * 8, dtype=torch.uint8)
    whole[: len(flags)] = flags
    return (whole.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,))
