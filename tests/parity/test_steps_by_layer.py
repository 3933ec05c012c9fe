"""`staleness=0`: a step returns at once, and everything equals `is_async=False` to the last bit.

Every test trains twice: with steps that wait, and with steps that publish layer by layer.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import WAIT_S, Models, assert_same, batch, mlp, mse, seeded
from roundpipe import (
    AutoRoundPipe,
    GradScaler,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    checkpoint,
    clip_grad_norm_,
    optim,
)
from roundpipe.api.planner import Planner
from roundpipe.errors import ArgumentTypeError, ConfigError, UsageError
from roundpipe.optim.native.kernel import OnePassKernel
from roundpipe.plan.overlap import Overlap, Wave
from roundpipe.runtime.mailbox import StageMail

WIDTH, ROWS, NUM_MICROBATCH, NUM_LAYERS, NUM_STEPS = 13, 8, 3, 4, 5
PLANS = {
    "chosen": None,
    "fused": ModelExecutePlan([], [range(0, 4)]),
    "stages": ModelExecutePlan([range(0, 1), range(1, 2)], [range(2, 4), range(1, 2), range(0, 1)]),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SLOW = pytest.mark.slow

Optimizer = torch.optim.Optimizer
StepFn = Callable[[RoundPipe, Optimizer], None]


def plainly(model: RoundPipe, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: RoundPipe, optimizer: Optimizer) -> None:
    clip_grad_norm_(model, 0.01)
    plainly(model, optimizer)


def adam(params: list[nn.Parameter]) -> Optimizer:
    return optim.AdamW(params, lr=1e-2)


def data(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return batch(ROWS, WIDTH, seed=2 * seed).to(dtype), batch(ROWS, WIDTH, seed=2 * seed + 1).to(dtype)


def float_mse(output: Tensor, label: Tensor) -> Tensor:
    return mse(output.float(), label.float())


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(params=[1, 3, pytest.param(2, marks=SLOW), pytest.param(4, marks=SLOW)], ids=lambda n: f"{n}dev")
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the layers that were published while their step function was still running."""
    from roundpipe.store.update import LayerUpdate

    seen: list[int] = []
    real = LayerUpdate.publish_if_complete

    def publish(self: LayerUpdate) -> None:
        before = self._is_published
        real(self)
        if self._is_published and not before:
            seen.append(self._layer_id)

    monkeypatch.setattr(LayerUpdate, "publish_if_complete", publish)
    yield seen
    seen.clear()


def everything(
    models: Models,
    module: nn.Module,
    num_devices: int,
    *,
    by_layer: bool,
    dtype: torch.dtype = torch.bfloat16,
    step_fn: StepFn = clipped,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer] = adam,
    plan: str = "chosen",
    grain: str = "stage",
    calls: int = 1,
    between: Callable[[RoundPipe], Any] = lambda model: None,
    after_call: Callable[[RoundPipe], None] = lambda model: None,
    loss_fn: Callable[[Any, Any], Any] = float_mse,
) -> list[Any]:
    """Losses, what `between` sees after each step, weights and the optimizer's state of a training."""
    torch.manual_seed(5)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLANS[plan], recompute_grain=grain)
    model = models.wrap_copy(
        copy.deepcopy(module).to(dtype),
        num_devices,
        optim_dtype=torch.float32,
        model_run_config=config,
        staleness=0 if by_layer else 1,
    )
    optimizer = make_optimizer(list(model.optim_parameters()))
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        for call in range(calls):
            x, y = data(10 * step + call, dtype)
            seen.append(model.forward_backward((x,), label=y, loss_fn=loss_fn))
            after_call(model)
        model.step(lambda: step_fn(model, optimizer), is_async=by_layer)
        seen.append(between(model))
    weights = copy.deepcopy(dict(model.state_dict()))
    return [*seen, weights, optimizer.state_dict()["state"]]


def check(models: Models, module: nn.Module, num_devices: int, **options: Any) -> None:
    expected = everything(models, module, num_devices, by_layer=False, **options)
    assert_same(everything(models, module, num_devices, by_layer=True, **options), expected)


# What is trained.


@pytest.mark.parametrize("step_fn", [plainly, clipped])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("grain", ["stage", pytest.param("layer", marks=SLOW)])
def test_every_plan_and_precision(
    models: Models, num_devices: int, dtype: torch.dtype, step_fn: StepFn, plan: str, grain: str, early: list[int]
) -> None:
    module = seeded(lambda: mlp(width=WIDTH))
    check(models, module, num_devices, dtype=dtype, step_fn=step_fn, plan=plan, grain=grain)
    assert sorted(early) == sorted([*range(NUM_LAYERS)] * (NUM_STEPS - 1)), "in every step but the first"


@pytest.mark.parametrize("overlap", [Overlap(1, Wave(3, 2)), Overlap(3, Wave(2, 4)), Overlap(2)], ids=str)
@pytest.mark.parametrize("plan", ["fused", "stages"])
def test_every_wave(
    models: Models, dtype: torch.dtype, overlap: Overlap, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "overlap", lambda *args: overlap)
    check(models, seeded(lambda: mlp(width=WIDTH)), 1, dtype=dtype, plan=plan)


@pytest.mark.parametrize("kind", [optim.Adam, optim.Lion, optim.SGD], ids=lambda kind: kind.__name__)
def test_every_rule(models: Models, num_devices: int, kind: Any, early: list[int]) -> None:
    check(models, seeded(lambda: mlp(width=WIDTH)), num_devices, make_optimizer=lambda params: kind(params, lr=1e-2))
    assert early


def test_accumulation(models: Models, num_devices: int, dtype: torch.dtype) -> None:
    check(models, seeded(lambda: mlp(width=WIDTH)), num_devices, dtype=dtype, calls=3)


def test_dropout(models: Models, num_devices: int) -> None:
    def build() -> nn.Module:
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(NUM_LAYERS))
        return nn.Sequential(*layers)

    check(models, seeded(build), num_devices, plan="stages")


def test_batch_norm(models: Models, num_devices: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)))

    check(models, seeded(build), num_devices, dtype=torch.float32)


def test_tied_and_frozen_layers(models: Models, num_devices: int, dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        made = mlp(width=WIDTH)
        made[3][0].weight = made[0][0].weight
        made[1].requires_grad_(False)
        made[2][0].bias.requires_grad_(False)
        return made

    check(models, seeded(build), num_devices, dtype=dtype)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def test_adapters(models: Models, num_devices: int) -> None:
    check(models, seeded(lambda: nn.Sequential(*(LowRank() for _ in range(NUM_LAYERS)))), num_devices)


def test_a_part_of_the_model_that_gets_no_gradient(models: Models, num_devices: int, early: list[int]) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.used(x))

    check(models, seeded(lambda: nn.Sequential(*(Skips() for _ in range(NUM_LAYERS)))), num_devices)
    assert early


# What the step function does.


def test_loss_scaling_with_overflows(models: Models, num_devices: int) -> None:
    def run(by_layer: bool) -> list[Any]:
        scaler = GradScaler(init_scale=2.0**121, growth_interval=2)

        def step_fn(model: RoundPipe, optimizer: Optimizer) -> None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, 0.1)
            scaler.step(optimizer)
            optimizer.zero_grad()

        scales: list[float] = []

        def between(model: RoundPipe) -> None:
            scaler.update()
            scales.append(scaler.get_scale())

        module = seeded(lambda: mlp(width=WIDTH))
        options = {"step_fn": step_fn, "between": between, "loss_fn": lambda o, y: scaler.scale(1e3 * float_mse(o, y))}
        return [everything(models, module, num_devices, by_layer=by_layer, **options), scales]

    expected = run(by_layer=False)
    assert len(set(expected[1])) > 1, "the scale has changed"
    assert_same(run(by_layer=True), expected)


def in_halves(model: RoundPipe, optimizers: tuple[Optimizer, Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_two_optimizers_that_share_layers(models: Models, num_devices: int, early: list[int]) -> None:
    """A layer is published when both have updated their parameters of it."""

    class Pair:
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.both = optim.AdamW(params[::2], lr=1e-2), optim.SGD(params[1::2], lr=1e-2)

        def state_dict(self) -> dict[str, Any]:
            return {"state": [one.state_dict()["state"] for one in self.both]}

    check(
        *(models, seeded(lambda: mlp(width=WIDTH)), num_devices),
        make_optimizer=Pair,
        step_fn=lambda model, pair: in_halves(model, pair.both),
    )
    assert sorted(early) == sorted([*range(NUM_LAYERS)] * (NUM_STEPS - 1))


def clamping(model: RoundPipe, optimizer: Optimizer) -> None:
    optimizer.step()
    with torch.no_grad():
        for master in model.optim_parameters():
            master.clamp_(-0.05, 0.05)
    optimizer.zero_grad()


def averaging(model: RoundPipe, optimizer: Optimizer) -> None:
    optimizer.step()
    with torch.no_grad():
        for master in model.optim_parameters():
            master.lerp_(torch.zeros_like(master), 0.1)
    optimizer.zero_grad()


def clamping_what_is_small(model: RoundPipe, optimizer: Optimizer) -> None:
    """Changes nothing in the first steps; it might in a later one."""
    optimizer.step()
    with torch.no_grad():
        for master in model.optim_parameters():
            master.clamp_(-10, 10)
    optimizer.zero_grad()


@pytest.mark.parametrize("step_fn", [clamping, averaging, clamping_what_is_small])
def test_step_functions_that_write_masters_wait(
    models: Models,
    num_devices: int,
    dtype: torch.dtype,
    step_fn: StepFn,
    early: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        check(models, seeded(lambda: mlp(width=WIDTH)), num_devices, dtype=dtype, step_fn=step_fn)
    said = [record.getMessage() for record in caplog.records if "waits for every step" in record.getMessage()]
    assert len(said) == 1
    assert ".weight'" in said[0]
    assert not early


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_optimizers_of_torch_wait(models: Models, num_devices: int, kind: Any, early: list[int]) -> None:
    check(models, seeded(lambda: mlp(width=WIDTH)), num_devices, make_optimizer=lambda params: kind(params, lr=1e-2))
    assert not early


def norm_with_graph(master: nn.Parameter) -> Tensor:
    return master.norm().detach()


def norm_of_detached(master: nn.Parameter) -> Tensor:
    return master.detach().norm()


def norm_of_data(master: nn.Parameter) -> Tensor:
    return master.data.norm()


@torch.no_grad()
def norm_without_graph(master: nn.Parameter) -> Tensor:
    return master.norm()


@pytest.mark.parametrize("norm_of", [norm_with_graph, norm_of_detached, norm_of_data, norm_without_graph])
def test_reading_masters_after_the_update_changes_nothing(
    models: Models, num_devices: int, norm_of: Callable[[nn.Parameter], Tensor], early: list[int]
) -> None:
    norms: list[list[float]] = [[], []]

    def reading(at: int) -> StepFn:
        def step_fn(model: RoundPipe, optimizer: Optimizer) -> None:
            clipped(model, optimizer)
            norms[at] += [float(norm_of(master)) for master in model.optim_parameters()]

        return step_fn

    module = seeded(lambda: mlp(width=WIDTH))
    expected = everything(models, module, num_devices, by_layer=False, step_fn=reading(0))
    assert_same(everything(models, module, num_devices, by_layer=True, step_fn=reading(1)), expected)
    assert norms[0] == norms[1]
    assert early


def test_a_first_step_that_updates_nothing_decides_nothing(models: Models, early: list[int]) -> None:
    """As with a loss scaler, which skips steps while it looks for its scale."""

    def run(by_layer: bool) -> list[Any]:
        steps: list[None] = []

        def step_fn(model: RoundPipe, optimizer: Optimizer) -> None:
            steps.append(None)
            if len(steps) > 1:
                clamping(model, optimizer)
            optimizer.zero_grad()

        return everything(models, seeded(lambda: mlp(width=WIDTH)), 2, by_layer=by_layer, step_fn=step_fn)

    assert_same(run(by_layer=True), run(by_layer=False))
    assert not early


# What happens between steps.


def test_reading_weights_right_after_a_step(models: Models, num_devices: int, dtype: torch.dtype) -> None:
    module = seeded(lambda: mlp(width=WIDTH))

    def weights(model: RoundPipe) -> Any:
        return copy.deepcopy(dict(model.state_dict()))

    check(models, module, num_devices, dtype=dtype, between=weights)


def test_evaluation_right_after_a_step(models: Models, num_devices: int) -> None:
    def evaluate(model: RoundPipe) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = model(data(99, torch.bfloat16)[0])
        return outputs

    check(models, seeded(lambda: mlp(width=WIDTH)), num_devices, between=evaluate)


def test_masters_right_after_a_step(models: Models, num_devices: int) -> None:
    def masters(model: RoundPipe) -> list[Tensor]:
        return [master.detach().clone() for master in model.optim_parameters()]

    check(models, seeded(lambda: mlp(width=WIDTH)), num_devices, between=masters)


def test_both_kinds_of_steps_in_one_training(models: Models, num_devices: int) -> None:
    """A step that waits, and one of the user's own loop, between steps that return at once."""

    def run(by_layer: bool) -> list[Any]:
        module = seeded(lambda: mlp(width=WIDTH)).to(torch.bfloat16)
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
        options = {"optim_dtype": torch.float32, "staleness": 0 if by_layer else 1, "model_run_config": config}
        model = models.wrap_copy(module, num_devices, **options)
        optimizer = adam(list(model.optim_parameters()))
        seen: list[Any] = []
        for step in range(9):
            x, y = data(step, torch.bfloat16)
            seen.append(model.forward_backward((x,), label=y, loss_fn=float_mse))
            if step % 3 == 1:
                model.step(lambda: plainly(model, optimizer), is_async=False)
            elif step % 3 == 2:
                plainly(model, optimizer)
            else:
                model.step(lambda: plainly(model, optimizer), is_async=by_layer)
        return [*seen, copy.deepcopy(dict(model.state_dict())), optimizer.state_dict()["state"]]

    assert_same(run(by_layer=True), run(by_layer=False))


def test_checkpoints_between_steps_resume_exactly(models: Models, tmp_path: Path) -> None:
    module = seeded(lambda: mlp(width=WIDTH)).to(torch.bfloat16)

    def opened() -> tuple[RoundPipe, Optimizer]:
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
        model = models.wrap_copy(module, 2, optim_dtype=torch.float32, model_run_config=config, staleness=0)
        return model, adam(list(model.optim_parameters()))

    def train(model: RoundPipe, optimizer: Optimizer, *steps: int, saves_at: int | None = None) -> list[Tensor]:
        losses = []
        saves = []
        for step in steps:
            x, y = data(step, torch.bfloat16)
            losses.append(model.forward_backward((x,), label=y, loss_fn=float_mse))
            model.step(lambda: clipped(model, optimizer))
            if step == saves_at:
                saves.append(checkpoint.save(tmp_path / "saved", model, optimizer))
        for save in saves:  # it was written beside the steps
            save.wait()
        return losses

    model, optimizer = opened()
    expected = train(model, optimizer, *range(8), saves_at=3)
    weights = copy.deepcopy(dict(model.state_dict()))
    model, optimizer = opened()
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert_same(train(model, optimizer, *range(4, 8)), expected[4:])
    assert_same(dict(model.state_dict()), weights)


def test_a_model_whose_forward_runs_on_the_host(models: Models) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.inner: nn.Module = mlp(width=WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x * self.scale))

    def run(by_layer: bool) -> list[Any]:
        module = copy.deepcopy(built)
        staleness = 0 if by_layer else 1
        module.inner = models.wrap(module.inner, 2, optim_dtype=torch.float32, staleness=staleness)
        model = AutoRoundPipe(module, optim_dtype=torch.float32, staleness=staleness)
        optimizer = adam(list(model.optim_parameters()))
        seen: list[Any] = []
        for step in range(NUM_STEPS):
            x, y = data(step, torch.float32)
            loss = mse(model(x), y)
            loss.backward()
            seen.append(loss.detach())
            model.step(lambda: clipped(model, optimizer), is_async=by_layer)
        seen.append(copy.deepcopy(dict(model.state_dict())))
        model.close()
        return seen

    built = seeded(Around)
    assert_same(run(by_layer=True), run(by_layer=False))


# That it returns at once, and waits for one layer at a time.


@pytest.mark.parametrize("num_frozen", [0, 2])
def test_the_next_call_waits_for_the_update_of_each_layer(
    models: Models, num_frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel stops before each layer. The call then has run the layers before it, and no more.

    num_frozen: first layers that do not train, for which nothing waits.
    """
    module = seeded(lambda: mlp(width=WIDTH)).to(torch.bfloat16)
    for layer in module[:num_frozen]:
        layer.requires_grad_(False)
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=PLANS["fused"])
    model = models.wrap(module, 1, optim_dtype=torch.float32, model_run_config=config, staleness=0)
    optimizer = adam(list(model.optim_parameters()))
    turns, ran = [threading.Semaphore(0), threading.Semaphore(0)], []
    real = OnePassKernel.update
    is_held = False

    def update(self: OnePassKernel, parameters: Any) -> None:
        if is_held:
            turns[0].release()
            assert turns[1].acquire(timeout=30)
        real(self, parameters)

    monkeypatch.setattr(OnePassKernel, "update", update)
    for layer_id, layer in enumerate(module):
        layer.register_forward_pre_hook(lambda *_, i=layer_id: ran.append(i))

    def call(seed: int) -> Tensor:
        x, y = data(seed, torch.bfloat16)
        loss: Tensor = model.forward_backward((x,), label=y, loss_fn=float_mse)
        return loss

    for step in range(3):
        call(step)
        model.step(lambda: clipped(model, optimizer))
    call(3)
    model._engine.group.recovery.wait_for_runs()
    is_held = True
    model.step(lambda: clipped(model, optimizer))  # returns although no layer has been updated
    assert turns[0].acquire(timeout=30)
    ran.clear()
    after = threading.Thread(target=call, args=(4,), daemon=True)
    after.start()
    for layer_id in range(num_frozen, NUM_LAYERS):
        for _ in range(2000):
            if len(ran) == layer_id:
                break
            threading.Event().wait(0.005)
        threading.Event().wait(0.02)
        assert ran == [*range(layer_id)], "the layers that were updated, and no other"
        turns[1].release()
        assert layer_id == NUM_LAYERS - 1 or turns[0].acquire(timeout=30)
    after.join(30)
    assert not after.is_alive()
    is_held = False
    assert ran[:NUM_LAYERS] == [*range(NUM_LAYERS)]


@pytest.mark.parametrize("wrong", [2, -1, 7])
def test_a_staleness_that_does_not_exist(wrong: int) -> None:
    with pytest.raises(ConfigError, match=f"staleness must be 0 .* or 1 .*got {wrong}"):
        RoundPipe(mlp(), devices=["cpu"], staleness=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [True, 0.0, "0", None])
def test_a_staleness_of_another_type(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="staleness must be 0 or 1, got"):
        RoundPipe(mlp(), devices=["cpu"], staleness=wrong)


def test_a_backward_without_gradients_holds_back_no_later_step(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last layer trains. The backward of the others begins before their weights are there, and runs none."""
    has_begun, real = threading.Event(), StageMail.receive_gradients

    def receive_gradients(self: StageMail, microbatch: int) -> Any:
        has_begun.set()
        return real(self, microbatch)

    monkeypatch.setattr(StageMail, "receive_gradients", receive_gradients)
    plan = ModelExecutePlan([range(0, 3)], [range(3, 4), range(0, 3)])
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    model = models.wrap_copy(seeded(lambda: mlp(4, WIDTH)), 3, staleness=0, model_run_config=config)
    optimizer = adam(list(model.optim_parameters()))
    for name, param in model.model.named_parameters():
        param.requires_grad_(name.startswith("3"))

    def step_fn() -> None:
        plainly(model, optimizer)
        assert has_begun.wait(WAIT_S)

    for step in range(2):
        points, labels = data(step, torch.float32)
        model.forward_backward((points,), label=labels, loss_fn=mse)
        model.synchronize()
        if step:
            has_begun.clear()
        model.step(step_fn)
    model.forward_backward((points,), label=labels, loss_fn=mse)
    model.synchronize()
    assert [slot._uploads_due for slot in model._engine.store.slots] == [{}] * 4


@pytest.mark.parametrize("write", ["in place", "load_state_dict"])
def test_a_parameter_written_while_its_step_runs_is_refused(models: Models, num_devices: int, write: str) -> None:
    """The step would overwrite what was written, or not, depending on the time."""
    config = RoundPipeRunConfig(num_microbatch=2)
    model = models.wrap_copy(seeded(lambda: mlp(4, WIDTH)), num_devices, staleness=0, model_run_config=config)
    optimizer = adam(list(model.optim_parameters()))
    may_go_on = threading.Event()

    def step_fn() -> None:
        assert may_go_on.wait(WAIT_S)
        plainly(model, optimizer)

    points, labels = data(0, torch.float32)
    may_go_on.set()
    for _ in range(2):
        model.forward_backward((points,), label=labels, loss_fn=mse)
        model.step(step_fn)
    model.synchronize()
    weight = model.model[0][0].weight
    wanted = torch.ones_like(weight)
    model.forward_backward((points,), label=labels, loss_fn=mse)
    may_go_on.clear()
    model.step(step_fn)
    if write == "in place":
        with torch.no_grad():
            weight.copy_(wanted)
    else:
        model.model.load_state_dict({**model.model.state_dict(), "0.0.weight": wanted})
    may_go_on.set()
    with pytest.raises(UsageError, match=r"parameter '\d\.0\.(weight|bias)' was written while step\(\)"):
        model.synchronize()
    model.synchronize()
    assert torch.equal(weight, wanted)
    model.forward_backward((points,), label=labels, loss_fn=mse)
    model.step(step_fn)
    model.synchronize()
    assert (weight - wanted).abs().max() < 0.1  # one small update of what was written


def test_freezing_parameters_while_a_step_runs_does_not_change_what_it_clips(models: Models) -> None:
    results = []
    for freezes in (False, True):
        model = models.wrap_copy(
            seeded(lambda: mlp(4, WIDTH)), 2, model_run_config=RoundPipeRunConfig(num_microbatch=2)
        )
        optimizer, may_go_on = adam(list(model.optim_parameters())), threading.Event()

        def step_fn(model: Any = model, optimizer: Any = optimizer, may_go_on: Any = may_go_on) -> None:
            assert may_go_on.wait(WAIT_S)
            results.append(clip_grad_norm_(model, 1e-3))
            plainly(model, optimizer)

        points, labels = data(0, torch.float32)
        model.forward_backward((points,), label=labels, loss_fn=mse)
        model.step(step_fn)
        model.model[1].requires_grad_(not freezes)
        may_go_on.set()
        model.synchronize()
    assert torch.equal(*results)
