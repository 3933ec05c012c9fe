"""Ctrl-C and other exceptions that are no Exception: they come through at once, and the next call is right."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from helpers_faults import DROPPED, Bench, Boom, batch, bench, notes_of, raised_by, wait_for
from helpers_parity import assert_same
from roundpipe import ModelExecutePlan
from roundpipe.api import engine
from roundpipe.optim import stepper
from roundpipe.runtime.pool import Worker
from roundpipe.runtime.run import Run

LIMIT_S = 2.0  # the contract's


class Stuck:
    """An action that interrupts the main thread and then hangs, as a layer in a long kernel does."""

    def __init__(self) -> None:
        self.since = 0.0
        self.reached, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.since = time.monotonic()
        self.reached.set()
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
        wait_for(self.release)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.release.set()


def interrupted(call: Callable[[], object], stuck: Stuck) -> BaseException:
    caught = raised_by(call)
    assert isinstance(caught, KeyboardInterrupt)
    assert time.monotonic() - stuck.since < LIMIT_S
    return caught


@pytest.mark.parametrize(
    "num_devices", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("point", "where"), [("forward", 0), ("forward", 3), ("backward", 3), ("loss_fn", None)])
def test_in_a_call(stuck: Stuck, num_devices: int, point: str, where: Any) -> None:
    with bench(num_devices) as made:
        made.train_right(1)
        before = made.snapshot()
        made.traps.act(point, where, 1, stuck)
        caught = interrupted(lambda: made.call(2), stuck)
        assert DROPPED in "\n".join(notes_of(caught))
        assert_same(made.snapshot(), before, "after the interrupt")
        stuck.release.set()  # what the layer does from now on must not matter
        made.train_right(3)
        made.train_right(4)


def test_while_the_next_call_still_finds_the_layer_stuck(stuck: Stuck) -> None:
    """The next call waits for the device behind the stuck layer, and is right once that one is through."""
    with bench(2) as made:
        made.train_right(1)
        made.traps.act("forward", 2, 0, stuck)
        interrupted(lambda: made.call(2), stuck)
        made.traps.disarm()
        threading.Timer(0.2, stuck.release.set).start()
        made.train_right(3)


@pytest.mark.parametrize("wait", ["synchronize", "zero_grad", "timeline", "step"])
def test_while_waiting_for_the_background(stuck: Stuck, wait: str) -> None:
    """Nothing is lost: the call in the background goes on."""
    plan = ModelExecutePlan([range(0, 2)], [range(2, 4), range(0, 2)])
    with bench(3, plan=plan) as made:
        made.train_right(1)
        armed = threading.Event()

        def act() -> None:
            wait_for(armed)
            time.sleep(0.1)  # so that the main thread waits by then; if it does not, the test is only weaker
            stuck()

        made.traps.act("backward", 0, 0, act)
        assert_same(made.call(2), made.call_reference(2))
        armed.set()
        waits = {
            "synchronize": made.model.synchronize,
            "zero_grad": made.model.zero_grad,
            "timeline": made.model.timeline,
            "step": made.step,
        }
        interrupted(waits[wait], stuck)
        stuck.release.set()
        if wait != "step":  # the interrupted step is still going to run
            made.step()
        made.step_reference()
        made.assert_state_right()
        made.train_right(3)


def test_in_a_synchronous_step(stuck: Stuck) -> None:
    """step_fn cannot be stopped; it goes on in the background, and later calls are ordered after it."""
    with bench(2) as made:
        made.train_right(1)
        assert_same(made.call(2), made.call_reference(2))
        made.traps.act("step_fn", None, 0, stuck)
        interrupted(made.step, stuck)
        made.step_reference()
        stuck.release.set()
        made.assert_state_right()
        made.train_right(3)


def test_a_step_that_fails_after_its_caller_was_interrupted_is_reported(stuck: Stuck) -> None:
    with bench(2) as made:
        made.train_right(1)
        made.call(2)
        made.call_reference(2)
        made.reference_optimizer.zero_grad()
        error = Boom("later")

        def act() -> None:
            stuck()
            raise error

        made.traps.act("step_fn", None, 0, act)
        interrupted(made.step, stuck)
        stuck.release.set()
        assert raised_by(made.model.synchronize) is error
        made.train_right(3)


def test_with_several_calls_stuck(stuck: Stuck) -> None:
    """The time limit holds for all of them together."""
    plan = ModelExecutePlan([range(0, 2)], [range(2, 4), range(0, 2)])
    with bench(9, plan=plan) as made:
        made.train_right(1)
        for seed in (10, 11):
            held = threading.Event()
            made.traps.act("backward", 0, 0, lambda held=held: (held.set(), wait_for(stuck.release)))  # type: ignore[misc]
            made.call(seed)
            made.call_reference(seed)
            wait_for(held)
        made.step(is_async=True)
        made.step_reference()
        made.traps.act("forward", 3, 0, stuck)
        interrupted(lambda: made.call(12), stuck)
        stuck.release.set()
        made.assert_state_right()  # the first two calls are of the step before: it has run
        made.train_right(13)


def test_close_is_interrupted(stuck: Stuck) -> None:
    """It closes all the same; the thread that hangs ends when its layer does (the fixture checks that it does)."""
    made = Bench(2)
    made.train_right(1)
    made.traps.act("step_fn", None, 0, lambda: (time.sleep(0.1), stuck()))
    made.call(2)
    made.step(is_async=True)
    threading.Timer(0.5, stuck.release.set).start()
    assert isinstance(raised_by(made.model.close), KeyboardInterrupt)
    made.model.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.call(3)


def test_an_interrupt_is_not_lost_to_a_failure_of_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(2) as made:
        made.train_right(1)
        before = made.snapshot()
        interrupt = KeyboardInterrupt()

        def wait_for_losses(run: Run) -> None:
            assert run.wait_until_finished(10.0)
            assert run.failed
            raise interrupt

        made.traps.arm("forward", 1, 0, Boom("at the same time"))
        with monkeypatch.context() as patch:
            patch.setattr(Run, "wait_for_losses", wait_for_losses)
            assert raised_by(lambda: made.call(2)) is interrupt
        assert DROPPED in "\n".join(notes_of(interrupt))
        assert_same(made.snapshot(), before, "after the interrupt")
        made.train_right(3)


@pytest.mark.parametrize("moment", ["watch", "submit", "wait_for_producers"])
def test_an_interrupt_while_a_call_is_being_started(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while a run is being started: no later call waits for the tasks that were never started."""
    with bench(2) as made:
        made.train_right(1)
        before = made.snapshot()
        interrupt = KeyboardInterrupt()

        def throw(*args: Any) -> Any:
            raise interrupt

        owner: Any = {
            "watch": made.model._engine.group.recovery,
            "submit": made.model._engine._pool,
            "wait_for_producers": engine,
        }[moment]
        with monkeypatch.context() as patch:
            patch.setattr(owner, moment, throw)
            assert raised_by(lambda: made.call(2)) is interrupt
        made.model.timeline()
        assert_same(made.snapshot(), before, "after the interrupt")
        made.train_right(3)


def test_system_exit_in_a_layer_does_not_end_a_worker() -> None:
    with bench(2) as made:
        made.train_right(1)
        threads = {t.ident for t in threading.enumerate()}
        error = SystemExit(3)
        assert raised_by(made.failing("forward", 1, 1, error)) is error
        assert {t.ident for t in threading.enumerate()} == threads
        made.train_right(2)


def test_ctrl_c_in_inference(stuck: Stuck) -> None:
    with bench(2, plan=None) as made, torch.no_grad():
        x, _ = batch(1)
        made.traps.act("forward", 2, 0, stuck)
        interrupted(lambda: made.model(x), stuck)
        stuck.release.set()
        made.traps.disarm()
        made.model(x)


def throwing_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """The next call of `owner.name` raises after it has done its work; later ones do their work."""
    real, left = getattr(owner, name), [error]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if left:
            raise left.pop()
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("moment", ["job", "start"])
def test_an_interrupt_while_a_step_is_being_issued(
    is_async: bool, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its job is queued there is no step: the next one takes the gradients."""
    with bench(2) as made:
        made.train_right(1)
        assert_same(made.call(2), made.call_reference(2))
        interrupt = KeyboardInterrupt()
        owner, name = (stepper.StepJob, "__init__") if moment == "job" else (stepper.Stepper, "_start")
        with monkeypatch.context() as patch:
            throwing_once(patch, owner, name, interrupt)
            assert raised_by(lambda: made.step(is_async)) is interrupt
        made.step()
        made.step_reference()
        made.assert_state_right()
        made.train_right(3)


def test_an_interrupt_between_the_tasks_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(2) as made:
        made.train_right(1)
        before = made.snapshot()
        interrupt = KeyboardInterrupt()
        with monkeypatch.context() as patch:
            throwing_once(patch, Worker, "submit", interrupt)
            assert raised_by(lambda: made.call(2)) is interrupt
        assert_same(made.snapshot(), before, "after the interrupt")
        made.train_right(3)


def test_signals_at_any_time() -> None:
    """One for each call, at a moment that chance decides: it comes through or the call returns, and none hangs."""
    chance = random.Random(7)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with bench(2) as made:
            made.train_right(1)
            operations: list[Callable[[], object]] = [
                lambda: made.call(2),
                lambda: made.step(True),
                lambda: made.step(False),
                made.model.synchronize,
                made.model.state_dict,
                made.model.zero_grad,
            ]
            for _ in range(300):
                operation = chance.choice(operations)
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 2e-2))
                    operation()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
            made.model.synchronize()
            made.model.zero_grad()
            made.reference.load_state_dict(made.model.state_dict())
            assert_same(made.call(3), made.call_reference(3))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_an_error_of_a_step_is_not_lost_when_its_issue_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was queued, so it runs; the caller was interrupted before it could wait for it."""
    with bench(2) as made:
        made.train_right(1)
        made.call(2)
        interrupt, error = KeyboardInterrupt(), Boom("in the step")
        made.traps.arm("step_fn", None, 0, error)
        with monkeypatch.context() as patch:
            throwing_once(patch, stepper.Stepper, "issue", interrupt)
            assert raised_by(made.step) is interrupt
        assert raised_by(made.model.synchronize) is error
        made.reference.load_state_dict(made.model.state_dict())
        assert_same(made.call(3), made.call_reference(3))
