"""Wrong uses of step(), optimizers, GradScaler and clip_grad_norm_."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input_scene import Scene, notes_of, raising, refused
from torch import nn

from roundpipe import GradScaler, RoundPipe, clip_grad_norm_
from roundpipe.errors import ArgumentTypeError, ConfigError, UsageError


def test_a_step_function_that_cannot_be_called(scene: Scene) -> None:
    for function in (None, scene.optimizer, "step"):
        with refused(ArgumentTypeError, "step_fn must be callable", type(function).__name__, "optimizer.step"):
            scene.model.step(function)  # type: ignore[arg-type]


def test_a_step_mode_that_is_no_bool(scene: Scene) -> None:
    """`model.step(step_fn, optimizer)` passes the optimizer as is_async, not as an argument of step_fn."""
    for mode in (scene.optimizer, "sync", None, 1):
        with refused(ArgumentTypeError, "is_async must be True or False", "step_fn"):
            scene.model.step(scene.step_fn, mode)  # type: ignore[arg-type]


def test_an_optimizer_on_the_models_own_parameters(scene: Scene) -> None:
    wrong = torch.optim.SGD(scene.model.parameters(), lr=0.1)
    with refused(UsageError, "model's own parameters", "'0.weight'", "optim_parameters()"):
        scene.model.step(wrong.step, is_async=False)
    scene.model.step(wrong.step)
    with refused(UsageError, "model's own parameters", "'0.weight'", "optim_parameters()") as caught:
        scene.model.synchronize()
    assert "step_fn" in notes_of(caught.value)


def test_an_optimizer_without_parameters(bystander: Scene) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with RoundPipe(frozen, devices=["cpu"]) as model, pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD(model.optim_parameters(), lr=0.1)


def test_the_model_called_in_step_fn(scene: Scene) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: scene.model(scene.x),
        lambda: scene.forward_backward(),
        lambda: scene.model.step(lambda: None),
        lambda: scene.model.synchronize(),
        lambda: scene.model.zero_grad(),
    ]
    for call in calls:
        with refused(UsageError, "scene was called from inside step_fn", "outside"):
            scene.model.step(call, is_async=False)


def test_the_model_closed_in_step_fn(scene: Scene) -> None:
    with refused(UsageError, "scene", "closed from inside step_fn", "outside"):
        scene.model.step(scene.model.close, is_async=False)


def test_a_step_function_with_other_arguments(scene: Scene) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        scene.model.step(lambda optimizer: optimizer.step(), False)
    assert "step_fn of optimizer step" in notes_of(caught.value)


def test_a_step_function_that_fails_before_it_changes_anything(scene: Scene) -> None:
    with refused(ZeroDivisionError, "learning rate") as caught:
        scene.model.step(raising(ZeroDivisionError("learning rate")), is_async=False)
    assert "nothing of this step is published" in notes_of(caught.value)


def test_sparse_gradients() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), Mean(), nn.Linear(3, 1))
    x = torch.arange(8).reshape(4, 2) % 5
    with RoundPipe(model, devices=["cpu"]) as wrapped:
        before = [param.clone() for param in wrapped.parameters()]
        for _ in range(2):
            with refused(UsageError, "'0.weight'", "sparse_coo", "sparse=False"):
                wrapped.forward_backward((x,), loss_fn=lambda outputs, labels: outputs.sum())
                wrapped.synchronize()
        assert all(torch.equal(now, old) for now, old in zip(wrapped.parameters(), before, strict=True))
        model[0].sparse = False
        wrapped.forward_backward((x,), loss_fn=lambda outputs, labels: outputs.sum())
        wrapped.synchronize()
        assert model[0].weight.grad is not None


# ---- GradScaler ------------------------------------------------------------------------------------------------------


def test_a_scaler_of_impossible_values(bystander: Scene) -> None:
    faults: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"init_scale": 0}, ConfigError, "greater than 0"),
        ({"init_scale": -2.0}, ConfigError, "greater than 0"),
        ({"init_scale": math.inf}, ConfigError, "finite float32"),
        ({"init_scale": math.nan}, ConfigError, "greater than 0"),
        ({"init_scale": "65536"}, ArgumentTypeError, "give a number"),
        ({"init_scale": True}, ArgumentTypeError, "give a number"),
        ({"growth_factor": 1.0}, ConfigError, "greater than 1"),
        ({"growth_factor": None}, ArgumentTypeError, "give a number"),
        ({"backoff_factor": 1.0}, ConfigError, "between 0 and 1"),
        ({"backoff_factor": -0.5}, ConfigError, "between 0 and 1"),
        ({"growth_interval": 0}, ConfigError, "at least 1"),
        ({"growth_interval": 2.5}, ArgumentTypeError, "give an integer"),
    ]
    for options, kind, advice in faults:
        ((name, value),) = options.items()
        with refused(kind, f"{name}={value!r}", advice):
            GradScaler(**options)


def test_scaler_settings_of_impossible_values_change_nothing(bystander: Scene) -> None:
    scaler = GradScaler(init_scale=8.0)
    before = scaler.state_dict()
    with refused(ConfigError, "growth_factor=0.5"):
        scaler.set_growth_factor(0.5)
    with refused(ConfigError, "backoff_factor=2"):
        scaler.set_backoff_factor(2)
    with refused(ArgumentTypeError, "growth_interval='often'"):
        scaler.set_growth_interval("often")  # type: ignore[arg-type]
    with refused(ConfigError, "new_scale=-1.0"):
        scaler.update(-1.0)
    with refused(ConfigError, "new_scale", "(2,)", "one element"):
        scaler.update(torch.ones(2))
    with refused(UsageError, "state dict is empty", "disabled"):
        scaler.load_state_dict({})
    with refused(ConfigError, "growth_factor", "unknown keys", "'other'"):
        scaler.load_state_dict({"scale": 1.0, "other": 2})
    assert scaler.state_dict() == before


def test_a_scaler_in_the_wrong_place(scene: Scene) -> None:
    scaler = GradScaler(init_scale=8.0)
    with refused(UsageError, "GradScaler.update()", "loss_fn or step_fn", "main thread"):
        scene.model.step(scaler.update, is_async=False)
    with refused(UsageError, "GradScaler.state_dict()", "main thread"):
        scene.forward_backward(loss_fn=lambda outputs, labels: scaler.state_dict())
    with refused(ArgumentTypeError, "GradScaler.scale()", "float", "tensor"):
        scene.forward_backward(loss_fn=lambda outputs, labels: scaler.scale(1.5))


def test_a_scaler_used_twice_in_a_step(scene: Scene) -> None:
    scaler = GradScaler(init_scale=8.0)

    def twice() -> None:
        scaler.unscale_(scene.optimizer)
        scaler.unscale_(scene.optimizer)

    with refused(UsageError, "unscale_()", "once, before step()"):
        scene.model.step(twice, is_async=False)
    with refused(UsageError, "closure", "not supported"):
        scene.model.step(lambda: scaler.step(scene.optimizer, lambda: 0.0), is_async=False)


def test_what_is_no_optimizer_given_to_a_scaler(scene: Scene) -> None:
    scaler = GradScaler(init_scale=8.0)
    for method in (scaler.step, scaler.unscale_):
        with refused(ArgumentTypeError, "RoundPipe", "torch.optim.Optimizer"):
            method(scene.model)


def test_half_precision_gradients_given_to_a_scaler(bystander: Scene) -> None:
    model = RoundPipe(nn.Linear(2, 2).half(), devices=["cpu"])
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    scaler = GradScaler(init_scale=8.0)
    model.forward_backward((torch.ones(2, 2).half(),), loss_fn=lambda out, _: scaler.scale(out.float().sum()))
    with refused(UsageError, "float16", "optim_dtype=torch.float32"):
        model.step(lambda: scaler.step(optimizer), is_async=False)
    model.close()


# ---- clip_grad_norm_ -------------------------------------------------------------------------------------------------


def test_norms_that_cannot_be_clipped_to(scene: Scene) -> None:
    for norm in (0, -1.0, math.nan):
        with refused(ConfigError, "clip_grad_norm_()", f"max_norm={norm!r}", "greater than 0"):
            clip_grad_norm_(scene.model, norm)
    for norm in (None, "1.0", True, torch.ones(2)):
        with refused(ArgumentTypeError, "clip_grad_norm_()", "max_norm", type(norm).__name__, "number"):
            clip_grad_norm_(scene.model, norm)  # type: ignore[arg-type]


def test_what_has_no_gradients_to_clip(bystander: Scene) -> None:
    for target in (3, None):
        with refused(ArgumentTypeError, "clip_grad_norm_()", type(target).__name__, "optim_parameters()"):
            clip_grad_norm_(target, 1.0)  # type: ignore[arg-type]
    with refused(ArgumentTypeError, "element 0", "str"):
        clip_grad_norm_(["0.weight"], 1.0)  # type: ignore[list-item]
    with refused(ArgumentTypeError, "Linear", "module.parameters()"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0)  # type: ignore[arg-type]


def test_a_norm_type_that_is_none(scene: Scene) -> None:
    for norm_type in ("two", None):
        with refused(ArgumentTypeError, "clip_grad_norm_()", f"norm_type={norm_type!r}", "number"):
            clip_grad_norm_(scene.model, 1.0, norm_type)  # type: ignore[arg-type]
    for norm_type in (math.nan, 0.0, -1.0):
        with refused(ConfigError, "clip_grad_norm_()", f"norm_type={norm_type!r}", "greater than 0"):
            clip_grad_norm_(scene.model, 1.0, norm_type)
