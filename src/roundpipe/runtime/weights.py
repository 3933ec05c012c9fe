"""Layer weights on one device: uploads them ahead of use and reuses their buffers.

An image of a layer belongs to one task and exists from its upload until the task needs the layer no more. All calls
come from the device's worker thread. Knows uploads and versions, never how a layer computes.
"""

from __future__ import annotations

import dataclasses
import weakref

import torch

from roundpipe.config import RecomputeGrain
from roundpipe.devices import Device, Event, StreamKind
from roundpipe.plan import StageTask, TaskKind
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.run import Place, Run
from roundpipe.runtime.transfer import DeviceBuffers
from roundpipe.store import LayerStore


@dataclasses.dataclass
class _Image:
    """A layer's weights in device memory; `buffer` is complete once `uploaded` has passed."""

    buffer: torch.Tensor
    uploaded: Event


class LayerImages:
    """The images and replicas of one device, for all models that use it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = DeviceBuffers(device, StreamKind.WEIGHTS_UP, StreamKind.COMPUTE)
        self._images: dict[tuple[int, int, int], _Image] = {}
        # Weak keys: a pool outlives its models, and a model that is gone must not leave replicas behind.
        self._replicas: weakref.WeakKeyDictionary[LayerStore, dict[int, Replica]] = weakref.WeakKeyDictionary()

    def replica(self, store: LayerStore, layer_id: int) -> Replica:
        """The layer's replica on this device, made at first use and again after the store was rearranged."""
        of_store = self._replicas.setdefault(store, {})
        known = of_store.get(layer_id)
        if known is None or known.record is not store.layers[layer_id]:
            of_store[layer_id] = Replica(store.layers[layer_id], self._device.torch_device)
        return of_store[layer_id]

    def release_unused(self) -> None:
        self._buffers.release_unused()

    def prefetch(self, run: Run, task: StageTask, place: Place, *, within_room: bool = False) -> None:
        """Start the task's uploads in order of use, up to the first layer that the optimizer still has to write.

        `within_room`: also stop where an upload would need memory beyond the run's weight budget.
        """
        for layer_id in _order_of_use(run, task):
            if self._key(run, task, layer_id) in self._images:
                continue
            if run.failed or not run.store.weights.can_upload(layer_id, run.version):
                return
            size = run.store.layers[layer_id].image.total_bytes
            if within_room and not self._buffers.has_one(size, run.weight_room_bytes):
                return
            self._upload(run, task, layer_id, place)

    def ready(self, run: Run, task: StageTask, layer_id: int, place: Place) -> torch.Tensor:
        """The layer's weights on the device. Later compute waits for this layer's upload, not for other layers'."""
        key = self._key(run, task, layer_id)
        if key not in self._images:
            if not run.store.weights.wait_for(layer_id, run.version, lambda: run.failed):
                run.check()
            self._upload(run, task, layer_id, place)
            self.prefetch(run, task, place)  # later layers may have become free to upload meanwhile
        place.at(layer_id, "weight upload")
        image = self._images[key]
        self._device.stream_wait(StreamKind.COMPUTE, image.uploaded)
        return image.buffer

    def finish(self, run: Run, task: StageTask) -> None:
        """Free all buffers of a task that is done or cancelled; see `finish_layer`."""
        for layer_id in task.layers:
            self.finish_layer(run, task, layer_id)

    def finish_layer(self, run: Run, task: StageTask, layer_id: int) -> None:
        """Free the layer's buffer: it may be overwritten once compute has passed this point."""
        image = self._images.pop(self._key(run, task, layer_id), None)
        if image is not None:
            # Both events: a cancelled task may never have made compute wait for the upload.
            self._buffers.give(image.buffer, [self._device.record(StreamKind.COMPUTE), image.uploaded])

    def _upload(self, run: Run, task: StageTask, layer_id: int, place: Place) -> None:
        place.at(layer_id, "weight upload")
        layer = run.store.layers[layer_id]
        buffer = self._buffers.take(layer.image.total_bytes, run.weight_room_bytes)
        for part, host in run.store.weights.upload_pieces(layer_id, run.version, buffer):
            self._device.copy(part, host, StreamKind.WEIGHTS_UP)
        uploaded = self._device.record(StreamKind.WEIGHTS_UP)
        self._images[self._key(run, task, layer_id)] = _Image(buffer, uploaded)
        run.store.weights.upload_issued(run, layer_id, run.version, uploaded)

    @staticmethod
    def _key(run: Run, task: StageTask, layer_id: int) -> tuple[int, int, int]:
        # Not shared between tasks: the same layer in another task may have another version.
        return run.number, task.index, layer_id


def _order_of_use(run: Run, task: StageTask) -> list[int]:
    """A task starts with the forward of its first layer, except a backward task that recomputes layer by layer."""
    by_layer = task.kind is TaskKind.BACKWARD and run.recall.grain is RecomputeGrain.LAYER
    return list(reversed(task.layers)) if by_layer else list(task.layers)
