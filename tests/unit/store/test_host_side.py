"""Flat layouts, exact host buffers, and the check of host memory."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from torch import nn

from roundpipe import HostMemoryError, RoundPipe
from roundpipe.devices import HostPinner
from roundpipe.monitor import Monitor
from roundpipe.runtime.transfer import span_elements
from roundpipe.store import host_memory
from roundpipe.store.host_memory import (
    ALIGNMENT_BYTES,
    HostBuffer,
    RegisteredPages,
    contiguous_stride,
    dense_stride,
    lay_out,
)
from roundpipe.store.store import LayerStore
from roundpipe.store.training_memory import PinMode


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
    assert int(buffer.tensor.min()) == 7  # closing unpins the memory but does not free it
    buffer.close()


def test_an_empty_host_buffer_pins_nothing() -> None:
    pinner = RecordingPinner()
    HostBuffer(0, pinner).close()
    assert not pinner.pinned


def test_host_memory_of_a_buffer_is_what_was_asked_for() -> None:
    """Not rounded up to a power of two, which would be 128 MiB for these 65."""

    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    buffer = HostBuffer(65 << 20, None)
    buffer.tensor.fill_(1)
    assert resident_bytes() - before < 70 << 20


PAGE = mmap.PAGESIZE


def aligned_bytes(num_pages: int) -> torch.Tensor:
    memory = torch.zeros((num_pages + 1) * PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + num_pages * PAGE]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((0, 4 * PAGE), [(0, 4 * PAGE)]),  # whole pages
        (
            (0, 3 * PAGE + 8),
            [(PAGE, 3 * PAGE)],
        ),  # not from its first byte, or a copy of the whole would begin in registered memory
        ((8, 4 * PAGE), [(PAGE, 4 * PAGE)]),
        ((8, 3 * PAGE + 8), [(PAGE, 3 * PAGE)]),
        ((8, PAGE + 8), []),
        ((0, 0), []),
    ],
)
def test_only_pages_that_one_tensor_fills_are_registered(
    bounds: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    pinner, base = RecordingPinner(), aligned_bytes(5)
    tensor = base[bounds[0] : bounds[1]]
    pages = RegisteredPages([tensor], pinner)
    assert [
        (start - base.data_ptr(), start + size - base.data_ptr()) for start, size in pinner.pinned.items()
    ] == expected
    edges = {edge - bounds[0] for run in expected for edge in run}
    assert pages.cuts(tensor) == tuple(sorted(edges - {0, tensor.nbytes}))
    pages.close()
    assert not pinner.pinned


def test_tensors_that_overlap_are_registered_once_and_cut_alike() -> None:
    pinner, base = RecordingPinner(), aligned_bytes(8)
    first, second = base[: 4 * PAGE], base[2 * PAGE : 8 * PAGE]
    pages = RegisteredPages([first, second], pinner)
    assert list(pinner.pinned.values()) == [4 * PAGE]
    assert pages.cuts(second) == (2 * PAGE,)


def test_tensors_with_gaps_are_left_alone() -> None:
    pinner = RecordingPinner()
    gappy = torch.zeros(64, PAGE)
    pages = RegisteredPages([gappy[:, ::2]], pinner)
    assert not pinner.pinned
    assert pages.cuts(gappy[:, ::2]) == ()


def test_a_tensor_with_gaps_in_registered_memory_is_not_cut() -> None:
    base = aligned_bytes(8)[8:]
    pages = RegisteredPages([base], RecordingPinner())
    assert pages.cuts(base) != ()
    assert pages.cuts(base[::2]) == ()


def test_copies_in_pieces_are_complete() -> None:
    """Transposed, channels-last and offset weights, copied in pieces, are the weights."""
    model = nn.Sequential(nn.Linear(300, 70), nn.Conv2d(40, 40, 3).to(memory_format=torch.channels_last))
    model[0].weight.data = torch.randn(300, 70).t()
    base = torch.randn(3 + 70 * 300)
    model.append(nn.Linear(300, 70, bias=False))
    model[2].weight.data = base[3:].view(70, 300)
    names = {id(p): name for name, p in model.named_parameters()}
    store = LayerStore(
        list(model), names, optim_dtype=None, pin_mode=PinMode.REGISTER, pinner=RecordingPinner(), monitor=Monitor()
    )
    assert sum(bool(record.cuts) for record in store.parameters) == 3
    for layer in store.layers:
        image = torch.zeros(layer.image.total_bytes, dtype=torch.uint8)
        for there, host in store.weights.upload_pieces(layer.layer_id, 0, image):
            there.copy_(host)
        for record, view in zip(layer.parameters, layer.image.views(image), strict=True):
            assert torch.equal(view, record.param)
    store.close()


def test_a_model_that_cannot_fit_is_refused_with_a_table_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 1000)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(HostMemoryError) as caught:
        RoundPipe(model, optim_dtype=torch.float32, devices=["cpu"])
    for row in ("gradients", "master weights", "needed in all", "available", "missing", "requires_grad_(False)"):
        assert row in str(caught.value)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    monkeypatch.undo()
    RoundPipe(model, devices=["cpu"]).close()


def test_frozen_parameters_need_neither_gradient_nor_optimizer_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).requires_grad_(False)
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 45_000)  # enough for one layer while it is moved
    RoundPipe(model, devices=["cpu"]).close()


def test_available_memory_is_known_here() -> None:
    available = host_memory.available_host_bytes()
    assert available is not None
    assert available > 0
