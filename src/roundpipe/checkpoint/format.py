"""The files of a checkpoint: safetensors shards, values as JSON, and the manifest that describes all of them.

Knows bytes, names and checksums; knows no model and no optimizer. Nothing is pickled.

[Note: files of a checkpoint] Tensors lie in safetensors files. This module writes that format itself: a shard is
written tensor by tensor from the memory in which training uses it, while its checksum is computed. The manifest lists
every file with its size and SHA-256, and for each tensor the pieces that hold it: which bytes of the tensor lie where
in which file. Several writers can each write a part of a tensor, and a reader can read any range. The manifest is
written last and has a checksum over itself, so a folder with a valid manifest is complete.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from roundpipe.errors import CheckpointError

MANIFEST = "manifest.json"
STATE_FILE = "state.json"
FORMAT = "roundpipe-checkpoint"
FORMAT_VERSION = 1  # of a checkpoint that one process has written
SHARED_FORMAT_VERSION = 2  # of one that several machines have written: see [Note: names in a checkpoint]
_CHUNK_BYTES = 4 << 20  # a chunk is hashed and written while it is in the processor's cache

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


def state_file(rank: int) -> str:
    """The file with the state that belongs to one machine; that of rank 0 is part of STATE_FILE."""
    return f"state-rank{rank:05}.json" if rank else STATE_FILE


# Tensors as bytes.


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory. Valid while the tensor lives."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def chunks(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), _CHUNK_BYTES):
        yield memory[start : start + _CHUNK_BYTES]


# Shards.


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes `start` to `start + num_bytes` of a tensor, which lie at `offset` of a file."""

    file: str
    offset: int
    num_bytes: int
    start: int = 0


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint. Its bytes are in row-major order, or in the order of a dense tensor with `stride`."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stride: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_OF[self.dtype].itemsize


def shard_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """The first bytes of a safetensors file with these tensors, and the offset of each tensor in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, position = [], 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        starts.append(position)
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    first = struct.pack("<Q", len(text)) + text
    return first, [len(first) + start for start in starts]


# Files and checksums.


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The size and checksum of one file."""

    num_bytes: int
    sha256: str


def file_entry(path: Path) -> FileEntry:
    """Read a file and return its size and checksum."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_synced(folder: Path) -> None:
    """Create a folder and those above it that do not exist, so that they survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small new file and flush it to the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# Values as JSON.

_TAG = "$type"


def to_json(value: Any, where: str) -> Any:
    """A value as JSON data from which `from_json` restores it exactly. `where` names the value in errors."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        if plain.dtype not in DTYPES:
            raise CheckpointError(f"{where} is a tensor of {plain.dtype}, which a checkpoint cannot hold.")
        data = base64.b64encode(raw_bytes(plain)).decode()
        return {_TAG: "tensor", "dtype": DTYPES[plain.dtype], "shape": list(plain.shape), "value": data}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, tuple | list):
        items = [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "value": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[to_json(key, where), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "dict", "value": pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it stores numbers, strings, tensors and "
        "lists, tuples and dicts of them."
    )


def from_json(data: Any) -> Any:
    """The value that `to_json` has converted."""
    if isinstance(data, list):
        return [from_json(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get(_TAG)
    if kind is None:
        return {key: from_json(item) for key, item in data.items()}
    value = data["value"]
    if kind == "float":
        return float(value)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "tuple":
        return tuple(from_json(item) for item in value)
    if kind == "dict":
        return {from_json(key): from_json(item) for key, item in value}
    if kind == "tensor":
        dtype, shape = DTYPE_OF[data["dtype"]], data["shape"]
        content = bytearray(base64.b64decode(value))
        return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    raise ValueError(f"unknown kind of value {kind!r}")


# The manifest.


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything a reader needs to know of a checkpoint before it reads a file."""

    saved_at_ns: int
    step: int
    versions: Mapping[str, str]
    model: Mapping[str, Any]  # class and kind of the saved model
    aliases: Mapping[str, str]  # keys of the state dict that share the tensor of another key
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, Mapping[str, TensorEntry]]  # by group ("weights", "optimizer") and name
    machines: int = 1  # how many machines have written it

    def to_bytes(self) -> bytes:
        version = FORMAT_VERSION if self.machines == 1 else SHARED_FORMAT_VERSION
        body = {"format": FORMAT, "version": version, **dataclasses.asdict(self)}
        return json.dumps({"sha256": _body_digest(body), **body}, indent=1).encode()


def _body_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises CheckpointError that names the fault."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _no_checkpoint(folder) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Load another checkpoint.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a RoundPipe checkpoint; load a folder that save() wrote.")
    if data.get("version") not in (FORMAT_VERSION, SHARED_FORMAT_VERSION):
        raise CheckpointError(
            f"{path} has format version {data.get('version')!r}, this release reads version {FORMAT_VERSION} and "
            f"{SHARED_FORMAT_VERSION}; install the release that wrote it, or a newer one."
        )
    digest = data.pop("sha256", None)
    if digest != _body_digest(data):
        raise CheckpointError(f"{path} was altered after it was written: its checksum does not match its content.")
    try:
        manifest = _parsed(data)
        _check_paths(path, manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} does not have the expected content ({error!r}).") from error
    return manifest


def _no_checkpoint(folder: Path) -> CheckpointError:
    if not folder.exists():
        return CheckpointError(f"{folder} does not exist; give the folder of a checkpoint that save() wrote.")
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    hint = f" It contains the checkpoints {', '.join(inside)}: load one of them." if inside else ""
    return CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}.{hint}")


def _parsed(data: Mapping[str, Any]) -> Manifest:
    tensors = {
        group: {name: entry_from_json(entry) for name, entry in entries.items()}
        for group, entries in data["tensors"].items()
    }
    return Manifest(
        saved_at_ns=int(data["saved_at_ns"]),
        step=int(data["step"]),
        versions=dict(data["versions"]),
        model=dict(data["model"]),
        aliases=dict(data["aliases"]),
        files={name: FileEntry(**entry) for name, entry in data["files"].items()},
        tensors=tensors,
        machines=int(data.get("machines", 1)),
    )


def entry_from_json(data: Mapping[str, Any]) -> TensorEntry:
    """The entry that `dataclasses.asdict` has made `data` of."""
    stride = data.get("stride")
    return TensorEntry(
        data["dtype"],
        tuple(data["shape"]),
        tuple(Piece(**piece) for piece in data["pieces"]),
        None if stride is None else tuple(stride),
    )


def _check_paths(path: Path, manifest: Manifest) -> None:
    """Refuse names that lead out of the folder, and pieces outside of their file or tensor."""
    for name in manifest.files:
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or any(part in ("", ".", "..") for part in parts):
            raise CheckpointError(f"{path} names the file {name!r}, which is outside of the checkpoint.")
    for entries in manifest.tensors.values():
        for name, entry in entries.items():
            if entry.dtype not in DTYPE_OF or any(size < 0 for size in entry.shape):
                raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry.dtype!r} and shape {entry.shape}.")
            if entry.stride is not None and not _is_dense(entry.shape, entry.stride):
                raise CheckpointError(f"{path}: tensor {name!r} of shape {entry.shape} has strides {entry.stride}.")
            covered = 0
            for piece in sorted(entry.pieces, key=lambda piece: piece.start):
                file = manifest.files.get(piece.file)
                is_inside = piece.offset >= 0 and piece.num_bytes >= 0
                if file is None or not is_inside or piece.offset + piece.num_bytes > file.num_bytes:
                    raise CheckpointError(f"{path}: tensor {name!r} lies outside of its file {piece.file!r}.")
                if piece.start != covered:
                    break
                covered += piece.num_bytes
            if covered != entry.num_bytes:
                raise CheckpointError(f"{path}: {covered} of the {entry.num_bytes} bytes of {name!r} are in its files.")


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape and these strides fills a range of memory without gaps."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def verify_files(folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Compare files with the manifest. Raises CheckpointError that names the first file that differs."""
    paths = {name: folder / name for name in names}
    for name, path in paths.items():  # sizes first: they tell most damage at once
        expected = manifest.files[name].num_bytes
        try:
            found = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise CheckpointError(f"{path} of the checkpoint cannot be read: {error}.") from error
        if found is None:
            raise CheckpointError(f"{path} of the checkpoint is missing.")
        if found != expected:
            raise CheckpointError(f"{path} of the checkpoint is damaged: it has {found} bytes instead of {expected}.")
    for name, entry in zip(paths, _entries(paths.values()), strict=True):
        if entry != manifest.files[name]:
            raise CheckpointError(
                f"{paths[name]} of the checkpoint is damaged: its checksum does not match the manifest."
            )


def _entries(paths: Iterable[Path]) -> Iterator[FileEntry]:
    """The entries of files, which several threads read."""

    def entry_of(path: Path) -> FileEntry:
        try:
            return file_entry(path)
        except OSError as error:
            raise CheckpointError(f"{path} of the checkpoint cannot be read: {error}.") from error

    with ThreadPoolExecutor(io_threads(), thread_name_prefix="roundpipe-verify") as pool:
        yield from pool.map(entry_of, paths)


def io_threads() -> int:
    """How many threads read or write files: a few, so that checksums keep up with the disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // 2))


def has_order_of(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Whether the memory of a dense tensor has its elements in the order of the entry's bytes."""
    return tensor.is_contiguous() if entry.stride is None else tuple(tensor.stride()) == entry.stride


class Reader:
    """Reads ranges of tensors from the files of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

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

    def _read(self, piece: Piece, memory: memoryview) -> None:
        path = self._folder / piece.file
        try:
            if piece.file not in self._handles:
                self._handles[piece.file] = os.open(path, os.O_RDONLY)
            position = 0
            while position < len(memory):
                count = os.preadv(self._handles[piece.file], [memory[position:]], piece.offset + position)
                if not count:
                    raise CheckpointError(f"{path} ends before byte {piece.offset + len(memory)}.")
                position += count
        except OSError as error:
            raise CheckpointError(f"{path} of the checkpoint cannot be read: {error}.") from error
