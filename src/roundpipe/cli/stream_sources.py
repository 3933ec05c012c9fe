"""Rows of files, folders and datasets of the hub that are read one after the other, from any position on.

Holds some rows in memory, never a whole file. A position is plain data, for checkpoints. Knows kinds of files, never
what the keys of a row mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from roundpipe.cli.sources import (
    BEGINNING,
    HUB_NAME,
    Source,
    begins_array,
    data_files,
    ending_of,
    is_dataset_folder,
    readable,
    require_source,
    rows_of_lines,
)
from roundpipe.errors import ConfigError

_TABLE_ROWS = 256  # of a parquet file that are in memory at a time
_HEAD_BYTES = 2**16  # of a file, by which another version of it is known

Found = tuple[int, Any, Any]  # number of a row, the row, and the position behind it


@dataclasses.dataclass(frozen=True)
class StreamSource:
    """One file of rows, or one table.

    read: yields the rows from a position on; None is the beginning.
    version: differs for a file with other rows, as far as its size and beginning show.
    """

    name: str
    unit: str
    read: Callable[[Any], Iterator[Found]]
    version: str


def stream_sources(path: Path, option: str, text_rows: str) -> list[StreamSource]:
    """The files of a file, folder or name of the hub. `option` is the option that names it; it begins messages."""
    require_source(path, option)
    if not path.exists():
        return [StreamSource(str(path), "row", functools.partial(_read_hub, path, option), "")]
    if is_dataset_folder(path, option):
        rows = functools.partial(_read_memory_map, path, option)
        version = _version(path / "state.json", option)
        return [StreamSource(str(path), "row", rows, version)]
    return [_of_file(each, option, text_rows) for each in data_files(path, option)]


def _of_file(file: Path, option: str, text_rows: str) -> StreamSource:
    ending = ending_of(file)
    if ending == ".txt" and text_rows != "line":
        raise ConfigError(f"{option}: {file} cannot be streamed by --text-rows {text_rows}; rows must be lines.")
    with readable(file, option):
        is_array = ending == ".json" and begins_array(file)
    if is_array:
        raise ConfigError(
            f"{option}: {file} has one JSON array, which cannot be streamed; write one object per line: "
            "jq -c '.[]' FILE.json > FILE.jsonl"
        )
    reads = {".parquet": _read_parquet, ".arrow": _read_memory_map}
    unit = "row" if ending in reads else "line"
    read = functools.partial(reads.get(ending, _read_lines), file, option)
    return StreamSource(str(file), unit, read, _version(file, option))


def _version(file: Path, option: str) -> str:
    with readable(file, option), file.open("rb") as stream:
        return f"{file.stat().st_size} {hashlib.sha256(stream.read(_HEAD_BYTES)).hexdigest()}"


def _read_lines(file: Path, option: str, position: Any) -> Iterator[Found]:
    with readable(file, option):
        offset, lines = position or BEGINNING  # a list, if it comes from a file
        yield from rows_of_lines(file, (offset, lines))


def _read_parquet(file: Path, option: str, position: Any) -> Iterator[Found]:
    from datasets import Dataset  # type: ignore[import-untyped]
    from datasets.table import InMemoryTable  # type: ignore[import-untyped]
    from pyarrow import Table, parquet  # type: ignore[import-untyped]

    first = position or 0  # the rows before it are read already
    with _readable_table(file, option), parquet.ParquetFile(file) as groups:
        begin = 0
        for group in range(groups.num_row_groups):
            size = groups.metadata.row_group(group).num_rows
            if begin + size <= first:
                begin += size
                continue
            for batch in groups.iter_batches(_TABLE_ROWS, row_groups=[group]):
                skipped = max(first - begin, 0)
                if skipped < len(batch):
                    table = Dataset(InMemoryTable(Table.from_batches([batch.slice(skipped)])))
                    for number, row in Source.of_table(str(file), table).rows:
                        at = begin + skipped + number
                        yield at, row, at + 1
                begin += len(batch)


def _read_memory_map(path: Path, option: str, position: Any) -> Iterator[Found]:
    """The rows of an .arrow file or a datasets folder. The system reads its pages as they are needed."""
    from datasets import Dataset, load_from_disk

    first = position or 0
    with _readable_table(path, option):
        table = load_from_disk(str(path)) if path.is_dir() else Dataset.from_file(str(path))
        for number, row in Source.of_table(str(path), table.select(range(first, len(table)))).rows:
            yield first + number, row, first + number + 1


def _read_hub(path: Path, option: str, position: Any) -> Iterator[Found]:
    from datasets import load_dataset

    match = HUB_NAME.fullmatch(str(path))
    assert match is not None
    name, config, split = match.groups()
    with _readable_table(path, option):
        rows = load_dataset(name, config, split=split or "train", streaming=True)
        first, state = position or (0, None)
        if state is not None:
            rows.load_state_dict(state)
        for number, row in enumerate(rows, first):
            yield number, row, (number + 1, rows.state_dict())


@contextlib.contextmanager
def _readable_table(path: Path, option: str) -> Iterator[None]:
    """Raise ConfigError for errors of pyarrow, datasets and the hub inside the block, which reads the path."""
    try:
        yield
    except Exception as error:  # these libraries raise many kinds of errors
        raise ConfigError(f"{option}: {path} cannot be read: {' '.join(str(error).split())}") from error
