"""Tokens of training data: rows to token ids and labels, and the checks of both. Errors name the row's file and line.

TRL tokenizes and masks; this module masks itself only for chat templates that TRL cannot use. Knows no model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from roundpipe.cli.console import plain_output
from roundpipe.cli.rows import IGNORED, Rows, first_failing
from roundpipe.cli.shapes import RowFormat
from roundpipe.cli.sources import Places
from roundpipe.errors import ConfigError

logger = logging.getLogger("roundpipe")

_NO_MARKERS = "give a template that marks the assistant's text with {% generation %}: --chat-template-path FILE.jinja"


@dataclasses.dataclass(frozen=True)
class TrainRows:
    """Rows as the trainer gets them, one per row of the data: a datasets.Dataset.

    For SFT they are tokenized and have the columns input_ids and labels. Other trainers tokenize the rows themselves;
    `answers` is then a datasets.Dataset of what TRL makes of them, a row for each. `are_chats`: whether they were
    messages.
    """

    dataset: Any
    places: Places
    answers: Any = None
    are_chats: bool = False

    @classmethod
    def joined(cls, parts: Sequence[TrainRows]) -> TrainRows:
        """The rows of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        import datasets  # type: ignore[import-untyped]

        places = Places()
        for part in parts:
            names = part.dataset.column_names
            if set(names) != set(parts[0].dataset.column_names):
                raise ConfigError(
                    f"{parts[0].places.name(0)} has {', '.join(parts[0].dataset.column_names)}, {part.places.name(0)} "
                    f"has {', '.join(names)}; rows of several sources that --method trains together need the same keys."
                )
            places.append(part.places)
        try:
            with plain_output(for_terminals=True):  # it would be a bar for every source, and every piece of a stream
                dataset = datasets.concatenate_datasets([_with_wide_tokens(part.dataset) for part in parts])
        except ValueError as error:  # of columns with other types
            raise ConfigError(f"the rows of several sources cannot be joined: {error}") from error
        answers = [part.answers for part in parts if part.answers is not None]
        joined = datasets.concatenate_datasets(answers) if answers else None
        return cls(dataset, places, joined, any(part.are_chats for part in parts))

    def select(self, rows: Sequence[int]) -> TrainRows:
        """Some of the rows, in this order; a row may be there several times."""
        answers = None if self.answers is None else self.answers.select(rows)
        return TrainRows(self.dataset.select(rows), self.places.select(rows), answers, self.are_chats)

    def digest(self) -> str:
        """A checksum of all rows; of tokenized ones, of the tokens and labels of each."""
        checksum = hashlib.sha256()
        if "input_ids" in self.dataset.column_names:
            for table in self.dataset.with_format("arrow").iter(batch_size=10_000):
                for column in table.columns:
                    rows = column.combine_chunks()  # the chunks depend on how the dataset was made
                    has_lists = hasattr(rows, "value_lengths")
                    for numbers in (rows.value_lengths(), rows.flatten()) if has_lists else (rows,):
                        checksum.update(numbers.to_numpy(zero_copy_only=False).astype("int64").tobytes())
        else:
            for row in _undecoded(self.dataset):
                checksum.update(json.dumps(row, sort_keys=True, default=str).encode())
        return f"rows:{checksum.hexdigest()}"


def _undecoded(dataset: Any) -> Any:
    """The dataset with images as they are kept, not as pixels."""
    import datasets

    if "images" not in dataset.column_names:
        return dataset
    with plain_output(for_terminals=True):
        return dataset.cast_column("images", datasets.List(datasets.Image(decode=False)))


def _with_wide_tokens(dataset: Any) -> Any:
    """A dataset whose tokens have 64 bits. Files, tokenizers and datasets folders differ in their width."""
    import datasets

    columns = {name: datasets.Sequence(datasets.Value("int64")) for name in ("input_ids", "labels")}
    return dataset.cast(datasets.Features(columns)) if columns.keys() == set(dataset.column_names) else dataset


@dataclasses.dataclass(frozen=True)
class DataStatistics:
    """Counts over the rows as they are trained. `dropped`: rows without loss after truncation, which are left out."""

    rows: int
    tokens: int
    trained_tokens: int
    longest: int
    truncated: int
    dropped: int


def tokenize(rows: Rows, tokenizer: Any, config: Any, *, assistant_only: bool | None) -> TrainRows:
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
            return TrainRows(_masked_by_prefixes(rows, tokenizer), rows.places)
        _warn_of_untrained_stop(tokenizer, template)
    prepare = _trl_preparation(rows.format, tokenizer, config, template, asks_assistant=asks_assistant)
    dataset = prepared_rows(rows, prepare)
    return TrainRows(dataset.select_columns(["input_ids", "labels"]), rows.places)


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
    return alone(lambda dataset: prepare(trainer, dataset, tokenizer, config, False, None, "the"))


def alone(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`prepare`, a preparation of TRL, on this machine alone."""

    def prepared(dataset: Any) -> Any:
        with _waits_for_no_process():
            return prepare(dataset)

    return prepared


def prepared_rows(rows: Rows, prepare: Callable[[Any], Any]) -> Any:
    """What a preparation of TRL makes of the rows. Raises ConfigError with the place of a row that it refuses."""
    try:
        with _each_warning_once():
            return prepare(rows.dataset)
    except Exception as error:
        row = first_failing(len(rows.dataset), lambda start, stop: prepare(rows.dataset.select(range(start, stop))))
        if row is None:
            raise
        raise ConfigError(f"{rows.places.name(row)}: the row cannot be tokenized: {error}") from error


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

    loggers = [logging.getLogger(f"trl.trainer.{name}_trainer") for name in ("sft", "dpo", "kto", "reward")]
    for each in loggers:
        each.addFilter(is_new)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_new)


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
    tokens: TrainRows,
    option: str,
    *,
    seq_len: int,
    truncates: bool,
    keeps_end: bool,
    packs: bool,
    vocabulary: int,
    most_positions: int | None,
    is_part: bool = False,
) -> DataStatistics:
    """Count the rows as they are trained. Raises ConfigError for rows that do not fit or have no loss.

    keeps_end: whether rows are cut at their beginning instead of their end.
    is_part: whether others follow: all of these may lose the tokens that have a loss.
    """
    part = slice(None) if packs else slice(-seq_len, None) if keeps_end else slice(seq_len)
    lengths, trained, kept_rows = [], 0, 0
    for row, (ids, labels) in enumerate(_pairs(tokens.dataset)):
        fault = _fault_of_tokens(ids, labels, vocabulary)
        if fault is not None:
            raise ConfigError(f"{tokens.places.name(row)}: {fault}.")
        lengths.append(len(ids))
        used = sum(label != IGNORED for label in labels[part])
        trained += used
        kept_rows += bool(used)
    too_long = [row for row, length in enumerate(lengths) if length > seq_len]
    if too_long and not truncates and not packs:
        raise ConfigError(
            f"{option}: {tokens.places.name(too_long[0])}: the row has {lengths[too_long[0]]} tokens, more than "
            f"--seq-len {seq_len}; {len(too_long)} of {len(lengths)} rows are too long, the longest has {max(lengths)} "
            "tokens. Raise --seq-len, cut them with --truncate, or split them with --packing."
        )
    if not kept_rows and not is_part:
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


def _fault_of_tokens(ids: list[int], labels: list[int], vocabulary: int) -> str | None:
    """Why a row cannot be trained, whatever its length; None if it can."""
    outside = [token for token in (min(ids), max(ids)) if not 0 <= token < vocabulary]
    if outside:
        return (
            f"token {outside[0]} is outside of the model's vocabulary of {vocabulary}; the tokenizer belongs to "
            "another model"
        )
    with_loss = [label for label in labels[1:] if label != IGNORED]  # the first token is not predicted
    if not with_loss:
        return "no token of this row has a loss"
    if min(with_loss) < 0 or max(with_loss) >= vocabulary:
        return (
            f"`labels` must be {IGNORED} or tokens of the model's vocabulary of {vocabulary}, got {min(with_loss)} to "
            f"{max(with_loss)}"
        )
    return None


def _pairs(dataset: Any) -> Iterator[tuple[list[int], list[int]]]:
    for batch in dataset.iter(batch_size=1000):
        yield from zip(batch["input_ids"], batch["labels"], strict=True)


# What is trained of rows that TRL does not prepare.


def cut_sequences(tokens: TrainRows, config: Any) -> list[dict[str, list[int]]]:
    """The rows cut to the longest length, without those that have no loss then, as TRL does it."""
    length = config.max_length
    part = slice(-length, None) if config.truncation_mode == "keep_end" else slice(length)
    pairs = ((ids[part], labels[part]) for ids, labels in _pairs(tokens.dataset))
    return [{"input_ids": ids, "labels": labels} for ids, labels in pairs if any(label != IGNORED for label in labels)]


def packed_sequences(tokens: TrainRows, config: Any) -> list[dict[str, list[int]]]:
    """The rows joined and cut into sequences of the longest length, by TRL; the last one is shorter."""
    from trl.data_utils import pack_dataset

    packed = pack_dataset(tokens.dataset.select_columns(["input_ids", "labels"]), config.max_length, "wrapped")
    return [{"input_ids": ids, "labels": labels} for ids, labels in _pairs(packed) if ids]
