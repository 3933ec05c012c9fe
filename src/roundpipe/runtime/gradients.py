"""Brings gradients that have come down into the host's sums.

One thread per pool. Workers submit; the thread waits for each download, then for the layer's turn, and adds.

The gradients of one layer's parameters on a device, gathered over all microbatches in one flat buffer.

Used by runtime.stage, one per task and layer. The buffer is taken when the first gradient is there and is free again
when its download has run.
"""

from __future__ import annotations

import dataclasses
import threading

import torch

from roundpipe.devices import Event
from roundpipe.errors import UsageError, add_note
from roundpipe.monitor import THREAD_PREFIX, Monitor
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.run import Run
from roundpipe.runtime.transfer import DeviceBuffers, Transfer
from roundpipe.store import Layout, ParameterRecord
from roundpipe.store.gradients import GradientPart
from roundpipe.store.host_memory import LandingBuffer, LandingBuffers
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


@dataclasses.dataclass(frozen=True)
class Landing:
    """The gradients one layer has gathered over all microbatches of a run."""

    run: Run
    layer_id: int
    sent: GradientsDown | None  # None: the layer has none


class LandingThread:
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._waiting: list[Landing] = []
        self._stopping = False
        self.thread = threading.Thread(target=self._loop, name=f"{THREAD_PREFIX}landing", daemon=True)

    def submit(self, landing: Landing) -> None:
        with self._monitor:
            self._waiting.append(landing)
            self._monitor.changed()

    def stop(self) -> None:
        with self._monitor:
            self._stopping = True
            self._monitor.changed()

    def _loop(self) -> None:
        while (landing := self._next()) is not None:
            try:
                _land(landing)
            except BaseException as error:
                add_note(error, f"while landing gradients of layer {landing.layer_id}")
                landing.run.fail(error)
            finally:
                if landing.sent is not None:
                    landing.sent.buffer.let_go()
                landing.run.landing_done()
                del landing  # an idle thread keeps no run alive

    def _next(self) -> Landing | None:
        """The first landing whose turn it is; a later one never waits behind one whose turn has not come."""
        with self._monitor:
            self._monitor.idle_until(lambda: self._stopping or any(map(_has_its_turn, self._waiting)))
            position = next((i for i, landing in enumerate(self._waiting) if _has_its_turn(landing)), None)
            return None if position is None else self._waiting.pop(position)


def _has_its_turn(landing: Landing) -> bool:
    run = landing.run
    return run.failed or run.store.can_land(run, landing.layer_id, run.generation)


def _land(landing: Landing) -> None:
    run, store = landing.run, landing.run.store
    if landing.sent is not None:
        landing.sent.arrived.wait()
    store.gradients.add(_complete_parts(landing), lambda: run.failed)
    store.landed(run, landing.layer_id, run.generation)


def _complete_parts(landing: Landing) -> list[GradientPart]:
    """Parts that can be added now. A parameter of several layers waits for all its parts, and these are summed from
    the last layer to the first, whatever order they arrive in."""
    run, sent = landing.run, landing.sent
    parts = {} if sent is None else dict(sent.parts)
    buffer = None if sent is None else sent.buffer
    complete = [GradientPart(record, part, buffer) for record, part in parts.items() if record not in run.contributors]
    for record in run.store.layers[landing.layer_id].parameters:
        layers = run.contributors.get(record)
        if layers is None:
            continue
        gathered = run.shared_parts.setdefault(record, {})
        part = parts.get(record)
        gathered[landing.layer_id] = None if part is None else part.clone()  # it outlives its buffer
        if len(gathered) == len(layers):
            present = [part for _, part in sorted(gathered.items(), reverse=True) if part is not None]
            complete += [GradientPart(record, _sum(present))] if present else []
    return complete


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total
