"""Takes a model into the store when it is wrapped, and checks later that its modules have not changed.

Wrapping refuses tensors that cannot be kept or trained, moves the parameters into memory of the store, and records
which store owns which parameter. Parameters remain the same objects: only their memory changes. Knows no device beyond
the pinner of host memory.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from roundpipe.devices import HostPinner
from roundpipe.errors import ConfigError, ModelChangedError, OwnershipError
from roundpipe.module_names import joined, path_of
from roundpipe.store.host_memory import HostBuffer, lay_out, require_host_memory
from roundpipe.store.records import BufferRecord, LayerRecord, ParameterRecord
from roundpipe.store.training_memory import PinMode

# Checks that tensors can be kept and trained.

# Names that a subclass of nn.Parameter may define. A plain parameter on a device computes the same without them.
_HARMLESS_NAMES = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate_func__"),
        *("__new__", "__init__", "__repr__", "__reduce__", "__reduce_ex__", "__deepcopy__", "__slots__"),
        *("__firstlineno__", "__static_attributes__", "__orig_bases__", "__parameters__"),
    }
)
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)


def refuse_unusable(layers: Sequence[nn.Module], names: Mapping[int, str]) -> None:
    """Raise ConfigError for a layer, parameter or buffer that the store cannot keep or a device cannot run.

    `names`: the user's names of parameters and modules, by id.
    """
    for layer_id, layer in enumerate(layers):
        for local_path, module in layer.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                where = f"submodule {path_of(module, names, local_path)!r} of layer" if local_path else "layer"
                raise ConfigError(
                    f"{where} {layer_id} is a {type(module).__name__}, whose code is tied to its own tensors and "
                    "cannot run on copies of them; wrap the plain module it was made from."
                )
        for local_name, param in layer.named_parameters():
            _check_tensor(f"parameter {names.get(id(param), local_name)!r} of layer {layer_id}", param)
        for local_path, module in layer.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full_name = joined(path_of(module, names, local_path), name)
                _check_tensor(f"buffer {full_name!r} of layer {layer_id}", buffer)
    # The dict contains each parameter once, even if several layers use it.
    _refuse_shared_memory({id(p): p for layer in layers for p in layer.parameters()}.values(), names)


def refuse_special_tensors(model: nn.Module) -> None:
    """Raise ConfigError for quantised tensors and tensor subclasses: a copy of their bytes would lose information."""
    for name, param in model.named_parameters():
        _check_kind(f"parameter {name!r}", param)
    for name, buffer in model.named_buffers():
        _check_kind(f"buffer {name!r}", buffer)


def _check_kind(what: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError unless a plain tensor with the same bytes, which is what devices get, has the same values."""
    if is_lazy(tensor):
        return
    if tensor.is_quantized:
        raise ConfigError(
            f"{what} is a quantised tensor ({tensor.dtype}); its scales do not travel to devices. Wrap the model "
            "before quantising it, or replace the weight by its dequantize()."
        )
    lost = _lost_on_a_device(tensor)
    if lost:
        kind = type(tensor)
        raise ConfigError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass that adds {lost}; a plain copy on a "
            "device does not have these, and layers would compute with the wrong numbers or fail. Load the model in "
            "a plain dtype such as torch.bfloat16 (without quantization_config), call model.dequantize() if it "
            "has that method, or convert the weight to an ordinary nn.Parameter, before wrapping it."
        )


def _lost_on_a_device(tensor: torch.Tensor) -> str:
    """The attributes and methods that a tensor subclass adds to a plain tensor, as text; empty if there are none."""
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        return ""
    own = [cls for cls in kind.__mro__ if issubclass(cls, torch.Tensor) and cls not in _PLAIN_TYPES]
    members = {name: value for cls in own for name, value in vars(cls).items() if name not in _HARMLESS_NAMES}
    names = [name for name, value in members.items() if value is not torch._C._disabled_torch_function_impl]
    attributes = [name for name in vars(tensor) if not name.startswith(("_is_", "_roundpipe_"))]
    return ", ".join([*sorted(attributes), *sorted(names)][:5])


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError unless a tensor is plain, dense, initialised and in host memory."""
    if is_lazy(tensor):
        raise ConfigError(f"{what} is not initialised; run the model once on a small batch before wrapping it.")
    _check_kind(what, tensor)
    if tensor.device.type == "meta":
        raise ConfigError(
            f"{what} is on meta and holds no values; load the model on the CPU, or call model.to_empty(device='cpu') "
            "and fill it, before wrapping it."
        )
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"{what} is on {tensor.device}; RoundPipe keeps weights in host memory: build or load the model on the CPU."
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"{what} is {tensor.layout}; only dense tensors can be copied to devices: convert it with to_dense()."
        )


def _refuse_shared_memory(params: Iterable[nn.Parameter], names: Mapping[int, str]) -> None:
    """Raise ConfigError for two parameter objects over the same memory: they would be trained separately.

    One parameter object that the model uses in two places is allowed and is trained once.
    """
    by_address: dict[int, nn.Parameter] = {}
    for param in params:
        first = by_address.setdefault(param.data_ptr(), param) if param.numel() else param
        if first is not param and (first.requires_grad or param.requires_grad):
            raise ConfigError(
                f"parameters {names.get(id(first))!r} and {names.get(id(param))!r} are two objects over the same "
                "memory and would be trained separately; before wrapping, assign the same nn.Parameter in both places, "
                "or clone() the second."
            )


# Moving the weights into the store and making the records.

_MOVE_ADVICE = 'Free memory, use a lower precision, or pass pin_model="off" for memory-mapped weights.'


def adopt(
    layers: Sequence[nn.Module], names: Mapping[int, str], mode: PinMode, pinner: HostPinner
) -> list[LayerRecord]:
    """Make the records of all layers. With PinMode.ALLOC, also move each layer's weights into one flat buffer.

    `names`: the user's names of parameters and modules, by id.
    """
    seen: dict[int, ParameterRecord] = {}
    shared_buffers = _buffers_in_several_layers(layers)
    records: list[LayerRecord] = []
    try:
        for layer_id, layer in enumerate(layers):
            # Layer by layer, so that at most one layer's weights exist twice while they are moved.
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
        # Weights that were moved stay in the new memory, unpinned. Moving them back could run out of memory as well.
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
    """Make the records of a new division of the same parameters into layers. The parameters' memory does not move.

    A layer with exactly the parameters of a former layer keeps the flat buffers of that layer. The weights of other
    layers are uploaded parameter by parameter.
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


def _home_and_foreign(
    layer: nn.Module, layer_id: int, names: Mapping[int, str], seen: dict[int, ParameterRecord]
) -> tuple[list[ParameterRecord], list[ParameterRecord]]:
    """Return two lists of a layer's records: new ones, and those of parameters that an earlier layer uses too."""
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
    """Move the weights of a layer into one new buffer."""
    layout = lay_out([record.param for record in records])
    require_host_memory({"this layer's weights": layout.total_bytes}, "a layer's weights", _MOVE_ADVICE)
    flat = HostBuffer(layout.total_bytes, pinner)
    for record, view in zip(records, flat.views(layout), strict=True):
        with torch.no_grad():
            view.copy_(record.param)
        record.param.data = view
        record.weights = record.param.data  # a second tensor: writing to it does not change `param._version`
    return flat


def _buffers_in_several_layers(layers: Sequence[nn.Module]) -> set[int]:
    """The ids of buffers that more than one layer uses."""
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


# Which store owns which parameter.

# The owning store by id of the parameter. A store keeps its parameters alive, so an id is valid as long as its entry
# exists. The owner is not an attribute of the parameter, because it would be pickled and copied with the parameter.
_owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def claim(records: Sequence[ParameterRecord], owner: object) -> None:
    """Make `owner`, a LayerStore, the owner of parameters."""
    for record in records:
        _owners[id(record.param)] = owner


def release(records: Sequence[ParameterRecord], owner: object) -> None:
    """Undo `claim` for the parameters that `owner` still owns."""
    for record in records:
        if _owners.get(id(record.param)) is owner:
            del _owners[id(record.param)]


def refuse_owned(model: nn.Module) -> None:
    """Raise OwnershipError if a parameter of the model belongs to a store."""
    for name, param in model.named_parameters():
        if owner_of(param) is not None:
            raise OwnershipError(
                f"parameter {name!r} (shape {tuple(param.shape)}) already belongs to another RoundPipe; close that one "
                "first, or wrap the models that share it as one model."
            )


def owner_of(param: torch.Tensor) -> object | None:
    """The LayerStore that owns a parameter, or None. In a forked child, stores of the parent own nothing."""
    owner = _owners.get(id(param))
    return owner if getattr(owner, "pid", None) == os.getpid() else None


# Detection of changes to modules after wrapping.

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class _ModuleParts:
    """The members of one module when the model was wrapped."""

    path: str
    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    children: dict[str, nn.Module | None]
    buffer_names: frozenset[str]

    def are_unchanged(self) -> bool:
        module = self.module
        return (
            _same(module._parameters, self.parameters)
            and _same(module._modules, self.children)
            and module._buffers.keys() == self.buffer_names
        )


class Composition:
    """The modules of one layer and their members when the model was wrapped.

    Devices run copies of these modules, so they would silently ignore a parameter or submodule that was added after
    wrapping. Checks compare the identities of members, never values.
    """

    def __init__(self, layer: LayerRecord, names: Mapping[int, str]) -> None:
        """`names`: the user's names of parameters and modules, by id."""
        self._layer_id = layer.layer_id
        self._names = {id(record.param): record.name for record in layer.parameters}
        self._parts = [
            _ModuleParts(
                path_of(module, names, path),
                module,
                dict(module._parameters),
                dict(module._modules),
                frozenset(module._buffers.keys()),
            )
            for path, module in layer.module.named_modules()
        ]

    def check(self) -> None:
        """Raise ModelChangedError if parameters, submodules or names of buffers differ from those at wrapping."""
        for parts in self._parts:
            if not parts.are_unchanged():
                self._raise_change(parts)

    def _raise_change(self, parts: _ModuleParts) -> None:
        module, where = parts.module, f"of layer {self._layer_id}"
        for key, param in parts.parameters.items():
            if param is not None and module._parameters.get(key) is not param:
                raise ModelChangedError(
                    f"parameter {self._names[id(param)]!r} {where} was replaced or removed after wrapping; copy new "
                    "values into the parameter (or load_state_dict without assign=True). To resize or exchange it, do "
                    "so before wrapping, or close() and wrap the model again."
                )
        added = [f"parameter {joined(parts.path, key)!r}" for key in _other_keys(module._parameters, parts.parameters)]
        added += [f"submodule {joined(parts.path, key)!r}" for key in _other_keys(module._modules, parts.children)]
        added += [f"buffer {joined(parts.path, key)!r}" for key in sorted(module._buffers.keys() ^ parts.buffer_names)]
        raise ModelChangedError(
            f"{added[0]} {where} was added, replaced or removed after wrapping; change the model before wrapping it, "
            "or close() and wrap it again."
        )


def _same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    if len(now) != len(then):
        return False
    # Fast path without Python code per key, if the order is the same: every call compares all modules of the model.
    if all(map(operator.is_, now.values(), then.values())) and list(now) == list(then):
        return True
    return all(now.get(key, _MISSING) is value for key, value in then.items())


def _other_keys(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """The keys that only one mapping has, or whose values differ."""
    keys = {**now, **then}
    return [key for key in keys if now.get(key, _MISSING) is not then.get(key, _MISSING)]
