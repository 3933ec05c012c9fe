"""CUDA devices: streams, events, copies and memory of one GPU. No other module names torch.cuda.

Implements the protocol of devices.interface. Knows no layer and no schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from roundpipe.devices.interface import Device, DeviceRandomStream, Event, HostPinner, Mark, MemoryUse, StreamKind
from roundpipe.devices.virtual import poisoned
from roundpipe.monitor import wait_for_event

logger = logging.getLogger("roundpipe")

# One lock per GPU: workers that share a GPU share its random generator, and a layer holds the lock while it launches.
_generator_locks: dict[int, threading.Lock] = {}
# Streams of closed devices, kept for reuse: libraries (cuBLAS) keep a workspace for every stream they have seen.
_free_streams: dict[int, list[dict[StreamKind, torch.cuda.Stream]]] = {}
_shared_guard = threading.Lock()
_LONGEST_DELAY_CYCLES = 1_000_000  # about half a millisecond
MEMORY_SHARE = 0.92  # share of the usable memory for plans; the rest covers fragmentation and library workspaces


def device_count() -> int:
    return torch.cuda.device_count()


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What the driver reports about a GPU."""

    name: str
    capability: str  # such as "9.0"
    memory_bytes: int
    free_bytes: int
    numa_node: int | None  # the node whose memory is nearest; None if the system does not report it


def gpu_facts(index: int) -> GpuFacts:
    """The facts of a GPU. Uses the GPU, so it raises RuntimeError if the GPU does not work."""
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return GpuFacts(found.name, f"{found.major}.{found.minor}", total, free, _numa_node(found))


def _numa_node(found: object) -> int | None:
    try:
        place = [getattr(found, f"pci_{part}_id") for part in ("domain", "bus", "device")]
        folder = "{:04x}:{:02x}:{:02x}.0".format(*place)
        node = int((Path("/sys/bus/pci/devices") / folder / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):  # a release of torch without these fields, a system without the file
        return None
    return node if node >= 0 else None


def cuda_release() -> str | None:
    """The release of CUDA that torch was built with; None if torch was built without CUDA."""
    return torch.version.cuda


def driver_release() -> str | None:
    """The release of the NVIDIA driver of this system; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def why_cuda_fails() -> str | None:
    """The error of torch if it cannot use CUDA; None if it can."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch was built without CUDA
        return str(error).partition("\n")[0]
    return None


def generator_states() -> list[torch.Tensor]:
    """The state of each GPU's default generator; empty if this process has not used CUDA yet."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_generator_states(states: Sequence[torch.Tensor]) -> None:
    """Set the default generators of the GPUs that exist here to states of `generator_states`."""
    for index, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)


def synchronize_current_stream(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


class CudaEvent:
    """A torch.cuda.Event whose waits the watchdog observes. `where`: device and stream, for the watchdog's log."""

    def __init__(self, event: torch.cuda.Event, where: str) -> None:
        self.raw = event
        self._where = where

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        wait_for_event(self.done, f"{self._where} to reach an event")


class CudaMark:
    """A timed CUDA event, measured from the event `origin`, which passed at `origin_s` of the host's clock."""

    def __init__(self, event: torch.cuda.Event, origin: torch.cuda.Event, origin_s: float) -> None:
        self._event, self._origin, self._origin_s = event, origin, origin_s

    def seconds(self) -> float:
        wait_for_event(lambda: bool(self._event.query()), "a time mark")
        return self._origin_s + float(self._origin.elapsed_time(self._event)) / 1e3


class CudaDevice(Device):
    """One GPU as one worker uses it, with private streams. `share`: number of workers that divide its memory."""

    draws_on_host = False

    def __init__(self, index: int, name: str, share: int) -> None:
        self.name = name
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._share = share
        # For tests: delay copies at random and fill unwritten memory with NaN, as virtual devices do.
        self._under_stress = bool(os.environ.get("ROUNDPIPE_STRESS"))
        self._random = random.Random(index)
        with torch.cuda.device(index):
            self._streams = _take_streams(index)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(self._streams[StreamKind.COMPUTE])
            self._origin.synchronize()
        self._origin_s = time.perf_counter()
        with _shared_guard:
            self._generator_lock = _generator_locks.setdefault(index, threading.Lock())

    def close(self) -> None:
        with _shared_guard:
            _free_streams.setdefault(self._index, []).append(self._streams)

    @contextlib.contextmanager
    def computing(self, stream: StreamKind = StreamKind.COMPUTE) -> Iterator[None]:
        with torch.cuda.device(self._index), torch.cuda.stream(self._streams[stream]):
            yield

    def multiply_add(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        fused = _fused_multiply_add(self._index)
        return super().multiply_add(a, b, c) if fused is None else fused(a, b, c)

    def random_stream(self, seed: int) -> DeviceRandomStream:
        return _RandomStream(self._generator_lock, torch.cuda.default_generators[self._index], seed)

    def host_empty_strided(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu", pin_memory=True)
        return poisoned(memory) if self._under_stress else memory

    def device_empty_strided(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: StreamKind
    ) -> torch.Tensor:
        with torch.cuda.stream(self._streams[stream]):
            memory = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=self.torch_device)
            return poisoned(memory) if self._under_stress else memory

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: StreamKind) -> None:
        queue = self._streams[stream]
        with torch.cuda.stream(queue), torch.no_grad():
            if self._under_stress:
                torch.cuda._sleep(self._random.randrange(_LONGEST_DELAY_CYCLES))
            destination.copy_(source, non_blocking=True)
        # The caching allocator may otherwise reuse the memory before this stream has run the copy.
        for tensor in (destination, source):
            if tensor.is_cuda:
                tensor.record_stream(queue)

    def record(self, stream: StreamKind) -> Event:
        event = torch.cuda.Event()
        event.record(self._streams[stream])
        return CudaEvent(event, f"{self.name} ({stream.value})")

    def stream_wait(self, stream: StreamKind, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self._streams[stream].wait_event(event.raw)
        else:
            event.wait()  # an event of another kind of device: only the host can wait for it

    def lend(self, tensor: torch.Tensor, stream: StreamKind) -> None:
        tensor.record_stream(self._streams[stream])

    def poison(self, buffer: torch.Tensor, stream: StreamKind) -> None:
        if not self._under_stress:
            return
        with torch.cuda.stream(self._streams[stream]):
            poisoned(buffer)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[StreamKind.COMPUTE])
        return CudaMark(event, self._origin, self._origin_s)

    def memory_limit_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self._index)
        # torch's cache counts as usable: it serves our allocations before it asks the driver.
        reachable = free + torch.cuda.memory_reserved(self._index)
        fraction_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if fraction_of is not None:
            reachable = min(reachable, int(total * fraction_of(self._index)))
        return int(reachable * MEMORY_SHARE) // self._share

    def memory_use(self) -> MemoryUse | None:
        counts = torch.cuda.memory_stats_as_nested_dict(self._index).get("allocated_bytes", {}).get("all", {})
        return MemoryUse(counts.get("current", 0), counts.get("peak", 0))

    def release_unused(self) -> None:
        torch.cuda.empty_cache()


@functools.cache
def _fused_multiply_add(index: int) -> Callable[..., torch.Tensor] | None:
    """a * b + c of float32 tensors as one kernel that rounds once; None if it cannot be compiled or rounds otherwise.

    Called while the GPU is current. The kernel is checked once, with sums that a second rounding would change.
    """
    code = "template <typename T> T multiply_add(T a, T b, T c) { return __fmaf_rn(a, b, c); }"
    near_one, tiny = 1 + 2.0**-12, [2.0**-60, -(2.0**-60), 2.0**-149, -(2.0**-149), 0.0, 1.0]
    c = torch.tensor(tiny, device=torch.device("cuda", index))
    a = torch.full_like(c, near_one)
    exact = [math.nextafter(near_one**2, direction * math.inf) for direction in (1, -1, 1, -1)] + [
        near_one**2,
        near_one**2 + 1,
    ]
    try:
        made: Callable[..., torch.Tensor] = torch.cuda.jiterator._create_jit_fn(code)
        found, wanted = made(a, a[0], c), torch.tensor(exact, dtype=torch.float64).float()
        if not torch.equal(found.cpu(), wanted):
            raise ArithmeticError(f"the compiled operation gives {found.tolist()}, not {wanted.tolist()}")
    except Exception as error:  # whatever the compiler of this installation raises
        logger.info("cuda:%d multiplies and adds in float64: %r", index, error)
        return None
    return made


class _RandomStream(DeviceRandomStream):
    """While entered, holds the lock of the GPU's generator and seeds the generator; restores its state afterwards.

    A class, because it is entered for every layer and microbatch and a generator function would be slower.
    """

    def __init__(self, lock: threading.Lock, generator: torch.Generator, seed: int) -> None:
        self._lock, self._generator, self._seed = lock, generator, seed

    def __enter__(self) -> None:
        self._lock.acquire()
        generator = self._generator
        # Seed and offset are all of a CUDA generator's state, and much cheaper to keep than the state as a tensor.
        self._users_seed, self._users_offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(self._seed)

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._generator.manual_seed(self._users_seed)
            self._generator.set_offset(self._users_offset)
        finally:
            self._lock.release()


def _take_streams(index: int) -> dict[StreamKind, torch.cuda.Stream]:
    with _shared_guard:
        if _free_streams.get(index):
            return _free_streams[index].pop()
    return {kind: torch.cuda.Stream(index) for kind in StreamKind}


class CudaPinner(HostPinner):
    """Page-locks existing host memory with cudaHostRegister, exactly the given bytes."""

    def pin(self, address: int, num_bytes: int) -> bool:
        status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if int(status) != 0:
            logger.warning(
                "could not pin %d bytes of host memory (CUDA error %d); copies from this memory will be slower. "
                "Read-only mappings cannot be pinned; a low `ulimit -l` also prevents pinning.",
                num_bytes,
                int(status),
            )
            return False
        return True

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)
