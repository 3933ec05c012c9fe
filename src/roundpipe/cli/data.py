"""Training data: files to checked rows, rows to token ids and labels. Errors name the file and the line.

TRL tokenizes and masks; this module masks itself only for chat templates that TRL cannot use. Knows no model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import hashlib
import json
import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from roundpipe.errors import ConfigError

logger = logging.getLogger("roundpipe")

IGNORED = -100  # the label of a token without loss
_JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
_TEXT_ENDING = ".txt"
_FORMATS = "`text`, `prompt` and `completion`, or `messages`"
_KEPT_EXTRAS = ("tools", "chat_template_kwargs")  # read by TRL when it renders messages
_NO_MARKERS = "give a template that marks the assistant's text with {% generation %}: --chat-template-path FILE.jinja"


class RowFormat(enum.Enum):
    """What a row consists of. Decides which of its tokens have a loss."""

    TEXT = "text"  # all tokens
    PROMPT_COMPLETION = "prompt and completion"  # the completion
    MESSAGES = "messages"  # the assistant's messages
    TOKENS = "input_ids"  # tokenized already: as its labels say, else all tokens

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prompt", "completion") if self is RowFormat.PROMPT_COMPLETION else (self.value,)


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

    def name(self, row: int) -> str:
        file = bisect_right(self._starts, row) - 1
        return f"{self._files[file]}, {self._units[file]} {self._numbers[row]}"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Checked rows of one format: a datasets.Dataset with the format's columns, and where each row comes from."""

    dataset: Any
    places: Places
    format: RowFormat


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Tokenized rows, one per row of the data: a datasets.Dataset with the columns input_ids and labels."""

    dataset: Any
    places: Places

    def digest(self) -> str:
        """A checksum of all tokens and labels."""
        checksum = hashlib.sha256()
        for table in self.dataset.with_format("arrow").iter(batch_size=10_000):
            for column in table.columns:
                for chunk in column.chunks:
                    checksum.update(chunk.flatten().to_numpy(zero_copy_only=False).tobytes())
        return checksum.hexdigest()


@dataclasses.dataclass(frozen=True)
class DataStatistics:
    """Counts over the rows as they are trained. `dropped`: rows without loss after truncation."""

    rows: int
    tokens: int
    trained_tokens: int
    longest: int
    truncated: int
    dropped: int


# Files to rows.


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
            rows.append({name: row[name] for name in (*row_format.columns, *_KEPT_EXTRAS) if name in row})
    if row_format is None:
        raise ConfigError(f"{option}: {path} contains no rows.")
    from datasets import Dataset  # type: ignore[import-untyped]

    # In memory, and therefore never taken from a cache of an earlier version of the file.
    return Rows(Dataset.from_list(rows, on_mixed_types="use_json"), places, row_format)


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
        raise ConfigError(f"{place}: not valid JSON: {error.msg} at column {error.colno}.{hint}") from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
        raise ConfigError(f"{place}: the JSON cannot be read: {error}.") from error
    return row


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
    row_format = None
    for number, row in enumerate(dataset):
        row_format = _checked_format(row, row_format, f"{path}, row {number}", None)
        places.add(number)
    assert row_format is not None
    optional = (*_KEPT_EXTRAS, *(("labels",) if row_format is RowFormat.TOKENS else ()))
    kept = [name for name in dataset.column_names if name in (*row_format.columns, *optional)]
    return Rows(dataset.select_columns(kept), places, row_format)


def _checked_format(row: Any, before: RowFormat | None, place: str, first: Mapping[str, Any] | None) -> RowFormat:
    """The format of a row. Raises ConfigError for a bad row and for a format other than that of the rows before.

    first: the first row of all, if rows may differ in whether their values are strings or lists of messages.
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
        if reason is None and first is not None and any(type(row[n]) is not type(first[n]) for n in present[0].columns):
            reason = "some rows have strings, others lists of messages; use one form"
    if reason is not None:
        raise ConfigError(f"{place}: {reason}.")
    return present[0]


def _fault(row: Mapping[str, Any], row_format: RowFormat) -> str | None:
    """What is wrong with the values of a row; None if nothing is."""
    if row_format is RowFormat.TOKENS:
        labels = row.get("labels")
        for name in ("input_ids", "labels"):
            values = row.get(name)
            if values is not None and not (isinstance(values, list) and all(type(value) is int for value in values)):
                return f"`{name}` must be a list of whole numbers"
        if labels is not None and len(labels) != len(row["input_ids"]):
            return f"`labels` has {len(labels)} entries, `input_ids` {len(row['input_ids'])}"
        return None if len(row["input_ids"]) else "`input_ids` is empty"
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


# Rows to tokens.


def tokenize(rows: Rows, tokenizer: Any, config: Any, *, assistant_only: bool | None) -> TokenRows:
    """Token ids and labels of all rows, not truncated. `config` is a trl.SFTConfig.

    assistant_only: whether only the assistant's tokens have a loss; None for `messages` alone.
    """
    if tokenizer.eos_token is None and rows.format in (RowFormat.TEXT, RowFormat.PROMPT_COMPLETION):
        raise ConfigError("the tokenizer has no end-of-sequence token; name one of its tokens with --eos-token.")
    asks_assistant = rows.format is RowFormat.MESSAGES if assistant_only is None else assistant_only
    first = rows.dataset[0]
    is_conversation = any(isinstance(first.get(name), list) for name in ("messages", "prompt"))
    if asks_assistant and not is_conversation:
        raise ConfigError("--assistant-only-loss needs rows with messages.")
    if is_conversation and not tokenizer.chat_template:
        raise ConfigError(
            f"{rows.places.name(0)}: the row has messages, but the tokenizer has no chat template; give one with "
            "--chat-template-path FILE.jinja, or give prompt and completion as strings."
        )
    template = None
    if asks_assistant:
        is_usable, template = _training_template(tokenizer)
        if not is_usable and rows.format is not RowFormat.MESSAGES:
            raise ConfigError(
                f"--assistant-only-loss: the chat template does not mark the assistant's text; {_NO_MARKERS}."
            )
        if not is_usable:
            return TokenRows(_masked_by_prefixes(rows, tokenizer), rows.places)
        _warn_of_untrained_stop(tokenizer, template)
    prepare = _trl_preparation(rows.format, tokenizer, config, template, asks_assistant=asks_assistant)
    try:
        with _each_warning_once():
            dataset = prepare(rows.dataset)
    except Exception as error:
        row = _first_failing(rows.dataset, prepare)
        if row is None:
            raise
        raise ConfigError(f"{rows.places.name(row)}: the row cannot be tokenized: {error}") from error
    return TokenRows(dataset.select_columns(["input_ids", "labels"]), rows.places)


def _trl_preparation(
    row_format: RowFormat, tokenizer: Any, config: Any, template: str | None, *, asks_assistant: bool
) -> Callable[[Any], Any]:
    """A function that tokenizes and masks a dataset as trl.SFTTrainer does, without its truncation and packing.

    The trainer's own preparation needs a model, but only these attributes of the trainer.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    trainer = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=template,
        completion_only_loss=row_format is RowFormat.PROMPT_COMPLETION and config.completion_only_loss is not False,
    )
    config = copy.copy(config)
    config.max_length, config.shuffle_dataset, config.assistant_only_loss = None, False, asks_assistant
    prepare: Any = SFTTrainer._prepare_dataset

    def prepared(dataset: Any) -> Any:
        with _waits_for_no_process():
            return prepare(trainer, dataset, tokenizer, config, False, None, "the")

    return prepared


@contextlib.contextmanager
def _waits_for_no_process() -> Iterator[None]:
    """Inside the block accelerate takes this process for the only one.

    Each machine prepares its data. TRL would wait for the other machines, which may have failed before.
    """
    from accelerate.state import PartialState  # type: ignore[import-untyped]
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]

    state = PartialState()
    kind, state.distributed_type = state.distributed_type, DistributedType.NO
    try:
        yield
    finally:
        state.distributed_type = kind


@contextlib.contextmanager
def _each_warning_once() -> Iterator[None]:
    """Drop a warning of TRL inside the block if an earlier one began with the same sentence.

    TRL logs a warning once per text, but a text that quotes the row differs from row to row.
    """
    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        sentence = record.getMessage().partition(". ")[0]
        is_first = sentence not in shown
        shown.add(sentence)
        return is_first

    trl_logger = logging.getLogger("trl.trainer.sft_trainer")
    trl_logger.addFilter(is_new)
    try:
        yield
    finally:
        trl_logger.removeFilter(is_new)


def _first_failing(dataset: Any, prepare: Callable[[Any], Any]) -> int | None:
    """The first row for which `prepare` raises; None if it raises for no row alone."""

    def fails(start: int, stop: int) -> bool:
        try:
            prepare(dataset.select(range(start, stop)))
        except Exception:
            return True
        return False

    start, stop = 0, len(dataset)
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (start, middle) if fails(start, middle) else (middle, stop)
    return start if fails(start, stop) else None


def _training_template(tokenizer: Any) -> tuple[bool, str | None]:
    """Whether TRL can find the assistant's tokens, and the template it needs for that (None: the tokenizer's own)."""
    from jinja2 import TemplateError
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return True, None
    try:
        return True, get_training_chat_template(tokenizer)
    except (ValueError, TemplateError):
        return False, None


def _warn_of_untrained_stop(tokenizer: Any, template: str | None) -> None:
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    if not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
        logger.warning(
            "the chat template leaves the end of the assistant's turn outside of {% generation %}: the model does not "
            "learn to stop. Edit the template and give it with --chat-template-path FILE.jinja."
        )


def _masked_by_prefixes(rows: Rows, tokenizer: Any) -> Any:
    """Tokenize messages with a template without {% generation %} markers.

    An assistant's message is the part by which the rendered text grows when the message is added. This is right only
    if rendering fewer messages gives a prefix of the whole text; other rows are refused.
    """
    from datasets import Dataset
    from jinja2 import TemplateError

    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer cannot tell which characters a token stands for (it is a slow one); {_NO_MARKERS}."
        )
    ids, labels = [], []
    for number, row in enumerate(rows.dataset):
        try:
            text, spans = _assistant_spans(row, tokenizer)
        except (ValueError, TemplateError) as error:
            raise ConfigError(f"{rows.places.name(number)}: {error}") from error
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids.append(encoded["input_ids"])
        labels.append(
            [
                token if any(start < end_of_span and end > begin for begin, end_of_span in spans) else IGNORED
                for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            ]
        )
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def _assistant_spans(row: Mapping[str, Any], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text of a row's messages and the (begin, end) characters of the assistant's messages in it."""
    messages, tools = row["messages"], row.get("tools")
    further = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }

    def render(count: int, **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages[:count], tokenize=False, **further, **options)
        if not whole.startswith(text):
            raise ValueError(
                f"the chat template renders the first {count} messages differently when more follow, so the "
                f"assistant's tokens cannot be found; {_NO_MARKERS}."
            )
        return text

    whole: str = tokenizer.apply_chat_template(messages, tokenize=False, **further)
    spans = []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        begin, end = len(render(position, add_generation_prompt=True)), len(render(position + 1))
        if begin == len(render(position)):  # the template ignores add_generation_prompt: skip its header of the turn
            begin = whole.find((message["content"] or "").strip(), begin, end)
            if begin < 0:
                raise ValueError(
                    f"the chat template changes the content of message {position + 1}, so the assistant's tokens "
                    f"cannot be found; {_NO_MARKERS}."
                )
        spans.append((begin, end))
    return whole, spans


# Checks of the tokens.


def check_tokens(
    tokens: TokenRows,
    option: str,
    *,
    seq_len: int,
    truncates: bool,
    packs: bool,
    vocabulary: int,
    most_positions: int | None,
) -> DataStatistics:
    """Count the rows as they are trained. Raises ConfigError for rows that do not fit or have no loss."""
    lengths, trained, kept_rows = [], 0, 0
    for row, (ids, labels) in enumerate(_pairs(tokens.dataset)):
        outside = [token for token in (min(ids), max(ids)) if not 0 <= token < vocabulary]
        if outside:
            raise ConfigError(
                f"{tokens.places.name(row)}: token {outside[0]} is outside of the model's vocabulary of {vocabulary}; "
                "the tokenizer belongs to another model."
            )
        with_loss = [label for label in labels[1:] if label != IGNORED]  # the first token is not predicted
        if not with_loss:
            raise ConfigError(f"{tokens.places.name(row)}: no token of this row has a loss.")
        if min(with_loss) < 0 or max(with_loss) >= vocabulary:
            raise ConfigError(
                f"{tokens.places.name(row)}: `labels` must be {IGNORED} or tokens of the model's vocabulary of "
                f"{vocabulary}, got {min(with_loss)} to {max(with_loss)}."
            )
        lengths.append(len(ids))
        used = sum(label != IGNORED for label in (labels if packs else labels[:seq_len]))
        trained += used
        kept_rows += bool(used)
    too_long = [row for row, length in enumerate(lengths) if length > seq_len]
    if too_long and not truncates and not packs:
        raise ConfigError(
            f"{option}: {tokens.places.name(too_long[0])}: the row has {lengths[too_long[0]]} tokens, more than "
            f"--seq-len {seq_len}; {len(too_long)} of {len(lengths)} rows are too long, the longest has {max(lengths)} "
            "tokens. Raise --seq-len, cut them with --truncate, or split them with --packing."
        )
    if not kept_rows:
        raise ConfigError(f"{option}: no row has a token with a loss within --seq-len {seq_len}; raise it.")
    longest = seq_len if packs else min(max(lengths), seq_len)
    if most_positions is not None and longest > most_positions:
        raise ConfigError(
            f"{option}: sequences of {longest} tokens do not fit: the model has {most_positions} positions "
            f"(max_position_embeddings); give --seq-len {most_positions} or less."
        )
    total = sum(lengths) if packs else sum(min(length, seq_len) for length in lengths)
    return DataStatistics(
        rows=-(-total // seq_len) if packs else kept_rows,
        tokens=total,
        trained_tokens=trained,
        longest=longest,
        truncated=0 if packs else len(too_long),
        dropped=0 if packs else len(lengths) - kept_rows,
    )


def _pairs(dataset: Any) -> Iterator[tuple[list[int], list[int]]]:
    for batch in dataset.iter(batch_size=1000):
        yield from zip(batch["input_ids"], batch["labels"], strict=True)
