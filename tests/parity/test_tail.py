"""Microbatches that go forward or backward together, layer by layer, give the bits of those that go one by one.

How many do is the planner's choice; here it is set, to every number there is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    Models,
    assert_same,
    assert_same_grads,
    assert_same_state,
    batch,
    call_reference,
    grads_of,
    mse,
    seeded,
)
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.api.planner import Planner
from roundpipe.context import LayerPhase
from roundpipe.plan.overlap import NO_WAVE, Overlap, Wave
from roundpipe.runtime import stage

WIDTH, ROWS, NUM_MICROBATCH, NUM_LAYERS = 6, 9, 4, 4
TAILS = range(1, NUM_MICROBATCH + 1)
# Without a tail (1) other tests run; 3 microbatches take the path of 2.
TAIL_PARAMS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), NUM_MICROBATCH]
PLANS = {
    "one fused stage": ModelExecutePlan([], [range(0, 4)]),
    "fused and backward stages": ModelExecutePlan([range(0, 1), range(1, 2)], [range(2, 4), range(1, 2), range(0, 1)]),
    "a fused stage of one layer": ModelExecutePlan([range(0, 3)], [range(3, 4), range(0, 3)]),
}
GRAINS = ("stage", "layer")

# The wave ends inside the fused stage, with it, or has fewer microbatches than the call, or more.
WAVES = {
    "no wave": NO_WAVE,
    "forward tasks alone": Wave(NUM_MICROBATCH, 0),
    "one layer": Wave(NUM_MICROBATCH, 1),
    "all layers": Wave(NUM_MICROBATCH, 4),
    "two microbatches": Wave(2, 3),
    "more than there are": Wave(9, 9),
}
SetTail = Callable[..., None]


@pytest.fixture
def tails_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[range]]:
    """The microbatches of every tail that was run."""
    seen: list[range] = []
    real = stage._Task._run_tail

    def run_tail(self: Any, microbatches: range) -> None:
        seen.append(microbatches)
        real(self, microbatches)

    monkeypatch.setattr(stage._Task, "_run_tail", run_tail)
    yield seen
    seen.clear()


@pytest.fixture
def set_tail(monkeypatch: pytest.MonkeyPatch) -> SetTail:
    def set_to(tail: int, wave: Wave = NO_WAVE) -> None:
        monkeypatch.setattr(Planner, "overlap", lambda *args, **kwargs: Overlap(tail, wave))

    return set_to


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["1dev", "2dev"])
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def data(seed: int) -> tuple[Tensor, Tensor]:
    return batch(ROWS, WIDTH, seed=2 * seed), batch(ROWS, WIDTH, seed=2 * seed + 1)


def layers(*extra: Callable[[], nn.Module]) -> nn.Sequential:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[make() for make in extra], nn.Tanh())

    return nn.Sequential(*[layer() for _ in range(NUM_LAYERS)])


def config(plan: str, grain: str = "stage") -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLANS[plan], recompute_grain=grain)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def exact_step(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)


def check_with_plain(models: Models, module: nn.Module, num_devices: int, options: RoundPipeRunConfig) -> None:
    """Losses, outputs, gradients, weights and buffers; tails begin after the first synchronous step."""
    model = models.wrap_copy(module, num_devices, model_run_config=options)
    ours, plain = sgd(list(model.optim_parameters())), sgd(list(module.parameters()))
    for seed in range(4):
        x, y = data(seed)
        expected = call_reference(module, (x,), {}, y, mse, NUM_MICROBATCH)
        loss, output = model.forward_backward((x,), label=y, loss_fn=mse, return_outputs=True)
        assert_same(loss, expected.loss, f"loss {seed}")
        assert_same(output.detach(), expected.outputs, f"outputs {seed}")
        if seed == 3:
            model.synchronize()
            assert_same_grads(model.model, module)
        exact_step(model, ours)
        plain.step()
        plain.zero_grad()
    model.synchronize()
    assert_same_state(model.model, module)


@pytest.mark.parametrize("tail", TAIL_PARAMS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("grain", GRAINS)
def test_every_tail_trains_as_the_plain_module(
    models: Models, num_devices: int, tail: int, plan: str, grain: str, set_tail: SetTail, tails_run: list[range]
) -> None:
    set_tail(tail)
    check_with_plain(models, seeded(layers), num_devices, config(plan, grain))
    expected = [range(NUM_MICROBATCH - tail, NUM_MICROBATCH)] * 3 if tail > 1 else []
    assert tails_run == expected, "from the second call on"


@pytest.mark.parametrize("tail", [1, 3, NUM_MICROBATCH])
@pytest.mark.parametrize("wave", list(WAVES)[1:])
@pytest.mark.parametrize("plan", PLANS)
def test_every_wave_trains_as_the_plain_module(
    models: Models, num_devices: int, tail: int, wave: str, plan: str, set_tail: SetTail
) -> None:
    set_tail(tail, WAVES[wave])
    check_with_plain(models, seeded(layers), num_devices, config(plan))


@pytest.mark.parametrize("plan", PLANS)
def test_layers_of_a_wave_run_for_all_its_microbatches_first(
    models: Models, plan: str, set_tail: SetTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, int]] = []
    real = stage._Task._forward_layer

    def forward_layer(self: Any, layer_id: int, microbatch: int, *args: Any) -> Any:
        if args[-1] is not LayerPhase.RECOMPUTE:
            ran.append((layer_id, microbatch))
        return real(self, layer_id, microbatch, *args)

    monkeypatch.setattr(stage._Task, "_forward_layer", forward_layer)
    set_tail(NUM_MICROBATCH, Wave(3, 1))
    model = models.wrap_copy(seeded(layers), 1, model_run_config=config(plan))
    exact_step(model, sgd(list(model.optim_parameters())))
    x, y = data(0)
    for _ in range(2):  # a first forward shows whether layers write buffers
        ran.clear()
        model.forward_backward((x,), label=y, loss_fn=mse)
    fused = PLANS[plan].bwd_plan[0]
    in_wave, every = range(3), range(NUM_MICROBATCH)
    expected = [(i, j) for i in range(fused.start) for j in every] + [(fused[0], j) for j in in_wave]
    rest = [(i, j) for j in every for i in fused if (i, j) not in expected]
    assert ran == [*expected, *rest]


def everything_of(models: Models, module: nn.Module, num_devices: int, options: RoundPipeRunConfig) -> list[Any]:
    torch.manual_seed(5)
    model = models.wrap_copy(module, num_devices, model_run_config=options)
    optimizer = sgd(list(model.optim_parameters()))
    seen: list[Any] = []
    for seed in range(3):
        x, y = data(seed)
        seen.append(model.forward_backward((x,), label=y, loss_fn=mse))
        model.synchronize()
        seen.append(grads_of(model.model))
        exact_step(model, optimizer)
    return [*seen, copy.deepcopy(dict(model.state_dict()))]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("grain", GRAINS)
def test_dropout_is_the_same_with_every_tail(
    models: Models, num_devices: int, plan: str, grain: str, set_tail: SetTail, tails_run: list[range]
) -> None:
    module = seeded(lambda: layers(lambda: nn.Dropout(0.4)))
    set_tail(1)
    expected = everything_of(models, module, 1, config("one fused stage"))
    for tail in TAILS:
        set_tail(tail)
        assert_same(everything_of(models, module, num_devices, config(plan, grain)), expected, f"tail {tail}")
    assert len(tails_run) == 2 * len(TAILS[1:])
    for name, wave in WAVES.items():
        set_tail(3, wave)
        assert_same(everything_of(models, module, num_devices, config(plan, grain)), expected, name)


# Layers that keep something.


@pytest.mark.parametrize("tail", TAIL_PARAMS)
@pytest.mark.parametrize("plan", PLANS)
def test_batch_norm_is_right_with_every_tail(
    models: Models, num_devices: int, tail: int, plan: str, set_tail: SetTail
) -> None:
    set_tail(tail, WAVES["all layers"])
    check_with_plain(models, seeded(lambda: layers(lambda: nn.BatchNorm1d(WIDTH))), num_devices, config(plan))


class Grows(nn.Module):
    """Multiplies by a buffer that every forward changes in place: its backward needs what this forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.25)
        return x * self.scale


@pytest.mark.parametrize("tail", TAIL_PARAMS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_buffer_that_backward_needs_and_forward_writes(
    models: Models, num_devices: int, tail: int, plan: str, set_tail: SetTail
) -> None:
    set_tail(tail)
    check_with_plain(models, seeded(lambda: layers(Grows)), num_devices, config(plan))


def test_a_buffer_that_backward_needs_with_the_tail_that_the_planner_chooses(models: Models, num_devices: int) -> None:
    check_with_plain(models, seeded(lambda: layers(Grows)), num_devices, config("one fused stage"))


class Counts(nn.Module):
    """Keeps a number on itself, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls / 8)


@pytest.mark.parametrize("tail", TAIL_PARAMS)
@pytest.mark.parametrize("wave", ["no wave", "two microbatches", "all layers"])
def test_attributes_count_once(models: Models, num_devices: int, tail: int, wave: str, set_tail: SetTail) -> None:
    set_tail(tail, WAVES[wave])
    check_with_plain(models, seeded(lambda: layers(Counts)), num_devices, config("one fused stage"))


@pytest.mark.parametrize("tail", TAIL_PARAMS)
@pytest.mark.parametrize("plan", PLANS)
def test_frozen_and_tied_layers(models: Models, num_devices: int, tail: int, plan: str, set_tail: SetTail) -> None:
    """Sums of a tied parameter's parts are rounded in another order than autograd's: they equal those of tail 1."""

    def build() -> nn.Module:
        made = layers()
        made[3][0].weight = made[2][0].weight
        made[1].requires_grad_(False)
        return made

    module = seeded(build)
    set_tail(1)
    expected = everything_of(models, module, 1, config(plan))
    for wave in WAVES.values():
        set_tail(tail, wave)
        assert_same(everything_of(models, module, num_devices, config(plan)), expected)


@pytest.mark.parametrize("tail", [2, NUM_MICROBATCH, NUM_MICROBATCH + 3])
@pytest.mark.parametrize("num_microbatch", [1, 2, 5])
def test_another_number_of_microbatches(models: Models, tail: int, num_microbatch: int, set_tail: SetTail) -> None:
    set_tail(tail)
    module = seeded(layers)
    options = RoundPipeRunConfig(num_microbatch=num_microbatch, execute_plan=PLANS["one fused stage"])
    model = models.wrap_copy(module, 2, model_run_config=options)
    exact_step(model, sgd(list(model.optim_parameters())))
    for seed in range(2):
        x, y = data(seed)
        loss = model.forward_backward((x,), label=y, loss_fn=mse)
        assert_same(loss, call_reference(module, (x,), {}, y, mse, num_microbatch).loss)
    model.synchronize()
    assert_same_grads(model.model, module)


def test_gradients_of_inputs(models: Models, num_devices: int, set_tail: SetTail) -> None:
    set_tail(3)
    module = seeded(layers)
    model = models.wrap_copy(module, num_devices, model_run_config=config("one fused stage"))
    exact_step(model, sgd(list(model.optim_parameters())))
    x, y = data(0)
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    model.forward_backward((ours,), label=y, loss_fn=mse)
    call_reference(module, (plain,), {}, y, mse, NUM_MICROBATCH)
    assert_same(ours.grad, plain.grad)


# Failures.


class Boom(Exception):
    pass


class Fuse:
    """Blows when it is passed for the n-th time after it was set, counted from 0."""

    left: int | None = None

    def __deepcopy__(self, memo: Any) -> Fuse:
        return Fuse()

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Boom


class _Burning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fuse.burn()
        return gradients[0], None


class Burning(nn.Module):
    def __init__(self, layer_id: int, fuses: dict[tuple[str, int], Fuse]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.fuses = fuses
        self.layer_id = layer_id

    def forward(self, x: Tensor) -> Tensor:
        self.fuses["forward", self.layer_id].burn()
        y: Tensor = _Burning.apply(self.norm(self.linear(x)).tanh(), self.fuses["backward", self.layer_id])
        return y


def burning(fuses: dict[tuple[str, int], Fuse]) -> nn.Sequential:
    return nn.Sequential(*[Burning(i, fuses) for i in range(NUM_LAYERS)])


def call_and_wait(model: RoundPipe, x: Tensor, y: Tensor) -> None:
    model.forward_backward((x,), label=y, loss_fn=mse)
    model.synchronize()


def new_fuses() -> dict[tuple[str, int], Fuse]:
    return {(kind, i): Fuse() for kind in ("forward", "backward") for i in range(NUM_LAYERS)}


@pytest.mark.parametrize("tail", TAIL_PARAMS)
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("layer_id", [0, 2, 3])
def test_a_failure_in_any_microbatch_leaves_everything(
    models: Models, tail: int, kind: str, layer_id: int, set_tail: SetTail
) -> None:
    set_tail(tail)
    fuses = new_fuses()
    module = seeded(lambda: burning(new_fuses()))
    wrapped = seeded(lambda: burning(fuses))
    model = models.wrap(wrapped, 2, model_run_config=config("one fused stage"))
    ours, plain = sgd(list(model.optim_parameters())), sgd(list(module.parameters()))

    def train(seed: int) -> None:
        x, y = data(seed)
        expected = call_reference(module, (x,), {}, y, mse, NUM_MICROBATCH).loss
        assert_same(model.forward_backward((x,), label=y, loss_fn=mse), expected)
        exact_step(model, ours)
        plain.step()
        plain.zero_grad()

    train(0)
    for microbatch in range(NUM_MICROBATCH):
        fuses[kind, layer_id].left = microbatch
        x, y = data(50 + microbatch)
        with pytest.raises(Boom) as caught:
            call_and_wait(model, x, y)
        assert f"layer {layer_id}, microbatch {microbatch}" in "\n".join(caught.value.__notes__)
        model.synchronize()
        assert_same_state(model.model, module)
        assert all(p.grad is None for p in model.parameters())
        train(1 + microbatch)
    model.synchronize()
    assert_same_state(model.model, module)


@pytest.mark.parametrize("tail", [2, NUM_MICROBATCH])
def test_a_failure_in_the_loss_of_any_microbatch(models: Models, tail: int, set_tail: SetTail) -> None:
    set_tail(tail)
    module = seeded(layers)
    model = models.wrap_copy(module, 2, model_run_config=config("one fused stage"))
    fuse = Fuse()

    def loss_fn(output: Tensor, label: Tensor) -> Tensor:
        fuse.burn()
        return mse(output, label)

    exact_step(model, sgd(list(model.optim_parameters())))
    for microbatch in range(NUM_MICROBATCH):
        x, y = data(microbatch)
        fuse.left = microbatch
        with pytest.raises(Boom) as caught:
            model.forward_backward((x,), label=y, loss_fn=loss_fn)
        assert f"microbatch {microbatch}" in "\n".join(caught.value.__notes__)
        module.zero_grad()
        model.zero_grad()
        expected = call_reference(module, (x,), {}, y, mse, NUM_MICROBATCH).loss
        assert_same(model.forward_backward((x,), label=y, loss_fn=loss_fn), expected)
        model.synchronize()
        assert_same_grads(model.model, module)
