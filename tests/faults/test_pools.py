"""Pools open at first use, are shared, and close with the last model; a closed model is closed for good."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from helpers_faults import (
    Bench,
    Boom,
    Gate,
    Traps,
    batch,
    bench,
    build_model,
    held_backward,
    mse,
    our_threads,
    raised_by,
    wait_for,
    wait_for_no_threads,
    wait_until,
)
from helpers_parity import assert_same
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ClosedError, OwnershipError


def wrapped(num_devices: int = 2, **options: Any) -> RoundPipe:
    return RoundPipe(build_model(Traps(), batch_norm=False), devices=["cpu"] * num_devices, **options)


def use(model: RoundPipe) -> torch.Tensor:
    x, label = batch(1)
    loss: torch.Tensor = model.forward_backward((x,), label=label, loss_fn=mse)
    return loss


def test_wrapping_starts_no_thread_and_the_first_use_does() -> None:
    model = wrapped(3)
    list(model.optim_parameters())
    model.synchronize()
    assert our_threads() == []
    use(model)
    assert our_threads() == ["roundpipe-cpu:0", "roundpipe-cpu:1", "roundpipe-cpu:2", "roundpipe-landing"]
    model.close()


def test_models_over_the_same_devices_share_a_pool() -> None:
    first, second, other = wrapped(2), wrapped(2), wrapped(1)
    use(first)
    threads = our_threads()
    use(second)
    assert our_threads() == threads
    use(other)
    assert our_threads() == sorted([*threads, "roundpipe-cpu:0", "roundpipe-landing"])
    first.close()
    assert_same(use(second), use(second))
    for model in (second, other):
        model.close()


def test_the_last_model_to_be_collected_closes_the_pool() -> None:
    first, second = wrapped(2), wrapped(2)
    use(first), use(second)
    second.step(lambda: None)
    del first
    assert our_threads() == ["roundpipe-cpu:0", "roundpipe-cpu:1", "roundpipe-landing", "roundpipe-optimizer"]
    del second
    wait_for_no_threads()


def test_a_model_in_a_reference_cycle_is_collected_too() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = wrapped(2)
            self.step_fn = self.step  # a cycle

        def step(self) -> None: ...

    trainer = Trainer()
    use(trainer.model)
    trainer.model.step(trainer.step_fn, False)
    del trainer
    wait_for_no_threads()


def test_with_statement_and_closing_twice() -> None:
    with wrapped(2) as model:
        use(model)
    wait_for_no_threads()
    model.close()
    model.close()


def test_calls_after_close_are_refused() -> None:
    model = wrapped(2)
    use(model)
    model.close()
    x, label = batch(1)
    calls: list[Any] = [
        lambda: model(x),
        lambda: use(model),
        lambda: model.step(lambda: None),
        lambda: model.step(lambda: None, False),
        model.synchronize,
        model.zero_grad,
        model.timeline,
        lambda: model.load_state_dict(model.state_dict()),
    ]
    for call in calls:
        assert isinstance(raised_by(call), ClosedError)
    assert our_threads() == []
    assert label is not None


def test_a_closed_models_parameters_are_usable_and_can_be_wrapped_again() -> None:
    module = build_model(Traps(), batch_norm=False)
    model = RoundPipe(module, devices=["cpu"] * 2)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    use(model)
    model.step(optimizer.step)  # pending: close() finishes it
    with pytest.raises(OwnershipError):
        RoundPipe(module, devices=["cpu"])
    model.close()
    assert_same([p.detach() for p in module.parameters()], [p.detach() for p in model.optim_parameters()])
    x, label = batch(1)
    expected = sum(mse(module(x[i : i + 2]), label[i : i + 2]) for i in (0, 2, 4))
    with RoundPipe(module, devices=["cpu"] * 3, model_run_config=RoundPipeRunConfig(num_microbatch=3)) as again:
        assert_same(use(again), expected.detach())  # type: ignore[union-attr]


def test_close_finishes_pending_work() -> None:
    made = Bench(3)
    made.train_right(1)
    loss = made.call(2)
    made.step(is_async=True)
    made.close()
    assert_same(loss, made.call_reference(2))
    made.step_reference()
    assert_same(dict(made.model.state_dict()), dict(made.reference.state_dict()), "closed")


def test_close_finishes_what_is_pending_beside_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A step for earlier gradients is carried out although the call after it has failed in the background."""
    made = Bench(2)
    made.train_right(1)
    made.call(2)
    made.call_reference(2)
    step = Gate()
    made.traps.act("step_fn", None, 0, step)
    made.step(is_async=True)
    made.step_reference()
    wait_for(step.reached)
    error = Boom("behind the step")
    backward = held_backward(made, 3, error)
    backward.opened.set()
    step.opened.set()
    made.close()
    weights = {name: tensor for name, tensor in made.model.state_dict().items() if "norm" not in name}
    expected = {name: tensor for name, tensor in made.reference.state_dict().items() if "norm" not in name}
    assert_same(weights, expected, "closed")
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)


@pytest.mark.parametrize("error_type", [Boom, SystemExit])
def test_close_logs_what_went_wrong_and_does_not_raise(
    error_type: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    for point in ("backward", "step_fn"):
        made = Bench(2)
        error = error_type(point)
        if point == "step_fn":
            made.traps.arm(point, None, 0, error)
            made.call(1)
            made.step(is_async=True)
        else:
            held_backward(made, 1, error).opened.set()
        made.close()
        assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)
        wait_for_no_threads()


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_model_collected_while_work_is_pending(num_devices: int) -> None:
    made = Bench(num_devices)
    made.train_right(1)
    made.call(2)
    made.step(is_async=True)
    made.call(3)
    made.step(is_async=True)
    del made
    wait_for_no_threads()


def test_a_model_whose_layer_hangs_is_collected() -> None:
    """The finalizer does not wait for long, and the thread ends when the layer does."""
    traps, release, reached = Traps(), threading.Event(), threading.Event()
    model = RoundPipe(build_model(traps, batch_norm=False), devices=["cpu"] * 2)
    model.model_run_config
    traps.act("backward", 0, 0, lambda: (reached.set(), wait_for(release)))
    use(model)
    wait_for(reached)
    threading.Timer(0.3, release.set).start()
    began = time.monotonic()
    del model
    gc.collect()
    assert time.monotonic() - began < 5.0
    wait_for_no_threads()


def test_the_last_reference_dies_on_the_optimizer_thread() -> None:
    """step_fn is the last to hold the model; letting go of it must not stop the thread that lets go."""
    model = wrapped(2)
    use(model)
    gate = threading.Event()

    def make_step_fn(held: RoundPipe) -> Any:
        def step_fn() -> None:
            wait_for(gate)
            assert held.num_layers == 4

        return step_fn

    model.step(make_step_fn(model))
    alive = weakref.ref(model)
    del model
    began = time.monotonic()
    gate.set()
    wait_until(lambda: alive() is None, "the model to be collected")
    wait_for_no_threads()
    assert time.monotonic() - began < 2.0


def test_the_last_reference_dies_on_a_worker() -> None:
    """The same with loss_fn, which a worker holds."""
    model = wrapped(2)

    def make_loss_fn(held: RoundPipe) -> Any:
        def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            assert held.num_layers == 4
            return mse(output, label)

        return loss_fn

    x, label = batch(1)
    model.forward_backward((x,), label=label, loss_fn=make_loss_fn(model))
    del model
    wait_for_no_threads()


@pytest.mark.parametrize("pending", [False, True])
def test_a_finalizer_that_runs_while_its_thread_holds_the_monitor(pending: bool) -> None:
    """A finalizer runs on any thread at any point; it must not wait for threads that wait for that thread."""
    model = wrapped(2)
    use(model)
    model.step(lambda: None)
    if not pending:
        model.synchronize()
    monitor = model._engine.store.monitor
    began = time.monotonic()
    with monitor:
        del model
        gc.collect()
    assert time.monotonic() - began < 2.0
    wait_for_no_threads()


def test_a_pool_opens_again_after_it_was_closed() -> None:
    for _ in range(3):
        with bench(2) as made:
            made.train_right(1)
        del made
        wait_for_no_threads()


def test_a_graph_keeps_its_model_alive() -> None:
    """forward() with grad, then the wrapper is dropped: backward still runs."""
    module = build_model(Traps(), batch_norm=False)
    model = RoundPipe(module, devices=["cpu"] * 2)
    x, label = batch(1)
    output = model(x)
    loss = mse(output, label)
    del model, output
    gc.collect()
    caught = None
    try:
        loss.backward()
    except ClosedError as error:
        caught = error
    assert caught is not None or all(p.grad is None for p in module.parameters())
    del loss, caught
