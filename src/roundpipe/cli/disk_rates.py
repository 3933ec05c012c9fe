"""How fast the disk of a folder reads and writes, measured with a file without a name.

Bounded in size and time. The system's page cache takes no part: the file is opened for direct access, or, where the
file system has none, each write waits for the disk and the pages are dropped before they are read. Judges nothing.
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import mmap
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roundpipe.host_facts import file_system

_CHUNK_BYTES = 4 << 20
_MOST_CHUNKS, _FEWEST_CHUNKS = 256, 16  # 1 GiB, 64 MiB
_LIMIT_S = 1.5  # of writing, and of reading
_THREADS = 4  # a fast disk wants several requests at a time
_SHARE_OF_FREE = 4  # at most a fourth of the free space is written


@dataclasses.dataclass(frozen=True)
class DiskRates:
    """The rates of the disk of a folder. `error`: why they are not known.

    file_system: its kind, such as "ext4". is_direct: whether the page cache was left out by the file system itself.
    """

    file_system: str | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    is_direct: bool | None = None
    error: str | None = None

    @property
    def both_bytes_per_s(self) -> float | None:
        """The rate of reading and writing in turn; None if it is not known."""
        if self.read_bytes_per_s is None or self.write_bytes_per_s is None:
            return None
        return 2 / (1 / self.read_bytes_per_s + 1 / self.write_bytes_per_s)


def measured_rates(folder: Path) -> DiskRates:
    """Measure the disk of an existing folder. Takes a few seconds at most; leaves nothing behind."""
    kind = file_system(folder)
    try:
        most = min(_MOST_CHUNKS, shutil.disk_usage(folder).free // _SHARE_OF_FREE // _CHUNK_BYTES)
        if most < _FEWEST_CHUNKS:
            return DiskRates(kind, error="too little space is free")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _measured(file.fileno(), most, kind)
    except OSError as error:
        return DiskRates(kind, error=str(error))


def _measured(handle: int, most: int, kind: str | None) -> DiskRates:
    is_direct = _is_made_direct(handle)
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    content = os.urandom(_CHUNK_BYTES)  # so that nothing on the way can compress it
    for _ in range(_THREADS):
        memory = mmap.mmap(-1, _CHUNK_BYTES)  # begins at a page, as direct access wants
        memory[:] = content  # has pages: making them takes longer than reading
        buffers.put(memory)

    def write(chunk: int) -> None:
        memory = buffers.get()
        if os.pwrite(handle, memory, chunk * _CHUNK_BYTES) != _CHUNK_BYTES:
            raise OSError("the disk took a part of a write only")
        buffers.put(memory)
        if not is_direct:
            os.fdatasync(handle)  # else the time limit would not hold: the system takes any number of writes at once

    def read(chunk: int) -> None:
        memory = buffers.get()
        if os.preadv(handle, [memory], chunk * _CHUNK_BYTES) != _CHUNK_BYTES:
            raise OSError("the disk gave a part of what was written only")
        buffers.put(memory)

    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, most * _CHUNK_BYTES)
    written, write_s = _timed(write, most, lambda: os.fdatasync(handle))
    if not is_direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    found, read_s = _timed(read, written, lambda: None)
    return DiskRates(kind, found * _CHUNK_BYTES / read_s, written * _CHUNK_BYTES / write_s, is_direct)


def _is_made_direct(handle: int) -> bool:
    """Open the file for direct access, if its file system has that."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _timed(work: Callable[[int], None], most: int, finish: Callable[[], None]) -> tuple[int, float]:
    """Work on chunks 0, 1, ... on several threads until time or chunks end; returns their number and the seconds."""
    start_s = time.perf_counter()
    numbers = itertools.count()

    def worker() -> int:
        done = 0
        while done == 0 or time.perf_counter() - start_s < _LIMIT_S:
            number = next(numbers)
            if number >= most:
                break
            work(number)
            done += 1
        return done

    with ThreadPoolExecutor(_THREADS) as pool:
        done = sum(each.result() for each in [pool.submit(worker) for _ in range(_THREADS)])
    finish()
    return done, time.perf_counter() - start_s
