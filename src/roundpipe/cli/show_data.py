"""`roundpipe data`: the first rows as the model sees them, how long the rows are, and how many are cut or dropped.

Takes the options of `roundpipe train`. Loads no weights and writes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

from roundpipe.cli.answers import answers_of
from roundpipe.cli.arguments import parse
from roundpipe.cli.console import say, say_fields
from roundpipe.cli.data import TrainRows
from roundpipe.cli.preparation import data_reader
from roundpipe.cli.rows import IGNORED
from roundpipe.errors import ConfigError

_USAGE = """usage: roundpipe data FILES... --model DIR_OR_NAME [--rows N] [options of roundpipe train]

Shows the first rows as the model sees them: rendered by the chat template, with the tokens that have a loss marked.
Then the lengths of all rows, and what --seq-len does to them. FILES are what --data takes; --method decides what is
trained.
"""
_BINS, _BAR = 10, 40
_LOSS, _PLAIN, _RESET = "\033[1;32m", "\033[2m", "\033[0m"


def run(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit code: 2 if these options could not train the rows."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0 if argv else 2
    files = list(takewhile(lambda word: not word.startswith("-"), argv))
    words, num_rows = _without_rows(list(argv[len(files) :]))
    # The output folder is of no matter here, but a run has one.
    settings = parse([*(("--data", *files) if files else ()), "--out", os.devnull, *words])
    reader = data_reader(settings)
    train, evaluation = reader.rows()
    show_rows(train, reader.tokenizer, num_rows, settings.trainer["max_length"])
    data = reader.checked(train, evaluation)  # afterwards: it refuses rows that do not fit
    for title, counts in data.counts:
        say_fields(title, counts)
    return 0


def _without_rows(words: list[str]) -> tuple[list[str], int]:
    """The words without --rows N, and N."""
    if "--rows" not in words:
        return words, 3
    place = words.index("--rows")
    value = words[place + 1] if place + 1 < len(words) else ""
    if not value.isdecimal():
        raise ConfigError(f"--rows must be a whole number, got {value!r}.")
    return [*words[:place], *words[place + 2 :]], int(value)


def show_rows(rows: TrainRows, tokenizer: Any, num_rows: int, seq_len: int) -> None:
    """Write the first rows, with the tokens that have a loss marked, and the lengths of all rows."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    mark = f"{_LOSS}in this colour{_RESET}" if coloured else "between [[ and ]]"
    if num_rows:
        say(f"the first rows; tokens with a loss stand {mark}")
    for row in range(min(num_rows, len(rows.dataset))):
        for title, ids, labels in _sequences(rows, row):
            trained = sum(label != IGNORED for label in labels)
            cut = f", cut to {seq_len}" if len(ids) > seq_len else ""
            say(f"-- {rows.places.name(row)}{title}: {len(ids)} tokens{cut}, {trained} with a loss")
            say("".join(_marked(ids, labels, tokenizer, coloured=coloured)))
    show_lengths([max(len(ids) for _, ids, _ in _sequences(rows, row)) for row in range(len(rows.dataset))], seq_len)


def _sequences(rows: TrainRows, row: int) -> list[tuple[str, list[int], list[int]]]:
    """(title, tokens, labels) of each sequence of a row."""
    if rows.answers is not None and "input_ids" not in rows.answers.column_names:
        return list(answers_of(rows.answers[row]))
    tokens = (rows.dataset if rows.answers is None else rows.answers)[row]
    if "label" in tokens:  # of a class: no token has a loss
        return [(f", class {tokens['label']}", tokens["input_ids"], [IGNORED] * len(tokens["input_ids"]))]
    return [("", tokens["input_ids"], tokens["labels"])]


def _marked(ids: list[int], labels: list[int], tokenizer: Any, *, coloured: bool) -> Iterator[str]:
    """The text of a sequence, in pieces of tokens with and without loss."""
    before, after = (_LOSS, _RESET) if coloured else ("[[", "]]")
    for is_trained, pairs in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED):
        text = tokenizer.decode([token for token, _ in pairs])
        if is_trained:
            yield f"{before}{text}{after}"
        else:
            yield f"{_PLAIN}{text}{_RESET}" if coloured else text


def show_lengths(lengths: Sequence[int], seq_len: int) -> None:
    """Write how many rows have which number of tokens."""
    shortest, span = min(lengths), max(lengths) - min(lengths) + 1
    width = -(-span // _BINS)
    counts = [0] * -(-span // width)
    for length in lengths:
        counts[(length - shortest) // width] += 1
    say("tokens of the rows")
    for place, count in enumerate(counts):
        first, last = shortest + place * width, shortest + (place + 1) * width - 1
        bar = "#" * -(-count * _BAR // max(counts))
        beyond = "  more than --seq-len" if first > seq_len else ""
        say(f"  {first:>7,} to {last:>7,} {count:>9,} {bar}{beyond}")
