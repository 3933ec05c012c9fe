"""What a checkpoint holds: which tensors of a model and its optimizer are saved under which names, and all other state.

`weights_of` and `capture` are called while nothing runs on the model. Knows no files.

[Note: names in a checkpoint] The group "weights" has the keys of the state dict (of a PEFT model: those of its
adapters, the base model is not saved). The group "optimizer" has the parameter's name behind a prefix:
`state/exp_avg/NAME` for the optimizer's tensors, `master/NAME` for a master in full, `master.low/NAME` and
`master.ties/NAME` for a halved master, whose high half is the weight. A master that equals its weight is not saved.

[Note: ranges of machines] With a process group, every machine saves its range of masters and moments as one piece of
the tensor NAME; the manifest joins the pieces, so a reader sees whole tensors. The ranges of a weight whose memory is
not in row-major order are saved in the order of its memory, which the manifest names. `master.ties` has one bit per
value, and ranges do not begin at bytes. So each machine has a tensor for itself: `master.ties.START/NAME`, where START
is the number of the range's first value. Tensors that all machines have in full are saved by rank 0, files of weights
by all machines in turn.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe.api.group import Group
from roundpipe.checkpoint.format import DTYPES
from roundpipe.devices import generator_states, set_generator_states
from roundpipe.errors import CheckpointError
from roundpipe.store import HalvedMaster, LayerStore, OptimizerCopy, ParameterRecord, Share
from roundpipe.store.values import ShardedMaster, flat

STATE = "state/"
MASTER, MASTER_LOW, MASTER_TIES, RANGED_TIES = "master/", "master.low/", "master.ties/", "master.ties."
_Home = tuple[LayerStore, int]
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
        for key, value in one.tensors.items():
            _check_kind(f"{key!r} of the model's state dict", value)
    return sets


def _check_kind(what: str, value: object) -> None:
    """Raise CheckpointError if a checkpoint cannot hold a value as a tensor."""
    if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or value.layout is not torch.strided:
        kind = f"{value.dtype}, {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise CheckpointError(f"{what} is a {kind}, which a checkpoint cannot hold.")


def description(model: nn.Module) -> dict[str, str]:
    """The class of a model, and whether its checkpoint holds the whole model or an adapter."""
    return {"class": type(model).__name__, "kind": "adapter" if is_adapter(model) else "full"}


# Capturing the state of a run.


@dataclasses.dataclass(frozen=True)
class Range:
    """Where a flat tensor lies in a whole tensor: from element `start` on, in the order of `stride` if it is given."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None

    @classmethod
    def of(cls, share: Share, whole: torch.Tensor) -> Range:
        """This machine's range of a tensor with the shape and memory order of `whole`."""
        stride = None if whole.is_contiguous() else tuple(whole.stride())
        return cls(share.range_of(whole.numel()).start, tuple(whole.shape), stride)


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor to save. `layer`: the store and layer that must not change until the tensor is written."""

    name: str
    tensor: torch.Tensor
    layer: tuple[LayerStore, int] | None = None
    version: int | None = None  # version counter of the tensor, if only code of the user can change it
    range: Range | None = None  # given if other machines have the rest of the tensor

    @property
    def was_changed(self) -> bool:
        """Whether the user has written into the tensor since it was captured."""
        return self.version is not None and self.tensor._version != self.version


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
        kind = _Kind.of({each[at] for each in kinds or ()}, record)
        if share is not None and kind in (_Kind.HALVED, _Kind.FULL):
            tensors += _range_sources(record, home, share, is_halved=kind is _Kind.HALVED)
        elif share is None or share.rank == 0:
            tensors += _master_sources(record, home)
    values: dict[str, Any] = {
        "extra": extra,
        "random": random_states(),
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


def _master_sources(record: ParameterRecord, home: _Home) -> Iterator[Source]:
    """What is needed besides the weights to restore a master bit for bit."""
    master = record.master
    if master is None:
        return
    with master.lock:
        halves = master.halves
        if isinstance(halves, ShardedMaster):
            return  # not updated on any machine yet: it equals the weight
        if halves is not None and halves.weight is record.weights and record.weights.is_contiguous():
            # Halves stay halves: joining them would need twice their memory.
            for prefix, key in ((MASTER_LOW, "low"), (MASTER_TIES, "ties")):
                if key in vars(halves):
                    yield Source(prefix + record.name, vars(halves)[key], home)
            return
        values = master.values() if halves is None else halves.joined()
    if values.dtype != record.weights.dtype or not torch.equal(values, record.weights):
        yield Source(MASTER + record.name, values, home)


# Masters that several machines divide between them.


class _Kind(enum.Enum):
    """How a machine holds the values of a master; the values are what machines send each other."""

    EQUAL = "-"  # there is no master, or its values are those of the weight
    HALVED = "h"  # its range, in halves
    FULL = "f"  # its range, as float32 values
    WHOLE = "w"  # all values

    @classmethod
    def of(cls, found: set[str], record: ParameterRecord) -> _Kind:
        """How all machines save a master, from how each of them holds it. EQUAL and WHOLE are saved by one machine."""
        kinds = {cls(each) for each in found}
        if len(kinds) <= 1 and not kinds & {cls.HALVED, cls.FULL}:
            return kinds.pop() if kinds else cls.EQUAL
        is_halved = kinds <= {cls.HALVED, cls.EQUAL} and record.weights.is_contiguous()
        return cls.HALVED if is_halved else cls.FULL


def master_kinds(group: Group) -> str:
    """How this machine holds each master: a character per parameter, in the order of the layers in a checkpoint."""
    return "".join(_kind_of(record).value for record in _Layers(group).homes)


def _kind_of(record: ParameterRecord) -> _Kind:
    master = record.master
    if master is None:
        return _Kind.EQUAL
    with master.lock:
        halves = master.halves
        if halves is None or isinstance(halves, HalvedMaster):
            if master.share is None:
                return _Kind.WHOLE
            values = master.values() if halves is None else halves.joined()
            return _Kind.EQUAL if torch.equal(values, record.weights.to(values.dtype)) else _Kind.WHOLE
        if halves.is_complete:
            return _Kind.EQUAL
        own = halves.own_values()
        if isinstance(own, HalvedMaster):
            return _Kind.HALVED
        is_equal = torch.equal(own, flat(record.weights)[_range_in(record, halves.share)].to(own.dtype))
        return _Kind.EQUAL if is_equal else _Kind.FULL


def _range_in(record: ParameterRecord, share: Share) -> slice:
    return share.range_of(record.weights.numel())


def _range_sources(record: ParameterRecord, home: _Home, share: Share, *, is_halved: bool) -> Iterator[Source]:
    """This machine's range of a master: see [Note: ranges of machines]."""
    master, place = record.master, Range.of(share, record.weights)
    if master is None or not share.count_of(record.weights.numel()):
        return
    with master.lock:
        halves = master.halves
        own = halves.own_values() if isinstance(halves, ShardedMaster) else None
        if is_halved:
            assert isinstance(own, HalvedMaster)
            low = own.low if "low" in vars(own) else torch.zeros(own.weight.numel(), dtype=torch.int16)
            place = dataclasses.replace(place, shape=(record.weights.numel(),))
            yield Source(MASTER_LOW + record.name, low, home, range=place)
            if "ties" in vars(own):
                yield Source(f"{RANGED_TIES}{place.start}/{record.name}", own.ties, home)
            return
        if own is None:
            whole = halves.joined() if isinstance(halves, HalvedMaster) else master.values()
            own = flat(whole)[_range_in(record, share)]
        yield Source(MASTER + record.name, own.joined() if isinstance(own, HalvedMaster) else own, home, range=place)


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
                _check_kind(f"{key!r} of the optimizer's state of {name!r}", value)
                place = None if share is None else _place_of(value, param)
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


def _place_of(state: torch.Tensor, param: Any) -> Range | None:
    """The range of a tensor of an optimizer's state in the whole one; None if this machine has the whole one."""
    if not isinstance(param, OptimizerCopy) or param.share is None:
        return None
    if state.shape != (param.share.count_of(param.numel()),):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return Range.of(param.share, param)


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
    _ = states["devices"]
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
