"""Runs that a test executes task by task on its own thread, and a log of what virtual devices are asked to do.

`Recorder` logs operations of all virtual devices; `held_call` makes a Run through the public API and keeps the workers
from executing it. Everything here that depends on how the runtime's classes are built is in this file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import Background, caught_from, wait_for
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices.interface import Event, StreamKind
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.plan import StageTask, deal
from roundpipe.runtime.pool import DevicePool
from roundpipe.runtime.run import Run
from roundpipe.runtime.stage import StageRunner
from roundpipe.runtime.weights import LayerImages

WIDTH = 4
NUM_MICROBATCH = 3
# F0: layers 0 and 1. FB1: layer 2. B2: layers 0 and 1.
PLAN = ModelExecutePlan([range(0, 2)], [range(2, 3), range(0, 2)])


class Recorder:
    """The log of one test. An event is named by its stream and a number: `weights up 1`.

    `copy weights up`, `record weights up 1`, `compute waits for weights up 1`, `poison weights up`, `lend to compute`
    are operations of devices; layers and tests add lines of their own with `note`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.copies: list[tuple[Tensor, Tensor, StreamKind]] = []  # destination, source, stream
        self._names: list[tuple[Event, str]] = []
        self._patch(monkeypatch)

    def note(self, line: str) -> None:
        self.lines.append(line)

    def clear(self) -> None:
        self.lines.clear()
        self.copies.clear()

    def name(self, event: Event) -> str:
        return next(name for known, name in self._names if known is event)

    def index(self, line: str, occurrence: int = 0) -> int:
        found = [index for index, each in enumerate(self.lines) if each == line]
        assert len(found) > occurrence, f"{line!r} occurs {len(found)} times in\n" + "\n".join(self.lines)
        return found[occurrence]

    def starting(self, prefix: str) -> list[str]:
        return [line for line in self.lines if line.startswith(prefix)]

    def assert_order(self, *lines: str) -> None:
        """Each line follows the one before it; the first occurrence after it counts."""
        rest = iter(self.lines)
        for line in lines:
            assert line in rest, f"{line!r} does not follow in this order: {lines}; the log:\n" + "\n".join(self.lines)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_copy, real_record = VirtualDevice.copy, VirtualDevice.record
        real_wait, real_poison = VirtualDevice.stream_wait, VirtualDevice.poison

        def copy(device: VirtualDevice, destination: Tensor, source: Tensor, stream: StreamKind) -> None:
            self.note(f"copy {stream.value}")
            self.copies.append((destination, source, stream))
            real_copy(device, destination, source, stream)

        def record(device: VirtualDevice, stream: StreamKind) -> Event:
            event = real_record(device, stream)
            count = sum(name.startswith(f"{stream.value} ") for _, name in self._names)
            self._names.append((event, f"{stream.value} {count}"))
            self.note(f"record {stream.value} {count}")
            return event

        def stream_wait(device: VirtualDevice, stream: StreamKind, event: Event) -> None:
            self.note(f"{stream.value} waits for {self.name(event)}")
            real_wait(device, stream, event)

        def poison(device: VirtualDevice, buffer: Tensor, stream: StreamKind) -> None:
            self.note(f"poison {stream.value}")
            real_poison(device, buffer, stream)

        def lend(device: VirtualDevice, tensor: Tensor, stream: StreamKind) -> None:
            self.note(f"lend to {stream.value}")

        monkeypatch.setattr(VirtualDevice, "copy", copy)
        monkeypatch.setattr(VirtualDevice, "lend", lend)
        monkeypatch.setattr(VirtualDevice, "record", record)
        monkeypatch.setattr(VirtualDevice, "stream_wait", stream_wait)
        monkeypatch.setattr(VirtualDevice, "poison", poison)


class _LoggedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None], line: str) -> Tensor:
        ctx.note, ctx.line = note, line
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.note(ctx.line)
        return gradients[0], None, None


class LoggedLayer(nn.Module):
    """A linear layer that notes `forward 1` and `backward 1` for layer 1."""

    def __init__(self, layer_id: int, note: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layer_id, self.note = layer_id, note

    def forward(self, x: Tensor) -> Tensor:
        self.note(f"forward {self.layer_id}")
        output: Tensor = _LoggedBackward.apply(torch.tanh(self.linear(x)), self.note, f"backward {self.layer_id}")
        return output


def logged_model(
    note: Callable[[str], None], num_devices: int = 1, grain: str = "stage", plan: ModelExecutePlan = PLAN
) -> RoundPipe:
    torch.manual_seed(3)
    module = nn.Sequential(*[LoggedLayer(layer_id, note) for layer_id in range(3)])
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, recompute_grain=grain, execute_plan=plan)
    return RoundPipe(module, devices=["cpu"] * num_devices, model_run_config=config)


def squares(output: Tensor, label: Tensor) -> Tensor:
    return (output - label).square().sum()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, label = (torch.randn(2 * NUM_MICROBATCH, WIDTH, generator=generator) for _ in range(2))
    return x, label


def train(model: RoundPipe) -> Any:
    x, label = batch()
    return model.forward_backward((x,), label=label, loss_fn=squares)


class TestOver(Exception):
    """Ends a held call."""

    __test__ = False


@contextlib.contextmanager
def held_call(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> Iterator[Run]:
    """The Run of a call that is under way on another thread; no worker executes its tasks. Fails it at the end."""
    runs: list[Run] = []
    submitted = threading.Event()

    def keep(pool: DevicePool, run: Run) -> None:
        run.workers = deal(run.tasks, 0, pool.num_devices)
        runs.append(run)
        submitted.set()

    with monkeypatch.context() as patch:
        patch.setattr(DevicePool, "submit", keep)
        calling = Background(call)
        wait_for(submitted)
    run = runs[0]
    try:
        yield run
    finally:
        run.fail(TestOver())  # ignored where the test has failed the run already
        for _ in run.tasks:
            run.task_done()
        caught = caught_from(calling.result)
        assert caught is None or caught is run.failure, repr(caught)


class KeptLandings:
    """In place of the landing thread: keeps what is submitted."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []

    def submit(self, landing: Any) -> None:
        self.submitted.append(landing)


class TaskRunner:
    """One device with its stage runner, whose landings and prefetches a test looks at."""

    def __init__(self, index: int = 0) -> None:
        self.device = VirtualDevice(index)
        self.images = LayerImages(self.device)
        self.landings = KeptLandings()
        self.prefetches: list[bool] = []
        self._runner = StageRunner(self.device, self.landings, self.images, self.prefetches.append)  # type: ignore[arg-type]

    def run(self, run: Run, task: StageTask) -> None:
        self._runner.run(run, task)
        self.images.finish(run, task)
