"""A forked child has no thread of its parent: inherited models are refused, new ones work, and its end never hangs.

Children are forked while the parent trains, so that threads that do not exist in the child hold any of our locks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from helpers_faults import Bench, Traps, batch, bench, build_model, caught_from, make_optimizer, mse, run_script
from helpers_parity import assert_same
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import UsageError

CHILD_S = 30.0
NUM_FORKS = 6
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def in_child(function: Callable[[], Any]) -> str:
    """What the function returns, as text, or what it raises; it runs in a forked child, which must end in time."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reader)
            text = str(function())
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    wait_for_child(pid)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read().decode()


def wait_for_child(pid: int) -> int:
    deadline = time.monotonic() + CHILD_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail(f"the child did not end within {CHILD_S} s")
        time.sleep(0.002)


def while_training(made: Bench, act: Callable[[int], None]) -> None:
    """Asynchronous steps; `act` comes at another moment of each iteration."""
    for iteration in range(NUM_FORKS):
        made.call(iteration)
        if iteration % 2:
            time.sleep(1e-4 * iteration)
            act(iteration)
        made.step(is_async=True)
        if not iteration % 2:
            time.sleep(1e-4 * iteration)
            act(iteration)


def uses_of(made: Bench) -> dict[str, Callable[[], object]]:
    x, _ = batch(1)
    return {
        "forward": lambda: made.model(x),
        "forward_backward": lambda: made.call(1),
        "step": lambda: made.step(True),
        "sync step": lambda: made.step(False),
        "synchronize": made.model.synchronize,
        "zero_grad": made.model.zero_grad,
        "state_dict": made.model.state_dict,
        "load_state_dict": lambda: made.model.load_state_dict({}),
        "timeline": made.model.timeline,
        "optim_parameters": lambda: list(made.model.optim_parameters()),
    }


def test_an_inherited_model_is_refused() -> None:
    with bench(2) as made:
        made.train_right(1)

        def use_all() -> object:
            for name, use in uses_of(made).items():
                caught = caught_from(use)
                if not isinstance(caught, UsageError) or f"made in process {os.getppid()}" not in str(caught):
                    return name, caught
            made.model.request_stop()
            made.model.close()
            made.model.close()
            return "refused"

        while_training(made, lambda _: assert_equal(in_child(use_all), "refused"))
        made.model.synchronize()
        made.model.load_state_dict(made.reference.state_dict())


def assert_equal(ours: object, other: object) -> None:
    assert ours == other


def train(model: RoundPipe, scaler: GradScaler | None = None) -> list[float]:
    optimizer = make_optimizer(model.optim_parameters())

    def step_fn() -> None:
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()

    def loss_fn(output: Tensor, label: Tensor) -> Tensor:
        loss = mse(output, label)
        return loss if scaler is None else scaler.scale(loss)

    losses = []
    for seed in range(4):
        x, label = batch(seed)
        losses.append(float(model.forward_backward((x,), label=label, loss_fn=loss_fn)))
        model.step(step_fn, seed % 2 == 0)
        if scaler is not None:
            scaler.update()
    model.synchronize()
    return losses


def wrapped() -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=3)
    return RoundPipe(build_model(Traps(), batch_norm=False), devices=["cpu"] * 2, model_run_config=config)


def test_a_new_model_on_the_same_devices_trains_in_the_child() -> None:
    with wrapped() as model:
        expected = str(train(model))
    with bench(2) as made:
        while_training(made, lambda _: assert_equal(in_child(lambda: train(wrapped())), expected))
        made.model.synchronize()


def test_a_scaler_of_the_parent_holds_nothing_up_in_the_child() -> None:
    with bench(2) as made:
        scaler = GradScaler(init_scale=1.0)
        while_training(made, lambda _: assert_equal(in_child(lambda: len(train(wrapped(), scaler))), "4"))
        made.model.synchronize()


def test_the_same_network_can_be_wrapped_again_in_the_child_and_the_parents_stays_as_it_is() -> None:
    with wrapped() as model:
        train(model)
        before = {key: value.clone() for key, value in model.state_dict().items()}

        def wrap_again() -> str:
            network = model.model
            model.close()
            with RoundPipe(network, devices=["cpu"] * 2, model_run_config=model.model_run_config) as again:
                return f"{len(train(again))} losses"

        assert in_child(wrap_again) == "4 losses"
        assert_same(dict(model.state_dict()), before, "in the parent")
        train(model)


def test_optimizer_copies_can_be_read_in_the_child() -> None:
    """As a process that writes a checkpoint does; their values are those of the moment of the fork, or of none."""
    network = build_model(Traps(), batch_norm=False).to(torch.bfloat16)
    with RoundPipe(network, torch.float32, devices=["cpu"] * 2) as model:
        copies = list(model.optim_parameters())
        optimizer = torch.optim.SGD(copies, lr=0.1)
        for seed in range(NUM_FORKS):
            x, label = batch(seed)
            model.forward_backward((x.bfloat16(),), label=label.bfloat16(), loss_fn=mse)
            model.step(optimizer.step)
            assert in_child(lambda: len([p.detach().clone() for p in copies])) == str(len(copies))


def test_children_that_end_by_themselves_end_at_once() -> None:
    """sys.exit() in a child runs exit handlers and finalizers of all it has inherited; here locks are held as well."""
    done = run_script(
        """
import os
from roundpipe.devices import virtual
made = Bench(2)
made.train_right(1)
gate = held_backward(made, 2)
made.step(True)
held, over = threading.Event(), threading.Event()
def hold():
    with made.model._engine.store.monitor, virtual._fabric_lock:
        held.set()
        wait_for(over)
holder = threading.Thread(target=hold)
holder.start()
wait_for(held)
children = []
began = time.time()
for number in range(2):
    if not (pid := os.fork()):
        if number % 2:
            del made
        sys.exit(number)
    children.append(pid)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 1]
assert time.time() - began < 20
over.set()
holder.join()
gate.opened.set()
made.model.synchronize()
print("went on")
"""
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "went on\n"
    assert done.stderr == ""


def _square(number: int) -> int:
    return number * number


def test_a_fork_pool_of_processes_while_the_parent_trains() -> None:
    with bench(2) as made:
        context = multiprocessing.get_context("fork")

        def use_pool(_: int) -> None:
            with context.Pool(2) as pool:
                assert pool.map_async(_square, range(8)).get(CHILD_S) == [n * n for n in range(8)]

        while_training(made, use_pool)
        made.model.synchronize()


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, label = batch(index, rows=1)
        return x[0], label[0]


def test_a_data_loader_with_forked_workers_while_the_parent_trains() -> None:
    """The same losses as without workers; new ones are forked in each epoch, next to asynchronous steps."""

    def epochs(num_workers: int) -> list[float]:
        with wrapped() as model:
            optimizer = make_optimizer(model.optim_parameters())
            losses = []
            options: dict[str, Any] = {"multiprocessing_context": "fork", "timeout": CHILD_S} if num_workers else {}
            for _ in range(4):
                for x, label in DataLoader(Rows(), batch_size=6, num_workers=num_workers, **options):
                    losses.append(float(model.forward_backward((x,), label=label, loss_fn=mse)))
                    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            model.synchronize()
            return losses

    assert epochs(2) == epochs(0)
