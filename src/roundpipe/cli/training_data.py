"""All rows of a run: read, prepared for the trainer of the method, split off for evaluation, mixed by weight, checked.

Knows the order of these steps; `cli/rows`, `cli/data` and `cli/answers` do them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundpipe.cli.answers import check_answers, rows_with_answers
from roundpipe.cli.arguments import TrainSettings
from roundpipe.cli.classes import check_classes, classes_of, tokenized_classes
from roundpipe.cli.console import plain_output, say
from roundpipe.cli.data import DataStatistics, TrainRows, check_tokens, cut_sequences, packed_sequences, tokenize
from roundpipe.cli.images import has_images, rendered_rows
from roundpipe.cli.methods import Head
from roundpipe.cli.mixture import rows_by_weight, split_off
from roundpipe.cli.rows import RowReader, Rows, read_rows
from roundpipe.cli.sources import Source
from roundpipe.cli.stream import Stream, StreamRow, trainable
from roundpipe.cli.stream_sources import stream_sources
from roundpipe.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The rows that a run trains and evaluates, and their counts.

    stream: where the rows come from if they are read while the model trains; `train` are then its first ones.
    """

    train: TrainRows
    train_statistics: DataStatistics
    evaluation: TrainRows | None
    eval_statistics: DataStatistics | None
    stream: Stream | None = None

    @property
    def counts(self) -> Sequence[tuple[str, DataStatistics]]:
        """The counts, each with its title."""
        rows = "data" if self.stream is None else f"data: the first {len(self.train.dataset):,} rows"
        counts = [(rows, self.train_statistics)]
        return counts if self.eval_statistics is None else [*counts, ("evaluation data", self.eval_statistics)]

    def train_dataset(self) -> Any:
        """The rows as the trainer takes them."""
        return self.train.dataset if self.stream is None else trainable(self.stream)

    def digest(self) -> str:
        """A checksum of the rows that are trained, as far as it is known before they are read."""
        return self.train.digest() if self.stream is None else self.stream.digest()

    @property
    def has_images(self) -> bool:
        return "images" in self.train.dataset.column_names


@dataclasses.dataclass(frozen=True)
class DataReader:
    """Makes the rows of a run.

    config: the arguments of the trainer.
    """

    settings: TrainSettings
    model_config: Any
    tokenizer: Any
    config: Any

    def read(self) -> TrainingData:
        """Raises ConfigError for data that cannot be trained, with the place of the row."""
        return self.checked(*self.rows())

    def rows(self) -> tuple[TrainRows, TrainRows | None]:
        """The rows to train, or the first ones of a stream, and those to evaluate, of any length."""
        settings, seed = self.settings, self.config.seed
        if settings.streaming:
            evaluated = [self._prepared_text(rows) for rows in self._read("--eval-data", settings.eval_data)]
            return self._tokens(self.stream.head()), TrainRows.joined(evaluated) if evaluated else None
        read = [*self._read("--data", settings.data), *self._read("--eval-data", settings.eval_data)]
        if settings.method.head is Head.CLASSES:
            self._set_classes(classes_of(read[: len(settings.data)]))
        shows_images = any(map(has_images, read))
        if shows_images:
            self._require_images()
        with plain_output():
            prepared = [self._prepared(rows, shows_images=shows_images) for rows in read]
        parts, evaluated = prepared[: len(settings.data)], prepared[len(settings.data) :]
        evaluation = TrainRows.joined(evaluated) if evaluated else None
        if settings.eval_split is not None:
            parts, evaluation = _split_off(parts, settings.eval_split, seed)
        if settings.weights is not None:
            parts = self._weighted(parts, settings.weights)
        return TrainRows.joined(parts), evaluation

    def checked(self, train: TrainRows, evaluation: TrainRows | None) -> TrainingData:
        """The rows that can be trained, and their counts. Raises ConfigError for rows that do not fit."""
        stream = self.stream if self.settings.streaming else None
        train, train_statistics = self._checked(train, "--data")
        if evaluation is None:
            return TrainingData(train, train_statistics, None, None, stream)
        name = "--eval-data" if self.settings.eval_data else "--data"
        evaluation, eval_statistics = self._checked(evaluation, name)
        return TrainingData(train, train_statistics, evaluation, eval_statistics, stream)

    def _read(self, name: str, paths: Sequence[Path]) -> list[Rows]:
        """The rows of each path. Says what they are taken for."""
        settings, chats = self.settings, bool(self.tokenizer.chat_template)
        read = []
        for path in paths:
            with plain_output():
                rows = read_rows(
                    path, name, settings.text_rows, method=settings.method, form=settings.form, chats=chats
                )
            beside = ", with images" if has_images(rows) else ""
            say(f"{name} {path}: {len(rows.dataset):,} rows of {rows.shape.title}{beside}")
            read.append(rows)
        return read

    @functools.cached_property
    def stream(self) -> Stream:
        """The rows of all entries of --data, as they are needed. Says what they are taken for."""
        settings = self.settings
        entries = [stream_sources(path, "--data", settings.text_rows) for path in settings.data]
        for path, entry, reader in zip(settings.data, entries, self._readers, strict=True):
            found = (
                Source(each.name, each.unit, [(number, row)]) for each in entry for number, row, _ in each.read(None)
            )
            first = next(found, None)
            if first is None:
                raise ConfigError(f"--data: {path} contains no rows.")
            reader.read(first, keeps=False)
            assert reader.shape is not None
            say(f"--data {path}: rows of {reader.shape.title}, read as they are needed")
        return Stream(
            entries,
            self._sequences,
            weights=settings.weights,
            buffer=settings.shuffle_buffer,
            seed=self.config.seed,
        )

    @functools.cached_property
    def _readers(self) -> list[RowReader]:
        """What checks the rows of a stream, for each entry of --data."""
        settings, chats = self.settings, bool(self.tokenizer.chat_template)
        return [RowReader.of(method=settings.method, form=settings.form, chats=chats) for _ in settings.data]

    def _tokens(self, found: Sequence[StreamRow]) -> TrainRows:
        """Tokens and labels of rows of a stream, in their order."""
        parts, order = [], []
        for entry, reader in enumerate(self._readers):
            numbers = [number for number, row in enumerate(found) if row.entry == entry]
            if numbers:
                order += numbers
                given = (found[number] for number in numbers)
                rows = reader.further(
                    Source(each.source.name, each.source.unit, [(each.number, each.row)]) for each in given
                )
                parts.append(self._prepared_text(rows))
        return TrainRows.joined(parts).select(sorted(range(len(order)), key=order.__getitem__))

    def _prepared_text(self, rows: Rows) -> TrainRows:
        if has_images(rows):
            raise ConfigError(f"{rows.places.name(0)}: rows with images cannot be streamed; leave --streaming out.")
        with plain_output(for_terminals=True):  # it would be a bar for every piece of the stream
            return self._prepared(rows, shows_images=False)

    def _sequences(self, found: Sequence[StreamRow]) -> list[dict[str, list[int]]]:
        """What is trained of rows of a stream: cut, packed, and without those that have no loss."""
        tokens = self._tokens(found)
        self._check_tokens(tokens, "--data", is_part=True)
        if self.config.packing:
            with plain_output(for_terminals=True):  # it would be a bar for every piece of the stream
                return packed_sequences(tokens, self.config)
        return cut_sequences(tokens, self.config)

    def _require_images(self) -> None:
        """Raise ConfigError if this run cannot train rows with images."""
        for name in ("truncate", "packing"):
            if self.settings.given.get(name):
                raise ConfigError(f"--{name} cannot be used with images: it may cut the tokens of an image.")

    @functools.cached_property
    def processor(self) -> Any:
        """The model's processor of texts and images, with the tokenizer of the run."""
        from transformers import AutoProcessor, ProcessorMixin

        options = {"trust_remote_code": bool(self.settings.trainer.get("trust_remote_code"))}
        try:
            processor = AutoProcessor.from_pretrained(self.settings.model, **options)
        except Exception as error:  # transformers raises many kinds of errors for missing and damaged files
            text = " ".join(str(error).split())
            raise ConfigError(f"--model: cannot load the processor of {self.settings.model}: {text}") from error
        if not isinstance(processor, ProcessorMixin):
            raise ConfigError(
                f"--data has images, but {self.settings.model} has no processor of images; give a vision-language "
                "model with the files of its processor."
            )
        processor.tokenizer = self.tokenizer
        processor.chat_template = self.tokenizer.chat_template or processor.chat_template
        return processor

    def _set_classes(self, classes: Sequence[str]) -> None:
        """Give the model's config its classes, from which the model makes its head.

        A model that has classes of these names keeps their order.
        """
        known = list((self.model_config.id2label or {}).values())
        classes = known if set(known) == set(classes) else classes
        self.model_config.id2label = dict(enumerate(classes))
        self.model_config.label2id = {name: number for number, name in enumerate(classes)}
        self.model_config.problem_type = "single_label_classification"
        say(f"{len(classes)} classes: {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}")

    def _prepared(self, rows: Rows, *, shows_images: bool) -> TrainRows:
        prepared = self._tokenized(rows, shows_images=shows_images)
        return dataclasses.replace(prepared, are_chats=rows.are_chats)

    def _tokenized(self, rows: Rows, *, shows_images: bool) -> TrainRows:
        assistant_only = self.settings.trainer.get("assistant_only_loss")
        if shows_images:
            return rendered_rows(rows, self.processor, self.config, assistant_only=assistant_only)
        if self.settings.method.head is Head.CLASSES:
            classes, seq_len = list(self.model_config.id2label.values()), self.settings.trainer["max_length"]
            return tokenized_classes(rows, self.tokenizer, classes, seq_len, truncates=self.settings.truncate)
        if self.settings.method.name == "sft":
            return tokenize(rows, self.tokenizer, self.config, assistant_only=assistant_only)
        return rows_with_answers(rows, self.tokenizer, self.config, self.settings.method)

    def _checked(self, rows: TrainRows, name: str) -> tuple[TrainRows, DataStatistics]:
        text_config = self.model_config.get_text_config()
        vocabulary, most_positions = text_config.vocab_size, getattr(text_config, "max_position_embeddings", None)
        if self.settings.method.head is Head.CLASSES:
            seq_len = self.settings.trainer["max_length"]
            return check_classes(rows, name, seq_len=seq_len, vocabulary=vocabulary, most_positions=most_positions)
        if self.settings.method.name != "sft":
            return check_answers(
                rows,
                name,
                self.settings.method,
                seq_len=self.settings.trainer["max_length"],
                most_new=getattr(self.config, "max_completion_length", 0),
                truncates=self.settings.truncate,
                vocabulary=vocabulary,
                most_positions=most_positions,
            )
        is_rendered = rows.answers is not None
        tokens = TrainRows(rows.answers, rows.places) if is_rendered else rows
        return rows, self._check_tokens(tokens, name, is_part=False)

    def _check_tokens(self, tokens: TrainRows, name: str, *, is_part: bool) -> DataStatistics:
        text_config = self.model_config.get_text_config()
        return check_tokens(
            tokens,
            name,
            seq_len=self.config.max_length,
            truncates=self.settings.truncate,
            keeps_end=self.config.truncation_mode == "keep_end",
            packs=self.config.packing,
            vocabulary=text_config.vocab_size,
            most_positions=getattr(text_config, "max_position_embeddings", None),
            is_part=is_part,
        )

    def _weighted(self, parts: Sequence[TrainRows], weights: Sequence[float]) -> list[TrainRows]:
        """The rows of each source as often as its weight asks for. Says the numbers."""
        paths, sizes = self.settings.data, [len(part.dataset) for part in parts]
        for path, size in zip(paths, sizes, strict=True):
            if not size:
                raise ConfigError(
                    f"--data: {path} has no row left to train beside those of --eval-split; leave it out."
                )
        chosen = rows_by_weight(sizes, weights, self.config.seed)
        total = sum(map(len, chosen))
        for path, size, rows in zip(paths, sizes, chosen, strict=True):
            say(
                f"--data {path}: {len(rows) / total:.1%} of the data; each row {len(rows) / size:.3g} times in an epoch"
            )
        return [part.select(rows) for part, rows in zip(parts, chosen, strict=True)]


def _split_off(parts: Sequence[TrainRows], share: float, seed: int) -> tuple[list[TrainRows], TrainRows]:
    """The rows to train of each source, and the rows to evaluate of all. Every row is in one of them."""
    trained, evaluated = split_off([len(part.dataset) for part in parts], share, seed)
    rest = [part.select(rows) for part, rows in zip(parts, trained, strict=True)]
    chosen = TrainRows.joined([part.select(rows) for part, rows in zip(parts, evaluated, strict=True)])
    return rest, chosen
