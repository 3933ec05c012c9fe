"""What this machine is and does: versions, GPUs and links, memory, cores, optimizer, half-precision products, disk.

Queries and measures; judges nothing. Uses torch and the standard library alone: versions of other packages come from
their metadata. Knows no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from roundpipe import host_facts
from roundpipe.cli import instruction_sets
from roundpipe.cli.disk_rates import DiskRates, measured_rates
from roundpipe.devices import (
    Device,
    DeviceSpec,
    GpuFacts,
    StreamKind,
    cuda_release,
    default_specs,
    device_count,
    driver_release,
    gpu_facts,
    host_pinner,
    open_devices,
    why_cuda_fails,
)
from roundpipe.errors import ConfigError, DeviceError
from roundpipe.optim.native import library
from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel, one_pass_kernel
from roundpipe.optim.rules import ADAMW
from roundpipe.store import HalvedMaster
from roundpipe.store.host_memory import HostBuffer, host_zeros_like
from roundpipe.version import __version__

_PACKAGES = ("transformers", "accelerate", "peft", "trl", "datasets", "safetensors", "liger-kernel")
_LINK_BYTES = 256 << 20  # of one copy; a large layer has about this size
_LINK_COPIES = 4  # queued together, so that waiting for the last one is a small part of the time
_RATE_PARAMETERS = 16 << 20  # 14 bytes each: more than most caches hold
_PROBE_S = 15.0  # limit of one trial of half-precision products; most of it is the import of torch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. `facts` is None if it cannot be queried; `error` says why it does not work."""

    device: str
    facts: GpuFacts | None = None
    can_pin: bool | None = None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Host memory. `available_bytes` also respects the limit of the control group."""

    total_bytes: int | None
    available_bytes: int | None
    lock_limit_bytes: int | None  # RLIMIT_MEMLOCK; None: unlimited
    huge_pages: str | None  # the setting in use: always, madvise or never; None if the system has none


@dataclasses.dataclass(frozen=True)
class Cores:
    """Cores of the machine, those this process may run on, and how many it may fill (None: all of them)."""

    present: int
    usable: tuple[int, ...]
    quota: float | None
    numa_nodes: dict[int, tuple[int, ...]]  # the cores of each node


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The one-pass kernel. `origin` and what follows are None if there is no kernel; `error` says why.

    `setting_error`: a setting in the environment makes every optimizer raise this error.
    """

    compiler: str | None
    origin: str | None = None
    instruction_set: str | None = None
    threads: int | None = None
    parameters_per_s: float | None = None
    error: str | None = None
    setting_error: str | None = None


@dataclasses.dataclass(frozen=True)
class Products:
    """Whether half-precision products on the CPU work as the environment is set (None: unknown).

    `level_needed`: the value of ONEDNN_MAX_CPU_ISA with which they work, if they need one.
    """

    level_set: str | None
    work: bool | None
    level_needed: str | None = None
    always_crash: bool = False


@dataclasses.dataclass(frozen=True)
class Machine:
    """Everything that `roundpipe doctor` reports, except its findings. Sizes are in bytes, rates per second.

    folder: whose disk was looked at. is_for_training: whether the user has named it as a place for state or weights.
    """

    versions: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    cuda_error: str | None  # why torch sees no GPU although there is a driver
    default_devices: tuple[str, ...]
    default_devices_error: str | None
    memory: Memory
    cores: Cores
    optimizer: Optimizer
    products: Products
    folder: str
    disk_free_bytes: int
    disk: DiskRates
    is_for_training: bool = False


def examine(disk: str | None = None) -> Machine:
    """Query and measure this machine. Takes seconds. `disk`: a folder that the user has named; default the current one.

    Raises ConfigError if there is no such folder.
    """
    folder = Path.cwd() if disk is None else Path(disk)
    if not folder.is_dir():
        raise ConfigError(f"--disk: there is no folder {folder}; make it, or give one that exists.")
    driver, num_gpus = driver_release(), device_count()
    devices, error = _default_devices()
    return Machine(
        versions=_versions(driver),
        gpus=tuple(_examined_gpu(index) for index in range(num_gpus)),
        cuda_error=why_cuda_fails() if driver is not None and not num_gpus else None,
        default_devices=devices,
        default_devices_error=error,
        memory=Memory(
            host_facts.total_host_bytes(),
            host_facts.available_host_bytes(),
            host_facts.lock_limit_bytes(),
            host_facts.huge_pages(),
        ),
        cores=Cores(
            host_facts.present_cores(), host_facts.core_numbers(), host_facts.core_quota(), host_facts.numa_nodes()
        ),
        optimizer=_examined_optimizer(),
        products=_examined_products(instruction_sets.in_a_child(timeout_s=_PROBE_S)),
        folder=str(folder),
        disk_free_bytes=shutil.disk_usage(folder).free,
        disk=measured_rates(folder),
        is_for_training=disk is not None,
    )


def _versions(driver: str | None) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "roundpipe": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": str(torch.__version__),
        "cuda": cuda_release(),
        "driver": driver,
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _default_devices() -> tuple[tuple[str, ...], str | None]:
    """The devices that a model uses by default, and the error if there is one."""
    try:
        return tuple(f"{spec.kind}:{spec.index}" if spec.kind == "cuda" else "cpu" for spec in default_specs()), None
    except DeviceError as error:
        return (), str(error)


def _examined_gpu(index: int) -> Gpu:
    name = f"cuda:{index}"
    facts = None
    spec = DeviceSpec("cuda", index)
    try:
        facts = gpu_facts(index)
        (device,) = open_devices([spec])
        with contextlib.closing(device):
            check_products(device)
            pinner = host_pinner([spec])
            host = HostBuffer(_LINK_BYTES, None).tensor.fill_(1)  # written, so that it has pages also if not pinned
            with _logged():  # the finding says the same
                can_pin = pinner.pin(host.data_ptr(), host.nbytes)
            try:
                up, down = link_rates(device, host)
            finally:
                if can_pin:
                    pinner.unpin(host.data_ptr())
        return Gpu(name, facts, can_pin, up, down)
    except RuntimeError as error:  # out of memory, a GPU that torch has no code for, a GPU that does not work
        return Gpu(name, facts, error=str(error).strip().partition("\n")[0])


def check_products(device: Device) -> None:
    """Raise RuntimeError unless the device multiplies matrices: torch may have no code for this kind of GPU."""
    with device.computing():
        ones = torch.ones(128, 128, dtype=torch.bfloat16, device=device.torch_device)
        found = float((ones @ ones).max())
    if found != 128:
        raise RuntimeError(f"a product of matrices is {found} instead of 128")


def link_rates(device: Device, host: torch.Tensor) -> tuple[float, float]:
    """Bytes per second that copies of `host` make to the device and from it."""
    there = device.device_empty_strided(host.shape, host.stride(), host.dtype, StreamKind.WEIGHTS_UP)
    up = _copy_rate(device, there, host, StreamKind.WEIGHTS_UP)
    down = _copy_rate(device, host, there, StreamKind.GRADS_DOWN)  # the last upload is done: the rate waits for it
    return up, down


def _copy_rate(device: Device, destination: torch.Tensor, source: torch.Tensor, stream: StreamKind) -> float:
    for num_copies in (1, _LINK_COPIES):  # the first copy warms up
        start_s = time.perf_counter()
        for _ in range(num_copies):
            device.copy(destination, source, stream)
        device.record(stream).wait()
        seconds = time.perf_counter() - start_s
    return _LINK_COPIES * source.nbytes / seconds


def _examined_optimizer() -> Optimizer:
    compiler = library.compiler()
    with _logged() as lines:
        try:
            kernel = one_pass_kernel()
        except ValueError as error:  # a wrong number of threads in the environment
            return Optimizer(compiler, setting_error=str(error))
    if kernel is None:
        return Optimizer(compiler, error=lines[-1] if lines else "the kernel cannot be loaded")
    origin = "built with the package" if kernel.is_built_with_the_package else "compiled at first use"
    return Optimizer(compiler, origin, kernel.instruction_set(), kernel.num_threads, optimizer_rate(kernel))


def optimizer_rate(kernel: OnePassKernel, count: int = _RATE_PARAMETERS) -> float:
    """Parameters per second that the kernel updates, with bfloat16 weights and float32 masters; the best of four."""
    weight = host_zeros_like(torch.empty(count, dtype=torch.bfloat16))
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
    moments = [host_zeros_like(torch.empty(count)) for _ in ADAMW.state_names(options)]
    numbers = ADAMW.step_numbers(options, 1, ())
    parameter = KernelParameter(HalvedMaster(weight), torch.ones_like(weight), moments, weight, numbers)
    seconds = []
    for _ in range(5):  # the first update makes the memory's pages
        start_s = time.perf_counter()
        kernel.update([parameter])
        seconds.append(time.perf_counter() - start_s)
    return count / min(seconds[1:])


def _examined_products(probe: instruction_sets.Probe) -> Products:
    level_set = instruction_sets.level_in_the_environment()
    if level_set is not None:
        status = probe(level_set)
        if status is None or status >= 0:
            return Products(level_set, None if status is None else True)
    survival = instruction_sets.survived(probe)
    if survival.always_crashes:
        return Products(level_set, False, always_crash=True)
    if not survival.is_certain:
        return Products(level_set, None)
    return Products(level_set, level_set is None and survival.level is None, survival.level)


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the library's log inside the block, instead of writing it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("roundpipe")
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)
