"""Rows as files, folders and datasets of the hub have them, each with its place. Errors name the file and the line.

Knows kinds of files, never what the keys of a row mean.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from roundpipe.errors import ConfigError

_JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_TABLE_ENDINGS = (".parquet", ".arrow")
_TEXT_ENDING = ".txt"
_ENDINGS = (*_JSON_ENDINGS, *_TABLE_ENDINGS, *_DELIMITERS, _TEXT_ENDING)
_COMPRESSIONS = (".gz", ".zst")
_KINDS = f"{', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
# The beginning of a file with one array of rows, which may be the value of the file's only key.
_ARRAY = re.compile(r'\s*(\{\s*"(?:data|rows|train|examples|samples|items|instances)"\s*:\s*)?\[')
_BEGINNING_BYTES = 2**20  # of a file of JSON: an array without a line's end in them has all rows on one line
_MARK = b"\xef\xbb\xbf"  # of the byte order, at the beginning of some files of text
Place = tuple[int, int]  # in a file of text: bytes and lines before it
BEGINNING: Place = (0, 0)
_SKIPPED_BYTES = 2**20  # of a compressed file, at a time
# owner/name, owner/name:split or owner/name:config:split. A split may be a part, such as train[:1000].
HUB_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?::([\w.-]+)(?=:))?(?::([\w.+-]+(?:\[[^\]]*\])?))?")


class Places:
    """The file and line of each row."""

    def __init__(self) -> None:
        self._files: list[tuple[str, str]] = []  # name and unit
        self._file_of = array("l")  # of each row, its position in the list
        self._numbers = array("q")

    def begin(self, file: str, unit: str) -> None:
        """Rows that are added from now on are in this file, counted in `unit`."""
        self._files.append((file, unit))

    def add(self, number: int) -> None:
        self._file_of.append(len(self._files) - 1)
        self._numbers.append(number)

    def append(self, other: Places) -> None:
        """Add the rows of `other` behind those of this object."""
        self._file_of.extend(len(self._files) + file for file in other._file_of)
        self._numbers.extend(other._numbers)
        self._files += other._files

    def select(self, rows: Sequence[int]) -> Places:
        """The places of some rows, in this order; a row may be there several times."""
        chosen = Places()
        chosen._files = self._files
        chosen._file_of = array("l", (self._file_of[row] for row in rows))
        chosen._numbers = array("q", (self._numbers[row] for row in rows))
        return chosen

    def name(self, row: int) -> str:
        file, unit = self._files[self._file_of[row]]
        return f"{file}, {unit} {self._numbers[row]}"


@dataclasses.dataclass(frozen=True)
class Source:
    """One file of rows, or one table.

    rows: (number, row) of each row.
    table: a datasets.Dataset with the same rows, numbered from 0, if the source is one.
    """

    name: str
    unit: str
    rows: Iterable[tuple[int, Any]]
    table: Any = None

    @classmethod
    def of_table(cls, name: str, table: Any) -> Source:
        """The rows of a datasets.Dataset. Without its format: rows are lists, not tensors."""
        table = _without_decoding(table.with_format(None))
        return cls(name, "row", enumerate(table), table)


def _without_decoding(table: Any) -> Any:
    """The table with images as bytes and names of files, not as pixels."""
    from datasets import Image, List  # type: ignore[import-untyped]

    for name, feature in table.features.items():
        if isinstance(feature, Image):
            table = table.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            table = table.cast_column(name, List(Image(decode=False)))
    return table


def require_source(path: Path, option: str) -> None:
    """Raise ConfigError if there is no such file or folder, and no dataset of the hub can have the name."""
    is_name = HUB_NAME.fullmatch(str(path)) is not None and ending_of(path) not in _ENDINGS
    if not is_name and not path.exists():
        raise ConfigError(f"{option}: there is no file or folder {path}.")


def sources(path: Path, option: str, text_rows: str) -> list[Source]:
    """The files of a file, folder or name of the hub. `option` is the option that names it; it begins messages."""
    require_source(path, option)
    if not path.exists():
        return [_of_hub(path, option)]
    if is_dataset_folder(path, option):
        return [_of_dataset_folder(path, option)]
    return [_of_file(each, option, text_rows) for each in data_files(path, option)]


def is_dataset_folder(path: Path, option: str) -> bool:
    """Whether this is a folder of Dataset.save_to_disk(). Raises ConfigError for one with several splits."""
    if path.is_dir() and (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise ConfigError(f"{option}: {path} is a datasets folder with several splits; name one of them: {splits}.")
    return path.is_dir() and (path / "state.json").exists()


def data_files(path: Path, option: str) -> list[Path]:
    """The file itself, or the files of a folder in the order of their names."""
    files = sorted(each for each in path.iterdir() if _is_data_file(each)) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{option}: {path} has no {_KINDS} file and is no folder of datasets.save_to_disk.")
    for file in files:
        if ending_of(file) not in _ENDINGS:
            raise ConfigError(
                f"{option}: {file} must end in {_KINDS}, or be a folder. Files of text may be compressed (.gz, .zst)."
            )
    return files


def _is_data_file(path: Path) -> bool:
    """Whether a file of a folder is read. Hidden files are not: editors and systems leave such ones."""
    return path.is_file() and not path.name.startswith(".") and ending_of(path) in _ENDINGS


def ending_of(file: Path) -> str:
    """The end of a file's name that says what it has, in lower case. Of compressed files, the one before."""
    ending = file.suffix.lower()
    if ending not in _COMPRESSIONS:
        return ending
    inner = Path(file.stem).suffix.lower()
    return "" if inner in _TABLE_ENDINGS else inner  # tables compress themselves


@contextlib.contextmanager
def opened(file: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """The bytes of a file from a place on; of a compressed one, those before it was compressed."""
    with contextlib.ExitStack() as stack:
        stream: Any = stack.enter_context(file.open("rb"))
        if file.suffix.lower() == ".gz":
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        elif file.suffix.lower() == ".zst":
            import pyarrow  # type: ignore[import-untyped]

            whole = stack.enter_context(pyarrow.CompressedInputStream(stream, "zstd"))
            stream = stack.enter_context(io.BufferedReader(whole))
        if stream.seekable():
            stream.seek(offset)
        else:
            for begin in range(0, offset, _SKIPPED_BYTES):
                stream.read(min(_SKIPPED_BYTES, offset - begin))
        yield stream


def _of_file(file: Path, option: str, text_rows: str) -> Source:
    ending = ending_of(file)
    if ending in _TABLE_ENDINGS:
        return Source.of_table(str(file), _table_of(file, option))
    unit = text_rows if ending == _TEXT_ENDING else "line"
    if ending == ".json":
        with readable(file, option):
            unit = unit_of_json(file)
    return Source(str(file), unit, _read_lines(file, option, text_rows))


def _of_hub(path: Path, option: str) -> Source:
    from datasets import load_dataset

    match = HUB_NAME.fullmatch(str(path))
    assert match is not None
    dataset, config, split = match.groups()
    try:
        table = load_dataset(dataset, config, split=split or "train")
    except Exception as error:  # datasets and the hub's client raise many kinds of errors
        raise ConfigError(
            f"{option}: there is no file or folder {path}, and a dataset of the hub (owner/name, owner/name:split or "
            f"owner/name:config:split) cannot be loaded: {' '.join(str(error).split())}"
        ) from error
    return Source.of_table(str(path), table)


def _of_dataset_folder(path: Path, option: str) -> Source:
    from datasets import load_from_disk

    try:
        # In memory: no cache files beside the user's data.
        return Source.of_table(str(path), load_from_disk(str(path), keep_in_memory=True))
    except Exception as error:  # pyarrow, json and OS errors
        raise ConfigError(f"{option}: {path} is a damaged datasets folder: {error}.") from error


def _table_of(file: Path, option: str) -> Any:
    """A datasets.Dataset of a parquet or arrow file. It is never taken from a cache of an earlier version of a file."""
    from datasets import Dataset
    from datasets.table import InMemoryTable  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        if file.suffix.lower() == ".parquet":
            return Dataset(InMemoryTable(parquet.read_table(file)))
        return Dataset.from_file(str(file), in_memory=True)
    except Exception as error:  # pyarrow and OS errors
        raise ConfigError(f"{option}: {file} cannot be read: {' '.join(str(error).split())}") from error


def _read_lines(file: Path, option: str, text_rows: str) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of the rows of a file of text; empty lines are none."""
    ending = ending_of(file)
    with readable(file, option):
        if ending == _TEXT_ENDING:
            yield from _read_text(file, text_rows)
        elif ending == ".json" and begins_array(file):
            yield from _read_array(file)
        else:
            for number, row, _ in rows_of_lines(file):
                yield number, row


@contextlib.contextmanager
def readable(file: Path, option: str) -> Iterator[None]:
    """Raise ConfigError for errors of the system inside the block, which reads the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # the latter two of damaged compressed files
        raise ConfigError(f"{option}: cannot read {file}: {getattr(error, 'strerror', None) or error}.") from error


def rows_of_lines(file: Path, place: Place = BEGINNING) -> Iterator[tuple[int, Any, Place]]:
    """Yield (line, row, place behind it) of a file with JSON lines, cells, or text in lines, from a place on."""
    ending = ending_of(file)
    if ending in _DELIMITERS:
        yield from _read_cells(file, _DELIMITERS[ending], place)
        return
    offset, number = place
    with opened(file, offset) as stream:
        for line in stream:
            offset, number = offset + len(line), number + 1
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            row = {"text": _text_of(line, where)} if ending == _TEXT_ENDING else _parse_line(line, where)
            yield number, row, (offset, number)


def _text_of(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 text (byte {error.start + 1}).") from error


def _whole_text(file: Path) -> str:
    try:
        with opened(file) as stream:
            return stream.read().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start + 1}).") from error


# JSON.


def _parsed(
    parse: Callable[[], Any], has_escapes: bool, place: str, fault: Callable[[json.JSONDecodeError], str]
) -> Any:
    """The result of `parse`. Errors name the place."""
    try:
        row = parse()
        if has_escapes:
            json.dumps(row, ensure_ascii=False).encode()  # JSON can name half of a surrogate pair, UTF-8 cannot
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 text (byte {error.start + 1}).") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(f"{place}: {half} is half of a surrogate pair and no character; remove it.") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON: {fault(error)}.") from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
        raise ConfigError(f"{place}: the JSON cannot be read: {error}.") from error
    return row


def _parse_line(line: bytes, place: str) -> Any:
    def fault(error: json.JSONDecodeError) -> str:
        is_spread = line.lstrip().startswith(b"[") or line.strip() == b"{"
        hint = ". The file must have one JSON object per line, or be a .json file with one array" if is_spread else ""
        return _fault_of_line(error) + hint

    return _parsed(lambda: json.loads(line.decode("utf-8-sig")), b"\\u" in line, place, fault)


def _fault_of_line(error: json.JSONDecodeError) -> str:
    """What is wrong with a line, and its column. Of a line that was cut, the column is where it ends."""
    line = error.doc.rstrip("\r\n")
    rest = line[error.pos :].strip()
    is_half_word = any(word.startswith(rest) for word in ("true", "false", "null"))  # also if nothing is left
    is_half_escape = error.msg.startswith("Invalid \\") and '"' not in rest
    if is_half_word or is_half_escape or error.msg.startswith("Unterminated string"):
        return f"the line ends at column {len(line)} before its JSON does; it was cut, or continues on the next line"
    return f"{error.msg} at column {error.colno}"


def begins_array(file: Path) -> bool:
    with opened(file) as stream:
        return _ARRAY.match(stream.read(1024).removeprefix(_MARK).decode(errors="replace")) is not None


def unit_of_json(file: Path) -> str:
    """What rows of a file of JSON are counted in: those of an array that is on one line have no line of their own."""
    with opened(file) as stream:
        begin = stream.read(_BEGINNING_BYTES)
    return "entry" if begins_array(file) and b"\n" not in begin.strip() else "line"


def _read_array(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of the entries of a file with one JSON array, counted as `unit_of_json` says.

    Lines are those in which entries begin.
    """
    text, unit, entry = _whole_text(file), unit_of_json(file), 0
    decoder, space = json.JSONDecoder(), re.compile(r"\s*")

    def skip_space(position: int) -> int:
        found = space.match(text, position)
        assert found is not None
        return found.end()

    def fault(error: json.JSONDecodeError) -> str:
        return f"{error.msg} at line {error.lineno}, column {error.colno}"

    opening = _ARRAY.match(text)
    assert opening is not None
    position, line, counted = skip_space(opening.end()), 1, 0
    is_end = text[position : position + 1] == "]"
    while not is_end:
        line, counted = line + text.count("\n", counted, position), position
        entry += 1
        number = entry if unit == "entry" else line
        place, begin = f"{file}, {unit} {number}", position
        row, position = _parsed(lambda: decoder.raw_decode(text, begin), False, place, fault)  # noqa: B023
        if "\\u" in text[begin:position]:
            _parsed(lambda: row, True, place, fault)  # noqa: B023
        yield number, row
        position = skip_space(position)
        is_end = text[position : position + 1] == "]"
        if not is_end and text[position : position + 1] != ",":
            after = line + text.count("\n", counted, position)
            what = f"{text[position]!r}" if position < len(text) else "the end of the file"
            raise ConfigError(f"{file}, line {after}: not valid JSON: a comma or ] is missing before {what}.")
        if not is_end:
            position = skip_space(position + 1)
    rest = text[position + 1 :].strip()
    if opening.group(1) and rest.startswith(","):
        raise ConfigError(f"{file}: there is more beside the array of rows; make a file of the rows that you want.")
    if opening.group(1) and rest != "}":
        raise ConfigError(f"{file}: not valid JSON: a }} is missing after the ] that ends the array.")
    if not opening.group(1) and rest:
        raise ConfigError(f"{file}: not valid JSON: there is text after the ] that ends the array.")


# Other text.


def _read_cells(file: Path, delimiter: str, place: Place) -> Iterator[tuple[int, dict[str, str], Place]]:
    """Yield (line, row, place behind it) of a table with a header. Cells are text; a cell may have several lines."""
    csv.field_size_limit(sys.maxsize)  # cells are documents; not reset, because several such files may be read in turn
    number = 1
    try:
        with _counted_lines(file, 0) as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            header = next(reader, [])
            begin = (lines.offset, reader.line_num)
        if len(set(header)) < len(header):
            raise ConfigError(f"{file}, line 1: two columns have the same name: {', '.join(header)}.")
        offset, done = max(begin, place)
        number = done + 1
        with _counted_lines(file, offset) as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            for cells in reader:
                if cells and len(cells) != len(header):
                    raise ConfigError(
                        f"{file}, line {number}: the row has {len(cells)} cells, the header {len(header)}; put cells "
                        f"with {delimiter!r} or a line break into double quotes."
                    )
                behind = (lines.offset, done + reader.line_num)
                if any(cells):
                    yield number, dict(zip(header, cells, strict=True)), behind
                number = behind[1] + 1
    except csv.Error as error:
        raise ConfigError(f"{file}, line {number}: the cells cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start + 1}).") from error


class _CountedLines:
    """The lines of a stream of text, with their ends. `offset` is the place in bytes behind those that were read."""

    def __init__(self, text: TextIO, offset: int) -> None:
        self.offset = offset
        self._text = text

    def __iter__(self) -> Iterator[str]:
        for line in self._text:
            self.offset += len(line.encode())
            yield line


@contextlib.contextmanager
def _counted_lines(file: Path, offset: int) -> Iterator[_CountedLines]:
    """The lines of a file of UTF-8 from a place on, without the mark of the byte order."""
    if offset == 0:
        with opened(file) as stream:
            offset = len(_MARK) if stream.read(len(_MARK)) == _MARK else 0
    with opened(file, offset) as stream, io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
        yield _CountedLines(text, offset)


def _read_text(file: Path, text_rows: str) -> Iterator[tuple[int, dict[str, str]]]:
    text = _whole_text(file)
    # Not splitlines(): it also splits at form feeds and at U+2028. read_text() has turned \r\n into \n.
    pieces = [text] if text_rows == "document" else text.split("\n" if text_rows == "line" else "\n\n")
    for number, piece in enumerate(pieces, 1):
        if piece.strip():
            yield number, {"text": piece}
