"""The view of a run: which one fits the output, what it shows, and what it leaves behind."""

from __future__ import annotations

import io
import logging
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from roundpipe.compiled import Compilations
from roundpipe.report import live_view
from roundpipe.report.live_view import LiveView, NotebookView, PlainLines, RunState, open_view, render_mime, render_text


def row(step: int, **changes: Any) -> dict[str, Any]:
    figures = {"loss": 4.0 / step, "grad_norm": 0.5, "lr": 1e-4, "tokens_per_s": 12345.6, "step_s": 0.25, "epoch": 0.5}
    devices = {"device_share": {"cuda:0": 0.75}, "bytes_up": 3_000_000, "bytes_down": 2_000_000}
    memory = {"host_rss_bytes": 8e9, "host_available_bytes": 64e9, "device_peak_bytes": {"cuda:0": 5e9}}
    return {"type": "train", "step": step, "time": 100.0 + step, **figures, **devices, **memory, **changes}


def state_after(steps: int) -> RunState:
    state = RunState("Llama", max_steps=10)
    for step in range(1, steps + 1):
        state.add(row(step))
    return state


class Notebook:
    """Stands in for IPython with the kernel of a notebook. Keeps what its cell shows, by display id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
        self.shown: list[dict[str, str]] = []
        self.num_updates = 0
        package, display = ModuleType("IPython"), ModuleType("IPython.display")
        package.get_ipython = lambda: shell  # type: ignore[attr-defined]
        display.display = self._display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def _display(self, mime: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.shown.append(mime)
        return SimpleNamespace(update=self._update)

    def _update(self, mime: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown[-1] = mime
        self.num_updates += 1


KERNEL_SHELL = SimpleNamespace(kernel=object())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# Which view.


def test_output_to_a_file_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(open_view(RunState()), PlainLines)


def test_a_terminal_has_a_live_view_that_leaves_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    state = state_after(3)
    view = open_view(state)
    assert isinstance(view, LiveView)
    state.add(row(7))
    view.update(state)
    view.close()
    view.close()
    assert sys.stdout is terminal
    last = terminal.getvalue().rpartition("progress")[2]
    assert "7\x1b[0m/10" in last
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_a_notebook_has_a_view_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    Notebook(monkeypatch, KERNEL_SHELL)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # its import fails
    assert isinstance(open_view(RunState()), NotebookView)


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    Notebook(monkeypatch, SimpleNamespace())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(open_view(RunState()), PlainLines)


@pytest.mark.parametrize("place", ["terminal", "notebook"])
def test_without_rich_one_log_line_says_why_there_are_plain_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    if place == "notebook":
        Notebook(monkeypatch, KERNEL_SHELL)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(live_view.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "roundpipe"):
        assert isinstance(open_view(RunState()), PlainLines)
    (message,) = caplog.messages
    assert "rich is not installed" in message


def test_the_view_counts_what_is_compiled_also_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "compilations", lambda: Compilations(3, 65.0))
    assert re.search(r"compiled +3 graphs +0:01:05", render_text(RunState()))
    monkeypatch.setattr(live_view, "compilations", Compilations)
    assert "compiled" not in render_text(RunState())


# The notebook.


def test_a_notebook_shows_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, KERNEL_SHELL)
    view = NotebookView(RunState("Llama", max_steps=10), every_s=0.0)
    for step in range(1, 6):
        view.update(state_after(step))
        assert f"step {step}/10" in notebook.shown[-1]["text/plain"]
    view.close()
    assert len(notebook.shown) == 1


def test_a_notebook_is_not_drawn_at_each_fast_step_but_has_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, KERNEL_SHELL)
    view = NotebookView(RunState("Llama", max_steps=10), every_s=1e9)
    for step in range(1, 6):
        view.update(state_after(step))
    assert notebook.num_updates == 0
    view.close()
    assert "step 5/10" in notebook.shown[-1]["text/plain"]


def test_a_notebook_gets_the_view_as_html_and_as_text() -> None:
    state = state_after(3)
    state.name = "<b>&"
    mime = render_mime(state)
    assert mime["text/html"].startswith("<pre")
    assert "&lt;b&gt;&amp;" in mime["text/html"]
    assert mime["text/plain"].splitlines()[1:4] == render_text(state).splitlines()[1:4]
    assert "\x1b" not in mime["text/plain"]


# What it shows.


def test_the_view_shows_every_figure() -> None:
    state = state_after(4)
    state.add({"type": "eval", "step": 4, "eval_loss": 1.25})
    state.checkpoint = "checkpoint-4"
    text = render_text(state)
    for part in (
        "Llama", "step 4/10", "ETA 0:00:06", "epoch 0.50", "eval 1.25 (step 4)", "12,346 tokens/s", "0.25 s per step",
        "lr 0.0001", "grad norm 0.5", "cuda:0 ██████░░ 75%", "up 3.00 MB (12.0 MB/s)", "down 2.00 MB (8.00 MB/s)",
        "host 8.00 GB, 64.0 GB free", "device peak 5.00 GB", "checkpoint-4",
    ):  # fmt: skip
        assert part in text
    assert {len(line) for line in text.splitlines()} == {100}


def test_a_note_is_the_last_line() -> None:
    state = state_after(1)
    state.note = "stopping [soon]"
    assert "note       stopping [soon]" in render_text(state).splitlines()[-2]


def test_names_with_brackets_are_no_markup() -> None:
    state = state_after(1)
    state.name, state.checkpoint = "run [red]", "checkpoint-[/b]"
    text = render_text(state)
    assert "run [red]" in text
    assert "checkpoint-[/b]" in text


def test_prints_and_logs_appear_above_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("a library that logs")
    logger.addHandler(handler)
    try:
        view = LiveView(state_after(2), Console(file=terminal, force_terminal=True, width=100, _environ={}))
        logger.warning("a warning")
        view.close()
    finally:
        logger.removeHandler(handler)
    assert handler.stream is terminal
    shown = terminal.getvalue()
    assert shown.index("a warning") < shown.rindex("progress")


# Plain lines.


def test_plain_lines_are_few_and_contain_first_and_last_step() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream, every_s=1e9)
    for step in range(1, 6):
        lines.update(state_after(step))
    lines.update(state_after(5), "saved checkpoint-5")
    lines.close()
    lines.close()
    starts = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert starts == ["step 1/10", "step 5", "step 5/10"]
