"""Reads one machine's ranges of masters and moments from a checkpoint, whichever ranges it was written in.

See [Note: ranges of machines] in contents. Knows no model and no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from roundpipe.checkpoint.contents import MASTER_TIES, RANGED_TIES
from roundpipe.checkpoint.format import Reader, TensorEntry, has_order_of
from roundpipe.errors import CheckpointError
from roundpipe.store import HalvedMaster, Share
from roundpipe.store.values import ShardedMaster, flat, packed_bits, unpacked_bits

Ties = Sequence[tuple[int, TensorEntry]]  # numbers of first values, and the packed bits from there on


def ties_in(tensors: Mapping[str, TensorEntry]) -> dict[str, list[tuple[int, TensorEntry]]]:
    """The ties of all masters in a checkpoint, by name of the parameter."""
    found: dict[str, list[tuple[int, TensorEntry]]] = {}
    for name, entry in tensors.items():
        if name.startswith(MASTER_TIES):
            found.setdefault(name.removeprefix(MASTER_TIES), []).append((0, entry))
        elif name.startswith(RANGED_TIES):
            start, _, owner = name.removeprefix(RANGED_TIES).partition("/")
            if not start.isdecimal():
                raise CheckpointError(f"a checkpoint has the tensor {name!r}, whose name does not begin with a number.")
            found.setdefault(owner, []).append((int(start), entry))
    return found


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
    if has_order_of(entry, whole):
        reader.read_range(entry, mine.start, target)
        return
    ordered = torch.empty_strided(whole.shape, whole.stride(), dtype=target.dtype)
    reader.read_into(entry, ordered)
    target.copy_(flat(ordered)[mine])


def read_sharded(
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
        if isinstance(own, HalvedMaster) and low is not None:
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
        values.copy_(HalvedMaster(plain, reader.read(low), bits).joined())
    master.take(values)
