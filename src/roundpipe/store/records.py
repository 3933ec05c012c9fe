"""What the store knows of each layer, parameter and buffer of the wrapped model.

Filled by layer_store, read by runtime (replicas, uploads) and optim (masters, gradients). No threads, no devices.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import nn

from roundpipe.store.host_buffer import HostBuffer
from roundpipe.store.layout import Layout, TensorPlace


@dataclasses.dataclass(eq=False)
class ParameterRecord:
    """One parameter, however many names and layers it has. Its weights and gradient live with its home layer."""

    name: str
    param: nn.Parameter
    home: int
    weights: torch.Tensor  # the host memory devices read; shares storage with `param`, not its version counter
    cuts: tuple[int, ...] = ()  # bytes before which a copy of `weights` must be cut
    seen_version: int = 0  # of `param`: a higher one means the user wrote into it
    master: nn.Parameter | None = None  # the optimizer's copy
    host_grad: torch.Tensor | None = None  # memory of the gathered gradient, once there was one
    has_grad: bool = False  # whether host_grad holds something not yet consumed
    exposed: bool = False  # whether `param.grad` was set to host_grad for the user to see

    def is_untouched(self) -> bool:
        """Whether `param` still is the view of our memory it was made."""
        return self.param.data_ptr() == self.weights.data_ptr() and self.param.dtype == self.weights.dtype


@dataclasses.dataclass(eq=False)
class BufferRecord:
    """One buffer of one layer; a frozen copy is what devices read, so that a later write cannot reach a recompute."""

    owner: nn.Module
    key: str
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


def _cut(place: TensorPlace, image: torch.Tensor, record: ParameterRecord) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies that fill one parameter's place: one, or by bytes what lies between its cuts."""
    if not record.cuts:
        return [(place.view(image), record.weights)]
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
    """

    layer_id: int
    module: nn.Module
    parameters: list[ParameterRecord]
    buffers: list[BufferRecord]
    image: Layout
    flat: HostBuffer | None = None

    def upload_pieces(self, image: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the device image, host memory) for every copy that fills a layer's image."""
        pieces, in_flat = [], set()
        if self.flat is not None and self.flat.tensor.numel():
            pieces.append((image[: self.flat.tensor.numel()], self.flat.tensor))
            in_flat = {record for record in self.parameters if record.home == self.layer_id}
        for record, place in zip(self.parameters, self.image.places, strict=True):
            if record not in in_flat and place.num_bytes:
                pieces += _cut(place, image, record)
        return pieces

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
