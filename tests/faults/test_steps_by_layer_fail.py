"""Steps that return at once and fail: the next call raises, computes with no half update, and the one after works."""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import Background, Boom, Gate, caught_from, notes_of, raised_by, wait_for
from helpers_parity import assert_same, batch, mlp, seeded
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, clip_grad_norm_, optim
from roundpipe.errors import UsageError
from roundpipe.optim.native.kernel import OnePassKernel

WIDTH, NUM_LAYERS, NUM_MICROBATCH = 8, 4, 2
PLANS = {
    "fused": ModelExecutePlan([], [range(0, 4)]),
    "stages": ModelExecutePlan([range(0, 1), range(1, 2)], [range(2, 4), range(0, 2)]),
}
INFERENCE = RoundPipeRunConfig(num_microbatch=1, execute_plan=ModelExecutePlan([range(0, 2), range(2, 4)]))
DEVICE_COUNTS = [1, 3]


class Kernel:
    """The one-pass kernel, with an action before its n-th update from now on, counted from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._action: Callable[[], None] = lambda: None
        self._count = -1
        real = OnePassKernel.update

        def update(kernel: OnePassKernel, given: Any) -> None:
            self._count -= 1
            if self._count == -1:
                self._action()
            real(kernel, given)

        monkeypatch.setattr(OnePassKernel, "update", update)

    def act(self, count: int, action: Callable[[], None]) -> None:
        self._count, self._action = count, action

    def fail(self, count: int, error: BaseException) -> None:
        def throw() -> None:
            raise error

        self.act(count, throw)


class Training:
    """A model with float32 masters whose steps return at once. `act` runs in step_fn, before and after the update."""

    def __init__(self, num_devices: int, plan: str) -> None:
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLANS[plan])
        self.module = seeded(lambda: mlp(width=WIDTH)).to(torch.bfloat16)
        self.model = RoundPipe(
            copy.deepcopy(self.module),
            optim_dtype=torch.float32,
            devices=["cpu"] * num_devices,
            model_run_config=config,
            name="training",
            staleness=0,
        )
        self.optimizer = optim.AdamW(list(self.model.optim_parameters()), lr=1e-2)
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None
        self.steps_begun = 0
        for seed in range(3):  # steps publish by layer from the second one on
            self.train(seed)
        self.model.synchronize()

    def step_fn(self) -> None:
        self.steps_begun += 1
        self.before()
        clip_grad_norm_(self.model, 0.01)
        self.optimizer.step()
        self.after()
        self.optimizer.zero_grad()

    def call(self, seed: int) -> Tensor:
        x, y = (batch(6, WIDTH, seed=2 * seed + i).to(torch.bfloat16) for i in range(2))
        loss: Tensor = self.model.forward_backward((x,), label=y, loss_fn=lambda o, t: (o - t).float().square().mean())
        return loss

    def infer(self) -> Tensor:
        with torch.no_grad():
            x = batch(6, WIDTH, seed=9).to(torch.bfloat16)
            outputs: Tensor = self.model(x, roundpipe_run_config=INFERENCE)
        return outputs

    def train(self, seed: int) -> Tensor:
        loss = self.call(seed)
        self.model.step(self.step_fn)
        return loss

    def state(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        return copy.deepcopy([dict(self.model.state_dict()), state, [p.detach() for p in self.optimizer_params()]])

    def optimizer_params(self) -> list[nn.Parameter]:
        return list(self.model.optim_parameters())

    def assert_consistent(self) -> None:
        """The weights are the rounded masters, on the host and on the devices, and no gradient is left."""
        self.model.synchronize()
        weights = [p.detach().clone() for p in self.model.model.parameters()]
        assert_same(weights, [p.detach().to(torch.bfloat16) for p in self.optimizer_params()], "weights")
        plain = copy.deepcopy(self.module)
        plain.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            assert_same(self.infer(), plain(batch(6, WIDTH, seed=9).to(torch.bfloat16)), "outputs")
        assert all(master.grad is None for master in self.optimizer_params())

    def assert_goes_on(self) -> None:
        """Training goes on, exactly as one that is loaded with the present state."""
        self.before = self.after = lambda: None
        self.assert_consistent()
        weights, states, masters = self.state()
        losses = [self.train(seed) for seed in range(20, 24)]
        self.model.synchronize()
        other = Training.__new__(Training)
        other.__dict__.update(self.__dict__)
        plain = copy.deepcopy(self.module)
        plain.load_state_dict(weights)
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLANS["fused"])
        other.model = RoundPipe(plain, optim_dtype=torch.float32, devices=["cpu"], model_run_config=config)
        try:
            with torch.no_grad():
                for master, value in zip(other.model.optim_parameters(), masters, strict=True):
                    master.copy_(value)
            other.optimizer = optim.AdamW(list(other.model.optim_parameters()), lr=1e-2)
            other.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": states})
            expected = []
            for seed in range(20, 24):
                expected.append(other.call(seed))
                other.model.step(other.step_fn, is_async=False)
            assert_same(losses, expected)
            assert_same(dict(self.model.state_dict()), dict(other.model.state_dict()))
        finally:
            other.model.close()


@contextlib.contextmanager
def training(num_devices: int = 1, plan: str = "fused") -> Iterator[Training]:
    made = Training(num_devices, plan)
    try:
        assert made.model._engine.group.stepper.publishes_by_layer
        yield made
    finally:
        made.model.close()


both_plans = pytest.mark.parametrize("plan", PLANS)
all_devices = pytest.mark.parametrize("num_devices", DEVICE_COUNTS)


@both_plans
@all_devices
def test_a_step_function_that_raises_before_it_updates(num_devices: int, plan: str) -> None:
    with training(num_devices, plan) as made:
        before, error = made.state(), Boom("before the update")

        def throw() -> None:
            raise error

        made.before = throw
        made.call(5)
        made.model.step(made.step_fn)
        assert raised_by(lambda: made.call(6), made.model.synchronize) is error
        assert "nothing of this step is published" in "\n".join(notes_of(error))
        assert caught_from(made.model.synchronize) is None, "raised once"
        assert_same(made.state(), before, "nothing has changed")
        made.assert_goes_on()


@both_plans
@all_devices
@pytest.mark.parametrize("num_updated", [1, 3])
@pytest.mark.parametrize("reader", ["train", "infer"])
def test_a_step_that_fails_half_way_while_a_call_waits_for_it(
    num_devices: int, plan: str, num_updated: int, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(monkeypatch)
    with training(num_devices, plan) as made:
        error = Boom("in the kernel")
        gate = Gate(error)
        kernel.act(num_updated, gate)
        made.call(5)
        made.model.step(made.step_fn)
        wait_for(gate.reached)
        waiting = Background((lambda: made.call(6)) if reader == "train" else made.infer)
        threading.Event().wait(0.05)
        gate.opened.set()
        assert raised_by(waiting.result) is error
        # Also the layer whose update has begun.
        assert f"{num_updated + 1} layers that were updated in place are published" in "\n".join(notes_of(error))
        assert caught_from(made.model.synchronize) is None, "raised once"
        made.assert_goes_on()


@both_plans
@all_devices
def test_a_step_function_that_raises_after_its_update(num_devices: int, plan: str) -> None:
    """The call that computed with the new weights may have returned: its gradients are dropped, later steps too."""
    with training(num_devices, plan) as made:
        error = Boom("after the update")
        gate = Gate(error)
        made.after = gate
        made.call(5)
        made.model.step(made.step_fn)
        wait_for(gate.reached)
        made.call(6)  # all layers are published
        made.after = lambda: None
        begun = made.steps_begun
        made.model.step(made.step_fn)
        gate.opened.set()
        assert raised_by(made.model.synchronize) is error
        assert f"{NUM_LAYERS} layers that were updated in place are published" in "\n".join(notes_of(error))
        assert caught_from(made.model.synchronize) is None, "raised once"
        assert made.steps_begun == begun, "a step on gradients of lost weights does not run"
        made.assert_goes_on()


@both_plans
@all_devices
@pytest.mark.parametrize("reader", ["train", "infer"])
def test_a_call_whose_backward_fails_while_the_next_call_waits_for_its_step(
    num_devices: int, plan: str, reader: str
) -> None:
    with training(num_devices, plan) as made:
        before, error = made.state(), Boom("in the backward")
        gate = Gate(error)
        master = made.model.model[0][0].weight

        seen: list[Tensor] = []

        def fail(gradient: Tensor) -> None:
            seen.append(gradient)
            if len(seen) == NUM_MICROBATCH:  # the call returns when it has the losses of all microbatches
                gate()

        handle = master.register_hook(fail)
        made.call(5)
        handle.remove()
        made.model.step(made.step_fn)
        waiting = Background((lambda: made.call(6)) if reader == "train" else made.infer)
        wait_for(gate.reached)
        gate.opened.set()
        assert raised_by(waiting.result, made.model.synchronize) is error
        assert caught_from(made.model.synchronize) is None, "raised once"
        assert_same(made.state(), before, "the step did not run")
        made.assert_goes_on()


@all_devices
def test_a_later_step_that_writes_a_master_raises(num_devices: int) -> None:
    """The first steps did not, so its layers are published already."""
    with training(num_devices) as made:

        def clamp() -> None:
            with torch.no_grad():
                made.optimizer_params()[2].clamp_(-0.01, 0.01)

        made.after = clamp
        made.call(5)
        made.model.step(made.step_fn)
        with pytest.raises(UsageError, match=r"has written the optimizer's master of '1.0.weight' after") as caught:
            made.model.synchronize()
        assert "published" in "\n".join(notes_of(caught.value))
        made.call(6)
        made.model.step(made.step_fn)  # waits from now on, and publishes what is written
        made.assert_consistent()


@all_devices
def test_a_later_step_that_updates_twice_raises(num_devices: int) -> None:
    with training(num_devices) as made:
        made.after = made.optimizer.step
        made.call(5)
        made.model.step(made.step_fn)
        with pytest.raises(UsageError, match="has updated layer 0 a second time in one step"):
            made.model.synchronize()
        made.assert_goes_on()


@all_devices
def test_ctrl_c_while_a_call_waits_for_a_layer(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    with training(num_devices) as made:
        gate = Gate()
        kernel.act(2, gate)
        made.call(5)
        made.model.step(made.step_fn)
        wait_for(gate.reached)
        timer = threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT))
        interrupt = threading.Thread(target=lambda: (timer.start(), timer.join()))
        interrupt.start()
        assert isinstance(raised_by(lambda: made.call(6)), KeyboardInterrupt)
        interrupt.join()
        gate.opened.set()
        made.assert_goes_on()


@all_devices
def test_closing_while_a_step_is_held(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    made = Training(num_devices, "fused")
    gate = Gate()
    kernel.act(2, gate)
    made.call(5)
    made.model.step(made.step_fn)
    wait_for(gate.reached)
    closing = Background(made.model.close)
    gate.opened.set()
    closing.result()


def test_a_failed_step_is_raised_by_a_call_that_had_begun_before_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure comes after the call has looked for failures and before its run is watched."""
    with training() as made:
        error, recovery = Boom("between"), made.model._engine.group.recovery
        gate = Gate(error)
        made.before = gate
        made.call(5)
        made.model.step(made.step_fn)
        wait_for(gate.reached)
        real = recovery.watch

        def watch(run: Any) -> None:
            gate.opened.set()
            made.model._engine.group.stepper.wait_until_idle()
            real(run)

        monkeypatch.setattr(recovery, "watch", watch)
        assert raised_by(lambda: made.call(6)) is error
        monkeypatch.undo()
        assert caught_from(made.model.synchronize) is None, "raised once"
        made.assert_goes_on()


def test_a_failed_backward_is_raised_by_a_call_that_had_begun_before_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call does not train, and it reads the weights that the lost gradients would have made."""
    with training() as made:
        error, recovery = Boom("in the backward"), made.model._engine.group.recovery
        gate, seen = Gate(error), []

        def fail(gradient: Tensor) -> None:
            seen.append(gradient)
            if len(seen) == NUM_MICROBATCH:
                gate()

        handle = made.model.model[0][0].weight.register_hook(fail)
        made.call(5)
        handle.remove()
        made.model.step(made.step_fn)
        wait_for(gate.reached)
        real = recovery.watch

        def watch(run: Any) -> None:
            gate.opened.set()
            made.model._engine.group.stepper.wait_until_idle()
            real(run)

        monkeypatch.setattr(recovery, "watch", watch)
        assert raised_by(made.infer) is error
        monkeypatch.undo()
        assert caught_from(made.model.synchronize) is None, "raised once"
        made.assert_goes_on()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", range(NUM_LAYERS))
def test_failures_of_every_update_with_copies_in_seeded_order(
    seed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_VIRTUAL_SEED", str(seed))
    kernel = Kernel(monkeypatch)
    with training(3, "stages") as made:
        error = Boom(f"in update {count}")
        kernel.fail(count, error)
        made.call(5)
        made.model.step(made.step_fn)
        assert raised_by(lambda: made.call(6), made.model.synchronize) is error
        made.assert_goes_on()
