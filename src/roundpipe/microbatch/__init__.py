"""Cuts a call's inputs and labels into microbatches and puts the outputs together again.

Called by api and runtime; users take `Chunk`, `Replicate` and `Reducer` from here to write specs. Knows values and
specs, never devices, schedules or models.
"""

from roundpipe.microbatch.markers import (
    Chunk,
    Reducer,
    Replicate,
    check_merge_output,
    check_split_input,
    check_split_label,
)
from roundpipe.microbatch.merge import merge_outputs, pack_outputs
from roundpipe.microbatch.packed import ArrivalEvent, RoundPipePackedData
from roundpipe.microbatch.split import Arriving, MicrobatchInputs, split_call

__all__ = [
    "ArrivalEvent",
    "Arriving",
    "Chunk",
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
