"""The first call on a device with a memory limit is probed; a call that runs out of memory is planned smaller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, batch, seeded
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, clip_grad_norm_
from roundpipe.api import planner
from roundpipe.devices import MemoryUse
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.optim import Adam
from roundpipe.optim.stepper import Stepper
from roundpipe.plan import ModelProfile, StageTask, TaskKind
from roundpipe.plan.overlap import STALE, Overlap, UpdateTiming, Wave
from roundpipe.runtime import stage
from roundpipe.runtime.run import Run
from roundpipe.runtime.stage import StageRunner

NUM_LAYERS, NUM_MICROBATCH, WIDTH = 6, 3, 8


class Layer(nn.Module):
    """Draws, counts its forwards, writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.dropout(self.norm(self.linear(x)))


def make_net() -> nn.Sequential:
    return nn.Sequential(*[Layer() for _ in range(NUM_LAYERS)])


def make_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


def make_linears() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    return (output - label).pow(2).mean()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every virtual device has a limit and counts; each look at the count finds a little more in use."""
    count = 0

    def memory_use(self: VirtualDevice) -> MemoryUse:
        nonlocal count
        count += 1000
        return MemoryUse(count, count)

    monkeypatch.setattr(VirtualDevice, "memory_limit_bytes", lambda self: 10**6)
    monkeypatch.setattr(VirtualDevice, "memory_use", memory_use)


@pytest.fixture
def wrapped() -> Iterator[Callable[..., RoundPipe]]:
    models = []

    def wrap(net: nn.Module, num_devices: int = 1, **options: Any) -> RoundPipe:
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
        models.append(RoundPipe(net, devices=["cpu"] * num_devices, model_run_config=config, **options))
        return models[-1]

    yield wrap
    for model in models:
        model.close()


@pytest.fixture
def tasks_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Run, StageTask]]:
    real, seen = StageRunner.run, []

    def run(self: StageRunner, run: Run, task: StageTask) -> None:
        seen.append((run, task))
        real(self, run, task)

    monkeypatch.setattr(StageRunner, "run", run)
    return seen


def train(model: RoundPipe, steps: int = 3) -> list[Any]:
    """Losses, gradients, buffers and the state of torch's generator after each call."""
    torch.manual_seed(7)
    seen: list[Any] = []
    for seed in range(steps):
        x, label = batch(6, WIDTH, seed=seed), batch(6, WIDTH, seed=seed + 100)
        loss = model.forward_backward(input_args=(x,), label=label, loss_fn=loss_fn)
        model.synchronize()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen.append((loss, gradients, [b.clone() for b in model.buffers()], torch.get_rng_state()))
        model.zero_grad()
    return seen


def counts(net: nn.Module) -> list[int]:
    return [layer.count for layer in net.children() if isinstance(layer, Layer)]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_probe_leaves_no_trace(
    num_devices: int,
    wrapped: Callable[..., RoundPipe],
    tasks_run: list[tuple[Run, StageTask]],
    request: pytest.FixtureRequest,
) -> None:
    plain_net, limited_net = seeded(make_net), seeded(make_net)
    expected = train(wrapped(plain_net, num_devices))
    assert not any(run.is_probe for run, _ in tasks_run)
    request.getfixturevalue("limited")
    assert_same(train(wrapped(limited_net, num_devices)), expected)
    assert counts(limited_net) == counts(plain_net)
    probes = {run.number for run, _ in tasks_run if run.is_probe}
    assert len(probes) == 1, "once for each number of microbatches"


@pytest.mark.usefixtures("limited")
def test_the_first_call_has_a_good_plan(
    wrapped: Callable[..., RoundPipe], tasks_run: list[tuple[Run, StageTask]]
) -> None:
    model = wrapped(seeded(make_net))
    train(model, steps=1)
    tasks = [task for run, task in tasks_run if not run.is_probe]
    assert [task.kind for task in tasks] == [TaskKind.FUSED], "everything fits, so nothing is recomputed"


@pytest.mark.usefixtures("limited")
def test_a_failing_probe_is_a_failing_call(wrapped: Callable[..., RoundPipe]) -> None:
    model = wrapped(seeded(make_net))
    with pytest.raises(ZeroDivisionError) as caught:
        model.forward_backward(input_args=(batch(6, WIDTH, seed=0),), label=None, loss_fn=lambda output, label: 1 / 0)
    assert any("loss_fn" in note for note in caught.value.__notes__)
    train(model, steps=1)


@pytest.mark.usefixtures("limited")
def test_forward_with_grad_is_probed_without_a_loss(
    wrapped: Callable[..., RoundPipe], tasks_run: list[tuple[Run, StageTask]]
) -> None:
    model, net = wrapped(seeded(make_linear)), seeded(make_linear)
    x = batch(6, WIDTH, seed=0)
    model(x).sum().backward()
    for part in x.tensor_split(NUM_MICROBATCH):
        net(part).sum().backward()
    model.synchronize()
    assert_same_grads(model, net)
    assert {task.kind for run, task in tasks_run if run.is_probe} == {TaskKind.FORWARD}


class TooLarge:
    """Lets fused tasks of more than `most` layers run out of memory, in the given microbatch's backward or at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.refused = 0
        real = StageRunner.run

        def run(runner: StageRunner, run: Run, task: StageTask) -> None:
            if task.kind is TaskKind.FUSED and len(task.layers) > most:
                self.refused += 1
                raise torch.OutOfMemoryError(f"{len(task.layers)} layers are too many. Buy a larger one.")
            real(runner, run, task)

        monkeypatch.setattr(StageRunner, "run", run)


@pytest.mark.parametrize("has_limit", [False, True])
def test_a_call_that_does_not_fit_is_planned_smaller(
    has_limit: bool,
    wrapped: Callable[..., RoundPipe],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    expected = train(wrapped(seeded(make_net)))
    if has_limit:
        request.getfixturevalue("limited")
    too_large = TooLarge(monkeypatch, most=2)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        assert_same(train(wrapped(seeded(make_net))), expected)
    assert too_large.refused > 0
    warnings = [record.getMessage() for record in caplog.records if "smaller plan" in record.getMessage()]
    assert len(warnings) == too_large.refused, "once for each try, and never again once a plan fits"
    assert "layers are too many" in warnings[0]


class TooManyAtOnce:
    """Lets tasks of that kind with more than one layer run out of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: TaskKind) -> None:
        self.refused = 0
        real = StageRunner.run

        def run(runner: StageRunner, run: Run, task: StageTask) -> None:
            if task.kind is kind and len(task.layers) > 1:
                self.refused += 1
                raise torch.OutOfMemoryError("too many")
            real(runner, run, task)

        monkeypatch.setattr(StageRunner, "run", run)


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_forward_that_does_not_fit_is_planned_smaller(
    with_grad: bool, wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, net, x = wrapped(seeded(make_linears)), seeded(make_linears), batch(6, WIDTH, seed=0)
    too_many = TooManyAtOnce(monkeypatch, TaskKind.FORWARD)
    with torch.set_grad_enabled(with_grad):
        output = model(x)
    expected = torch.cat([net(part) for part in x.tensor_split(NUM_MICROBATCH)])
    assert_same(output.detach(), expected.detach())
    assert too_many.refused > 0


def test_a_backward_that_does_not_fit_is_planned_smaller_the_next_time(
    wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = wrapped(seeded(make_linears)), batch(6, WIDTH, seed=0)
    too_many = TooManyAtOnce(monkeypatch, TaskKind.BACKWARD)
    with pytest.raises(torch.OutOfMemoryError):
        model(x).sum().backward()
    refused = too_many.refused
    model(x).sum().backward()
    assert too_many.refused == refused


def test_gradients_of_earlier_calls_are_not_lost_in_silence(
    wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trying again would drop what was gathered before: the caller hears of it, and the next call fits."""
    model, x = wrapped(seeded(make_net)), batch(6, WIDTH, seed=0)
    model.forward_backward(input_args=(x,), label=x, loss_fn=loss_fn)
    too_large = TooLarge(monkeypatch, most=2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model.forward_backward(input_args=(x,), label=x, loss_fn=loss_fn)
    assert any("gradients gathered since the last optimizer step were dropped" in n for n in caught.value.__notes__)
    before = too_large.refused
    model.forward_backward(input_args=(x,), label=x, loss_fn=loss_fn)
    assert too_large.refused == before


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_call_is_repeated_while_the_step_before_it_has_not_taken_its_gradients(
    staleness: int, wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those gradients are not of this call's generation: nothing of them is lost."""
    began, failed = threading.Event(), threading.Event()
    real_step, real_run = Stepper._run, StageRunner.run
    is_armed = False

    def step(self: Stepper, *args: Any) -> None:
        if is_armed:
            began.set()
            assert failed.wait(60)
        real_step(self, *args)

    def run(runner: StageRunner, run: Run, task: StageTask) -> None:
        if is_armed and not failed.is_set():
            assert began.wait(60)
            failed.set()
            raise torch.OutOfMemoryError("once")
        real_run(runner, run, task)

    monkeypatch.setattr(Stepper, "_run", step)
    monkeypatch.setattr(StageRunner, "run", run)

    def train(fails: bool) -> list[Any]:
        nonlocal is_armed
        model = wrapped(seeded(make_linears), staleness=staleness)
        optimizer = Adam(list(model.optim_parameters()), lr=0.01)
        losses = []
        for seed in range(4):
            x = batch(6, WIDTH, seed=seed)
            losses.append(model.forward_backward(input_args=(x,), label=x, loss_fn=loss_fn))
            if fails and seed == 1:
                model.synchronize()  # all gradients have landed, and none was taken
                is_armed = True
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        model.synchronize()
        is_armed = False
        return [*losses, dict(model.state_dict())]

    expected = train(fails=False)
    assert_same(train(fails=True), expected)
    assert failed.is_set()


@pytest.mark.usefixtures("limited")
def test_a_wave_that_does_not_fit_becomes_smaller_before_the_plan_does(
    wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wave holds the activations of several microbatches: it is the first thing to give up."""
    monkeypatch.setattr(planner, "measured_rate", lambda: 1e6)
    forecast_step = planner.forecast_step

    def with_wave(tasks: Any, profile: ModelProfile, update_s: Any, grain: Any, timing: UpdateTiming = STALE) -> Any:
        overlap, seconds = forecast_step(tasks, profile, update_s, grain, timing)
        has_all_memory = (profile.memory_limit_bytes or 0) >= 10**6
        wave = Wave(NUM_MICROBATCH, 4 if has_all_memory else 2)
        return (Overlap(1, wave) if timing.by_layer else overlap), seconds

    monkeypatch.setattr(planner, "forecast_step", with_wave)
    waves: list[Wave] = []
    real = stage._Task._begin_wave

    def begin_wave(task: Any, microbatches: range) -> None:
        waves.append(task._run.overlap.wave)
        if len(waves) == 1:
            raise torch.OutOfMemoryError("the wave is too large")
        real(task, microbatches)

    monkeypatch.setattr(stage._Task, "_begin_wave", begin_wave)

    def train(by_layer: bool) -> list[Any]:
        model = wrapped(seeded(make_linears), staleness=0 if by_layer else 1)
        optimizer = Adam(list(model.optim_parameters()), lr=0.01)
        losses = []
        for seed in range(8):
            x = batch(6, WIDTH, seed=seed)
            losses.append(model.forward_backward(input_args=(x,), label=x, loss_fn=loss_fn))
            model.step(lambda: (clip_grad_norm_(model, 0.1), optimizer.step(), optimizer.zero_grad()), by_layer)
        return [*losses, dict(model.state_dict())]

    expected = train(by_layer=False)
    assert not waves
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        assert_same(train(by_layer=True), expected)
    assert sum("smaller plan" in record.getMessage() for record in caplog.records) == 1
    assert waves[:2] == [Wave(NUM_MICROBATCH, 4), Wave(NUM_MICROBATCH, 2)]


def test_what_never_fits_is_raised(wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wrapped(seeded(make_net)), batch(6, WIDTH, seed=0)
    too_large = TooLarge(monkeypatch, most=0)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="1 layers are too many"):
            model.forward_backward(input_args=(x,), label=x, loss_fn=loss_fn)
    assert too_large.refused < 30


def test_a_plan_of_the_users_is_never_replaced(
    wrapped: Callable[..., RoundPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = wrapped(seeded(make_net)), batch(6, WIDTH, seed=0)
    TooLarge(monkeypatch, most=2)
    config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(0, 3)], [range(3, 6), range(0, 3)]))
    with pytest.raises(torch.OutOfMemoryError, match="3 layers"):
        model.forward_backward(input_args=(x,), label=x, loss_fn=loss_fn, run_config=config)
