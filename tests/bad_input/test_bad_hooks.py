"""Gradient hooks that cannot work on a device as they do in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input_scene import Scene, notes_of, refused
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from roundpipe import RoundPipe
from roundpipe.errors import UsageError

Hook = Callable[[Any], Any]


def clear(param: Any) -> None:
    param.grad = None


def update(param: Any) -> None:
    param.add_(param.grad, alpha=-0.1)


def step_by_dictionary(optimizers: dict[Any, torch.optim.Optimizer]) -> Hook:
    """The optimizer-in-backward recipe of the PyTorch tutorials."""

    def hook(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    return hook


@pytest.mark.parametrize(
    ("hook", "what"),
    [(clear, "set .grad to None"), (update, "wrote to the parameter's values")],
    ids=["clear", "update"],
)
def test_a_hook_that_takes_the_place_of_the_optimizer(scene: Scene, hook: Hook, what: str) -> None:
    handle = scene.model.model[4].weight.register_post_accumulate_grad_hook(hook)
    with refused(UsageError, "'4.weight'", what, "step_fn") as caught:
        scene.forward_backward()
        scene.model.synchronize()
    assert "layer 4, microbatch 0, backward on cpu:" in notes_of(caught.value)
    handle.remove()


def test_an_optimizer_looked_up_by_parameter(scene: Scene) -> None:
    weight = scene.model.model[0].weight
    hook = step_by_dictionary({weight: torch.optim.SGD([weight], lr=0.1)})
    handle = weight.register_post_accumulate_grad_hook(hook)
    with refused(UsageError, "'0.weight'", "device's copy", "step_fn"):
        scene.forward_backward()
        scene.model.synchronize()
    handle.remove()


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_parameters_at_once(scene: Scene, mode: Any) -> None:
    params = list(scene.model.model.parameters())
    handle = register_multi_grad_hook(params, lambda grads: None, mode=mode)
    with refused(UsageError, "register_multi_grad_hook", "'0.weight'", "Tensor.register_hook"):
        scene.forward_backward()
    handle.remove()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_an_exception_in_a_hook(scene: Scene, kind: str) -> None:
    def fail(value: Any) -> None:
        raise ArithmeticError("the hook failed")

    handle = getattr(scene.model.model[0].weight, kind)(fail)
    with refused(ArithmeticError, "the hook failed") as caught:
        scene.forward_backward()
        scene.model.synchronize()
    assert "layer 0, microbatch 0, backward on cpu:" in notes_of(caught.value)
    handle.remove()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_of_several_layers(kind: str) -> None:
    first, middle, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    calls: list[Any] = []
    with RoundPipe(nn.Sequential(first, middle, last), devices=["cpu"] * 2) as model:

        def call() -> None:
            model.forward_backward((torch.ones(4, 4),), loss_fn=lambda o, y: o.sum())
            model.synchronize()

        handle = getattr(first.weight, kind)(calls.append)
        with refused(UsageError, "'0.weight'", "used by layers 0, 2", "separate parameters", "step_fn"):
            call()
        with refused(UsageError, "used by layers 0, 2"):
            model(torch.ones(4, 4)).sum().backward()
        assert not calls
        handle.remove()
        getattr(middle.weight, kind)(calls.append)
        call()
        assert calls
