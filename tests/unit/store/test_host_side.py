"""Flat layouts, exact host buffers, and the check of host memory."""

from __future__ import annotations

import itertools
import mmap
import os

import pytest
import torch
from torch import nn

from roundpipe import HostMemoryError, RoundPipe
from roundpipe.devices import HostPinner
from roundpipe.store import host_memory
from roundpipe.store.adoption import RegisteredPages
from roundpipe.store.host_buffer import HostBuffer
from roundpipe.store.layout import ALIGNMENT_BYTES, contiguous_stride, dense_stride, lay_out, span_elements


class RecordingPinner(HostPinner):
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, num_bytes: int) -> bool:
        self.pinned[address] = num_bytes
        return True

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_a_layout_gives_back_every_tensor_with_its_strides() -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(4, 6, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(7),
        torch.randn(0, 3),
        torch.randn(6, 4, dtype=torch.bfloat16).t(),
        torch.tensor(1.5),
    ]
    layout = lay_out(tensors)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    for view, tensor in zip(layout.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(layout.views(buffer), tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.stride() == tensor.stride()
        assert view.numel() == 0 or (view.data_ptr() - buffer.data_ptr()) % ALIGNMENT_BYTES == 0


def test_a_view_with_gaps_or_repeats_gets_contiguous_strides() -> None:
    assert dense_stride(torch.randn(4, 6)[:, ::2]) == contiguous_stride((4, 3))
    assert dense_stride(torch.randn(1, 6).expand(4, 6)) == contiguous_stride((4, 6))
    assert span_elements((4, 3), (6, 2)) == 23
    assert span_elements((4, 0), (6, 2)) == 0


@pytest.mark.parametrize("num_bytes", [1, 4095, 4097, 5_000_000])
def test_a_host_buffer_is_exactly_as_large_as_asked(num_bytes: int) -> None:
    pinner = RecordingPinner()
    buffer = HostBuffer(num_bytes, pinner)
    assert buffer.tensor.numel() == num_bytes
    assert buffer.tensor.untyped_storage().nbytes() == num_bytes
    assert list(pinner.pinned.values()) == [num_bytes]
    buffer.tensor.fill_(7)
    buffer.close()
    assert not pinner.pinned
    assert int(buffer.tensor.min()) == 7  # closing unpins, it does not take the memory away
    buffer.close()


def test_an_empty_host_buffer_pins_nothing() -> None:
    pinner = RecordingPinner()
    HostBuffer(0, pinner).close()
    assert not pinner.pinned


def test_host_memory_of_a_buffer_is_what_was_asked_for() -> None:
    """A power of two would be 128 MiB for these 65."""

    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    buffer = HostBuffer(65 << 20, None)
    buffer.tensor.fill_(1)
    assert resident_bytes() - before < 70 << 20


def test_tensors_that_share_pages_are_registered_once() -> None:
    pinner = RecordingPinner()
    base = torch.zeros(3 * mmap.PAGESIZE, dtype=torch.uint8)
    pages = RegisteredPages([base[:100], base[50:200], base[2 * mmap.PAGESIZE :]], pinner)
    runs = sorted((start, start + size) for start, size in pinner.pinned.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(runs))
    for tensor in (base[:100], base[50:200], base[2 * mmap.PAGESIZE :]):
        assert any(start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for start, end in runs)
    assert all(start % mmap.PAGESIZE == 0 for start, _ in runs)
    pages.close()
    assert not pinner.pinned


def test_a_model_that_cannot_fit_is_refused_with_a_table_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 1000)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(HostMemoryError) as caught:
        RoundPipe(model, optim_dtype=torch.float32, devices=["cpu"])
    for row in ("gradients", "optimizer copies", "needed in all", "available", "missing", "requires_grad_(False)"):
        assert row in str(caught.value)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    monkeypatch.undo()
    RoundPipe(model, devices=["cpu"]).close()


def test_frozen_parameters_need_neither_gradient_nor_optimizer_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).requires_grad_(False)
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 45_000)  # one layer while it moves
    RoundPipe(model, devices=["cpu"]).close()


def test_available_memory_is_known_here() -> None:
    available = host_memory.available_host_bytes()
    assert available is not None
    assert available > 0
