"""Faults made to order: traps in layers, losses and copies, and the small model they are set in.

A trap fires at one point, for one layer and one microbatch. Microbatches of a stage run in order, so the n-th time a
point is passed after `arm` is microbatch n.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same, call_reference
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, doing_recompute
from roundpipe.devices.interface import StreamKind
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.monitor import THREAD_PREFIX, stall_report

CLOSED_S = 0.03  # the threads of a model that was closed have ended by then, without a garbage collection
WAIT_S = 30.0  # for what must come; a test that waits longer is stuck
WIDTH = 4
NUM_MICROBATCH = 3
# F0: layer 0, F1: layer 1, FB2: layers 2 and 3, B3: layers 0 and 1.
PLAN = ModelExecutePlan([range(0, 1), range(1, 2)], [range(2, 4), range(0, 2)])
RECOMPUTED, FUSED = (0, 1), (2, 3)
DROPPED = "gradients gathered since the last optimizer step were dropped"


class Boom(Exception):
    """Raised by traps only."""


def _nothing() -> None: ...


class Traps:
    """Passed by layers, losses and copies; raises where it is told to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed: Counter[tuple[str, Any]] = Counter()
        self._target: tuple[str, Any, int] | None = None
        self._action: Callable[[], object] = _nothing
        self.fired = threading.Event()

    def arm(self, point: str, where: Any, count: int, error: BaseException) -> None:
        def throw() -> None:
            raise error

        self.act(point, where, count, throw)

    def act(self, point: str, where: Any, count: int, action: Callable[[], object]) -> None:
        """Run `action` when the point is passed for the `count`-th time from now on, counted from 0."""
        with self._lock:
            self._passed.clear()
            self._target, self._action = (point, where, count), action
            self.fired.clear()

    def disarm(self) -> None:
        with self._lock:
            self._target = None

    def passes(self) -> Counter[tuple[str, Any]]:
        with self._lock:
            return Counter(self._passed)

    def reset(self) -> None:
        with self._lock:
            self._passed.clear()

    def pass_by(self, point: str, where: Any) -> None:
        with self._lock:
            count = self._passed[point, where]
            self._passed[point, where] += 1
            if self._target != (point, where, count):
                return
            # Fires once and keeps no exception: its frames hold graphs that hold these traps, an uncollectable cycle.
            action, self._action, self._target = self._action, _nothing, None
        self.fired.set()
        action()

    def __deepcopy__(self, memo: Any) -> Traps:
        return Traps()


class _BackwardTrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, traps: Traps, where: Any) -> Tensor:
        ctx.traps, ctx.where = traps, where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.traps.pass_by("backward", ctx.where)
        return gradients[0], None, None


class TrapLayer(nn.Module):
    """Linear, batch norm where asked, tanh; a tuple travels from every layer but the last."""

    def __init__(self, layer_id: int, traps: Traps, *, batch_norm: bool = False, is_last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
        self.layer_id, self.traps, self.is_last = layer_id, traps, is_last

    def forward(self, value: Any) -> Any:
        x, steps = value if isinstance(value, tuple) else (value, torch.zeros(()))
        self.traps.pass_by("recompute" if doing_recompute() else "forward", self.layer_id)
        y = torch.tanh(self.norm(self.linear(x)))
        y = _BackwardTrap.apply(y, self.traps, self.layer_id)
        return y if self.is_last else (y, steps + 1)


def build_model(traps: Traps, *, batch_norm: bool = True, seed: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            TrapLayer(0, traps),
            TrapLayer(1, traps, batch_norm=batch_norm),
            TrapLayer(2, traps, batch_norm=batch_norm),
            TrapLayer(3, traps, is_last=True),
        )


def batch(seed: int, rows: int = 2 * NUM_MICROBATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def mse(output: Tensor, label: Tensor) -> Tensor:
    return (output - label).square().mean()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, foreach=False)


class Bench:
    """A wrapped model with its optimizer, its traps, and the plain model that goes the same way without failing."""

    def __init__(self, num_devices: int, grain: str = "stage", *, plan: ModelExecutePlan | None = PLAN) -> None:
        self.traps = Traps()
        self.reference = build_model(Traps())
        self.reference_optimizer = make_optimizer(self.reference.parameters())
        self.config = RoundPipeRunConfig(
            num_microbatch=NUM_MICROBATCH, loss_reduction="sum", recompute_grain=grain, execute_plan=plan
        )
        self.model = RoundPipe(
            build_model(self.traps), devices=["cpu"] * num_devices, model_run_config=self.config, name="bench"
        )
        self.optimizer = make_optimizer(self.model.optim_parameters())

    def loss_fn(self, output: Tensor, label: Tensor) -> Tensor:
        self.traps.pass_by("loss_fn", None)
        loss = mse(output, label)
        return _BackwardTrap.apply(loss, self.traps, "loss")

    def step_fn(self) -> None:
        self.traps.pass_by("step_fn", None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    # Ours.

    def call(self, seed: int, **options: Any) -> Any:
        x, label = batch(seed)
        return self.model.forward_backward((x,), label=label, loss_fn=self.loss_fn, **options)

    def step(self, is_async: bool = False) -> None:
        self.model.step(self.step_fn, is_async)

    # The reference.

    def call_reference(self, seed: int) -> Tensor:
        x, label = batch(seed)
        loss: Tensor = call_reference(self.reference, (x,), {}, label, mse, NUM_MICROBATCH).loss
        return loss

    def step_reference(self) -> None:
        self.reference_optimizer.step()
        self.reference_optimizer.zero_grad()

    def failing(self, point: str, where: Any, count: int, error: BaseException) -> Callable[[], object]:
        """A call that meets `error` at that point."""

        def call() -> None:
            self.traps.arm(point, where, count, error)
            self.call(11)

        return call

    # Both, with comparison.

    def train_right(self, seed: int) -> None:
        """One iteration on both sides; all that can be compared is the same afterwards."""
        loss, expected = self.call(seed), self.call_reference(seed)
        assert_same(loss, expected, f"loss of batch {seed}")
        self.step()
        self.step_reference()
        self.assert_state_right()

    def assert_state_right(self) -> None:
        self.model.synchronize()
        assert_same(dict(self.model.state_dict()), dict(self.reference.state_dict()), "weights and buffers")
        assert_same(
            [p.detach() for p in self.model.optim_parameters()],
            [p.detach() for p in self.reference.parameters()],
            "optimizer's copies",
        )
        assert_same(
            self.optimizer.state_dict()["state"], self.reference_optimizer.state_dict()["state"], "optimizer state"
        )

    def snapshot(self) -> dict[str, Any]:
        """Weights, buffers, optimizer's copies and state, bit for bit."""
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "masters": [p.detach() for p in self.model.optim_parameters()],
                "optimizer": self.optimizer.state_dict()["state"],
            }
        )

    def close(self) -> None:
        self.model.close()


@contextlib.contextmanager
def bench(num_devices: int, grain: str = "stage", **options: Any) -> Iterator[Bench]:
    made = Bench(num_devices, grain, **options)
    try:
        yield made
    finally:
        made.close()


def check_failure(
    made: Bench,
    error: BaseException,
    call: Callable[[], object],
    *,
    note: Sequence[str] = (),
    drops_gradients: bool = True,
) -> BaseException:
    """The armed fault reaches the caller as it is; state is as before, and the next call is right.

    On entry the model has trained for an iteration. A good call before the failing one gathers gradients that the
    failure must drop (its batch norm statistics stay).
    """
    made.call(10)
    made.call_reference(10)
    made.model.synchronize()
    made.reference_optimizer.zero_grad()
    before = made.snapshot()

    caught = raised_by(call, made.model.synchronize)
    assert caught is error, f"got {caught!r} with {notes_of(caught)}"
    text = "\n".join(notes_of(caught))
    for part in note:
        assert part in text, f"{part!r} is not in the notes:\n{text}"
    assert (DROPPED in text) == drops_gradients, text

    made.model.synchronize()
    assert_same(made.snapshot(), before, "after the failure")
    if drops_gradients:
        assert [name for name, p in made.model.named_parameters() if p.grad is not None] == []
    else:
        made.model.zero_grad()
    made.train_right(12)
    return caught


def raised_by(*calls: Callable[[], object]) -> BaseException:
    """The exception of the first call that raises; failures of the background surface in the second."""
    for call in calls:
        caught = caught_from(call)
        if caught is not None:
            return caught
    pytest.fail("nothing was raised")


def caught_from(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


class Gate:
    """An action for a trap: sets `reached`, then blocks the thread until `opened` is set."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.reached, self.opened, self._error = threading.Event(), threading.Event(), error

    def __call__(self) -> None:
        self.reached.set()
        wait_for(self.opened)
        if self._error is not None:
            raise self._error


def held_backward(made: Bench, seed: int, error: BaseException | None = None) -> Gate:
    """A call whose last backward waits before it goes on, or fails; the call itself has returned."""
    gate = Gate(error)
    made.traps.act("backward", 0, 0, gate)
    made.call(seed)
    wait_for(gate.reached)
    made.traps.disarm()
    return gate


# Copies.


@contextlib.contextmanager
def watched_copies(traps: Traps, monkeypatch: pytest.MonkeyPatch, *, late: bool = False) -> Iterator[None]:
    """Every copy of a virtual device passes the point ("copy", kind of stream), when queued or, `late`, when run."""
    real_copy = VirtualDevice.copy

    def copy_now(self: VirtualDevice, destination: Tensor, source: Tensor, stream: StreamKind) -> None:
        traps.pass_by("copy", stream)
        real_copy(self, destination, source, stream)

    def copy_late(self: VirtualDevice, destination: Tensor, source: Tensor, stream: StreamKind) -> None:
        self._streams[stream].push(lambda: traps.pass_by("copy", stream))
        real_copy(self, destination, source, stream)

    with monkeypatch.context() as patch:
        patch.setattr(VirtualDevice, "copy", copy_late if late else copy_now)
        yield


# Threads and processes.


_left_behind: set[threading.Thread] = set()  # reported by the test that left them, and by no later one


def our_threads() -> list[str]:
    """The names of the library's threads that run now, without those that an earlier test left behind."""
    own = (thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX))
    return sorted(thread.name for thread in own if thread not in _left_behind)


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Polls a condition that no event signals, such as the end of a thread."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.002)


def wait_for_no_threads() -> None:
    """Waits until the library's threads have ended; collects garbage, since a thread may keep its model alive."""
    began = time.monotonic()
    while our_threads():
        if time.monotonic() > began + WAIT_S:
            _left_behind.update(threading.enumerate())
            pytest.fail(stall_report("threads to end", WAIT_S, {}))
        if time.monotonic() > began + CLOSED_S:
            gc.collect()
        time.sleep(0.002)


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "the event never came"


class Background:
    """Runs a function on a new thread; `result()` waits for it and raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._value: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the thread is stuck"
        if self._error is not None:
            raise self._error
        return self._value


PREAMBLE = """
import logging, signal, sys, threading, time
import torch
from torch import nn
from helpers_faults import *
torch.set_num_threads(1)
# Benches normalise over microbatches and add means, on purpose. The tests look for other messages.
logging.getLogger("roundpipe").addFilter(lambda record: "microbatches" not in record.msg)
"""


def run_script(body: str, timeout_s: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new process, with this module imported."""
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PREAMBLE + body],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        cwd=tests,
    )
