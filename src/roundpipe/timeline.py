"""The record of one run: which device computed which task and microbatch, from when to when.

Written by plan.simulator (predicted) and by the runtime (measured); read by tests, logs and benchmarks. Knows names and
seconds, never tasks, layers or clocks: whoever writes a span chooses the origin of time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One microbatch of one task on one device, in seconds; ``label`` is the task's name (``F0``, ``FB3``, ``B7``)."""

    device: str
    label: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Spans in any order. The empty timeline starts and ends at 0 and has no devices."""

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
        """The devices, in the order in which the spans first name them."""
        return tuple(dict.fromkeys(span.device for span in self.spans))

    def busy_s(self, device: str) -> float:
        """Seconds in which the device computed something; overlapping spans count once."""
        busy_s = 0.0
        covered_until_s = self.start_s
        for span in self._of(device):
            busy_s += max(0.0, span.end_s - max(span.start_s, covered_until_s))
            covered_until_s = max(covered_until_s, span.end_s)
        return busy_s

    def idle_share(self, device: str) -> float:
        """The share of the whole timeline, 0 to 1, in which the device computed nothing."""
        if self.duration_s == 0:
            return 0.0
        return 1.0 - self.busy_s(device) / self.duration_s

    def to_text(self, columns: int = 80) -> str:
        """A small Gantt chart, one row a device: ``-`` computes (labelled where a task starts), ``.`` idles.

        ``columns`` is the width of the time axis, without the device names.
        """
        devices = self.devices()
        name_width = max((len(device) for device in devices), default=0)
        return "\n".join(f"{device:<{name_width}} |{self._row(device, columns)}|" for device in devices)

    def _of(self, device: str) -> list[Span]:
        return sorted((span for span in self.spans if span.device == device), key=lambda span: span.start_s)

    def _row(self, device: str, columns: int) -> str:
        """Columns of one device. A label is cut where its task is drawn narrower than its name."""
        cells = ["."] * columns
        columns_per_s = columns / self.duration_s if self.duration_s else 0.0
        label, label_left = "", ""
        for span in self._of(device):
            if span.label != label:
                label = label_left = span.label
            first, stop = (round((at_s - self.start_s) * columns_per_s) for at_s in (span.start_s, span.end_s))
            for column in range(first, stop):
                cells[column] = label_left[:1] or "-"
                label_left = label_left[1:]
        return "".join(cells)
