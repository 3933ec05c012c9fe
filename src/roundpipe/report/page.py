"""The report of a run: report.html, a page that needs no other file and no network, and report.png, its charts.

Made from metrics.jsonl and run.json alone, so it can be written again at any time. Knows no model and no Trainer.
"""

from __future__ import annotations

import html
import itertools
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from roundpipe.report.charts import Chart, Curve, chart_svg, charts_of, eval_losses, picture, timeline_svg
from roundpipe.report.figures import count, duration, figure, known, mean, shown_of, size
from roundpipe.report.metrics import METRICS_FILE, RUN, MetricsReader, Row, RunRecord, read_metrics, replace_file
from roundpipe.report.progress import State, progress_of
from roundpipe.report.samples import SAMPLES_FILE, of_this_run, samples_html
from roundpipe.timeline import Timeline

PAGE_FILE = "report.html"
PICTURE_FILE = "report.png"
logger = logging.getLogger("roundpipe")
_STEPS_IN_TABLE = 24
_OPEN_ROWS = 12  # longer tables of settings are folded
_LONGEST_VALUE = 4000  # characters of a setting

Table = Mapping[str, object] | Sequence[Sequence[object]]


@dataclass(frozen=True)
class Section:
    """A further section of a report, such as a comparison with another run.

    verdict: one highlighted sentence.
    text: paragraphs, separated by blank lines.
    table: names and values, or rows of which the first is the header.
    losses: curves that are drawn over the losses of the run.
    """

    title: str
    verdict: str = ""
    text: str = ""
    table: Table = ()
    losses: Sequence[Curve] = ()


@dataclass(frozen=True)
class Live:
    """What a page says and does beside the report.

    sentence: how far the run is.
    reload_s: seconds after which a browser loads the page again; None if it does not.
    notes: what is wrong with the run's files.
    overview: the address of the page with all runs; empty if there is none.
    """

    sentence: str
    reload_s: int | None
    notes: Sequence[str] = ()
    overview: str = ""


def write_report(folder: str | os.PathLike[str], *, sections: Sequence[Section] = ()) -> Path:
    """Write report.html and report.png for the metrics.jsonl and run.json of a folder; return the path of the page.

    A killed process leaves the old or the new content of each file. Without matplotlib the page has timelines as text
    and no curves, and report.png is not written. Raises ValueError if the folder has no metrics.
    """
    folder = Path(folder)
    rows, record = read_metrics(folder / METRICS_FILE), RunRecord.read(folder)
    if not rows:
        raise ValueError(f"{folder / METRICS_FILE} does not exist or has no complete row: there is nothing to report.")
    run = _Run(folder.absolute().name, rows, record, tuple(sections), samples=_samples(folder, record))
    if can_draw():
        replace_file(folder / PICTURE_FILE, run.picture())
    else:
        logger.warning(
            "matplotlib is not installed, so %s has no curves and %s is not written; pip install 'roundpipe[train]'.",
            folder / PAGE_FILE,
            PICTURE_FILE,
        )
    replace_file(folder / PAGE_FILE, run.page())
    return folder / PAGE_FILE


def refresh_page(folder: str | os.PathLike[str], reload_s: int) -> None:
    """Write report.html for a run that is running. Does nothing before the first row."""
    folder = Path(folder)
    rows, record = read_metrics(folder / METRICS_FILE), RunRecord.read(folder)
    if rows:
        live = Live(f"{progress_of(rows, record).sentence} As of {moment(time.time())}.", reload_s)
        run = _Run(folder.absolute().name, rows, record, live=live, samples=_samples(folder, record))
        replace_file(folder / PAGE_FILE, run.page())


def report_page(
    folder: str, rows: Sequence[Row], record: RunRecord, *, live: Live | None = None, samples: Sequence[Row] = ()
) -> str:
    """Return the page of a run. `folder`: the name of its folder. There must be a row."""
    return _Run(folder, rows, record, live=live, samples=of_this_run(samples, record.starts)).page()


def _samples(folder: Path, record: RunRecord) -> list[Row]:
    """The samples of the run, without damaged lines."""
    reader = MetricsReader(folder / SAMPLES_FILE)
    reader.read()
    return of_this_run(reader.rows, record.starts)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True)
class Headline:
    """One of the numbers at the top of a report. `exact` is the full value or a remark."""

    name: str
    text: str
    exact: str = ""


def headlines(
    rows: Sequence[Row], starts: Sequence[Mapping[str, Any]], price_per_hour: float | None = None
) -> list[Headline]:
    """Return the numbers that summarise a run; those that were not measured are left out."""
    steps = steps_of(rows)
    found = _loss_headlines(rows)
    if steps:
        found.append(Headline("steps", f"{steps[-1]['step']:,}"))
    if tokens := _values(steps, "tokens"):
        found.append(Headline("tokens", f"{sum(tokens):,}"))
    if rates := _values(steps, "tokens_per_s"):
        found.append(Headline("tokens/s, median", count(statistics.median(rates))))
    pauses = "all processes, without the pauses between them"
    wall_s = time_spent_s(rows, starts)
    found.append(Headline("wall time", duration(wall_s), pauses))
    if tokens and wall_s:
        found.append(Headline("tokens per day", _millions(86400 * sum(tokens) / wall_s), "evaluations included"))
    if price_per_hour is not None:
        found.append(Headline("cost", f"{price_per_hour * wall_s / 3600:,.2f}", f"{price_per_hour:g} per hour"))
    if (share := _computing_share(steps)) is not None:
        found.append(Headline("devices computing", f"{share:.0%}", "share of the time, mean of all devices"))
    if host := _values(steps, "host_rss_bytes"):
        found.append(Headline("peak host memory", size(max(host)), f"{max(host):,} bytes"))
    if device := [peak for row in steps for peak in known(row.get("device_peak_bytes"))]:
        found.append(Headline("peak device memory", size(max(device)), f"{max(device):,} bytes"))
    found.append(Headline("restarts", f"{max(len(starts) - 1, 0):,}"))
    return found


def _millions(value: float) -> str:
    return f"{value / 1e6:,.1f} million" if value >= 1e6 else count(value)


def _loss_headlines(rows: Sequence[Row]) -> list[Headline]:
    found = []
    if losses := [(row["step"], row["loss"]) for row in steps_of(rows) if row.get("loss") is not None]:
        step, loss = losses[-1]
        found.append(Headline("final loss", figure(loss), f"{loss!r} at step {step:,}"))
    if rewards := [(row["step"], row["reward"]) for row in steps_of(rows) if row.get("reward") is not None]:
        step, reward = rewards[-1]
        found.append(Headline("final reward", figure(reward), f"{reward!r} at step {step:,}, first {rewards[0][1]!r}"))
    for curve in eval_losses(rows):
        pairs = zip(curve.values, curve.steps, strict=True)
        if finite := [(value, step) for value, step in pairs if value is not None and math.isfinite(value)]:
            best, step = min(finite)
            found.append(Headline(f"best {curve.name.replace('_', ' ')}", figure(best), f"{best!r} at step {step:,}"))
    return found


def steps_of(rows: Sequence[Row]) -> list[Row]:
    """The rows of steps, without those of evaluations."""
    return [row for row in rows if row.get("type") != "eval"]


def _values(rows: Sequence[Row], field: str) -> list[Any]:
    return [row[field] for row in rows if row.get(field) is not None]


def _computing_share(steps: Sequence[Row]) -> float | None:
    """Return the share of the time of all steps in which the devices computed."""
    measured = [
        (share, row.get("step_s") or 0.0) for row in steps if (share := mean(row.get("device_share"))) is not None
    ]
    total_s = sum(seconds for _, seconds in measured)
    return sum(share * seconds for share, seconds in measured) / total_s if total_s else None


def time_spent_s(rows: Sequence[Row], starts: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds from each start of a process to its last row that was kept."""
    times: list[float] = _values(rows, "time")
    begins = [start["time"] for start in starts] or times[:1]
    wall_s = 0.0
    for begin, end in itertools.pairwise([*begins, math.inf]):
        wall_s += max((at for at in times if begin <= at < end), default=begin) - begin
    return wall_s


@dataclass(frozen=True)
class _Run:
    """What a report shows of a run."""

    folder: str
    rows: Sequence[Row]
    record: RunRecord
    sections: Sequence[Section] = ()
    live: Live | None = None
    samples: Sequence[Row] = ()

    @cached_property
    def headlines(self) -> list[Headline]:
        return headlines(self.rows, self.record.starts, self.about.get("price per hour"))

    @property
    def about(self) -> Mapping[str, Any]:
        return self.record.settings.get(RUN, {})

    @property
    def title(self) -> str:
        arguments, model = (self.record.settings.get(name, {}) for name in ("arguments", "model"))
        return str(arguments.get("run_name") or self.about.get("name") or model.get("class") or self.folder)

    @property
    def subtitle(self) -> str:
        """What was trained, how, and on what; empty for runs that do not say it."""
        parts = [str(self.about[name]) for name in ("base model", "method", "data") if self.about.get(name)]
        return " · ".join(parts)

    @cached_property
    def charts(self) -> list[Chart]:
        return charts_of(self.rows, [curve for section in self.sections for curve in section.losses])

    @property
    def timelines(self) -> dict[str, Timeline]:
        """The timelines of an early and a late step, by title."""
        kept = {step: one for step, one in sorted(self.record.timelines.items()) if one.spans}
        return {f"Step {step:,}: {_time(one.duration_s)}": one for step, one in kept.items()}

    @property
    def restarts(self) -> list[int]:
        return [start["step"] for start in self.record.starts[1:]]

    def picture(self) -> bytes:
        shown = ("final loss", "best eval loss", "steps", "tokens/s, median", "wall time", "cost", "restarts")
        numbers = [one for one in self.headlines if one.name in shown]
        subtitle = "   ·   ".join(f"{one.name} {one.text}" for one in numbers)
        timelines = {f"Device timeline, {title[0].lower()}{title[1:]}": one for title, one in self.timelines.items()}
        return picture(self.title, subtitle, self.charts, timelines, self.restarts)

    def page(self) -> str:
        with_charts = can_draw()
        when = f"{moment(self.rows[0].get('time'))} to {moment(self.rows[-1].get('time'))}"
        what = f"<p><b>{escaped(self.subtitle)}</b></p>" if self.subtitle else ""
        parts = [
            f"<header>{self._way_back()}<h1>{escaped(self.title)}</h1>{what}<p>Training run, {when}</p>{self._status()}"
            f"</header>{notes_of(self.live.notes if self.live else ())}",
            '<div class="numbers">' + "".join(map(_headline, self.headlines)) + "</div>",
            *(section(each.title, _extra(each)) for each in self.sections),
            section("Curves", self._curves(with_charts)),
            section("Samples", samples_html(self.samples)),
            section("Device timelines", self._timelines(with_charts)),
            section("Processes", _processes(self.rows, self.record.starts)),
            section("Steps", _step_table(self.rows)),
            section("Settings", "".join(_settings(*one) for one in self.record.settings.items())),
            f"<footer>Made from {METRICS_FILE} ({len(self.rows):,} rows) and run.json.</footer>",
        ]
        title = " · ".join(filter(None, [self.title, self.subtitle]))
        return html_page(title, "\n".join(parts), reload_s=None if self.live is None else self.live.reload_s)

    def _status(self) -> str:
        """What the page says of the state of a run that has not ended, or has ended before its last step."""
        progress = progress_of(self.rows, self.record)
        ended_early = progress.sentence if progress.state is State.STOPPED else ""
        sentence = ended_early if self.live is None else self.live.sentence
        return f'<p class="live">{escaped(sentence)}</p>' if sentence else ""

    def _way_back(self) -> str:
        return (
            f'<p><a href="{escaped(self.live.overview)}">all runs</a></p>' if self.live and self.live.overview else ""
        )

    def _curves(self, with_charts: bool) -> str:
        if not with_charts:
            return "<p>matplotlib is not installed, so there are no curves; pip install 'roundpipe[train]'.</p>"
        return charts_side_by_side(self.charts, self.restarts)

    def _timelines(self, with_charts: bool) -> str:
        if not self.timelines:
            return ""
        about = (
            "<p>The last call of an early and of a late step, as the devices measured it. Each box is one microbatch "
            "of a task; the percentage is the share of the time in which the device computes.</p>"
        )
        if with_charts:
            return about + "".join(_figure(name, timeline_svg(one, name)) for name, one in self.timelines.items())
        return about + "".join(
            f"<h3>{escaped(name)}</h3><pre>{escaped(one.to_text(100))}</pre>" for name, one in self.timelines.items()
        )


# Parts of pages.


def charts_side_by_side(charts: Iterable[Chart], restarts: Sequence[int] = (), *, more_height: float = 0.0) -> str:
    figures = (_figure(chart.title, chart_svg(chart, restarts, more_height=more_height)) for chart in charts)
    return f'<div class="charts">{"".join(figures)}</div>'


def notes_of(notes: Iterable[str]) -> str:
    """Paragraphs that stand out."""
    return "".join(f'<p class="note">{escaped(note)}</p>' for note in notes)


def section(title: str, content: str) -> str:
    return f"<section><h2>{escaped(title)}</h2>{content}</section>" if content else ""


def _headline(one: Headline) -> str:
    return f'<div title="{escaped(one.exact)}"><b>{escaped(one.text)}</b><span>{escaped(one.name)}</span></div>'


def _figure(caption: str, svg: str) -> str:
    return f'<figure><figcaption>{escaped(caption)}</figcaption><div class="scroll">{svg}</div></figure>'


def _extra(section: Section) -> str:
    verdict = f'<p class="verdict">{escaped(section.verdict)}</p>' if section.verdict else ""
    paragraphs = "".join(f"<p>{escaped(part)}</p>" for part in section.text.split("\n\n") if part.strip())
    if isinstance(section.table, Mapping):
        return verdict + paragraphs + _names_and_values(section.table)
    return verdict + paragraphs + (_table(section.table[0], section.table[1:]) if section.table else "")


def _processes(rows: Sequence[Row], starts: Sequence[Mapping[str, Any]]) -> str:
    """The table of the processes that worked on the run: when, from which step to which, on which devices."""
    if not starts:
        return ""
    last = max((row["step"] for row in steps_of(rows)), default=0)
    ends = [*(start["step"] for start in starts[1:]), last]
    lines = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
        devices = start.get("devices") or []
        steps = f"{start['step'] + 1:,} to {end:,}" if end > start["step"] else "none kept"
        lines.append([number, moment(start.get("time")), steps, len(devices) or "-", ", ".join(devices) or "-"])
    return _table(["process", "started", "steps", "devices", "names"], lines)


def _step_table(rows: Sequence[Row]) -> str:
    """The table of a few steps, evenly spread, the last one included."""
    steps = steps_of(rows)
    every = max(1, math.ceil(len(steps) / _STEPS_IN_TABLE))
    shown = steps[::-1][::every][::-1]
    columns = [each for each in shown_of(steps) if each.in_table]
    header = ["step", *(each.name for each in columns)]
    lines = [
        [
            f"{row['step']:,}",
            *(_Exact(row.get(each.field)) if each.is_exact else each.text(row.get(each.field)) for each in columns),
        ]
        for row in shown
    ]
    title = f"{len(shown)} of {len(steps):,} steps"
    return f"<details><summary>{title}</summary>{_table(header, lines)}</details>" if lines else ""


def _settings(name: str, values: Mapping[str, Any]) -> str:
    is_open = " open" if len(values) <= _OPEN_ROWS else ""
    summary = f"<summary>{escaped(name)} ({len(values):,})</summary>"
    return f"<details{is_open}>{summary}{_names_and_values(values)}</details>"


@dataclass(frozen=True)
class _Exact:
    """A number that is shown with few digits; the page also holds all of them."""

    value: float | None


def _table(header: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escaped(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _names_and_values(values: Mapping[str, object]) -> str:
    body = "".join(f"<tr><th>{escaped(name)}</th>{_cell(value)}</tr>" for name, value in values.items())
    return f'<div class="scroll"><table class="names"><tbody>{body}</tbody></table></div>' if values else ""


def _cell(value: object) -> str:
    if isinstance(value, _Exact):
        return f'<td title="{value.value!r}">{escaped(figure(value.value))}</td>'
    return f"<td>{escaped(value)}</td>"


def escaped(value: object) -> str:
    """Return a value as escaped text. Lists and dictionaries are JSON; very long texts are cut."""
    if value is None:
        text = "-"
    elif isinstance(value, dict | list | tuple | bool):
        text = json.dumps(value, default=str, ensure_ascii=False)
    else:
        text = str(value)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters)"
    return html.escape(text)


def moment(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def html_page(title: str, body: str, *, reload_s: int | None = None) -> str:
    """Return a page in the style of reports. `reload_s`: seconds after which a browser loads it again."""
    reload = "" if reload_s is None else f'<meta http-equiv="refresh" content="{reload_s}">\n'
    return _PAGE.format(title=escaped(title), reload=reload, style=_STYLE, body=body)


# The policy makes sure of it: a browser loads nothing and runs no script.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
{reload}<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """
:root { --paper: #ffffff; --ground: #f3f5f7; --ink: #22303c; --soft: #5d6b78; --line: #dde3e8; --accent: #2f7fb8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #1a2128; --ground: #11161b; --ink: #dfe6ec; --soft: #93a1ae; --line: #303a44; --accent: #5fa8d3; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 24px 16px 48px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header p, section > p, footer { color: var(--soft); }
h1 { margin: 0; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
header p { margin: 4px 0 20px; }
header p.live { display: inline-block; margin-top: -10px; padding: 3px 12px; border-radius: 14px; color: var(--ink);
  background: var(--paper); border: 1px solid var(--accent); font-size: 14px; }
a { color: var(--accent); }
p.note { margin: 10px 0; padding: 8px 14px; border-left: 4px solid #d1495b; background: var(--paper);
  overflow-wrap: anywhere; }
h2 { margin: 0 0 12px; font-size: 18px; }
h3 { margin: 12px 0 4px; font-size: 14px; }
section, .numbers > div { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
section { margin-top: 16px; padding: 18px 20px; }
section > p { margin: 0 0 12px; max-width: 80ch; }
section > p.verdict { color: var(--ink); font-weight: 600; border-left: 4px solid var(--accent);
  padding: 2px 0 2px 12px; }
.numbers { display: flex; flex-wrap: wrap; gap: 10px; }
.numbers > div { flex: 1 1 190px; box-sizing: border-box; padding: 12px 14px; }
.numbers b { display: block; font-size: 21px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 22px 28px; }
figure { margin: 0; min-width: 0; }
section > figure + figure { margin-top: 18px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 2px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif !important; }
.scroll { overflow-x: auto; }
section > figure svg { min-width: 700px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { white-space: nowrap; }
tr:last-child > * { border-bottom: 0; }
table.names th { width: 34%; font-weight: 500; color: var(--soft); overflow-wrap: anywhere; }
table.names td { white-space: normal; overflow-wrap: anywhere; }
h3.prompt { margin: 16px 0 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
.samples { display: flex; gap: 10px; padding-bottom: 6px; }
.samples > div { flex: 1 0 185px; max-width: 420px; border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 12px; }
.samples span, .samples small { color: var(--soft); font-size: 12.5px; }
.samples p { margin: 4px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
table.runs small { display: block; color: var(--soft); max-width: 44ch; white-space: normal; }
table.runs td.run { font-weight: 600; min-width: 190px; white-space: normal; overflow-wrap: anywhere; }
table.runs small { font-weight: 400; }
.state { padding: 1px 10px; border-radius: 10px; border: 1px solid var(--line); color: var(--soft); }
.state.running { color: #ffffff; background: #2f8f5f; border-color: #2f8f5f; }
.state.silent, .state.stopped { color: var(--ink); border-color: #d1495b; }
details + details { margin-top: 10px; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: 12px; }
footer { margin-top: 20px; font-size: 13px; }
@media (max-width: 720px) {
  body { padding: 16px 10px 32px; }
  section { padding: 14px 12px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  td:first-child { white-space: normal; }
  .numbers > div { flex-basis: 140px; }
}
@media print { body { max-width: none; background: none; } section { break-inside: avoid; } }
"""
