"""Frozen, thawed and shared parameters train as in a plain model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    DEVICE_COUNTS,
    Models,
    assert_same,
    assert_same_grads,
    assert_same_state,
    batch,
    call_reference,
    check_forward,
    check_fused,
    grads_of,
    microbatches,
    mlp,
    mse,
    seeded,
    total,
)
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, optim


class Scaled(nn.Module):
    """Uses its weight twice: tied within one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner(x).tanh()) + x


class Unembedding(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def tied_embeddings() -> nn.Sequential:
    embedding = nn.Embedding(9, 5)
    return nn.Sequential(embedding, nn.Linear(5, 5), nn.Tanh(), Unembedding(embedding))


def same_module_twice() -> nn.Sequential:
    shared = nn.Linear(5, 5)
    return nn.Sequential(shared, nn.Tanh(), nn.Linear(5, 5), shared, nn.Tanh(), shared)


TIED: dict[str, tuple[Callable[[], nn.Sequential], Tensor]] = {
    "embeddings": (tied_embeddings, torch.arange(24).view(8, 3) % 9),
    "module": (same_module_twice, batch(8, 5)),
}


def frozen(build: Callable[[], nn.Sequential], *layer_ids: int) -> nn.Sequential:
    module = build()
    for layer_id in layer_ids:
        module[layer_id].requires_grad_(False)
    return module


@pytest.mark.parametrize("layer_ids", [(0,), (0, 1), (1,), (3,), (0, 1, 2)], ids=str)
def test_frozen_layers_equal_the_reference(models: Models, num_devices: int, layer_ids: tuple[int, ...]) -> None:
    module = seeded(lambda: frozen(mlp, *layer_ids))
    check_fused(models, module, num_devices, (batch(8, 5),), label=batch(8, 5))
    check_forward(models, module, num_devices, (batch(8, 5),))


def test_partly_frozen_layers_equal_the_reference(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    module[1][0].weight.requires_grad_(False)
    module[2][0].bias.requires_grad_(False)
    check_fused(models, module, num_devices, (batch(8, 5),), label=batch(8, 5))


def test_only_trainable_parameters_have_an_optimizer_copy(models: Models) -> None:
    model = models.wrap(seeded(lambda: frozen(mlp, 0, 2)), 2)
    assert [name for name, _ in model.optim_named_parameters()] == ["1.0.weight", "1.0.bias", "3.0.weight", "3.0.bias"]


def test_frozen_weights_stay_as_they_are(models: Models, num_devices: int) -> None:
    module = seeded(lambda: frozen(mlp, 0, 2))
    model = models.wrap_copy(module, num_devices)
    ours = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    plain = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(4))
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        call_reference(module, (batch(8, 5),), label=batch(8, 5))
        plain.step()
        plain.zero_grad()
    assert_same_state(model.model, module)


def test_requires_grad_may_change_between_calls(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    for layer_id, trains in [(0, False), (1, False), (0, True), (3, False), (1, True), (3, True)]:
        for either in (model.model, module):
            either[layer_id].requires_grad_(trains)
        expected = call_reference(module, (batch(8, 5),), label=batch(8, 5))
        loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(4))
        assert_same(loss, expected.loss)
        model.synchronize()
        assert_same_grads(model.model, module)


def test_a_layer_may_be_thawed_after_some_steps(models: Models, num_devices: int) -> None:
    module = seeded(lambda: frozen(mlp, 0))
    model = models.wrap_copy(module, num_devices)
    ours = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    plain = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for iteration in range(5):
        if iteration == 2:
            for either in (model.model, module):
                either[0].requires_grad_(True)
            thawed = [p for name, p in model.optim_named_parameters() if name.startswith("0.")]
            ours.add_param_group({"params": thawed})
            plain.add_param_group({"params": list(module[0].parameters())})
        expected = call_reference(module, (batch(8, 5),), label=batch(8, 5))
        loss = model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(4))
        assert_same(loss, expected.loss)
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        plain.step()
        plain.zero_grad()
    assert_same_state(model.model, module)


def test_a_group_that_is_added_while_a_step_runs_counts_from_the_next_step(models: Models) -> None:
    """The step is held until the group has been added, or for half a second if that waits for the step."""

    def trained(**options: Any) -> nn.Module:
        model = models.wrap_copy(seeded(mlp), 2, **options)
        *early, last = model.optim_parameters()
        ours = optim.SGD(early, lr=0.1)
        was_added = threading.Event()
        for iteration in range(3):

            def step_fn(is_held: bool = iteration == 1 and bool(options)) -> None:
                if is_held:
                    was_added.wait(0.5)
                ours.step()
                ours.zero_grad()

            torch.manual_seed(iteration)
            model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(4))
            model.step(step_fn, is_async=bool(options))
            if iteration == 1:
                ours.add_param_group({"params": [last]})
                was_added.set()
        model.synchronize()
        return model.model

    assert_same_state(trained(staleness=0), trained())


def test_freezing_while_backward_still_runs_does_not_reach_that_call(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    call_reference(module, (batch(8, 5),), label=batch(8, 5))
    model.forward_backward((batch(8, 5),), label=batch(8, 5), loss_fn=mse, run_config=microbatches(4))
    model.requires_grad_(False)
    model.synchronize()
    assert_same_grads(model.model, module)


def test_parameters_tied_within_a_layer_equal_the_reference(models: Models, num_devices: int) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(5, 5), Scaled(), nn.Tanh(), Scaled()))
    check_fused(models, module, num_devices, (batch(8, 5),), label=batch(8, 5))
    check_forward(models, module, num_devices, (batch(8, 5),))


@pytest.mark.parametrize("kind", TIED)
def test_parameters_tied_across_layers_equal_the_reference_to_rounding(
    models: Models, num_devices: int, kind: str
) -> None:
    build, x = TIED[kind]
    module = seeded(build)
    model = models.wrap_copy(module, num_devices)
    for _ in range(2):
        expected = call_reference(module, (x,), loss_fn=total)
        loss, outputs = model.forward_backward((x,), loss_fn=total, return_outputs=True, run_config=microbatches(4))
        assert_same(loss, expected.loss)
        assert_same(outputs, expected.outputs)
    model.synchronize()
    torch.testing.assert_close(grads_of(model.model), grads_of(module))


def train_tied(models: Models, kind: str, num_devices: int, plan: ModelExecutePlan | None, is_async: bool) -> RoundPipe:
    build, x = TIED[kind]
    model = models.wrap(seeded(build), num_devices)
    optimizer = torch.optim.Adam(model.optim_parameters(), lr=0.01)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    for _ in range(4):
        model.forward_backward((x,), loss_fn=total, run_config=config)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
    model.forward_backward((x,), loss_fn=total, run_config=config)
    model.synchronize()
    return model


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", TIED)
def test_parameters_tied_across_layers_train_to_the_same_bits_on_any_devices_and_plan(
    models: Models, kind: str, is_async: bool
) -> None:
    first = train_tied(models, kind, 1, None, is_async)
    num_layers = first.num_layers
    plans = [
        None,
        ModelExecutePlan([range(num_layers - 1)], [range(num_layers - 1, num_layers), range(num_layers - 1)]),
        ModelExecutePlan(
            [range(i, i + 1) for i in range(num_layers - 1)],
            [range(i, i + 1) for i in reversed(range(num_layers))],
        ),
        ModelExecutePlan([], [range(num_layers)]),
    ]
    for num_devices in DEVICE_COUNTS:
        for plan in plans if num_devices == 3 else plans[:1]:
            other = train_tied(models, kind, num_devices, plan, is_async)
            assert_same_state(other.model, first.model)
            assert_same_grads(other.model, first.model)


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_parameter_has_one_optimizer_copy_and_is_one_tensor_after_training(models: Models, kind: str) -> None:
    model = train_tied(models, kind, 3, None, False)
    plain = seeded(TIED[kind][0])
    assert len(list(model.optim_parameters())) == len(list(plain.parameters()))
    last = model.model[-1]
    assert last.weight is model.model[0].weight
    named = dict(model.optim_named_parameters(remove_duplicate=False))
    assert named["0.weight"] is named[f"{len(model.model) - 1}.weight"]


def test_a_tied_parameter_that_is_frozen_stays(models: Models, num_devices: int) -> None:
    module = seeded(tied_embeddings)
    module[0].weight.requires_grad_(False)
    check_fused(models, module, num_devices, (TIED["embeddings"][1],), loss_fn=total)


def test_no_parameter_trains_but_the_input_does(models: Models, num_devices: int) -> None:
    module = seeded(mlp).requires_grad_(False)
    model = models.wrap_copy(module, num_devices)
    x = batch(8, 5).requires_grad_()
    mirror = copy.deepcopy(x)
    call_reference(module, (mirror,), loss_fn=total)
    model.forward_backward((x,), loss_fn=total, run_config=microbatches(4))
    assert_same(x.grad, mirror.grad)
