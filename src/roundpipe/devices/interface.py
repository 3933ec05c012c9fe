"""The device protocol: streams, events, copies, memory, random streams and time marks.

Knows no layer and no schedule. devices.cuda and devices.virtual implement it.

[Note: stream discipline]
The device's worker thread issues compute inside `computing()`. Copies run on other streams. A copy starts after all
events its stream was told to wait for. Before code reads what a copy writes, or overwrites what a copy reads, its
stream (or the host) must wait for an event recorded after that copy. Nothing else orders them. A virtual device runs
copies as late as these rules allow, so a missing wait shows as NaN in a CPU test. On a stream of updates copies and
compute, issued inside `computing(stream)`, alternate, and the order of the stream is all that they need.

[Note: lifetime]
`copy` keeps the memory of source and destination from being reused until the copy has run. Memory from
`device_empty_strided(..., stream)` belongs to that stream. Call `lend` before another stream uses it.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch


class StreamKind(enum.Enum):
    """The streams of a device. Work on one stream runs in order; streams wait for each other only by events."""

    COMPUTE = "compute"
    WEIGHTS_UP = "weights up"
    ACTIVATIONS_UP = "activations up"
    ACTIVATIONS_DOWN = "activations down"
    GRADS_DOWN = "gradients down"
    # An optimizer's update of pieces of a layer: state up, arithmetic, state down. Two, so that both directions of the
    # link are used at once.
    UPDATES = "updates"
    MORE_UPDATES = "updates, second stream"


class Event(Protocol):
    """A point in one stream of one device."""

    def done(self) -> bool:
        """Whether the stream has passed the point. Does not block."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the stream has passed the point."""
        ...


class Mark(Protocol):
    """A point in a device's compute stream whose time can be read after the stream has passed it."""

    def seconds(self) -> float:
        """Time of the point on a clock that all devices of the process share. Blocks until the point has passed."""
        ...


class DeviceRandomStream(AbstractContextManager[None], abc.ABC):
    """While entered, kernels of a device draw from a separate sequence of random numbers."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Begin the sequence anew, with another seed. Only while entered."""


class MemoryUse(NamedTuple):
    """Bytes that tensors occupy now, and their maximum since the peak counter was last reset."""

    current: int
    peak: int


class Device(abc.ABC):
    """The device of one worker. Several devices of a pool may share one GPU."""

    name: str
    torch_device: torch.device
    draws_on_host: bool  # whether kernels of this device draw from the process-wide CPU generator

    @abc.abstractmethod
    def computing(self, stream: StreamKind = StreamKind.COMPUTE) -> AbstractContextManager[None]:
        """Make this device and its compute stream, or another one, current on the calling thread inside the block."""

    @abc.abstractmethod
    def random_stream(self, seed: int) -> DeviceRandomStream:
        """Seed the device's random generator with `seed` inside the block and restore its state afterwards.

        Does nothing if the device draws on the host.
        """

    @abc.abstractmethod
    def host_empty_strided(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for asynchronous copies of this device (pinned for CUDA)."""

    @abc.abstractmethod
    def device_empty_strided(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: StreamKind
    ) -> torch.Tensor:
        """Uninitialised device memory that belongs to `stream`; see [Note: lifetime]."""

    @abc.abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: StreamKind) -> None:
        """Queue a copy on `stream` and return at once."""

    @abc.abstractmethod
    def record(self, stream: StreamKind) -> Event:
        """An event that passes when `stream` has run everything queued so far."""

    @abc.abstractmethod
    def stream_wait(self, stream: StreamKind, event: Event) -> None:
        """Make later work on `stream` start after `event`, which may belong to another device."""

    @abc.abstractmethod
    def lend(self, tensor: torch.Tensor, stream: StreamKind) -> None:
        """Let `stream` use memory of another stream: the memory is not reused before `stream` is done with it."""

    @abc.abstractmethod
    def poison(self, buffer: torch.Tensor, stream: StreamKind) -> None:
        """Fill `buffer` with NaN on `stream`, before `stream` rewrites it. On CUDA only if ROUNDPIPE_STRESS is set."""

    def multiply_add(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """a * b + c of float32 tensors, rounded once, on the current stream. For any tensors of the device."""
        # The product is exact in float64. The sum is rounded to odd, so that rounding it again to float32 is right.
        product, addend = a.double() * b.double(), c.double()
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(torch.int64)
        is_odd, is_inexact = (bits & 1).bool(), (error > 0) | (error < 0)  # an error of NaN: the sum is not finite
        outwards = torch.where((error > 0) == (total > 0), 1, -1)
        return (bits + torch.where(is_inexact & ~is_odd, outwards, 0)).view(torch.float64).float()

    @abc.abstractmethod
    def mark(self) -> Mark:
        """A time mark at the present end of the compute stream."""

    @abc.abstractmethod
    def memory_limit_bytes(self) -> int | None:
        """Device memory that a plan may use; None if there is no limit."""

    @abc.abstractmethod
    def memory_use(self) -> MemoryUse | None:
        """Device memory in use; None if the device does not count it."""

    @abc.abstractmethod
    def release_unused(self) -> None:
        """Return cached, unused device memory to the driver."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the streams for reuse. Called once, after the device's worker has ended."""


class HostPinner(abc.ABC):
    """Page-locks host memory, which makes copies to and from a GPU asynchronous and faster."""

    @abc.abstractmethod
    def pin(self, address: int, num_bytes: int) -> bool:
        """Pin the range; returns whether it is pinned now."""

    @abc.abstractmethod
    def unpin(self, address: int) -> None:
        """Unpin a range that `pin` has pinned, given by its first address."""
