"""Virtual CPU devices: the same protocol as CUDA, with copies that run late and memory that is NaN before its time.

Compute runs at once on the worker's thread. A copy is only queued; it runs when somebody waits for an event after it,
or, now and then, early: a generator seeded per device decides. So both a reader that forgot to wait and a writer that
did not wait for the reader before it become failing CPU tests, repeatable by seed (`ROUNDPIPE_VIRTUAL_SEED`).
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from roundpipe.devices.interface import Device, Event, HostPinner, Mark, MemoryUse, StreamKind, poisoned
from roundpipe.monitor import process_rlock, shielded

# One lock for all virtual devices: a copy may have to force events of another device first.
_fabric_lock = process_rlock()
_NO_RANDOM_STREAM = contextlib.nullcontext()
_EARLY_SHARE = 0.2  # of all calls that queue something, how many also run something ahead of need


class _CopyStream:
    """Queued actions of one stream; `ran` of them have run."""

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
                self.ran += 1  # an action that failed is over, too


class VirtualEvent:
    def __init__(self, stream: _CopyStream, position: int) -> None:
        self._stream, self._position = stream, position

    def done(self) -> bool:
        self.wait()  # a poll makes progress, as time does on a real device
        return True

    def wait(self) -> None:
        if self._stream.ran >= self._position:
            return
        if _fabric_lock._is_owned():  # type: ignore[attr-defined]
            self._force()
        else:
            shielded(self._force)  # a copy that an interrupt had cut short would count as done

    def _force(self) -> None:
        with _fabric_lock:
            self._stream.run_until(self._position)


class _Passed:
    """The event of a compute stream: compute runs at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _TimeMark:
    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def seconds(self) -> float:
        return self._seconds


class VirtualDevice(Device):
    def __init__(self, index: int) -> None:
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self._streams: dict[StreamKind, _CopyStream] = {
            kind: _CopyStream() for kind in StreamKind if kind is not StreamKind.COMPUTE
        }
        self._random = random.Random(int(os.environ.get("ROUNDPIPE_VIRTUAL_SEED", "0")) * 1000 + index)

    @property
    def draws_on_host(self) -> bool:
        return True

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def random_stream(self, seed: int) -> AbstractContextManager[None]:
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
        return _TimeMark()

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
            stream = self._random.choice(list(self._streams.values()))
            stream.run_until(self._random.randint(stream.ran, stream.queued))


class NoPinner(HostPinner):
    """Without a GPU there is nothing to pin for; every mode works and pins nothing."""

    def pin(self, address: int, num_bytes: int) -> bool:
        return False

    def unpin(self, address: int) -> None:
        return
