"""Records of the wrapped model: its layers, their parameters and buffers, and gradients in host memory.

Plain data without threads or devices. The last section finds the user's names of parameters and modules for messages:
a layer of a split or converted model has other names than the model the user wrapped.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.split.stubs import PATH
from roundpipe.store.host_memory import HostBuffer, LandingBuffer, Layout
from roundpipe.store.master import OptimizerCopy


class WeightBuffer(enum.IntEnum):
    """The two places in host memory where a layer's weights can lie."""

    FRONT = 0  # the memory of the user's parameters
    BACK = 1  # exists only once an asynchronous step was made

    @property
    def other(self) -> WeightBuffer:
        return WeightBuffer(1 - self)


@dataclasses.dataclass(eq=False)
class ParameterRecord:
    """One parameter, under however many names and in however many layers the model uses it.

    `home` is the first layer that uses the parameter. The slot of that layer guards its weights and its gradient.
    """

    name: str  # in the user's model
    param: nn.Parameter
    home: int
    weights: torch.Tensor  # host memory that devices read; shares storage with `param`, not its version counter
    back: torch.Tensor | None = None  # second host memory: holds one version while the next is written
    cuts: tuple[int, ...] = ()  # byte offsets at which a copy of `weights` must be divided, see RegisteredPages
    seen_version: int = 0  # `param._version` known to us; a higher one means that the user wrote into `param`
    master: OptimizerCopy | None = None  # made on demand
    gathered: HostGradient | None = None  # sum of the gradients that no step has taken yet
    exposed: bool = False  # whether `param.grad` is `gathered.tensor`

    def memory(self, buffer: WeightBuffer) -> torch.Tensor:
        """The parameter's weights in `buffer`. A parameter without second memory does not train: both are the same."""
        return self.back if buffer is WeightBuffer.BACK and self.back is not None else self.weights


@dataclasses.dataclass(eq=False, slots=True)
class HostGradient:
    """The gradient of one parameter in host memory, in the dtype in which a device computed it.

    The same object is downloaded, added to the host's sum, taken by an optimizer step and read by the kernel. It has
    one owner at a time; the owner calls `release` when nothing reads `tensor` any more.
    """

    record: ParameterRecord
    tensor: torch.Tensor
    buffer: LandingBuffer | None = None  # the landing buffer that `tensor` is a view of; None if it owns its memory

    def release(self) -> None:
        """Give up the landing buffer. A second call does nothing."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.release()


@dataclasses.dataclass(eq=False)
class BufferRecord:
    """One buffer of one layer.

    Devices read a frozen copy of the buffer, so that a later write by the user does not change a recomputation.
    """

    owner: nn.Module
    key: str  # in `owner._buffers`
    name: str  # in the user's model
    shared_between_layers: bool = False
    _frozen: torch.Tensor | None = None
    _frozen_of: torch.Tensor | None = None
    _frozen_version: int = -1

    def tensor(self) -> torch.Tensor | None:
        """The user's tensor; None for a buffer that is registered as None."""
        return self.owner._buffers[self.key]

    def frozen(self) -> torch.Tensor | None:
        """A copy of the current value; the same object as long as the value does not change."""
        current = self.tensor()
        if current is None:
            return None
        version = 0 if current.is_inference() else current._version  # inference tensors have no version counter
        if self._frozen is None or self._frozen_of is not current or self._frozen_version != version:
            self._frozen, self._frozen_of, self._frozen_version = current.detach().clone(), current, version
        return self._frozen

    def write(self, value: torch.Tensor | None) -> None:
        """Store a value that a layer's forward computed: in place if shape and dtype allow it."""
        current = self.tensor()
        with torch.no_grad():
            if value is None or current is None or current.shape != value.shape or current.dtype != value.dtype:
                self.owner._buffers[self.key] = value
            else:
                current.copy_(value)


@dataclasses.dataclass(eq=False)
class LayerRecord:
    """One layer: its module, each of its parameters and buffers once, and the layout of its image.

    Parameters whose home is this layer come first. `flat` holds exactly these parameters, laid out as in the image;
    `back` is a second buffer for those that train.
    """

    layer_id: int
    module: nn.Module
    parameters: list[ParameterRecord]
    buffers: list[BufferRecord]
    image: Layout
    flat: HostBuffer | None = None  # None: weights stay where the user's model has them
    back: HostBuffer | None = None
    observed: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what forwards of the layer showed

    @functools.cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules of the layer. The store refuses layers whose modules have changed."""
        return tuple(self.module.modules())

    @functools.cached_property
    def at_home(self) -> list[ParameterRecord]:
        """The parameters whose home is this layer."""
        return [record for record in self.parameters if record.home == self.layer_id]

    @functools.cached_property
    def homes(self) -> set[int]:
        """The layers whose slots guard the weights of this layer: itself and the homes of shared parameters."""
        return {self.layer_id} | {record.home for record in self.parameters}

    @property
    def weight_bytes(self) -> int:
        return sum(record.weights.nbytes for record in self.parameters)

    @property
    def trainable(self) -> list[ParameterRecord]:
        return [record for record in self.parameters if record.param.requires_grad]


# Names for messages.


def user_names(model: nn.Module) -> dict[int, str]:
    """The name of every parameter and the path of every module in the user's model, by the id of the object."""
    names = {id(module): path for path, module in model.named_modules()}
    return names | {id(param): name for name, param in model.named_parameters()}


def path_of(module: nn.Module, names: Mapping[int, str], local_path: str) -> str:
    """The path of a module in the user's model; `local_path`, its path in its layer, if the model has no such module.

    A copy or stub that splitting made has the path of the module it was made from.
    """
    path: str = module.__dict__.get(PATH, local_path)
    return names.get(id(module), path)


def joined(path: str, key: str) -> str:
    """The path of the member `key` of the module at `path`; `path` is empty for the model itself."""
    return f"{path}.{key}" if path else key
