"""Nothing waits in silence: a wedged layer or step_fn is reported, with who waits for what and where threads stand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from helpers_faults import Bench, bench, wait_for
from helpers_parity import assert_same


class Reports(logging.Handler):
    """Collects stall reports; the first one opens `arrived`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.arrived = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "has waited" in text:
            self.texts.append(text)
            self.arrived.set()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    monkeypatch.setenv("ROUNDPIPE_WATCHDOG_S", "0.5")
    handler = Reports()
    logger = logging.getLogger("roundpipe")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def wedged_layer(reports: Reports) -> None:
    wait_for(reports.arrived)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_wedged_layer(num_devices: int, reports: Reports) -> None:
    with bench(num_devices) as made:
        made.train_right(1)
        reports.texts.clear()
        reports.arrived.clear()
        made.traps.act("forward", 1, 1, lambda: wedged_layer(reports))
        made.train_right(2)  # the report itself lets the layer go on
        text = "\n".join(reports.texts)
        assert "MainThread has waited" in text
        assert "MainThread waits for the losses (run" in text
        assert "stack of roundpipe-cpu:" in text
        assert "wedged_layer" in text
        if num_devices == 2:
            assert "waits for input of FB2, microbatch 1" in text


def test_a_wedged_step_fn(reports: Reports) -> None:
    with bench(2) as made:
        made.train_right(1)
        reports.arrived.clear()
        assert_same(made.call(2), made.call_reference(2))
        made.traps.act("step_fn", None, 0, lambda: wedged_layer(reports))
        made.step(is_async=True)
        made.step_reference()
        made.assert_state_right()
        text = "\n".join(reports.texts)
        assert "MainThread has waited" in text
        assert "the optimizer's pending steps" in text
        assert "stack of roundpipe-optimizer" in text
        assert "wedged_layer" in text


def test_the_optimizer_waiting_for_a_wedged_backward(reports: Reports) -> None:
    with bench(2) as made:
        made.train_right(1)
        reports.arrived.clear()
        made.traps.act("backward", 0, 2, lambda: wedged_layer(reports))
        made.train_right(2)
        assert "waits for gradients of layer 0" in "\n".join(reports.texts)


def test_a_report_is_repeated_while_the_wait_goes_on(reports: Reports) -> None:
    with bench(1) as made:
        made.train_right(1)
        reports.texts.clear()
        twice = threading.Event()

        def act() -> None:
            while sum("MainThread has waited" in text for text in list(reports.texts)) < 2:
                reports.arrived.clear()
                wait_for(reports.arrived)
            twice.set()

        made.traps.act("forward", 0, 0, act)
        made.train_right(2)
        assert twice.is_set()


def test_idle_threads_are_no_stall(reports: Reports) -> None:
    """Workers, landing and optimizer with nothing to do wait in silence; real time is the subject here."""
    made = Bench(2)
    try:
        made.train_right(1)
        reports.texts.clear()
        assert not reports.arrived.wait(1.2)
        assert reports.texts == []
    finally:
        made.close()
