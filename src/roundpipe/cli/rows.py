"""Rows of training data: files and folders to checked rows of one format. Errors name the file and the line.

Knows the formats of rows, never tokenizers and models.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roundpipe.errors import ConfigError

IGNORED = -100  # the label of a token without loss
_JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
_TEXT_ENDING = ".txt"
_FORMATS = "`text`, `prompt` and `completion`, `messages`, or `input_ids`"
_MASKS = ("completion_mask", "assistant_masks")  # of tokens, in TRL's datasets: which ones have a loss
_LARGEST_INT = 2**63 - 1  # of the datasets library


class RowFormat(enum.Enum):
    """What a row consists of. Decides which of its tokens have a loss."""

    TEXT = "text"  # all tokens
    PROMPT_COMPLETION = "prompt and completion"  # the completion
    MESSAGES = "messages"  # the assistant's messages
    TOKENS = "input_ids"  # tokenized already: as its labels say, else all tokens

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys that every row has."""
        return ("prompt", "completion") if self is RowFormat.PROMPT_COMPLETION else (self.value,)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The keys that rows may have: labels, or what TRL passes to the chat template. Others are ignored."""
        return ("labels",) if self is RowFormat.TOKENS else ("tools", "chat_template_kwargs")


class Places:
    """The file and line of each row."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # the first row of each file
        self._files: list[Path] = []
        self._units: list[str] = []
        self._numbers = array("q")

    def begin(self, file: Path, unit: str) -> None:
        """Rows that are added from now on are in this file, counted in `unit`."""
        self._starts.append(len(self._numbers))
        self._files.append(file)
        self._units.append(unit)

    def add(self, number: int) -> None:
        self._numbers.append(number)

    def append(self, other: Places) -> None:
        """Add the rows of `other` behind those of this object."""
        self._starts += [len(self._numbers) + start for start in other._starts]
        self._files += other._files
        self._units += other._units
        self._numbers.extend(other._numbers)

    def name(self, row: int) -> str:
        file = bisect_right(self._starts, row) - 1
        return f"{self._files[file]}, {self._units[file]} {self._numbers[row]}"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Checked rows of one format: a datasets.Dataset with the format's columns, and where each row comes from."""

    dataset: Any
    places: Places
    format: RowFormat


def read_rows(path: Path, option: str, text_rows: str) -> Rows:
    """Read and check all rows of a file or folder. `option` is the option that names it; it begins messages."""
    if not path.exists():
        raise ConfigError(f"{option}: there is no file or folder {path}.")
    if path.is_dir() and (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise ConfigError(f"{option}: {path} is a datasets folder with several splits; name one of them: {splits}.")
    if path.is_dir() and (path / "state.json").exists():
        return _read_dataset_folder(path, option)
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if _is_data_file(each))
        if not files:
            raise ConfigError(f"{option}: {path} has no .jsonl or .txt file and is no folder of datasets.save_to_disk.")
    rows: list[dict[str, Any]] = []
    places, row_format = Places(), None
    for file in files:
        unit = "line" if file.suffix.lower() in _JSON_ENDINGS or text_rows == "line" else text_rows
        places.begin(file, unit)
        for number, row in _read_file(file, option, text_rows):
            row_format = _checked_format(row, row_format, f"{file}, {unit} {number}", rows[0] if rows else None)
            places.add(number)
            kept = (*row_format.columns, *row_format.optional_columns)
            rows.append({name: row[name] for name in kept if row.get(name) is not None})
    if row_format is None:
        raise ConfigError(f"{option}: {path} contains no rows.")
    return Rows(_in_memory(rows, places), places, row_format)


def _in_memory(rows: list[dict[str, Any]], places: Places) -> Any:
    """A datasets.Dataset of rows. It is never taken from a cache of an earlier version of a file."""
    from datasets import Dataset  # type: ignore[import-untyped]

    def dataset_of(start: int, stop: int) -> Any:
        return Dataset.from_list(rows[start:stop], on_mixed_types="use_json")

    try:
        return dataset_of(0, len(rows))
    except Exception as error:  # pyarrow's errors, and OverflowError for large numbers
        row = first_failing(len(rows), dataset_of)
        place = f"{places.name(0)} and the rows after it" if row is None else places.name(row)
        raise ConfigError(f"{place}: the datasets library cannot keep these values: {error}.") from error


def _is_data_file(path: Path) -> bool:
    """Whether a file of a folder is read. Hidden files are not: editors and systems leave such ones."""
    return path.is_file() and not path.name.startswith(".") and path.suffix.lower() in (*_JSON_ENDINGS, _TEXT_ENDING)


def _read_file(file: Path, option: str, text_rows: str) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a file's rows; empty lines are none."""
    if file.suffix.lower() not in (*_JSON_ENDINGS, _TEXT_ENDING):
        raise ConfigError(f"{option}: {file} must end in .jsonl or .txt, or be a folder.")
    try:
        if file.suffix.lower() == _TEXT_ENDING:
            yield from _read_text(file, text_rows)
            return
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, _parse_json(line, f"{file}, line {number}")
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {file}: {error.strerror or error}.") from error


def _parse_json(line: bytes, place: str) -> Any:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # JSON can name half of a surrogate pair, UTF-8 cannot
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 text (byte {error.start + 1}).") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(f"{place}: {half} is half of a surrogate pair and no character; remove it.") from error
    except json.JSONDecodeError as error:
        is_spread = line.lstrip().startswith(b"[") or line.strip() == b"{"
        hint = " The file must have one JSON object per line." if is_spread else ""
        raise ConfigError(f"{place}: not valid JSON: {_json_fault(error)}.{hint}") from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
        raise ConfigError(f"{place}: the JSON cannot be read: {error}.") from error
    return row


def _json_fault(error: json.JSONDecodeError) -> str:
    """What is wrong with a line, and its column. Of a line that was cut, the column is where it ends."""
    line = error.doc.rstrip("\r\n")
    rest = line[error.pos :].strip()
    is_half_word = any(word.startswith(rest) for word in ("true", "false", "null"))  # also if nothing is left
    is_half_escape = error.msg.startswith("Invalid \\") and '"' not in rest
    if is_half_word or is_half_escape or error.msg.startswith("Unterminated string"):
        return f"the line ends at column {len(line)} before its JSON does; it was cut, or continues on the next line"
    return f"{error.msg} at column {error.colno}"


def _read_text(file: Path, text_rows: str) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start + 1}).") from error
    # Not splitlines(): it also splits at form feeds and at U+2028. read_text() has turned \r\n into \n.
    pieces = [text] if text_rows == "document" else text.split("\n" if text_rows == "line" else "\n\n")
    for number, piece in enumerate(pieces, 1):
        if piece.strip():
            yield number, {"text": piece}


def _read_dataset_folder(path: Path, option: str) -> Rows:
    from datasets import load_from_disk

    try:
        # In memory: no cache files beside the user's data. Without a format: rows are lists, not tensors.
        dataset = load_from_disk(str(path), keep_in_memory=True).with_format(None)
    except Exception as error:  # pyarrow, json and OS errors
        raise ConfigError(f"{option}: {path} is a damaged datasets folder: {error}.") from error
    if not len(dataset):
        raise ConfigError(f"{option}: {path} contains no rows.")
    places = Places()
    places.begin(path, "row")
    first, row_format = dataset[0], None
    used: set[str] = set()  # optional columns that have a value in some row
    for number, row in enumerate(dataset):
        row_format = _checked_format(row, row_format, f"{path}, row {number}", first)
        used.update(name for name in row_format.optional_columns if row.get(name) is not None)
        places.add(number)
    assert row_format is not None
    return Rows(dataset.select_columns([*row_format.columns, *sorted(used)]), places, row_format)


def _checked_format(row: Any, before: RowFormat | None, place: str, first: Mapping[str, Any] | None) -> RowFormat:
    """The format of a row. Raises ConfigError for a bad row and for a format other than that of the rows before.

    first: the first row of all; None for this one.
    """
    reason = None
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: a row must be a JSON object with {_FORMATS}, got {type(row).__name__}.")
    present = [each for each in RowFormat if all(row.get(name) is not None for name in each.columns)]
    if RowFormat.TOKENS in present:
        present = [RowFormat.TOKENS]
    if len(present) != 1:
        found = ", ".join(map(repr, row)) or "nothing"
        reason = f"a row needs {_FORMATS}; it has {found}"
    elif before is not None and present[0] is not before:
        reason = f"this row has {present[0].value}, the rows before have {before.value}; use one format"
    else:
        reason = _fault(row, present[0])
        if reason is None and first is not None:
            reason = _difference(row, first, present[0])
    if reason is not None:
        raise ConfigError(f"{place}: {reason}.")
    return present[0]


def _difference(row: Mapping[str, Any], first: Mapping[str, Any], row_format: RowFormat) -> str | None:
    """Why a row cannot stand beside the first one, which has the same format; None if it can."""
    if any(type(row[name]) is not type(first[name]) for name in row_format.columns):
        return "some rows have strings, others lists of messages; use one form"
    has_labels = [each.get("labels") is not None for each in (row, first)]
    if row_format is RowFormat.TOKENS and has_labels[0] is not has_labels[1]:
        return "some rows have `labels`, others have none; give them to all rows or to none"
    return None


def _fault(row: Mapping[str, Any], row_format: RowFormat) -> str | None:
    """What is wrong with the values of a row; None if nothing is."""
    if row_format is RowFormat.TOKENS:
        return _fault_of_tokens(row)
    if row_format is RowFormat.MESSAGES:
        return _fault_of_messages(row["messages"], "messages", needs_assistant=True)
    values = {name: row[name] for name in row_format.columns}
    if row_format is RowFormat.PROMPT_COMPLETION and all(isinstance(value, list) for value in values.values()):
        return _fault_of_messages(values["prompt"], "prompt", needs_assistant=False) or _fault_of_messages(
            values["completion"], "completion", needs_assistant=True
        )
    for name, value in values.items():
        if not isinstance(value, str):
            return f"`{name}` must be a string, got {type(value).__name__}"
        if not value.strip() and name != "prompt":
            return f"`{name}` is empty"
    return None


def _fault_of_tokens(row: Mapping[str, Any]) -> str | None:
    ids, labels = row["input_ids"], row.get("labels")
    for name, values in (("input_ids", ids), ("labels", labels)):
        if values is None:
            continue
        if not (isinstance(values, list) and all(type(value) is int for value in values)):
            return f"`{name}` must be a list of whole numbers"
        beyond = next((value for value in values if abs(value) > _LARGEST_INT), None)
        if beyond is not None:
            return f"`{name}` has {str(beyond)[:24]}, a number of more than 64 bits, which is no token"
    if not ids:
        return "`input_ids` is empty"
    if labels is not None:
        return None if len(labels) == len(ids) else f"`labels` has {len(labels)} entries, `input_ids` {len(ids)}"
    mask = next((name for name in _MASKS if row.get(name) is not None), None)
    if mask is not None:
        return f"`{mask}` is not read beside `input_ids`; give `labels`, with {IGNORED} for tokens without loss"
    return None


def _fault_of_messages(messages: Any, name: str, *, needs_assistant: bool) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"`{name}` must be a list of messages with at least one entry"
    for position, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f'message {position} of `{name}` must be an object with "role" and "content"'
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"the content of message {position} of `{name}` must be a string, got {type(content).__name__}"
    if needs_assistant and not any(message["role"] == "assistant" for message in messages):
        return f"`{name}` has no message with the role assistant, so no token would be trained"
    return None


def first_failing(num_rows: int, work: Callable[[int, int], object]) -> int | None:
    """The first row for which `work`, which gets the range of rows, raises; None if it raises for no row alone."""

    def fails(start: int, stop: int) -> bool:
        try:
            work(start, stop)
        except Exception:
            return True
        return False

    start, stop = 0, num_rows
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (start, middle) if fails(start, middle) else (middle, stop)
    return start if fails(start, stop) else None
