"""What holds where the call is made (autocast, threads, grad mode) holds in the layers."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    WAIT_S,
    Models,
    PendingForward,
    assert_same,
    assert_same_grads,
    batch,
    call_reference,
    grads_of,
    microbatches,
    mlp,
    mse,
    seeded,
    total,
)
from roundpipe import ModelExecutePlan, RoundPipeRunConfig


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def test_autocast_entered_by_the_caller_holds_in_layers_and_loss(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    dtypes: set[torch.dtype] = set()

    def loss_fn(output: Tensor, label: Tensor) -> Tensor:
        dtypes.add((output @ output.t()).dtype)
        return mse(output.float(), label)

    with autocast():
        loss, outputs = model.forward_backward(
            (batch(8, 5),), label=batch(8, 5), loss_fn=loss_fn, return_outputs=True, run_config=microbatches(3)
        )
        expected = call_reference(module, (batch(8, 5),), label=batch(8, 5), loss_fn=loss_fn, num_microbatch=3)
    assert dtypes == {torch.bfloat16}
    assert_same((loss, outputs), (expected.loss, expected.outputs))
    model.synchronize()
    assert_same_grads(model.model, module)
    assert model.model[0][0].weight.grad.dtype is torch.float32


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_backward_outside_autocast_recomputes_as_forward_ran(models: Models, num_devices: int, grain: str) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices, model_run_config=RoundPipeRunConfig(recompute_grain=grain))
    with autocast():
        output = model(batch(8, 5), roundpipe_run_config=microbatches(3))
        expected = PendingForward(module, (batch(8, 5),), {}, 3)
    assert output.dtype is torch.bfloat16
    assert_same(output.detach(), expected.output.detach())
    for either in (output, expected.output):
        total(either.float(), None).backward()
    expected.backward()
    model.synchronize()
    assert_same_grads(model.model, module)


def test_calls_with_and_without_autocast_do_not_mix(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    for call in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=call % 2 == 0):
            loss = model.forward_backward(
                (batch(8, 5),), loss_fn=lambda o, y: total(o.float(), y), run_config=microbatches(3)
            )
            expected = call_reference(
                module, (batch(8, 5),), loss_fn=lambda o, y: total(o.float(), y), num_microbatch=3
            )
        assert_same(loss, expected.loss, f"call {call}")
    model.synchronize()
    assert_same_grads(model.model, module)


def test_calls_from_several_threads_are_serialised(models: Models, num_devices: int) -> None:
    """Each call alone is exact; the sum of their gradients comes in the order in which they got in."""
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    inputs = [batch(8, 5, seed=seed) for seed in range(6)]

    def call(x: Tensor) -> Tensor:
        torch.set_num_threads(1)
        return model.forward_backward((x,), loss_fn=total, run_config=microbatches(3))

    with ThreadPoolExecutor(2) as threads:
        losses = list(threads.map(call, inputs))
    expected = [call_reference(copy.deepcopy(module), (x,), loss_fn=total, num_microbatch=3).loss for x in inputs]
    assert_same(losses, expected)
    for x in inputs:
        call_reference(module, (x,), loss_fn=total, num_microbatch=3)
    model.synchronize()
    torch.testing.assert_close(grads_of(model.model), grads_of(module))


def test_two_models_on_one_pool_train_from_two_threads(models: Models, num_devices: int) -> None:
    modules = [seeded(mlp, seed) for seed in range(2)]
    ours = [models.wrap_copy(module, num_devices) for module in modules]

    def train(number: int) -> list[Tensor]:
        torch.set_num_threads(1)
        model = ours[number]
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            losses.append(
                model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(3))
            )
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        return losses

    with ThreadPoolExecutor(2) as threads:
        all_losses = list(threads.map(train, range(2)))
    for module, losses in zip(modules, all_losses, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for loss in losses:
            assert_same(loss, call_reference(module, (batch(8, 5),), label=batch(8, 5), num_microbatch=3).loss)
            optimizer.step()
            optimizer.zero_grad()


class Held(nn.Module):
    """A layer whose backward announces itself and then waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.gates = (threading.Event(), threading.Event())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y.register_hook(self._hold)
        return y

    def _hold(self, grad: Tensor) -> Tensor:
        begun, may_go_on = self.gates
        begun.set()
        assert may_go_on.wait(WAIT_S)
        return grad


def held_model(models: Models, num_devices: int) -> tuple[Any, nn.Module, threading.Event, threading.Event]:
    module = seeded(lambda: nn.Sequential(Held(), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5)))
    plan = ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(2)])
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    model = models.wrap(module, num_devices, model_run_config=config)
    return model, module, *module[0].gates


@pytest.mark.parametrize("num_devices", [2, 3, 5, 8])
def test_forward_backward_returns_before_the_backward_is_finished(models: Models, num_devices: int) -> None:
    model, module, begun, may_go_on = held_model(models, num_devices)
    loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
    assert not may_go_on.is_set()  # the loss is here although the backward of the first layer is still held
    assert begun.wait(WAIT_S)
    assert module[0].linear.weight.grad is None
    may_go_on.set()
    model.synchronize()
    mirror = copy.deepcopy(nn.Sequential(module[0].linear, *list(module)[1:]))
    mirror.zero_grad()
    expected = call_reference(mirror, (batch(8, 5),), label=batch(8, 5), num_microbatch=3)
    assert_same(loss, expected.loss)
    assert_same([p.grad for p in module.parameters()], [p.grad for p in mirror.parameters()])


@pytest.mark.parametrize("num_devices", [2, 5])
def test_step_and_further_calls_may_be_issued_while_backward_runs(models: Models, num_devices: int) -> None:
    model, _, begun, may_go_on = held_model(models, num_devices)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    stepped = threading.Event()

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()
        stepped.set()

    first = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
    assert begun.wait(WAIT_S)
    model.step(step_fn)
    assert not stepped.is_set()  # gradients of the first layer are still to come
    may_go_on.set()
    second = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
    assert torch.equal(first, second)  # one step old: the very same weights
    assert stepped.wait(WAIT_S)
    model.step(lambda: None)
    third = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse)
    assert not torch.equal(first, third)


def test_inputs_and_labels_may_be_overwritten_as_soon_as_the_call_returns(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    x, y = batch(8, 5), batch(8, 5, seed=1)
    call_reference(module, (x,), label=y, num_microbatch=3)
    model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(3))
    x.fill_(float("nan"))
    y.fill_(float("nan"))
    model.synchronize()
    assert_same_grads(model.model, module)


def test_inputs_may_be_overwritten_between_forward_and_backward(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    x = batch(8, 5)
    expected = PendingForward(module, (x,), {}, 3)
    output = model(x, roundpipe_run_config=microbatches(3))
    x.fill_(float("nan"))
    for either in (output, expected.output):
        total(either, None).backward()
    expected.backward()
    model.synchronize()
    assert_same_grads(model.model, module)


def test_outputs_may_be_overwritten_before_backward(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    expected = PendingForward(module, (batch(8, 5),), {}, 3)
    output = model(batch(8, 5), roundpipe_run_config=microbatches(3))
    for either in (output, expected.output):
        total(either.mul_(2) if either is output else either * 2, None).backward()
    expected.backward()
    model.synchronize()
    assert_same_grads(model.model, module)
