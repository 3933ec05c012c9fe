"""Masters in checkpoints: the ranges that one machine writes, and reading them from a checkpoint of any kind.

Knows no optimizer and no model; reads files through a Reader.

[Note: ranges of machines] With a process group, every machine saves its range of masters and moments as one piece of
the tensor NAME; the manifest joins the pieces, so a reader sees whole tensors. The ranges of a weight whose memory is
not in row-major order are saved in the order of its memory, which the manifest names. A machine without an element of a
parameter saves nothing of it. `master.ties` is made where a value lies half way between two weights, so some machines
have it and others not. So each has a tensor for itself: `master.ties.START/NAME`, where START is the number of the
range's first value. Tensors that all machines have in full are saved by rank 0, files of weights
by all machines in turn.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe.checkpoint.format import TensorEntry
from roundpipe.checkpoint.verified import Reader, has_order_of
from roundpipe.errors import CheckpointError
from roundpipe.store import HalvedMaster, LayerStore, OptimizerCopy, ParameterRecord, Share
from roundpipe.store.forms import elements_per_entry
from roundpipe.store.values import ShardedMaster, ShortMaster, flat, packed_bits, unpacked_bits

logger = logging.getLogger("roundpipe")
MASTER, MASTER_LOW, MASTER_TIES, RANGED_TIES = "master/", "master.low/", "master.ties/", "master.ties."
Home = tuple[LayerStore, int]
_OF_LOW: Mapping[str, type[HalvedMaster]] = {"I16": HalvedMaster, "I8": ShortMaster}  # by dtype of the low parts
Ties = Sequence[tuple[int, TensorEntry]]  # numbers of first values, and the packed bits from there on


@dataclasses.dataclass(frozen=True)
class Range:
    """Where a flat tensor lies in a whole tensor: from element `start` on, in the order of `stride` if it is given."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None

    @classmethod
    def of(cls, share: Share, whole: torch.Tensor) -> Range:
        """This machine's range of a tensor with the shape and memory order of `whole`."""
        stride = None if whole.is_contiguous() else tuple(whole.stride())
        return cls(share.range_of(whole.numel()).start, tuple(whole.shape), stride)


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor to save. `layer`: the store and layer that must not change until the tensor is written."""

    name: str
    tensor: torch.Tensor
    layer: tuple[LayerStore, int] | None = None
    version: int | None = None  # version counter of the tensor, if only code of the user can change it
    range: Range | None = None  # given if other machines have the rest of the tensor

    @property
    def was_changed(self) -> bool:
        """Whether the user has written into the tensor since it was captured."""
        return self.version is not None and self.tensor._version != self.version


# Writing.


class Kind(enum.Enum):
    """How a machine holds the values of a master; the values are what machines send each other."""

    EQUAL = "-"  # there is no master, or its values are those of the weight
    HALVED = "h"  # its range, in halves
    FULL = "f"  # its range, as float32 values
    WHOLE = "w"  # all values

    @classmethod
    def of(cls, found: set[str], record: ParameterRecord) -> Kind:
        """How all machines save a master, from how each of them holds it. EQUAL and WHOLE are saved by one machine."""
        kinds = {cls(each) for each in found}
        if len(kinds) <= 1 and not kinds & {cls.HALVED, cls.FULL}:
            return kinds.pop() if kinds else cls.EQUAL
        is_halved = kinds <= {cls.HALVED, cls.EQUAL} and record.weights.is_contiguous()
        return cls.HALVED if is_halved else cls.FULL


def kind_of(record: ParameterRecord) -> Kind:
    master = record.master
    if master is None:
        return Kind.EQUAL
    with master.lock:
        halves = master.halves
        if master.share is None:
            return Kind.WHOLE
        if not isinstance(halves, ShardedMaster):
            values = master.values() if halves is None else halves.joined()
            return Kind.EQUAL if torch.equal(values, record.weights.to(values.dtype)) else Kind.WHOLE
        if halves.is_complete:
            return Kind.EQUAL
        own = halves.own_values()
        if own.has_high_halves:
            return Kind.HALVED
        is_equal = torch.equal(own.joined(), flat(record.weights)[_range_in(record, halves.share)].float())
        return Kind.EQUAL if is_equal else Kind.FULL


def _range_in(record: ParameterRecord, share: Share) -> slice:
    return share.range_of(record.weights.numel())


def range_sources(record: ParameterRecord, home: Home, share: Share, *, is_halved: bool) -> Iterator[Source]:
    """This machine's range of a master: see [Note: ranges of machines]."""
    master, place = record.master, Range.of(share, record.weights)
    if master is None or not share.count_of(record.weights.numel()):
        return
    with master.lock:
        halves = master.halves
        own = halves.own_values() if isinstance(halves, ShardedMaster) else None
        if is_halved:
            assert isinstance(own, HalvedMaster)
            low = own.low if "low" in vars(own) else torch.zeros(own.weight.numel(), dtype=own.low_dtype)
            place = dataclasses.replace(place, shape=(record.weights.numel(),))
            yield Source(MASTER_LOW + record.name, low, home, range=place)
            if "ties" in vars(own):
                yield Source(f"{RANGED_TIES}{place.start}/{record.name}", own.ties, home)
            return
        if own is not None:
            values = own.joined()
        else:
            values = flat(master.values() if halves is None else halves.own_values().joined())[_range_in(record, share)]
        yield Source(MASTER + record.name, values, home, range=place)


def place_of(key: str, state: torch.Tensor, param: Any) -> Range | None:
    """The range of a tensor of an optimizer's state in the whole one; None if this machine has the whole one."""
    if not isinstance(param, OptimizerCopy) or param.share is None:
        return None
    mine, entry = param.share.range_of(param.numel()), elements_per_entry(key)
    if state.shape != (-(-(mine.stop - mine.start) // entry),):
        return None
    if entry > 1:
        return Range(mine.start // entry, (-(-param.numel() // entry),), None)
    with torch._C.DisableTorchFunctionSubclass():
        return Range.of(param.share, param)


# Reading.


def ties_in(tensors: Mapping[str, TensorEntry], path: Path) -> dict[str, list[tuple[int, TensorEntry]]]:
    """The ties of all masters in the checkpoint at `path`, by name of the parameter."""
    found: dict[str, list[tuple[int, TensorEntry]]] = {}
    for name, entry in tensors.items():
        if name.startswith(MASTER_TIES):
            found.setdefault(name.removeprefix(MASTER_TIES), []).append((0, entry))
        elif name.startswith(RANGED_TIES):
            start, _, owner = name.removeprefix(RANGED_TIES).partition("/")
            if not start.isdecimal():
                raise CheckpointError(f"{path} has {name!r}, which does not name the first value of a range.")
            found.setdefault(owner, []).append((int(start), entry))
    return found


def roundings_of(records: Iterable[ParameterRecord]) -> dict[str, int]:
    """How often each master of 24 bits was rounded, by the name of the parameter."""
    masters = {record.name: record.master for record in records if record.master is not None}
    return {name: master.rounding.count for name, master in masters.items() if master.rounding is not None}


def check_roundings(saved: Any) -> None:
    """Raise ValueError unless `saved` has the form of what `roundings_of` gives."""
    if not isinstance(saved, dict) or not all(
        isinstance(name, str) and type(count) is int and count >= 0 for name, count in saved.items()
    ):
        raise ValueError("the numbers of roundings of masters have another form")


class Conversions:
    """Counts the masters that are read with other bits than they were saved with, and logs it in one line."""

    def __init__(self, roundings: Mapping[str, int]) -> None:
        """`roundings`: what `roundings_of` has given when the checkpoint was saved."""
        self._roundings = roundings
        self._done: Counter[tuple[int, int]] = Counter()

    def begin(self, name: str, master: OptimizerCopy, *, has_own_values: bool) -> None:
        """Continue the roundings of a master. `has_own_values`: whether the checkpoint has more than its weight."""
        saved, own = (24 if known else 32 for known in (name in self._roundings, master.rounding is not None))
        if master.rounding is not None:
            master.rounding.count = self._roundings.get(name, 0)
        if has_own_values and saved != own:
            self._done[saved, own] += 1

    def log(self, path: Path) -> None:
        for (saved, own), count in self._done.items():
            logger.warning("%s: %d masters were converted from %d to %d bits.", path, count, saved, own)


def check_forms(record: ParameterRecord, tensors: Mapping[str, TensorEntry], ties: Ties, path: Path) -> None:
    """Raise CheckpointError if what the checkpoint at `path` has of a master cannot be that of this parameter."""
    count, name = record.weights.numel(), record.name
    shapes = {MASTER: tuple(record.weights.shape), MASTER_LOW: (count,), MASTER_TIES: (-(-count // 8),)}
    present = {prefix: tensors.get(prefix + name) for prefix in shapes}
    for prefix, shape in shapes.items():
        entry = present[prefix]
        if entry is not None and entry.shape != shape:
            raise CheckpointError(
                f"{prefix + name!r} has shape {list(entry.shape)} in {path} instead of {list(shape)}."
            )
    low = present[MASTER_LOW]
    is_low = low is not None and low.dtype in _OF_LOW and record.weights.dtype is torch.bfloat16
    if low is not None and (not is_low or present[MASTER] is not None):
        raise CheckpointError(f"{MASTER_LOW + name!r} in {path} is not a low part of a {record.weights.dtype} weight.")
    is_halved = is_low and low is not None and _OF_LOW[low.dtype] is HalvedMaster
    for start, bits in ties:
        is_flat = len(bits.shape) == 1 and bits.dtype == "U8" and is_halved
        if not is_flat or not 0 <= start < count or bits.shape[0] > -(-(count - start) // 8):
            raise CheckpointError(
                f"the range of {name!r} from value {start} on has {list(bits.shape)} bytes of "
                f"{MASTER_TIES.rstrip('/')} in {path}, of {count} values in all."
            )


def read_master(
    reader: Reader,
    record: ParameterRecord,
    master: OptimizerCopy,
    full: TensorEntry | None,
    low: TensorEntry | None,
    ties: Ties,
) -> None:
    """Set the values of a master whose weight was read already, from float32 values or from low parts.

    Values that need more bits than the master has are rounded to the nearest ones.
    """
    if isinstance(master.halves, ShardedMaster):
        _read_sharded(reader, record.weights, master.halves, full, low, ties)
        return
    if full is not None:
        _set_values(master, reader.read(full))
        return
    assert low is not None
    bits, form = read_ties(reader, ties, slice(0, record.weights.numel())), _OF_LOW[low.dtype]
    if master.halves is None:
        form(record.weights, reader.read(low), bits).join_into(master.values())
        return
    if type(master.halves) is not form:
        _set_values(master, form(record.weights, reader.read(low), bits).joined())
        return
    reader.read_into(low, master.halves.low)
    if bits is not None:
        master.halves.ties.copy_(bits)


def _set_values(master: OptimizerCopy, values: torch.Tensor) -> None:
    """Set the values of a master; it stays halved if its halves can hold them."""
    if master.halves is None or not master.halves.take(_like(values, master.halves.weight), rounds=True):
        master.values().copy_(values)
        master.mark_touched()


def _like(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The values in the memory order of a weight."""
    return torch.empty_like(weight, dtype=values.dtype, memory_format=torch.preserve_format).copy_(values)


def read_ties(reader: Reader, ties: Ties, values: slice) -> torch.Tensor | None:
    """The packed bits of a range of values; None if all are 0."""
    bits = torch.zeros(values.stop - values.start, dtype=torch.bool)
    for first, entry in ties:
        start, stop = max(first, values.start), min(first + 8 * entry.shape[0], values.stop)
        if start < stop:
            bits[start - values.start : stop - values.start] |= unpacked_bits(reader.read(entry))[
                start - first : stop - first
            ]
    return packed_bits(bits) if bits.any() else None


def read_own_range(reader: Reader, entry: TensorEntry, whole: torch.Tensor, share: Share, target: torch.Tensor) -> None:
    """Fill a flat tensor with this machine's range of an entry, in the memory order of `whole`, a dense tensor."""
    mine = share.range_of(whole.numel())
    if mine.start == mine.stop:
        return  # other machines read the values
    if has_order_of(entry, whole):
        reader.read_range(entry, mine.start, target)
        return
    ordered = torch.empty_strided(whole.shape, whole.stride(), dtype=target.dtype)
    reader.read_into(entry, ordered)
    target.copy_(flat(ordered)[mine])


def _read_sharded(
    reader: Reader,
    weights: torch.Tensor,
    master: ShardedMaster,
    full: TensorEntry | None,
    low: TensorEntry | None,
    ties: Ties,
) -> None:
    """Set this machine's range of a master whose weight was read already: from float32 values or from low halves."""
    mine = master.share.range_of(weights.numel())
    if full is None and weights.is_contiguous():
        own = master.own_values()
        if low is not None and type(own) is _OF_LOW[low.dtype]:
            reader.read_range(low, mine.start, own.low)
            bits = read_ties(reader, ties, mine)
            if bits is not None:
                own.ties.copy_(bits)
            return
    # Memory of which only this machine's range is used, so the system provides pages for this range alone.
    values = torch.empty_strided(weights.shape, weights.stride(), dtype=torch.float32)
    if full is not None:
        read_own_range(reader, full, weights, master.share, flat(values)[mine])
    else:
        assert low is not None
        plain = weights.contiguous()  # low halves are saved in row-major order
        bits = read_ties(reader, ties, slice(0, weights.numel()))
        values.copy_(_OF_LOW[low.dtype](plain, reader.read(low), bits).joined())
    master.take(values, rounds=True)
