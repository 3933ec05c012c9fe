"""The gradients of one layer's parameters on a device, gathered over all microbatches in one flat buffer.

Used by runtime.stage, one per task and layer. The buffer is taken when the first gradient is there and is free again
when its download has run.
"""

from __future__ import annotations

import dataclasses

import torch

from roundpipe.devices import Event
from roundpipe.errors import UsageError
from roundpipe.runtime.device_buffers import DeviceBuffers
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.transfer import Transfer
from roundpipe.store import Layout, ParameterRecord
from roundpipe.store.landing_buffers import LandingBuffer, LandingBuffers
from roundpipe.store.layout import lay_out


@dataclasses.dataclass(frozen=True)
class GradientsDown:
    """Gradients on their way: parts of `buffer`, which are filled once `arrived` has passed."""

    parts: list[tuple[ParameterRecord, torch.Tensor]]
    buffer: LandingBuffer
    arrived: Event


class LayerGradients:
    def __init__(self, replica: Replica, buffers: DeviceBuffers) -> None:
        pairs = zip(replica.record.parameters, replica.parameters, strict=True)
        self._trained = [(record, stand_in) for record, stand_in in pairs if stand_in.requires_grad]
        self._layout: Layout = lay_out([stand_in for _, stand_in in self._trained])
        self._buffers = buffers
        self._buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def gather(self) -> None:
        """Move what a backward has made into the buffer; what is there already was added to in place."""
        fresh: dict[int, torch.Tensor] = {}
        for position, (record, stand_in) in enumerate(self._trained):
            gradient = stand_in.grad
            if gradient is None or (self._views and gradient is self._views[position]):
                continue
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"parameter {record.name!r} has a {gradient.layout} gradient; use dense ones (sparse=False)."
                )
            fresh[position] = gradient
        if not fresh:
            return
        if self._buffer is None:
            self._buffer = self._buffers.take(self._layout.total_bytes)
            self._views = self._layout.views(self._buffer)
        views = [self._views[position] for position in fresh]
        with torch.no_grad():
            torch._foreach_copy_(views, list(fresh.values()))
        for position, view in zip(fresh, views, strict=True):
            self._trained[position][1].grad = view

    def download(self, transfer: Transfer, landing: LandingBuffers) -> GradientsDown | None:
        """Start their way down; None if there are none. The parameters have no gradients afterwards."""
        present = [position for position, (_, stand_in) in enumerate(self._trained) if stand_in.grad is not None]
        if self._buffer is None or not present:
            return None
        host = landing.take(self._layout.total_bytes)
        event = transfer.gradients_down(host.memory, self._buffer)
        self._buffers.give(self._buffer, [event])
        hosts = host.views(self._layout)
        parts = [(self._trained[position][0], hosts[position]) for position in present]
        self.drop()
        return GradientsDown(parts, host, event)

    def drop(self) -> None:
        for _, stand_in in self._trained:
            stand_in.grad = None
        self._buffer, self._views = None, []
