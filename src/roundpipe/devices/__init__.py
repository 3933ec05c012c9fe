"""Devices: a small protocol, implemented by CUDA devices and by virtual CPU devices.

All calls of device APIs such as torch.cuda are in this package.
"""

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
from roundpipe.devices.discover import (
    DeviceSpec,
    default_specs,
    host_pinner,
    open_devices,
    parse_devices,
    require_device,
    wait_for_producers,
)
from roundpipe.devices.interface import Device, DeviceRandomStream, Event, HostPinner, Mark, MemoryUse, StreamKind

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
