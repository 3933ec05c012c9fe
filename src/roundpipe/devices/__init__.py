"""The only home of device APIs: a small protocol, CUDA and virtual CPU devices behind it."""

from roundpipe.devices.discover import (
    DeviceSpec,
    default_specs,
    host_pinner,
    open_devices,
    parse_devices,
    require_device,
    wait_for_producers,
)
from roundpipe.devices.interface import Device, Event, HostPinner, Mark, MemoryUse, StreamKind

__all__ = [
    "Device",
    "DeviceSpec",
    "Event",
    "HostPinner",
    "Mark",
    "MemoryUse",
    "StreamKind",
    "default_specs",
    "host_pinner",
    "open_devices",
    "parse_devices",
    "require_device",
    "wait_for_producers",
]
