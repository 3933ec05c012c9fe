"""Virtual CPU devices: the protocol of devices.interface with delayed copies and NaN in unwritten memory.

Compute runs at once on the worker's thread. A copy is queued and runs when a thread waits for a later event of its
stream, or earlier at random, with a generator seeded per device (`ROUNDPIPE_VIRTUAL_SEED`). Late copies expose a reader
that does not wait for the writer; early copies expose a writer that does not wait for the reader. Both fail a CPU test
that the seed repeats. Knows no layer and no schedule.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from roundpipe.devices.interface import Device, DeviceRandomStream, Event, HostPinner, Mark, MemoryUse, StreamKind
from roundpipe.monitor import process_rlock, shielded

# One lock for all virtual devices: running a copy may first run copies of another device that it waits for.
_fabric_lock = process_rlock()
_EARLY_SHARE = 0.2  # fraction of `copy` calls that also run queued actions early


class _NoRandomStream(DeviceRandomStream):
    """Virtual devices draw on the host."""

    def __exit__(self, *exc_info: object) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass


_NO_RANDOM_STREAM = _NoRandomStream()


class _CopyStream:
    """First-in-first-out queue of one stream: `queued` actions were added so far, `ran` of them have run."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self.queued = 0
        self.ran = 0

    def push(self, action: Callable[[], object]) -> None:
        self._queue.append(action)
        self.queued += 1

    def run_until(self, position: int) -> None:
        while self.ran < position:
            action = self._queue.popleft()
            try:
                action()
            finally:
                self.ran += 1  # counted even if the action failed: it must not run twice


class VirtualEvent:
    """A position in a copy stream; waiting for it runs the queued actions before it on the waiting thread."""

    def __init__(self, stream: _CopyStream, position: int) -> None:
        self._stream, self._position = stream, position

    def done(self) -> bool:
        self.wait()  # a poll runs the copies: no other thread would, and a polling loop would never end
        return True

    def wait(self) -> None:
        if self._stream.ran >= self._position:
            return
        # Signal handlers raise on the main thread only: other threads, which wait for most events, need no shield.
        if _thread.get_ident() != threading.main_thread().ident or _fabric_lock._is_owned():  # type: ignore[attr-defined]
            self._force()
        else:
            shielded(self._force)  # Ctrl-C inside a copy would leave it incomplete but counted as run

    def _force(self) -> None:
        with _fabric_lock:
            self._stream.run_until(self._position)


class _Passed:
    """An event of the compute stream. Always done, because compute runs when it is issued."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _TimeMark(float):
    """The host's clock when the mark was made; compute issued before the mark has run."""

    def seconds(self) -> float:
        return self


class VirtualDevice(Device):
    """A CPU device for tests and trials. Its memory is ordinary host memory and has no limit."""

    draws_on_host = True

    def __init__(self, index: int) -> None:
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self._streams: dict[StreamKind, _CopyStream] = {
            kind: _CopyStream() for kind in StreamKind if kind is not StreamKind.COMPUTE
        }
        self._random = random.Random(int(os.environ.get("ROUNDPIPE_VIRTUAL_SEED", "0")) * 1000 + index)

    @contextlib.contextmanager
    def computing(self, stream: StreamKind = StreamKind.COMPUTE) -> Iterator[None]:
        self.record(stream).wait()  # compute runs at once, after what its stream was told before
        yield

    def random_stream(self, seed: int) -> DeviceRandomStream:
        return _NO_RANDOM_STREAM

    def host_empty_strided(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return poisoned(torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu"))

    def device_empty_strided(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: StreamKind
    ) -> torch.Tensor:
        return poisoned(torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu"))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: StreamKind) -> None:
        def run() -> None:
            with torch.no_grad():
                destination.copy_(source)

        with _fabric_lock:
            self._streams[stream].push(run)
            self._sometimes_run_ahead()

    def record(self, stream: StreamKind) -> Event:
        if stream is StreamKind.COMPUTE:
            return _Passed()
        queue = self._streams[stream]
        return VirtualEvent(queue, queue.queued)

    def stream_wait(self, stream: StreamKind, event: Event) -> None:
        if stream is StreamKind.COMPUTE:
            event.wait()
            return
        with _fabric_lock:
            self._streams[stream].push(event.wait)

    def lend(self, tensor: torch.Tensor, stream: StreamKind) -> None:
        return

    def poison(self, buffer: torch.Tensor, stream: StreamKind) -> None:
        if stream is StreamKind.COMPUTE:
            poisoned(buffer)
            return
        with _fabric_lock:
            self._streams[stream].push(lambda: poisoned(buffer))

    def mark(self) -> Mark:
        return _TimeMark(time.perf_counter())

    def memory_limit_bytes(self) -> int | None:
        return None

    def memory_use(self) -> MemoryUse | None:
        return None

    def release_unused(self) -> None:
        return

    def close(self) -> None:
        return

    def _sometimes_run_ahead(self) -> None:
        if self._random.random() < _EARLY_SHARE:
            stream = self._random.choice([stream for stream in self._streams.values() if stream.queued])
            stream.run_until(self._random.randint(stream.ran, stream.queued))


class NoPinner(HostPinner):
    """Pins nothing. Used without a GPU, so that every `pin_model` mode works."""

    def pin(self, address: int, num_bytes: int) -> bool:
        return False

    def unpin(self, address: int) -> None:
        return


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with NaN, or integers with a value that is no valid index or length, and return it."""
    with torch.no_grad():
        if tensor.dtype is torch.uint8:
            tensor.fill_(0xFF)  # NaN when the bytes are viewed as float16, bfloat16, float32 or float64
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor
