"""Cuts a call's inputs and labels into microbatches and puts the outputs together again.

Called by api and runtime; users take `Chunk`, `Replicate` and `Reducer` from here to write specs. Knows values and
specs, never devices, schedules or models.
"""

from typing import TYPE_CHECKING, Any

from roundpipe.microbatch import specs
from roundpipe.microbatch.loss_shares import LossShares
from roundpipe.microbatch.merge import merge_outputs, pack_outputs
from roundpipe.microbatch.packed import ArrivalEvent, RoundPipePackedData
from roundpipe.microbatch.specs import check_merge_output, check_split_input, check_split_label
from roundpipe.microbatch.split import Arriving, MicrobatchInputs, split_call

if TYPE_CHECKING:
    from roundpipe.microbatch.specs import Chunk, Reducer, Replicate

__all__ = [
    "ArrivalEvent",
    "Arriving",
    "Chunk",
    "LossShares",
    "MicrobatchInputs",
    "Reducer",
    "Replicate",
    "RoundPipePackedData",
    "check_merge_output",
    "check_split_input",
    "check_split_label",
    "merge_outputs",
    "pack_outputs",
    "split_call",
]


def __getattr__(name: str) -> Any:
    """Import the split specs when they are first named; see specs."""
    if name in ("Chunk", "Reducer", "Replicate"):
        return getattr(specs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
