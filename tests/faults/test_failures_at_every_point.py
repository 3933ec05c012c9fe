"""An exception at every point and for every microbatch reaches the caller, changes nothing, and is over then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers_faults import (
    DROPPED,
    FUSED,
    NUM_MICROBATCH,
    RECOMPUTED,
    Bench,
    Boom,
    batch,
    bench,
    caught_from,
    check_failure,
    notes_of,
    raised_by,
    watched_copies,
)
from helpers_parity import assert_same
from roundpipe import RoundPipeRunConfig
from roundpipe.api import planner as planning
from roundpipe.devices.interface import StreamKind
from roundpipe.runtime.mailbox import StageMail
from roundpipe.store.store import HostGradients, Masters

# Number of devices and grain of recomputation. Together the first two take every path; the others are slow.
SETTINGS = [(1, "stage"), (2, "layer"), (1, "layer"), (2, "stage"), (3, "stage"), (3, "layer")]
USER_POINTS: list[tuple[str, Any, str]] = [
    *[("forward", layer_id, "forward") for layer_id in (*RECOMPUTED, *FUSED)],
    *[("recompute", layer_id, "recompute") for layer_id in RECOMPUTED],
    *[("backward", layer_id, "backward") for layer_id in (*RECOMPUTED, *FUSED)],
    ("loss_fn", None, "loss_fn"),
    ("backward", "loss", "loss backward"),
]
# Calls copy on all streams but these; faults in an update on a device are in tests/unit/optim/test_device_share.py.
NOT_OF_CALLS = (StreamKind.COMPUTE, StreamKind.UPDATES, StreamKind.MORE_UPDATES)
COPY_KINDS = [kind for kind in StreamKind if kind not in NOT_OF_CALLS]


@pytest.fixture(params=[*SETTINGS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in SETTINGS[2:])], ids=str)
def setting(request: pytest.FixtureRequest) -> tuple[int, str]:
    num_devices, grain = request.param
    return num_devices, grain


@pytest.fixture
def num_devices(setting: tuple[int, str]) -> int:
    return setting[0]


@pytest.fixture
def grain(setting: tuple[int, str]) -> str:
    return setting[1]


@pytest.fixture
def made(num_devices: int, grain: str) -> Iterator[Bench]:
    with bench(num_devices, grain) as made:
        made.train_right(1)
        yield made


def place(layer: Any, microbatch: int | None, phase: str) -> list[str]:
    """What a note about this place must contain."""
    parts = [f"{phase} on cpu:"]
    if isinstance(layer, int):
        parts.append(f"layer {layer}, ")
    if microbatch is not None:
        parts.append(f"microbatch {microbatch}, ")
    return parts


# The user's code.


@pytest.mark.parametrize(("point", "where", "phase"), USER_POINTS, ids=lambda value: str(value))
def test_a_layer_or_loss_fails(made: Bench, point: str, where: Any, phase: str) -> None:
    for microbatch in range(NUM_MICROBATCH):
        error = Boom(point, where, microbatch)
        call = made.failing(point, where, microbatch, error)
        check_failure(made, error, call, note=place(where, microbatch, phase))


@pytest.mark.parametrize("error_type", [StopIteration, GeneratorExit, SystemExit, AssertionError, MemoryError])
@pytest.mark.parametrize("point", ["forward", "backward"])
def test_every_type_of_exception_arrives_as_it_is(point: str, error_type: type[BaseException]) -> None:
    """StopIteration and GeneratorExit mean something to generators, of which context managers are made."""
    with bench(2) as made:
        made.train_right(1)
        for layer_id in (0, 3):  # layer 0's backward fails after the call has returned
            error = error_type("meant for the caller")
            check_failure(made, error, made.failing(point, layer_id, 1, error), note=[f"layer {layer_id}"])


def test_an_exception_object_raised_twice_is_raised_twice() -> None:
    error = Boom("the very same object")
    with bench(2) as made:
        made.train_right(1)
        for _ in range(2):
            check_failure(made, error, made.failing("forward", 1, 0, error))


@pytest.mark.parametrize("point", ["forward", "recompute", "backward"])
def test_forward_and_backward_apart(num_devices: int, grain: str, point: str) -> None:
    """The failure of a pipelined backward comes out of backward()."""
    with bench(num_devices, grain, plan=None) as made:
        made.train_right(1)
        for microbatch in range(NUM_MICROBATCH):
            error = Boom(point, microbatch)

            def call(microbatch: int = microbatch, error: Boom = error) -> None:
                x, label = batch(11)
                output = None
                if point == "forward":
                    made.traps.arm(point, 1, microbatch, error)
                output = made.model(x)
                before = made.snapshot()["model"]
                made.traps.arm(point, 1, microbatch, error)
                caught = raised_by(lambda: made.loss_fn(output, label).backward())
                assert_same(dict(made.model.state_dict()), before, "after the failed backward")
                raise caught

            before = made.snapshot()
            caught = raised_by(call)
            assert caught is error
            assert all(part in "\n".join(notes_of(caught)) for part in place(1, microbatch, point))
            assert (DROPPED in "\n".join(notes_of(caught))) == (point != "forward")
            if point == "forward":
                assert_same(made.snapshot(), before, "after the failed forward")
            made.reference.load_state_dict(made.model.state_dict())  # the good forward did count for batch norm
            made.train_right(12)


def test_inference_fails(num_devices: int) -> None:
    """Nothing but the call itself is lost: gradients gathered so far stay."""
    with bench(num_devices, plan=None) as made, torch.no_grad():
        with torch.enable_grad():
            assert_same(made.call(1), made.call_reference(1))
        for layer_id in range(4):
            for microbatch in range(NUM_MICROBATCH):
                error = Boom(layer_id, microbatch)
                made.model.synchronize()
                before = made.snapshot()
                made.traps.arm("forward", layer_id, microbatch, error)
                assert raised_by(lambda: made.model(batch(5)[0])) is error
                assert DROPPED not in "\n".join(notes_of(error))
                assert_same(made.snapshot(), before, "after the failed inference")
        with torch.enable_grad():
            made.step()
            made.step_reference()
            made.assert_state_right()


# Copies.


def count_copies(made: Bench, monkeypatch: pytest.MonkeyPatch, kind: StreamKind) -> int:
    with watched_copies(made.traps, monkeypatch):
        made.traps.reset()
        made.call(9)
        made.call_reference(9)
        made.model.zero_grad()
        made.reference_optimizer.zero_grad()
        return made.traps.passes()["copy", kind]


PHASES = {
    StreamKind.WEIGHTS_UP: ["weight upload on cpu:"],
    StreamKind.ACTIVATIONS_UP: ["weight upload", "input upload", "gradient upload", "loss_fn", "recompute", "forward"],
    StreamKind.ACTIVATIONS_DOWN: ["saving input", "output download", "gradient download", "loss", "forward"],
    StreamKind.GRADS_DOWN: ["gradient download"],
}


@pytest.mark.parametrize("kind", COPY_KINDS, ids=lambda kind: kind.name)
def test_a_copy_cannot_be_queued(
    made: Bench, num_devices: int, grain: str, kind: StreamKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every copy of a call in turn: each of them on 2 devices by layer, every fifth elsewhere."""
    total = count_copies(made, monkeypatch, kind)
    assert total >= 4
    with watched_copies(made.traps, monkeypatch):
        for count in range(0, total, 1 if (num_devices, grain) == (2, "layer") else 5):
            error = Boom(kind, count)
            caught = check_failure(made, error, made.failing("copy", kind, count, error), note=["on cpu:"])
            note = notes_of(caught)[0]
            assert any(phase in note for phase in PHASES[kind]), note
            assert "layer " in note or "loss" in note, note
            assert "microbatch " in note or "weight upload" in note, note


@pytest.mark.parametrize("kind", COPY_KINDS, ids=lambda kind: kind.name)
def test_a_queued_copy_fails_when_it_runs(kind: StreamKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for an asynchronous copy gets its exception: a worker, the landing thread or the caller."""
    with bench(2) as made:
        made.train_right(1)
        total = count_copies(made, monkeypatch, kind)
        fired = 0
        with watched_copies(made.traps, monkeypatch, late=True):
            for count in range(total):
                error = Boom(kind, count)
                before = made.snapshot()

                def call(count: int = count, error: Boom = error) -> None:
                    made.traps.arm("copy", kind, count, error)
                    made.call(11)
                    made.model.synchronize()

                caught = caught_from(call)
                if caught is not None:
                    assert caught is error
                    fired += 1
                    made.model.synchronize()
                    assert_same(made.snapshot(), before, f"after copy {count} failed")
                else:
                    assert not made.traps.fired.is_set(), f"the failure of copy {count} was lost"
                    made.call_reference(11)
                    made.model.zero_grad()
                    made.reference_optimizer.zero_grad()
                made.traps.disarm()
                made.train_right(12 + count)
        assert fired >= total // 2


# The rest of the machinery.


def failing_method(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, count: int, error: BaseException
) -> Callable[[], None]:
    """Let the `count`-th call of a method raise, once; returns a function that arms it."""
    real = getattr(owner, name)
    left = [-1]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            left[0] = -1 << 30
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)
    left[0] = -1 << 30

    def arm() -> None:
        left[0] = count

    return arm


@pytest.mark.parametrize("count", range(4))
def test_the_landing_thread_fails(num_devices: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(num_devices) as made:
        made.train_right(1)
        error = Boom("landing", count)
        arm = failing_method(monkeypatch, HostGradients, "add", count, error)

        def call() -> None:
            arm()
            made.call(11)
            made.model.synchronize()

        check_failure(made, error, call, note=[f"landing gradients of layer {3 - count}"])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [0, 4, 11])
def test_the_optimizer_thread_cannot_take_gradients(
    count: int, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory for the optimizer's gradients, say: step_fn does not run, and later calls do not hang."""
    with bench(2) as made:
        made.train_right(1)
        error = Boom("hand over", count)
        arm = failing_method(monkeypatch, Masters, "of", count, error)
        made.call(10)
        made.call_reference(10)
        made.reference_optimizer.zero_grad()
        made.model.synchronize()
        before = made.snapshot()
        arm()
        made.traps.reset()
        caught = raised_by(lambda: made.step(is_async), made.model.synchronize)
        assert caught is error
        assert made.traps.passes()["step_fn", None] == 0
        made.model.synchronize()
        assert_same(made.snapshot(), before, "after the failed step")
        for seed in (11, 12, 13):
            made.train_right(seed)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("error_type", [Boom, SystemExit])
def test_step_fn_fails(num_devices: int, is_async: bool, error_type: type[BaseException]) -> None:
    with bench(num_devices) as made:
        made.train_right(1)
        for _ in range(2):
            error = error_type("step_fn")
            made.call(10)
            made.call_reference(10)
            made.reference_optimizer.zero_grad()
            made.model.synchronize()
            before = made.snapshot()
            made.traps.arm("step_fn", None, 0, error)
            if is_async:
                made.step(is_async=True)
                caught = raised_by(made.model.synchronize)
            else:
                caught = raised_by(made.step)
            assert caught is error
            assert "step_fn" in "\n".join(notes_of(caught))
            assert "gradients were dropped" in "\n".join(notes_of(caught))
            made.model.synchronize()
            assert_same(made.snapshot(), before, "after the failed step")
            assert all(p.grad is None for p in made.model.parameters())
            made.train_right(12)


def test_step_fn_fails_half_way() -> None:
    """What it had changed stays changed, and is published by the next step that succeeds."""
    with bench(2) as made:
        made.train_right(1)
        made.call(10)
        made.model.synchronize()
        weights = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
        error = Boom("half way")

        def step_fn() -> None:
            made.optimizer.step()
            raise error

        assert raised_by(lambda: made.model.step(step_fn, False)) is error
        made.model.synchronize()
        assert_same(dict(made.model.state_dict()), weights, "weights")
        masters = [p.detach().clone() for p in made.model.optim_parameters()]
        assert any(not torch.equal(m, p) for m, p in zip(masters, made.model.parameters(), strict=True))
        made.model.step(lambda: None, False)
        assert_same([p.detach() for p in made.model.parameters()], masters, "published")


def test_the_planner_fails(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(num_devices, plan=None) as made:
        error = Boom("planner")
        real, armed = planning.choose_plan, [True]

        def choose_plan(*args: Any, **kwargs: Any) -> Any:
            if armed.pop() if armed else False:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(planning, "choose_plan", choose_plan)
        assert raised_by(lambda: made.call(1)) is error
        made.train_right(1)
        made.train_right(2)


@pytest.mark.parametrize("option", ["split_input", "split_label", "merge_output"])
def test_a_split_or_merge_function_fails(num_devices: int, option: str) -> None:
    error = Boom(option)

    def fail(*args: Any) -> Any:
        raise error

    with bench(num_devices) as made:
        made.train_right(1)
        config = RoundPipeRunConfig(**{option: fail})
        check_failure(
            made,
            error,
            lambda: made.call(11, run_config=config, return_outputs=True),
            drops_gradients=option == "merge_output",
        )


def test_saving_data_for_recomputation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(NUM_MICROBATCH):
        with monkeypatch.context() as patch, bench(2, "layer") as made:
            made.train_right(1)
            error = Boom("saving input", count)
            arm = failing_method(patch, StageMail, "save_input", count, error)

            def call(arm: Callable[[], None] = arm, made: Bench = made) -> None:
                arm()
                made.call(11)

            check_failure(made, error, call, note=["on cpu:"])


def test_losses_of_different_number_fail_in_the_caller() -> None:
    """A failure on the calling thread undoes what the workers did, too."""
    with bench(2) as made:
        made.train_right(1)
        counts = iter([1, 2, 1])

        def loss_fn(output: Tensor, label: Tensor) -> list[Tensor]:
            return [(output - label).square().mean()] * next(counts)

        x, label = batch(11)
        before = made.snapshot()
        caught = raised_by(lambda: made.model.forward_backward((x,), label=label, loss_fn=loss_fn))
        assert "2 losses for microbatch 1 but 1 before" in str(caught)
        made.model.synchronize()
        assert_same(made.snapshot(), before, "after the failure")
        made.train_right(12)
