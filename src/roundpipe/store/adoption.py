"""Takes a model's parameters into our keeping: finds them, lays them out, moves them, pins them.

Called once by LayerStore. After it a parameter is a view of memory the store knows; its identity does not change.
"""

from __future__ import annotations

import enum
import os
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from roundpipe.devices import HostPinner
from roundpipe.errors import OwnershipError
from roundpipe.store.host_buffer import HostBuffer
from roundpipe.store.host_memory import require_host_memory
from roundpipe.store.layout import lay_out
from roundpipe.store.names import joined, path_of
from roundpipe.store.records import BufferRecord, LayerRecord, ParameterRecord

# By id of a parameter. An owner keeps its parameters alive, so an id is valid for as long as its entry exists. The
# parameters themselves carry no mark: they stay as easy to pickle and to copy as any other.
_owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_ADVICE = 'Free memory, use a lower precision, or pass pin_model="off" for memory-mapped weights.'


class PinMode(enum.Enum):
    """alloc: move weights into pinned memory; register: pin them where they are; off: leave them."""

    ALLOC = "alloc"
    REGISTER = "register"
    OFF = "off"


def adopt(
    layers: Sequence[nn.Module], names: Mapping[int, str], mode: PinMode, pinner: HostPinner
) -> list[LayerRecord]:
    """Records of all layers; with `PinMode.ALLOC` each layer's weights now lie in one flat buffer.

    `names`: what the user calls each parameter and module, by id.
    """
    seen: dict[int, ParameterRecord] = {}
    shared_buffers = _buffers_in_several_layers(layers)
    records: list[LayerRecord] = []
    try:
        for layer_id, layer in enumerate(layers):
            own, foreign = _home_and_foreign(layer, layer_id, names, seen)
            flat = _move_into_flat(own, pinner) if mode is PinMode.ALLOC else None
            parameters = own + foreign
            record = LayerRecord(
                layer_id=layer_id,
                module=layer,
                parameters=parameters,
                buffers=_buffer_records(layer, shared_buffers, names),
                image=lay_out([parameter.weights for parameter in parameters]),
                flat=flat,
            )
            records.append(record)
    except BaseException:
        # Weights that have moved stay, as ordinary memory: moving them back would take memory that is not there.
        for record in records:
            if record.flat is not None:
                record.flat.close()
        raise
    return records


def rearrange(
    layers: Sequence[nn.Module],
    names: Mapping[int, str],
    known: Sequence[ParameterRecord],
    before: Sequence[LayerRecord],
) -> list[LayerRecord]:
    """Records of other layers over the same parameters, which stay where they are in memory.

    A layer that has just the parameters a former one had keeps its flat buffers; others are uploaded piece by piece.
    """
    by_param = {id(record.param): record for record in known}
    former = {tuple(map(id, layer.at_home)): layer for layer in before}
    shared_buffers = _buffers_in_several_layers(layers)
    homes: dict[ParameterRecord, int] = {}
    records: list[LayerRecord] = []
    for layer_id, layer in enumerate(layers):
        parameters = [by_param[id(param)] for param in layer.parameters()]
        own = [record for record in parameters if homes.setdefault(record, layer_id) == layer_id]
        foreign = [record for record in parameters if homes[record] != layer_id]
        old = former.get(tuple(map(id, own)))
        records.append(
            LayerRecord(
                layer_id=layer_id,
                module=layer,
                parameters=own + foreign,
                buffers=_buffer_records(layer, shared_buffers, names),
                image=lay_out([record.weights for record in own + foreign]),
                flat=None if old is None else old.flat,
                back=None if old is None else old.back,
            )
        )
    for record, home in homes.items():
        record.home = home
    return records


def claim(records: Sequence[ParameterRecord], owner: object) -> None:
    for record in records:
        _owners[id(record.param)] = owner


def release(records: Sequence[ParameterRecord], owner: object) -> None:
    for record in records:
        if _owners.get(id(record.param)) is owner:
            del _owners[id(record.param)]


def refuse_owned(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if owner_of(param) is not None:
            raise OwnershipError(
                f"parameter {name!r} (shape {tuple(param.shape)}) already belongs to another RoundPipe; close that one "
                "first, or wrap the models that share it as one model."
            )


def owner_of(param: torch.Tensor) -> object | None:
    """The LayerStore that a parameter belongs to, if any; one that a forked child has inherited does not count."""
    owner = _owners.get(id(param))
    return owner if getattr(owner, "pid", None) == os.getpid() else None


def _home_and_foreign(
    layer: nn.Module, layer_id: int, names: Mapping[int, str], seen: dict[int, ParameterRecord]
) -> tuple[list[ParameterRecord], list[ParameterRecord]]:
    own, foreign = [], []
    for local_name, param in layer.named_parameters():
        if id(param) in seen:
            foreign.append(seen[id(param)])
            continue
        record = ParameterRecord(names.get(id(param), local_name), param, layer_id, param.data)
        record.seen_version = param._version
        seen[id(param)] = record
        own.append(record)
    return own, foreign


def _move_into_flat(records: Sequence[ParameterRecord], pinner: HostPinner) -> HostBuffer:
    layout = lay_out([record.param for record in records])
    require_host_memory({"this layer's weights": layout.total_bytes}, "a layer's weights", _ADVICE)
    flat = HostBuffer(layout.total_bytes, pinner)
    for record, view in zip(records, flat.views(layout), strict=True):
        with torch.no_grad():
            view.copy_(record.param)
        record.param.data = view
        record.weights = record.param.data
    return flat


def _buffers_in_several_layers(layers: Sequence[nn.Module]) -> set[int]:
    first_layer: dict[int, int] = {}
    shared = set()
    for layer_id, layer in enumerate(layers):
        for buffer in layer.buffers():
            if first_layer.setdefault(id(buffer), layer_id) != layer_id:
                shared.add(id(buffer))
    return shared


def _buffer_records(layer: nn.Module, shared: set[int], names: Mapping[int, str]) -> list[BufferRecord]:
    records = []
    for local_path, module in layer.named_modules():
        path = path_of(module, names, local_path)
        for key, buffer in module._buffers.items():
            is_shared = buffer is not None and id(buffer) in shared
            records.append(BufferRecord(module, key, joined(path, key), is_shared))
    return records
