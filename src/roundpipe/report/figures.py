"""The figures of a step: the field of each in a row of the metrics, its names, how its value is written, its source.

The one list of figures: rows, lines, tables and charts are made from it. Knows numbers and text, no view and no page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundpipe.stats import StepStats

# Numbers as text.


def size(num_bytes: float | None) -> str:
    """Bytes with three digits and a decimal unit: `12.3 GB`."""
    if num_bytes is None:
        return "-"
    units: Sequence[tuple[float, str]] = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    for factor, unit in units:
        if num_bytes >= 0.9995 * factor:
            return f"{_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds: `1:02:03`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}"


def figure(value: float | None) -> str:
    """A number with four digits."""
    return "-" if value is None else f"{value:.4g}"


def count(value: float | None) -> str:
    """A number with at least three digits and without decimals from 100 on: `12,345`."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else _three_digits(value)


def known(values: Mapping[str, float | None] | None) -> list[float]:
    """The values of devices that are known."""
    return [value for value in (values or {}).values() if value is not None]


def mean(values: Mapping[str, float | None] | None) -> float | None:
    """The mean of the values of devices that are known; None if there are none."""
    numbers = known(values)
    return sum(numbers) / len(numbers) if numbers else None


def share(values: Mapping[str, float | None] | None) -> str:
    """The mean share of several devices as percentage."""
    value = mean(values)
    return "-" if value is None else f"{value:.0%}"


def largest_size(values: Mapping[str, float | None] | None) -> str:
    """The largest size of several devices."""
    return size(max(known(values), default=None))


# The list.


@dataclass(frozen=True)
class Figure:
    """One figure of a step.

    field: in a row of the metrics. Figures of devices are mappings from the device to its value.
    name: in charts and tables.
    text: writes its value; "-" for None.
    label: in the line of a step; empty if lines leave it out.
    in_table: whether the table of steps has a column for it.
    is_exact: whether the page shows all of its digits, too.
    of: takes it from what the model has measured; None if the trainer knows it.
    is_of_method: whether only some methods have it; rows of the others lack the field.
    """

    field: str
    name: str
    text: Callable[[Any], str]
    label: str = ""
    in_table: bool = False
    is_exact: bool = False
    of: Callable[[StepStats], Any] | None = None
    is_of_method: bool = False


# In the order of lines and columns.
FIGURES = (
    Figure("loss", "loss", figure, "loss", in_table=True, is_exact=True),
    Figure("reward", "reward", figure, "reward", in_table=True, is_of_method=True),
    Figure("rewards/accuracies", "share won", figure, "accuracy", in_table=True, is_of_method=True),
    Figure("rewards/margins", "margin", figure, "margin", in_table=True, is_of_method=True),
    Figure("accuracy", "accuracy", figure, "accuracy", in_table=True, is_of_method=True),
    Figure("margin", "margin", figure, "margin", in_table=True, is_of_method=True),
    Figure("grad_norm", "gradient norm", figure, "grad_norm", in_table=True, is_exact=True),
    Figure("lr", "learning rate", figure, "lr", in_table=True, is_exact=True),
    Figure("tokens", "tokens", count),
    Figure("tokens_per_s", "tokens/s", count, "tokens/s", in_table=True),
    Figure("step_s", "seconds", figure, "step_s", in_table=True),
    Figure("optimizer_wait_s", "optimizer wait", figure, of=lambda stats: stats.optimizer_wait_s),
    Figure("compiled_graphs", "compiled graphs", count, of=lambda stats: stats.compiled_graphs),
    Figure("compile_s", "compiling", figure, of=lambda stats: stats.compile_s),
    Figure("device_share", "devices", share, "devices", in_table=True, of=lambda stats: dict(stats.device_share)),
    Figure("bytes_up", "up", size, "up", in_table=True, of=lambda stats: stats.bytes_up),
    Figure("bytes_down", "down", size, "down", in_table=True, of=lambda stats: stats.bytes_down),
    Figure("weights_up_bytes", "weights up", size, of=lambda stats: stats.weights_up_bytes),
    Figure("weights_kept_bytes", "weights kept", size, of=lambda stats: stats.weights_kept_bytes),
    Figure("gradients_down_bytes", "gradients down", size, of=lambda stats: stats.gradients_down_bytes),
    Figure("host_rss_bytes", "host", size, "host", in_table=True, of=lambda stats: stats.host_rss_bytes),
    Figure("host_available_bytes", "host, available", size, of=lambda stats: stats.host_available_bytes),
    Figure("device_peak_bytes", "device", largest_size, "device", of=lambda stats: _peaks(stats) or None),
    Figure("device_limit_bytes", "device, limit", largest_size, of=lambda stats: _limits(stats) or None),
)
NAMES = {each.field: each.name for each in FIGURES}


def measured(stats: StepStats | None) -> dict[str, Any]:
    """The fields of a row that the model measures; all are None without its figures."""
    return {each.field: None if stats is None else each.of(stats) for each in FIGURES if each.of is not None}


def shown_of(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The figures that these rows may have: those of a method only if a row has them."""
    return [each for each in FIGURES if not each.is_of_method or any(each.field in row for row in rows)]


def _peaks(stats: StepStats) -> dict[str, int | None]:
    return {name: memory.peak_bytes for name, memory in stats.device_memory.items()}


def _limits(stats: StepStats) -> dict[str, int | None]:
    return {name: memory.limit_bytes for name, memory in stats.device_memory.items()}
