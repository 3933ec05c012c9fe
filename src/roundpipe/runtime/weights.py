"""Images: the weights of layers in the memory of one device, uploaded ahead of need into buffers that are used again.

Called on one worker's thread, or on autograd's thread while the worker waits for it. A task's image of a layer exists
from its upload until the task no longer needs the layer.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque

import torch

from roundpipe.config import RecomputeGrain
from roundpipe.devices import Device, Event, StreamKind
from roundpipe.plan import StageTask, TaskKind
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.run import Place, Run
from roundpipe.runtime.transfer import DeviceBuffers
from roundpipe.store import LayerStore, Layout


@dataclasses.dataclass
class _Image:
    buffer: torch.Tensor
    uploaded: Event


class _TaskImages:
    """The images of one task: those on the device, and the layers still to be uploaded in the order of use."""

    def __init__(self, run: Run, task: StageTask) -> None:
        by_layer = task.kind is TaskKind.BACKWARD and run.recall.grain is RecomputeGrain.LAYER
        self.to_upload = deque(reversed(task.layers) if by_layer else task.layers)
        self.images: dict[int, _Image] = {}


class LayerImages:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = DeviceBuffers(device, StreamKind.WEIGHTS_UP, StreamKind.COMPUTE)
        self._tasks: dict[tuple[int, int], _TaskImages] = {}  # by numbers of run and task
        self._layouts: dict[Layout, Layout] = {}  # equal layouts as one object
        self._replicas: weakref.WeakKeyDictionary[LayerStore, dict[int, Replica]] = weakref.WeakKeyDictionary()

    def replica(self, store: LayerStore, layer_id: int) -> Replica:
        """Return the layer's module on this device, made at first use and when the store has got other layers."""
        of_store = self._replicas.setdefault(store, {})
        known = of_store.get(layer_id)
        if known is None or known.record is not store.layers[layer_id]:
            layout = store.layers[layer_id].image
            layout = self._layouts.setdefault(layout, layout)
            known = of_store[layer_id] = Replica(store.layers[layer_id], layout, self._device.torch_device)
        return known

    def release_unused(self) -> None:
        self._buffers.release_unused()

    def prefetch(self, run: Run, task: StageTask, place: Place, *, within_room: bool = False) -> None:
        """Start every upload of the task that need not wait for the optimizer, in the order of use.

        within_room: only while free buffers or `run.weight_room_bytes` suffice.
        """
        of_task = self._of(run, task)
        while of_task.to_upload:
            layer_id = of_task.to_upload[0]
            if run.failed or not run.store.weights.can_upload(layer_id, run.version):
                return
            size = run.store.layers[layer_id].image.total_bytes
            if within_room and not self._buffers.has_one(size, run.weight_room_bytes):
                return
            self._upload(run, of_task, layer_id, place)

    def ready(self, run: Run, task: StageTask, replica: Replica, place: Place) -> list[torch.Tensor]:
        """Return the layer's weights; compute queued from now on waits for the upload of this layer and no other."""
        of_task, layer_id = self._of(run, task), replica.record.layer_id
        if layer_id not in of_task.images:
            if not run.store.weights.wait_for(layer_id, run.version, lambda: run.failed):
                run.check()
            self._upload(run, of_task, layer_id, place)
            self.prefetch(run, task, place)
        place.at(layer_id, "weight upload")
        image = of_task.images[layer_id]
        self._device.stream_wait(StreamKind.COMPUTE, image.uploaded)
        return self._buffers.views(image.buffer, replica.image_layout)

    def finish(self, run: Run, task: StageTask) -> None:
        """The task is done or dropped: its buffers are free once compute has passed this point."""
        of_task = self._of(run, task)
        for layer_id in list(of_task.images):
            self.finish_layer(run, task, layer_id)
        del self._tasks[run.number, task.index]

    def finish_layer(self, run: Run, task: StageTask, layer_id: int) -> None:
        """The task no longer needs this layer: its buffer is free once compute has passed this point."""
        image = self._of(run, task).images.pop(layer_id)
        self._buffers.give(image.buffer, [self._device.record(StreamKind.COMPUTE), image.uploaded])

    def _of(self, run: Run, task: StageTask) -> _TaskImages:
        known = self._tasks.get((run.number, task.index))
        if known is None:
            known = self._tasks[run.number, task.index] = _TaskImages(run, task)
        return known

    def _upload(self, run: Run, of_task: _TaskImages, layer_id: int, place: Place) -> None:
        place.at(layer_id, "weight upload")
        layer = run.store.layers[layer_id]
        buffer = self._buffers.take(layer.image.total_bytes, run.weight_room_bytes)
        for part, host in run.store.weights.upload_pieces(layer_id, run.version, buffer):
            self._device.copy(part, host, StreamKind.WEIGHTS_UP)
        uploaded = self._device.record(StreamKind.WEIGHTS_UP)
        of_task.images[layer_id] = _Image(buffer, uploaded)
        of_task.to_upload.remove(layer_id)
        run.store.weights.upload_issued(run, layer_id, run.version, uploaded)
