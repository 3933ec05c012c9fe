"""Devices: a small protocol, implemented by CUDA devices and by virtual CPU devices, and the user's choice of them.

All calls of device APIs such as torch.cuda are in this package. The machine is queried only inside of functions, never
at import.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Sequence

import torch

from roundpipe.devices import cuda
from roundpipe.devices.cuda import (
    MEMORY_SHARE,
    GpuFacts,
    cuda_release,
    device_count,
    driver_release,
    generator_states,
    gpu_facts,
    set_generator_states,
    why_cuda_fails,
)
from roundpipe.devices.interface import Device, DeviceRandomStream, Event, HostPinner, Mark, MemoryUse, StreamKind
from roundpipe.devices.virtual import NoPinner, VirtualDevice
from roundpipe.errors import ArgumentTypeError, DeviceError

__all__ = [
    "MEMORY_SHARE",
    "Device",
    "DeviceRandomStream",
    "DeviceSpec",
    "Event",
    "GpuFacts",
    "HostPinner",
    "Mark",
    "MemoryUse",
    "StreamKind",
    "cuda_release",
    "default_specs",
    "device_count",
    "driver_release",
    "generator_states",
    "gpu_facts",
    "host_pinner",
    "open_devices",
    "parse_devices",
    "require_device",
    "set_generator_states",
    "wait_for_producers",
    "why_cuda_fails",
]

ENVIRONMENT_VARIABLE = "ROUNDPIPE_DEVICES"
# Matches one entry of a device list: "cpu", "cpu*4", "cuda:0" or "cuda:0*2".
_ENTRY = re.compile(r"^\s*(?P<kind>cpu|cuda)(?::(?P<index>\d+))?\s*(?:\*\s*(?P<count>\d+))?\s*$")


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """The device of one worker: its kind ("cpu" or "cuda") and, for CUDA, the index of the GPU."""

    kind: str
    index: int


def parse_devices(devices: object) -> tuple[DeviceSpec, ...]:
    """Return the devices that a `devices=` argument names; for None, those of `default_specs`."""
    if devices is None:
        return default_specs()
    entries = devices.split(",") if isinstance(devices, str) else devices
    # A single torch.device is a likely mistake: the argument is a list.
    if isinstance(entries, torch.device) or not isinstance(entries, Sequence):
        raise ArgumentTypeError(f'devices must be a list such as ["cuda:0", "cuda:1"] or ["cpu"] * 4, got {devices!r}.')
    asked = f"devices={devices!r}"
    return _checked(tuple(spec for entry in entries for spec in _parse_entry(entry, asked)), asked)


def default_specs() -> tuple[DeviceSpec, ...]:
    """Return the devices in `ROUNDPIPE_DEVICES`, else every visible GPU, else one virtual device."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text:
        asked = f"{ENVIRONMENT_VARIABLE}={text!r}"
        return _checked(tuple(spec for entry in text.split(",") for spec in _parse_entry(entry, asked)), asked)
    visible = cuda.device_count()
    return tuple(DeviceSpec("cuda", index) for index in range(visible)) or (DeviceSpec("cpu", 0),)


def open_devices(specs: Sequence[DeviceSpec]) -> list[Device]:
    """Open the devices in the given order. A GPU that is named k times becomes k devices that share its memory."""
    shares = Counter(specs)  # how many workers share each GPU
    opened: Counter[DeviceSpec] = Counter()
    devices: list[Device] = []
    for position, spec in enumerate(specs):
        if spec.kind == "cpu":
            devices.append(VirtualDevice(position))
            continue
        suffix = f"/{opened[spec]}" if shares[spec] > 1 else ""
        devices.append(cuda.CudaDevice(spec.index, f"cuda:{spec.index}{suffix}", shares[spec]))
        opened[spec] += 1
    return devices


def host_pinner(specs: Sequence[DeviceSpec]) -> HostPinner:
    """Return an object that pins host memory if a device is a GPU, else one that does nothing."""
    return cuda.CudaPinner() if any(spec.kind == "cuda" for spec in specs) else NoPinner()


def require_device(device: torch.device, what: str) -> None:
    """Raise a DeviceError unless the device exists and can hold outputs. `what` names the option in the message."""
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f'{what}={str(device)!r} cannot hold outputs; give "cpu" or a CUDA device such as "cuda:0".')
    present = cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= present:
        raise DeviceError(f"{what}={str(device)!r}: there is no such device; {present} CUDA device(s) are visible.")


def wait_for_producers(tensors: Sequence[torch.Tensor]) -> None:
    """Block until the GPU work that the calling thread has queued to compute these tensors is done."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        cuda.synchronize_current_stream(device)


def _parse_entry(entry: object, asked: str) -> list[DeviceSpec]:
    """Return the devices of one entry such as "cuda:0" or "cpu*4". `asked` names the option in messages."""
    if isinstance(entry, torch.device):
        entry = str(entry)
    if not isinstance(entry, str):
        raise ArgumentTypeError(f'{asked}: {entry!r} is neither a string such as "cuda:0" nor a torch.device.')
    match = _ENTRY.match(entry)
    if match is None:
        raise DeviceError(f'{asked}: cannot read {entry!r}; write "cpu", "cpu*4", "cuda:0" or "cuda:0*2".')
    count = int(match["count"] or 1)
    index = int(match["index"] or 0) if match["kind"] == "cuda" else 0  # torch accepts "cpu:1", which is the same CPU
    return [DeviceSpec(match["kind"], index)] * count


def _checked(specs: tuple[DeviceSpec, ...], asked: str) -> tuple[DeviceSpec, ...]:
    """Return `specs`, or raise a DeviceError if they are empty, mixed or not on this machine."""
    if not specs:
        raise DeviceError(f"{asked} names no device; leave it out to use every GPU, or name at least one.")
    kinds = {spec.kind for spec in specs}
    if len(kinds) > 1:
        raise DeviceError(
            f"{asked} mixes CPU and CUDA devices; a pool has one kind of device: name only GPUs or only CPUs."
        )
    if kinds == {"cuda"}:  # CPU devices always exist
        present = cuda.device_count()
        missing = sorted({spec.index for spec in specs if spec.index >= present})
        if missing:
            names = ", ".join(f"cuda:{index}" for index in missing)
            raise DeviceError(f"{asked}: there is no {names} here; {present} CUDA device(s) are visible.")
    return specs
