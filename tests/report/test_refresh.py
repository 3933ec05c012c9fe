"""The report of a running run: when it is drawn, on which thread, what a failure does, and what the page says."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_report import START_S, Page, evaluation, row, start, written

from roundpipe.report import RunRecord, refresh
from roundpipe.report.metrics import MetricsWriter
from roundpipe.report.page import refresh_page
from roundpipe.report.progress import State, progress_of
from roundpipe.report.refresh import THREAD_NAME, Refresh


class Clock:
    """The time of the module, which a drawing and the test set forward."""

    def __init__(self) -> None:
        self.now_s = self.computed_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.computed_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(refresh, "time", clock)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    yield clock
    assert [one for one in threading.enumerate() if one.name == THREAD_NAME] == []


def drawings(clock: Clock, cost_s: float, offers: list[float], *, is_event: bool) -> list[float]:
    """The times, of all at which a drawing of this cost is offered, at which it was drawn."""
    drawn: list[float] = []

    def draw() -> None:
        drawn.append(clock.now_s)
        clock.computed_s += cost_s

    one = Refresh(draw, every_s=30.0)
    for clock.now_s in offers:
        one.offer(is_event=is_event)
        one.close()
    return drawn


def test_drawing_takes_at_most_a_hundredth_of_the_time(clock: Clock) -> None:
    offers = [float(second) for second in range(1000)]
    assert drawings(clock, 2.0, offers, is_event=False) == [30.0, 230.0, 430.0, 630.0, 830.0]


def test_a_cheap_page_is_drawn_every_thirty_seconds_and_after_events(clock: Clock) -> None:
    offers = [float(second) for second in range(100)]
    assert drawings(clock, 0.1, offers, is_event=False) == [30.0, 60.0, 90.0]
    clock.now_s = 0.0
    assert drawings(clock, 0.1, offers, is_event=True) == [30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0]


def test_training_does_not_wait_for_a_drawing(clock: Clock) -> None:
    begun, may_end, count = threading.Event(), threading.Event(), []

    def draw() -> None:
        count.append(1)
        begun.set()
        assert may_end.wait(60)

    one = Refresh(draw, every_s=0.0)
    one.offer()  # returns, though the drawing cannot end
    assert begun.wait(60)
    one.offer()
    may_end.set()
    one.close()
    assert len(count) == 1


def test_nothing_else_is_drawn_meanwhile_by_the_users_code(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", types.ModuleType("matplotlib.pyplot"))
    has_ended = []

    def draw() -> None:
        threading.Event().wait(0.05)
        has_ended.append(True)

    Refresh(draw, every_s=0.0).offer()
    assert has_ended == [True]


def test_a_failure_is_said_once_and_tried_again(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def draw() -> None:
        tried.append(1)
        raise OSError("the disk is full")

    one = Refresh(draw, every_s=0.0)
    for _ in range(3):
        one.offer()
        one.close()
    assert len(tried) == 3
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert messages == [
        "The report could not be refreshed: OSError: the disk is full. Training goes on; the report is tried again."
    ]


def test_the_page_of_a_running_run_says_so_and_loads_itself_again(tmp_path: Path) -> None:
    record = RunRecord({}, [start(0, START_S)], max_steps=500)
    final = written(tmp_path, [row(1), row(2)], record)
    refresh_page(tmp_path, reload_s=30)
    page = (tmp_path / "report.html").read_text()
    tags = Page(page).tags
    assert ("meta", {"http-equiv": "refresh", "content": "30"}) in tags
    assert any(text.startswith("No news for ") and "at step 2 of 500" in text for text in Page(page).texts)
    assert not any(attributes.get("http-equiv") == "refresh" for _, attributes in Page(final).tags)
    assert 'class="live"' not in final


def test_a_run_without_rows_has_no_page_yet(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    refresh_page(tmp_path, reload_s=30)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_report_of_a_run_that_ended_early_says_so(tmp_path: Path) -> None:
    record = RunRecord({}, [start(0, START_S)], max_steps=500, ended=START_S + 3)
    assert "Stopped at step 2 of 500." in Page(written(tmp_path, [row(1), row(2)], record)).texts


@pytest.mark.parametrize(
    ("record", "now_s", "state", "sentence"),
    [
        (RunRecord(max_steps=10), 8.0, State.RUNNING, "Running: step 6 of 10, about 0:00:04 left."),
        (RunRecord(), 8.0, State.RUNNING, "Running: step 6."),
        (RunRecord(max_steps=6, ended=START_S + 7), 8.0, State.COMPLETE, "Complete at step 6 of 6."),
        (RunRecord(max_steps=10, ended=START_S + 7), 8.0, State.STOPPED, "Stopped at step 6 of 10."),
        (RunRecord(max_steps=10), 126.0, State.RUNNING, "Running: step 6 of 10, about 0:00:04 left."),
        (
            RunRecord(max_steps=10),
            127.0,
            State.SILENT,
            "No news for 0:02:01, at step 6 of 10: the run was killed, or its last step is a long one.",
        ),
        (RunRecord(starts=[start(6, START_S + 100)]), 200.0, State.RUNNING, "Running: step 6."),  # it was resumed
    ],
)
def test_states(record: RunRecord, now_s: float, state: State, sentence: str) -> None:
    rows = [*(row(step) for step in range(1, 7)), evaluation(6, 0.5)]
    found = progress_of(rows, record, START_S + now_s)
    assert (found.state, found.sentence) == (state, sentence)


def test_a_run_with_long_steps_may_be_quiet_for_longer() -> None:
    rows = [row(step, step_s=60.0, time=START_S + 60 * step) for step in range(1, 4)]
    assert progress_of(rows, RunRecord(), START_S + 180 + 600).state is State.RUNNING
    assert progress_of(rows, RunRecord(), START_S + 180 + 601).state is State.SILENT
