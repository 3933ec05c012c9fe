"""Splits a call's inputs and label into microbatches and merges the microbatches' outputs.

Users import `Chunk`, `Replicate` and `Reducer` from here to write specs. Knows values and specs; knows no devices,
schedules or models.
"""

from typing import TYPE_CHECKING, Any

from roundpipe.microbatch import specs
from roundpipe.microbatch.merge import merge_outputs, pack_outputs
from roundpipe.microbatch.specs import (
    ArrivalEvent,
    Arriving,
    RoundPipePackedData,
    check_merge_output,
    check_split_input,
    check_split_label,
)
from roundpipe.microbatch.split import LossShares, MicrobatchInputs, split_call

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
    """Import `Chunk`, `Reducer` and `Replicate` only at their first use; `roundpipe.microbatch.specs` says why."""
    if name in ("Chunk", "Reducer", "Replicate"):
        return getattr(specs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
