"""What a checkpoint holds: which tensors of a model and its optimizer are saved under which names, and all other state.

Also decides into which files the tensors go. `weights_of` and `capture` are called while nothing runs on the model.

[Note: names in a checkpoint] The group "weights" has the keys of the state dict (of a PEFT model: those of its
adapters, the base model is not saved). The group "optimizer" has the parameter's name behind a prefix:
`state/exp_avg/NAME` for the optimizer's tensors (a moment in 8 bits has two, `exp_avg_8bit` and `exp_avg_scale`),
`master/NAME` for a master in full, `master.low/NAME` and `master.ties/NAME` for a halved master, whose high half is the
weight, `master.low/NAME` with 8 bits for a master of 24 bits. A master that equals its weight is not saved.

"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe.api.group import Group
from roundpipe.checkpoint.format import (
    DTYPES,
    MANIFEST,
    STATE_FILE,
    FileEntry,
    Piece,
    TensorEntry,
    entry_from_json,
    is_inside,
    require_storable,
    shard_header,
)
from roundpipe.checkpoint.original_form import write_generation_config
from roundpipe.checkpoint.ranges import (
    MASTER,
    MASTER_LOW,
    MASTER_TIES,
    Home,
    Kind,
    Source,
    kind_of,
    place_of,
    range_sources,
    roundings_of,
)
from roundpipe.compiled import Compiling, PartsToCompile
from roundpipe.devices import generator_states, set_generator_states
from roundpipe.distributed.line import Payload
from roundpipe.errors import CheckpointError, ConfigError
from roundpipe.packed.sources import own_settings
from roundpipe.store import OptimizerCopy, ParameterRecord, Share

STATE = "state/"
_DEFAULT_ADAPTER = "default"


class HasState(Protocol):
    """A scheduler or a scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


# Weights under their names.


@dataclasses.dataclass(frozen=True)
class WeightSet:
    """Weights that go into one set of files.

    `tensors` share the memory of the model. `folder` and `file` are where the libraries that load the files look.
    """

    tensors: Mapping[str, torch.Tensor]
    folder: str = ""
    file: str = "model"
    may_shard: bool = True


def is_adapter(model: nn.Module) -> bool:
    """Whether a model is a PEFT model, of which only the adapters are saved."""
    return any(cls.__name__ == "PeftModel" for cls in type(model).__mro__)


def weights_of(model: nn.Module) -> list[WeightSet]:
    """The tensors of a model that a checkpoint holds. Raises CheckpointError for a value that it cannot hold."""
    if not is_adapter(model):
        sets = [WeightSet(model.state_dict())]
    else:
        from peft import get_peft_model_state_dict

        sets = [
            WeightSet(
                get_peft_model_state_dict(model, adapter_name=adapter),
                folder="" if adapter == _DEFAULT_ADAPTER else f"{adapter}/",
                file="adapter_model",
                may_shard=False,  # peft reads one file
            )
            for adapter in model.peft_config  # type: ignore[union-attr]
        ]
    for one in sets:
        if not is_inside(f"{one.folder}x"):
            raise CheckpointError(f"the adapter {one.folder[:-1]!r} cannot have a folder in a checkpoint; rename it.")
        for key, value in one.tensors.items():
            require_storable(value, f"{key!r} of the model's state dict")
    return sets


def description(model: nn.Module) -> dict[str, str]:
    """The class of a model, and whether its checkpoint holds the whole model or an adapter."""
    return {"class": type(model).__name__, "kind": "adapter" if is_adapter(model) else "full"}


# Capturing the state of a run.


@dataclasses.dataclass
class Contents:
    """The state of a training run at one moment. The tensors share the memory that training uses."""

    weight_sets: list[tuple[WeightSet, list[Source]]]
    optimizer_tensors: list[Source]
    aliases: dict[str, str]
    values: dict[str, Any]  # everything that is not a large tensor
    step: int  # number of optimizer steps since the model was wrapped
    model: dict[str, str]


class _Layers:
    """The records of a group by the memory of their weights, and the order in which layers are written.

    The last layer comes first: its gradients land first, so the next step needs to write it first.
    """

    def __init__(self, group: Group) -> None:
        self.in_order = [(store, layer) for store in reversed(group.stores) for layer in reversed(store.layers)]
        self.homes = {record: (store, layer.layer_id) for store, layer in self.in_order for record in layer.at_home}
        self._by_address = {record.weights.data_ptr(): record for record in self.homes if record.weights.numel()}

    def record_of(self, tensor: torch.Tensor) -> ParameterRecord | None:
        """The record whose weights are exactly this tensor, if any."""
        record = self._by_address.get(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        if record is None or record.weights.shape != tensor.shape or record.weights.dtype != tensor.dtype:
            return None
        return record


def capture(
    model: nn.Module,
    group: Group,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
    scaler: HasState | None,
    extra: Any,
    kinds: Sequence[str] | None = None,
) -> Contents:
    """The state of a model whose group is idle. Copies small tensors and refers to large ones.

    kinds: what `master_kinds` gives on each machine; None if this machine is alone.
    """
    layers = _Layers(group)
    share = None if kinds is None or group.machines is None else group.machines.share
    aliases: dict[str, str] = {}
    weights = group.lock.run_user_code(lambda: weights_of(model))  # models inside of it take part in state_dict()
    weight_sets = [(one, _weight_sources(one, layers, aliases)) for one in weights]
    tensors: list[Source] = []
    for at, (record, home) in enumerate(layers.homes.items()):
        kind = Kind.of({each[at] for each in kinds or ()}, record)
        if share is not None and kind in (Kind.HALVED, Kind.FULL):
            tensors += range_sources(record, home, share, is_halved=kind is Kind.HALVED)
        elif share is None or share.rank == 0:
            tensors += _master_sources(record, home)
    values: dict[str, Any] = {
        "extra": extra,
        "random": random_states(),
        "compiled": compiled_sizes(group),
        "roundings": roundings_of(layers.homes),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "optimizer": None,
    }
    if optimizer is not None:
        states, values["optimizer"] = _optimizer_state(optimizer, layers, share)
        tensors += states
        order = {home: position for position, home in enumerate(dict.fromkeys(layers.homes.values()))}
        tensors.sort(key=lambda source: len(order) if source.layer is None else order[source.layer])
    step, about = group.stepper.steps_issued, description(model)
    return Contents(weight_sets, tensors, aliases, values, step, about)


def master_kinds(group: Group) -> str:
    """How this machine holds each master: a character per parameter, in the order of the layers in a checkpoint."""
    return "".join(kind_of(record).value for record in _Layers(group).homes)


def _weight_sources(weights: WeightSet, layers: _Layers, aliases: dict[str, str]) -> list[Source]:
    """The weights in the order of writing. A tensor with several keys is saved under the first; `aliases` has others.

    Tensors other than parameters, such as buffers, are copied: the next call may change them.
    """
    of_layers: dict[ParameterRecord, Source] = {}
    others: list[Source] = []
    for key, tensor in weights.tensors.items():
        record, name = layers.record_of(tensor), weights.folder + key
        if record is None:
            others.append(Source(name, tensor.detach().cpu().clone()))
        elif record in of_layers:
            aliases[name] = of_layers[record].name
        else:
            home = layers.homes[record]
            # The library changes the counters of parameters that the host computes with.
            version = None if home[0].is_read_on_host else tensor._version
            of_layers[record] = Source(name, tensor.detach(), home, version)
    return [*(of_layers[record] for record in layers.homes if record in of_layers), *others]


def _master_sources(record: ParameterRecord, home: Home) -> Iterator[Source]:
    """What is needed besides the weights to restore a master bit for bit."""
    master = record.master
    if master is None:
        return
    with master.lock:
        halves = master.halves
        if halves is not None and master.share is not None:
            return  # not updated on any machine yet: it equals the weight
        if halves is not None and halves.weight is record.weights and record.weights.is_contiguous():
            # Halves stay halves: joining them would need twice their memory.
            for prefix, key in ((MASTER_LOW, "low"), (MASTER_TIES, "ties")):
                if key in vars(halves):
                    yield Source(prefix + record.name, vars(halves)[key], home)
            return
        values = master.values() if halves is None else halves.own_values().joined()
    if values.dtype != record.weights.dtype or not torch.equal(values, record.weights):
        yield Source(MASTER + record.name, values, home)


def _optimizer_state(
    optimizer: torch.optim.Optimizer, layers: _Layers, share: Share | None
) -> tuple[list[Source], dict[str, Any]]:
    """The optimizer's tensors, and its options and numbers as plain values."""
    names, sources = names_in(optimizer, layers.homes), list[Source]()
    by_name = {record.name: home for record, home in layers.homes.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for param, state in optimizer.state.items():
        if id(param) not in names:
            kind = f"tensor of shape {list(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise CheckpointError(
                f"{type(optimizer).__name__} has a state for a {kind}, which is not one of its parameters; a "
                "checkpoint holds the states of parameters alone."
            )
        name = names[id(param)]
        home = by_name.get(name)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                require_storable(value, f"{key!r} of the optimizer's state of {name!r}")
                place = None if share is None else place_of(key, value, param)
                if share is not None and (not value.numel() if place is not None else share.rank > 0):
                    continue  # another machine has the values
                # A parameter that is not the model's can be updated at any time: its state is copied now.
                tensor = value.detach() if home is not None else value.detach().cpu().clone()
                sources.append(Source(f"{STATE}{key}/{name}", tensor, home, tensor._version, place))
            else:
                is_tensor = isinstance(value, torch.Tensor)
                numbers.setdefault(name, {})[key] = value.detach().clone() if is_tensor else copy.deepcopy(value)
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}}
        | {"params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return sources, {"class": type(optimizer).__name__, "groups": copy.deepcopy(groups), "numbers": numbers}


def check_optimizer_values(saved: Any) -> None:
    """Raise ValueError unless `saved` has the form of what `_optimizer_state` gives, or is None."""
    if saved is None:
        return
    groups, numbers = saved["groups"], saved["numbers"]
    is_sound = isinstance(saved["class"], str) and isinstance(groups, list) and isinstance(numbers, dict)
    for group in groups if is_sound else ():
        is_sound &= isinstance(group, dict) and all(isinstance(key, str) for key in group)
        is_sound = is_sound and isinstance(group["params"], list) and all(isinstance(n, str) for n in group["params"])
    if not is_sound or not all(isinstance(each, dict) for each in numbers.values()):
        raise ValueError("the state of the optimizer has another form")


def names_in(optimizer: torch.optim.Optimizer, records: Mapping[ParameterRecord, Any]) -> dict[int, str]:
    """The names of an optimizer's parameters by id: those of the model, else their position in the optimizer."""
    named = {id(record.param): record.name for record in records}
    named |= {id(record.master): record.name for record in records if record.master is not None}
    names: dict[int, str] = {}
    for group_id, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if isinstance(param, OptimizerCopy) and id(param) not in named:
                raise CheckpointError(
                    f"parameter {position} of the optimizer's group {group_id} belongs to another model than the one "
                    "given; save each model with its own optimizer."
                )
            names[id(param)] = named.get(id(param), f"other.{group_id}.{position}")
    return names


# Random number generators.


def compiled_sizes(group: Group) -> list[Any]:
    """The sizes that each model of a group has compiled, in their order; None for models that compile nothing."""
    return [None if member.compiling is None else member.compiling.state() for member in group.members]


def set_compiled_sizes(group: Group, saved: Sequence[Any]) -> None:
    """Continue with the sizes of a checkpoint, if it was saved with as many models."""
    if len(saved) == len(group.members):
        for member, state in zip(group.members, saved, strict=True):
            if member.compiling is not None and state is not None:
                member.compiling.take_over(state)


def check_compiled_sizes(saved: Sequence[Any]) -> None:
    """Raise if `set_compiled_sizes` would."""
    for state in saved:
        if state is not None:
            Compiling(PartsToCompile(None, nn.Module())).take_over(state)


def random_states() -> dict[str, Any]:
    """The states of the generators of torch, Python, numpy (if it is imported) and the devices."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "devices": generator_states(),
        "numpy": None,
    }
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *rest)
    return states


def check_random_states(states: Mapping[str, Any]) -> None:
    """Raise if `set_random_states` would: set generators that are not used otherwise."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(states["python"])
    if not all(state.dtype is torch.uint8 and state.dim() == 1 for state in states["devices"]):
        raise ValueError("the state of a device's generator is no tensor of bytes")
    _set_numpy_state(states["numpy"], lambda numpy: numpy.random.RandomState())


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators to states of `random_states`. A generator that does not exist here is left out."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    set_generator_states(states["devices"])
    _set_numpy_state(states["numpy"], lambda numpy: numpy.random)


def _set_numpy_state(saved: Any, generator: Callable[[Any], Any]) -> None:
    """Set a generator of numpy, which `generator` gets from the module, if a state is saved and numpy is installed."""
    if saved is not None:
        with contextlib.suppress(ImportError):
            import numpy

            kind, keys, *rest = saved
            generator(numpy).set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


# The files of the tensors.

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
            entry = entry_from_json(name, data)
            known = tensors[group].get(name)
            if known is not None and sum(piece.num_bytes for piece in known.pieces) >= known.num_bytes:
                continue  # a vector of one range: its machine cannot tell the range from the whole
            if known is not None:
                entry = dataclasses.replace(known, pieces=(*known.pieces, *entry.pieces))
            tensors[group][name] = entry
    return tensors


def check_names(files: Mapping[str, str]) -> None:
    """Refuse further files that would lie outside of the checkpoint or replace one of its files."""
    for name in files:
        path = PurePosixPath(name)
        if not is_inside(name):
            raise ConfigError(f"files has the name {name!r}, which does not lie inside of the checkpoint's folder.")
        if path.suffix == ".safetensors" or str(path) in (MANIFEST, STATE_FILE):
            raise ConfigError(f"files has the name {name!r}, which the checkpoint itself uses; choose another one.")


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
        packed = own_settings(model)
        if packed is not None:
            config.quantization_config = packed
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            write_generation_config(folder, model.generation_config)
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
