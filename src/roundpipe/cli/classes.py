"""Rows with labels, for a model that puts texts into classes: the classes, their tokens, and the checks of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roundpipe.cli.data import DataStatistics, TrainRows
from roundpipe.cli.rows import Rows
from roundpipe.errors import ConfigError

_MANY = 1000  # classes: more than these are rather texts or numbers than names


def classes_of(parts: Sequence[Rows]) -> list[str]:
    """The names of all classes, in the order of their numbers: that of a dataset that knows it, else sorted.

    Names that are all whole numbers are sorted as numbers.
    """
    known = {_known_names(rows) for rows in parts} - {None}
    found = {_name(rows, label) for rows in parts for label in rows.dataset.unique("label")}
    if len(known) == 1:
        names = next(iter(known))
        if names is not None and found <= set(names):
            return list(names)
    if not 2 <= len(found) <= _MANY:
        raise ConfigError(
            f"--data: {parts[0].places.name(0)} and the rows after it have {len(found)} different values of `label`; "
            f"--method classify needs 2 to {_MANY} classes."
        )
    are_numbers = all(name.lstrip("-").isdecimal() for name in found)
    return sorted(found, key=(lambda name: (int(name), name)) if are_numbers else (lambda name: (0, name)))


def _known_names(rows: Rows) -> tuple[str, ...] | None:
    """The names that a dataset has for its labels, which are then numbers."""
    names = getattr(rows.dataset.features["label"], "names", None)
    return None if names is None else tuple(names)


def _name(rows: Rows, label: Any) -> str:
    names = _known_names(rows)
    return str(label) if names is None else names[label]


def tokenized_classes(
    rows: Rows, tokenizer: Any, classes: Sequence[str], seq_len: int, *, truncates: bool
) -> TrainRows:
    """The tokens and the number of the class of each row. Raises ConfigError for a class that is not known."""
    from datasets import Dataset  # type: ignore[import-untyped]

    numbers = {name: number for number, name in enumerate(classes)}
    labels = []
    for row, label in enumerate(rows.dataset["label"]):
        name = _name(rows, label)
        if name not in numbers:
            raise ConfigError(f"{rows.places.name(row)}: no row that is trained has the label {name!r}.")
        labels.append(numbers[name])
    limit: dict[str, Any] = {"truncation": True, "max_length": seq_len} if truncates else {}
    texts = rows.dataset["text"][:]
    ids = tokenizer(texts, **limit)["input_ids"]
    whole = tokenizer(texts)["input_ids"] if truncates else ids
    columns = {"input_ids": ids, "label": labels, "length": [len(each) for each in whole]}
    return TrainRows(Dataset.from_dict(columns), rows.places)


def check_classes(
    rows: TrainRows, option: str, *, seq_len: int, vocabulary: int, most_positions: int | None
) -> tuple[TrainRows, DataStatistics]:
    """The rows without their whole lengths, and their counts. Raises ConfigError for rows that do not fit."""
    lengths = rows.dataset["length"][:]
    kept = [len(ids) for ids in rows.dataset["input_ids"]]
    _require(rows, lambda row: bool(rows.dataset[row]["input_ids"]), "the text has no tokens")
    _require(
        rows,
        lambda row: max(rows.dataset[row]["input_ids"]) < vocabulary,
        f"a token is outside of the model's vocabulary of {vocabulary}; the tokenizer belongs to another model",
    )
    too_long = [row for row, length in enumerate(kept) if length > seq_len]
    if too_long:
        raise ConfigError(
            f"{option}: {rows.places.name(too_long[0])}: the row has {kept[too_long[0]]} tokens, more than --seq-len "
            f"{seq_len}; {len(too_long)} of {len(kept)} rows are too long, the longest has {max(kept)} tokens. Raise "
            "--seq-len, or cut them with --truncate."
        )
    if most_positions is not None and max(kept) > most_positions:
        raise ConfigError(
            f"{option}: sequences of {max(kept)} tokens do not fit: the model has {most_positions} positions "
            f"(max_position_embeddings); give --seq-len {most_positions} or less."
        )
    cut = sum(length > size for length, size in zip(lengths, kept, strict=True))
    total = sum(kept)
    statistics = DataStatistics(len(kept), total, total, max(kept), truncated=cut, dropped=0)
    return TrainRows(rows.dataset.remove_columns("length"), rows.places), statistics


def _require(rows: TrainRows, holds: Callable[[int], bool], fault: str) -> None:
    row = next((row for row in range(len(rows.dataset)) if not holds(row)), None)
    if row is not None:
        raise ConfigError(f"{rows.places.name(row)}: {fault}.")


def accuracy(outcome: Any) -> dict[str, float]:
    """The share of rows whose class the model finds, for the evaluations of transformers' Trainer."""
    logits = outcome.predictions[0] if isinstance(outcome.predictions, tuple) else outcome.predictions
    return {"accuracy": float((logits.argmax(-1) == outcome.label_ids).mean())}
