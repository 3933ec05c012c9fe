"""forward_backward and step train as the reference loop does, to the last bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    DEVICE_COUNTS,
    WAIT_S,
    Models,
    StalenessReference,
    assert_same,
    assert_same_grads,
    assert_same_state,
    batch,
    call_reference,
    check_fused,
    microbatches,
    mlp,
    mse,
    seeded,
)
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.optim import Adam

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
S, A, WAIT = "sync step", "async step", "synchronize"


def data(iteration: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    return batch(rows, 5, seed=2 * iteration), batch(rows, 5, seed=2 * iteration + 1)


def make_step(model: RoundPipe, make_optimizer: MakeOptimizer) -> Callable[[], None]:
    optimizer = make_optimizer(list(model.optim_parameters()))

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step_fn


def train_both(
    model: RoundPipe, reference: StalenessReference, step_fn: Callable[[], None], events: list[str], calls: int = 1
) -> None:
    """One iteration of `calls` calls per event; every loss is compared."""
    for iteration, event in enumerate(events):
        if event == WAIT:
            model.synchronize()
            reference.synchronize()
            assert_same_state(model.model, reference.module)
            continue
        for call in range(calls):
            x, y = data(100 * call + iteration)
            expected = call_reference(reference.module, (x,), label=y)
            loss = model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
            assert_same(loss, expected.loss, f"loss of iteration {iteration}, call {call}")
        model.step(step_fn, is_async=event == A)
        reference.step(is_async=event == A)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model.model, reference.module)


@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
def test_loss_outputs_and_gradients_equal_the_reference(models: Models, num_devices: int) -> None:
    x, y = data(0)
    check_fused(models, seeded(mlp), num_devices, (x,), label=y, num_microbatch=4)


@pytest.mark.parametrize("rows", [4, 7, 9])
def test_uneven_microbatches_equal_the_reference(models: Models, num_devices: int, rows: int) -> None:
    x, y = data(0, rows)
    check_fused(models, seeded(mlp), num_devices, (x,), label=y, num_microbatch=4, num_calls=1)


def test_the_default_number_of_microbatches_is_one_more_than_devices(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    x, y = data(0, 18)
    expected = call_reference(module, (x,), label=y, num_microbatch=num_devices + 1)
    assert_same(model.forward_backward((x,), label=y, loss_fn=mse), expected.loss)


def test_losses_in_a_sequence_are_summed_one_by_one(models: Models, num_devices: int) -> None:
    def two_losses(output: Tensor, label: Tensor) -> list[Tensor]:
        return [mse(output, label), output.abs().mean()]

    x, y = data(0)
    check_fused(models, seeded(mlp), num_devices, (x,), label=y, loss_fn=two_losses)


def test_without_return_outputs_the_loss_comes_alone(models: Models) -> None:
    x, y = data(0)
    loss = models.wrap(seeded(mlp), 2).forward_backward((x,), label=y, loss_fn=mse)
    assert isinstance(loss, Tensor)
    assert not loss.requires_grad


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "events",
    [[S] * 4, [A] * 5, [S, A, A, S, A, S, S], [A, A, WAIT, A, A, WAIT, S, WAIT, A]],
    ids=["sync", "async", "mixed", "synchronized"],
)
def test_weights_after_steps_equal_a_reference_of_exact_staleness(
    models: Models, num_devices: int, optimizer: str, events: list[str]
) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    train_both(
        model,
        StalenessReference(module, OPTIMIZERS[optimizer]),
        make_step(model, OPTIMIZERS[optimizer]),
        events,
    )


@pytest.mark.parametrize("event", [S, A])
def test_calls_before_a_step_accumulate(models: Models, num_devices: int, event: str) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    reference = StalenessReference(module, OPTIMIZERS["adam"])
    train_both(model, reference, make_step(model, OPTIMIZERS["adam"]), [event] * 3, calls=3)


@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
def test_our_adam_takes_part_like_any_optimizer(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Adam(params, lr=0.01)

    train_both(model, StalenessReference(module, make), make_step(model, make), [A, A, S, A])


def test_a_learning_rate_scheduler_on_the_optimizer_works(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    ours = torch.optim.SGD(model.optim_parameters(), lr=0.3)
    our_schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
    plain = torch.optim.SGD(module.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)

    def step_fn() -> None:
        ours.step()
        ours.zero_grad()
        our_schedule.step()

    for iteration in range(4):
        x, y = data(iteration)
        model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
        model.step(step_fn, is_async=False)
        call_reference(module, (x,), label=y)
        plain.step()
        plain.zero_grad()
        schedule.step()
        assert_same_state(model.model, module)


def test_step_fn_gets_its_arguments_and_runs_on_another_thread(models: Models) -> None:
    model = models.wrap(seeded(mlp), 2)
    seen: list[Any] = []
    model.step(lambda *args, **kwargs: seen.append((args, kwargs, threading.get_ident())), False, 1, 2, key=3)
    assert seen[0][:2] == ((1, 2), {"key": 3})
    assert seen[0][2] != threading.get_ident()


def test_a_gradient_that_step_fn_does_not_clear_is_added_to(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    sums: list[list[Tensor]] = []
    expected: list[Tensor] = [torch.zeros_like(p) for p in module.parameters()]
    for iteration in range(3):
        x, y = data(iteration)
        model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
        model.step(lambda: sums.append([p.grad.clone() for p in model.optim_parameters()]), is_async=False)
        call_reference(module, (x,), label=y)
        expected = [
            p.grad if iteration == 0 else total.add_(p.grad)
            for total, p in zip(expected, module.parameters(), strict=True)
        ]
        module.zero_grad()
        assert_same(sums[-1], expected)


def test_gradients_show_after_synchronize_and_keep_gathering(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    for iteration in range(3):
        x, y = data(iteration)
        model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
        call_reference(module, (x,), label=y)
        model.synchronize()
        assert_same_grads(model.model, module)


def test_gradients_are_gone_once_a_step_has_consumed_them(models: Models, num_devices: int) -> None:
    model = models.wrap(seeded(mlp), num_devices)
    x, y = data(0)
    model.forward_backward((x,), label=y, loss_fn=mse)
    model.synchronize()
    model.step(lambda: None)
    model.synchronize()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_was_gathered(models: Models, num_devices: int, set_to_none: bool) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    model.forward_backward((data(0)[0],), label=data(0)[1], loss_fn=mse, run_config=microbatches(4))
    model.zero_grad(set_to_none)
    x, y = data(1)
    model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
    call_reference(module, (x,), label=y)
    model.synchronize()
    assert_same_grads(model.model, module)


def test_zero_grad_between_async_steps_spares_the_step_under_way(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    reference = StalenessReference(module, OPTIMIZERS["sgd"])
    step_fn = make_step(model, OPTIMIZERS["sgd"])
    for iteration in range(3):
        for call, is_kept in enumerate((False, True)):
            x, y = data(10 * iteration + call)
            model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
            call_reference(module, (x,), label=y)
            if not is_kept:
                model.zero_grad()
                module.zero_grad()
        model.step(step_fn)
        reference.step(is_async=True)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model.model, module)


def test_steps_without_any_call_before_them_only_count(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    reference = StalenessReference(module, OPTIMIZERS["adam"])
    step_fn = make_step(model, OPTIMIZERS["adam"])
    for has_call, is_async in [(False, True), (True, True), (False, True), (True, False), (False, False)]:
        if has_call:
            x, y = data(1)
            loss = model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
            assert_same(loss, call_reference(module, (x,), label=y).loss)
        model.step(step_fn, is_async)
        reference.step(is_async)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model.model, module)


def test_the_number_of_microbatches_may_change_from_call_to_call(models: Models, num_devices: int) -> None:
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    for num_microbatch in (None, 5, 1, None, 3):
        x, y = data(num_microbatch or 0)
        config = RoundPipeRunConfig(num_microbatch=num_microbatch)
        loss = model.forward_backward((x,), label=y, loss_fn=mse, run_config=config)
        assert_same(loss, call_reference(module, (x,), label=y, num_microbatch=num_microbatch or 2).loss)
    model.synchronize()
    assert_same_grads(model.model, module)


def test_async_steps_are_one_step_old_however_long_the_update_takes(models: Models, num_devices: int) -> None:
    """Each update is held back until the next iteration has its loss, and counts from the one after that."""
    module = seeded(mlp)
    model = models.wrap_copy(module, num_devices)
    reference = StalenessReference(module, OPTIMIZERS["sgd"])
    inner = make_step(model, OPTIMIZERS["sgd"])

    def step_fn(may_update: threading.Event) -> None:
        assert may_update.wait(WAIT_S)
        inner()

    held_back: list[threading.Event] = []
    for iteration in range(4):
        x, y = data(iteration)
        loss = model.forward_backward((x,), label=y, loss_fn=mse, run_config=microbatches(4))
        assert_same(loss, call_reference(module, (x,), label=y).loss, f"iteration {iteration}")
        for event in held_back:
            event.set()
        held_back.append(threading.Event())
        model.step(step_fn, True, held_back[-1])
        reference.step(is_async=True)
    held_back[-1].set()
    model.synchronize()
    reference.synchronize()
    assert_same_state(model.model, module)
