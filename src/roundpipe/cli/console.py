"""What `roundpipe train` writes to the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from roundpipe.cli.launch import is_first


def say(text: str = "") -> None:
    """Write a line to stdout, unless its reader has gone: that must not fail a run. Only rank 0 of a run writes."""
    if not is_first():
        return
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # also for what the interpreter flushes at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def say_fields(title: str, counts: Any) -> None:
    """Write the numbers of a dataclass."""
    say(title)
    for field in dataclasses.fields(counts):
        say(f"  {field.name.replace('_', ' '):<20} {getattr(counts, field.name):,}")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def plain_output(*, for_terminals: bool = False) -> Iterator[None]:
    """No progress bars of datasets and transformers inside the block, unless they go to a terminal.

    for_terminals: none there either.
    Bars that the user has disabled stay disabled afterwards.
    Nor does transformers write its table of weights that a folder lacks: the command says which it makes anew.
    """
    table = logging.getLogger("transformers.modeling_utils")
    table.addFilter(_is_no_table)  # setting its level would make transformers say more, of sharding
    try:
        if sys.stderr.isatty() and not for_terminals:
            yield
            return
        with _no_bars():
            yield
    finally:
        table.removeFilter(_is_no_table)


def _is_no_table(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    from datasets.utils import (  # type: ignore[import-untyped]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging as transformers_logging

    of_datasets, of_transformers = not are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if of_datasets:
            enable_progress_bars()
        if of_transformers:
            transformers_logging.enable_progress_bar()
