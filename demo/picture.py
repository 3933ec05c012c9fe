"""Draws the loss curves of the runs and the measured timeline of one step.

Knows measured values, not how they were measured. Only this module imports matplotlib.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.meter import Meter
from roundpipe.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#22303c"
RUN_STYLES: list[dict[str, Any]] = [
    {"color": "#9db4c0", "linewidth": 5.0, "solid_capstyle": "round"},
    {"color": "#1b4965", "linewidth": 1.4},
    {"color": "#d1495b", "linewidth": 1.4},
]
KIND_COLOURS = {
    "forward": "#5fa8d3",
    "forward + loss + backward": "#7a5195",
    "recompute + backward": "#ef8354",
}


def task_kind(label: str) -> str | None:
    """The kind of a task label such as F0, FB3 or B7; None for other labels."""
    letters = label.rstrip("0123456789")
    return {"F": "forward", "FB": "forward + loss + backward", "B": "recompute + backward"}.get(letters)


def draw(path: Path, runs: list[Meter], timeline: Timeline, title: str) -> None:
    """Write the picture to `path`: loss curves above, timeline below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "svg.fonttype": "none",
    }
    with pyplot.rc_context(style):
        figure, (loss_axes, time_axes) = pyplot.subplots(
            2, 1, figsize=(11, 8.5), height_ratios=[1.25, 1], layout="constrained"
        )
        figure.suptitle(title, fontsize=14, fontweight="bold")
        draw_losses(loss_axes, runs)
        draw_timeline(time_axes, timeline)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def draw_losses(axes: Axes, runs: list[Meter]) -> None:
    for run, style in zip(runs, RUN_STYLES, strict=True):
        label = f"{run.name}: {run.final_loss():.3f} at the end"
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Loss on the same batches", loc="left")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def draw_timeline(axes: Axes, timeline: Timeline) -> None:
    spans = [span for span in timeline.spans if task_kind(span.label) is not None]
    devices = sorted({span.device for span in spans}, key=lambda name: (len(name), name))  # cpu:2 before cpu:10
    start_s = min((span.start_s for span in spans), default=0.0)
    for row, device in enumerate(devices):
        on_device = sorted((span for span in spans if span.device == device), key=lambda span: span.start_s)
        for label, task in groupby(on_device, key=lambda span: span.label):
            draw_task(axes, row, label, list(task), start_s)
    axes.set_yticks(range(len(devices)), [str(device) for device in devices])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the first task began")
    axes.set_ylabel("device")
    axes.set_title("Measured timeline of one step: tasks go to the devices in turn, one box per microbatch", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [axes.barh(0, 0, color=colour, label=kind) for kind, colour in KIND_COLOURS.items()]
    axes.legend(handles=handles, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def draw_task(axes: Axes, row: int, label: str, spans: list[Span], start_s: float) -> None:
    """Draw the microbatches of one task as boxes with the task's label above them."""
    lefts = [1e3 * (span.start_s - start_s) for span in spans]
    widths = [1e3 * (span.end_s - span.start_s) for span in spans]
    colour = KIND_COLOURS[task_kind(label) or "forward"]
    axes.barh([row] * len(spans), widths, left=lefts, height=0.5, color=colour, edgecolor="white", linewidth=0.8)
    middle = (lefts[0] + lefts[-1] + widths[-1]) / 2
    axes.text(middle, row - 0.29, label, ha="center", va="bottom", fontsize=9)
