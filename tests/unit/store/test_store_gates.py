"""LayerStore applies the slots' rules to memory: weights are written only when no upload reads them, despite errors."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from roundpipe.devices.virtual import NoPinner
from roundpipe.monitor import Monitor
from roundpipe.store import HostGradient, LayerStore, ParameterRecord, PinMode

WAIT_S = 30.0


class Copy:
    """The event of an upload, which passes or fails when the test sets `ran`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.ran, self.waited = threading.Event(), threading.Event()
        self._error = error

    def done(self) -> bool:
        return self.ran.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self.ran.wait(WAIT_S)
        if self._error is not None:
            raise self._error


def make_store(mode: PinMode = PinMode.ALLOC) -> LayerStore:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    names = {id(p): f"{i}.{k}" for i, layer in enumerate(layers) for k, p in layer.named_parameters()}
    store = LayerStore(layers, names, optim_dtype=None, pin_mode=mode, pinner=NoPinner(), monitor=Monitor())
    for record in store.parameters:
        store.masters.of(record)
    return store


def change_masters(store: LayerStore) -> None:
    with torch.no_grad():
        for master in store.masters.existing():
            master.fill_(7.0)


def weights(store: LayerStore, layer_id: int) -> list[torch.Tensor]:
    return [record.weights.clone() for record in store.layers[layer_id].parameters]


def test_weights_are_overwritten_only_after_uploads_have_run() -> None:
    store, copy, call = make_store(), Copy(), "call"
    before = weights(store, 0)
    store.expect(call, uploads={0: 1}, version=0, landings=[], generation=0)
    change_masters(store)
    publisher = threading.Thread(target=lambda: store.weights.publish(0, 1, copy=True), daemon=True)
    publisher.start()
    assert not copy.waited.wait(0.05), "the upload is due but not issued: nothing to wait for yet"
    store.weights.upload_issued(call, 0, 0, copy)
    assert copy.waited.wait(WAIT_S)
    assert all(map(torch.equal, weights(store, 0), before))
    copy.ran.set()
    publisher.join(WAIT_S)
    assert all((w == 7.0).all() for w in weights(store, 0))
    assert store.weights.can_upload(0, 1)
    assert store.weights.can_upload(1, 0), "the other layer is not affected"


def test_an_upload_that_failed_holds_nobody_up_and_is_told() -> None:
    store, error = make_store(), RuntimeError("copy")
    failed, good = Copy(error), Copy()
    store.expect("call", uploads={0: 2}, version=0, landings=[], generation=0)
    for copy in (failed, good):
        copy.ran.set()
        store.weights.upload_issued("call", 0, 0, copy)
    change_masters(store)
    with pytest.raises(RuntimeError) as caught:
        store.weights.publish(0, 1, copy=True)
    assert caught.value is error
    assert good.waited.is_set()
    assert store.weights.can_upload(0, 1)
    assert all((w == 7.0).all() for w in weights(store, 0))


def test_publishing_an_old_version_does_nothing() -> None:
    store = make_store()
    for version in (1, 2):
        store.weights.publish(0, version, copy=False)
    change_masters(store)
    store.weights.publish(0, 1, copy=True)
    assert all((w != 7.0).any() for w in weights(store, 0))


def test_a_void_version_is_numbered_but_copies_nothing() -> None:
    store = make_store()
    before = weights(store, 0)
    change_masters(store)
    store.weights.publish(0, 1, copy=False)
    assert store.weights.can_upload(0, 1)
    assert all(map(torch.equal, weights(store, 0), before))


def part(record: ParameterRecord) -> HostGradient:
    return HostGradient(record, torch.ones_like(record.weights))


def test_a_cancelled_landing_adds_nothing() -> None:
    store = make_store()
    record = store.layers[0].parameters[0]
    store.gradients.add([part(record)], lambda: True)
    assert record.gathered is None


def test_waiting_for_weights_ends_with_the_call() -> None:
    store, cancelled = make_store(), threading.Event()
    outcome: list[bool] = []
    waiter = threading.Thread(
        target=lambda: outcome.append(store.weights.wait_for(0, 5, cancelled.is_set)), daemon=True
    )
    waiter.start()
    cancelled.set()
    store.cancel("call")
    waiter.join(WAIT_S)
    assert outcome == [False]
