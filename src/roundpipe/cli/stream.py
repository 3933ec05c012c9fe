"""Rows that are read, tokenized and dropped while the model trains: `roundpipe train --streaming`.

[Note: blocks of a stream] Rows are read in blocks, each as large as the shuffle buffer. All that is random in a block
depends on the seed and the number of the block. So a position is the place in each file where a block begins and the
number of sequences of the block that were trained. A resumed run reads that block again, and nothing before it.

Knows the order of rows and positions in it; files are read by `cli/stream_sources`, tokens made by the caller.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from roundpipe.cli.stream_sources import Found, StreamSource
from roundpipe.errors import ConfigError

# Rows that are tokenized together, and that --packing joins: the number that TRL joins.
PIECE_ROWS = 1000
_NO_ROWS = "--data: the files have no rows any more; they were changed while they were read."

Sequences = Sequence[dict[str, list[int]]]


@dataclasses.dataclass(frozen=True)
class StreamRow:
    """A row as it was read. `entry`: the number of its entry of --data."""

    entry: int
    source: StreamSource
    number: int
    row: Any

    @property
    def place(self) -> str:
        return f"{self.source.name}, {self.source.unit} {self.number}"


class _Cursor:
    """A place in one entry of --data, which has one or several files, and the rows from there on.

    passes: how often all of its rows were read. With an `order`, each pass reads the files in another order.
    """

    def __init__(self, entry: int, sources: Sequence[StreamSource], order: Callable[[int, int], list[int]]) -> None:
        self.passes = 0
        self._entry, self._sources, self._order = entry, sources, order
        self._file = 0  # how many were read in this pass
        self._at: Any = None  # the position in the file
        self._rows: Iterator[Found] | None = None

    @property
    def position(self) -> list[Any]:
        return [self.passes, self._file, self._at]

    def go_to(self, position: Sequence[Any]) -> None:
        self.passes, self._file, self._at = position
        self._rows = None

    def next_row(self) -> StreamRow | None:
        """The next row; None at the end of a pass."""
        while self._file < len(self._sources):
            source = self._sources[self._order(self.passes, self._entry)[self._file]]
            if self._rows is None:
                self._rows = source.read(self._at)
            found = next(self._rows, None)
            if found is not None:
                number, row, self._at = found
                return StreamRow(self._entry, source, number, row)
            self._file, self._at, self._rows = self._file + 1, None, None
        self.passes, self._file = self.passes + 1, 0
        return None


class Stream:
    """The sequences of several entries of --data, without end: when all rows were read, they are read again.

    Without weights, the entries take turns, and each row comes once in a pass. With weights, each row is of an entry
    drawn by weight, and an entry that ends begins again.
    """

    def __init__(
        self,
        entries: Sequence[Sequence[StreamSource]],
        prepare: Callable[[Sequence[StreamRow]], Sequences],
        *,
        weights: Sequence[float] | None,
        buffer: int,
        seed: int,
    ) -> None:
        """prepare: makes sequences of rows, in their order. buffer: rows that are shuffled together; 0 for none."""
        self._entries, self._prepare, self._weights = entries, prepare, weights
        self._buffer, self._seed = buffer, seed
        self._begin: dict[str, Any] = {"block": 0, "cursors": None, "sequences": 0, "trained": 0}
        self._marks = deque([self._begin])  # where the blocks begin that the last iterator has read

    def digest(self) -> str:
        """A checksum of what the order of rows depends on, and of the files as far as their beginnings show."""
        about = [[source.version for source in sources] for sources in self._entries]
        return f"rows:{hashlib.sha256(repr((about, self._weights, self._buffer)).encode()).hexdigest()}"

    def head(self) -> Sequence[StreamRow]:
        """The first rows."""
        return self._block(self._cursors(None), 0)[:PIECE_ROWS]

    def position_at(self, num_rows: int) -> dict[str, Any]:
        """Where sequence number `num_rows` is; see `SeekableRows` in `integrations/iterable_data`."""
        while len(self._marks) > 1 and self._marks[1]["sequences"] <= num_rows:
            self._marks.popleft()
        return {**self._marks[0], "trained": num_rows - self._marks[0]["sequences"]}

    def go_to(self, position: dict[str, Any]) -> None:
        self._begin = position

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        cursors = self._cursors(self._begin["cursors"])
        block, number, skipped = self._begin["block"], self._begin["sequences"], self._begin["trained"]
        self._marks = deque()
        while True:
            places = [cursor.position for cursor in cursors]
            self._marks.append({"block": block, "cursors": places, "sequences": number, "trained": 0})
            before, rows = number, self._block(cursors, block)
            for begin in range(0, len(rows), PIECE_ROWS):
                for sequence in self._prepare(rows[begin : begin + PIECE_ROWS]):
                    number += 1
                    if skipped:
                        skipped -= 1
                    else:
                        yield sequence
            if number == before:
                raise ConfigError(
                    f"--data: none of {len(rows)} rows, the first of which is {rows[0].place}, has a token with a loss "
                    "within --seq-len; raise it."
                )
            block += 1

    def _cursors(self, positions: Sequence[Any] | None) -> list[_Cursor]:
        cursors = [_Cursor(entry, sources, self._file_order) for entry, sources in enumerate(self._entries)]
        for cursor, position in zip(cursors, positions or (), strict=bool(positions)):
            cursor.go_to(position)
        return cursors

    def _file_order(self, passes: int, entry: int) -> list[int]:
        import numpy

        size = len(self._entries[entry])
        if not self._buffer:
            return list(range(size))
        order: list[int] = numpy.random.default_rng([self._seed, passes, entry]).permutation(size).tolist()
        return order

    def _block(self, cursors: Sequence[_Cursor], number: int) -> list[StreamRow]:
        """The rows of the next block, in the order in which they are trained."""
        import numpy

        rng = numpy.random.default_rng([self._seed, number])
        size = self._buffer or PIECE_ROWS
        if self._weights is None:
            rows = self._rows_in_turn(cursors, size)
        else:
            shares = numpy.array(self._weights) / sum(self._weights)
            rows = [_endless_row(cursors[entry]) for entry in rng.choice(len(cursors), size, p=shares)]
        return [rows[row] for row in rng.permutation(len(rows))] if self._buffer else rows

    def _rows_in_turn(self, cursors: Sequence[_Cursor], size: int) -> list[StreamRow]:
        """Rows of all cursors that have not ended in this pass, one of each in turn; at most to the end of the pass."""
        rows: list[StreamRow] = []
        for _ in range(2):  # the first time, all may be at their end
            passes = min(cursor.passes for cursor in cursors)
            active = [cursor for cursor in cursors if cursor.passes == passes]
            while active and len(rows) < size:
                found = [cursor.next_row() for cursor in active[: size - len(rows)]]
                rows += [row for row in found if row is not None]
                active = [cursor for cursor in active if cursor.passes == passes]
            if rows:
                return rows
        raise ConfigError(_NO_ROWS)


def _endless_row(cursor: _Cursor) -> StreamRow:
    row = cursor.next_row() or cursor.next_row()  # None at the end of a pass
    if row is None:
        raise ConfigError(_NO_ROWS)
    return row


def trainable(stream: Stream) -> Any:
    """The stream as a datasets.IterableDataset with a position, which trainers of TRL take."""
    from datasets import DatasetInfo, Features, IterableDataset, Sequence, Value  # type: ignore[import-untyped]
    from datasets.iterable_dataset import ExamplesIterable  # type: ignore[import-untyped]

    class StreamedRows(IterableDataset):  # type: ignore[misc]
        """Token ids and labels. A run that is resumed goes to its position."""

        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            return iter(stream)

        def position_at(self, num_rows: int) -> Any:
            return stream.position_at(num_rows)

        def go_to(self, position: Any) -> None:
            stream.go_to(position)

    features = Features({name: Sequence(Value("int64")) for name in ("input_ids", "labels")})
    return StreamedRows(ExamplesIterable(lambda: enumerate(stream), {}), info=DatasetInfo(features=features))
