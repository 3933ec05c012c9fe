"""The timeline of one run: when each device computed which task and microbatch, predicted or measured.

Knows names and seconds. Knows no tasks, layers or clocks: the writer of the spans chooses the origin of time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One microbatch of one task on one device. ``label`` is the name of the task: ``F0``, ``FB3``, ``B7``."""

    device: str
    label: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A set of spans in any order. An empty timeline starts and ends at 0 and has no devices."""

    spans: tuple[Span, ...]

    @property
    def start_s(self) -> float:
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def devices(self) -> tuple[str, ...]:
        """Return the devices in the order of their first spans."""
        return tuple(dict.fromkeys(span.device for span in self.spans))

    def busy_s(self, device: str) -> float:
        """Return the seconds in which the device computed; overlapping spans count once."""
        busy_s = 0.0
        covered_until_s = self.start_s
        for span in self._of(device):  # sorted by start: each span adds only its part after `covered_until_s`
            busy_s += max(0.0, span.end_s - max(span.start_s, covered_until_s))
            covered_until_s = max(covered_until_s, span.end_s)
        return busy_s

    def idle_share(self, device: str) -> float:
        """Return the share of the whole timeline, from 0 to 1, in which the device did not compute."""
        if self.duration_s == 0:
            return 0.0
        return 1.0 - self.busy_s(device) / self.duration_s

    def to_text(self, columns: int = 80) -> str:
        """Return a Gantt chart with one row per device: the label where a task starts, then ``-``; ``.`` is idle.

        ``columns`` is the width of the time axis, without the device names.
        """
        devices = self.devices()
        name_width = max((len(device) for device in devices), default=0)
        return "\n".join(f"{device:<{name_width}} |{self._row(device, columns)}|" for device in devices)

    def _of(self, device: str) -> list[Span]:
        """Return the spans of one device in order of their start."""
        return sorted((span for span in self.spans if span.device == device), key=lambda span: span.start_s)

    def _row(self, device: str, columns: int) -> str:
        """Return the chart's row of one device. A label that is longer than its task is truncated."""
        cells = ["."] * columns
        columns_per_s = columns / self.duration_s if self.duration_s else 0.0
        label, label_left = "", ""  # the label of the current task, and its characters not yet drawn
        for span in self._of(device):
            if span.label != label:
                label = label_left = span.label
            first, stop = (round((at_s - self.start_s) * columns_per_s) for at_s in (span.start_s, span.end_s))
            for column in range(first, stop):
                cells[column] = label_left[:1] or "-"
                label_left = label_left[1:]
        return "".join(cells)
