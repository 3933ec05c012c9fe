"""Calls from several threads are serialised, never mixed; a call from inside user code is refused, not deadlocked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers_faults import (
    Background,
    Bench,
    Traps,
    batch,
    bench,
    build_model,
    make_optimizer,
    mse,
    notes_of,
    raised_by,
)
from helpers_parity import assert_same, call_reference
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import UsageError

CONFIG = RoundPipeRunConfig(num_microbatch=3)


def wrapped(num_devices: int, seed: int = 3) -> RoundPipe:
    module = build_model(Traps(), batch_norm=False, seed=seed)
    return RoundPipe(module, devices=["cpu"] * num_devices, model_run_config=CONFIG)


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Runs them on threads that start at the same moment."""
    barrier = threading.Barrier(len(functions))

    def begin(function: Callable[[], Any]) -> Any:
        barrier.wait(30)
        return function()

    threads = [Background(lambda function=function: begin(function)) for function in functions]  # type: ignore[misc]
    return [thread.result() for thread in threads]


@pytest.mark.parametrize(
    "num_devices", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_training_calls_on_one_model(num_devices: int) -> None:
    """Two calls: whichever comes first, the sum of their gradients is the same."""
    with wrapped(num_devices) as model:
        for round_number in range(5):
            seeds = (2 * round_number, 2 * round_number + 1)
            reference = build_model(Traps(), batch_norm=False)
            expected = [call_reference(reference, batch(s)[:1], {}, batch(s)[1], mse, 3).loss for s in seeds]

            def call(seed: int) -> Tensor:
                x, label = batch(seed)
                loss: Tensor = model.forward_backward((x,), label=label, loss_fn=mse)
                return loss

            losses = together(*[lambda seed=seed: call(seed) for seed in seeds])  # type: ignore[misc]
            assert_same(losses, expected, "losses")
            model.synchronize()
            ours = {name: p.grad for name, p in model.named_parameters()}
            assert_same(ours, {name: p.grad for name, p in reference.named_parameters()}, "gradients")
            model.zero_grad()


def test_inference_and_training_on_one_model() -> None:
    with wrapped(3) as model:
        x, label = batch(1)
        with torch.no_grad():
            expected = model(x)

        def infer() -> list[Tensor]:
            with torch.no_grad():
                return [model(x) for _ in range(5)]

        def train() -> None:
            for _ in range(5):
                model.forward_backward((x,), label=label, loss_fn=mse)

        for outputs in together(infer, train, infer, infer)[0::2]:
            for output in outputs or []:
                assert_same(output, expected)


@pytest.mark.parametrize(
    "num_devices", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_two_models_on_one_pool(num_devices: int) -> None:
    def train(model: RoundPipe) -> list[Any]:
        with model:
            optimizer = make_optimizer(model.optim_parameters())
            losses = []
            for iteration in range(5):
                x, label = batch(iteration)
                losses.append(model.forward_backward((x,), label=label, loss_fn=mse))
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()), iteration % 2 == 0)
            model.synchronize()
            return [losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}]

    seeds = (3, 4, 5)
    expected = [train(wrapped(num_devices, seed)) for seed in seeds]
    for _ in range(3):
        models = [wrapped(num_devices, seed) for seed in seeds]  # not on the threads: they share torch's generator
        assert_same(together(*[lambda model=model: train(model) for model in models]), expected)  # type: ignore[misc]


def test_a_failure_on_one_model_does_not_touch_another_on_the_same_pool() -> None:
    with bench(2) as made, bench(2) as other:
        made.train_right(1)
        other.train_right(1)
        errors = [RuntimeError(number) for number in range(5)]

        def fail() -> None:
            for error in errors:
                assert raised_by(made.failing("forward", 1, 0, error)) is error

        def go_on() -> None:
            for seed in range(5):
                other.train_right(seed)

        together(fail, go_on)
        made.train_right(2)


def inside_calls(made: Bench) -> dict[str, Callable[[], object]]:
    x, label = batch(1)
    return {
        "forward": lambda: made.model(x),
        "forward_backward": lambda: made.model.forward_backward((x,), label=label, loss_fn=mse),
        "step": lambda: made.model.step(lambda: None),
        "sync step": lambda: made.model.step(lambda: None, False),
        "synchronize": made.model.synchronize,
        "zero_grad": made.model.zero_grad,
        "timeline": made.model.timeline,
        "close": made.model.close,
    }


@pytest.mark.parametrize(
    "what", ["forward", "forward_backward", "step", "sync step", "synchronize", "zero_grad", "timeline", "close"]
)
@pytest.mark.parametrize("where", ["forward", "recompute", "backward", "loss_fn", "step_fn", "async step_fn"])
def test_a_call_from_inside_user_code_is_refused(what: str, where: str) -> None:
    with bench(2) as made:
        made.train_right(1)
        call = inside_calls(made)[what]
        point = where.removeprefix("async ")
        layer = None if point.endswith("_fn") else 1
        made.traps.act(point, layer, 0, call)
        caught = Background(
            lambda: raised_by(
                lambda: made.call(2), lambda: made.step(where.startswith("async")), lambda: made.model.synchronize()
            )
        ).result()
        assert isinstance(caught, UsageError), caught
        assert "inside step_fn, loss_fn or a layer" in str(caught)
        assert notes_of(caught)
        made.reference.load_state_dict(made.model.state_dict())
        made.train_right(3)


def test_another_model_of_the_pool_is_refused_too() -> None:
    """It would wait for the very worker it is called on."""
    with bench(1) as made, bench(1) as other:
        x, _ = batch(1)
        made.traps.act("forward", 0, 0, lambda: other.model(x))
        assert isinstance(Background(lambda: raised_by(lambda: made.call(1))).result(), UsageError)


def test_a_split_or_merge_function_may_call_the_model() -> None:
    """They run on the calling thread, where nothing is held that the inner call needs."""
    with wrapped(2) as model:
        x, label = batch(1)
        with torch.no_grad():
            expected = model(x)

        def merge(outputs: Any) -> Any:
            with torch.no_grad():
                assert_same(model(x), expected)
            return torch.cat([output.detach() for output in outputs])

        with torch.no_grad():
            config = RoundPipeRunConfig(merge_output=merge)
            call = Background(lambda: _without_grad(lambda: model(x, roundpipe_run_config=config)))
            assert_same(call.result(), expected)
        assert label is not None


def _without_grad(function: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return function()
