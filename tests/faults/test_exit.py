"""The process ends cleanly and promptly whatever is still under way."""

from __future__ import annotations

import subprocess
import time

import pytest

from helpers_faults import run_script

PROMPT_S = 9.0  # the joins' own limits (3 s for the pool, 5 s for the optimizer) and some air
UNJOINED_S = 7.0  # less than both limits: where all threads end by themselves; about 2 s on a quiet machine


def check(body: str, returncode: int = 0, prompt_s: float = PROMPT_S) -> subprocess.CompletedProcess[str]:
    """Runs a script that prints the time when its own work is done."""
    done = run_script(body + "\nprint('done', time.time(), flush=True)" if "'done'" not in body else body)
    ended = time.time()
    assert done.returncode == returncode, done.stdout + done.stderr
    for bad in ("Fatal Python error", "terminate called", "Segmentation", "Exception ignored"):
        assert bad not in done.stderr, done.stderr
    assert ended - float(done.stdout.split()[-1]) < prompt_s, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_right_after_calls_and_asynchronous_steps() -> None:
    check(
        """
made, other = Bench(3), Bench(2)
made.call(1)
made.step(True)
for seed in range(3):
    other.call(seed)
    made.call(seed)
made.step(True)
""",
        prompt_s=UNJOINED_S,
    )


@pytest.mark.slow
def test_with_a_layer_and_a_step_still_running() -> None:
    """Both run far longer than the process waits for them."""
    done = check(
        """
made, other = Bench(3), Bench(3)
other.train_right(1)
running = [threading.Event(), threading.Event()]
def forever(event):
    event.set()
    while True:
        torch.ones(100).sum()  # in and out of C++ all the time
        time.sleep(0.001)
other.traps.act("step_fn", None, 0, lambda: forever(running[1]))
other.call(2)
other.step(True)
made.traps.act("backward", 0, 0, lambda: forever(running[0]))
made.call(1)
for event in running: wait_for(event)
"""
    )
    assert done.stderr == ""


def test_with_a_failure_that_no_call_has_raised_yet() -> None:
    """It is in the log at least."""
    done = check(
        """
made = Bench(2)
held_backward(made, 1, Boom("never raised")).opened.set()
run = made.model._engine._last_run
assert run.wait_until_finished(10)
""",
        prompt_s=UNJOINED_S,
    )
    assert "never raised" in done.stderr
    assert "a failure in the background came to light" in done.stderr


@pytest.mark.slow
def test_sys_exit_in_the_middle() -> None:
    check(
        """
made = Bench(2)
made.call(1)
made.step(True)
def loss_fn(output, label):
    print('done', time.time(), flush=True)
    sys.exit(5)
made.model.forward_backward((batch(1)[0],), label=batch(1)[1], loss_fn=loss_fn)
""",
        returncode=5,
        prompt_s=UNJOINED_S,
    )


def test_ctrl_c_during_a_call() -> None:
    """SIGINT as the terminal sends it; not caught, it ends the process as any Python program."""
    done = run_script(
        """
made = Bench(2)
made.train_right(1)
def sleep():
    print('done', time.time(), flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    time.sleep(60)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
made.traps.act("forward", 1, 1, sleep)
try:
    made.call(2)
except KeyboardInterrupt as error:
    print("caught after", time.time(), flush=True)
    raise
"""
    )
    assert done.returncode in (-2, 130), done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "Fatal Python error" not in done.stderr
    words = done.stdout.split()
    assert float(words[words.index("after") + 1]) - float(words[words.index("done") + 1]) < 2.2


def test_import_and_wrapping_start_no_thread_and_closing_leaves_none() -> None:
    check(
        """
assert threading.active_count() == 1, threading.enumerate()
unused, used = Bench(1), Bench(2)
assert threading.active_count() == 1, threading.enumerate()
used.train_right(1)
assert threading.active_count() == 5, threading.enumerate()
used.close()
wait_for_no_threads()
""",
        prompt_s=UNJOINED_S,
    )
