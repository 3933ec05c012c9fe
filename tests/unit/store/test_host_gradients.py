"""Gradients in host memory: each landing buffer is free again when the last of its gradients was released."""

from __future__ import annotations

import torch
from torch import nn

from roundpipe.devices.virtual import NoPinner
from roundpipe.module_names import user_names
from roundpipe.monitor import Monitor
from roundpipe.store import HostGradient, LayerStore, PinMode
from roundpipe.store.host_memory import LandingBuffer, lay_out


def make_store() -> LayerStore:
    layers = [nn.Linear(3, 3)]
    names = user_names(nn.Sequential(*layers))
    return LayerStore(layers, names, optim_dtype=None, pin_mode=PinMode.OFF, pinner=NoPinner(), monitor=Monitor())


def landed(store: LayerStore, value: float) -> list[HostGradient]:
    """The gradients of all parameters in one landing buffer, as a download leaves them."""
    layout = lay_out([record.weights for record in store.parameters])
    buffer, views = store.landing_buffers.take(layout, num_gradients=len(store.parameters))
    for view in views:
        view.fill_(value)
    return [HostGradient(record, view, buffer) for record, view in zip(store.parameters, views, strict=True)]


def free_buffers(store: LayerStore) -> list[LandingBuffer]:
    return [buffer for buffers in store.landing_buffers.free.values() for buffer in buffers]


def test_the_first_gradients_become_the_sum_and_later_ones_are_added_and_released() -> None:
    store = make_store()
    first, second = landed(store, 1.0), landed(store, 2.0)
    kept, buffers = list(first), [first[0].buffer, second[0].buffer]
    store.gradients.add(first, lambda: False)
    assert (first, free_buffers(store)) == ([], [])
    assert all(record.gathered is gradient for record, gradient in zip(store.parameters, kept, strict=True))
    store.gradients.add(second, lambda: False)
    assert free_buffers(store) == [buffers[1]]
    taken = store.gradients.take(store.parameters)
    assert all(torch.equal(gradient.tensor, torch.full_like(gradient.tensor, 3.0)) for gradient in taken.values())
    for gradient in taken.values():
        assert free_buffers(store) == [buffers[1]], "until the last one is released"
        gradient.release()
    assert free_buffers(store) == [buffers[1], buffers[0]]


def test_a_second_release_does_nothing() -> None:
    store = make_store()
    gradients = landed(store, 1.0)
    gradients[0].release()
    gradients[0].release()
    assert free_buffers(store) == []
    gradients[1].release()
    assert len(free_buffers(store)) == 1


def test_gradients_of_a_cancelled_run_stay_with_their_landing() -> None:
    store = make_store()
    gradients = landed(store, 1.0)
    store.gradients.add(gradients, lambda: True)
    assert len(gradients) == len(store.parameters)
    assert all(record.gathered is None for record in store.parameters)


def test_dropped_sums_are_released() -> None:
    store = make_store()
    store.gradients.add(landed(store, 1.0), lambda: False)
    store.gradients.drop()
    assert len(free_buffers(store)) == 1


def test_a_buffer_that_is_used_again_has_the_same_views() -> None:
    store = make_store()
    first = landed(store, 1.0)
    views = [gradient.tensor for gradient in first]
    for gradient in first:
        gradient.release()
    assert all(gradient.tensor is view for gradient, view in zip(landed(store, 2.0), views, strict=True))


def test_what_the_user_does_to_a_shown_gradient_does_not_reach_the_next_one() -> None:
    store = make_store()
    first = landed(store, 1.0)
    views = [gradient.tensor for gradient in first]
    store.gradients.add(first, lambda: False)
    store.gradients.expose()
    shown = [record.param.grad for record in store.parameters]
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in zip(shown, views, strict=True))
    assert store.gradients.touched_by_user() == []
    shown[0].requires_grad_()
    store.gradients.expose()
    assert store.parameters[0].param.grad is shown[0], "the same object as long as it is shown"
    store.gradients.drop()
    assert not any(gradient.tensor.requires_grad for gradient in landed(store, 1.0))
