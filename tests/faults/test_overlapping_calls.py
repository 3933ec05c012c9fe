"""Failures while other calls and optimizer steps are under way. Every order of events is made, none is left to luck."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from helpers_faults import (
    DROPPED,
    WAIT_S,
    Boom,
    Gate,
    bench,
    held_backward,
    notes_of,
    raised_by,
    wait_for,
    watched_copies,
)
from helpers_parity import assert_same
from roundpipe import ModelExecutePlan, context
from roundpipe.api import engine
from roundpipe.devices.interface import StreamKind
from roundpipe.runtime.run import Run

# Three tasks a call: on 6 devices a call and the next one share none, so one can be held while the other goes on.
SHORT_PLAN = ModelExecutePlan([range(0, 2)], [range(2, 4), range(0, 2)])
APART = 6


def short_bench(num_devices: int = APART) -> Any:
    return bench(num_devices, plan=SHORT_PLAN)


# Steps.


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_step_pending_for_earlier_gradients_still_runs(num_devices: int, point: str) -> None:
    with bench(num_devices) as made:
        made.train_right(1)
        assert_same(made.call(2), made.call_reference(2))
        gate = Gate()
        made.traps.act("step_fn", None, 0, gate)
        made.step(is_async=True)
        wait_for(gate.reached)
        made.step_reference()
        error = Boom(point)
        made.traps.arm(point, 0, 1, error)
        caught = raised_by(lambda: made.call(3), lambda: made.model.zero_grad())
        assert caught is error
        assert DROPPED in "\n".join(notes_of(caught))
        gate.opened.set()
        made.assert_state_right()
        made.train_right(4)


def test_a_step_that_waits_for_earlier_gradients_still_gets_them() -> None:
    """The failed call is over before the call before it has landed its gradients."""
    with short_bench() as made:
        made.train_right(1)
        gate = held_backward(made, 2)
        made.call_reference(2)
        made.step(is_async=True)
        error = Boom("second call")
        made.traps.arm("forward", 3, 0, error)
        caught = raised_by(lambda: made.call(3))
        assert caught is error
        gate.opened.set()
        made.step_reference()
        made.assert_state_right()
        made.train_right(4)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_step_whose_gradients_are_lost_does_nothing(is_async: bool) -> None:
    with short_bench() as made:
        made.train_right(1)
        made.model.synchronize()
        error = Boom("backward")
        before = made.snapshot()
        gate = held_backward(made, 2, error)
        made.traps.reset()
        if is_async:
            made.step(is_async=True)
            gate.opened.set()
            caught = raised_by(made.model.synchronize)
        else:
            made.traps.act("step_fn", None, 0, lambda: None)
            threading.Timer(0.05, gate.opened.set).start()
            caught = raised_by(made.step)
        assert caught is error
        # A synchronous step begins at once, and is unwound where it meets the gradients.
        assert made.traps.passes()["step_fn", None] == (0 if is_async else 1)
        made.model.synchronize()
        assert_same(made.snapshot(), before, "after the failure")
        made.train_right(3)


def test_of_two_pending_steps_only_the_one_with_gradients_runs() -> None:
    with short_bench() as made:
        made.train_right(1)
        first = held_backward(made, 2)
        made.call_reference(2)
        made.step(is_async=True)
        error = Boom("second call")
        second = held_backward(made, 3, error)  # reads the weights before step 2, as it must
        made.step(is_async=True)
        made.traps.reset()
        second.opened.set()
        caught = raised_by(lambda: made.call(4))
        assert caught is error
        first.opened.set()
        made.step_reference()
        made.assert_state_right()
        assert made.traps.passes()["step_fn", None] == 1
        made.train_right(5)


def test_a_failure_between_entering_step_and_issuing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """step() has looked for failures and found none; then the call fails. Its step must not run on what has landed."""
    with short_bench() as made:
        made.train_right(1)
        made.model.synchronize()
        before = made.snapshot()
        error = Boom("just then")
        gate = held_backward(made, 2, error)
        made.traps.reset()
        run: Any = made.model._engine._last_run
        real = engine.announce_step

        def announce_step(iteration: context.Iteration) -> None:
            gate.opened.set()
            assert run.wait_until_finished(WAIT_S)
            assert run.failed
            real(iteration)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "announce_step", announce_step)
            caught = raised_by(lambda: made.step(is_async=True), made.model.synchronize)
        assert caught is error
        made.model.synchronize()
        assert made.traps.passes()["step_fn", None] == 0
        assert_same(made.snapshot(), before, "after the failure")
        made.train_right(3)


def test_a_failure_between_entering_a_call_and_starting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call must not add its gradients to what is being dropped, nor land them after that."""
    with short_bench() as made:
        made.train_right(1)
        made.model.synchronize()
        before = made.snapshot()
        error = Boom("just then")
        gate = held_backward(made, 2, error)
        first: Any = made.model._engine._last_run

        def new_run(*args: Any, **kwargs: Any) -> Run:
            gate.opened.set()
            assert first.wait_until_finished(WAIT_S)
            return Run(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "Run", new_run)
            caught = raised_by(lambda: made.call(3), made.model.synchronize)
        assert caught is error
        made.model.synchronize()
        assert_same(made.snapshot(), before, "after the failure")
        assert all(p.grad is None for p in made.model.parameters())
        made.train_right(4)


# Calls.


def test_a_failed_call_leaves_the_buffers_of_the_call_before_it() -> None:
    """The call before is still in its backward; its statistics stay, its gradients go."""
    with short_bench() as made:
        made.train_right(1)
        gate = held_backward(made, 2)
        made.call_reference(2)
        made.reference_optimizer.zero_grad()
        error = Boom("second call")
        made.traps.arm("forward", 3, 0, error)
        threading.Timer(0.05, gate.opened.set).start()
        caught = raised_by(lambda: made.call(3))
        assert caught is error
        made.assert_state_right()
        assert all(p.grad is None for p in made.model.parameters())
        made.train_right(4)


def test_when_an_earlier_call_fails_later_ones_are_undone_too() -> None:
    """Buffers are as before the first call that failed, though the second one had written them, too."""
    with short_bench() as made:
        made.train_right(1)
        made.model.synchronize()
        before = made.snapshot()
        error = Boom("first call")
        gate = held_backward(made, 2, error)
        made.call(3)
        gate.opened.set()
        caught = raised_by(made.model.synchronize)
        assert caught is error
        assert notes_of(caught)[-2].endswith("were dropped")
        made.model.synchronize()
        assert_same(made.snapshot(), before, "after the failure")
        made.train_right(4)


def test_a_second_failure_during_the_clean_up_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call fails and is being cleaned up when an earlier one, whose step is pending, fails as well."""
    with short_bench() as made:
        made.train_right(1)
        made.model.synchronize()
        before = made.snapshot()
        first_error, second_error = Boom("first call"), Boom("second call")
        gate = held_backward(made, 2, first_error)
        first: Any = made.model._engine._last_run
        made.step(is_async=True)
        made.traps.reset()
        real = Run.wait_until_finished

        def wait_until_finished(run: Run, timeout_s: float | None = None) -> bool:
            if run is not first:
                gate.opened.set()
                assert real(first, WAIT_S)
            return real(run, timeout_s)

        made.traps.arm("forward", 3, 0, second_error)
        with monkeypatch.context() as patch:
            patch.setattr(Run, "wait_until_finished", wait_until_finished)
            assert raised_by(lambda: made.call(3)) is second_error
        made.traps.disarm()
        assert raised_by(made.model.synchronize) is first_error
        made.model.synchronize()
        assert made.traps.passes()["step_fn", None] == 0
        assert_same(made.snapshot(), before, "after both failures")
        made.train_right(4)


def test_an_inference_that_fails_beside_a_failed_training_call(caplog: pytest.LogCaptureFixture) -> None:
    """Both are heard of: one is raised, the other raised later or logged."""
    with short_bench() as made:
        made.train_right(1)
        made.model.synchronize()
        first_error, second_error = Boom("training"), Boom("inference")
        gate = held_backward(made, 2, first_error)
        first: Any = made.model._engine._last_run

        def fail() -> None:
            gate.opened.set()
            assert first.wait_until_finished(WAIT_S)
            raise second_error

        made.traps.act("forward", 1, 0, fail)
        plan = ModelExecutePlan([range(0, 4)])
        with torch.no_grad():
            caught = raised_by(
                lambda: made.model(
                    torch.zeros(6, 4), roundpipe_run_config=type(made.config)(execute_plan=plan, num_microbatch=3)
                )
            )
        assert caught in (first_error, second_error)
        later = []
        try:
            made.model.synchronize()
        except Boom as error:
            later.append(error)
        heard = {id(caught), *map(id, later), *(id(r.exc_info[1]) for r in caplog.records if r.exc_info)}
        assert {id(first_error), id(second_error)} <= heard
        made.reference.load_state_dict(made.model.state_dict())
        made.train_right(4)


def test_a_prefetch_that_fails_belongs_to_the_call_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker uploads ahead for the next call while it runs a task of the call before, which is not to blame."""
    with bench(1, plan=SHORT_PLAN) as made:
        made.train_right(1)
        made.call_reference(2)
        error = Boom("upload of the second call")
        with watched_copies(made.traps, monkeypatch):
            gate = Gate()
            # On one device: the recomputation of microbatch 0 waits until the second call is queued behind it.
            made.traps.act("recompute", 0, 0, gate)
            made.call(2)
            wait_for(gate.reached)
            made.step(is_async=True)
            made.traps.arm("copy", StreamKind.WEIGHTS_UP, 0, error)
            threading.Timer(0.1, gate.opened.set).start()
            caught = raised_by(lambda: made.call(3), made.model.synchronize)
        assert caught is error
        made.step_reference()
        made.assert_state_right()  # the first call's gradients were taken
        made.train_right(4)


@pytest.mark.parametrize("num_failures", [3])
def test_failures_in_a_row_without_a_good_call_between(num_failures: int) -> None:
    with bench(3) as made:
        made.train_right(1)
        before = made.snapshot()
        for number in range(num_failures):
            error = Boom(number)
            assert raised_by(made.failing("backward", 0, 0, error), made.model.synchronize) is error
            assert raised_by(made.failing("forward", 0, 0, error2 := Boom(number)), made.model.synchronize) is error2
        made.model.synchronize()
        assert_same(made.snapshot(), before, "after all failures")
        made.train_right(2)
