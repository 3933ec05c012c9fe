"""Rows of training data: files, folders and names of the hub to checked rows of one format, with their places.

Knows the formats of rows, never tokenizers and models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roundpipe.cli.image_rows import with_images
from roundpipe.cli.methods import METHODS, Method
from roundpipe.cli.shapes import SHAPES, MisfitError, Row, RowFormat, Shape, shapes_to_recognize
from roundpipe.cli.sources import Places, Source, sources
from roundpipe.errors import ConfigError

IGNORED = -100  # the label of a token without loss
_MASKS = ("completion_mask", "assistant_masks")  # of tokens, in TRL's datasets: which ones have a loss
_TEXTS = ("text", "prompt")  # columns of text or messages
_ANSWERS = ("messages", "completion", "chosen", "rejected")  # those that need a message of the assistant
_LARGEST_INT = 2**63 - 1  # of the datasets library


@dataclasses.dataclass(frozen=True)
class Rows:
    """Checked rows of one format: a datasets.Dataset with the format's columns, and where each row comes from.

    shape: the form that the rows had before.
    """

    dataset: Any
    places: Places
    shape: Shape

    @property
    def format(self) -> RowFormat:
        return self.shape.format

    @property
    def are_chats(self) -> bool:
        """Whether the rows are messages, which the chat template renders."""
        columns = [name for name in self.format.columns if name in (*_TEXTS, *_ANSWERS)]
        return any(isinstance(self.dataset[0][name], list) for name in columns)


def read_rows(
    path: Path,
    option: str,
    text_rows: str,
    *,
    method: Method = METHODS["sft"],
    form: str | None = None,
    chats: bool = True,
) -> Rows:
    """Read, check and convert all rows of a file, folder or dataset of the hub.

    option: the option that names it; it begins messages.
    method: decides which forms rows may have.
    form: the form of the rows, by name; None to recognize it.
    chats: whether messages can be rendered; else Alpaca's rows become text.
    """
    reader = RowReader.of(method=method, form=form, chats=chats)
    parts = sources(path, option, text_rows)
    table = parts[0].table if len(parts) == 1 else None
    for part in parts:
        reader.read(part, keeps=table is None)
    if reader.shape is None:
        raise ConfigError(f"{option}: {path} contains no rows.")
    return Rows(reader.dataset_of(table), reader.places, reader.shape)


def _needs(names: Sequence[str]) -> str:
    return f"it takes {', '.join(f'{SHAPES[name].needs} (--format {name})' for name in names)}"


class RowReader:
    """Checks and converts the rows of several sources, which must have one form."""

    @classmethod
    def of(cls, *, method: Method, form: str | None, chats: bool) -> RowReader:
        """A reader for the options of `read_rows`."""
        if form is not None and form not in method.shapes:
            raise ConfigError(f"--format {form} cannot be trained by --method {method.name}; {_needs(method.shapes)}.")
        return cls((SHAPES[form],) if form else shapes_to_recognize(method.shapes, chats=chats))

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.places = Places()
        self.shape: Shape | None = None
        self._shapes = shapes
        self._first: Row = {}
        self._rows: list[dict[str, Any]] = []  # converted
        self._is_converted = False  # whether any row had other columns than those of its format
        self._used: set[str] = set()  # optional columns that have a value in some row

    def further(self, found: Iterable[Source]) -> Rows:
        """Rows that follow those that were read, and must fit to them. They are not kept."""
        assert self.shape is not None
        reader = RowReader(self._shapes)
        reader.shape, reader._first = self.shape, self._first
        for source in found:
            reader.read(source, keeps=True)
        return Rows(reader.dataset_of(None), reader.places, self.shape)

    def read(self, source: Source, *, keeps: bool) -> None:
        """Check the rows of a source. keeps: whether to convert them, too; a single table is converted afterwards."""
        self.places.begin(source.name, source.unit)
        for number, given in source.rows:
            row = self._checked(given, source.name, f"{source.name}, {source.unit} {number}")
            self.places.add(number)
            if keeps:
                self._rows.append(self._kept(row))
            self._used.update(self._kept(row))
            self._is_converted |= row is not given

    def _kept(self, row: Row) -> dict[str, Any]:
        """The columns that have a value, without those that are ignored."""
        assert self.shape is not None
        return _kept_columns(row, self.shape.format)

    def dataset_of(self, table: Any) -> Any:
        """A datasets.Dataset of the rows that were kept or, if one is given, of the rows of the table.

        A table that has the columns of the format already is not copied.
        """
        assert self.shape is not None
        if table is not None and not self._is_converted and "images" not in self._used:
            return table.select_columns(sorted(self._used))
        if table is not None:
            self._rows = [self._kept(self.shape.converted(with_images(row, Path()))) for row in table]
        for name, nothing in (("images", []), ("chat_template_kwargs", {})):
            if name in self._used:  # TRL takes no None for them
                self._rows = [{**row, name: row.get(name, nothing)} for row in self._rows]
        return _in_memory(self._rows, self.places)

    def _checked(self, row: Any, source: str, place: str) -> Row:
        """The converted row. Raises ConfigError for a bad row, and for a form other than that of the rows before."""
        if not isinstance(row, Mapping):
            raise ConfigError(f"{place}: a row must be a JSON object with {self._forms()}, got {type(row).__name__}.")
        try:
            row = with_images(row, Path(source).parent)
            shape = self._recognized(row)
            converted = shape.converted(row)
            if row.get("images") and "images" not in shape.format.optional_columns and row.get("text") is None:
                raise MisfitError(f"{shape.title} beside images cannot be trained here; --method sft can, on messages")
        except MisfitError as error:
            raise ConfigError(f"{place}: {error}.") from error
        reason = (
            _fault(converted, shape.format)
            or _fault_of_numbers(converted, shape.format)
            or _difference(converted, self._first, shape.format)
        )
        if reason is not None:
            raise ConfigError(f"{place}: {reason}.")
        if self.shape is None:
            self.shape, self._first = shape, converted
        return converted

    def _recognized(self, row: Row) -> Shape:
        present = [shape for shape in self._shapes if shape.is_form_of(row)]
        tokens = [shape for shape in present if shape.format is RowFormat.TOKENS]
        present = tokens or present
        if not present:
            found = ", ".join(map(repr, row)) or "nothing"
            own = {shape.name for shape in self._shapes}
            of_others = [
                method.name
                for method in METHODS.values()
                if not own & set(method.shapes) and any(SHAPES[name].is_form_of(row) for name in method.shapes)
            ]
            hint = f": rows for --method {', '.join(of_others)}" if of_others else ""
            raise MisfitError(f"a row needs {self._forms()}; it has {found}{hint}")
        if len(present) > 1:
            choices = " or ".join(f"--format {shape.name}" for shape in present)
            raise MisfitError(f"it has {', '.join(map(repr, row))}, which is more than one form; give {choices}")
        if self.shape is not None and present[0] is not self.shape:
            raise MisfitError(
                f"this row has {present[0].title}, the rows before have {self.shape.title}; use one format"
            )
        return present[0]

    def _forms(self) -> str:
        *forms, last = (shape.needs for shape in self._shapes)
        return f"{', '.join(forms)}, or {last}" if forms else last


def _kept_columns(row: Row, row_format: RowFormat) -> dict[str, Any]:
    if row_format is RowFormat.PROMPT:
        return dict(row)
    names = (*row_format.columns, *row_format.optional_columns)
    return {name: row[name] for name in names if row.get(name) is not None}


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


def _difference(row: Mapping[str, Any], first: Mapping[str, Any], row_format: RowFormat) -> str | None:
    """Why a row cannot stand beside the first one, which has the same format; None if it can, or is the first."""
    if not first:
        return None
    if "label" in row and type(row["label"]) is not type(first.get("label")):
        return f"`label` is {type(row['label']).__name__} here and {type(first['label']).__name__} in the first row"
    if any(type(row[name]) is not type(first[name]) for name in row_format.columns):
        return "some rows have strings, others lists of messages; use one form"
    if row_format is RowFormat.PROMPT and row.keys() != first.keys():
        return f"it has the keys {', '.join(row)}, the first row has {', '.join(first)}; rewards get all of them"
    for name, title in (
        (RowFormat.TOKENS, "labels"),
        (RowFormat.PREFERENCE, "prompt"),
        (RowFormat.PREFERENCE, "margin"),
    ):
        if row_format is name and (row.get(title) is None) is not (first.get(title) is None):
            return f"some rows have `{title}`, others have none; give them to all rows or to none"
    return None


def _fault(row: Mapping[str, Any], row_format: RowFormat) -> str | None:
    """What is wrong with the values of a row; None if nothing is."""
    if row_format is RowFormat.TOKENS:
        return _fault_of_tokens(row)
    names = [name for name in (*_TEXTS, *_ANSWERS) if name in row_format.columns or row.get(name) is not None]
    values = {name: row[name] for name in names if name in (*row_format.columns, *row_format.optional_columns)}
    may_be_messages = len(values) > 1 or row_format is RowFormat.PROMPT
    if row_format is RowFormat.MESSAGES or (
        may_be_messages and all(isinstance(each, list) for each in values.values())
    ):
        faults = (_fault_of_messages(values[name], name, needs_assistant=name in _ANSWERS) for name in values)
        return next((fault for fault in faults if fault is not None), None)
    for name, value in values.items():
        if not isinstance(value, str):
            return f"`{name}` must be a string, got {type(value).__name__}"
        if not value.strip() and (name != "prompt" or row_format is RowFormat.PROMPT):
            return f"`{name}` is empty"
    margin = row.get("margin") if row_format is RowFormat.PREFERENCE else None
    if margin is not None and not isinstance(margin, int | float):
        return f"`margin` must be a number, got {type(margin).__name__}"
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


def _fault_of_numbers(row: Row, row_format: RowFormat) -> str | None:
    """Which value, such as one of a tool call, the datasets library would change without a word."""
    if row_format is RowFormat.TOKENS:
        return None  # checked above
    for name, value in _kept_columns(row, row_format).items():
        beyond = next(_large_numbers(value), None)
        if beyond is not None:
            return f"`{name}` has {str(beyond)[:24]}, a number of more than 64 bits; write it as text"
    return None


def _large_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _large_numbers(each)
    elif type(value) is int and abs(value) > _LARGEST_INT:
        yield value


def _fault_of_messages(messages: Any, name: str, *, needs_assistant: bool) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"`{name}` must be a list of messages with at least one entry"
    for position, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f'message {position} of `{name}` must be an object with "role" and "content"'
        content = message.get("content")
        # Lists have images between texts: others are joined.
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
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
