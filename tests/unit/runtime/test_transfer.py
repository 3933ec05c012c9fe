"""Uploads of a caller's pinned inputs: small ones do not wait behind weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roundpipe.devices import StreamKind
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.runtime.transfer import Transfer

PINNED: dict[int, Tensor] = {}  # by the address of the memory; keeps it from being used again


class Recording(VirtualDevice):
    """Notes from which memory tensors are copied."""

    def __init__(self) -> None:
        super().__init__(0)
        self.sources: list[Tensor] = []

    def copy(self, destination: Tensor, source: Tensor, stream: StreamKind) -> None:
        self.sources.append(source)
        super().copy(destination, source, stream)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Recording:
    PINNED.clear()
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in PINNED)
    return Recording()


def pinned(tensor: Tensor) -> Tensor:
    PINNED[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def arrived(device: Recording, tensor: Tensor) -> Tensor:
    device.record(StreamKind.COMPUTE).wait()
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(100), torch.arange(100)[3:], torch.arange(100).view(10, 10).t()[::2], torch.ones(1).expand(5)],
)
def test_a_small_pinned_input_is_copied_from_pageable_memory(device: Recording, tensor: Tensor) -> None:
    (copy,) = Transfer(device).up([pinned(tensor)], ())
    (source,) = device.sources
    assert not source.is_pinned()
    assert torch.equal(arrived(device, copy), tensor)
    assert copy.stride() == tensor.stride()


def test_other_tensors_are_copied_from_where_they_are(device: Recording) -> None:
    large, pageable, empty = pinned(torch.zeros(9000, dtype=torch.int64)), torch.arange(10), torch.empty(0)
    Transfer(device).up([large, pageable, empty], ())
    assert [source.data_ptr() for source in device.sources] == [large.data_ptr(), pageable.data_ptr(), empty.data_ptr()]


def test_a_tensor_that_a_download_is_still_filling_is_not_read(device: Recording) -> None:
    transfer, values = Transfer(device), torch.arange(10)
    (host,), event = transfer.down([values])
    device.sources.clear()
    (copy,) = transfer.up([pinned(host)], [event])
    assert device.sources[0].data_ptr() == host.data_ptr()
    assert torch.equal(arrived(device, copy), values)
