"""The charts of a run: which curves they show, and how matplotlib draws them, as SVG for a page or together as a PNG.

Knows the rows of the metrics and timelines. Knows no page. matplotlib is imported where it draws.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.report.live_view import figure, known, size
from roundpipe.report.metrics import Row
from roundpipe.timeline import Span, Timeline

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
_MOST_POINTS = 1000  # of a drawn curve
_MEAN_FROM = 150  # curves with so many points also show a running mean
_MEAN_PARTS = 50  # which is taken over this part of the points
_MARKERS_UP_TO = 40  # curves with at most so many points show each point
_LOG_FROM = 100  # ratio of the largest to the smallest value from which an axis that may be logarithmic is
_MOST_DEVICES = 8  # more devices are summarised
_MOST_BOXES = 2000  # timelines with more boxes are drawn as pixels
_LONGEST_NAME = 36
_LEGEND_CHARACTERS = 64  # that fit above a chart, the lines before the names included
_Point = tuple[int, float]  # step and value


@dataclass(frozen=True)
class Curve:
    """Values by step. None is unknown and left out; values that are not finite are marked."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """Curves over steps.

    sparse: curves of few measurements, such as evaluations.
    references: curves of other runs, drawn wide and pale below the others, so that an equal curve leaves both visible.
    tick: the text of a value at the axis.
    from_zero: whether the axis starts at 0.
    may_be_log: whether the axis is logarithmic if the values differ widely.
    with_mean: whether long curves also show a running mean.
    """

    title: str
    curves: Sequence[Curve]
    sparse: Sequence[Curve] = ()
    references: Sequence[Curve] = ()
    tick: Callable[[float], str] = figure
    from_zero: bool = False
    may_be_log: bool = False
    with_mean: bool = False

    def all_curves(self) -> Iterator[Curve]:
        yield from (*self.curves, *self.sparse, *self.references)


# What the charts show.


def charts_of(rows: Sequence[Row], references: Sequence[Curve] = ()) -> list[Chart]:
    """Return the charts for which the rows have values. `references` are losses of other runs to compare with."""
    steps = [row for row in rows if row.get("type") != "eval"]
    loss, norm = _curve(steps, "loss", "training loss"), _curve(steps, "grad_norm", "gradient norm")
    rate, seconds = _curve(steps, "tokens_per_s", "tokens/s"), _curve(steps, "step_s", "seconds")
    link = [_curve(steps, "bytes_up", "to the devices"), _curve(steps, "bytes_down", "to the host")]
    speed = Chart("Throughput (tokens/s)", [rate], tick="{:,.6g}".format, from_zero=True, with_mean=True)
    step_time = Chart("Time per step (s)", [seconds], from_zero=True, with_mean=True)
    shares, peaks = _by_device(steps, "device_share"), _by_device(steps, "device_peak_bytes")
    charts = [
        Chart("Loss", [loss], eval_losses(rows), references, may_be_log=True, with_mean=True),
        speed if _has_values(speed) else step_time,
        Chart("Host memory", [_curve(steps, "host_rss_bytes", "this process")], tick=_round_size, from_zero=True),
        Chart("Device memory (peak)", peaks, tick=_round_size, from_zero=True),
        Chart("Share of time the devices compute", shares, tick="{:.0%}".format, from_zero=True),
        Chart("Bytes over the link, per step", link, tick=_round_size, from_zero=True),
        Chart("Gradient norm", [norm], may_be_log=True, with_mean=True),
        Chart("Learning rate", [_curve(steps, "lr", "learning rate")], tick=_scientific, from_zero=True),
    ]
    return [chart for chart in charts if _has_values(chart)]


def eval_losses(rows: Sequence[Row]) -> list[Curve]:
    """Return one curve per kind of evaluation: `eval_loss`, or `eval_NAME_loss` of several datasets."""
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        if row.get("type") == "eval":
            for name, value in row.items():
                if name.startswith("eval_") and name.endswith("loss"):
                    found.setdefault(name, {})[row["step"]] = value
    return [Curve(name, list(values), list(values.values())) for name, values in found.items()]


def _curve(rows: Sequence[Row], field: str, name: str) -> Curve:
    return Curve(name, [row["step"] for row in rows], [row.get(field) for row in rows])


def _by_device(rows: Sequence[Row], field: str) -> list[Curve]:
    """Return one curve per device; with many devices lowest, mean and highest value."""
    by_step: dict[int, Mapping[str, float | None]] = {row["step"]: row.get(field) or {} for row in rows}
    names = sorted({name for values in by_step.values() for name in values}, key=_natural)
    steps = list(by_step)
    if len(names) <= _MOST_DEVICES:
        return [Curve(name, steps, [values.get(name) for values in by_step.values()]) for name in names]
    measured = {step: known(values) for step, values in by_step.items() if known(values)}
    summaries: dict[str, Callable[[list[float]], float]] = {
        "lowest": min,
        "mean": lambda values: sum(values) / len(values),
        "highest": max,
    }
    return [
        Curve(f"{name} of {len(names)} devices", list(measured), [of(values) for values in measured.values()])
        for name, of in summaries.items()
    ]


def _has_values(chart: Chart) -> bool:
    return any(value is not None for curve in chart.all_curves() for value in curve.values)


def _round_size(num_bytes: float) -> str:
    return re.sub(r"\.0+ ", " ", size(num_bytes))


def _scientific(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _natural(name: str) -> tuple[int, str]:
    return (len(name), name)  # cuda:2 before cuda:10


# Drawing.


def chart_svg(chart: Chart, restarts: Sequence[int]) -> str:
    """Return the chart as an SVG element for a page. `restarts`: steps after which a new process continued."""
    with _style():
        canvas = _figure(*_CHART_INCHES)
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
        head.text(0.15 / width, 0.62, title, fontsize=16, fontweight="bold", va="center")
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
    text = re.sub(r'<g id="[a-zA-Z_]+_\d+">', "<g>", text)  # the same in each figure
    width, height = (re.search(rf'{side}="([\d.]+)pt"', text)[1] for side in ("width", "height"))  # type: ignore[index]
    text = re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {width} {height}" role="img">', text, count=1)
    return text.replace(_INK, "currentColor").replace(_PAPER, "var(--paper)")


def _draw_chart(axes: Axes, chart: Chart, restarts: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    colours = itertools.cycle(_COLOURS)
    odd = [step for curve in chart.all_curves() for step, value in _points(curve) if not math.isfinite(value)]
    for curve, colour in zip(chart.curves, colours, strict=False):
        _draw_dense(axes, curve, colour, with_mean=chart.with_mean)
    for curve, colour in zip(chart.sparse, colours, strict=False):
        style: dict[str, Any] = {"lw": 1.2, "marker": "o", "markersize": 4}
        axes.plot(*_columns(_decimated(_finite(curve))), color=colour, label=_short(curve.name), **style)
    for curve, colour in zip(chart.references, ("#8fa9b8", *_COLOURS[::-1]), strict=False):
        style = {"lw": 5, "alpha": 0.5, "solid_capstyle": "round", "zorder": 1}
        axes.plot(*_columns(_decimated(_finite(curve))), color=colour, label=_short(curve.name), **style)
    for at, step in enumerate(restarts):
        axes.axvline(step + 0.5, color=_INK, lw=1, ls=(0, (4, 3)), alpha=0.7, label="" if at else "restart")
    _mark(axes, sorted(set(odd)))
    _scale(axes, chart)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.grid(axis="y", color=_INK, alpha=0.15)
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}
        axes.legend(ncols=_legend_columns(names), handlelength=1.4, columnspacing=1.4, **place)


def _legend_columns(names: Sequence[str]) -> int:
    """Return the most columns that fit above a chart; matplotlib fills them one after the other."""
    for columns in range(len(names), 1, -1):
        height = math.ceil(len(names) / columns)
        widths = [5 + max(map(len, names[at : at + height])) for at in range(0, len(names), height)]
        if sum(widths) <= _LEGEND_CHARACTERS:
            return columns
    return 1


def _draw_dense(axes: Axes, curve: Curve, colour: str, *, with_mean: bool) -> None:
    """Draw a curve with a value at almost each step."""
    points, finite = _points(curve), _finite(curve)
    has_mean = with_mean and len(finite) >= _MEAN_FROM
    if len(points) <= _MOST_POINTS:  # the line has a gap where a value is not finite
        shown: Sequence[_Point] = [(step, value if math.isfinite(value) else math.nan) for step, value in points]
    else:
        shown = _decimated(finite)
    style: dict[str, Any] = {"lw": 0.8, "alpha": 0.45} if has_mean else {"lw": 1.5}
    if len(curve.steps) <= _MARKERS_UP_TO:
        style |= {"marker": "o", "markersize": 3}
    axes.plot(*_columns(shown), color=colour, label=_short(curve.name), **style)
    if has_mean:
        window = len(finite) // _MEAN_PARTS
        axes.plot(*_columns(_means(finite, window)), color=colour, lw=1.8, label=f"mean of {window:,}")


def _scale(axes: Axes, chart: Chart) -> None:
    """Set the value axis: its scale, its start and the texts of its ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [value for curve in chart.all_curves() for _, value in _finite(curve)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if chart.may_be_log and low > 0 and high / low >= _LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.from_zero and low >= 0:
        axes.set_ylim(0, 1.08 * high or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.tick(value)))


def _mark(axes: Axes, steps: Sequence[int]) -> None:
    """Mark steps with values that are not finite, at the upper edge."""
    if steps:
        shown = steps[:: 1 + len(steps) // _MOST_POINTS]
        at_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        label = f"not finite ({len(steps):,})"
        axes.plot(shown, [0.985] * len(shown), "x", color=_ALARM, markersize=5, label=label, **at_edge)


def _draw_timeline(axes: Axes, timeline: Timeline, width_inches: float) -> None:
    """Draw one box per microbatch, in one row per device, with the task's label above its boxes."""
    from matplotlib.patches import Patch

    factor, unit = (1.0, "s") if timeline.duration_s >= 10 else (1e3, "ms")
    devices = sorted(timeline.devices(), key=_natural)
    labelled_s = timeline.duration_s / (width_inches * 10)  # the time that one character is wide
    for row, device in enumerate(devices):
        spans = sorted((s for s in timeline.spans if s.device == device), key=lambda span: span.start_s)
        for label, task in itertools.groupby(spans, key=lambda span: span.label):
            boxes = list(task)
            _draw_boxes(axes, row, boxes, timeline.start_s, factor, as_pixels=len(timeline.spans) > _MOST_BOXES)
            if boxes[-1].end_s - boxes[0].start_s >= labelled_s * len(label):
                middle = factor * ((boxes[0].start_s + boxes[-1].end_s) / 2 - timeline.start_s)
                axes.text(middle, row - 0.31, label, ha="center", va="bottom", fontsize=8)
    shares = [f"{device}  {1 - timeline.idle_share(device):.0%}" for device in devices]
    axes.set_yticks(range(len(devices)), shares)
    axes.set_ylim(len(devices) - 0.55, -0.75)
    axes.set_xlim(0, factor * timeline.duration_s or 1)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
    kinds = dict(sorted({_kind(span.label) for span in timeline.spans}, key=lambda kind: kind[0]))
    handles = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=4, borderaxespad=0.2)


def _draw_boxes(axes: Axes, row: int, spans: Sequence[Span], start_s: float, factor: float, *, as_pixels: bool) -> None:
    ranges = [(factor * (span.start_s - start_s), factor * (span.end_s - span.start_s)) for span in spans]
    edge: dict[str, Any] = {"edgecolor": _PAPER, "linewidth": 0 if as_pixels else 0.6}
    axes.broken_barh(ranges, (row - 0.28, 0.56), facecolor=_kind(spans[0].label)[1], rasterized=as_pixels, **edge)


def _timeline_height(timeline: Timeline) -> float:
    return 1.0 + 0.48 * len(timeline.devices())


def _kind(label: str) -> tuple[str, str]:
    """Return name and colour of the kind of task that a label such as F0, FB3 or B7 names."""
    return _KINDS.get(label.rstrip("0123456789"), _OTHER_KIND)


# Points.


def _points(curve: Curve) -> list[_Point]:
    pairs = zip(curve.steps, curve.values, strict=True)
    return [(step, float(value)) for step, value in pairs if value is not None]


def _finite(curve: Curve) -> list[_Point]:
    return [point for point in _points(curve) if math.isfinite(point[1])]


def _columns(points: Sequence[_Point]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _decimated(points: Sequence[_Point]) -> Sequence[_Point]:
    """Return at most `_MOST_POINTS` points: the lowest and the highest one of each part, in order."""
    if len(points) <= _MOST_POINTS:
        return points
    kept, num_parts = [], _MOST_POINTS // 2
    for part in range(num_parts):
        of_part = points[part * len(points) // num_parts : (part + 1) * len(points) // num_parts]
        extremes = {min(of_part, key=lambda point: point[1]), max(of_part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def _means(points: Sequence[_Point], window: int) -> list[_Point]:
    """Return means of `window` consecutive values, each at the step in their middle."""
    every = 1 + len(points) // _MOST_POINTS
    starts = range(0, len(points) - window + 1, every)
    return [(points[at + window // 2][0], sum(v for _, v in points[at : at + window]) / window) for at in starts]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
