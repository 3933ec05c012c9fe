"""Virtual devices: copies run as late as possible, in stream order; unwritten memory is NaN."""

from __future__ import annotations

import pytest
import torch

from roundpipe.devices import StreamKind
from roundpipe.devices import virtual as virtual_module
from roundpipe.devices.virtual import VirtualDevice

UP, DOWN, WEIGHTS = StreamKind.ACTIVATIONS_UP, StreamKind.ACTIVATIONS_DOWN, StreamKind.WEIGHTS_UP


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    monkeypatch.setattr(virtual_module, "_EARLY_SHARE", 0.0)
    return VirtualDevice(0)


def empty(device: VirtualDevice) -> torch.Tensor:
    return device.device_empty_strided((3,), (1,), torch.float32, UP)


def test_a_copy_does_not_run_before_a_wait(device: VirtualDevice) -> None:
    target = empty(device)
    device.copy(target, torch.ones(3), UP)
    assert target.isnan().all()
    device.record(UP).wait()
    assert torch.equal(target, torch.ones(3))


def test_a_stream_runs_in_order_and_only_as_far_as_needed(device: VirtualDevice) -> None:
    first, second = empty(device), empty(device)
    device.copy(first, torch.ones(3), UP)
    event = device.record(UP)
    device.copy(second, torch.ones(3), UP)
    event.wait()
    assert torch.equal(first, torch.ones(3))
    assert second.isnan().all()


def test_a_copy_reads_its_source_when_it_runs(device: VirtualDevice) -> None:
    source, target = torch.ones(3), empty(device)
    device.copy(target, source, UP)
    source.fill_(5.0)
    device.record(UP).wait()
    assert torch.equal(target, torch.full((3,), 5.0))


def test_a_stream_can_wait_for_a_stream_of_a_different_device(device: VirtualDevice) -> None:
    other = VirtualDevice(1)
    middle, target = empty(device), empty(other)
    device.copy(middle, torch.ones(3), DOWN)
    other.stream_wait(UP, device.record(DOWN))
    other.copy(target, middle, UP)
    assert target.isnan().all()
    other.record(UP).wait()
    assert torch.equal(target, torch.ones(3))


def test_without_that_wait_the_other_device_reads_nan(device: VirtualDevice) -> None:
    middle, target = empty(device), empty(device)
    device.copy(middle, torch.ones(3), DOWN)
    device.copy(target, middle, UP)
    device.record(UP).wait()
    assert target.isnan().all()


def test_compute_runs_at_once_and_its_waits_force_the_copy(device: VirtualDevice) -> None:
    target = empty(device)
    device.copy(target, torch.ones(3), WEIGHTS)
    assert device.record(StreamKind.COMPUTE).done()
    device.stream_wait(StreamKind.COMPUTE, device.record(WEIGHTS))
    assert torch.equal(target, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poisoned_bytes_are_nan_in_every_float(device: VirtualDevice, dtype: torch.dtype) -> None:
    buffer = torch.zeros(64, dtype=torch.uint8)
    device.poison(buffer, StreamKind.COMPUTE)
    assert buffer.view(dtype).isnan().all()


def test_poisoning_runs_after_the_waits_of_its_stream(device: VirtualDevice) -> None:
    buffer, target = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    device.copy(target, buffer, DOWN)
    device.stream_wait(WEIGHTS, device.record(DOWN))
    device.poison(buffer, WEIGHTS)
    device.record(WEIGHTS).wait()
    assert torch.equal(target, torch.ones(4, dtype=torch.uint8))
    assert (buffer == 0xFF).all()


def test_uninitialised_integers_are_no_valid_index(device: VirtualDevice) -> None:
    fresh = device.device_empty_strided((2,), (1,), torch.int64, UP)
    assert (fresh < 0).all()


def test_some_copies_run_early_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def early_copies(seed: int) -> list[int]:
        monkeypatch.setenv("ROUNDPIPE_VIRTUAL_SEED", str(seed))
        device = VirtualDevice(0)
        targets = [empty(device) for _ in range(40)]
        ran = []
        for target in targets:
            device.copy(target, torch.ones(3), UP)
            ran.append(sum(not bool(t.isnan().any()) for t in targets))
        return ran

    assert early_copies(1) == early_copies(1)
    assert early_copies(1) != early_copies(2)
    assert early_copies(1)[-1] > 0
    assert early_copies(1)[0] < 40
