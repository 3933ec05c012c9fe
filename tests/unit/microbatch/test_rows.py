"""MicrobatchInputs.rows: the rows of the batch in each microbatch, or None if the call does not show them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundpipe.microbatch import Chunk, Replicate, RoundPipePackedData, split_call
from roundpipe.microbatch.hf_inputs import ModelInputSplit

ROWS = (3, 2, 2)  # seven rows in three microbatches
PACKED = RoundPipePackedData([torch.zeros(rows, 2) for rows in (1, 4, 2)])


def rows_of(*args: Any, kwargs: Any = None, label: Any = None, **options: Any) -> tuple[int, ...] | None:
    return split_call(args, kwargs or {}, label, num_microbatch=3, **options).rows


def uneven(args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any:
    return [(piece,) for piece in args[0].split([1, 4, 2])], [{}] * 3


def sliced(args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any:
    """Returns pieces beside a tensor that is the same in every microbatch, and beside values without rows."""
    pieces = args[0].split([1, 4, 2])
    return [(piece, args[0], torch.zeros(len(piece), 9), 5, torch.tensor(1)) for piece in pieces], [{}] * 3


def mixed(args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int) -> Any:
    """Returns pieces beside tensors with different numbers of rows, such as patches of images."""
    return [(piece, torch.zeros(patches, 4)) for piece, patches in zip(args[0].split(ROWS), (8, 0, 5), strict=True)], [
        {}
    ] * 3


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rows_of(torch.zeros(7, 2)), ROWS),
        (rows_of(kwargs={"x": torch.zeros(7), "table": torch.zeros(1, 4)}), ROWS),
        (rows_of(torch.zeros(2, 7), split_input=((Chunk(1),), None)), ROWS),
        (rows_of(label=torch.zeros(7)), ROWS),
        (rows_of(torch.zeros(4, 4), label=torch.zeros(7), split_input=((Replicate,), None)), ROWS),
        (rows_of(torch.zeros(2)), (1, 1)),
        (rows_of(torch.zeros(1, 3)), (1,)),
        (rows_of(torch.zeros(7), split_input=uneven), (1, 4, 2)),
        (rows_of(torch.zeros(7), split_input=sliced), (1, 4, 2)),
        (rows_of(torch.zeros(7), split_input=mixed, label=torch.zeros(7, 3)), ROWS),
        (rows_of(torch.zeros(7), label=torch.zeros(7), split_label=lambda y, n: y.split([1, 4, 2])), (1, 4, 2)),
        (rows_of(PACKED), (1, 4, 2)),
        (rows_of(PACKED, label=RoundPipePackedData([torch.zeros(rows) for rows in (1, 4, 2)])), (1, 4, 2)),
        (rows_of(kwargs={"input_ids": torch.zeros(7, 5)}, split_input=ModelInputSplit(None)), ROWS),
        (rows_of(kwargs={"input_ids": torch.zeros(1, 5)}, split_input=ModelInputSplit(None)), (1,)),
    ],
)
def test_rows_are_counted_along_the_split_dimension(found: Any, expected: Any) -> None:
    """The label determines them; if it does not, the inputs do."""
    assert found == expected


@pytest.mark.parametrize(
    "found",
    [
        rows_of(torch.tensor(1.0)),
        rows_of(torch.zeros(7), split_input=mixed),
        rows_of("text", split_input=lambda args, kwargs, n: ([("a",), ("b",)], [{}, {}])),
        rows_of(RoundPipePackedData([1, 2, 3])),
        rows_of(torch.zeros(4, 4), split_input=((Replicate,), None)),
    ],
)
def test_rows_are_not_guessed(found: Any) -> None:
    """Nothing was split, the values have no rows, or tensors disagree."""
    assert found is None
