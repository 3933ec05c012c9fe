"""Rows with answers, and prompts, for trainers that tokenize rows themselves: their lengths, which rows they can train.

TRL tokenizes; its code runs here before the model is loaded, so that a row that does not fit is refused by its place.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from roundpipe.cli.data import DataStatistics, TrainRows, alone, prepared_rows
from roundpipe.cli.methods import Head, Method
from roundpipe.cli.rows import IGNORED, Rows
from roundpipe.cli.shapes import RowFormat
from roundpipe.errors import ConfigError

_TOKEN_COLUMNS = ("prompt_ids", "completion_ids", "chosen_ids", "rejected_ids")  # of TRL


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of one row: of its prompt, and of each answer with the prompt before it. And its extreme token ids."""

    prompt: int
    answers: tuple[int, ...]
    lowest_token: int
    highest_token: int


def rows_with_answers(rows: Rows, tokenizer: Any, config: Any, method: Method) -> TrainRows:
    """The rows, and their tokens, not truncated. Raises ConfigError for a row that TRL cannot tokenize."""
    first = rows.dataset[0]
    given = first["prompt"] if method.is_rewarded else first.get("chosen", first.get("completion"))
    if not tokenizer.chat_template and isinstance(given, list):
        raise ConfigError(
            f"{rows.places.name(0)}: the row has messages, but the tokenizer has no chat template; give one with "
            "--chat-template-path FILE.jinja, or give strings."
        )
    if method.is_rewarded:
        return TrainRows(rows.dataset, rows.places, _tokens_of_prompts(rows, tokenizer, config))
    prepared = prepared_rows(rows, alone(_trl_preparation(rows.format, tokenizer, config, method)))
    names = [name for name in _TOKEN_COLUMNS if name in prepared.features]
    return TrainRows(rows.dataset, rows.places, prepared.select_columns(names))


def _tokens_of_prompts(rows: Rows, tokenizer: Any, config: Any) -> Any:
    def tokens_of(row: dict[str, Any]) -> dict[str, list[int]]:
        if isinstance(row["prompt"], str):
            return {"prompt_ids": tokenizer(row["prompt"])["input_ids"]}
        options = {"add_generation_prompt": True, "return_dict": True, **(config.chat_template_kwargs or {})}
        return {"prompt_ids": tokenizer.apply_chat_template(row["prompt"], tokenize=True, **options)["input_ids"]}

    return prepared_rows(rows, lambda dataset: dataset.map(tokens_of).select_columns(["prompt_ids"]))


def _rows_of(dataset: Any) -> Iterator[dict[str, list[int]]]:
    for batch in dataset.iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _lengths(row: dict[str, list[int]], most_new: int) -> Lengths:
    """most_new: tokens of the longest answer that the model may give to a row that is a prompt alone."""
    prompt = row.pop("prompt_ids", [])
    tokens = [*prompt, *(token for answer in row.values() for token in answer)]
    answers = tuple(len(prompt) + len(answer) for answer in row.values()) or (len(prompt) + most_new,)
    return Lengths(len(prompt), answers, min(tokens, default=0), max(tokens, default=0))


def answers_of(row: dict[str, list[int]]) -> Iterator[tuple[str, list[int], list[int]]]:
    """(title, tokens, labels) of each answer of a row of tokens, with the prompt before it, which has no loss.

    Of a row without answers, the prompt.
    """
    prompt = row.get("prompt_ids", [])
    if row.keys() == {"prompt_ids"}:
        yield ", prompt", prompt, [IGNORED] * len(prompt)
    for name, answer in row.items():
        if name != "prompt_ids":
            yield f", {name.removesuffix('_ids')}", [*prompt, *answer], [IGNORED] * len(prompt) + answer


def _trl_preparation(row_format: RowFormat, tokenizer: Any, config: Any, method: Method) -> Callable[[Any], Any]:
    """A function that tokenizes a dataset as the method's trainer does, without its truncation.

    The trainers' own preparation needs a model, but only these attributes of the trainer. Pairs for KTO are tokenized
    as pairs here; ORPO's trainer has no preparation step, and tokenizes like that of DPO.
    """
    config = copy.copy(config)
    config.max_length, config.truncation_mode = None, "keep_end"
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    if method.head is Head.SCORE:
        module, name = "reward_trainer", "RewardTrainer"
    elif row_format is RowFormat.UNPAIRED:
        module, name = "kto_trainer", "KTOTrainer"
    else:
        module, name = "dpo_trainer", "DPOTrainer"
    prepare: Any = getattr(importlib.import_module(f"trl.trainer.{module}"), name)._prepare_dataset
    return lambda dataset: prepare(trainer, dataset, tokenizer, config, "the")


def check_answers(
    rows: TrainRows,
    option: str,
    method: Method,
    *,
    seq_len: int,
    most_new: int,
    truncates: bool,
    vocabulary: int,
    most_positions: int | None,
) -> tuple[TrainRows, DataStatistics]:
    """The rows that can be trained, and their counts. Raises ConfigError for rows that do not fit.

    With `truncates`, rows whose prompt leaves no room for an answer are left out. A reward model gets no cut answers:
    TRL leaves such rows out. A prompt is not cut, and is left out if an answer of the greatest length does not fit.
    """
    lengths = [_lengths(row, most_new) for row in _rows_of(rows.answers)]
    for row, each in enumerate(lengths):
        if each.lowest_token < 0 or each.highest_token >= vocabulary:
            raise ConfigError(
                f"{rows.places.name(row)}: token {each.highest_token} is outside of the model's vocabulary of "
                f"{vocabulary}; the tokenizer belongs to another model."
            )
    too_long = [row for row, each in enumerate(lengths) if max(each.answers) > seq_len]
    if too_long and not truncates:
        longest = max(max(each.answers) for each in lengths)
        raise ConfigError(
            f"{option}: {rows.places.name(too_long[0])}: the row has {max(lengths[too_long[0]].answers)} tokens with "
            f"its prompt, more than --seq-len {seq_len}; {len(too_long)} of {len(lengths)} rows are too long, the "
            f"longest has {longest} tokens. Raise --seq-len, or cut them with --truncate."
        )
    cuts = method.head is not Head.SCORE and not method.is_rewarded
    kept = [
        row for row, each in enumerate(lengths) if (each.prompt < seq_len if cuts else max(each.answers) <= seq_len)
    ]
    if not kept:
        raise ConfigError(f"{option}: no row has an answer within --seq-len {seq_len}; raise it.")
    longest = min(seq_len, max(max(lengths[row].answers) for row in kept))
    if most_positions is not None and longest > most_positions:
        raise ConfigError(
            f"{option}: sequences of {longest} tokens do not fit: the model has {most_positions} positions "
            f"(max_position_embeddings); give --seq-len {most_positions} or less."
        )
    ends = [(lengths[row].prompt, min(end, seq_len)) for row in kept for end in lengths[row].answers]
    is_split = method.sequences == 1  # KTO takes a pair as two rows
    return rows if len(kept) == len(lengths) else rows.select(kept), DataStatistics(
        rows=len(ends) if is_split else len(kept),
        tokens=sum(end for _, end in ends),
        trained_tokens=sum(end - prompt for prompt, end in ends),
        longest=longest,
        truncated=len(too_long) if cuts else 0,
        dropped=len(lengths) - len(kept),
    )
