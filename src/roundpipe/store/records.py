"""Records of the wrapped model: its layers, their parameters and buffers, and gradients in host memory.

Plain data without threads or devices.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import torch
from torch import nn

from roundpipe.store.host_memory import HostBuffer, LandingBuffer, Layout
from roundpipe.store.master import OptimizerCopy


class WeightBuffer(enum.IntEnum):
    """The two places in host memory where a layer's weights can lie."""

    FRONT = 0  # the memory of the user's parameters
    BACK = 1  # second buffer, allocated by the first asynchronous step

    other: WeightBuffer


WeightBuffer.FRONT.other, WeightBuffer.BACK.other = WeightBuffer.BACK, WeightBuffer.FRONT


@dataclasses.dataclass(eq=False)
class ParameterRecord:
    """One parameter. A parameter that the model uses under several names or in several layers has one record.

    `home` is the first layer that uses the parameter. The slot of that layer guards the parameter's weights and
    gradient.
    """

    name: str  # the parameter's name in the user's model
    param: nn.Parameter
    home: int
    weights: torch.Tensor  # the front memory; shares memory with `param` but has a separate version counter
    back: torch.Tensor | None = None  # the back memory, so that one version can be read while the next is written
    cuts: tuple[int, ...] = ()  # byte offsets at which a copy of `weights` must be divided, see RegisteredPages
    seen_version: int = 0  # `param._version` when last checked; another value now means that the user wrote to `param`
    master: OptimizerCopy | None = None  # the master, made when it is first needed
    gathered: HostGradient | None = None  # sum of the gradients that no step has taken yet
    exposed: bool = False  # whether `param.grad` is `gathered.tensor`

    def memory(self, buffer: WeightBuffer) -> torch.Tensor:
        """The parameter's memory in `buffer`.

        In a layer with a back buffer, a parameter without `back` does not train: both buffers use its `weights`.
        """
        return self.back if buffer is WeightBuffer.BACK and self.back is not None else self.weights


@dataclasses.dataclass(eq=False, slots=True)
class HostGradient:
    """The gradient of one parameter in host memory, in the dtype in which a device computed it.

    The same object is downloaded, added to the host's sum, taken by an optimizer step and read by the kernel. It has
    one owner at a time; the owner calls `release` when nothing reads `tensor` any more.
    """

    record: ParameterRecord
    tensor: torch.Tensor
    buffer: LandingBuffer | None = None  # the landing buffer that contains `tensor`; None if it has its own memory

    def release(self) -> None:
        """Release the landing buffer, if `tensor` is in one. A second call does nothing."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.release()


@dataclasses.dataclass(eq=False)
class BufferRecord:
    """One buffer of one layer.

    Devices read a frozen copy of the buffer, so that a later write by the user does not change a recomputation.
    """

    owner: nn.Module
    key: str  # the buffer's key in `owner._buffers`
    name: str  # the buffer's name in the user's model
    shared_between_layers: bool = False
    _frozen: torch.Tensor | None = None  # the latest frozen copy
    _frozen_of: torch.Tensor | None = None  # the user's tensor that was copied
    _frozen_version: int = -1  # the version counter of that tensor when it was copied

    def tensor(self) -> torch.Tensor | None:
        """The user's tensor; None for a buffer that is registered as None."""
        return self.owner._buffers[self.key]

    def frozen(self) -> torch.Tensor | None:
        """A copy of the buffer's current value. Returns the same object as long as the value does not change."""
        current = self.tensor()
        if current is None:
            return None
        version = 0 if current.is_inference() else current._version  # inference tensors have no version counter
        if self._frozen is None or self._frozen_of is not current or self._frozen_version != version:
            self._frozen, self._frozen_of, self._frozen_version = current.detach().clone(), current, version
        return self._frozen

    def write(self, value: torch.Tensor | None) -> None:
        """Store a value that a layer's forward computed. Writes in place unless shape or dtype differ."""
        current = self.tensor()
        with torch.no_grad():
            if value is None or current is None or current.shape != value.shape or current.dtype != value.dtype:
                self.owner._buffers[self.key] = value
            else:
                current.copy_(value)


@dataclasses.dataclass(eq=False)
class LayerRecord:
    """One layer: its module, each of its parameters and buffers once, and the layout of its image.

    In `parameters`, those whose home is this layer come first. `flat` is one host buffer with exactly these parameters,
    laid out as in the image. `back` is a second host buffer for them.
    """

    layer_id: int
    module: nn.Module
    parameters: list[ParameterRecord]
    buffers: list[BufferRecord]
    image: Layout
    flat: HostBuffer | None = None  # None if the parameters do not lie in one buffer
    back: HostBuffer | None = None  # None if there is no second buffer or it is not in one buffer
    observed: dict[Any, Any] = dataclasses.field(default_factory=dict)  # behaviour seen in earlier forward passes

    @functools.cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules of the layer. Cached: the store raises ModelChangedError if modules change after wrapping."""
        return tuple(self.module.modules())

    @functools.cached_property
    def at_home(self) -> list[ParameterRecord]:
        """The parameters whose home is this layer."""
        return [record for record in self.parameters if record.home == self.layer_id]

    @functools.cached_property
    def homes(self) -> set[int]:
        """The ids of layers whose slots guard weights of this layer: its own id and the homes of shared parameters."""
        return {self.layer_id} | {record.home for record in self.parameters}

    @property
    def weight_bytes(self) -> int:
        return sum(record.weights.nbytes for record in self.parameters)

    @property
    def trainable(self) -> list[ParameterRecord]:
        return [record for record in self.parameters if record.param.requires_grad]
