"""Devices: a small protocol, implemented by CUDA devices and by virtual CPU devices.

All calls of device APIs such as torch.cuda are in this package.
"""

from roundpipe.devices.cuda import generator_states, set_generator_states
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
    "generator_states",
    "host_pinner",
    "open_devices",
    "parse_devices",
    "require_device",
    "set_generator_states",
    "wait_for_producers",
]
