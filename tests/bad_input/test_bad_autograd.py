"""Backward passes that RoundPipe does not support, and wrong uses of save_for_recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input_scene import Scene, notes_of, refused
from test_bad_loss import forget_one_call
from torch import nn

from roundpipe import (
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from roundpipe.errors import RecomputeError, StaleGraphError


@pytest.fixture
def forward(scene: Scene) -> Callable[[], torch.Tensor]:
    """A forward call after which the buffers it wrote are restored."""

    def call() -> torch.Tensor:
        torch.manual_seed(5)
        output: torch.Tensor = scene.model(scene.x)
        forget_one_call(scene)
        return output

    return call


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_second_derivative(bystander: Scene, forward: Callable[[], torch.Tensor]) -> None:
    with refused(StaleGraphError, "second derivative", "create_graph=True", "plain model"):
        forward().square().sum().backward(create_graph=True)


def test_autograd_grad(scene: Scene, forward: Callable[[], torch.Tensor]) -> None:
    x = scene.x.clone().requires_grad_()
    scene.x, plain = x, scene.x
    output = forward()
    scene.x = plain
    with refused(StaleGraphError, "torch.autograd.grad()", "backward()", "synchronize()"):
        torch.autograd.grad(output.sum(), x)
    with refused(StaleGraphError, "backward(inputs=...)"):
        output.sum().backward(inputs=[x])
    assert x.grad is None


def test_backward_twice(scene: Scene, forward: Callable[[], torch.Tensor]) -> None:
    loss = forward().sum()
    loss.backward(retain_graph=True)
    with refused(StaleGraphError, "ran already", "call forward again"):
        loss.backward()
    scene.model.zero_grad()


def test_backward_after_step(scene: Scene, forward: Callable[[], torch.Tensor]) -> None:
    loss = forward().sum()
    scene.model.step(lambda: None, is_async=False)
    with refused(StaleGraphError, "scene", "weights were updated", "backward() before step()"):
        loss.backward()


def test_backward_after_an_asynchronous_step(scene: Scene, forward: Callable[[], torch.Tensor]) -> None:
    """The call after an async step still reads the old weights, so only the next step makes its graph stale."""
    loss = forward().sum()
    scene.model.step(lambda: None)
    scene.model.step(lambda: None)
    with refused(StaleGraphError, "weights were updated"):
        loss.backward()


# ---- recompute data --------------------------------------------------------------------------------------------------


class Saves(nn.Module):
    """A layer whose forward calls `save` with its input."""

    def __init__(self, save: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.save = save

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        self.save(x)
        return x


def recomputed(save: Callable[[torch.Tensor], Any]) -> RoundPipe:
    """A model whose layer 0 is recomputed in forward_backward."""
    plan = ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)])
    model = nn.Sequential(Saves(save), nn.Linear(4, 1))
    return RoundPipe(model, devices=["cpu"], model_run_config=RoundPipeRunConfig(execute_plan=plan))


def assert_recompute_refused(save: Callable[[torch.Tensor], Any], *fragments: str) -> str:
    with recomputed(save) as model:
        before = [param.clone() for param in model.parameters()]
        with refused(RecomputeError, *fragments) as caught:
            model.forward_backward((torch.ones(4, 4),), loss_fn=lambda outputs, labels: outputs.sum())
            model.synchronize()
        assert all(torch.equal(now, old) for now, old in zip(model.parameters(), before, strict=True))
        model.model[0].save = lambda x: None
        assert model.forward_backward((torch.ones(4, 4),), loss_fn=lambda out, _: out.sum()).isfinite()
    return notes_of(caught.value)


def test_saving_twice() -> None:
    def twice(x: torch.Tensor) -> None:
        save_for_recompute(1)
        save_for_recompute(2)

    notes = assert_recompute_refused(twice, "save_for_recompute() was called twice", "in one call")
    assert "layer 0, microbatch 0" in notes


def test_saving_a_tensor_that_requires_grad() -> None:
    fragments = ["save_for_recompute()", "(2, 4)", "requires grad", "detach()"]
    assert_recompute_refused(lambda x: save_for_recompute(x), *fragments)
    assert_recompute_refused(lambda x: save_for_recompute({"deep": [x]}), *fragments)


def test_reading_recompute_data_in_the_forward_pass() -> None:
    assert_recompute_refused(
        lambda x: get_recompute_data(), "get_recompute_data()", "forward phase", "doing_recompute() first"
    )


def test_reading_recompute_data_that_nobody_saved() -> None:
    notes = assert_recompute_refused(
        lambda x: get_recompute_data() if doing_recompute() else None, "saved nothing", "save_for_recompute"
    )
    assert "recompute" in notes


def test_reading_recompute_data_outside_a_layer(scene: Scene) -> None:
    with refused(RecomputeError, "get_recompute_data()", "outside a layer's forward"):
        get_recompute_data()
    with refused(RecomputeError, "get_recompute_data()", "outside a layer's forward"):
        scene.forward_backward(loss_fn=lambda outputs, labels: get_recompute_data())


def test_a_layer_that_recomputes_something_else() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            x = x * self.weight
            return (x, x + 1) if doing_recompute() else (x,)

    class First(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            first: torch.Tensor = x[0]
            return first

    plan = ModelExecutePlan([range(0, 1)], [range(1, 2), range(0, 1)])
    config = RoundPipeRunConfig(execute_plan=plan)
    model = RoundPipe(nn.Sequential(Fickle(), First()), devices=["cpu"], model_run_config=config)
    with model, refused(RecomputeError, "layer 0 returned 2 tensors when recomputed but 1", "save_for_recompute"):
        model.forward_backward((torch.ones(2, 2),), loss_fn=lambda outputs, labels: outputs.sum())
        model.synchronize()
