"""What the runtime asks of a device: streams, events, copies, memory, random streams, time marks.

Implemented by devices.cuda and devices.virtual, spoken by the runtime and the store. Knows no layer and no schedule.

[Note: stream discipline]
Compute is issued by the device's worker thread inside `computing()`. Copies run on their own streams, and a copy does
not start before the events its stream was told to wait for. Whoever reads what a copy writes, or writes what a copy
reads, first makes its own stream, or the host, wait for the event recorded after that copy. Nothing else orders them:
a virtual device runs copies as late as these rules allow, so a forgotten wait shows as NaN in a CPU test.

[Note: lifetime]
`copy` itself keeps source and destination memory from being reused before the copy has run. Memory from
`device_empty(..., stream)` belongs to that stream; before another stream uses it, `lend` it to that one.

Makes memory show that it was read before its time.

Used by virtual devices always, and by CUDA devices under stress.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch


class StreamKind(enum.Enum):
    COMPUTE = "compute"
    WEIGHTS_UP = "weights up"
    ACTIVATIONS_UP = "activations up"
    ACTIVATIONS_DOWN = "activations down"
    GRADS_DOWN = "gradients down"


class Event(Protocol):
    """A point in one stream of one device."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block the calling thread until the point is reached."""
        ...


class Mark(Protocol):
    """A moment in a device's compute stream, to be read once it has passed."""

    def seconds(self) -> float:
        """On a clock shared by all devices of the process; blocks until the moment has passed."""
        ...


class MemoryUse(NamedTuple):
    """Bytes that tensors take now, and the most they have ever taken since somebody began to count."""

    current: int
    peak: int


class Device(abc.ABC):
    """One worker's device. Two devices of a pool may be one and the same GPU."""

    name: str
    torch_device: torch.device

    @property
    @abc.abstractmethod
    def draws_on_host(self) -> bool:
        """Whether random numbers of layers come from the process-wide CPU generator."""

    @abc.abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """Make this device and its compute stream current on this thread."""

    @abc.abstractmethod
    def random_stream(self, seed: int) -> AbstractContextManager[None]:
        """Random numbers drawn on the device inside come from a stream of their own, begun by `seed`."""

    @abc.abstractmethod
    def host_empty_strided(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies of this device can use asynchronously."""

    @abc.abstractmethod
    def device_empty_strided(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: StreamKind
    ) -> torch.Tensor:
        """Uninitialised device memory that `stream` may write at once."""

    @abc.abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: StreamKind) -> None:
        """Queue a copy on `stream`."""

    @abc.abstractmethod
    def record(self, stream: StreamKind) -> Event: ...

    @abc.abstractmethod
    def stream_wait(self, stream: StreamKind, event: Event) -> None:
        """What is queued on `stream` from now on starts after `event`, which may be another device's."""

    @abc.abstractmethod
    def lend(self, tensor: torch.Tensor, stream: StreamKind) -> None:
        """`stream` uses memory that belongs to another stream; it is not reused before `stream` has passed."""

    @abc.abstractmethod
    def poison(self, buffer: torch.Tensor, stream: StreamKind) -> None:
        """`stream` has come to where the buffer's content is dead, and writes it next. Virtual devices make it NaN."""

    @abc.abstractmethod
    def mark(self) -> Mark:
        """Note this moment of the compute stream."""

    @abc.abstractmethod
    def memory_limit_bytes(self) -> int | None:
        """Device memory the plan may count on; None where there is no limit."""

    @abc.abstractmethod
    def memory_use(self) -> MemoryUse | None:
        """Device memory in use; None where it is not known."""

    @abc.abstractmethod
    def release_unused(self) -> None:
        """Give memory back that is kept for later use."""

    @abc.abstractmethod
    def close(self) -> None:
        """The device's worker has ended; its streams may serve another."""


class HostPinner(abc.ABC):
    """Page-locks host memory for fast copies, where there is a device that profits."""

    @abc.abstractmethod
    def pin(self, address: int, num_bytes: int) -> bool:
        """Returns whether the range is pinned now."""

    @abc.abstractmethod
    def unpin(self, address: int) -> None: ...


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in every float, and in integers a value no index or length has."""
    with torch.no_grad():
        if tensor.dtype is torch.uint8:
            tensor.fill_(0xFF)  # as bytes of float16, bfloat16, float32 and float64: NaN
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor
