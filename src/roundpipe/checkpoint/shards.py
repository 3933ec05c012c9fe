"""Which files a checkpoint consists of: safetensors shards, the index of their tensors, configurations of libraries.

Decides names and contents, and writes the configurations. Knows no folders besides the one that it is given.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roundpipe.checkpoint.contents import Contents, Source, WeightSet, is_adapter
from roundpipe.checkpoint.format import DTYPES, FileEntry, Piece, TensorEntry, entry_from_json, shard_header
from roundpipe.distributed.line import Payload
from roundpipe.store import Share

_SHARD_BYTES = 2 << 30


class Shard:
    """One safetensors file to write."""

    def __init__(self, group: str, name: str, sources: Sequence[Source], folder: str = "") -> None:
        """`folder`: the beginning of the sources' names that the keys in the file do not have."""
        self.group, self.name, self.sources = group, name, sources
        self.header, self.offsets = shard_header(
            [(one.name.removeprefix(folder), one.tensor.dtype, tuple(one.tensor.shape)) for one in sources]
        )

    def entries(self) -> Iterator[tuple[str, TensorEntry]]:
        """The tensors of this shard for the manifest."""
        for source, offset in zip(self.sources, self.offsets, strict=True):
            tensor = source.tensor
            place = source.range
            start = 0 if place is None else place.start * tensor.itemsize
            piece = Piece(self.name, offset, tensor.nbytes, start)
            shape, stride = (tuple(tensor.shape), None) if place is None else (place.shape, place.stride)
            yield source.name, TensorEntry(DTYPES[tensor.dtype], shape, (piece,), stride)


def _cut(sources: Sequence[Source], limit_bytes: int | None) -> list[list[Source]]:
    """Consecutive sources in lists of at most `limit_bytes`, or of one source."""
    parts: list[list[Source]] = [[]]
    size = 0
    for source in sources:
        if parts[-1] and limit_bytes is not None and size + source.tensor.nbytes > limit_bytes:
            parts.append([])
            size = 0
        parts[-1].append(source)
        size += source.tensor.nbytes
    return parts


def shards_of(contents: Contents, share: Share) -> tuple[list[Shard], dict[str, str]]:
    """The shards that this machine writes, in the order of writing, and the texts of index files by name.

    All machines have all weights, so they write the shards of weights in turn.
    """
    shards: list[Shard] = []
    indices: dict[str, str] = {}
    for weights, sources in contents.weight_sets:
        parts = _cut(sources, _SHARD_BYTES if weights.may_shard else None)
        mine = [
            Shard("weights", _shard_name(weights, i, len(parts)), part, weights.folder) for i, part in enumerate(parts)
        ]
        shards += [shard for i, shard in enumerate(mine) if i % share.size == share.rank]
        if len(parts) > 1:
            indices[f"{weights.folder}{weights.file}.safetensors.index.json"] = _index_of(mine)
    parts = _cut(contents.optimizer_tensors, _SHARD_BYTES)
    name = "optimizer" if share.size == 1 else f"optimizer-rank{share.rank:05}"
    if parts[0]:
        shards += [
            Shard("optimizer", f"{name}-{i + 1:05}-of-{len(parts):05}.safetensors", part)
            for i, part in enumerate(parts)
        ]
    return shards, indices if share.rank == 0 else {}


def _shard_name(weights: WeightSet, index: int, count: int) -> str:
    number = "" if count == 1 else f"-{index + 1:05}-of-{count:05}"
    return f"{weights.folder}{weights.file}{number}.safetensors"


def _index_of(shards: Sequence[Shard]) -> str:
    """The index with which `from_pretrained` finds the tensors of several files."""
    total = sum(source.tensor.nbytes for shard in shards for source in shard.sources)
    weight_map = {source.name: shard.name for shard in shards for source in shard.sources}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


# What machines tell rank 0 for the manifest.


def part_of(shards: Sequence[Shard], files: Mapping[str, FileEntry]) -> Payload:
    """The files and tensors that one machine has written."""
    return {
        "files": {name: dataclasses.asdict(entry) for name, entry in files.items()},
        "tensors": [
            [shard.group, name, dataclasses.asdict(entry)] for shard in shards for name, entry in shard.entries()
        ],
    }


def all_entries(shards: Sequence[Shard], parts: Sequence[Payload]) -> dict[str, dict[str, TensorEntry]]:
    """The tensors in own shards and in the parts of other machines, by group and name. Joins pieces of a tensor."""
    tensors: dict[str, dict[str, TensorEntry]] = {"weights": {}, "optimizer": {}}
    for shard in shards:
        tensors[shard.group].update(shard.entries())
    for part in parts:
        for group, name, data in part["tensors"]:
            entry = entry_from_json(data)
            known = tensors[group].get(name)
            if known is not None and sum(piece.num_bytes for piece in known.pieces) >= known.num_bytes:
                continue  # a parameter of one element: its machine cannot tell a range from the whole
            if known is not None:
                entry = dataclasses.replace(known, pieces=(*known.pieces, *entry.pieces))
            tensors[group][name] = entry
    return tensors


# Configurations.


def write_configuration(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write what `from_pretrained` needs besides the weights."""
    if is_adapter(model):
        for adapter, config in model.peft_config.items():
            _write_adapter_configuration(folder if adapter == "default" else folder / adapter, model, config)
    elif hasattr(getattr(model, "config", None), "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write_adapter_configuration(folder: Path, model: Any, config: Any) -> None:
    config = copy.copy(config)
    config.inference_mode = True  # as peft saves it: who loads an adapter without saying so does not train it
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
