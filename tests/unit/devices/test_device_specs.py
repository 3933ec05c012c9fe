"""Parsing `devices=` and ROUNDPIPE_DEVICES."""

from __future__ import annotations

import pytest
import torch

from roundpipe import DeviceError
from roundpipe.devices import DeviceSpec, cuda, default_specs, open_devices, parse_devices

CPU = DeviceSpec("cpu", 0)


def gpu(index: int) -> DeviceSpec:
    return DeviceSpec("cuda", index)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.delenv("ROUNDPIPE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("asked", "specs"),
    [
        (["cpu"] * 4, (CPU,) * 4),
        ("cpu*4", (CPU,) * 4),
        (["cuda:0", "cuda:1"], (gpu(0), gpu(1))),
        ("cuda:0*2", (gpu(0), gpu(0))),
        ("cuda:0,cuda:1", (gpu(0), gpu(1))),
        (["cuda:0", "cuda:0"], (gpu(0), gpu(0))),
        ([torch.device("cuda", 1)], (gpu(1),)),
        ([torch.device("cpu")], (CPU,)),
        (["cuda"], (gpu(0),)),
        (None, (gpu(0), gpu(1))),
    ],
)
def test_devices_are_parsed(asked: object, specs: tuple[DeviceSpec, ...]) -> None:
    assert parse_devices(asked) == specs


@pytest.mark.usefixtures("two_gpus")
def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cuda:1*3")
    assert default_specs() == (gpu(1),) * 3
    assert parse_devices(["cpu"]) == (CPU,)


def test_without_a_gpu_there_is_one_virtual_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    monkeypatch.delenv("ROUNDPIPE_DEVICES", raising=False)
    assert parse_devices(None) == (CPU,)
    with pytest.raises(DeviceError, match="there is no cuda:0"):
        parse_devices(["cuda:0"])


def test_virtual_devices_have_different_names() -> None:
    assert [device.name for device in open_devices([CPU] * 3)] == ["cpu:0", "cpu:1", "cpu:2"]
