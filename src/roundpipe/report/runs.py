"""The runs of a folder as their files show them now, the page of each, and the page with all of them side by side.

Reads metrics.jsonl and run.json again when they change; writes nothing. Knows no server.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from roundpipe.report.charts import Curve, eval_losses, overlaid
from roundpipe.report.figures import count, duration, figure
from roundpipe.report.metrics import METRICS_FILE, RECORD_FILE, RUN, MetricsReader, Row, RunRecord
from roundpipe.report.page import (
    Live,
    can_draw,
    charts_side_by_side,
    escaped,
    html_page,
    notes_of,
    report_page,
    section,
    steps_of,
    time_spent_s,
)
from roundpipe.report.progress import Progress, State, progress_of
from roundpipe.report.samples import SAMPLES_FILE

_DEPTH = 3  # of folders below the given one
_MOST_CURVES = 8  # in one chart
_RATE_ROWS = 20  # steps whose median is the present rate
_HEIGHT_PER_NAME = 0.17  # inches
RELOAD_S = 10


def find_runs(root: Path) -> list[str]:
    """The names of the runs of a folder: paths of the folders with metrics, from `root`. `.` is the folder itself."""
    found = []
    for folder, subfolders, files in os.walk(root):
        path = Path(folder)
        name = path.relative_to(root)
        if METRICS_FILE in files:
            found.append(str(name))
        is_deep = METRICS_FILE in files or len(name.parts) >= _DEPTH
        subfolders[:] = [] if is_deep else sorted(each for each in subfolders if not each.startswith("."))
    return found


class WatchedRun:
    """One run, as its files were when `refresh` was called last."""

    def __init__(self, folder: Path, name: str) -> None:
        """name: of the run among others."""
        self.name = folder.absolute().name if name == "." else name
        self._folder = folder
        self._metrics = MetricsReader(folder / METRICS_FILE)
        self._samples = MetricsReader(folder / SAMPLES_FILE)
        self._record_time = 0
        self._record_fault = ""
        self.record = RunRecord()
        self.progress: Progress = progress_of((), self.record)

    def refresh(self, now: float | None = None) -> None:
        self._record_fault = ""
        try:
            self._metrics.read()
            self._samples.read()
            path = self._folder / RECORD_FILE
            changed = path.stat().st_mtime_ns if path.exists() else 0
            if changed != self._record_time:
                self.record, self._record_time = RunRecord.read(self._folder), changed
        except (OSError, ValueError) as error:  # of a folder that is removed or damaged
            self._record_fault = str(error)
        self.progress = progress_of(self.rows, self.record, now)

    @property
    def rows(self) -> Sequence[Row]:
        return self._metrics.rows

    @property
    def started(self) -> float:
        """When its last process began; 0 if that is unknown."""
        return max((float(start["time"]) for start in self.record.starts), default=0.0)

    @property
    def has_ended(self) -> bool:
        return self.record.ended is not None

    @property
    def notes(self) -> list[str]:
        """What is wrong with the files, and what to do."""
        faults = self._metrics.faults
        found = [self._record_fault] if self._record_fault else []
        if faults:
            others = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
            found.append(f"{faults[0]}{others}. The other rows are shown; a resumed run leaves such lines out.")
        return found

    @property
    def version(self) -> object:
        """Differs whenever the page would."""
        files = (len(self.rows), len(self._metrics.faults), len(self._samples.rows), self._record_fault)
        return (*files, self._record_time, self.progress.state, self.progress.quiet_s // 60)

    def page(self, overview: str = "") -> str:
        """The report of the run. `overview`: the address of the page with all runs."""
        reload_s = None if self.has_ended else RELOAD_S
        if self.rows:
            live = Live(self.progress.sentence, reload_s, self.notes, overview)
            return report_page(self.name, self.rows, self.record, live=live, samples=self._samples.rows)
        way_back = f'<p><a href="{escaped(overview)}">all runs</a></p>' if overview else ""
        body = f"<header>{way_back}<h1>{escaped(self.name)}</h1><p>The run has no complete step yet.</p></header>"
        return html_page(self.name, body + notes_of(self.notes), reload_s=RELOAD_S)

    # What the page with all runs shows.

    def curves(self) -> tuple[Curve, Curve | None]:
        """The losses of steps, and those of the first kind of evaluation."""
        steps, evaluations = steps_of(self.rows), eval_losses(self.rows)
        training = Curve(self.name, [row["step"] for row in steps], [row.get("loss") for row in steps])
        if not evaluations:
            return training, None
        return training, Curve(self.name, evaluations[0].steps, evaluations[0].values)

    def cells(self) -> list[str]:
        """The figures of the run as texts, in the order of COLUMNS."""
        training, evaluation = self.curves()
        rates = [row["tokens_per_s"] for row in steps_of(self.rows)[-_RATE_ROWS:] if row.get("tokens_per_s")]
        spent_s = time_spent_s(self.rows, self.record.starts)
        price = self.record.settings.get(RUN, {}).get("price per hour")
        return [
            self.progress.steps,
            figure(_last(training)),
            "-" if evaluation is None else figure(_last(evaluation)),
            count(statistics.median(rates)) if rates else "-",
            duration(spent_s),
            duration(self.progress.left_s),
            "-" if price is None else f"{price * spent_s / 3600:,.2f}",
        ]

    @property
    def subtitle(self) -> str:
        about = self.record.settings.get(RUN, {})
        return " · ".join(str(about[name]) for name in ("base model", "method", "data") if about.get(name))


COLUMNS = ("step", "loss", "eval loss", "tokens/s", "time", "left", "cost")


def _last(curve: Curve) -> float | None:
    return next((value for value in reversed(curve.values) if value is not None), None)


def address_of(run: WatchedRun) -> str:
    """The path of a run's page on the server."""
    return f"/run/{quote(run.name)}/"


def overview_page(title: str, runs: Sequence[WatchedRun]) -> str:
    """The page with all runs: a table, and their losses over each other. The run that was started last is the first."""
    runs = sorted(runs, key=lambda run: run.started, reverse=True)
    number = f"{len(runs):,} runs" if len(runs) != 1 else "1 run"
    num_running = sum(run.progress.state is State.RUNNING for run in runs)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    head = f"<header><h1>{escaped(title)}</h1><p>{number}, {num_running:,} running, as of {when}</p></header>"
    notes = notes_of(note for run in runs for note in run.notes)
    body = head + notes + section("Runs", _table(runs)) + section("Losses", _losses(runs))
    return html_page(title, body, reload_s=RELOAD_S)


def _table(runs: Sequence[WatchedRun]) -> str:
    header = "".join(f"<th>{name}</th>" for name in ("run", "state", *COLUMNS))
    lines = []
    for run in runs:
        what = f"<small>{escaped(run.subtitle)}</small>" if run.subtitle else ""
        name = f'<td class="run"><a href="{escaped(address_of(run))}">{escaped(run.name)}</a>{what}</td>'
        state = f'<td><span class="state {run.progress.state.name.lower()}">{escaped(run.progress.short)}</span></td>'
        lines.append(f"<tr>{name}{state}{''.join(f'<td>{escaped(cell)}</td>' for cell in run.cells())}</tr>")
    body = "".join(lines)
    return (
        f'<div class="scroll"><table class="runs"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _losses(runs: Sequence[WatchedRun]) -> str:
    if not can_draw():
        return "<p>matplotlib is not installed, so there are no curves; pip install 'roundpipe[train]'.</p>"
    shown = [run.curves() for run in runs[:_MOST_CURVES]]
    charts = [
        overlaid("Training loss", [training for training, _ in shown]),
        overlaid("Evaluation loss", [evaluation for _, evaluation in shown if evaluation is not None]),
    ]
    rest = f"<p>The {_MOST_CURVES} latest of {len(runs):,} runs.</p>" if len(runs) > _MOST_CURVES else ""
    drawn = [chart for chart in charts if chart is not None]
    return rest + charts_side_by_side(drawn, more_height=_HEIGHT_PER_NAME * len(shown)) if drawn else ""
