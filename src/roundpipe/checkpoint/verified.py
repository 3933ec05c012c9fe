"""Files of one checkpoint that were compared with its manifest, and reading tensors from them.

Knows files, pieces and checksums; knows no model and no optimizer.

[Note: verified twice] `verify_files` reads every file and compares it with the manifest, before anything changes. It
keeps the state of the SHA-256 at the borders of all pieces, and at most a MiB apart. A Reader reads part by part: from
the state at the beginning of a part it computes the state at its end, and compares it with the one that was kept. Only
a part that has passed is copied to its place. So every byte that reaches a model was verified, whatever has happened to
the file in between. `require_unchanged` compares identity, size and time of a file. It is called for all files right
before the first write, so a change after the verification is found, as a rule, while nothing has changed yet.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import io
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from roundpipe.checkpoint.format import (
    DTYPE_OF,
    DTYPES,
    FileEntry,
    Manifest,
    NotRegular,
    Piece,
    TensorEntry,
    open_regular,
    raw_bytes,
)
from roundpipe.errors import CheckpointError
from roundpipe.host_facts import usable_cores
from roundpipe.monitor import THREAD_PREFIX

_PART_BYTES = 1 << 20  # the states of a checksum take 250 bytes per part
_MOST_OPEN = 64  # files that a Reader keeps open


def io_threads() -> int:
    """How many threads read or write files: a few, so that checksums keep up with the disk."""
    return max(1, min(4, usable_cores() // 2))


@dataclasses.dataclass(frozen=True)
class VerifiedFile:
    """A file that was compared with the manifest: see [Note: verified twice]."""

    path: Path
    identity: tuple[int, ...]
    cuts: Sequence[int]  # offsets at which parts of the file begin and end
    states: Sequence[Any]  # the SHA-256 of the file up to each cut

    def require_unchanged(self) -> None:
        """Raise CheckpointError if the file was replaced, removed or written since it was verified."""
        try:
            is_same = _identity(os.lstat(self.path)) == self.identity
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if not is_same:
            raise _changed(self.path)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def verify_files(folder: Path, manifest: Manifest, names: Collection[str]) -> dict[str, VerifiedFile]:
    """Compare files with the manifest. Raises CheckpointError that names the first file that differs."""
    for name in names:  # sizes first: they tell most damage at once
        with _opened(folder, name) as file:
            found, expected = os.fstat(file.fileno()).st_size, manifest.files[name].num_bytes
        if found != expected:
            raise CheckpointError(
                f"{folder / name} of the checkpoint is damaged: it has {found} bytes instead of {expected}."
            )
    borders: dict[str, set[int]] = {name: set() for name in manifest.files}
    for entries in manifest.tensors.values():
        for entry in entries.values():
            for piece in entry.pieces:
                borders[piece.file] |= {piece.offset, piece.offset + piece.num_bytes}

    def verified(name: str) -> VerifiedFile:
        return _verified(folder, name, manifest.files[name], borders[name])

    with ThreadPoolExecutor(io_threads(), thread_name_prefix=f"{THREAD_PREFIX}verify") as pool:
        return dict(zip(names, pool.map(verified, names), strict=True))


def _verified(folder: Path, name: str, entry: FileEntry, borders: Collection[int]) -> VerifiedFile:
    path, digest = folder / name, hashlib.sha256()
    cuts, states = [0], [digest.copy()]
    buffer = memoryview(bytearray(_PART_BYTES))
    try:
        with _opened(folder, name) as file:
            identity, position = _identity(os.fstat(file.fileno())), 0
            for border in sorted({*borders, entry.num_bytes} - {0}):
                while position < border:
                    count = file.readinto(buffer[: min(border, cuts[-1] + _PART_BYTES) - position])
                    if not count:
                        raise _damaged(path)
                    digest.update(buffer[:count])
                    position += count
                    if position in (border, cuts[-1] + _PART_BYTES):
                        cuts.append(position)
                        states.append(digest.copy())
            if digest.hexdigest() != entry.sha256 or file.readinto(buffer[:1]):
                raise _damaged(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return VerifiedFile(path, identity, cuts, states)


def _opened(folder: Path, name: str) -> io.FileIO:
    path = folder / name
    try:
        return open_regular(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} of the checkpoint is missing.") from None
    except NotRegular as error:
        raise CheckpointError(f"{path} of the checkpoint is missing: {error.strerror}.") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} of the checkpoint cannot be read: {error}.")


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} of the checkpoint is damaged: its checksum does not match the manifest.")


def has_order_of(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Whether the memory of a dense tensor has its elements in the order of the entry's bytes."""
    return tensor.is_contiguous() if entry.stride is None else tuple(tensor.stride()) == entry.stride


class Reader:
    """Reads ranges of tensors from verified files; compares every byte once more: see [Note: verified twice]."""

    def __init__(self, folder: Path, files: Mapping[str, VerifiedFile]) -> None:
        self.has_filled = False  # whether a tensor of the caller has got values
        self._folder, self._files = folder, files
        self._open: dict[str, io.FileIO] = {}
        self._threads = io_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=f"{THREAD_PREFIX}read")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown()
        for file in self._open.values():
            file.close()
        self._open.clear()

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """Fill a tensor of the entry's shape and dtype, directly if its memory has the entry's order."""
        assert tuple(target.shape) == entry.shape
        direct = has_order_of(entry, target) and target.device.type == "cpu"
        plain = target
        if not direct:
            stride = entry.stride or torch.empty(entry.shape, device="meta").stride()
            plain = torch.empty_strided(entry.shape, stride, dtype=target.dtype)
        self.read_range(entry, 0, plain.detach().as_strided((plain.numel(),), (1,)))
        if not direct:
            target.copy_(plain)

    def read_range(self, entry: TensorEntry, start: int, target: torch.Tensor) -> None:
        """Fill a flat tensor with consecutive elements of the entry, from element `start` on, in the entry's order."""
        assert DTYPES[target.dtype] == entry.dtype
        memory, first = raw_bytes(target), start * target.itemsize
        for piece in entry.pieces:
            low = max(piece.start, first)
            high = min(piece.start + piece.num_bytes, first + len(memory))
            if low < high:
                part = Piece(piece.file, piece.offset + low - piece.start, high - low)
                self._read(part, memory[low - first : high - first])

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The whole tensor in new memory."""
        tensor = torch.empty(entry.shape, dtype=DTYPE_OF[entry.dtype])
        self.read_into(entry, tensor)
        return tensor

    def content(self, name: str) -> bytes:
        """The whole content of a file."""
        content = bytearray(self._files[name].cuts[-1])
        if content:
            self._read(Piece(name, 0, len(content)), memoryview(content))
        return bytes(content)

    def _read(self, piece: Piece, memory: memoryview) -> None:
        """Fill `memory` with the bytes of a piece, part by part: those of a part are written when it has passed."""
        file, handle = self._files[piece.file], self._handle(piece.file)
        end = piece.offset + piece.num_bytes
        first = bisect.bisect_right(file.cuts, piece.offset) - 1
        after = bisect.bisect_left(file.cuts, end)

        def read_part(at: int) -> None:
            start, stop = file.cuts[at], file.cuts[at + 1]
            part = _read_exactly(handle, file.path, start, stop - start)
            digest = file.states[at].copy()
            digest.update(part)
            if digest.digest() != file.states[at + 1].digest():
                raise _changed(file.path)
            low, high = max(start, piece.offset), min(stop, end)
            self.has_filled = True
            memory[low - piece.offset : high - piece.offset] = part[low - start : high - start]

        if min(after - first, self._threads) == 1:
            for at in range(first, after):
                read_part(at)
            return
        pending = [self._pool.submit(read_part, at) for at in range(first, after)]
        wait(pending)  # before an error is raised: `memory` must not be freed while a thread writes into it
        for part in pending:
            part.result()

    def _handle(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = _opened(self._folder, name)
        return self._open[name].fileno()


def _read_exactly(handle: int, path: Path, offset: int, num_bytes: int) -> memoryview:
    part, position = memoryview(bytearray(num_bytes)), 0
    while position < num_bytes:
        try:
            count = os.preadv(handle, [part[position:]], offset + position)
        except OSError as error:
            raise _unreadable(path, error) from error
        if not count:
            raise _changed(path)
        position += count
    return part


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} of the checkpoint was changed after it was verified. Let nothing write into the folder while it is "
        "loaded; then load it again, or another one."
    )
