"""Copies that run late, in any order the rules allow, change no bit; and where a wait is forgotten it shows.

The second half proves the first can fail: it takes one kind of wait away at a time and demands wrong results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import NUM_MICROBATCH, Traps, batch, build_model, make_optimizer, mse, wait_for_no_threads
from helpers_parity import StalenessReference, assert_same, call_reference
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices.interface import Event, StreamKind
from roundpipe.devices.virtual import VirtualDevice, VirtualEvent

NUM_SEEDS = 20  # to find a forgotten wait
NUM_ORDERS = int(os.environ.get("ROUNDPIPE_COPY_ORDERS", "6"))  # seeds per number of devices
CALLS_PER_STEP = (1, 2, 1)  # accumulation over calls in the second iteration
SEED = "ROUNDPIPE_VIRTUAL_SEED"


class InPlace(nn.Module):
    """Overwrites its input, which has been saved for recomputation just before."""

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, steps = value
        return x.mul_(1.5), steps


def build() -> nn.Sequential:
    first, *others = build_model(Traps())
    return nn.Sequential(first, InPlace(), *others)


PLAN = ModelExecutePlan([range(0, 1), range(1, 3)], [range(3, 5), range(1, 3), range(0, 1)])


def train(num_devices: int, is_async: bool, grain: str = "stage") -> list[Any]:
    """Everything there is to see of three iterations: losses, outputs, weights, buffers, gradients."""
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLAN, recompute_grain=grain)
    seen: list[Any] = []
    with RoundPipe(build(), devices=["cpu"] * num_devices, model_run_config=config) as model:
        optimizer = make_optimizer(model.optim_parameters())

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for iteration, num_calls in enumerate(CALLS_PER_STEP):
            for call in range(num_calls):
                x, label = batch(10 * iteration + call)
                loss, output = model.forward_backward((x,), label=label, loss_fn=mse, return_outputs=True)
                seen += [loss, output.detach()]
            model.step(step_fn, is_async)
        x, label = batch(99)
        seen.append(model.forward_backward((x,), label=label, loss_fn=mse))
        model.synchronize()
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return seen


def train_plainly(is_async: bool) -> list[Any]:
    module = build()
    reference = StalenessReference(module, make_optimizer)
    seen: list[Any] = []
    for iteration, num_calls in enumerate(CALLS_PER_STEP):
        for call in range(num_calls):
            x, label = batch(10 * iteration + call)
            outcome = call_reference(module, (x,), {}, label, mse, NUM_MICROBATCH)
            seen += [outcome.loss, outcome.outputs]
        reference.step(is_async)
    x, label = batch(99)
    seen.append(call_reference(module, (x,), {}, label, mse, NUM_MICROBATCH).loss)
    reference.synchronize()
    seen.append(dict(module.state_dict()))
    seen.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    return seen


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def expected(is_async: bool) -> list[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    right = train_plainly(is_async)
    torch.set_num_threads(before)
    return right


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_every_order_of_copies_gives_the_same_bits(
    num_devices: int, is_async: bool, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(NUM_ORDERS if is_async else NUM_ORDERS // 3):
        monkeypatch.setenv(SEED, str(seed))
        assert_same(train(num_devices, is_async, "layer" if seed % 2 else "stage"), expected, f"seed {seed}")
        wait_for_no_threads()  # the next seed needs new devices


# The bench itself.


def kind_of(event: Event) -> StreamKind | None:
    return getattr(event, "kind", None)


@pytest.fixture
def tagged_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events know the stream they were recorded on."""
    real = VirtualDevice.record

    def record(self: VirtualDevice, stream: StreamKind) -> Event:
        event = real(self, stream)
        if isinstance(event, VirtualEvent):
            event.kind = stream  # type: ignore[attr-defined]
        return event

    monkeypatch.setattr(VirtualDevice, "record", record)


def ignore_stream_wait(
    monkeypatch: pytest.MonkeyPatch, ignored: Callable[[StreamKind, StreamKind | None], bool]
) -> None:
    real = VirtualDevice.stream_wait

    def stream_wait(self: VirtualDevice, stream: StreamKind, event: Event) -> None:
        if not ignored(stream, kind_of(event)):
            real(self, stream, event)

    monkeypatch.setattr(VirtualDevice, "stream_wait", stream_wait)


def ignore_host_wait(monkeypatch: pytest.MonkeyPatch, kind: StreamKind, thread_name: str) -> None:
    """The thread of that name goes on without waiting for copies of that kind."""
    real = VirtualEvent.wait

    def wait(self: VirtualEvent) -> None:
        if kind_of(self) is not kind or not threading.current_thread().name.startswith(thread_name):
            real(self)

    monkeypatch.setattr(VirtualEvent, "wait", wait)


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "compute does not wait for weights": lambda patch: ignore_stream_wait(
        patch, lambda stream, of: stream is StreamKind.COMPUTE and of is StreamKind.WEIGHTS_UP
    ),
    "compute does not wait for activations": lambda patch: ignore_stream_wait(
        patch, lambda stream, of: stream is StreamKind.COMPUTE and of is StreamKind.ACTIVATIONS_UP
    ),
    "an upload does not wait for the download of another device": lambda patch: ignore_stream_wait(
        patch, lambda stream, of: stream is StreamKind.ACTIVATIONS_UP and of is StreamKind.ACTIVATIONS_DOWN
    ),
    "compute overwrites what is being downloaded": lambda patch: ignore_stream_wait(
        patch, lambda stream, of: stream is StreamKind.COMPUTE and of is StreamKind.ACTIVATIONS_DOWN
    ),
    "gradients are added before they have come down": lambda patch: ignore_host_wait(
        patch, StreamKind.GRADS_DOWN, "roundpipe-landing"
    ),
    "the caller does not wait for losses and outputs": lambda patch: ignore_host_wait(
        patch, StreamKind.ACTIVATIONS_DOWN, "MainThread"
    ),
}


def is_right(expected: list[Any], num_devices: int) -> bool:
    try:
        assert_same(train(num_devices, True), expected)
    except (AssertionError, RuntimeError, IndexError):
        return False
    return True


@pytest.fixture
def some_seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    def seeds() -> Iterator[int]:
        for seed in range(NUM_SEEDS):
            monkeypatch.setenv(SEED, str(seed))
            yield seed
            wait_for_no_threads()

    return seeds()


@pytest.mark.usefixtures("tagged_events")
@pytest.mark.parametrize("forgotten", MUTATIONS)
def test_a_forgotten_wait_shows(forgotten: str, some_seeds: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train_plainly(True)
    with monkeypatch.context() as patch:
        MUTATIONS[forgotten](patch)
        assert any(not is_right(expected, 3) for _ in some_seeds), f"no result is wrong although {forgotten}"
    wait_for_no_threads()
    assert is_right(expected, 3), "the mutation is gone, its effect is not"


@pytest.mark.usefixtures("tagged_events")
def test_results_are_right_while_no_wait_is_forgotten(
    some_seeds: Iterator[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the machinery of the mutations in place and nothing taken away all is right."""
    expected = train_plainly(True)
    ignore_stream_wait(monkeypatch, lambda stream, of: False)
    ignore_host_wait(monkeypatch, StreamKind.GRADS_DOWN, "no such thread")
    assert all(is_right(expected, 3) for _, seed in zip(range(3), some_seeds, strict=False))
