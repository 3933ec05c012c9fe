"""A file of a model's weights as they are packed, mapped instead of held in host memory.

Knows tensors and names, never how weights are packed or read from their source.

[Note: mapped weights] The packed weights of a model are written once. Later loads map what is there and read nothing of
the source. The folder of the file has a name made from a key: names, sizes, times and headers of the source's files,
the form, class and dtype of the model. It is complete or absent: it gets its name when all of it is on the disk.
Mapping verifies every byte, so that a damaged base cannot train. The mapping is private: a write into a weight stays in
this process. The system gives pages that nothing reads to others, and reads them again when they are needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from roundpipe.checkpoint.folders import make_partial, remove_abandoned
from roundpipe.checkpoint.format import make_synced, sync_folder, write_synced
from roundpipe.errors import ConfigError
from roundpipe.host_facts import usable_cores

_WEIGHTS, _MANIFEST = "weights.bin", "manifest.json"
_FORMAT = 1
_MOST_THREADS = 4  # of the verification
_ROOM_FOR_GAPS = 1 << 30  # less than a page for each weight
# A mapping that is never written needs no memory behind it: without this flag the system refuses one larger than RAM.
_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_NORESERVE", 0)


def mapped_folder(parent: Path, title: str, key: Mapping[str, Any]) -> Path:
    """The folder in `parent` for the weights that a key stands for."""
    return parent / f"{title}-{hashlib.sha256(_text(key).encode()).hexdigest()[:16]}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _page_multiple(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor lies in the file. Each begins at a page, so that reading one ahead touches no other."""

    offset: int
    num_bytes: int
    sha256: str


class _Mapping:
    """A private mapping of the beginning of a file. Tensors keep it alive."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        with open(path, "rb") as file:
            self._pages = mmap.mmap(file.fileno(), num_bytes, flags=_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, entry: _Entry, like: Tensor) -> Tensor:
        """The tensor of an entry, with its own storage."""
        if not entry.num_bytes:
            return torch.empty(like.shape, dtype=like.dtype)
        flat = torch.frombuffer(self._pages, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset)
        return flat.view(like.dtype).view(like.shape)

    def digest(self, entry: _Entry) -> str:
        return hashlib.sha256(memoryview(self._pages)[entry.offset : entry.offset + entry.num_bytes]).hexdigest()


class WeightWriter:
    """Writes the file of a model while it is loaded. As a context: removes what is there if the block raises."""

    def __init__(self, folder: Path, key: Mapping[str, Any], most_bytes: int) -> None:
        """`most_bytes`: what all weights take at most, before they are packed."""
        self._folder, self._key, self._end = folder, dict(key), 0
        self._entries: dict[int, _Entry] = {}  # by address
        room = _page_multiple(most_bytes) + _ROOM_FOR_GAPS
        try:
            make_synced(folder.parent)
            remove_abandoned(folder.parent)
            self._partial, self._lock = make_partial(folder)
            self._file = os.open(self._partial / _WEIGHTS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            os.ftruncate(self._file, room)  # takes no space; cut to what is written at the end
            self._mapping = _Mapping(self._partial / _WEIGHTS, room)
        except OSError as error:
            raise self._not_written(error) from error

    def keep(self, weight: Tensor) -> Tensor:
        """The weight in the file. What it took in memory is free when the caller drops it."""
        content = weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        offset, digest, written = self._end, hashlib.sha256(content), 0
        try:
            while written < len(content):
                written += os.pwrite(self._file, content[written:], offset + written)
        except OSError as error:
            raise self._not_written(error) from error
        entry = _Entry(offset, written, digest.hexdigest())
        self._end = _page_multiple(offset + written)
        kept = self._mapping.tensor(entry, weight)
        self._entries[kept.data_ptr()] = entry
        return kept

    def complete(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give the folder its name. `named`: all tensors of the model; their memory shows which ones were kept."""
        found = {
            name: dataclasses.asdict(self._entries[tensor.data_ptr()])
            for name, tensor in named
            if tensor.nbytes and tensor.data_ptr() in self._entries
        }
        content = {"format": _FORMAT, "key": self._key, "num_bytes": self._end, "tensors": found}
        try:
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)
            write_synced(self._partial / _MANIFEST, _text({**content, "checksum": _checksum(content)}).encode())
            sync_folder(self._partial)
            self._take_name()
            sync_folder(self._folder.parent)
        except OSError as error:
            raise self._not_written(error) from error

    def _take_name(self) -> None:
        """Rename the folder. If another process was faster, its folder stays; this file lives while it is mapped."""
        try:
            os.rename(self._partial, self._folder)
        except OSError:
            if not self._folder.exists():
                raise
            shutil.rmtree(self._partial, ignore_errors=True)

    def _not_written(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the packed weights cannot be written into {self._folder.parent}: {error}. Free space, or give another "
            "folder."
        )

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        os.close(self._lock)


class WeightFile:
    """The file of a complete folder, verified and mapped."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Raises ConfigError with the folder's name if its files are damaged or of another model."""
        self._folder = folder
        try:
            content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            checksum = content.pop("checksum")
            size = (folder / _WEIGHTS).stat().st_size
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._refusal(f"its files cannot be read ({' '.join(str(error).split())})") from error
        if checksum != _checksum(content):
            raise self._refusal(f"its {_MANIFEST} is damaged")
        if content["format"] != _FORMAT or content["key"] != json.loads(_text(key)):
            raise self._refusal("it has the weights of another model")
        if size != content["num_bytes"]:
            raise self._refusal(f"its {_WEIGHTS} has {size} bytes instead of {content['num_bytes']}")
        self._entries = {name: _Entry(**entry) for name, entry in content["tensors"].items()}
        self._mapping = _Mapping(folder / _WEIGHTS, size)
        with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as pool:
            digests = pool.map(self._mapping.digest, self._entries.values())
            for (name, entry), digest in zip(self._entries.items(), digests, strict=True):
                if digest != entry.sha256:
                    raise self._refusal(f"the bytes of {name} are not those that were written")

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """The weight with this name, with the shape and dtype of `like`."""
        entry = self._entries.get(name)
        if entry is None or entry.num_bytes != like.nbytes:
            raise self._refusal(f"it has no {name} of {like.nbytes} bytes")
        return self._mapping.tensor(entry, like)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"the packed weights in {self._folder} cannot be used: {reason}. Remove that folder.")


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()
