"""Parameter gradients from a device's autograd to the host's sums: gathering, download, and the order of landings."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_runs import WIDTH, Recorder
from torch import Tensor, nn

from helpers_faults import WAIT_S
from helpers_parity import assert_same
from roundpipe.devices.interface import StreamKind
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.monitor import Monitor
from roundpipe.runtime.gradients import Landing, LandingThread, LayerGradients
from roundpipe.runtime.replica import LayerImages, Replica
from roundpipe.runtime.run import LayerSettings
from roundpipe.runtime.transfer import DeviceBuffers, Transfer
from roundpipe.store import LayerStore
from roundpipe.store.host_memory import LandingBuffers
from roundpipe.store.training_memory import PinMode

WEIGHT, BIAS = 0, 1


@pytest.fixture
def store() -> Iterator[LayerStore]:
    torch.manual_seed(1)
    shared = nn.Linear(WIDTH, WIDTH)
    layers = [nn.Linear(WIDTH, WIDTH), shared, shared, shared]
    names = {id(p): f"{i}.{n}" for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    made = LayerStore(layers, names, optim_dtype=None, pin_mode=PinMode.OFF, pinner=None, monitor=Monitor())
    yield made
    made.close()


def bound_replica(store: LayerStore, layer_id: int, device: VirtualDevice) -> Replica:
    """A layer on a device, its weights in place."""
    record = store.layers[layer_id]
    replica = LayerImages(device).replica(store, layer_id)
    weights = record.image.views(torch.zeros(record.image.total_bytes, dtype=torch.uint8))
    replica.bind(weights, LayerSettings.of(record))
    return replica


class Bound:
    """The first layer on a virtual device, its weights in place."""

    def __init__(self, store: LayerStore) -> None:
        device = VirtualDevice(0)
        self.replica = bound_replica(store, 0, device)
        self.buffers = DeviceBuffers(device, StreamKind.COMPUTE, StreamKind.GRADS_DOWN)
        self.transfer = Transfer(device)
        self.host = LandingBuffers(None)
        self.gradients = LayerGradients(self.replica, self.buffers)

    def accumulate(self, position: int, gradient: Tensor) -> None:
        """As a backward does: the first gradient is set, a later one added in place."""
        parameter = self.replica.parameters[position]
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
        self.gradients.gather()

    def download(self) -> dict[str, Tensor] | None:
        """The downloaded gradients by name, once they have arrived."""
        sent = self.gradients.download(self.transfer, self.host)
        if sent is None:
            return None
        gradients, arrived = sent
        arrived.wait()
        return {gradient.record.name: gradient.tensor for gradient in gradients}


@pytest.fixture
def bound(recorder: Recorder, store: LayerStore) -> Bound:
    return Bound(store)


def ones(value: float = 1.0) -> Tensor:
    return torch.full((WIDTH, WIDTH), value)


def test_microbatches_are_summed_and_downloaded_in_one_copy(bound: Bound, recorder: Recorder) -> None:
    for value in (1.0, 2.0, 4.0):
        bound.accumulate(WEIGHT, ones(value))
        bound.accumulate(BIAS, ones(value)[0])
    assert_same(bound.download(), {"0.weight": ones(7.0), "0.bias": ones(7.0)[0]})
    assert recorder.lines.count("copy gradients down") == 1
    recorder.assert_order("poison gradients down", "gradients down waits for compute 0", "copy gradients down")


def test_a_parameter_without_a_gradient_is_left_out(bound: Bound) -> None:
    bound.accumulate(BIAS, ones()[0])
    assert_same(bound.download(), {"0.bias": ones()[0]})


def test_a_gradient_that_first_appears_in_a_later_microbatch_is_gathered(bound: Bound) -> None:
    bound.accumulate(BIAS, ones()[0])
    bound.accumulate(WEIGHT, ones(3.0))
    assert_same(bound.download(), {"0.weight": ones(3.0), "0.bias": ones()[0]})


def test_a_layer_without_gradients_downloads_nothing(bound: Bound, recorder: Recorder) -> None:
    bound.gradients.gather()
    assert bound.download() is None
    assert recorder.starting("copy") == []


def test_parameters_have_no_gradient_after_the_download(bound: Bound) -> None:
    bound.accumulate(WEIGHT, ones())
    bound.download()
    assert [parameter.grad for parameter in bound.replica.parameters] == [None, None]
    assert bound.download() is None


def test_device_memory_is_written_again_after_its_download(bound: Bound, recorder: Recorder) -> None:
    bound.accumulate(WEIGHT, ones())
    first = bound.download()
    recorder.clear()
    bound.accumulate(WEIGHT, ones(2.0))
    second = bound.download()
    recorder.assert_order("compute waits for gradients down 0", "copy gradients down")
    assert_same([first, second], [{"0.weight": ones()}, {"0.weight": ones(2.0)}])


# Landings.


class FakeRun:
    """What the landing thread asks of a run: a store whose turns the test grants."""

    def __init__(self, store: LayerStore, name: str, turns: set[str], landed: list[tuple[str, int]]) -> None:
        self._real, self._name, self._turns, self._landed = store, name, turns, landed
        self.store = SimpleNamespace(
            weights=SimpleNamespace(can_land=lambda run, layer_id, generation: run._name in turns),
            gradients=store.gradients,
            landed=lambda run, layer_id, generation: landed.append((run._name, layer_id)),
            layers=store.layers,
        )
        self.generation = 0
        self.contributors: dict[Any, list[int]] = {}
        self.shared_parts: dict[Any, dict[int, Tensor | None]] = {}
        self.failure: BaseException | None = None
        self.done = threading.Semaphore(0)

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def fail(self, error: BaseException) -> None:
        self.failure = error

    def landing_done(self) -> None:
        self.done.release()


class Landings:
    """A landing thread, runs for it, and the order in which it lands."""

    def __init__(self, store: LayerStore) -> None:
        self.store, self.monitor = store, store.monitor
        self.turns: set[str] = set()
        self.landed: list[tuple[str, int]] = []
        self.host = LandingBuffers(None)
        self.transfer = Transfer(VirtualDevice(0))
        self.thread = LandingThread(self.monitor)
        self.thread.thread.start()

    def run(self, name: str) -> FakeRun:
        return FakeRun(self.store, name, self.turns, self.landed)

    def submit(self, run: FakeRun, layer_id: int, value: float | None) -> None:
        sent = None
        if value is not None:
            device = VirtualDevice(layer_id)
            replica = bound_replica(self.store, layer_id, device)
            gradients = LayerGradients(replica, DeviceBuffers(device, StreamKind.COMPUTE, StreamKind.GRADS_DOWN))
            replica.parameters[WEIGHT].grad = ones(value)
            gradients.gather()
            sent = gradients.download(Transfer(device), self.host)
        self.thread.submit(Landing(run, layer_id, sent))  # type: ignore[arg-type]

    def grant(self, *names: str) -> None:
        with self.monitor:
            self.turns.update(names)
            self.monitor.changed()

    def weight_gradient(self, layer_id: int) -> Tensor | None:
        gathered = self.store.layers[layer_id].parameters[WEIGHT].gathered
        return None if gathered is None else gathered.tensor

    def close(self) -> None:
        self.thread.stop()
        self.thread.thread.join(WAIT_S)
        assert not self.thread.thread.is_alive()


@pytest.fixture
def landings(store: LayerStore) -> Iterator[Landings]:
    made = Landings(store)
    yield made
    made.close()


def wait_until_landed(run: FakeRun, count: int = 1) -> None:
    for _ in range(count):
        assert run.done.acquire(timeout=WAIT_S), "the landing never ended"


def test_a_landing_waits_for_its_turn_and_not_for_others(landings: Landings) -> None:
    first, second = landings.run("first"), landings.run("second")
    landings.submit(second, 0, 2.0)
    landings.submit(first, 0, 1.0)
    landings.grant("first")
    wait_until_landed(first)
    assert landings.landed == [("first", 0)]
    landings.grant("second")
    wait_until_landed(second)
    assert landings.landed == [("first", 0), ("second", 0)]
    assert torch.equal(landings.weight_gradient(0), ones(3.0))


def test_a_layer_without_gradients_lands_too(landings: Landings) -> None:
    run = landings.run("run")
    landings.grant("run")
    landings.submit(run, 0, None)
    wait_until_landed(run)
    assert landings.landed == [("run", 0)]
    assert landings.weight_gradient(0) is None


def test_a_failed_run_lands_without_its_turn_and_adds_nothing(landings: Landings) -> None:
    run = landings.run("run")
    run.fail(KeyError("elsewhere"))
    landings.submit(run, 0, 1.0)
    wait_until_landed(run)
    assert landings.weight_gradient(0) is None


def test_a_parameter_of_several_layers_is_summed_from_the_last_layer_to_the_first(landings: Landings) -> None:
    """In float32 (1e8 - 1e8) + 1 is 1, but (1 - 1e8) + 1e8 is 0: the order shows in the sum."""
    shared = landings.store.layers[1].parameters[WEIGHT]
    for order in itertools.permutations((1, 2, 3)):
        run = landings.run(f"run {order}")
        run.contributors = {shared: [1, 2, 3]}
        landings.grant(f"run {order}")
        for layer_id in order:
            landings.submit(run, layer_id, {3: 1e8, 2: -1e8, 1: 1.0}[layer_id])
        wait_until_landed(run, 3)
        assert torch.equal(landings.weight_gradient(1), ones(1.0)), f"landed in the order {order}"
        landings.store.gradients.drop()


def test_host_memory_is_free_again_once_its_sum_is_taken(landings: Landings) -> None:
    run = landings.run("run")
    landings.grant("run")
    landings.submit(run, 0, 1.0)
    wait_until_landed(run)
    assert sum(map(len, landings.host.free.values())) == 0, "the first gradient is the sum, where it lies"
    landings.submit(run, 0, 1.0)
    wait_until_landed(run)
    assert sum(map(len, landings.host.free.values())) == 1, "the second was added to the first"
    landings.store.gradients.drop()
    assert sum(map(len, landings.host.free.values())) == 2


def test_an_error_while_landing_fails_the_run_and_not_the_thread(landings: Landings) -> None:
    broken, later = landings.run("broken"), landings.run("later")

    def fail(*_: object) -> None:
        raise ValueError("no memory")

    broken.store.landed = fail
    landings.grant("broken", "later")
    landings.submit(broken, 0, None)
    wait_until_landed(broken)
    assert str(broken.failure) == "no memory"
    assert broken.failure.__notes__ == ["while landing gradients of layer 0"]
    landings.submit(later, 0, None)
    wait_until_landed(later)
    assert later.failure is None
