"""The charts of a run: which curves they show, and how matplotlib draws them, as SVG for a page or together as a PNG.

Knows the rows of the metrics and timelines. Knows no page. matplotlib is imported where it draws.
"""

from __future__ import annotations

import io
import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from roundpipe.report.figures import NAMES, figure, known, size
from roundpipe.report.metrics import Row
from roundpipe.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

_INK, _PAPER = "#22303c", "#ffffff"  # in a page they follow its light or dark theme
_COLOURS = ("#2f7fb8", "#e07b39", "#3a9d6e", "#8f63b8", "#c2922e", "#2aa5a0", "#c75b9b", "#7d8b99")
_ALARM = "#d1495b"
_KINDS = {
    "F": ("forward", "#5fa8d3"),
    "FB": ("forward + loss + backward", "#8a63b8"),
    "B": ("recompute + backward", "#ef8354"),
}
_OTHER_KIND = ("other", "#9aa5b1")
_STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": _INK,
    "text.parse_math": False,  # names of runs may contain dollar signs
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.constrained_layout.h_pad": 0.06,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
_CHART_INCHES = (5.0, 2.75)
_TIMELINE_INCHES = 10.5
_DPI = 120
_LARGEST = 1e280  # the axes of matplotlib overflow near the largest float
_MOST_POINTS = 1000  # of a line
_MOST_MEANS = 250
_MEAN_FROM = 150  # points from which a curve also shows a running mean
_MEAN_PARTS = 50  # which is taken over this part of the points
_MARKERS_UP_TO = 40  # steps up to which a curve shows each point
_LOG_FROM = 30  # ratio of the largest to the smallest value from which an axis that may be logarithmic is
_MOST_DEVICES = 8  # more devices are summarised
_MOST_BOXES = 2000  # timelines with more boxes are drawn as pixels
_LONGEST_NAME, _LONGEST_TITLE = 36, 80  # characters of a curve's name and of the picture's title
_LEGEND_CHARACTERS = 64  # that fit above a chart, the lines before the names included
_Point = tuple[int, float]  # step and value


@dataclass(frozen=True)
class Curve:
    """Values by step. None is unknown and left out; values that are not finite are marked."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """A curve as it is drawn: few points, and a style of matplotlib."""

    name: str
    points: Sequence[_Point]
    style: Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """Lines over steps.

    tick: the text of a value at the axis.
    odd_steps: steps with a value that cannot be drawn, because it is not finite.
    top: the end of an axis that starts at 0; None for an axis that fits the values.
    """

    title: str
    lines: Sequence[Line]
    tick: Callable[[float], str]
    odd_steps: Sequence[int]
    is_log: bool
    top: float | None


# What the charts show.


def charts_of(rows: Sequence[Row], references: Sequence[Curve] = ()) -> list[Chart]:
    """Return the charts for which the rows have values. `references` are losses of other runs to compare with."""
    steps = [row for row in rows if row.get("type") != "eval"]
    loss, norm = _curve(steps, "loss", "training loss"), _curve(steps, "grad_norm")
    rate, seconds = _curve(steps, "tokens_per_s"), _curve(steps, "step_s")
    speed = _chart("Throughput (tokens/s)", [_dense(rate, with_mean=True)], tick="{:,.6g}".format, from_zero=True)
    losses = [_dense(loss, with_mean=True), *map(_sparse, eval_losses(rows)), *map(_reference, references)]
    memory = [_dense(_curve(steps, "host_rss_bytes", "this process"))]
    link = [_curve(steps, "bytes_up", "to the devices"), _curve(steps, "bytes_down", "to the host")]
    shares, peaks = _by_device(steps, "device_share"), _by_device(steps, "device_peak_bytes")
    found = [
        _chart("Loss", losses, may_be_log=True),
        *_of_method(steps),
        speed or _chart("Time per step (s)", [_dense(seconds, with_mean=True)], from_zero=True),
        _chart("Host memory", memory, tick=_round_size, from_zero=True),
        _chart("Device memory (peak)", peaks, tick=_round_size, from_zero=True),
        _chart("Share of time the devices compute", shares, tick="{:.0%}".format, from_zero=True),
        _chart("Bytes over the link, per step", [_dense(one) for one in link], tick=_round_size, from_zero=True),
        _chart("Gradient norm", [_dense(norm, with_mean=True)], may_be_log=True),
        _chart("Learning rate", [_dense(_curve(steps, "lr"))], tick=_scientific, from_zero=True),
    ]
    return [chart for chart in found if chart is not None]


def _of_method(steps: Sequence[Row]) -> list[Chart | None]:
    """The charts of what the trainers of preferences and rewards log."""
    names = sorted({name for row in steps for name in row})
    parts = [name for name in names if name.startswith("rewards/") and name.endswith(("/mean", "/chosen", "/rejected"))]
    shown = {
        "Reward": ["reward", "mean_reward", *parts],
        "Share of pairs in which the better answer wins": ["rewards/accuracies", "accuracy"],
        "Margin of the better answer": ["rewards/margins", "margin"],
        "Tokens of the answers": ["completions/mean_length"],
        "Distance from the reference (KL)": ["kl"],
    }
    return [
        _chart(title, [_dense(_curve(steps, field, _own_name(field))) for field in fields if field in names])
        for title, fields in shown.items()
    ]


def _own_name(field: str) -> str:
    """The name of a curve of a method: several have to fit beside each other."""
    return field.removeprefix("rewards/").removesuffix("/mean")


def overlaid(title: str, curves: Sequence[Curve]) -> Chart | None:
    """Return a chart with one line per curve, of which long ones are running means; None if there are no values."""
    return _chart(title, [_smooth(curve) for curve in curves])


def eval_losses(rows: Sequence[Row]) -> list[Curve]:
    """Return one curve per kind of evaluation: `eval_loss`, or `eval_NAME_loss` of several datasets."""
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        if row.get("type") == "eval":
            for name, value in row.items():
                if name.startswith("eval_") and name.endswith("loss"):
                    found.setdefault(name, {})[row["step"]] = value
    return [Curve(name, list(values), list(values.values())) for name, values in found.items()]


def _curve(rows: Sequence[Row], field: str, name: str | None = None) -> Curve:
    return Curve(name or NAMES[field], [row["step"] for row in rows], [row.get(field) for row in rows])


def _by_device(rows: Sequence[Row], field: str) -> list[_Shown]:
    """Return one curve per device; with many devices lowest, mean and highest value."""
    by_step: dict[int, Mapping[str, float | None]] = {row["step"]: row.get(field) or {} for row in rows}
    names = sorted({name for values in by_step.values() for name in values}, key=_natural)
    if len(names) <= _MOST_DEVICES:
        curves = [Curve(name, list(by_step), [values.get(name) for values in by_step.values()]) for name in names]
        return [_dense(curve) for curve in curves]
    measured = {step: numbers for step, values in by_step.items() if (numbers := known(values))}
    summaries: dict[str, Callable[[list[float]], float]] = {
        "lowest": min,
        "mean": lambda values: sum(values) / len(values),
        "highest": max,
    }
    return [
        _dense(Curve(f"{name} of {len(names)}", list(measured), [of(values) for values in measured.values()]))
        for name, of in summaries.items()
    ]


def _round_size(num_bytes: float) -> str:
    return re.sub(r"\.0+ ", " ", size(num_bytes))


def _scientific(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _natural(name: str) -> tuple[int, str]:
    return (len(name), name)  # cuda:2 before cuda:10


# From curves to lines.


@dataclass(frozen=True)
class _Shown:
    """A curve, its points that can be drawn, and the lines that show it."""

    drawable: Sequence[_Point]
    odd_steps: Sequence[int]
    lines: Sequence[Line]


def _dense(curve: Curve, *, with_mean: bool = False) -> _Shown:
    """A curve with a value at almost each step. `with_mean`: a long one is drawn pale below its running mean."""
    drawable, odd_steps = _points(curve)
    shown = _thinned(drawable)
    markers = {"marker": "o", "markersize": 3} if len(curve.steps) <= _MARKERS_UP_TO or len(drawable) == 1 else {}
    if not with_mean or len(drawable) < _MEAN_FROM:
        return _Shown(drawable, odd_steps, [Line(curve.name, shown, {"lw": 1.5, **markers})])
    window = len(drawable) // _MEAN_PARTS
    pale = Line(curve.name, shown, {"lw": 0.8, "alpha": 0.45})
    return _Shown(drawable, odd_steps, [pale, Line(f"mean of {window:,}", _means(drawable, window), {"lw": 1.8})])


def _smooth(curve: Curve) -> _Shown:
    """A curve among others: a long one is its running mean alone."""
    drawable, odd_steps = _points(curve)
    if len(drawable) < _MEAN_FROM:
        return _dense(curve)
    return _Shown(drawable, odd_steps, [Line(curve.name, _means(drawable, len(drawable) // _MEAN_PARTS), {"lw": 1.6})])


def _sparse(curve: Curve) -> _Shown:
    """A curve of few measurements, such as evaluations."""
    drawable, odd_steps = _points(curve)
    return _Shown(drawable, odd_steps, [Line(curve.name, _thinned(drawable), {"lw": 1.2, "marker": "o", "ms": 4})])


def _reference(curve: Curve) -> _Shown:
    """A curve of another run: wide and pale, so that a curve that equals it leaves both visible."""
    drawable, odd_steps = _points(curve)
    style = {"lw": 5, "alpha": 0.5, "solid_capstyle": "round", "zorder": 1}
    return _Shown(drawable, odd_steps, [Line(curve.name, _thinned(drawable), style)])


def _chart(
    title: str,
    curves: Sequence[_Shown],
    *,
    tick: Callable[[float], str] = figure,
    from_zero: bool = False,
    may_be_log: bool = False,
) -> Chart | None:
    """Return a chart of the curves, each with its own colour; None if there are no values.

    The axis starts at 0 if `from_zero`, and is logarithmic if it `may_be_log` and the values differ widely.
    """
    curves = [curve for curve in curves if curve.drawable or curve.odd_steps]
    if not curves:
        return None
    values = [value for curve in curves for _, value in curve.drawable]
    low, high = min(values, default=0.0), max(values, default=0.0)
    lines = [
        Line(line.name, line.points, {"color": colour, **line.style})
        for curve, colour in zip(curves, itertools.cycle(_COLOURS), strict=False)
        for line in curve.lines
    ]
    odd_steps = sorted({step for curve in curves for step in curve.odd_steps})
    top = (1.08 * high or 1.0) if from_zero and low >= 0 else None
    return Chart(title, lines, tick, odd_steps, may_be_log and low > 0 and high / low >= _LOG_FROM, top)


def _points(curve: Curve) -> tuple[list[_Point], list[int]]:
    """Return the known points that can be drawn, and the steps of the others."""
    points = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None]
    drawable = [point for point in points if _is_drawable(point[1])]
    return drawable, [step for step, value in points if not _is_drawable(value)]


def _is_drawable(value: float) -> bool:
    return -_LARGEST <= value <= _LARGEST  # false for NaN


def _thinned(points: Sequence[_Point]) -> Sequence[_Point]:
    """Return at most `_MOST_POINTS` points: the lowest and the highest one of each part, in order."""
    if len(points) <= _MOST_POINTS:
        return points
    kept, num_parts = [], _MOST_POINTS // 2
    for part in range(num_parts):
        of_part = points[part * len(points) // num_parts : (part + 1) * len(points) // num_parts]
        kept += sorted({min(of_part, key=itemgetter(1)), max(of_part, key=itemgetter(1))})
    return kept


def _means(points: Sequence[_Point], window: int) -> list[_Point]:
    """Return at most `_MOST_MEANS` means of `window` consecutive values, each at the step in their middle."""
    starts = range(0, len(points) - window + 1, 1 + len(points) // _MOST_MEANS)
    return [(points[at + window // 2][0], sum(v for _, v in points[at : at + window]) / window) for at in starts]


# Drawing.


def chart_svg(chart: Chart, restarts: Sequence[int], *, more_height: float = 0.0) -> str:
    """Return the chart as an SVG element for a page. `restarts`: steps after which a new process continued.

    more_height: inches, for the names of many lines.
    """
    width, height = _CHART_INCHES
    with _style():
        canvas = _figure(width, height + more_height)
        _draw_chart(canvas.add_subplot(), chart, restarts)
        return _svg_element(canvas, chart.title)


def timeline_svg(timeline: Timeline, title: str) -> str:
    """Return the timeline as an SVG element for a page. `title` must differ between the elements of one page."""
    with _style():
        canvas = _figure(_TIMELINE_INCHES, _timeline_height(timeline))
        _draw_timeline(canvas.add_subplot(), timeline, _TIMELINE_INCHES)
        return _svg_element(canvas, title)


def picture(
    title: str, subtitle: str, charts: Sequence[Chart], timelines: Mapping[str, Timeline], restarts: Sequence[int]
) -> bytes:
    """Return a PNG with all charts and timelines."""
    width, chart_height, head_height = 2 * 6.2, 3.3, 0.95
    pairs = [charts[at : at + 2] for at in range(0, len(charts), 2)]
    heights = [head_height, *[chart_height] * len(pairs), *[_timeline_height(one) + 0.4 for one in timelines.values()]]
    with _style():
        canvas = _figure(width, sum(heights))
        body = canvas.subfigures(1, 3, width_ratios=(0.01, 0.98, 0.01), squeeze=False)[0, 1]  # between the margins
        head, *parts = body.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        head.text(0.15 / width, 0.62, _short(title, _LONGEST_TITLE), fontsize=16, fontweight="bold", va="center")
        head.text(0.15 / width, 0.22, subtitle, fontsize=10.5, va="center")
        for part, pair in zip(parts, pairs, strict=False):
            for place, chart in zip(part.subfigures(1, 2), pair, strict=False):
                _draw_chart(_titled(place, chart.title, 6.2), chart, restarts)
        for part, (name, timeline) in zip(parts[len(pairs) :], timelines.items(), strict=True):
            _draw_timeline(_titled(part, name, width), timeline, width)
        file = io.BytesIO()
        canvas.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Draw with our settings, whatever those of the user are."""
    from matplotlib import style

    with style.context(["default", _STYLE]):
        yield


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure. It does not belong to pyplot, so the user's backend and figures do not matter."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _titled(place: FigureBase, title: str, width: float) -> Axes:
    place.suptitle(title, x=0.15 / width, ha="left", fontsize=12, fontweight="bold")
    return place.add_subplot()


def _svg_element(canvas: Figure, name: str) -> str:
    """Return a figure as an SVG element without size, with the colours of the page and no reference outside of it."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids are then the same each time and differ between charts
        canvas.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[\w.]+_\d+">', "<g>", text)  # the same in each figure
    width, height = (re.search(rf'{side}="([\d.]+)pt"', text)[1] for side in ("width", "height"))  # type: ignore[index]
    text = re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {width} {height}" role="img">', text, count=1)
    return text.replace(_INK, "currentColor").replace(_PAPER, "var(--paper)")


def _draw_chart(axes: Axes, chart: Chart, restarts: Sequence[int]) -> None:
    for line in chart.lines:
        steps, values = [step for step, _ in line.points], [value for _, value in line.points]
        axes.plot(steps, values, label=_short(line.name, _LONGEST_NAME), **line.style)
    for at, step in enumerate(restarts):
        axes.axvline(step + 0.5, color=_INK, lw=1, ls=(0, (4, 3)), alpha=0.7, label="" if at else "restart")
    if chart.odd_steps:
        shown = chart.odd_steps[:: 1 + len(chart.odd_steps) // _MOST_POINTS]
        at_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        label = f"not finite ({len(chart.odd_steps):,})"
        axes.plot(shown, [0.985] * len(shown), "x", color=_ALARM, markersize=5, label=label, **at_edge)
    _set_axes(axes, chart)
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}
        axes.legend(ncols=_legend_columns(names), handlelength=1.4, columnspacing=1.4, **place)


def _set_axes(axes: Axes, chart: Chart) -> None:
    """Set the scales of both axes and the texts of their ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if chart.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.top is not None:
        axes.set_ylim(0, chart.top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.tick(value)))
    axes.grid(axis="y", color=_INK, alpha=0.15)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _legend_columns(names: Sequence[str]) -> int:
    """Return the most columns that fit above a chart. matplotlib gives the first columns one name more if needed."""
    for columns in range(len(names), 1, -1):
        height, num_higher = divmod(len(names), columns)
        heights = [height + 1] * num_higher + [height] * (columns - num_higher)
        ends = list(itertools.accumulate(heights))
        widths = [5 + max(map(len, names[end - height : end])) for end, height in zip(ends, heights, strict=True)]
        if sum(widths) <= _LEGEND_CHARACTERS:
            return columns
    return 1


def _draw_timeline(axes: Axes, timeline: Timeline, width_inches: float) -> None:
    """Draw one box per microbatch, in one row per device, with the task's label above its boxes."""
    from matplotlib.patches import Patch

    start_s, duration_s = timeline.start_s, timeline.duration_s
    factor, unit = (1.0, "s") if duration_s >= 10 else (1e3, "ms")
    devices = sorted(timeline.devices(), key=_natural)
    character_s = duration_s / (width_inches * 10)  # the time that one character is wide
    has_gaps = statistics.median(span.end_s - span.start_s for span in timeline.spans) >= character_s / 2
    style: dict[str, Any] = {
        "edgecolor": _PAPER,
        "linewidth": 0.6 if has_gaps else 0,
        "rasterized": len(timeline.spans) > _MOST_BOXES,
    }
    for row, device in enumerate(devices):
        spans = sorted((s for s in timeline.spans if s.device == device), key=lambda span: span.start_s)
        for label, task in itertools.groupby(spans, key=lambda span: span.label):
            boxes = [(factor * (s.start_s - start_s), factor * (s.end_s - s.start_s)) for s in task]
            axes.broken_barh(boxes, (row - 0.28, 0.56), facecolor=_kind(label)[1], **style)
            start, end = boxes[0][0], sum(boxes[-1])
            if end - start >= factor * character_s * len(label):
                axes.text((start + end) / 2, row - 0.31, label, ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(len(devices)), [f"{name}  {1 - timeline.idle_share(name):.0%}" for name in devices])
    axes.set_ylim(len(devices) - 0.55, -0.75)
    axes.set_xlim(0, factor * duration_s or 1)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
    kinds = dict(sorted({_kind(span.label) for span in timeline.spans}))
    handles = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=4, borderaxespad=0.2)


def _timeline_height(timeline: Timeline) -> float:
    return 1.0 + 0.48 * len(timeline.devices())


def _kind(label: str) -> tuple[str, str]:
    """Return name and colour of the kind of task that a label such as F0, FB3 or B7 names."""
    return _KINDS.get(label.rstrip("0123456789"), _OTHER_KIND)


def _short(name: str, longest: int) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"
