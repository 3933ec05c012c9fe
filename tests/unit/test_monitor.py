"""Monitor, Latch, shielded actions and the watchdog."""

from __future__ import annotations

import _thread
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from roundpipe import monitor as monitors
from roundpipe.errors import ConfigError, StallError
from roundpipe.monitor import (
    DEFAULT_WATCHDOG_S,
    THREAD_PREFIX,
    Latch,
    Monitor,
    end_threads,
    shielded,
    stall_of_process,
    stall_report,
    stalls,
    wait_for_event,
    wait_limit_s,
    watchdog_limit_s,
)

WAIT_S = 30.0


def start(function: Callable[[], object], name: str = "helper") -> threading.Thread:
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread


def test_a_wait_ends_when_the_state_has_changed() -> None:
    monitor, state = Monitor(), {"ready": False}
    waiting = threading.Event()

    def ready() -> bool:
        waiting.set()
        return state["ready"]

    def change() -> None:
        assert waiting.wait(WAIT_S)
        with monitor:  # entered only while the other one sleeps
            state["ready"] = True
            monitor.changed()

    thread = start(change)
    with monitor:
        assert monitor.wait_until(ready, "the change")
    thread.join(WAIT_S)


@pytest.mark.parametrize("method", ["wait_until", "idle_until"])
def test_a_sleeping_thread_is_woken_and_does_not_have_to_look_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, "_LONGEST_SLEEP_S", 10 * WAIT_S)
    monkeypatch.setattr(monitors, "IDLE_SLEEP_S", 10 * WAIT_S)
    monitor, state, sleeps, woken = Monitor(), {"ready": False}, threading.Event(), threading.Event()

    def ready() -> bool:
        sleeps.set()
        return state["ready"]

    def sleep() -> None:
        with monitor:
            if method == "wait_until":
                monitor.wait_until(ready, "the change")
            else:
                monitor.idle_until(ready)
        woken.set()

    thread = start(sleep)
    assert sleeps.wait(WAIT_S)
    with monitor:  # entered only while the other one sleeps
        state["ready"] = True
        monitor.changed()
    assert woken.wait(WAIT_S)
    thread.join(WAIT_S)


def test_a_condition_that_is_ready_needs_no_wait() -> None:
    monitor = Monitor()
    with monitor:
        assert monitor.wait_until(lambda: True, "nothing", timeout_s=0.0)


def test_a_wait_gives_up_after_its_limit() -> None:
    monitor = Monitor()
    began = time.monotonic()
    with monitor:
        assert not monitor.wait_until(lambda: False, "what never comes", timeout_s=0.05)
    assert 0.05 <= time.monotonic() - began < 5.0


def test_the_monitor_can_be_entered_again_and_knows_its_holder() -> None:
    monitor = Monitor()
    assert not monitor.is_held()
    with monitor, monitor:
        assert monitor.is_held()
        held_elsewhere: list[bool] = []
        start(lambda: held_elsewhere.append(monitor.is_held())).join(WAIT_S)
        assert held_elsewhere == [False]
    assert not monitor.is_held()


def test_a_long_wait_is_logged_with_all_waiting_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROUNDPIPE_WATCHDOG_S", "0.1")
    monitor, over = Monitor(), threading.Event()

    def other() -> None:
        with monitor:
            monitor.wait_until(over.is_set, "the other thing")

    thread = start(other, f"{THREAD_PREFIX}other")
    with caplog.at_level(logging.WARNING, "roundpipe"), monitor:
        assert not monitor.wait_until(lambda: False, "this thing", timeout_s=0.35)
        over.set()
        monitor.changed()
    thread.join(WAIT_S)
    reports = [record.getMessage() for record in caplog.records if "MainThread has waited" in record.getMessage()]
    assert len(reports) >= 2, "reported again after each further limit"
    assert "for this thing; it continues to wait" in reports[-1]
    assert f"{THREAD_PREFIX}other waits for the other thing" in reports[-1]
    assert f"stack of {THREAD_PREFIX}other:" in reports[-1]
    assert "in other" in reports[-1]
    assert "stack of MainThread:" in reports[-1]


def test_a_finished_wait_is_not_logged() -> None:
    monitor = Monitor()
    with monitor:
        monitor.wait_until(lambda: False, "outer", timeout_s=0.01)
    assert monitor._waits == {}


def test_after_an_inner_wait_the_outer_one_is_listed_again() -> None:
    monitor = Monitor()
    seen: list[dict[int, str]] = []

    def ready() -> bool:
        monitor.wait_until(lambda: False, "inner", timeout_s=0.0)
        seen.append(dict(monitor._waits))
        return len(seen) > 2

    with monitor:
        monitor.wait_until(ready, "outer", timeout_s=5.0)
    assert list(seen[-1].values()) == ["outer"]


def test_idle_until_checks_its_condition_periodically() -> None:
    """A finalizer may change the state on this thread between the check and the sleep; that wakes no thread."""
    monitor, state = Monitor(), {"looks": 0}

    def ready() -> bool:
        state["looks"] += 1
        return state["looks"] > 1

    def idle() -> None:
        with monitor:
            monitor.idle_until(ready)

    thread = start(idle)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_an_event_is_polled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ROUNDPIPE_WATCHDOG_S", "0.05")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "roundpipe"):
        wait_for_event(lambda: time.monotonic() - began > 0.2, "a copy")
    assert "for a copy" in caplog.text


@pytest.mark.parametrize(("text", "limit_s"), [("", DEFAULT_WATCHDOG_S), ("2.5", 2.5), ("1e3", 1000.0)])
def test_the_limit_is_read_from_the_environment(text: str, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_WATCHDOG_S", text)
    assert watchdog_limit_s() == limit_s


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_an_invalid_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_WATCHDOG_S", text)
    with pytest.raises(ConfigError, match=text):
        watchdog_limit_s()


@pytest.mark.parametrize(("text", "limit_s"), [("", math.inf), ("2.5", 2.5), ("inf", math.inf)])
def test_the_wait_limit_is_read_from_the_environment(
    text: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_WAIT_LIMIT_S", text)
    assert wait_limit_s() == limit_s


@pytest.fixture
def limit_s(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    monkeypatch.setenv("ROUNDPIPE_WAIT_LIMIT_S", "0.1")
    yield 0.1
    stalls.clear()


def waiting(what: str, timeout_s: float | None = None) -> bool:
    monitor = Monitor()
    with monitor:
        try:
            return monitor.wait_until(lambda: False, what, timeout_s)
        finally:
            assert monitor.is_held()
            assert monitor._waits == {}
            assert monitor._sleepers == {}


def test_a_wait_longer_than_the_limit_raises_and_later_waits_raise_at_once(limit_s: float) -> None:
    began = time.monotonic()
    with pytest.raises(StallError, match=r"MainThread has waited 0\.\d s for this thing; this is longer") as caught:
        waiting("this thing")
    assert time.monotonic() - began >= limit_s
    assert "MainThread waits for this thing" in str(caught.value)
    assert "stack of MainThread" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(StallError, match="the wait for this thing took longer"):
        waiting("another thing")
    with pytest.raises(StallError, match="the wait for this thing took longer"):
        wait_for_event(lambda: False, "an event")
    monitor = Monitor()
    with monitor:
        assert monitor.wait_until(lambda: True, "what is there already")
    assert "this thing" in str(stall_of_process())


def test_a_wait_that_has_its_own_timeout_does_not_raise(limit_s: float) -> None:
    assert not waiting("this thing", timeout_s=2 * limit_s)
    stalls.append("something")
    assert not waiting("this thing", timeout_s=0.01)


def test_a_thread_of_the_library_goes_on_waiting(limit_s: float) -> None:
    monitor, state, outcome = Monitor(), {"ready": False}, list[bool]()

    def wait() -> None:
        with monitor:
            outcome.append(monitor.wait_until(lambda: state["ready"], "work"))

    thread = start(wait, f"{THREAD_PREFIX}other")
    thread.join(3 * limit_s)
    assert thread.is_alive()
    with monitor:
        state["ready"] = True
        monitor.changed()
    thread.join(WAIT_S)
    assert outcome == [True]
    assert stalls == []


def test_a_condition_that_holds_after_the_limit_is_no_stall(limit_s: float) -> None:
    """The thread wakes up late, as on a busy machine: after the limit, when the condition holds already."""
    looks = iter([False, False, True])

    def ready() -> bool:
        holds = next(looks)
        if holds:
            time.sleep(2 * limit_s)
        return holds

    monitor = Monitor()
    with monitor:
        assert monitor.wait_until(ready, "what is there in the end")
    assert stalls == []


def test_an_event_that_never_comes_raises(limit_s: float) -> None:
    with pytest.raises(StallError, match="for a copy; this is longer"):
        wait_for_event(lambda: False, "a copy")


def test_a_stuck_shielded_action_raises_and_its_own_wait_raises_first(limit_s: float) -> None:
    over = threading.Event()
    with pytest.raises(StallError, match="an action that must not be interrupted") as caught:
        shielded(lambda: over.wait(WAIT_S))
    assert "over.wait(WAIT_S)" in str(caught.value), "the stack of the helper thread"
    over.set()
    stalls.clear()
    with pytest.raises(StallError, match="for the inner thing; this is longer"):
        shielded(lambda: waiting("the inner thing"))


def test_a_forked_child_knows_no_stall_of_its_parent(limit_s: float) -> None:
    stalls.append("something")
    monitors._free_locks()
    assert stalls == []


def test_a_report_names_ended_threads_by_their_id() -> None:
    assert "  1234567 waits for x" in stall_report("y", 1.0, {1234567: "x"})


def test_end_threads_waits_for_all_threads_within_one_timeout() -> None:
    over = threading.Event()
    threads = [start(lambda: over.wait(WAIT_S)) for _ in range(5)]
    began = time.monotonic()
    end_threads(threads, 0.1)
    assert time.monotonic() - began < 2.0
    assert all(thread.is_alive() for thread in threads)
    over.set()
    end_threads([*threads, threading.current_thread()], WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_a_monitor_is_acquired_and_released_in_c_code() -> None:
    """A KeyboardInterrupt is raised between instructions of Python code: there it would leak the lock."""
    lock = type(threading.RLock())
    assert Monitor.__enter__ is lock.__enter__
    assert Monitor.__exit__ is lock.__exit__


def test_a_latch_wakes_waiting_threads() -> None:
    latch, seen = Latch(), []
    assert not latch.wait(0.01)
    threads = [start(lambda: seen.append(latch.wait(WAIT_S))) for _ in range(3)]
    latch.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert seen == [True] * 3
    assert latch.is_set()
    assert latch.wait(0.0)


def test_a_wait_releases_a_monitor_that_was_acquired_twice() -> None:
    monitor, state = Monitor(), {"ready": False}

    def change() -> None:
        with monitor:
            state["ready"] = True
            monitor.changed()

    with monitor, monitor:
        thread = start(change)
        assert monitor.wait_until(lambda: state["ready"], "the change", timeout_s=WAIT_S)
        assert monitor.is_held()
    assert not monitor.is_held()
    thread.join(WAIT_S)


def test_an_interrupted_wait_leaves_the_monitor_consistent() -> None:
    """Signals arrive while the main thread sleeps, wakes up, and acquires a lock that other threads hold mostly."""
    monitor, over = Monitor(), threading.Event()

    def disturb() -> None:
        while not over.is_set():
            with monitor:
                monitor.changed()

    threads = [start(disturb) for _ in range(2)]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupts = 0
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-3)
                with monitor:
                    monitor.wait_until(lambda: False, "a signal", timeout_s=WAIT_S)
            except KeyboardInterrupt:
                interrupts += 1
            assert not monitor.is_held()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert interrupts == 200


def test_a_shielded_action_ends_before_the_interrupt_is_raised() -> None:
    ended = []

    def action() -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        shielded(action)
    assert ended == [True]


def test_a_shielded_action_raises_its_own_error_and_runs_even_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        shielded(fail)

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    shielded(lambda: ran.append(1))
    with pytest.raises(ValueError, match="its own"):
        shielded(fail)
    assert ran == [1]
