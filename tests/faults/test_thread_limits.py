"""A thread that cannot be started: the caller hears of it, nothing stays half open, and the next call works."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import pytest

from helpers_faults import Bench, bench, caught_from, our_threads, wait_for_no_threads, wait_until
from helpers_parity import assert_same
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.monitor import THREAD_PREFIX

MESSAGE = "can't start new thread"
NUM_DEVICES = 3
NUM_POOL_THREADS = NUM_DEVICES + 1  # and one that lands gradients


class Limit:
    """Lets at most `left` more threads of ours start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = float("inf")
        self.refused = 0
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.startswith(THREAD_PREFIX):
                if self.left < 1:
                    self.refused += 1
                    raise RuntimeError(MESSAGE)
                self.left -= 1
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)

    def lift(self) -> None:
        self.left = float("inf")


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    return Limit(monkeypatch)


@pytest.fixture
def open_devices(monkeypatch: pytest.MonkeyPatch) -> list[VirtualDevice]:
    """Those that were opened and not closed."""
    devices: list[VirtualDevice] = []
    real_init, real_close = VirtualDevice.__init__, VirtualDevice.close

    def init(self: VirtualDevice, *args: Any) -> None:
        real_init(self, *args)
        devices.append(self)

    def close(self: VirtualDevice) -> None:
        devices.remove(self)
        real_close(self)

    monkeypatch.setattr(VirtualDevice, "__init__", init)
    monkeypatch.setattr(VirtualDevice, "close", close)
    return devices


def refused(call: Callable[[], object]) -> None:
    caught = caught_from(call)
    assert isinstance(caught, RuntimeError), caught
    assert MESSAGE in str(caught)


@pytest.mark.parametrize("startable", range(NUM_POOL_THREADS))
def test_a_pool_opens_whole_or_not_at_all(limit: Limit, open_devices: list[VirtualDevice], startable: int) -> None:
    with bench(NUM_DEVICES) as made:
        for _ in range(2):
            limit.left = startable
            refused(lambda: made.call(1))
            wait_until(lambda: our_threads() == [], "threads that were started to end")
            assert open_devices == []
        limit.lift()
        made.train_right(1)
        assert len(our_threads()) == NUM_POOL_THREADS + 1
        assert len(open_devices) == NUM_DEVICES
        made.train_right(2)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_step_whose_thread_cannot_be_started_was_not_made(limit: Limit, is_async: bool) -> None:
    with bench(NUM_DEVICES) as made:
        assert_same(made.call(1), made.call_reference(1))
        limit.left = 0
        for _ in range(2):
            refused(lambda: made.step(is_async))
        limit.lift()
        made.step()
        made.step_reference()
        made.assert_state_right()
        made.train_right(2)
        assert len(our_threads()) == NUM_POOL_THREADS + 1


def test_reading_and_closing_need_no_thread(limit: Limit) -> None:
    made = Bench(NUM_DEVICES)
    limit.left = 0
    refused(lambda: made.call(1))
    made.model.synchronize()
    made.model.state_dict()
    made.model.zero_grad()
    made.close()
    wait_for_no_threads()


def test_a_system_that_starts_no_thread_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is shielded from signals by a thread goes on without one."""
    with bench(NUM_DEVICES) as made:
        made.train_right(1)
        for seed in (2, 3):
            made.call(seed)
            made.call_reference(seed)
            made.step(is_async=False)
            made.step_reference()

        def start_new_thread(*_: Any) -> int:
            raise RuntimeError(MESSAGE)

        with monkeypatch.context() as patch:
            patch.setattr(_thread, "start_new_thread", start_new_thread)
            patch.setattr(threading, "_start_new_thread", start_new_thread)
            made.train_right(4)
            with bench(NUM_DEVICES + 1) as other:
                refused(lambda: other.call(1))
                assert other.model._engine._pool._open is None
        made.train_right(5)
