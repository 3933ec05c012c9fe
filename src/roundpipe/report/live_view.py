"""Shows a run while it trains: a live view in a terminal or notebook (rich), plain lines elsewhere.

RunState is what the view shows, as the rows of the metrics have left it. Knows no model and no Trainer.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from roundpipe.compiled import compilations
from roundpipe.progress import present_phase
from roundpipe.report.figures import count, duration, figure, known, shown_of, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

logger = logging.getLogger("roundpipe")
_BLOCKS = "▁▂▃▄▅▆▇█"
_LOSSES_KEPT = 2000
_RATE_ROWS = 20  # steps over whose mean the rate of steps is taken
_LINE_EVERY_S = 10.0
_DRAW_EVERY_S = 1.0
_NOTEBOOK_FORMAT = '<pre style="line-height: 1.2; font-family: Menlo, Consolas, monospace">{code}</pre>'
# Black, red, green, yellow, blue, magenta, cyan and white, readable on light and dark pages.
_NOTEBOOK_COLOURS = [
    (34, 48, 60), (209, 73, 91), (58, 157, 110), (194, 146, 46), (47, 127, 184), (143, 99, 184), (42, 165, 160),
    (154, 165, 177),
]  # fmt: skip
_MOST_DEVICES = 4  # more devices are summarised


@dataclass
class RunState:
    """The latest figures of a run. `max_steps`: None if unknown. Times are those of time.time()."""

    name: str = "training"
    max_steps: int | None = None
    row: Mapping[str, Any] = field(default_factory=dict)  # the row of the last step
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSSES_KEPT))
    eval_loss: float | None = None
    eval_step: int | None = None
    checkpoint: str | None = None
    checkpoint_time: float = 0.0
    note: str = ""  # shown as the last line
    start_time: float = field(default_factory=time.time)
    _times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RATE_ROWS + 1))

    def add(self, row: Mapping[str, Any]) -> None:
        """Take over a row of the metrics: of a step or of an evaluation."""
        if row.get("type") == "eval":
            self.eval_loss, self.eval_step = row.get("eval_loss"), row["step"]
            return
        self.row = row
        if row.get("loss") is not None:
            self.losses.append(row["loss"])
        self._times.append((row["step"], row["time"]))

    @property
    def step(self) -> int:
        return int(self.row.get("step", 0))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, by the time of the latest steps, evaluations and checkpoints included."""
        if len(self._times) < 2 or self.max_steps is None:
            return None
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        return (self.max_steps - last_step) * (last_time - first_time) / max(last_step - first_step, 1)


class View(Protocol):
    """What shows a RunState."""

    def update(self, state: RunState, event: str | None = None) -> None:
        """Show the state after a step, or after an event such as `evaluated`."""

    def write(self, text: str) -> None:
        """Write a line that stays."""

    def close(self) -> None:
        """Show the last state and give the terminal back. Can be repeated."""


def open_view(state: RunState) -> View:
    """The view for the present output: live in a terminal or notebook with rich, else plain lines."""
    in_notebook = _in_notebook()
    if not in_notebook and not sys.stdout.isatty():
        return PlainLines(sys.stdout)
    if importlib.util.find_spec("rich") is None:
        logger.warning("rich is not installed, so there is no live view; pip install rich (or 'roundpipe[train]').")
        return PlainLines(sys.stdout)
    return NotebookView(state) if in_notebook else LiveView(state)


def _in_notebook() -> bool:
    """Whether the code runs in the kernel of a notebook. The shell of IPython in a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


# Plain lines.


class PlainLines:
    """Writes one line every `every_s` seconds, and one for the first and last step and for each event."""

    def __init__(self, stream: TextIO, every_s: float = _LINE_EVERY_S) -> None:
        self._stream = stream
        self._every_s = every_s
        self._last_s = -math.inf
        self._last_line = self._unwritten = ""

    def update(self, state: RunState, event: str | None = None) -> None:
        if event is not None:
            self.write(f"step {state.step}  {event}")
            return
        self._unwritten = plain_line(state)
        if time.monotonic() - self._last_s >= self._every_s or state.step == state.max_steps:
            self._last_s = time.monotonic()
            self.write(self._unwritten)
            self._unwritten = ""

    def write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._unwritten:
            self.write(self._unwritten)
            self._unwritten = ""


def plain_line(state: RunState) -> str:
    """One line with the figures of the last step: names and values, separated by two spaces."""
    fields = [
        f"step {state.step}" + (f"/{state.max_steps}" if state.max_steps else ""),
        *(f"{each.label} {each.text(state.row.get(each.field))}" for each in shown_of([state.row]) if each.label),
        f"eta {duration(state.eta_s)}",
    ]
    return "  ".join(fields)


# The live view.


class LiveView:
    """A region at the bottom of the terminal, drawn by a thread of rich.

    It is drawn once a second: drawing holds the interpreter lock, which the threads that launch work on devices need.

    Output of print() and of logging appears above it.
    """

    def __init__(self, state: RunState, console: Console | None = None) -> None:
        from rich.live import Live

        self._state = state
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._live = Live(
            console=console, get_renderable=lambda: render(self._state), refresh_per_second=1 / _DRAW_EVERY_S
        )
        outputs = {id(stream) for stream in (sys.stdout, sys.stderr)}
        self._live.start()
        # rich redirects sys.stdout and sys.stderr. Handlers of logging hold the streams themselves.
        for handler in _stream_handlers():
            if id(handler.stream) in outputs:
                self._moved.append((handler, handler.setStream(sys.stderr)))

    def update(self, state: RunState, event: str | None = None) -> None:
        self._state = state

    def write(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        while self._moved:
            handler, stream = self._moved.pop()
            handler.setStream(stream)
        self._live.stop()


class NotebookView:
    """An output of the present cell that is replaced after a step, at most once a second.

    rich's own live display needs ipywidgets, captures the output of other threads while it draws and is not kept in a
    saved notebook. An output with a display id has none of these limits.
    """

    def __init__(self, state: RunState, every_s: float = _DRAW_EVERY_S) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self._state = state
        self._every_s = every_s
        self._last_s = time.monotonic()
        self._handle = display(render_mime(state), raw=True, display_id=True)

    def update(self, state: RunState, event: str | None = None) -> None:
        self._state = state
        if time.monotonic() - self._last_s >= self._every_s:
            self._draw()

    def write(self, text: str) -> None:
        from IPython.display import display

        display({"text/plain": text}, raw=True)

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._last_s = time.monotonic()
        self._handle.update(render_mime(self._state), raw=True)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for one in loggers:
        if isinstance(one, logging.Logger):
            yield from (h for h in one.handlers if isinstance(h, logging.StreamHandler) and hasattr(h, "stream"))


def render_text(state: RunState, width: int = 100) -> str:
    """The live view as plain text, for logs and tests."""
    return _recording(state, width).export_text()


def render_mime(state: RunState, width: int = 100) -> dict[str, str]:
    """The live view for a notebook: as HTML, and as text for frontends that show no HTML."""
    from rich.terminal_theme import TerminalTheme

    console, theme = _recording(state, width), TerminalTheme((255, 255, 255), (0, 0, 0), _NOTEBOOK_COLOURS)
    return {
        "text/plain": console.export_text(clear=False, styles=False),
        "text/html": console.export_html(theme=theme, inline_styles=True, code_format=_NOTEBOOK_FORMAT),
    }


def _recording(state: RunState, width: int) -> Console:
    """A console that has recorded the live view. It writes nothing, in a notebook too."""
    import io

    from rich.console import Console

    console = Console(
        record=True, width=width, file=io.StringIO(), color_system="standard", force_jupyter=False, legacy_windows=False
    )
    console.print(render(state))
    return console


def render(state: RunState) -> RenderableType:
    """The live view as a renderable of rich."""
    from rich import box
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    row = state.row
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True, width=9)
    grid.add_column(ratio=1)

    def line(name: str, *parts: str | Text) -> None:
        grid.add_row(name, Text("   ").join(Text.from_markup(p) if isinstance(p, str) else p for p in parts if p))

    elapsed = f"elapsed [b]{duration(time.time() - state.start_time)}[/b]"
    line("progress", _progress(state), elapsed, f"ETA [b]{duration(state.eta_s)}[/b]", _epoch(row))
    evaluated = "" if state.eval_loss is None else f"eval [b]{figure(state.eval_loss)}[/b] (step {state.eval_step})"
    line("loss", f"[b]{figure(row.get('loss')):>8}[/b]", Text(sparkline(state.losses, 32), style="cyan"), evaluated)
    of_method = [
        f"{each.label} [b]{each.text(row.get(each.field))}[/b]" for each in shown_of([row]) if each.is_of_method
    ]
    if of_method:
        line("method", *of_method)
    line(
        "speed",
        f"[b]{count(row.get('tokens_per_s'))}[/b] tokens/s",
        f"[b]{figure(row.get('step_s'))}[/b] s per step",
        _wait(row),
    )
    line("optimizer", f"lr [b]{figure(row.get('lr'))}[/b]", f"grad norm [b]{figure(row.get('grad_norm'))}[/b]")
    compiled = compilations()  # also while layers are compiled for the first step, which no row tells of
    if compiled.graphs:
        line("compiled", f"[b]{compiled.graphs}[/b] graphs", f"[b]{duration(compiled.seconds)}[/b]")
    line("devices", *_shares(row.get("device_share") or {}))
    line("link", *_link(row))
    line("memory", *_memory(row))
    saved = "none yet"
    if state.checkpoint is not None:
        saved = f"[b]{escape(state.checkpoint)}[/b], {duration(time.time() - state.checkpoint_time)} ago"
    line("saved", saved)
    if (now := present_phase()) is not None:  # until the first step, and when inputs of another form come
        line("now", Text(now.what), duration(now.seconds))
    if state.note:
        line("note", Text(state.note, style="bold yellow"))
    title = Text(state.name, style="bold")  # not markup: a name may contain brackets
    return Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="blue")


def _progress(state: RunState) -> str:
    if not state.max_steps:
        return f"step [b]{state.step}[/b]"
    done = min(state.step / state.max_steps, 1.0)
    return f"[green]{bar(done, 16)}[/green] step [b]{state.step}[/b]/{state.max_steps}"


def _epoch(row: Mapping[str, Any]) -> str:
    return "" if row.get("epoch") is None else f"epoch [b]{row['epoch']:.2f}[/b]"


def _wait(row: Mapping[str, Any]) -> str:
    wait_s = row.get("optimizer_wait_s")
    return "" if not wait_s else f"optimizer wait [b]{figure(wait_s)}[/b] s"


def _shares(shares: Mapping[str, float]) -> list[str]:
    if not shares:
        return ["-"]
    if len(shares) > _MOST_DEVICES:
        mean, values = sum(shares.values()) / len(shares), list(shares.values())
        return [
            f"{bar(mean, 12)} [b]{mean:.0%}[/b] computing",
            f"{min(values):.0%} to {max(values):.0%} on {len(values)}",
        ]
    return [f"{name} {bar(share, 8)} [b]{share:.0%}[/b]" for name, share in shares.items()]


def _link(row: Mapping[str, Any]) -> list[str]:
    if row.get("bytes_up") is None:
        return ["-"]
    step_s = row.get("step_s") or math.inf
    return [
        f"up [b]{size(row['bytes_up'])}[/b] ({size(row['bytes_up'] / step_s)}/s)",
        f"down [b]{size(row['bytes_down'])}[/b] ({size(row['bytes_down'] / step_s)}/s)",
        "per step",
    ]


def _memory(row: Mapping[str, Any]) -> list[str]:
    parts = [f"host [b]{size(row.get('host_rss_bytes'))}[/b], {size(row.get('host_available_bytes'))} free"]
    peaks = known(row.get("device_peak_bytes"))
    limits = known(row.get("device_limit_bytes"))
    if peaks:
        parts.append(f"device peak [b]{size(max(peaks))}[/b]" + (f" of {size(max(limits))}" if limits else ""))
    return parts


# Figures as signs.


def sparkline(values: Sequence[float] | deque[float], width: int) -> str:
    """A curve of at most `width` characters; each is the mean of its part of the values. `!` is not finite."""
    values = list(values)
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] if math.isfinite(mean) else "!" for mean in means)


def bar(share: float, width: int) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)
