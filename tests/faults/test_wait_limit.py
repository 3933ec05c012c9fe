"""ROUNDPIPE_WAIT_LIMIT_S: a wait that never ends raises StallError instead, and afterwards nothing waits any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from helpers_faults import Bench, Gate, batch, mse, run_script, watched_copies
from roundpipe import StallError
from roundpipe.devices.interface import StreamKind
from roundpipe.monitor import WAIT_LIMIT_VARIABLE, stalls
from roundpipe.optim import stepper
from roundpipe.runtime import pool

LIMIT_S = 0.3
LATE_S = 4.0  # a StallError comes at most so long after the limit, also on a busy machine
AT_ONCE_S = 2.0  # as long as a failed call waits for its workers, and some time for a busy machine
JOIN_S = 0.2  # how long close() waits for stuck threads, instead of seconds


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Blocks the thread that runs into it until the test ends."""
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def num_devices() -> int:
    return 2


@pytest.fixture
def made(num_devices: int, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(num_devices, plan=None)
    made.train_right(1)
    made.train_right(2)
    monkeypatch.setenv(WAIT_LIMIT_VARIABLE, str(LIMIT_S))
    for module in (pool, stepper):
        monkeypatch.setattr(module, "_JOIN_S", JOIN_S)
    yield made
    gate.opened.set()
    stalls.append("the end of the test")  # so that closing does not wait for the limit once more
    made.close()
    stalls.clear()


def stalled(action: Callable[[], object], at_once: bool = False) -> str:
    """The message of the StallError that `action` raises in time."""
    began = time.monotonic()
    with pytest.raises(StallError) as caught:
        action()
    took_s = time.monotonic() - began
    assert took_s < (AT_ONCE_S if at_once else LIMIT_S + LATE_S)
    assert at_once or took_s >= LIMIT_S
    return str(caught.value)


def check_refusals(made: Bench) -> None:
    """Every call after a stall raises at once, on all threads."""
    refused = "cannot be used in this process any more: the wait for"
    for action in [
        lambda: made.call(5),
        made.step,
        lambda: made.step(is_async=True),
        made.model.synchronize,
        made.model.zero_grad,
        made.model.state_dict,
        made.optimizer.step,
        lambda: made.model(batch(1)[0]),
    ]:
        assert refused in stalled(action, at_once=True)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_stuck_layer(made: Bench, gate: Gate) -> None:
    made.traps.act("forward", 1, 1, gate)
    message = stalled(lambda: made.call(3))
    assert "MainThread has waited 0." in message
    assert "for the losses (run" in message
    assert f"longer than {WAIT_LIMIT_VARIABLE} allows" in message
    assert "resume from the last checkpoint" in message
    assert "MainThread waits for the losses (run" in message
    assert "stack of roundpipe-cpu:" in message
    assert "in pass_by" in message
    check_refusals(made)


def test_a_stuck_backward_of_the_plain_loop(made: Bench, gate: Gate) -> None:
    x, label = batch(3)
    loss = mse(made.model(x), label)
    made.traps.act("backward", 2, 0, gate)
    assert "to finish; this is longer" in stalled(loss.backward)
    check_refusals(made)


def test_a_stuck_backward_before_a_step(made: Bench, gate: Gate) -> None:
    made.traps.act("backward", 0, 2, gate)
    made.call(3)
    message = stalled(made.step)
    assert "for optimizer step 3" in message
    assert "roundpipe-optimizer waits for gradients of layer" in message
    check_refusals(made)


def test_a_stuck_backward_before_an_optimizer_step(made: Bench, gate: Gate) -> None:
    made.traps.act("backward", 0, 2, gate)
    made.call(3)
    assert "for gradients of the pending calls" in stalled(made.optimizer.step)
    check_refusals(made)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "stale"])
def test_a_stuck_step_function(made: Bench, gate: Gate, is_async: bool) -> None:
    made.call(3)
    made.traps.act("step_fn", None, 0, gate)
    if is_async:
        made.step(is_async=True)
        assert "the optimizer's pending steps" in stalled(made.model.synchronize)
    else:
        assert "optimizer step 3" in stalled(made.step)
    check_refusals(made)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("stream", [StreamKind.WEIGHTS_UP, StreamKind.ACTIVATIONS_DOWN], ids=["upload", "download"])
def test_a_copy_that_never_ends(made: Bench, gate: Gate, stream: StreamKind, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched_copies(made.traps, monkeypatch, late=True):
        made.traps.act("copy", stream, 0, gate)
        stalled(lambda: made.call(3))
        assert gate.reached.is_set()
    gate.opened.set()  # all copies of virtual devices wait for it
    check_refusals(made)


def test_a_stuck_layer_while_the_model_is_closed(made: Bench, gate: Gate) -> None:
    made.traps.act("backward", 0, 2, gate)
    made.call(3)
    began = time.monotonic()
    with pytest.raises(StallError, match="to finish; this is longer"):
        made.close()
    assert time.monotonic() - began < LIMIT_S + LATE_S
    made.close()  # is closed already


def test_closing_after_a_stall_does_not_wait_for_the_work(made: Bench, gate: Gate) -> None:
    made.traps.act("forward", 1, 1, gate)
    began = time.monotonic()
    with pytest.raises(StallError, match="the losses"), made.model:
        made.call(3)
    assert time.monotonic() - began < LIMIT_S + LATE_S
    assert not gate.opened.is_set()


def test_other_models_and_threads_are_refused_as_well(made: Bench, gate: Gate) -> None:
    other = Bench(2, plan=None)
    made.traps.act("forward", 1, 1, gate)
    errors: list[str] = []
    first = threading.Thread(target=lambda: errors.append(stalled(lambda: made.call(3))))
    first.start()
    assert gate.reached.wait(LIMIT_S + LATE_S)
    stalled(lambda: made.call(4))  # waits for the call lock, then is refused
    first.join()
    assert "for the losses" in errors[0]
    check_refusals(other)
    other.close()


def test_a_slow_layer_within_the_limit_is_no_stall(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT_LIMIT_VARIABLE, "30")
    made.traps.act("forward", 1, 1, lambda: time.sleep(0.6))
    made.train_right(3)
    assert stalls == []


def test_a_process_that_stalls_ends() -> None:
    """Nothing lets the stuck threads go on, so only the limits of closing let the process end."""
    began = time.monotonic()
    ended = run_script(
        """
made = Bench(2)
made.train_right(1)
made.traps.act("forward", 1, 1, threading.Event().wait)
made.call(2)
""",
        timeout_s=60.0,
        ROUNDPIPE_WAIT_LIMIT_S="0.5",
    )
    assert ended.returncode == 1, ended.stderr
    assert "roundpipe.errors.StallError: MainThread has waited" in ended.stderr
    assert "Fatal Python error" not in ended.stderr
    assert time.monotonic() - began < 45.0
