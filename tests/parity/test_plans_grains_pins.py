"""Plans, grains, pin modes, copy orders and device counts change results by not one bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    Models,
    PendingForward,
    assert_same,
    assert_same_grads,
    assert_same_state,
    batch,
    call_reference,
    grads_of,
    mse,
    seeded,
    total,
)
from helpers_plans import legal_plans
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

GRAINS = ("stage", "layer")


class Carrying(nn.Module):
    """Hands its input on beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Joining(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0].tanh() * value[1]


def five_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Carrying(), Joining(), nn.Linear(4, 4))


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), Carrying(), Joining(), nn.Linear(4, 4))


@pytest.mark.parametrize("grain", GRAINS)
def test_every_legal_fused_plan_equals_the_reference(models: Models, grain: str) -> None:
    module = seeded(five_layers)
    model = models.wrap_copy(module, 3)
    plans = list(legal_plans(5, "fused"))
    assert len(plans) == 86
    for plan in plans:
        config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan, recompute_grain=grain)
        expected = call_reference(module, (batch(6, 4),), label=batch(6, 4), num_microbatch=2)
        result = model.forward_backward(
            (batch(6, 4),), label=batch(6, 4), loss_fn=mse, return_outputs=True, run_config=config
        )
        assert_same(result, (expected.loss, expected.outputs), str(plan))
        model.synchronize()
        assert_same_grads(model.model, module)
        assert_same_state(model.model, module)
        model.zero_grad()
        module.zero_grad()


@pytest.mark.parametrize(
    ("grain", "stride"), [("stage", 2), ("layer", 5), *(pytest.param(g, 1, marks=pytest.mark.slow) for g in GRAINS)]
)
def test_every_legal_train_plan_equals_the_reference(models: Models, grain: str, stride: int) -> None:
    """Every plan is slow; `make test` takes each `stride`-th one."""
    module = seeded(five_layers)
    model = models.wrap_copy(module, 3)
    plans = list(legal_plans(5, "train"))
    assert len(plans) == 256
    for plan in plans[::stride]:
        config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan, recompute_grain=grain)
        expected = PendingForward(module, (batch(6, 4),), {}, 2)
        output = model(batch(6, 4), roundpipe_run_config=config)
        assert_same(output.detach(), expected.output.detach(), str(plan))
        for either in (output, expected.output):
            total(either, None).backward()
        expected.backward()
        model.synchronize()
        assert_same_grads(model.model, module)
        assert_same_state(model.model, module)
        model.zero_grad()
        module.zero_grad()


def test_every_legal_inference_plan_equals_the_reference(models: Models) -> None:
    module = seeded(five_layers).eval()
    model = models.wrap_copy(module, 3)
    with torch.no_grad():
        expected = torch.cat([module(x) for x in batch(6, 4).tensor_split(2)])
        for plan in legal_plans(5, "infer"):
            config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
            assert_same(model(batch(6, 4), roundpipe_run_config=config), expected, str(plan))


def train(model: RoundPipe, configs: list[RoundPipeRunConfig], is_async: bool) -> Any:
    """Five steps, then one more call; returns losses, outputs, weights, buffers and gradients."""
    torch.manual_seed(9)
    optimizer = torch.optim.Adam(model.optim_parameters(), lr=0.01)
    losses = []
    for iteration in range(6):
        config = configs[iteration % len(configs)].over(RoundPipeRunConfig(num_microbatch=3))
        losses.append(
            model.forward_backward(
                (batch(6, 4, seed=iteration),), label=batch(6, 4), loss_fn=mse, return_outputs=True, run_config=config
            )
        )
        if iteration < 5:
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
    model.synchronize()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, grads_of(model.model), [p.detach().clone() for p in model.optim_parameters()]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("device_counts", [(1, 3, 8), pytest.param((2, 5), marks=pytest.mark.slow)])
def test_training_with_dropout_is_the_same_everywhere(
    models: Models, is_async: bool, device_counts: tuple[int, ...]
) -> None:
    expected = train(models.wrap(seeded(dropping), 1), [RoundPipeRunConfig()], is_async)
    plans = list(legal_plans(5, "fused"))
    for number, num_devices in enumerate(device_counts):
        configs = [
            RoundPipeRunConfig(execute_plan=plan, recompute_grain=GRAINS[i % 2])
            for i, plan in enumerate(plans[17 * number :: 13])
        ]
        for chosen in ([RoundPipeRunConfig()], configs):
            result = train(models.wrap(seeded(dropping), num_devices), chosen, is_async)
            assert_same(result, expected, f"{num_devices} devices")


@pytest.mark.parametrize("num_devices", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_pin_modes_change_nothing(models: Models, num_devices: int, is_async: bool) -> None:
    expected = train(models.wrap(seeded(dropping), 1), [RoundPipeRunConfig()], is_async)
    for pin_model in ("alloc", "register", "off"):
        model = models.wrap(seeded(dropping), num_devices, pin_model=pin_model)
        assert_same(train(model, [RoundPipeRunConfig()], is_async), expected, pin_model)


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_pin_modes_with_low_precision_weights_change_nothing(models: Models, pin_model: str) -> None:
    def run(mode: str, num_devices: int) -> list[Tensor]:
        module = seeded(dropping).bfloat16()
        model = models.wrap(module, num_devices, pin_model=mode, optim_dtype=torch.float32)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(3):
            model.forward_backward((batch(6, 4).bfloat16(),), loss_fn=total)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        model.synchronize()
        return [p.detach().clone() for p in model.parameters()]

    assert_same(run(pin_model, 3), run("alloc", 3))


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_order_in_which_copies_happen_changes_nothing(
    models: Models, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ModelExecutePlan([range(2), range(2, 4)], [range(4, 5), range(3, 4), range(1, 3), range(1)])
    config = RoundPipeRunConfig(execute_plan=plan)
    expected: Any = None
    for seed in range(5):
        monkeypatch.setenv("ROUNDPIPE_VIRTUAL_SEED", str(seed))
        result = train(models.wrap(seeded(dropping), num_devices), [config], is_async=True)
        expected = expected or result
        assert_same(result, expected, f"seed {seed}")
        models.close()
        gc.collect()  # the pool goes with its last model, and the next one reads the new seed


def test_plans_made_by_auto_are_legal_and_change_nothing(models: Models, num_devices: int) -> None:
    module = seeded(five_layers)
    model = models.wrap_copy(module, num_devices)
    for call in range(3):
        plan = ModelExecutePlan.auto("fused", model)
        plan.check_valid(5, "fused")
        config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
        expected = call_reference(module, (batch(6, 4),), label=batch(6, 4), num_microbatch=2)
        loss = model.forward_backward((batch(6, 4),), label=batch(6, 4), loss_fn=mse, run_config=config)
        assert_same(loss, expected.loss, f"call {call}")
        model.synchronize()
        assert_same_grads(model.model, module)


def test_auto_plans_several_models_together(models: Models) -> None:
    ours = [models.wrap(seeded(five_layers), 2), models.wrap(seeded(dropping), 2)]
    plans = ModelExecutePlan.auto("train", *ours, min_stages=3)
    assert len(plans) == 2
    for plan, model in zip(plans, ours, strict=True):
        plan.check_valid(model.num_layers, "train")
        config = RoundPipeRunConfig(execute_plan=plan)
        total(model(batch(6, 4), roundpipe_run_config=config), None).backward()
        model.synchronize()
        assert all(p.grad is not None for p in model.parameters())


def test_plans_that_change_with_measured_times_change_nothing(models: Models, num_devices: int) -> None:
    """Many calls without a plan of the user's: the planner learns, and may change its mind."""
    module = seeded(five_layers)
    model = models.wrap_copy(module, num_devices)
    for call in range(10):
        expected = call_reference(module, (batch(6, 4),), label=batch(6, 4), num_microbatch=2)
        loss = model.forward_backward(
            (batch(6, 4),), label=batch(6, 4), loss_fn=mse, run_config=RoundPipeRunConfig(num_microbatch=2)
        )
        assert_same(loss, expected.loss, f"call {call}")
    model.synchronize()
    assert_same_grads(model.model, module)
    assert_same_state(model.model, module)
