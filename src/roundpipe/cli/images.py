"""Images beside text: rows as TRL's trainer takes them, and the tokens that a model's processor makes of them.

TRL renders such rows batch by batch while the model trains; images are read from their files then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundpipe.cli.console import plain_output
from roundpipe.cli.data import TrainRows
from roundpipe.cli.rows import Rows
from roundpipe.cli.shapes import RowFormat
from roundpipe.errors import ConfigError


def has_images(rows: Rows) -> bool:
    return "images" in rows.dataset.column_names


def rendered_rows(rows: Rows, processor: Any, config: Any, *, assistant_only: bool | None) -> TrainRows:
    """The rows as TRL's trainer takes them, and the tokens that the processor makes of each.

    Of messages, the assistant's answer is the completion: TRL cannot leave messages in the middle without loss.
    """
    dataset = rows.dataset
    if not has_images(rows):
        dataset = dataset.add_column("images", [[] for _ in range(len(dataset))])
    if rows.format is RowFormat.MESSAGES and assistant_only is not False:
        reasons = [_why_not_split(messages) for messages in dataset["messages"]]
        bad = next((row for row, reason in enumerate(reasons) if reason), None)
        if bad is not None:
            raise ConfigError(f"{rows.places.name(bad)}: {reasons[bad]}.")
        dataset = dataset.map(_split, remove_columns="messages", keep_in_memory=True)
    dataset = _decoding(dataset)
    collate = _collator(processor, config)
    tokens: dict[str, list[Any]] = {"input_ids": [], "labels": []}
    for row in range(len(dataset)):
        try:
            batch = collate(dataset[row])
        except Exception as error:  # of the processor, the template, or a damaged image
            text = " ".join(str(error).split())
            raise ConfigError(f"{rows.places.name(row)}: the row cannot be rendered: {text}") from error
        for name, column in tokens.items():
            column.append(batch[name][0].tolist())
    from datasets import Dataset  # type: ignore[import-untyped]

    return TrainRows(dataset, rows.places, Dataset.from_dict(tokens))


def _why_not_split(messages: list[Any]) -> str | None:
    answers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    if answers != [len(messages)]:
        return (
            f"of {len(messages)} messages beside images, {len(answers)} are the assistant's; one alone can have a "
            "loss, the last. Make a row of each answer, or give --assistant-only-loss false to train all tokens"
        )
    return None


def _split(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


def _decoding(dataset: Any) -> Any:
    """The dataset with images that are decoded when a row is read."""
    from datasets import Image, List

    with plain_output(for_terminals=True):
        return dataset.cast_column("images", List(Image()))


def _collator(processor: Any, config: Any) -> Callable[[dict[str, Any]], Any]:
    """TRL's collator for one row, without its truncation, which may cut an image in two."""
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    def collate(row: dict[str, Any]) -> Any:
        is_split = "completion" in row
        collator = DataCollatorForVisionLanguageModeling(
            processor, max_length=None, completion_only_loss=is_split and config.completion_only_loss is not False
        )
        return collator([row])

    return collate
