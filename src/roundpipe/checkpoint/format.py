"""The files of a checkpoint: safetensors shards, values as JSON, and the manifest that describes all of them.

Knows bytes, names and checksums; knows no model and no optimizer. Nothing is pickled.

[Note: files of a checkpoint] Tensors lie in safetensors files. This module writes that format itself: a shard is
written tensor by tensor from the memory in which training uses it, while its checksum is computed. The manifest lists
every file with its size and SHA-256, and for each tensor the pieces that hold it: which bytes of the tensor lie where
in which file. Several writers can each write a part of a tensor, and a reader can read any range. The manifest is
written last and has a checksum over itself, so a folder with a valid manifest is complete.

[Note: a manifest is not trusted] A checksum proves no author. So `check_manifest` refuses every manifest whose reading
could fail later or reach anything but the files of the folder: names that lead out of it, numbers that are none, pieces
outside of a file, and pieces that overlap or leave gaps in their tensor. `check_overlaps` refuses tensors that share
bytes. `open_regular` opens nothing but regular files, and follows no link below the folder.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import errno
import hashlib
import io
import itertools
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
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
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


def state_file(rank: int) -> str:
    """The file with the state that belongs to one machine; that of rank 0 is part of STATE_FILE."""
    return f"state-rank{rank:05}.json" if rank else STATE_FILE


# Tensors as bytes.


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in row-major order, with its values in memory as they are. Copies only where it must."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


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


def is_inside(name: str) -> bool:
    """Whether a name, taken below the folder of a checkpoint, can be that of a file in it."""
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The size and checksum of one file."""

    num_bytes: int
    sha256: str


_KINDS = {stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


class NotRegular(OSError):
    """A name of a checkpoint that leads to something else than a regular file inside of its folder."""


def open_regular(folder: Path, name: str) -> io.FileIO:
    """Open a file below `folder` for reading. Raises NotRegular, before it opens anything, for what is no such file.

    A FIFO would block, a device may have effects, and a link below the folder may lead out of it. `folder` itself may
    be a link.
    """
    path = folder / name
    for parent in [*reversed(PurePosixPath(name).parents)][1:]:
        _require_kind(folder / parent, stat.S_IFDIR)
    before = _require_kind(path, stat.S_IFREG)
    file = io.FileIO(path)
    after = os.fstat(file.fileno())
    if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
        file.close()
        raise NotRegular(errno.ESTALE, "it was replaced while it was being opened", str(path))
    return file


def _require_kind(path: Path, kind: int) -> os.stat_result:
    found = os.lstat(path)
    present = stat.S_IFMT(found.st_mode)
    if present != kind:
        wanted = "folder" if kind == stat.S_IFDIR else "regular file"
        raise NotRegular(errno.EINVAL, f"it is a {_KINDS.get(present, 'device')}, not a {wanted}", str(path))
    return found


def file_entry(path: Path) -> FileEntry:
    """Read a file that was just written, and return its size and checksum."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open_regular(path.parent, path.name) as file:
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


def state_text(values: Any, where: str) -> str:
    """Values as a JSON text. Raises CheckpointError for what a checkpoint cannot hold."""
    try:
        return json.dumps(to_json(values, where))
    except (RecursionError, ValueError) as error:  # a list that contains itself; a number of thousands of digits
        raise CheckpointError(f"{where} cannot be saved: {error}.") from error


def to_json(value: Any, where: str) -> Any:
    """A value as JSON data from which `from_json` restores it exactly. `where` names the value in errors."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor):
        require_storable(value, where)
        plain = plain_values(value.detach().cpu())
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


def require_storable(value: object, what: str) -> None:
    """Raise CheckpointError if a checkpoint cannot hold a value as a tensor: it has other memory than plain numbers."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_meta and not value.is_nested
        if is_plain and value.dtype in DTYPES:
            return
        kind = f"tensor of {value.dtype}, {value.layout}" + (", without values" if value.is_meta else "")
        advice = "; save to_dense() of it" if value.layout is not torch.strided else ""
    else:
        kind, advice = type(value).__name__, ""
    raise CheckpointError(f"{what} is a {kind}, which a checkpoint cannot hold{advice}.")


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
        content, dtype = bytearray(base64.b64decode(value)), DTYPE_OF[data["dtype"]]
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(data["shape"])
    raise ValueError(f"unknown kind of value {kind!r}")


# The manifest.


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything a reader needs to know of a checkpoint before it reads a file.

    sequence: counts the checkpoints of a folder in the order of their saves, from 1; 0 in manifests of releases that
        did not count. It orders checkpoints, because clocks can be set back.
    """

    saved_at_ns: int
    step: int
    versions: Mapping[str, str]
    model: Mapping[str, Any]  # class and kind of the saved model
    aliases: Mapping[str, str]  # keys of the state dict that share the tensor of another key
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, Mapping[str, TensorEntry]]  # by group ("weights", "optimizer") and name
    machines: int = 1  # how many machines have written it
    sequence: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Later checkpoints of a folder have larger values. The clock counts only where no sequence is known."""
        return self.sequence, self.saved_at_ns

    @property
    def identity(self) -> str:
        """A text that differs between any two checkpoints with other content."""
        return _body_digest(dataclasses.asdict(self))

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
        with open_regular(folder, MANIFEST) as file:
            data = json.loads(file.readall())
        digest = data.pop("sha256", None) if isinstance(data, dict) else None
        is_sound = digest == _body_digest(data)
    except FileNotFoundError:
        raise _no_checkpoint(folder) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Load another checkpoint.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a RoundPipe checkpoint; load a folder that save() wrote.")
    version = data.get("version")
    if type(version) is not int or version not in (FORMAT_VERSION, SHARED_FORMAT_VERSION):
        raise CheckpointError(
            f"{path} has format version {version!r}, this release reads version {FORMAT_VERSION} and "
            f"{SHARED_FORMAT_VERSION}; install the release that wrote it, or a newer one."
        )
    if not is_sound:
        raise CheckpointError(f"{path} was altered after it was written: its checksum does not match its content.")
    try:
        manifest = _parsed(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} does not have the expected content ({error!r}).") from error
    check_manifest(manifest, path)
    return manifest


def _no_checkpoint(folder: Path) -> CheckpointError:
    if not folder.exists():
        return CheckpointError(f"{folder} does not exist; give the folder of a checkpoint that save() wrote.")
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    hint = f" It contains the checkpoints {', '.join(inside)}: load one of them." if inside else ""
    return CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}.{hint}")


def _parsed(data: Mapping[str, Any]) -> Manifest:
    tensors = {
        group: {name: entry_from_json(name, entry) for name, entry in entries.items()}
        for group, entries in data["tensors"].items()
    }
    return Manifest(
        saved_at_ns=_integer(data["saved_at_ns"], "saved_at_ns", at_least=-(1 << 63)),
        step=_integer(data["step"], "step"),
        versions=_texts(data["versions"]),
        model=_texts(data["model"]),
        aliases=_texts(data["aliases"]),
        files={name: _file_from_json(name, entry) for name, entry in data["files"].items()},
        tensors=tensors,
        machines=_integer(data.get("machines", 1), "machines", at_least=1),
        sequence=_integer(data.get("sequence", 0), "sequence"),
    )


def _file_from_json(name: str, data: Mapping[str, Any]) -> FileEntry:
    return FileEntry(_integer(data["num_bytes"], f"num_bytes of {name}"), _text(data["sha256"]))


def entry_from_json(name: str, data: Mapping[str, Any]) -> TensorEntry:
    """The entry of the tensor `name`, of which `dataclasses.asdict` has made `data`."""
    stride = data.get("stride")
    pieces = [
        Piece(
            _text(one["file"]), *(_integer(one[key], f"{key} of {name!r}") for key in ("offset", "num_bytes", "start"))
        )
        for one in data["pieces"]
    ]
    return TensorEntry(
        _text(data["dtype"]),
        tuple(_integer(size, f"shape of {name!r}") for size in data["shape"]),
        tuple(pieces),
        None if stride is None else tuple(_integer(step, f"stride of {name!r}") for step in stride),
    )


def _integer(value: object, what: str, at_least: int = 0) -> int:
    if type(value) is not int or not at_least <= value < 1 << 63:
        raise ValueError(f"{what} is {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _texts(data: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in data.items()}


def check_manifest(manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError if a manifest is not one that can be read: see [Note: a manifest is not trusted].

    path: of the manifest, for errors.
    """
    for name in manifest.files:
        if not is_inside(name) or str(PurePosixPath(name)) != name:
            raise CheckpointError(f"{path} names the file {name!r}, which is outside of the checkpoint.")
    if unknown := manifest.tensors.keys() - {"weights", "optimizer"}:
        raise CheckpointError(f"{path} has tensors of the unknown kind {min(unknown)!r}.")
    for entries in manifest.tensors.values():
        for name, entry in entries.items():
            _check_entry(path, name, entry, manifest.files)


def check_overlaps(manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError if two tensors have a byte of a file in common: one of them would get wrong values."""
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for entries in manifest.tensors.values():
        for name, entry in entries.items():
            for piece in entry.pieces:
                if piece.num_bytes:
                    taken.setdefault(piece.file, []).append((piece.offset, piece.offset + piece.num_bytes, name))
    for file, ranges in taken.items():
        ranges.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
            if start < end:
                raise CheckpointError(f"{path}: the pieces of {one!r} and {other!r} overlap in {file!r}.")


def _check_entry(path: Path, name: str, entry: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    """Raise CheckpointError unless the pieces of a tensor lie in their files and hold each of its bytes once."""
    if entry.dtype not in DTYPE_OF or entry.num_bytes >= 1 << 63:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry.dtype!r} and shape {entry.shape}.")
    if entry.stride is not None and not _is_dense(entry.shape, entry.stride):
        raise CheckpointError(f"{path}: tensor {name!r} of shape {entry.shape} has strides {entry.stride}.")
    for piece in entry.pieces:
        file = files.get(piece.file)
        if file is None or piece.offset + piece.num_bytes > file.num_bytes:
            raise CheckpointError(f"{path}: tensor {name!r} lies outside of its file {piece.file!r}.")
    covered = 0
    for piece in sorted(entry.pieces, key=lambda piece: (piece.start, piece.num_bytes)):
        if piece.start != covered:
            raise CheckpointError(
                f"{path}: the pieces of {name!r} {'overlap' if piece.start < covered else 'leave a gap'} at its byte "
                f"{min(piece.start, covered)}."
            )
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
