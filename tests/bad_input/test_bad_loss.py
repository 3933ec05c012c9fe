"""Loss functions that raise, or return values that cannot be trained with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input_scene import NUM_MICROBATCH, Scene, loss_fn, notes_of, raising, refused
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ArgumentTypeError, UsageError


def test_a_loss_function_that_cannot_be_called(scene: Scene) -> None:
    for function in (None, "mse", torch.tensor(1.0)):
        with refused(ArgumentTypeError, "loss_fn must be callable", "(outputs, labels)", type(function).__name__):
            scene.forward_backward(loss_fn=function)


def test_a_loss_function_with_other_arguments(scene: Scene) -> None:
    with pytest.raises(TypeError, match="positional argument") as caught:
        scene.forward_backward(loss_fn=lambda outputs: outputs.sum())
    assert "loss_fn" in notes_of(caught.value)


def test_a_loss_that_is_no_tensor(scene: Scene) -> None:
    for value in (None, 1.5, "loss", {"loss": 1}):
        with refused(ArgumentTypeError, "loss_fn must return a tensor", repr(value)) as caught:
            scene.forward_backward(loss_fn=lambda outputs, labels, value=value: value)
        assert "microbatch 0" in notes_of(caught.value)


def test_a_loss_without_any_tensor(scene: Scene) -> None:
    for value in ([], (), [1.5], [None]):
        with refused(ArgumentTypeError, "non-empty sequence of tensors", repr(value)):
            scene.forward_backward(loss_fn=lambda outputs, labels, value=value: value)


def test_a_loss_that_needs_no_grad(scene: Scene) -> None:
    with refused(UsageError, "loss 0", "does not require grad", "detach()"):
        scene.forward_backward(loss_fn=lambda outputs, labels: loss_fn(outputs.detach(), labels))
    with refused(UsageError, "loss 1", "does not require grad"):
        scene.forward_backward(loss_fn=lambda outputs, labels: [loss_fn(outputs, labels), labels.sum()])


def test_a_loss_that_is_not_scalar(scene: Scene) -> None:
    with refused(UsageError, "loss 0", "(2, 2)", "one element", ".mean() or .sum()"):
        scene.forward_backward(loss_fn=lambda outputs, labels: outputs - labels)
    with refused(UsageError, "loss 1", "(2, 2)"):
        scene.forward_backward(loss_fn=lambda outputs, labels: [outputs.sum(), outputs])


def test_the_default_loss_function_on_outputs_that_are_no_loss(scene: Scene) -> None:
    with refused(UsageError, "loss 0", "(2, 2)", "loss_fn"):
        scene.model.forward_backward(input_args=(scene.x,))


def counting(make: Callable[[int, torch.Tensor], Any]) -> Callable[[Any, Any], Any]:
    """A loss function whose results differ in kind between microbatches."""
    calls = iter(range(NUM_MICROBATCH))
    return lambda outputs, labels: make(next(calls), loss_fn(outputs, labels))


def test_losses_that_change_in_number(scene: Scene) -> None:
    for plan_microbatch in (1, 2):
        with refused(UsageError, f"microbatch {plan_microbatch}", "same number for each"):
            scene.forward_backward(
                loss_fn=counting(lambda j, loss, odd=plan_microbatch: [loss] * (1 if j == odd else 2))
            )


def test_losses_that_change_between_a_tensor_and_a_list(scene: Scene) -> None:
    with refused(UsageError, "microbatch 1", "a tensor", "a sequence", "same"):
        scene.forward_backward(loss_fn=counting(lambda j, loss: loss if j == 0 else [loss]))


def test_a_loss_function_that_fails_keeps_what_it_was_handling(scene: Scene) -> None:
    def fail(outputs: Any, labels: Any) -> Any:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    with refused(ValueError, "second") as caught:
        scene.forward_backward(loss_fn=fail)
    assert isinstance(caught.value.__context__, KeyError)
    assert caught.value.__context__.__context__ is None
    assert "loss_fn" in notes_of(caught.value)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    reason: str


def test_an_exception_that_takes_no_notes(scene: Scene) -> None:
    """The exception is raised without a note of its place; the worker and the optimizer thread go on."""
    for use in (
        lambda: scene.forward_backward(loss_fn=raising(FrozenError("loss"))),
        lambda: scene.model.step(raising(FrozenError("step")), is_async=False),
    ):
        with pytest.raises((FrozenError, dataclasses.FrozenInstanceError)):
            use()


def test_a_model_of_which_nothing_trains() -> None:
    model = nn.Linear(4, 2).requires_grad_(False)
    with RoundPipe(model, devices=["cpu"]) as wrapped:
        with refused(UsageError, "does not require grad", "Train at least one parameter"):
            wrapped.forward_backward((torch.ones(4, 4),), loss_fn=lambda outputs, labels: outputs.sum())
        assert wrapped(torch.ones(4, 4)).shape == (4, 2)


def test_training_without_grad_mode(scene: Scene) -> None:
    with torch.no_grad(), refused(UsageError, "forward_backward() needs gradients", "torch.no_grad()", "forward()"):
        scene.forward_backward()
    with torch.inference_mode(), refused(UsageError, "forward_backward() needs gradients"):
        scene.forward_backward()
    with refused(UsageError, "requires_grad=False"):
        scene.forward_backward(run_config=RoundPipeRunConfig(requires_grad=False))


def test_the_model_called_in_its_own_loss_function(scene: Scene) -> None:
    with refused(UsageError, "scene was called from inside", "loss_fn", "outside"):
        scene.forward_backward(loss_fn=lambda outputs, labels: scene.model(scene.x).sum())


def test_gradients_that_were_gathered_survive_a_refused_argument(scene: Scene) -> None:
    """A call refused before it runs keeps the gathered gradients; a call that fails later drops them and says so."""
    scene.forward_backward(seed=5)
    scene.model.synchronize()
    gathered = {name: param.grad.clone() for name, param in scene.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in scene.model.named_buffers()}
    with refused(ArgumentTypeError, "loss_fn"):
        scene.forward_backward(loss_fn=None)
    scene.model.synchronize()
    assert all(torch.equal(param.grad, gathered[name]) for name, param in scene.model.named_parameters())
    with refused(ZeroDivisionError, "loss") as caught:
        scene.forward_backward(loss_fn=raising(ZeroDivisionError("loss")))
    assert "gradients gathered since the last optimizer step were dropped" in notes_of(caught.value)
    scene.model.synchronize()
    assert all(param.grad is None for param in scene.model.parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in scene.model.named_buffers())
    forget_one_call(scene)


def forget_one_call(scene: Scene) -> None:
    """Restore the buffers as they were before the call that the test makes."""
    fresh = Scene()
    with torch.no_grad():
        for mine, theirs in zip(scene.model.buffers(), fresh.model.buffers(), strict=True):
            mine.copy_(theirs)
    fresh.close()
