"""The weights of all layers in host memory: which buffer holds which version, and when it may be read or written.

Device threads read for uploads, the optimizer thread writes, callers show versions to the user. All waiting goes
through the monitor; the rules themselves are LayerSlot's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import torch

from roundpipe.devices import Event, HostPinner
from roundpipe.monitor import Monitor, shielded
from roundpipe.store.host_memory import HostBuffer, require_host_memory
from roundpipe.store.layout import lay_out
from roundpipe.store.master import OptimizerCopy
from roundpipe.store.records import LayerRecord, ParameterRecord
from roundpipe.store.slot import LayerSlot, WeightBuffer

_ADVICE = (
    "Asynchronous steps keep the weights twice, to write one version while the other is read; step with "
    "is_async=False, which keeps them once and computes with weights that are up to date."
)


class LayerWeights:
    """The weights of one model, in one or two buffers per layer."""

    def __init__(
        self, layers: Sequence[LayerRecord], slots: Sequence[LayerSlot], monitor: Monitor, pinner: HostPinner | None
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._monitor = monitor
        self._pinner = pinner
        self._failed_uploads: dict[int, BaseException] = {}  # by layer, between `begin` and `end`
        self._fronts = [layer.flat for layer in layers if layer.flat is not None]
        self._backs: list[HostBuffer] = []

    def close(self) -> None:
        """Unpin all buffers."""
        for flat in (*self._fronts, *self._backs):
            flat.close()

    def bring_to_back(self, newest: int) -> None:
        """Copy the newest version into every second memory, also in layers that the version did not change."""
        for layer, slot in zip(self._layers, self._slots, strict=True):
            if slot.buffer_of(newest) is WeightBuffer.FRONT:
                for record in layer.at_home:
                    if record.back is not None:
                        if record.master is not None and record.master.lies_in(record.back):
                            record.master.take_memory()  # after a failed step its high halves are there
                        record.back.copy_(record.weights)

    def rearrange(self, layers: Sequence[LayerRecord], slots: Sequence[LayerSlot]) -> None:
        """Continue with other layers over the same weights in the same memory. Only while nothing runs."""
        self._layers, self._slots = layers, slots

    # Reading.

    def can_upload(self, layer_id: int, version: int) -> bool:
        """Whether all weights of a layer are there in `version`."""
        return all(self._slots[home].can_upload(version) for home in self._layers[layer_id].homes)

    def wait_for(self, layer_id: int, version: int, cancelled: Callable[[], bool]) -> bool:
        """Block until the weights of `version` may be read. Returns False if `cancelled()` becomes true before."""
        with self._monitor:
            self._monitor.wait_until(
                lambda: cancelled() or self.can_upload(layer_id, version),
                f"weights of layer {layer_id}, version {version}",
            )
            return not cancelled()

    def upload_pieces(
        self, layer_id: int, version: int, image: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the device image, host memory) for every copy that fills a layer's image."""

        def buffer_of_home(home: int) -> WeightBuffer:
            # The version of a cancelled call may be overwritten already. Its results are not used.
            return self._slots[home].buffer_of(version) or WeightBuffer.FRONT

        return self._layers[layer_id].upload_pieces(image, buffer_of_home)

    def upload_issued(self, call: Hashable, layer_id: int, version: int, event: Event) -> None:
        """Note that an upload was queued; `event` passes when it has read the weights."""
        with self._monitor:
            for home in self._layers[layer_id].homes:
                self._slots[home].upload_issued(call, version, event)
            self._monitor.changed()

    # Writing.

    def keep_two(self, layer_id: int) -> None:
        """Allocate second weights for the layer: from now on a version is written beside the one before."""
        missing = [r for r in self._layers[layer_id].at_home if r.master is not None and r.back is None]
        if missing:
            self._give_second_memory(self._layers[layer_id], missing)

    def begin(self, layer_id: int, version: int) -> WeightBuffer:
        """Return the buffer that `version` is written into; waits until all uploads have read what it holds."""
        slot = self._slots[layer_id]
        has_two = any(record.back is not None for record in self._layers[layer_id].at_home)
        with self._monitor:
            # The other buffer than the newest version's, so that calls can go on reading that version.
            newest = slot.buffer_of(version - 1)
            assert newest is not None
            target = newest.other if has_two else WeightBuffer.FRONT
            self._monitor.wait_until(
                lambda: slot.can_write(version, target), f"uploads of layer {layer_id} to be issued"
            )
            slot.write_begun(version, target)
            events = slot.take_upload_events(target)
        failure = _wait_for_all(events)  # outside the monitor: copies take long, and other threads must go on
        if failure is not None:
            self._failed_uploads[layer_id] = failure
        return target

    def end(self, layer_id: int, version: int, target: WeightBuffer) -> None:
        """Let calls read `version`. Then raise the error of an upload that `begin` waited for, if one failed."""
        with self._monitor:
            self._slots[layer_id].written(version, target)
            self._monitor.changed()
        failure = self._failed_uploads.pop(layer_id, None)
        if failure is not None:
            raise failure

    def revoke(self, layer_id: int, version: int, target: WeightBuffer) -> None:
        """Discard what was written into the second buffer: `version` gets the weights of the version before."""
        with self._monitor:
            self._slots[layer_id].write_revoked(version, target)
            self._monitor.changed()

    def unchanged(self, layer_id: int, version: int) -> None:
        """`version` did not change the layer."""
        with self._monitor:
            self._slots[layer_id].unchanged(version)
            self._monitor.changed()

    def publish(self, layer_id: int, version: int, *, copy: bool) -> None:
        """Write the values of all masters as weights of `version`, unless that was done before.

        `copy`: False for a void version, which gets the weights of the version before.
        """
        if self._slots[layer_id].newest_version >= version:
            return
        if not copy:
            self.unchanged(layer_id, version)
            return
        target = self.begin(layer_id, version)
        try:
            for record in self._layers[layer_id].at_home:
                if record.master is not None:
                    record.master.write_weight(record.memory(target))
        finally:
            self.end(layer_id, version, target)

    # Showing versions to the user.

    def show(self, version: int) -> None:
        """Bring `version` into the front buffers, which are the user's parameters.

        Only while the optimizer is idle and no call can be announced. Waits for the uploads of running calls.
        """
        for layer, slot in zip(self._layers, self._slots, strict=True):
            with self._monitor:
                self._monitor.wait_until(
                    lambda slot=slot: slot.can_upload(version),  # type: ignore[misc]
                    f"weights of version {version}",
                )
                if slot.buffer_of(version) is WeightBuffer.FRONT:
                    continue
                self._monitor.wait_until(slot.can_move, f"uploads of layer {layer.layer_id} to be issued")
            # Shielded: a Ctrl-C between copying and noting it would leave the slot wrong about its buffers.
            shielded(functools.partial(self._bring_to_front, layer, slot, keep_old=version != slot.newest_version))

    def _bring_to_front(self, layer: LayerRecord, slot: LayerSlot, *, keep_old: bool) -> None:
        with self._monitor:
            events = [event for buffer in WeightBuffer for event in slot.take_upload_events(buffer)]
        failure = _wait_for_all(events)
        for record in layer.at_home:
            if record.back is not None:
                _exchange(record, keep_old=keep_old)
        with self._monitor:
            if keep_old:
                slot.swapped()
            else:
                slot.moved_to_front()
        if failure is not None:
            raise failure

    def _give_second_memory(self, layer: LayerRecord, missing: Sequence[ParameterRecord]) -> None:
        """Allocate second memory for `missing`.

        Second memory that other parameters of the layer have already holds a version; the new one must hold it too.
        """
        others_have = any(record.back is not None for record in layer.at_home)
        layout = lay_out([record.weights for record in missing])
        self._require_second_memory()
        flat = HostBuffer(layout.total_bytes, self._pinner)
        self._backs.append(flat)
        # One storage for all: the user never gets these tensors.
        for record, view in zip(missing, layout.views(flat.tensor), strict=True):
            record.back = view.copy_(record.weights) if others_have else view
        if len(missing) == len(layer.at_home):
            layer.back = flat

    def _require_second_memory(self) -> None:
        """Raise HostMemoryError if second memory for all layers does not fit.

        Counted before the first allocation, because memory that is allocated but not yet written still counts as free.
        """
        missing = [
            record
            for layer in self._layers
            for record in layer.at_home
            if record.back is None and (record.master is not None or record.param.requires_grad)
        ]
        needs = {"second weights": sum(record.weights.nbytes for record in missing)}
        require_host_memory(needs, "an asynchronous step", _ADVICE)


def _exchange(record: ParameterRecord, *, keep_old: bool) -> None:
    """Copy a parameter's second memory to the first, and the first to the second if it is still needed.

    After a failed step the master's high halves may be in the first memory although no version is there.
    """
    assert record.back is not None
    master = record.master
    with OptimizerCopy.lock if master is None else master.lock:
        keep_old = keep_old or (master is not None and master.lies_in(record.weights))
        front = record.weights.clone() if keep_old else None
        record.weights.copy_(record.back)
        if front is not None:
            record.back.copy_(front)
        if master is not None:
            master.weights_swapped(record.weights, record.back)


def _wait_for_all(events: Sequence[Event]) -> BaseException | None:
    """Wait for all events and return the first failure. A copy that failed does not read any more either."""
    failure: BaseException | None = None
    for event in events:
        try:
            event.wait()
        except BaseException as error:
            failure = failure or error
    return failure
