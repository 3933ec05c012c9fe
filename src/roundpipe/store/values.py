"""How masters store their values: in a float32 tensor, halved, or divided between several machines.

A StoredMaster is one form of float32 values; other code asks it for its parts, a range of it or its values. A
WholeMaster is one tensor, a HalvedMaster a bfloat16 weight and the missing 16 bits, a ShortMaster values of 24 bits as
the weight and one byte. With a process group, a ShardedMaster stores the values of one range of a parameter, in one of
these forms; the other machines store the other ranges. A Share says which range. Knows neither optimizers nor steps,
and sends nothing.

[Note: masters of 24 bits] The values are float32 numbers whose low 8 bits are 0. The weight W is the value rounded to
bfloat16, and a signed byte holds the rest, in units of 1/256 of the distance between two bfloat16 numbers. The byte is
never -128: a value half way between two bfloat16 numbers is not used, so W and the byte determine each other and the
value, W is the value's bfloat16 rounding by any rule for ties, and no bits for ties are stored. What an optimizer
computes is rounded (Rounding) to one of the two nearest values of this kind, stochastically: a change smaller than the
last bit is made with the probability that keeps the mean. native/blocks.h computes the same bits.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import torch

from roundpipe.errors import UsageError
from roundpipe.store.forms import random_bits, seed_of
from roundpipe.store.host_memory import HostBuffer, dense_stride

_HALF = 0x8000
_CHUNK = 1 << 20  # number of elements converted at a time, so that intermediate results stay small
BLOCK = 2048  # elements; the ranges of machines begin at multiples of it
MASTER_BITS = (32, 24)
_NUMBER_OF_MASTER = 3  # among the seeds of a step, behind those of the optimizer's states
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_SHARDED_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


class Rounding:
    """Rounds the values of one master to 24 bits; see [Note: masters of 24 bits].

    The random bits depend on the number of the element in the whole parameter and on how often the master was rounded,
    so neither on threads nor on the ranges of machines, and a resumed run has the same.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count  # how often the master was rounded after an update

    @property
    def seed(self) -> int:
        """The seed of the next rounding."""
        return seed_of(self.count + 1, _NUMBER_OF_MASTER)

    def round(self, values: torch.Tensor, first: int = 0) -> bool:
        """Round a flat float32 tensor in place. Returns whether any value has changed.

        `first`: the number of its first element in the whole parameter.
        """
        bits, has_changed = values.view(torch.int32), False
        for start in range(0, len(values), _CHUNK):
            old = bits[start : start + _CHUNK].long() & 0xFFFFFFFF
            draws = random_bits(self.seed, first + start, len(old))
            up = (old + (draws >> 24)) & ~0xFF
            # Around the half way point the two nearest values are 512 apart.
            above = (old & 0xFFFF) - 0x7F00
            around = old - above + ((above + (draws >> 23)) & 0x200)
            new = torch.where((above >= 0) & (above < 0x200), around, up)
            new = torch.where((old & _MAGNITUDE) > _INFINITY, _NAN, new)
            has_changed |= not torch.equal(new, old)
            bits[start : start + _CHUNK] = new.to(torch.int32)
        return has_changed

    def round_like(self, weight: torch.Tensor, values: torch.Tensor) -> bool:
        """Round a tensor of the weight's shape in place, as `round`. Its elements are numbered in the weight's order.

        The values may have another dtype or memory order, if the user has given the master another tensor.
        """
        if values.dtype is torch.float32 and values.stride() == weight.stride() == dense_stride(values):
            return self.round(flat(values))
        ordered = torch.empty_like(weight, dtype=torch.float32, memory_format=torch.preserve_format).copy_(values)
        has_changed = self.round(flat(ordered))
        values.copy_(ordered)
        return has_changed


class StoredMaster(abc.ABC):
    """One way to store the float32 values of a master, or those of a range of it."""

    has_high_halves: ClassVar[bool]  # whether the weight is one of its parts

    @abc.abstractmethod
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors that store the values, by their names in one_pass.c. The first has their shape and strides."""

    def own_parts(self) -> list[torch.Tensor]:
        """The parts that an update writes, besides the weight."""
        return [part for name, part in self.parts().items() if name != "old_weight"]

    def memory_to_come(self) -> list[torch.Tensor]:
        """The parts that do not exist before the first update; makes them."""
        return []

    @property
    def low_bytes_to_come(self) -> int:
        """Bytes that the first update will still allocate."""
        return 0

    @abc.abstractmethod
    def cut(self, start: int, stop: int) -> StoredMaster:
        """A range of elements in the order of memory, over the same memory. `start`: a multiple of 8."""

    @abc.abstractmethod
    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> StoredMaster:
        """The same values in other memory; `to` makes it of each part."""

    @abc.abstractmethod
    def joined(self) -> torch.Tensor:
        """The values as a float32 tensor, which may be the part itself."""

    @abc.abstractmethod
    def follow(self, weight: torch.Tensor) -> None:
        """Note that the weight, with the same values, lies in other memory now."""


class WholeMaster(StoredMaster):
    """float32 values as one tensor."""

    has_high_halves = False

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def parts(self) -> dict[str, torch.Tensor]:
        return {"master": self.values}

    def cut(self, start: int, stop: int) -> WholeMaster:
        return WholeMaster(flat(self.values)[start:stop])

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> WholeMaster:
        return WholeMaster(to(self.values))

    def joined(self) -> torch.Tensor:
        return self.values

    def follow(self, weight: torch.Tensor) -> None:
        return  # no part lies in the weight


class HalvedMaster(StoredMaster):
    """float32 values stored as two halves: the bfloat16 weight to which each value rounds, and its low 16 bits.

    Devices need the bfloat16 weight anyway, so the values cost only half the memory of a float32 tensor. Joining the
    halves restores every bit. [Note: halved masters] in one_pass.c explains how; the C code computes the same.
    """

    has_high_halves = True
    low_dtype: ClassVar[torch.dtype] = torch.int16
    has_ties: ClassVar[bool] = True

    def __init__(self, weight: torch.Tensor, low: torch.Tensor | None = None, ties: torch.Tensor | None = None) -> None:
        """Make halves from a bfloat16 `weight`. Without `low` the values equal `weight` exactly."""
        self.weight = weight
        if low is not None:
            self.low = low
        if ties is not None:
            self.ties = ties

    @functools.cached_property
    def low(self) -> torch.Tensor:
        """The low bits of each value, flat, in the order of the weight's memory. Allocated when first used."""
        return HostBuffer(self.low_dtype.itemsize * self.weight.numel(), None).tensor.view(self.low_dtype)

    @functools.cached_property
    def ties(self) -> torch.Tensor:
        """One bit per value, used if the value lies half way between two bfloat16 numbers: 1 if it was rounded up."""
        return HostBuffer(-(-self.weight.numel() // 8), None).tensor

    @property
    def low_bytes_to_come(self) -> int:
        """Bytes that `low` will allocate when it is first used; 0 if it is allocated already."""
        return 0 if "low" in vars(self) else self.low_dtype.itemsize * self.weight.numel()

    def parts(self) -> dict[str, torch.Tensor]:
        return {"old_weight": self.weight, "low": self.low, **({"ties": self.ties} if self.has_ties else {})}

    def memory_to_come(self) -> list[torch.Tensor]:
        return [self.low]

    def cut(self, start: int, stop: int) -> HalvedMaster:
        ties = self.ties[start // 8 : -(-stop // 8)] if self.has_ties else None
        return type(self)(flat(self.weight)[start:stop], self.low[start:stop], ties)

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> HalvedMaster:
        return type(self)(to(self.weight), to(self.low), to(self.ties) if self.has_ties else None)

    def follow(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def own_values(self) -> HalvedMaster:
        """These values themselves; as ShardedMaster.own_values."""
        return self

    def become(self, weight: torch.Tensor) -> None:
        """Set the values to exactly those of `weight`: drop the low halves."""
        self.weight = weight
        vars(self).pop("low", None)
        vars(self).pop("ties", None)

    def joined(self) -> torch.Tensor:
        """The values as a new float32 tensor with the strides of the weight."""
        made = torch.empty_like(self.weight, dtype=torch.float32, memory_format=torch.preserve_format)
        self.join_into(made)
        return made

    def join_into(self, to: torch.Tensor) -> None:
        """Write the values into a float32 tensor of the weight's shape and strides."""
        if "low" not in vars(self):
            to.copy_(self.weight)
            return
        weight, bits = flat(self.weight).view(torch.int16), flat(to).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            lower = self.low[piece].to(torch.int32) & 0xFFFF
            went_up, is_tie = lower > _HALF, lower == _HALF
            if is_tie.any():
                went_up |= is_tie & unpacked_bits(self.ties[start // 8 : (start + _CHUNK) // 8])[: len(lower)]
            upper = (weight[piece].to(torch.int32) & 0xFFFF) - went_up.to(torch.int32)
            torch.bitwise_or(upper << 16, lower, out=bits[piece])

    def take(self, values: torch.Tensor, *, rounds: bool = False) -> bool:
        """Set the low halves so that joining gives `values`, a float32 tensor of the weight's shape and strides.

        The weight is read and stays unchanged. Returns False and changes nothing if joining would not restore every
        bit: the weight must equal `values` rounded, and no value may be NaN. `rounds`: see ShortMaster.
        """
        other = HalvedMaster(self.weight)
        weight, bits = flat(self.weight).view(torch.int16), flat(values).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            lower = other.low[piece].copy_(bits[piece])  # the conversion to int16 keeps the low 16 bits
            rise = weight[piece] - (bits[piece] >> 16).to(torch.int16)
            is_tie, went_up = lower == -_HALF, rise == 1
            if not torch.where(is_tie, went_up | (rise == 0), rise == (lower < 0)).all():
                return False
            if (is_tie & went_up).any():
                other.ties[start // 8 : (start + _CHUNK) // 8] = packed_bits(is_tie & went_up)
        self.become(self.weight)
        vars(self).update(vars(other))
        return True


class ShortMaster(HalvedMaster):
    """float32 values of 24 bits stored as the bfloat16 weight to which each value rounds, and a signed byte.

    See [Note: masters of 24 bits].
    """

    low_dtype = torch.int8
    has_ties = False

    def join_into(self, to: torch.Tensor) -> None:
        """Write the values into a float32 tensor of the weight's shape and strides."""
        if "low" not in vars(self):
            to.copy_(self.weight)
            return
        weight, bits = flat(self.weight).view(torch.int16), flat(to).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            torch.add(weight[piece].to(torch.int32) << 16, self.low[piece].to(torch.int32) << 8, out=bits[piece])

    def take(self, values: torch.Tensor, *, rounds: bool = False) -> bool:
        """Set the bytes so that joining gives `values`, a float32 tensor of the weight's shape and strides.

        The weight is read and stays unchanged. Returns False and changes nothing if `values` rounded are not the
        weight, or if they need more than 24 bits, unless `rounds`: then the bytes give the nearest values.
        """
        other = ShortMaster(self.weight)
        weight, bits = flat(self.weight).view(torch.int16), flat(values).view(torch.int32)
        for start in range(0, self.weight.numel(), _CHUNK):
            piece = slice(start, start + _CHUNK)
            rest = bits[piece] - (weight[piece].to(torch.int32) << 16)
            low = ((rest + 0x80) >> 8).clamp(-127, 127)
            other.low[piece] = low.to(torch.int8)
            is_near = (rest >= -_HALF) & (rest <= _HALF) if rounds else rest == low << 8
            if not is_near.all():
                return False
        self.become(self.weight)
        vars(self).update(vars(other))
        return True


def master_of(weight: torch.Tensor, rounding: Rounding | None) -> HalvedMaster:
    """The values of a bfloat16 weight as those of its master: of 24 bits if it has a `rounding`, else of 32."""
    return HalvedMaster(weight) if rounding is None else ShortMaster(weight)


def unpacked_bits(packed: torch.Tensor) -> torch.Tensor:
    """The bits of a uint8 tensor as booleans, the lowest bit of each byte first."""
    return ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten().bool()


def packed_bits(flags: torch.Tensor) -> torch.Tensor:
    """Booleans as bits of a uint8 tensor, the lowest bit of each byte first."""
    whole = torch.zeros(-(-len(flags) // 8) * 8, dtype=torch.uint8, device=flags.device)
    whole[: len(flags)] = flags
    return (whole.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def flat(dense: torch.Tensor) -> torch.Tensor:
    """A flat view of a dense tensor, with its elements in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,))


@dataclasses.dataclass(frozen=True)
class Share:
    """This machine's part of every parameter: one range of its elements, in the order of memory.

    The ranges of a parameter depend on its size and on the number of machines alone, so they stay what they are when
    the model is divided into other layers. They begin at multiples of BLOCK elements, so that values which are stored
    block by block never belong to two machines; the last machine has the incomplete block. A machine may have no
    element of a parameter with fewer blocks than there are machines.
    """

    rank: int
    size: int  # the number of machines

    def range_of(self, count: int, rank: int | None = None) -> slice:
        """The range of a parameter with `count` elements that belongs to this machine, or to the machine `rank`."""
        rank = self.rank if rank is None else rank
        blocks = -(-count // BLOCK)
        start, stop = (min(count, blocks * at // self.size * BLOCK) for at in (rank, rank + 1))
        return slice(start, stop)

    def count_of(self, count: int) -> int:
        """The number of elements in this machine's range of a parameter with `count` elements."""
        return len(range(count)[self.range_of(count)])


def can_be_sharded(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether machines can divide a master of `weight` in `dtype` between them: the one-pass kernel can update it."""
    is_dense = dense_stride(weight) == tuple(weight.stride())
    return dtype is torch.float32 and weight.dtype in _SHARDED_WEIGHTS and weight.numel() > 0 and is_dense


class ShardedMaster:
    """float32 values of which this machine stores one range.

    Until the first update the values equal the weight, and nothing is stored. From then on only the weight, which is
    rounded, is complete on every machine.
    """

    def __init__(self, weight: torch.Tensor, share: Share, rounding: Rounding | None = None) -> None:
        """`rounding`: that of the master; only a bfloat16 weight has one."""
        self.share, self.rounding = share, rounding
        self._range = share.range_of(weight.numel())
        self._own: StoredMaster | None = None  # None: the values equal the weight
        self.weight = weight

    @property
    def weight(self) -> torch.Tensor:
        """The whole weight in the newest buffer."""
        return self._weight

    @weight.setter
    def weight(self, weight: torch.Tensor) -> None:
        self._weight = weight
        if self._own is not None:
            self._own.follow(flat(weight)[self._range])

    @property
    def is_complete(self) -> bool:
        """Whether this machine knows all values, because none was updated yet."""
        return self._own is None

    def own_values(self) -> StoredMaster:
        """The values of this machine's range, flat: in halves if the weight is bfloat16. The first call makes them."""
        if self._own is None:
            mine = flat(self._weight)[self._range]
            is_halved = mine.dtype is torch.bfloat16
            self._own = master_of(mine, self.rounding) if is_halved else WholeMaster(mine.to(torch.float32, copy=True))
        return self._own

    def take(self, values: torch.Tensor, *, rounds: bool = False) -> None:
        """Set the values of this machine's range to those in `values`, a float32 tensor of the whole parameter.

        `rounds`: see ShortMaster.
        """
        mine = flat(values)[self._range]
        halves = master_of(flat(self._weight)[self._range], self.rounding)
        is_halved = self._weight.dtype is torch.bfloat16 and halves.take(mine, rounds=rounds)
        self._own = halves if is_halved else WholeMaster(mine.clone())

    @property
    def low_bytes_to_come(self) -> int:
        """Bytes that `own_values` and the halves will still allocate."""
        count = self.share.count_of(self._weight.numel())
        if self._own is not None:
            return self._own.low_bytes_to_come
        if self._weight.dtype is not torch.bfloat16:
            return 4 * count
        return master_of(self._weight, self.rounding).low_dtype.itemsize * count

    def become(self, weight: torch.Tensor) -> None:
        """Set the values to exactly those of `weight`."""
        self._own = None
        self.weight = weight

    def join_into(self, to: torch.Tensor) -> None:
        """Write the values into a float32 tensor. Raises UsageError if other machines have a part of them."""
        if self._own is not None:
            raise UsageError(
                f"this machine has 1/{self.share.size} of the optimizer's copy of a parameter of shape "
                f"{tuple(self._weight.shape)}: the machines of the process group divide the copies between them. Read "
                "the weights instead, which every machine has: model.parameters() or model.state_dict() after "
                "model.synchronize(). An optimizer of torch, in place of roundpipe.optim, keeps whole copies on every "
                "machine."
            )
        to.copy_(self._weight)
