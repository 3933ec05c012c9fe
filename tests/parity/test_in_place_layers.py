"""Layers that change their inputs or carried tensors in place do what they do in a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import Models, batch, check_forward, check_fused, microbatches, seeded, total
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.errors import UsageError


class Step(nn.Module):
    def __init__(self, change: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.change = change

    def forward(self, value: Any) -> Any:
        return self.change(self.linear, value)


def add_into_carried(linear: nn.Module, value: dict[str, Tensor]) -> dict[str, Tensor]:
    value["sum"] += linear(value["x"]).tanh()
    value["x"] = linear(value["x"])
    return value


def write_half(linear: nn.Module, x: Tensor) -> Tensor:
    x = linear(x)
    x[:, :3] = x[:, 3:] * 2
    return x


def write_into_part_of_input(linear: nn.Module, x: Tensor) -> Tensor:
    x[:, :2] = x[:, 2:4] * 3
    return linear(x)


PLANS = {
    "each": ModelExecutePlan([range(i, i + 1) for i in range(2)], [range(i, i + 1) for i in reversed(range(3))]),
    "one stage": ModelExecutePlan([], [range(3)]),
}


def step(change: Callable[[nn.Module, Any], Any]) -> Step:
    return Step(change)


Build = Callable[[], nn.Sequential]
MODELS: dict[str, Build] = {
    "relu": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.LeakyReLU(inplace=True)),
    "relu first": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "relu last": lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0, inplace=True), nn.ReLU(inplace=True)),
    "carried sum": lambda: nn.Sequential(
        step(lambda linear, x: {"x": linear(x), "sum": linear(x) * 0}),
        step(add_into_carried),
        step(add_into_carried),
        step(lambda linear, value: value["sum"] + linear(value["x"])),
    ),
    "input": lambda: nn.Sequential(
        step(lambda linear, x: linear(x)),
        step(lambda linear, x: x.mul_(2)),
        step(lambda linear, x: linear(x.add_(1))),
        step(lambda linear, x: x.tanh_()),
    ),
    "part of the input": lambda: nn.Sequential(nn.Linear(6, 6), step(write_into_part_of_input), nn.Linear(6, 6)),
    "part of an output": lambda: nn.Sequential(step(write_half), step(write_half), nn.Linear(6, 6)),
    "one of a pair": lambda: nn.Sequential(
        step(lambda linear, x: (linear(x), x.sin())),
        step(lambda linear, pair: (pair[0].mul_(3), linear(pair[1]))),
        step(lambda linear, pair: linear(pair[0]) * pair[1]),
    ),
    "one of two halves": lambda: nn.Sequential(
        step(lambda linear, x: (y := linear(x), (y[:1], y[1:]))[1]),
        step(lambda linear, halves: (halves[0].mul_(2), linear(halves[1]))),
        step(lambda linear, halves: torch.cat(halves)),
    ),
    "same tensor twice": lambda: nn.Sequential(
        step(lambda linear, x: (linear(x),) * 2),
        step(lambda linear, pair: (pair[0].mul_(3), pair[1])),
        step(lambda linear, pair: linear(pair[0]) * pair[1]),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_fused_equals_the_reference(models: Models, num_devices: int, kind: str) -> None:
    check_fused(models, seeded(MODELS[kind]), num_devices, (batch(7, 6),), loss_fn=total, num_calls=1)


@pytest.mark.parametrize("kind", MODELS)
def test_forward_and_backward_equal_the_reference(models: Models, num_devices: int, kind: str) -> None:
    check_forward(models, seeded(MODELS[kind]), num_devices, (batch(7, 6),))


@pytest.mark.parametrize("plan", PLANS)
def test_changing_a_tensor_beside_a_view_of_it_is_refused_for_every_plan(
    models: Models, num_devices: int, plan: str
) -> None:
    """Each travels alone, so the view would see the change or not, depending on who runs the layers."""
    module = nn.Sequential(
        step(lambda linear, x: (y := linear(x), y[:, :2])),
        step(lambda linear, pair: (pair[0].mul_(2), pair[1])),
        step(lambda linear, pair: linear(pair[0]) + pair[1].sum()),
    )
    model = models.wrap(module, num_devices)
    with pytest.raises(UsageError, match="shares its memory"):
        model.forward_backward((batch(7, 6),), loss_fn=total, run_config=RoundPipeRunConfig(execute_plan=PLANS[plan]))


def test_the_users_input_is_not_changed(models: Models, num_devices: int) -> None:
    model = models.wrap(seeded(MODELS["relu first"]), num_devices)
    x = batch(7, 6)
    before = x.clone()
    model.forward_backward((x,), loss_fn=total)
    with torch.no_grad():
        model(x)
    assert torch.equal(x, before)


def test_a_loss_that_changes_the_outputs_leaves_the_returned_ones_alone(models: Models, num_devices: int) -> None:
    module = seeded(MODELS["relu first"])
    model = models.wrap_copy(module, num_devices)
    x = batch(7, 6)
    with torch.no_grad():
        expected = torch.cat([module(part) for part in copy.deepcopy(x).tensor_split(3)])
    _, output = model.forward_backward(
        (x,), loss_fn=lambda output, label: output.mul_(2).sum(), return_outputs=True, run_config=microbatches(3)
    )
    assert torch.equal(output, expected)


# Layers that write into their parameters. A device's copy would lose the write.


class Codes(nn.Module):
    """Adds an embedding whose rows torch scales in place where they are too long."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long())


def halve_and_multiply(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        linear.weight.mul_(0.5)
    return linear(x)


WRITERS: dict[str, tuple[Build, str]] = {
    "embedding": (lambda: nn.Sequential(nn.Linear(6, 6), Codes(), nn.Linear(6, 6)), "1.table.weight"),
    "by hand": (lambda: nn.Sequential(step(halve_and_multiply), nn.Tanh(), nn.Linear(6, 6)), "0.linear.weight"),
    "frozen": (lambda: nn.Sequential(nn.Linear(6, 6), Codes().requires_grad_(False), nn.ReLU()), "1.table.weight"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", WRITERS)
def test_writing_into_a_parameter_is_refused_in_training(
    models: Models, num_devices: int, kind: str, plan: str
) -> None:
    build, name = WRITERS[kind]
    config = RoundPipeRunConfig(execute_plan=PLANS[plan])
    model = models.wrap(seeded(build), num_devices, model_run_config=microbatches(2))

    def train() -> None:
        model.forward_backward((batch(7, 6),), loss_fn=total, run_config=config)
        model.synchronize()  # a layer that is freed late fails in the background

    with pytest.raises(UsageError, match=f"writes into its parameter '{name}'"):
        train()
    with pytest.raises(UsageError, match=f"writes into its parameter '{name}'"):
        model(batch(7, 6)).sum().backward()


def test_an_embedding_with_a_longest_row_computes_as_the_plain_one(models: Models, num_devices: int) -> None:
    module = seeded(WRITERS["embedding"][0])
    model = models.wrap_copy(module, num_devices, model_run_config=microbatches(1))
    with torch.no_grad():
        assert torch.equal(model(batch(7, 6)), module(batch(7, 6)))
