"""What the store knows of each layer, parameter and buffer of the wrapped model.

Filled by layer_store, read by runtime (replicas, uploads) and optim (masters, gradients). No threads, no devices.

The user's names of parameters and modules, for messages.

The layers of a model that was split or converted have other names than the model the user handed in.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import nn

from roundpipe.split.stubs import PATH
from roundpipe.store.host_memory import HostBuffer, LandingBuffer
from roundpipe.store.layout import Layout, TensorPlace
from roundpipe.store.master import OptimizerCopy
from roundpipe.store.slot import WeightBuffer


def user_names(model: nn.Module) -> dict[int, str]:
    """By id: the name of every parameter and the path of every module of the user's model."""
    names = {id(module): path for path, module in model.named_modules()}
    return names | {id(param): name for name, param in model.named_parameters()}


def path_of(module: nn.Module, names: Mapping[int, str], local_path: str) -> str:
    """Where the user finds a module; `local_path`, its path in its layer, where the user has no such module."""
    path: str = module.__dict__.get(PATH, local_path)  # of the module that a copy or a stub was made of
    return names.get(id(module), path)


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A sum of gradients, and the landing buffer it lies in, if it does."""

    tensor: torch.Tensor
    buffer: LandingBuffer | None = None

    def let_go(self) -> None:
        if self.buffer is not None:
            self.buffer.let_go()


@dataclasses.dataclass(eq=False)
class ParameterRecord:
    """One parameter, however many names and layers it has. Its weights and gradient live with its home layer."""

    name: str
    param: nn.Parameter
    home: int
    weights: torch.Tensor  # host memory that devices read; shares storage with `param`, not its version counter
    back: torch.Tensor | None = None  # a second such memory, for weights that are made while these are read
    cuts: tuple[int, ...] = ()  # bytes before which a copy of `weights` must be cut
    seen_version: int = 0  # of `param`: a higher one means the user wrote into it
    master: OptimizerCopy | None = None  # the optimizer's copy
    gathered: Gathered | None = None  # the sum of gradients so far, not yet consumed
    exposed: bool = False  # whether `param.grad` was set to it for the user to see

    def memory(self, buffer: WeightBuffer) -> torch.Tensor:
        """Where this parameter lies in a buffer; one that has no second memory never changes."""
        return self.back if buffer is WeightBuffer.BACK and self.back is not None else self.weights

    def is_untouched(self) -> bool:
        """Whether `param` still is the view of our memory it was made."""
        return self.param.data_ptr() == self.weights.data_ptr() and self.param.dtype == self.weights.dtype


@dataclasses.dataclass(eq=False)
class BufferRecord:
    """One buffer of one layer; a frozen copy is what devices read, so that a later write cannot reach a recompute."""

    owner: nn.Module
    key: str
    name: str  # in the user's model
    shared_between_layers: bool = False
    _frozen: torch.Tensor | None = None
    _frozen_of: torch.Tensor | None = None
    _frozen_version: int = -1

    def tensor(self) -> torch.Tensor | None:
        return self.owner._buffers[self.key]

    def frozen(self) -> torch.Tensor | None:
        """An immutable copy of the present value, the same object for as long as the value does not change."""
        current = self.tensor()
        if current is None:
            return None
        version = 0 if current.is_inference() else current._version
        if self._frozen is None or self._frozen_of is not current or self._frozen_version != version:
            self._frozen, self._frozen_of, self._frozen_version = current.detach().clone(), current, version
        return self._frozen

    def write(self, value: torch.Tensor | None) -> None:
        """Let a value computed by a layer's forward become the host's."""
        current = self.tensor()
        with torch.no_grad():
            if value is None or current is None or _differs(current, value):
                self.owner._buffers[self.key] = value
            else:
                current.copy_(value)


def _cut(
    place: TensorPlace, image: torch.Tensor, record: ParameterRecord, buffer: WeightBuffer
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies that fill one parameter's place: one, or by bytes what lies between its cuts."""
    memory = record.memory(buffer)
    if not record.cuts or memory is not record.weights:
        return [(place.view(image), memory)]
    weights, size = record.weights, record.weights.nbytes
    storage, offset = weights.untyped_storage(), weights.storage_offset() * weights.itemsize
    host = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))
    there = image[place.offset_bytes : place.offset_bytes + size]
    return [(there[a:b], host[a:b]) for a, b in itertools.pairwise((0, *record.cuts, size))]


def _differs(current: torch.Tensor, value: torch.Tensor) -> bool:
    return current.shape != value.shape or current.dtype != value.dtype


@dataclasses.dataclass(eq=False)
class LayerRecord:
    """One layer: its module, each parameter and buffer once, and where the weights lie in the layer's flat image.

    Parameters at home in this layer come first; where `flat` is given it holds exactly those, laid out as the image.
    `back` is a second buffer for those that train.
    """

    layer_id: int
    module: nn.Module
    parameters: list[ParameterRecord]
    buffers: list[BufferRecord]
    image: Layout
    flat: HostBuffer | None = None
    back: HostBuffer | None = None

    def upload_pieces(
        self, image: torch.Tensor, buffer_of_home: Callable[[int], WeightBuffer]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the device image, host memory) for every copy that fills a layer's image.

        `buffer_of_home`: which buffer of a layer holds the wanted version.
        """
        pieces, in_flat = [], set()
        flat, own_buffer = self.flat, buffer_of_home(self.layer_id)
        if own_buffer is WeightBuffer.BACK and self.back is not None and len(self.back) == len(self.flat or ()):
            flat = self.back  # every parameter trains: it is laid out as `flat`
        if flat is not None and len(flat):
            pieces.append((image[: len(flat)], flat.tensor))
            in_flat = {
                r for r in self.at_home if flat is self.back or own_buffer is WeightBuffer.FRONT or r.back is None
            }
        for record, place in zip(self.parameters, self.image.places, strict=True):
            if record not in in_flat and place.num_bytes:
                pieces += _cut(place, image, record, buffer_of_home(record.home))
        return pieces

    @property
    def at_home(self) -> list[ParameterRecord]:
        return [record for record in self.parameters if record.home == self.layer_id]

    @property
    def homes(self) -> set[int]:
        """The layers whose slots guard the memory this layer reads: itself, and the homes of shared parameters."""
        return {self.layer_id} | {record.home for record in self.parameters}

    @property
    def weight_bytes(self) -> int:
        return sum(record.weights.nbytes for record in self.parameters)

    @property
    def trainable(self) -> list[ParameterRecord]:
        return [record for record in self.parameters if record.param.requires_grad]
