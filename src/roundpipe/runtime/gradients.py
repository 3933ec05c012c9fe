"""Moves a layer's gradients from autograd on a device to the sums in host memory.

LayerGradients gathers the gradients of all microbatches in one flat device buffer and downloads it (device thread).
LandingThread adds what was downloaded to the host's sums, in the order that the store prescribes.
"""

from __future__ import annotations

import operator
import threading

import torch
from torch import nn

from roundpipe.devices import Event
from roundpipe.errors import UsageError, add_note
from roundpipe.monitor import THREAD_PREFIX, Monitor
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.run import Run
from roundpipe.runtime.transfer import DeviceBuffers, Transfer, views_of
from roundpipe.store import HostGradient, Layout, ParameterRecord
from roundpipe.store.host_memory import LandingBuffers, lay_out

Download = tuple[list[HostGradient], Event]  # gradients in host memory, which are complete once the event has passed
_grad_of = operator.attrgetter("grad")


class _TrainedParameters:
    """The parameters of a replica that train, and the layout of their gradients."""

    def __init__(self, replica: Replica) -> None:
        pairs = zip(replica.record.parameters, replica.parameters, strict=True)
        trained = [(record, stand_in) for record, stand_in in pairs if stand_in.requires_grad]
        self.records: list[ParameterRecord] = [record for record, _ in trained]
        self.stand_ins: list[nn.Parameter] = [stand_in for _, stand_in in trained]
        self.layout: Layout = lay_out(self.stand_ins)

    @staticmethod
    def of(replica: Replica) -> _TrainedParameters:
        """Return the object for the parameters of the replica that train now. Cached, because every task needs it."""
        cache: dict[tuple[bool, ...], _TrainedParameters] = vars(replica).setdefault("_trained_parameters", {})
        flags = tuple(map(operator.attrgetter("requires_grad"), replica.parameters))
        found = cache.get(flags)
        if found is None:
            found = cache[flags] = _TrainedParameters(replica)
        return found


class LayerGradients:
    """The gradients of one layer in one task. The device buffer is free again when its download has run."""

    def __init__(self, replica: Replica, buffers: DeviceBuffers) -> None:
        """`replica` is bound: its parameters have the shapes and requires_grad flags of this task."""
        self._trained = _TrainedParameters.of(replica)
        self._buffers = buffers
        self._buffer: torch.Tensor | None = None  # allocated when the first gradient exists
        self._gathered: list[torch.Tensor | None] = []  # `.grad` of each parameter after the last `gather`

    def gather(self) -> None:
        """Move gradients that a backward pass has created into the buffer, and make `.grad` a view of the buffer.

        Later backward passes add to these views in place, so that there is nothing to do after the first microbatch.
        """
        stand_ins = self._trained.stand_ins
        if self._gathered and all(map(operator.is_, map(_grad_of, stand_ins), self._gathered)):
            return
        gradients: list[torch.Tensor | None] = [stand_in.grad for stand_in in stand_ins]
        for record, gradient in zip(self._trained.records, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise UsageError(
                    f"parameter {record.name!r} has a {gradient.layout} gradient; use dense ones (sparse=False)."
                )
        if self._buffer is None:
            if all(gradient is None for gradient in gradients):
                return
            self._buffer = self._buffers.take(self._trained.layout.total_bytes)
        views = views_of(self._buffer, self._trained.layout)
        fresh = {i: grad for i, grad in enumerate(gradients) if grad is not None and grad is not views[i]}
        with torch.no_grad():
            torch._foreach_copy_([views[i] for i in fresh], list(fresh.values()))
        for i in fresh:
            stand_ins[i].grad = gradients[i] = views[i]
        self._gathered = gradients

    def download(self, transfer: Transfer, landing: LandingBuffers) -> Download | None:
        """Start the download and clear `.grad` of the parameters. Returns None if there is no gradient."""
        present = [i for i, gradient in enumerate(self._gathered) if gradient is not None]
        if self._buffer is None or not present:
            return None
        layout, records = self._trained.layout, self._trained.records
        host, views = landing.take(layout, num_gradients=len(present))
        arrived = transfer.gradients_down(host.memory, self._buffer)
        self._buffers.give(self._buffer, [arrived])  # the next writer waits until the download has read the buffer
        self.drop()
        return [HostGradient(records[i], views[i], host) for i in present], arrived

    def drop(self) -> None:
        """Clear `.grad` of the parameters and forget the buffer."""
        for stand_in in self._trained.stand_ins:
            stand_in.grad = None
        self._buffer, self._gathered = None, []


class Landing:
    """The downloaded gradients of one layer and run, which are to be added to the host's sums."""

    def __init__(self, run: Run, layer_id: int, sent: Download | None) -> None:
        """`sent`: the download; None if the layer has no gradients. The landing then only passes the layer's turn."""
        self.run, self.layer_id = run, layer_id
        # The gradients whose buffers this landing must still release.
        self.gradients: list[HostGradient] = [] if sent is None else sent[0]
        self.arrived: Event | None = None if sent is None else sent[1]


class LandingThread:
    """The thread that adds downloaded gradients to the host's sums; one per pool."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._waiting: list[Landing] = []
        self._stopping = False
        self.thread = threading.Thread(target=self._loop, name=f"{THREAD_PREFIX}landing", daemon=True)

    def submit(self, landing: Landing) -> None:
        """Give the thread a landing, which it adds when the download has run and the layer's turn has come."""
        with self._monitor:
            self._waiting.append(landing)
            self._monitor.changed()

    def stop(self) -> None:
        """Ask the thread to end as soon as none of the submitted landings may be added."""
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
                for gradient in landing.gradients:  # only a failed run has any left
                    gradient.release()
                landing.run.landing_done()
                del landing  # an idle thread must not keep a run alive

    def _next(self) -> Landing | None:
        """Wait for a landing that may be added now and return it; return None when the thread is to stop.

        A landing whose turn has not come does not block the landings after it.
        """
        with self._monitor:
            self._monitor.idle_until(lambda: self._stopping or any(map(_may_land, self._waiting)))
            position = next((i for i, landing in enumerate(self._waiting) if _may_land(landing)), None)
            return None if position is None else self._waiting.pop(position)


def _may_land(landing: Landing) -> bool:
    run = landing.run
    return run.failed or run.store.weights.can_land(run, landing.layer_id, run.generation)


def _land(landing: Landing) -> None:
    run, store = landing.run, landing.run.store
    if landing.arrived is not None:
        # Wait even if the run has failed: the download must not write into a buffer that was given to another landing.
        landing.arrived.wait()
    store.gradients.add(_complete_parts(landing), lambda: run.failed)
    store.landed(run, landing.layer_id, run.generation)


def _complete_parts(landing: Landing) -> list[HostGradient]:
    """The gradients of a landing that can be added now.

    The gradient of a parameter that several layers use is the sum of their parts. It is added when all parts are there,
    and is summed from the last layer to the first, whatever the order in which they arrive.
    """
    run, gradients = landing.run, landing.gradients
    if not run.contributors:
        return gradients
    by_record = {gradient.record: gradient for gradient in gradients}
    for record in run.store.layers[landing.layer_id].parameters:
        layers = run.contributors.get(record)
        if layers is None:
            continue
        parts = run.shared_parts.setdefault(record, {})
        gradient = by_record.get(record)
        # A clone, because the landing buffer may be reused before the other parts arrive.
        parts[landing.layer_id] = None if gradient is None else gradient.tensor.clone()
        if gradient is not None:
            gradients.remove(gradient)
            gradient.release()
        if len(parts) == len(layers):
            present = [part for _, part in sorted(parts.items(), reverse=True) if part is not None]
            for part in present[1:]:
                present[0].add_(part)
            if present:
                gradients.append(HostGradient(record, present[0]))
    return gradients
