"""The files of a run: metrics.jsonl with one row per optimizer step, and run.json with settings and timelines.

Rows are JSON objects in the dialect of Python's json module: floats read back exactly, NaN and Infinity are allowed.
A process that is killed can leave an incomplete last line, and rows of steps after the last checkpoint. Readers ignore
the former; a resumed run removes both. A resumed run keeps a file that is damaged otherwise under another name and goes
on: a report is no reason to end a training.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from roundpipe.timeline import Span, Timeline

logger = logging.getLogger("roundpipe")
METRICS_FILE = "metrics.jsonl"
RECORD_FILE = "run.json"
RUN = "run"  # the section of the settings that says what the run is: name, base model, method, data, price per hour
Row = dict[str, Any]


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """Return the rows of a metrics.jsonl; an empty list if there is no such file. Ignores an incomplete last line.

    Raises ValueError for the first other line that is not a row.
    """
    rows, faults = _rows_and_faults(Path(path))
    if faults:
        raise ValueError(faults[0])
    return rows


def _rows_and_faults(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a metrics.jsonl, and a message for each complete line that is no row."""
    reader = MetricsReader(path)
    reader.read()
    return reader.rows, reader.faults


class MetricsReader:
    """The rows of a file that another process may be writing, and a message for each complete line that is no row."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._forget()

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self.faults: list[str] = []
        self._num_lines = self._end = 0  # what was read, in lines and bytes
        self._last_line = b""

    def read(self) -> None:
        """Read the lines that were added since the last time; all of them if the file was replaced meanwhile."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed by the next `with`
        except FileNotFoundError:
            self._forget()
            return
        with file:
            file.seek(self._end - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._forget()
                file.seek(0)
            *lines, _ = file.read().split(b"\n")  # what follows the last newline is incomplete
        for line in lines:
            self._num_lines += 1
            self._end += len(line) + 1
            self._take(line)
        self._last_line = lines[-1] + b"\n" if lines else self._last_line

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step", 0), int):
                raise ValueError("it has no number of a step")
            self.rows.append(row)
        except (ValueError, RecursionError) as error:
            self.faults.append(f"{self.path}: line {self._num_lines} is not a JSON object of a step: {error}")


class MetricsWriter:
    """Appends rows to a metrics.jsonl. Each row is one write, so that a killed process leaves whole rows."""

    def __init__(self, path: str | os.PathLike[str], *, resumed_step: int = 0) -> None:
        """Open the file for appending. Removes rows of steps after `resumed_step`, the step that the run resumes at."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows, faults = _rows_and_faults(self.path) if resumed_step else ([], [])
        if faults:
            aside = _set_aside(self.path)
            logger.warning("%s; the run goes on with the other rows, %s keeps the damaged file", faults[0], aside)
        replace_file(self.path, "".join(_line(row) for row in rows if row.get("step", 0) <= resumed_step))
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. If that fails, as on a full disk, raises OSError and leaves the rows before it."""
        line, before = _line(row).encode(), os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            os.ftruncate(self._file.fileno(), before)
            raise

    def close(self) -> None:
        self._file.close()


@dataclass
class RunRecord:
    """The content of run.json: everything of a report that is not in the metrics.

    settings: sections of names and values.
    starts: one entry per process that has worked on the run: `step`, `time`, `devices`.
    timelines: by number of the step.
    max_steps: the last step that the run is to take; None if unknown.
    ended: when the run ended; None while it runs, and after a kill.
    """

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    timelines: dict[int, Timeline] = field(default_factory=dict)
    max_steps: int | None = None
    ended: float | None = None

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Self:
        """Return the record of a run; an empty one if the folder has none. Raises ValueError if it is damaged."""
        path = Path(folder, RECORD_FILE)
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            settings, starts = dict(content["settings"]), list(content["starts"])
            if not all(isinstance(start["step"], int) for start in starts):
                raise ValueError("a start has no number of a step")
            timelines = {
                int(step): Timeline(tuple(Span(**span) for span in spans))
                for step, spans in content["timelines"].items()
            }
            max_steps, ended = content.get("max_steps"), content.get("ended")
            if not (isinstance(max_steps, int | None) and isinstance(ended, int | float | None)):
                raise ValueError(f"max_steps {max_steps!r} and ended {ended!r} must be numbers")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        return cls(settings, starts, timelines, max_steps, ended)

    @classmethod
    def resumed(cls, folder: str | os.PathLike[str], step: int) -> Self:
        """Return the record of a run that goes on after `step`; 0 begins a new run, with an empty record."""
        if not step:
            return cls()
        try:
            record = cls.read(folder)
        except ValueError as error:
            aside = _set_aside(Path(folder, RECORD_FILE))
            logger.warning("%s; the report begins at step %d, %s keeps the damaged file", error, step, aside)
            return cls()
        record.starts = [start for start in record.starts if start["step"] <= step]
        record.timelines = {at: timeline for at, timeline in record.timelines.items() if at <= step}
        record.max_steps = record.ended = None  # of the process before
        return record

    def write(self, folder: str | os.PathLike[str]) -> None:
        timelines = {step: [asdict(span) for span in timeline.spans] for step, timeline in self.timelines.items()}
        content = {
            "max_steps": self.max_steps,
            "ended": self.ended,
            "settings": self.settings,
            "starts": self.starts,
            "timelines": timelines,
        }
        replace_file(Path(folder, RECORD_FILE), json.dumps(content, indent=1, default=str) + "\n")

    def keep_timeline(self, step: int, timeline: Timeline) -> None:
        """Add the timeline of a step. Of all timelines only the first and the last are kept."""
        first = min(self.timelines, default=step)
        self.timelines = {at: one for at, one in self.timelines.items() if at == first} | {step: timeline}


def _set_aside(path: Path) -> Path:
    """Give a damaged file another name, and return it."""
    aside = path.with_name(f"{path.name}.damaged")
    os.replace(path, aside)
    return aside


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=str) + "\n"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file such that a killed process leaves the old or the new content. Text is written as UTF-8."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
