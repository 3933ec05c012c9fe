"""Layers that draw from `random` and `numpy.random`: a recomputation repeats the numbers of the forward pass."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from random import gauss as imported_gauss
from random import random as imported_random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand as imported_rand
from torch import Tensor, nn

from helpers_parity import WAIT_S, Models, assert_same, assert_same_grads, batch, grads_of, microbatches, seeded, total
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, doing_recompute

RECOMPUTED = ModelExecutePlan([range(4)], [range(4, 5), range(4)])
ONE_STAGE = ModelExecutePlan([], [range(5)])
NUM_MICROBATCH = 4

Draw = Callable[[], float]


def shuffled() -> float:
    numbers = [0.1, 0.2, 0.6, 0.7, 0.8]
    random.shuffle(numbers)
    return numbers[0]


def reseeded() -> float:
    first = random.random()
    random.seed(11)
    return (first + random.random()) / 2


def in_a_state_of_its_own() -> float:
    state = random.getstate()
    first = random.random()
    random.setstate(state)
    assert random.random() == first
    return first


DRAWS: dict[str, Draw] = {
    "random": lambda: random.random(),
    "imported random": lambda: imported_random(),
    "imported gauss": lambda: imported_gauss(0.5, 1.0),
    "gauss": lambda: random.gauss(0.5, 1.0),
    "randint": lambda: random.randint(0, 100) / 100,
    "getrandbits": lambda: random.getrandbits(16) / 2**16,
    "choice": lambda: random.choice([0.2, 0.3, 0.8]),
    "shuffle": shuffled,
    "seed": reseeded,
    "state": in_a_state_of_its_own,
    "numpy rand": lambda: float(np.random.rand()),
    "numpy imported rand": lambda: float(imported_rand()),
    "numpy normal": lambda: float(np.random.normal(0.5, 1.0)),
    "numpy randint": lambda: int(np.random.randint(100)) / 100,
    "numpy sample": lambda: float(np.random.sample()),
    "numpy permutation": lambda: float(np.random.permutation([0.1, 0.2, 0.7, 0.8])[0]),
    "both": lambda: (random.random() + float(np.random.rand())) / 2,
}


class MayBeSkipped(nn.Module):
    """Stochastic depth: the number that is drawn scales the layer, or leaves it out. Notes the numbers by phase."""

    def __init__(self, draw: Draw, rate: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.draw = draw
        self.rate = rate
        self.drawn: dict[bool, list[float]] = {False: [], True: []}

    def forward(self, x: Tensor) -> Tensor:
        number = self.draw() if self.rate > 0 else 1.0
        self.drawn[doing_recompute()].append(number)
        return x * 2 if number < self.rate else x + number * self.linear(x).tanh()


def skipping(draw: Draw, rate: float = 0.5) -> nn.Sequential:
    return nn.Sequential(*[MayBeSkipped(draw, rate) for _ in range(4)], nn.Linear(6, 6))


def skipping_layers(model: RoundPipe) -> list[MayBeSkipped]:
    return [layer for layer in model.model if isinstance(layer, MayBeSkipped)]


def numbers_of(model: RoundPipe) -> list[list[float]]:
    """By layer, what its forward has drawn."""
    return [layer.drawn[False] for layer in skipping_layers(model)]


def assert_repeated(model: RoundPipe) -> None:
    """Recomputations of consecutive calls may run at the same time, hence in any order."""
    for position, layer in enumerate(skipping_layers(model)):
        again, first = sorted(layer.drawn[True]), sorted(layer.drawn[False])
        assert again == first, f"layer {position} drew other numbers when recomputed"


def replaying(reference: nn.Module, numbers: list[list[float]]) -> None:
    """Let each layer of a plain model take the numbers that the layers have drawn."""
    for layer, drawn in zip(reference.children(), numbers, strict=False):
        assert isinstance(layer, MayBeSkipped)
        remaining: Iterator[float] = iter(list(drawn))
        layer.draw = lambda remaining=remaining: next(remaining)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("draw", DRAWS)
def test_gradients_are_those_of_the_network_the_loss_was_computed_with(models: Models, draw: str, grain: str) -> None:
    found = []
    for num_devices in (1, 2, 5):
        module = seeded(lambda: skipping(DRAWS[draw]))
        reference = copy.deepcopy(module)
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=RECOMPUTED, recompute_grain=grain)
        model = models.wrap(module, num_devices, model_run_config=config)
        torch.manual_seed(5)
        loss = model.forward_backward((batch(8, 6),), loss_fn=total)
        model.synchronize()
        assert_repeated(model)
        replaying(reference, numbers_of(model))
        expected = [total(reference(x), None) for x in batch(8, 6).tensor_split(NUM_MICROBATCH)]
        for part in expected:
            part.backward()
        assert_same(loss, expected[0] + expected[1] + expected[2] + expected[3], "loss")
        assert_same_grads(model.model, reference)
        found.append((loss, grads_of(model.model), numbers_of(model)))
        assert_same(found[-1], found[0], f"{num_devices} devices")
        models.close()


def test_numbers_do_not_depend_on_the_plan(models: Models) -> None:
    found = []
    for plan in (RECOMPUTED, ONE_STAGE, None):
        model = models.wrap(seeded(lambda: skipping(DRAWS["both"])), 3)
        torch.manual_seed(5)
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=plan)
        model.forward_backward((batch(8, 6),), loss_fn=total, run_config=config)
        model.synchronize()
        found.append((numbers_of(model), grads_of(model.model)))
        assert_same(found[-1], found[0], str(plan))


def test_calls_layers_and_microbatches_draw_different_numbers(models: Models) -> None:
    model = models.wrap(seeded(lambda: skipping(DRAWS["random"])), 2)
    with torch.no_grad():
        for _ in range(2):
            model(batch(8, 6), roundpipe_run_config=microbatches(NUM_MICROBATCH))
    drawn = [number for of_layer in numbers_of(model) for number in of_layer]
    assert len(set(drawn)) == len(drawn) == 2 * 4 * NUM_MICROBATCH


@pytest.mark.parametrize("is_async", [False, True])
def test_training_is_the_same_on_every_device_count(models: Models, is_async: bool) -> None:
    found = []
    for num_devices in (1, 2, 5):
        model = models.wrap(seeded(lambda: skipping(DRAWS["both"])), num_devices)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.01)

        def step_fn(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        torch.manual_seed(5)
        losses = []
        for step in range(4):
            config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=RECOMPUTED)
            losses.append(model.forward_backward((batch(8, 6, seed=step),), loss_fn=total, run_config=config))
            model.step(step_fn, is_async)
        model.synchronize()
        assert_repeated(model)
        found.append((losses, dict(model.state_dict())))
        assert_same(found[-1], found[0], f"{num_devices} devices")


def test_backward_of_a_forward_repeats_its_numbers(models: Models) -> None:
    module = seeded(lambda: skipping(DRAWS["both"]))
    reference = copy.deepcopy(module)
    model = models.wrap(module, 3)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=ModelExecutePlan([range(5)], [range(5)]))
    output = model(batch(8, 6), roundpipe_run_config=config)
    total(output, None).backward()
    model.synchronize()
    assert_repeated(model)
    replaying(reference, numbers_of(model))
    expected = torch.cat([reference(x) for x in batch(8, 6).tensor_split(NUM_MICROBATCH)])
    assert_same(output.detach(), expected.detach(), "output")


def test_a_layer_may_begin_to_draw_later(models: Models) -> None:
    """A drop rate that grows from zero: the first calls draw nothing."""
    model = models.wrap(seeded(lambda: skipping(DRAWS["both"], rate=0.0)), 2)
    for rate in (0.0, 0.3, 0.6):
        for layer in skipping_layers(model):
            layer.rate = rate
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=RECOMPUTED)
        model.forward_backward((batch(8, 6),), loss_fn=total, run_config=config)
        model.synchronize()
        assert_repeated(model)
    assert len(set(numbers_of(model)[0])) == 1 + 2 * NUM_MICROBATCH


def test_without_preserved_rng_state_recomputation_draws_anew(models: Models) -> None:
    model = models.wrap(seeded(lambda: skipping(DRAWS["random"])), 2)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=RECOMPUTED, preserve_rng_state=False)
    model.forward_backward((batch(8, 6),), loss_fn=total, run_config=config)
    model.synchronize()
    for layer in skipping_layers(model):
        assert not set(layer.drawn[True]) & set(layer.drawn[False])


def test_loss_fn_draws_the_same_on_every_device_count(models: Models) -> None:
    losses = []
    for num_devices in (1, 2, 5):
        model = models.wrap(seeded(lambda: nn.Linear(6, 6)), num_devices)
        torch.manual_seed(5)
        losses.append(
            model.forward_backward(
                (batch(8, 6),), loss_fn=lambda o, y: o.sum() * random.random(), run_config=microbatches(4)
            )
        )
        assert_same(losses[-1], losses[0], f"{num_devices} devices")


def test_threads_of_the_user_and_layers_do_not_see_each_others_numbers(models: Models) -> None:
    """The main thread draws between the forward and its recomputation, and in the middle of the recomputation."""
    recomputing, may_go_on = threading.Event(), threading.Event()

    def draw() -> float:
        first = random.random() + float(np.random.rand())
        if doing_recompute():
            recomputing.set()
            assert may_go_on.wait(WAIT_S)
        return (first + random.random() + float(np.random.rand())) / 4

    model = models.wrap(seeded(lambda: skipping(draw)), 2)
    random.seed(1)
    np.random.seed(2)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=RECOMPUTED)
    model.forward_backward((batch(8, 6),), loss_fn=total, run_config=config)
    ours: list[Any] = [random.random(), np.random.rand(), imported_random()]
    assert recomputing.wait(WAIT_S)
    ours += [random.random(), np.random.rand(), random.gauss(0, 1), random.randint(0, 9), imported_rand()]
    may_go_on.set()
    model.synchronize()
    ours += [random.random(), np.random.rand()]
    assert_repeated(model)
    random.seed(1)
    np.random.seed(2)
    plain = [random.random(), np.random.rand(), random.random()]
    plain += [random.random(), np.random.rand(), random.gauss(0, 1), random.randint(0, 9), np.random.rand()]
    plain += [random.random(), np.random.rand()]
    assert ours == plain
