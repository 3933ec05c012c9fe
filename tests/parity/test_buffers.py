"""Buffers that layers write (BatchNorm and others) end as in a plain model, and recomputation never counts twice."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    WAIT_S,
    Models,
    PendingForward,
    assert_same,
    assert_same_grads,
    assert_same_state,
    batch,
    call_reference,
    check_forward,
    check_fused,
    microbatches,
    mse,
    seeded,
    total,
)
from roundpipe import ModelExecutePlan, RoundPipeRunConfig


class Reassigning(nn.Module):
    """Puts a new tensor in place of its buffers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", None)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.average * self.calls
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.calls = self.calls + 1
        self.last = y.detach()[0]
        self.scratch.mul_(2)
        return y


def normed(momentum: float | None = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, momentum=momentum),
        nn.ReLU(),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
        nn.Linear(6, 6),
    )


def reassigning() -> nn.Sequential:
    return nn.Sequential(Reassigning(), nn.Tanh(), Reassigning(), nn.Linear(6, 6))


PLANS = {
    "planned": None,
    "all fused": ModelExecutePlan([], [range(4)]),
    "one each": ModelExecutePlan([range(i, i + 1) for i in range(3)], [range(i, i + 1) for i in reversed(range(4))]),
    "recomputed together": ModelExecutePlan([range(3)], [range(3, 4), range(3)]),
}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_trains_as_in_the_reference(models: Models, num_devices: int, momentum: float | None) -> None:
    module = seeded(lambda: normed(momentum))
    check_fused(models, module, num_devices, (batch(9, 6),), label=batch(9, 6), num_calls=3)
    check_forward(models, module, num_devices, (batch(9, 6),))


def test_batch_norm_in_evaluation_uses_its_statistics_and_leaves_them(models: Models, num_devices: int) -> None:
    module = seeded(normed)
    module(batch(9, 6))
    module.eval()
    check_fused(models, module, num_devices, (batch(9, 6),), label=batch(9, 6))
    model = models.wrap_copy(module, num_devices)
    with torch.no_grad():
        output = model(batch(9, 6), roundpipe_run_config=microbatches(3))
        assert_same(output, torch.cat([module(x) for x in batch(9, 6).tensor_split(3)]))
    assert_same_state(model.model, module)


def test_forward_without_grad_in_training_mode_updates_statistics(models: Models, num_devices: int) -> None:
    module = seeded(normed)
    model = models.wrap_copy(module, num_devices)
    with torch.no_grad():
        output = model(batch(9, 6), roundpipe_run_config=microbatches(3))
        assert_same(output, torch.cat([module(x) for x in batch(9, 6).tensor_split(3)]))
    assert_same_state(model.model, module)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan", PLANS)
def test_reassigned_buffers_end_as_in_the_reference(models: Models, num_devices: int, plan: str, grain: str) -> None:
    module = seeded(reassigning)
    options = RoundPipeRunConfig(execute_plan=PLANS[plan], recompute_grain=grain)
    model = check_fused(
        models, module, num_devices, (batch(9, 6),), label=batch(9, 6), num_calls=3, model_run_config=options
    )
    assert torch.equal(model.model[0].scratch, torch.full((2,), 2.0**9))
    assert model.model[2].calls.item() == 9


def test_forward_and_backward_with_reassigned_buffers_equal_the_reference(models: Models, num_devices: int) -> None:
    check_forward(models, seeded(reassigning), num_devices, (batch(9, 6),))


@pytest.mark.parametrize("kind", ["normed", "reassigning"])
def test_each_of_several_pending_forwards_is_recomputed_with_its_own_buffers(
    models: Models, num_devices: int, kind: str
) -> None:
    module = seeded(normed if kind == "normed" else reassigning)
    model = models.wrap_copy(module, num_devices)
    pending = []
    for call in range(3):
        x = batch(9, 6, seed=call)
        pending.append((model(x, roundpipe_run_config=microbatches(3)), PendingForward(module, (x,), {}, 3)))
    assert_same_state(model.model, module)
    for output, expected in (pending[1], pending[2], pending[0]):
        assert_same(output, expected.output)
        total(output, None).backward()
        total(expected.output, None).backward()
        expected.backward()
    model.synchronize()
    assert_same_state(model.model, module)
    assert_same_grads(model.model, module)


def test_buffers_the_user_changes_between_calls_are_used(models: Models, num_devices: int) -> None:
    module = seeded(normed)
    model = models.wrap_copy(module, num_devices)
    for call in range(4):
        for either in (model.model, module):
            if call == 1:
                either[1].running_mean.fill_(0.5)
            if call == 2:
                either[1].running_var = torch.full((6,), 2.0)
            if call == 3:
                either[1].reset_running_stats()
        expected = call_reference(module, (batch(9, 6),), label=batch(9, 6), num_microbatch=3)
        loss = model.forward_backward((batch(9, 6),), label=batch(9, 6), loss_fn=mse, run_config=microbatches(3))
        assert_same(loss, expected.loss)
        assert_same_state(model.model, module)


def test_statistics_are_in_the_model_as_soon_as_the_call_returns(models: Models, num_devices: int) -> None:
    module = seeded(normed)
    model = models.wrap_copy(module, num_devices)
    call_reference(module, (batch(9, 6),), label=batch(9, 6), num_microbatch=3)
    model.forward_backward((batch(9, 6),), label=batch(9, 6), loss_fn=mse, run_config=microbatches(3))
    assert_same(dict(model.named_buffers()), dict(module.named_buffers()))


class Blocked(nn.Module):
    """Its backward waits until the test lets it go on."""

    def __init__(self, may_go_on: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.hook = lambda grad: self._wait(may_go_on, grad)

    @staticmethod
    def _wait(may_go_on: threading.Event, grad: Tensor) -> Tensor:
        assert may_go_on.wait(WAIT_S)
        return grad

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(self.hook)
        return y


@pytest.mark.parametrize("num_devices", [2, 3])
def test_what_is_changed_while_backward_still_runs_does_not_reach_it(models: Models, num_devices: int) -> None:
    """eval(), a new dropout rate and other statistics come when the losses are known but the first layers' backward
    has not begun: it recomputes with what the call began with."""
    may_go_on = threading.Event()

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), Blocked(may_go_on), nn.Linear(6, 6))

    plan = ModelExecutePlan([range(3), range(3, 4)], [range(4, 5), range(3, 4), range(3)])
    torch.manual_seed(3)
    model = models.wrap(build(), num_devices, model_run_config=RoundPipeRunConfig(execute_plan=plan))
    torch.manual_seed(3)
    module = build()
    model.forward_backward((batch(9, 6),), label=batch(9, 6), loss_fn=mse, run_config=microbatches(3))
    model.eval()
    model.model[1].running_mean.fill_(100.0)
    may_go_on.set()
    call_reference(module, (batch(9, 6),), label=batch(9, 6), num_microbatch=3)
    model.synchronize()
    assert_same_grads(model.model, module)
    assert not model.training
    assert torch.equal(model.model[1].running_mean, torch.full((6,), 100.0))


def test_buffers_shared_by_layers_may_be_read(models: Models, num_devices: int) -> None:
    class Rotating(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.table

    table = batch(6)
    module = seeded(lambda: nn.Sequential(Rotating(table), nn.Tanh(), Rotating(table)))
    check_fused(models, module, num_devices, (batch(9, 6),), label=batch(9, 6))
