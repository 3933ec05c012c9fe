"""Steps of the one-pass optimizer beside calls that still go backward, and what is left when either of them fails.

Every order of events is made by gates, none is left to luck. The model is bfloat16 with float32 copies, and as wide as
the vectors of torch's fused kernel, so that everything can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_adam import NumpyAdam
from helpers_faults import (
    DROPPED,
    Background,
    Boom,
    Gate,
    Traps,
    _BackwardTrap,
    notes_of,
    raised_by,
    wait_for,
    wait_for_no_threads,
)
from helpers_parity import StalenessReference, assert_same, call_reference, clip_in_double
from roundpipe import GradScaler, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, clip_grad_norm_
from roundpipe.api.planner import Planner
from roundpipe.optim import Adam, one_pass
from roundpipe.optim.native import kernel as native
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel
from roundpipe.optim.rules import AdamRule
from roundpipe.plan.overlap import Overlap as PlannedOverlap
from roundpipe.runtime import gradients as landing
from roundpipe.store.master import OptimizerCopy
from roundpipe.store.store import HostGradients
from roundpipe.store.update import LayerUpdate
from roundpipe.store.weights import LayerWeights

WIDTH, NUM_LAYERS, NUM_MICROBATCH = 16, 4, 3
LAST_MICROBATCH = NUM_MICROBATCH - 1
FUSED = ModelExecutePlan([], [range(0, 4)])
STAGES = ModelExecutePlan([range(0, 1), range(1, 2)], [range(2, 4), range(0, 2)])
PLANS = {"fused": FUSED, "stages": STAGES}
SEED = "ROUNDPIPE_VIRTUAL_SEED"
# `make test` takes two devices, and of layers and counts the first and the last; the others take the same paths.
DEVICE_COUNTS = [pytest.param(1, marks=pytest.mark.slow), 2]
LAYERS = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, NUM_LAYERS - 1)), NUM_LAYERS - 1]
COUNTS = [1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, NUM_LAYERS)), NUM_LAYERS]


class Layer(nn.Module):
    def __init__(self, layer_id: int, traps: Traps) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layer_id, self.traps = layer_id, traps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _BackwardTrap.apply(torch.tanh(self.linear(x)), self.traps, self.layer_id)
        return y


def build_model(traps: Traps, seed: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*[Layer(i, traps) for i in range(NUM_LAYERS)]).to(torch.bfloat16)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2 * NUM_MICROBATCH, WIDTH, generator=generator).to(torch.bfloat16) for _ in range(2))
    return x, y


def mse(output: Tensor, label: Tensor) -> Tensor:
    return (output.float() - label.float()).square().mean()


def plain_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The arithmetic of the kernel; without one, torch's fused optimizer updates."""
    if one_pass.one_pass_kernel() is None:
        return torch.optim.Adam(params, lr=0.01, fused=True)
    return NumpyAdam(params, lr=0.01)


class Overlap:
    """A wrapped model with our Adam, its traps, and the plain model with float32 masters beside it."""

    def __init__(self, num_devices: int, plan: ModelExecutePlan | None) -> None:
        self.traps = Traps()
        self.reference = StalenessReference(build_model(Traps()), plain_adam, torch.float32)
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=plan)
        self.model = RoundPipe(
            build_model(self.traps),
            optim_dtype=torch.float32,
            devices=["cpu"] * num_devices,
            model_run_config=config,
            name="overlap",
        )
        self.copies = list(self.model.optim_parameters())
        self.optimizer: torch.optim.Optimizer = Adam(self.copies, lr=0.01)

    def step_fn(self) -> None:
        self.traps.pass_by("step_fn", None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def call(self, seed: int) -> Tensor:
        x, label = batch(seed)
        loss: Tensor = self.model.forward_backward((x,), label=label, loss_fn=mse)
        return loss

    def call_reference(self, seed: int) -> Tensor:
        x, label = batch(seed)
        loss: Tensor = call_reference(self.reference.module, (x,), {}, label, mse, NUM_MICROBATCH).loss
        return loss

    def step(self, is_async: bool = False) -> None:
        self.model.step(self.step_fn, is_async)

    def train_right(self, *seeds: int, is_async: bool = False) -> None:
        for seed in seeds:
            assert_same(self.call(seed), self.call_reference(seed), f"loss of batch {seed}")
            self.step(is_async)
            self.reference.step(is_async)

    def prove(self) -> None:
        """Afterwards a synchronous step begins at once: calls like the next one have come through."""
        self.train_right(90, 91, 92)
        self.model.synchronize()

    def weights(self) -> list[Tensor]:
        """The weights in host memory now; waits for no step and no call."""
        return [p.detach().clone() for p in self.model.model.parameters()]

    def assert_right(self) -> None:
        self.model.synchronize()
        self.reference.synchronize()
        assert_same(dict(self.model.state_dict()), dict(self.reference.module.state_dict()), "weights")
        ours, plain = (side.optimizer.state_dict()["state"] for side in (self, self.reference))
        assert_same(dict(sorted(ours.items())), dict(sorted(plain.items())), "optimizer state")
        assert_same([p.detach() for p in copy.deepcopy(self.copies)], [p.detach() for p in self.reference.masters])

    def assert_consistent(self) -> None:
        """The model is what its optimizer thinks it is."""
        self.model.synchronize()
        rounded = [p.detach().to(torch.bfloat16) for p in copy.deepcopy(self.copies)]
        assert_same(self.weights(), rounded, "weights and rounded copies")
        assert all(param.grad is None for param in self.copies)

    def follow(self) -> None:
        """Let the reference go on from where the model is now."""
        self.assert_consistent()
        masters, states = self.reference.masters, copy.deepcopy(self.optimizer.state_dict())
        with torch.no_grad():
            for master, param in zip(masters, copy.deepcopy(self.copies), strict=True):
                master.copy_(param)
                master.grad = None
            for param in self.reference.trainable:
                param.grad = None
        self.reference.optimizer.load_state_dict(states)
        self.reference.versions = [self.reference._snapshot()]
        self.reference.synchronize()

    def snapshot(self) -> Any:
        return copy.deepcopy([self.weights(), self.copies, dict(sorted(self.optimizer.state_dict()["state"].items()))])


@pytest.fixture(autouse=True)
def _tail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many microbatches go backward together is chosen by measured times; here it must not change."""
    tail = getattr(request, "param", NUM_MICROBATCH)
    monkeypatch.setattr(Planner, "overlap", lambda *args, **kwargs: PlannedOverlap(tail))


either_tail = pytest.mark.parametrize("_tail", [1, NUM_MICROBATCH], indirect=True, ids=["one", "tail"])


@contextlib.contextmanager
def overlap(num_devices: int = 2, plan: ModelExecutePlan | None = FUSED) -> Iterator[Overlap]:
    made = Overlap(num_devices, plan)
    try:
        yield made
    finally:
        made.model.close()


def held_call(made: Overlap, seed: int, layer_id: int, error: BaseException | None = None) -> Gate:
    """A call whose last microbatch waits in the backward of a layer, or fails there; the call itself has returned.

    All microbatches have been through the layers behind that one.
    """
    gate = Gate(error)
    made.traps.act("backward", layer_id, LAST_MICROBATCH, gate)
    made.call(seed)
    wait_for(gate.reached)
    return gate


class KernelWatch:
    """Sees every call of the kernel; `after[n]` is set when the n-th, counted from 1, is done. May fail in one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after = {n: threading.Event() for n in range(1, NUM_LAYERS + 1)}
        self.given: list[list[KernelParameter]] = []
        self._fail_in, self._error = 0, Boom()
        real = OnePassKernel.update

        def update(kernel: OnePassKernel, given: list[KernelParameter]) -> None:
            self.given.append(given)
            if len(self.given) == self._fail_in:
                raise self._error
            real(kernel, given)
            if len(self.given) in self.after:
                self.after[len(self.given)].set()

        monkeypatch.setattr(OnePassKernel, "update", update)

    def fail_in(self, count: int, error: Boom) -> None:
        self.given.clear()
        self._fail_in, self._error = count, error


# Beside the backward.


@either_tail
@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
@pytest.mark.parametrize("held", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_later_layers_are_updated_before_the_first_ones_go_backward(
    num_devices: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with overlap(num_devices) as made:
        made.prove()
        before = made.weights()
        watch = KernelWatch(monkeypatch)
        made.call_reference(2)
        gate = held_call(made, 2, held)
        step = Background(made.step)
        wait_for(watch.after[NUM_LAYERS - 1 - held])
        changed = [not torch.equal(new, old) for new, old in zip(made.weights(), before, strict=True)]
        assert changed == [i // 2 > held for i in range(2 * NUM_LAYERS)], "in place, behind the backward and not before"
        gate.opened.set()
        step.result()
        made.reference.step(is_async=False)
        assert len(watch.given) == NUM_LAYERS
        made.assert_right()
        made.train_right(3, 4)
        made.assert_right()


@pytest.mark.parametrize("clip", [clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["ours", "torchs"])
def test_clipping_waits_for_all_gradients_and_is_exact(clip: Callable[..., Tensor]) -> None:
    plain_clip = clip_in_double if clip is clip_grad_norm_ else nn.utils.clip_grad_norm_
    with overlap() as made:
        made.prove()
        norms: list[Tensor] = []
        expected = made.call_reference(2)
        gate = held_call(made, 2, 0)

        def step_fn() -> None:
            norms.append(clip(made.copies, 0.01))
            assert gate.opened.is_set()
            made.step_fn()

        threading.Timer(0.05, gate.opened.set).start()
        made.model.step(step_fn, is_async=False)
        made.reference.run_step = lambda optimizer: (
            norms.append(plain_clip(made.reference.masters, 0.01)),
            optimizer.step(),
        )
        made.reference.step(is_async=False)
        assert_same(norms[0], norms[1])
        assert expected.isfinite()
        made.assert_right()


# The call fails.


@either_tail
@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
@pytest.mark.parametrize("held", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_call_that_fails_when_layers_have_been_updated(
    num_devices: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those stay updated; the model and its optimizer agree, and training goes on from there."""
    with overlap(num_devices) as made:
        made.prove()
        before = made.weights()
        watch = KernelWatch(monkeypatch)
        error = Boom("late")
        gate = held_call(made, 2, held, error)
        step = Background(made.step)
        wait_for(watch.after[NUM_LAYERS - 1 - held])
        gate.opened.set()
        assert raised_by(step.result) is error
        notes = "\n".join(notes_of(error))
        assert f"layer {held}, microbatch {LAST_MICROBATCH}" in notes, notes
        assert DROPPED in notes
        made.assert_consistent()
        changed = [not torch.equal(new, old) for new, old in zip(made.weights(), before, strict=True)]
        assert changed == [i // 2 > held for i in range(2 * NUM_LAYERS)]
        assert len(watch.given) == NUM_LAYERS - 1 - held
        made.follow()
        made.train_right(3, 4, 5)
        made.assert_right()
        made.train_right(6, 7, is_async=True)
        made.assert_right()


@pytest.mark.parametrize("held", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_does_not_use_half_of_the_gradients_of_two_calls(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls before the step, and the second fails: layers it has not reached have half of their gradients."""
    with overlap() as made:
        made.prove()
        before = made.weights()
        watch, error = KernelWatch(monkeypatch), Boom("late")
        made.call(2)
        gate = held_call(made, 3, held, error)
        step = Background(made.step)
        wait_for(watch.after[NUM_LAYERS - 1 - held])
        gate.opened.set()
        assert raised_by(step.result) is error
        made.assert_consistent()
        changed = [not torch.equal(new, old) for new, old in zip(made.weights(), before, strict=True)]
        assert changed == [i // 2 > held for i in range(2 * NUM_LAYERS)]
        made.follow()
        made.train_right(4, 5)
        made.assert_right()


def test_a_call_that_fails_before_any_layer_was_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    with overlap() as made:
        made.prove()
        before = made.snapshot()
        watch = KernelWatch(monkeypatch)
        error = Boom("in the last layer")
        gate = held_call(made, 2, NUM_LAYERS - 1, error)
        step = Background(made.step)
        gate.opened.set()
        assert raised_by(step.result) is error
        made.model.synchronize()
        assert watch.given == []
        assert_same(made.snapshot(), before)
        made.train_right(3, 4)
        made.assert_right()


def test_a_scaler_survives_a_step_that_was_abandoned() -> None:
    """It was just looking at gradients that did not come."""
    with overlap() as made:
        scaler = GradScaler(init_scale=1.0)

        def step_fn() -> None:
            scaler.unscale_(made.optimizer)
            scaler.step(made.optimizer)
            made.optimizer.zero_grad()

        def train(seed: int) -> None:
            assert_same(made.call(seed), made.call_reference(seed))
            made.model.step(step_fn, is_async=False)
            scaler.update(is_async=False)
            made.reference.step(is_async=False)

        for seed in (90, 91, 92):
            train(seed)
        made.model.synchronize()
        before = made.snapshot()
        error = Boom("late")
        gate = held_call(made, 2, 1, error)
        step = Background(lambda: made.model.step(step_fn, is_async=False))
        gate.opened.set()
        assert raised_by(step.result) is error
        made.model.synchronize()
        assert_same(made.snapshot(), before, "unscaling comes before every update")
        for seed in (3, 4):
            train(seed)
        made.assert_right()


# Steps that do not begin early.


def assert_begins_with_whole_gradients(
    made: Overlap, held: int, gate: Gate, step: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer thread is seen to wait for the layer that is held, and step_fn has not begun by then."""
    real = LayerUpdate.wait_until_landed
    waits, began = threading.Event(), Gate()
    began.opened.set()

    def wait_until_landed(update: LayerUpdate) -> None:
        if update._layer_id == held:
            waits.set()
        real(update)

    made.traps.act("step_fn", None, 0, began)
    with monkeypatch.context() as patch:
        patch.setattr(LayerUpdate, "wait_until_landed", wait_until_landed)
        step()
        wait_for(waits)
        assert not began.reached.is_set()
        gate.opened.set()
        wait_for(began.reached)


@pytest.mark.parametrize("held", LAYERS)
def test_an_asynchronous_step_begins_when_all_gradients_are_there(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with overlap() as made:
        made.prove()
        made.call_reference(2)
        gate = held_call(made, 2, held)
        assert_begins_with_whole_gradients(made, held, gate, lambda: made.step(is_async=True), monkeypatch)
        made.reference.step(is_async=True)
        made.train_right(3, 4, is_async=True)
        made.assert_right()


@pytest.mark.parametrize("held", LAYERS)
def test_a_step_after_a_new_kind_of_call_begins_when_all_gradients_are_there(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that fails must leave everything as it was, and no call of this kind has succeeded before."""
    with overlap() as made:
        made.prove()
        x, label = (torch.cat([value, value]) for value in batch(2))
        call_reference(made.reference.module, (x,), {}, label, mse, NUM_MICROBATCH)
        gate = Gate()
        made.traps.act("backward", held, LAST_MICROBATCH, gate)
        made.model.forward_backward((x,), label=label, loss_fn=mse)
        wait_for(gate.reached)
        steps: list[Background] = []
        assert_begins_with_whole_gradients(made, held, gate, lambda: steps.append(Background(made.step)), monkeypatch)
        steps[0].result()
        made.reference.step(is_async=False)
        made.assert_right()


@pytest.mark.parametrize("held", LAYERS)
def test_the_first_call_that_fails_leaves_everything(held: int) -> None:
    """None like it has come through, so nothing of its step has begun."""
    with overlap() as made:
        made.model.step(lambda: None, is_async=False)
        before = made.snapshot()
        error = Boom("late")
        gate = held_call(made, 2, held, error)
        step = Background(made.step)
        gate.opened.set()
        assert raised_by(step.result) is error
        made.model.synchronize()
        assert_same(made.snapshot(), before)
        made.train_right(3, 4)
        made.assert_right()


@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
@pytest.mark.parametrize("held", LAYERS)
def test_a_call_that_fails_before_its_asynchronous_step_leaves_everything(num_devices: int, held: int) -> None:
    with overlap(num_devices) as made:
        made.train_right(90, 91, is_async=True)
        made.model.synchronize()
        made.reference.synchronize()
        before = made.snapshot()
        error = Boom("late")
        gate = held_call(made, 2, held, error)
        made.traps.reset()
        made.step(is_async=True)
        gate.opened.set()
        assert raised_by(lambda: made.call(3), made.model.synchronize) is error
        assert DROPPED in "\n".join(notes_of(error))
        made.model.synchronize()
        assert made.traps.passes()["step_fn", None] == 0
        assert_same(made.snapshot(), before)
        made.train_right(4, 5, 6, is_async=True)
        made.assert_right()


# The step itself fails.


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_kernel_that_fails(plan: str, count: int, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with overlap(2, PLANS[plan]) as made:
        made.train_right(90, 91, 92, is_async=is_async)
        made.model.synchronize()
        made.reference.synchronize()
        before = made.weights()
        watch, error = KernelWatch(monkeypatch), Boom("kernel")
        watch.fail_in(count, error)
        made.call(2)
        caught = raised_by(lambda: made.step(is_async), lambda: made.call(3), made.model.synchronize)
        assert caught is error
        assert "while running step_fn of optimizer step" in "\n".join(notes_of(error))
        watch.fail_in(0, error)
        if is_async:
            made.model.synchronize()
            assert_same(made.weights(), before, "nothing of the failed step is published")
            carry_on_after_a_void_step(made)
        else:
            made.follow()
            made.train_right(3, 4, 5)
            made.assert_right()


def carry_on_after_a_void_step(made: Overlap) -> None:
    """The copies keep what the failed step has made of them, and the next step publishes it, as after any failure."""
    made.model.zero_grad()
    masters = copy.deepcopy(made.copies)
    with torch.no_grad():
        for master, param in zip(made.reference.masters, masters, strict=True):
            master.copy_(param)
            master.grad = None
    made.reference.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.reference.module.zero_grad()
    made.train_right(4, is_async=True)
    made.reference.versions[-2] = made.reference.versions[-1]
    made.assert_right()
    made.train_right(5, 6, is_async=True)
    made.assert_right()


Patch = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]


def patched(owner: Any, name: str) -> Patch:
    """Has something happen before a method."""

    def patch(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
        real = getattr(owner, name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            happens()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, instead)

    return patch


class FailsOnce:
    def __init__(self, count: int, error: BaseException) -> None:
        self._left, self._error = count, error
        self.is_armed, self.fired = False, False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if not self.is_armed or self.fired:
                return
            self._left -= 1
            self.fired = self._left == 0
        if self.fired:
            raise self._error


INSIDE_THE_STEP = {
    "the target of a weight": patched(LayerUpdate, "_begun"),
    "the wait for uploads": patched(LayerWeights, "begin"),
    "the numbers of a parameter": patched(AdamRule, "progress"),
    "the memory of the lower bits": patched(OptimizerCopy, "values_for_kernel"),
    "the source of a gradient": patched(OptimizerCopy, "begin_step"),
    "a gradient": patched(OptimizerCopy, "gradient_sources"),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), NUM_LAYERS])
@pytest.mark.parametrize("what", INSIDE_THE_STEP)
def test_a_step_that_fails_inside(what: str, count: int, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    error = Boom(what)
    fails = FailsOnce(count, error)
    INSIDE_THE_STEP[what](monkeypatch, fails)
    with overlap() as made:
        made.train_right(90, 91, 92, is_async=is_async)
        made.model.synchronize()
        made.reference.synchronize()
        before = made.weights()
        made.call(2)
        fails.is_armed = True
        assert raised_by(lambda: made.step(is_async), made.model.synchronize) is error
        assert fails.fired
        assert "optimizer step 4" in "\n".join(notes_of(error))
        made.model.synchronize()
        if is_async:
            assert_same(made.weights(), before, "nothing of the failed step is published")
            made.model.step(lambda: None, is_async=False)  # which publishes what the copies are by now
        made.follow()
        made.train_right(3, 4, is_async=is_async)
        made.train_right(5)
        made.assert_right()


def test_a_step_that_fails_at_its_very_end_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """step_fn is done; what is left to do fails for one parameter, as for want of memory for a gradient that stays."""
    error = Boom("end of the step")
    fails = FailsOnce(1, error)
    patched(OptimizerCopy, "end_step")(monkeypatch, fails)
    with overlap() as made:
        made.train_right(90, 91, is_async=True)
        made.model.synchronize()
        before = made.weights()
        made.call(2)
        fails.is_armed = True
        assert raised_by(lambda: made.step(is_async=True), made.model.synchronize) is error
        assert "nothing of this step is published" in "\n".join(notes_of(error))
        made.model.synchronize()
        assert_same(made.weights(), before)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "where", [(HostGradients, "add"), (landing, "_complete_parts")], ids=["adding", "parts of shared ones"]
)
def test_a_landing_that_fails(where: tuple[Any, str], count: int, is_async: bool) -> None:
    """The call is proven: a synchronous step may have begun, and is unwound."""
    error = Boom("landing")
    fails = FailsOnce(count, error)
    with pytest.MonkeyPatch.context() as monkeypatch, overlap() as made:
        patched(*where)(monkeypatch, fails)
        made.train_right(90, 91, 92, is_async=is_async)
        made.model.synchronize()
        made.reference.synchronize()
        before = made.snapshot()
        fails.is_armed = True
        caught = raised_by(lambda: made.call(2), lambda: made.step(is_async), made.model.synchronize)
        assert caught is error
        assert f"while landing gradients of layer {NUM_LAYERS - count}" in "\n".join(notes_of(error))
        made.model.synchronize()
        if is_async:
            assert_same(made.snapshot(), before)
        made.follow()
        made.train_right(3, 4, is_async=is_async)
        made.train_right(5)
        made.assert_right()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_failures_of_steps_in_a_row(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two void versions after each other, then good ones."""
    with overlap() as made:
        made.train_right(90, 91, is_async=is_async)
        made.model.synchronize()
        watch = KernelWatch(monkeypatch)
        for number in range(3):
            error = Boom(number)
            watch.fail_in(1 + number, error)
            made.call(10 + number)
            assert raised_by(lambda: made.step(is_async), made.model.synchronize) is error
        watch.fail_in(0, Boom())
        made.model.step(lambda: None, is_async=False)
        made.follow()
        made.train_right(3, 4, 5, is_async=is_async)
        made.assert_right()


# Without a compiler; with copies that run late.


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("plan", PLANS)
def test_without_a_kernel_everything_is_the_same(plan: str, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = KernelWatch(monkeypatch)
    monkeypatch.setattr(native.library, "load", lambda: None)
    monkeypatch.setattr(native, "_kernel_of", native._kernel_of.__wrapped__)
    assert native.one_pass_kernel() is None
    with overlap(2, PLANS[plan]) as made:
        made.train_right(1, 2, 3, 4, is_async=is_async)
        made.train_right(5, is_async=not is_async)
        made.train_right(6, 7, is_async=is_async)
        made.assert_right()
    assert watch.given == []


@pytest.mark.parametrize("held", [0, 2])
def test_without_a_kernel_a_failing_call_leaves_everything(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's optimizer meets all gradients before it updates anything."""
    monkeypatch.setattr(one_pass, "one_pass_kernel", lambda: None)
    with overlap() as made:
        made.prove()
        before = made.snapshot()
        error = Boom("late")
        gate = held_call(made, 2, held, error)
        step = Background(made.step)
        gate.opened.set()
        assert raised_by(step.result) is error
        made.model.synchronize()
        assert_same(made.snapshot(), before)
        made.train_right(3, 4)
        made.assert_right()


STEPS = {
    "sync": [False] * 5,
    "async": [True] * 6,
    "mixed": [False, False, True, True, False, True, False, False, True],
}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow) if seed > 3 else seed for seed in range(10)]
)
@pytest.mark.parametrize("kind", STEPS)
def test_late_copies_change_no_bit(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are overwritten when uploads have run, gradients read when downloads have: in every order."""
    monkeypatch.setenv(SEED, str(seed))
    with overlap(1 + seed % 3, list(PLANS.values())[seed % 2]) as made:
        for number, is_async in enumerate(STEPS[kind]):
            made.train_right(number, is_async=is_async)
        made.assert_right()
    wait_for_no_threads()
