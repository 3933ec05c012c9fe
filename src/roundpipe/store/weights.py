"""The weights of all layers in host memory: which buffer holds which version, and when it may be read or written.

Device threads read weights to upload them, the optimizer thread writes new versions, and the user's thread brings a
version into the user's parameters.

LayerSlot is the state machine of one layer: which versions exist, and which uploads and landings are due. An upload or
landing is due from the moment its call announces it until it was issued or done. A slot never blocks, and its caller
holds the monitor. Each method either answers a question or records an event. An event that the state does not allow is
a bug in RoundPipe and fails an assertion. LayerWeights waits until the slots allow a read or write of weights. Masters
makes the masters.

[Note: versions and generations]
Optimizer steps are numbered from 1. Version v is the weights after step v; version 0 is the weights as wrapped. A call
reads one version. Gradients of generation g come from calls issued after g steps; step g + 1 consumes them. A layer's
weights lie in one buffer, or in two if a call may read one version while the next is written. A buffer holds a range of
versions, because a step that leaves the layer unchanged gives the same weights another number. For each layer:

    event                       allowed when
    upload version v            a buffer holds version v
    write version v             every upload that is due is of version v or later, or of a version in the other buffer,
    into a buffer               and the uploads issued from this buffer have run
    move versions between       no upload is due, and the uploads issued from both buffers have run
    buffers
    land for generation g       generation g - 1 is consumed, and earlier calls of generation g have landed
    consume generation g        no landing of generation g is due
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from roundpipe.devices import Event, HostPinner
from roundpipe.monitor import Monitor, shielded
from roundpipe.store.host_memory import HostBuffer, TensorPlace, lay_out, require_host_memory
from roundpipe.store.master import OptimizerCopy
from roundpipe.store.records import LayerRecord, ParameterRecord, WeightBuffer
from roundpipe.store.surroundings import CopyHome

_NOTHING = range(0)
_LOW_PRECISIONS = (torch.bfloat16, torch.float16)


class LayerSlot:
    """Which versions of a layer exist, and which uploads and landings are still due."""

    def __init__(self, front: range = range(0, 1), back: range = _NOTHING, generation: int = 0) -> None:
        self.open_generation = generation  # the generation whose gradients may land now
        self._held = [front, back]  # the versions that each buffer holds, indexed by WeightBuffer
        # Number of uploads by (call, version), and of landings by (call, generation), that are still due.
        self._uploads_due: Counter[tuple[Hashable, int]] = Counter()
        self._landings_due: Counter[tuple[Hashable, int]] = Counter()
        self._upload_events: list[list[Event]] = [[], []]  # of uploads issued from each buffer

    # Versions and uploads of weights.

    @property
    def newest_version(self) -> int:
        """The newest complete version; -1 while the layer has only one buffer and that one is being written."""
        return max(held.stop for held in self._held) - 1

    def buffer_of(self, version: int) -> WeightBuffer | None:
        """The buffer that holds a version; None if the version is not written yet or was overwritten."""
        return next((buffer for buffer in WeightBuffer if version in self._held[buffer]), None)

    def expect_uploads(self, call: Hashable, version: int, count: int) -> None:
        """Announce `count` uploads of this version by a call."""
        assert version > self.newest_version or self.can_upload(version), (
            f"version {version} was overwritten: {self._held}"
        )
        if count:
            self._uploads_due[call, version] += count

    def can_upload(self, version: int) -> bool:
        return self.buffer_of(version) is not None

    def upload_issued(self, call: Hashable, version: int, event: Event) -> None:
        """Record that an upload was queued; `event` passes when the upload has run.

        Also called for a cancelled call, whose uploads are no longer due: its queued copies still read the buffer.
        """
        buffer = self.buffer_of(version)
        if (call, version) in self._uploads_due:
            assert buffer is not None
            self._decrease(self._uploads_due, (call, version))
        self._upload_events[buffer or WeightBuffer.FRONT].append(event)

    def upload_dropped(self, call: Hashable, version: int) -> None:
        """Record that an announced upload will not be issued."""
        if (call, version) in self._uploads_due:  # not if the call was cancelled
            self._decrease(self._uploads_due, (call, version))

    def can_write(self, version: int, buffer: WeightBuffer) -> bool:
        """Whether `version` may be written into the buffer: no upload that is due needs the weights in it."""
        elsewhere = self._held[buffer.other]
        return all(due >= version or due in elsewhere for _, due in self._uploads_due)

    def take_upload_events(self, buffer: WeightBuffer) -> list[Event]:
        """Return the events that must pass before the buffer may be overwritten, and forget them."""
        events, self._upload_events[buffer] = self._upload_events[buffer], []
        return events

    def write_begun(self, version: int, buffer: WeightBuffer) -> list[Event]:
        """Record that writing `version` begins: until `written` the buffer holds no version.

        Returns the events that must pass before the buffer may be overwritten, and forgets them.
        """
        assert self.can_write(version, buffer)
        self._held[buffer] = _NOTHING
        events, self._upload_events[buffer] = self._upload_events[buffer], []
        return events

    def written(self, version: int, buffer: WeightBuffer) -> None:
        """Record that `version` is complete in the buffer."""
        assert self.can_write(version, buffer)
        assert version > self._held[buffer.other].stop - 1
        self._held[buffer] = range(version, version + 1)

    def write_revoked(self, version: int, buffer: WeightBuffer) -> None:
        """Record that the buffer's new weights are discarded: `version` gets the weights of the version before."""
        assert version - 1 in self._held[buffer.other]
        self._held[buffer] = _NOTHING
        self.unchanged(version)

    def unchanged(self, version: int) -> None:
        """Record that step `version` did not change the layer: the newest weights are also those of `version`."""
        newest = max(WeightBuffer, key=lambda buffer: self._held[buffer].stop)
        held = self._held[newest]
        assert version == held.stop
        self._held[newest] = range(held.start, version + 1)

    def can_move(self) -> bool:
        """Whether versions may move between the buffers.

        They may not while an upload is due: the device thread may already have chosen the buffer to copy from.
        """
        return not self._uploads_due

    def moved_to_front(self) -> None:
        """Record that the newest version was copied to the front buffer, over versions that no call needs any more."""
        assert self._held[WeightBuffer.BACK].stop - 1 == self.newest_version
        assert self.can_move()
        self._held = [self._held[WeightBuffer.BACK], _NOTHING]

    def swapped(self) -> None:
        """Record that the contents of the two buffers were exchanged."""
        assert self.can_move()
        self._held.reverse()
        self._upload_events.reverse()

    # Landings of gradients.

    def expect_landings(self, call: Hashable, generation: int, count: int) -> None:
        """Announce that a call will land gradients of this layer `count` times."""
        assert generation >= self.open_generation
        if count:
            self._landings_due[call, generation] += count

    def can_land(self, call: Hashable, generation: int) -> bool:
        """Whether the call may land now: its generation is open, and the calls announced before it have landed."""
        if self.open_generation != generation:
            return False
        # Calls land in the order of announcement, which a Counter keeps: sums do not depend on which call is faster.
        return next((due for due, of in self._landings_due if of == generation), call) == call

    def landed(self, call: Hashable, generation: int) -> None:
        """Record one landing of the call. Does nothing for a cancelled call, whose landings are no longer due."""
        if (call, generation) in self._landings_due:
            assert self.can_land(call, generation)
            self._decrease(self._landings_due, (call, generation))

    def can_consume(self, generation: int) -> bool:
        """Whether all gradients of the generation have landed and no step has taken them yet."""
        return self.open_generation == generation and all(due != generation for _, due in self._landings_due)

    def consumed(self, generation: int) -> None:
        """Record that a step has taken the gradients of the generation: those of the next generation may land."""
        assert self.can_consume(generation)
        self.open_generation = generation + 1

    # Calls that fail.

    def cancel(self, call: Hashable) -> None:
        """Forget the call's uploads and landings that are due. Uploads already issued still run and are awaited."""
        for due in (self._uploads_due, self._landings_due):
            for key in [key for key in due if key[0] == call]:
                del due[key]

    @staticmethod
    def _decrease(due: Counter[tuple[Hashable, int]], key: tuple[Hashable, int]) -> None:
        due[key] -= 1
        if not due[key]:
            del due[key]


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
        self._failed_uploads: dict[int, BaseException] = {}  # by layer: errors found in `begin` that `end` raises
        self._fronts = [layer.flat for layer in layers if layer.flat is not None]
        self._backs: list[HostBuffer] = []

    def close(self) -> None:
        """Unpin all buffers."""
        for flat in (*self._fronts, *self._backs):
            flat.close()

    def bring_to_back(self, newest: int) -> None:
        """Copy version `newest` into the second buffer of every parameter that has one, unless it is there already."""
        for layer, slot in zip(self._layers, self._slots, strict=True):
            if slot.buffer_of(newest) is WeightBuffer.FRONT:
                for record in layer.at_home:
                    if record.back is not None:
                        if record.master is not None and record.master.lies_in(record.back):
                            # After a failed step the second buffer may hold the master's high halves, and the next line
                            # overwrites that buffer. So first join high and low halves in separate memory.
                            record.master.take_memory()
                        record.back.copy_(record.weights)

    def rearrange(self, layers: Sequence[LayerRecord], slots: Sequence[LayerSlot]) -> None:
        """Replace the layers by others with the same weights in the same memory. Only while nothing runs."""
        self._layers, self._slots = layers, slots

    # Reading weights.

    def can_upload(self, layer_id: int, version: int) -> bool:
        """Whether host memory holds `version` of all weights of a layer, including those shared with other layers."""
        return all(self._slots[home].can_upload(version) for home in self._layers[layer_id].homes)

    def wait_for(self, layer_id: int, version: int, cancelled: Callable[[], bool]) -> bool:
        """Block until the weights of `version` may be read, or `cancelled()` is true; return False if cancelled."""
        with self._monitor:
            self._monitor.wait_until(
                lambda: cancelled() or self.can_upload(layer_id, version),
                f"weights of layer {layer_id}, version {version}",
            )
            return not cancelled()

    def upload_pieces(
        self, layer_id: int, version: int, image: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (part of the device image, host memory) for every copy that fills a layer's image."""
        layer = self._layers[layer_id]
        # If the call was cancelled, its version may be overwritten already. Any buffer will do: the results are unused.
        buffers = {home: self._slots[home].buffer_of(version) or WeightBuffer.FRONT for home in layer.homes}
        flat, own_buffer = layer.flat, buffers[layer_id]
        if own_buffer is WeightBuffer.BACK and layer.back is not None and flat is not None:
            # If all parameters of the layer train, `back` has the layout of `flat`, and one copy of it is enough.
            flat = layer.back if layer.back.num_bytes == flat.num_bytes else flat
        pieces, in_flat = [], set()
        if flat is not None and flat.num_bytes:
            pieces.append((image[: flat.num_bytes], flat.tensor))
            is_newest = flat is layer.back or own_buffer is WeightBuffer.FRONT
            in_flat = {record for record in layer.at_home if is_newest or record.back is None}
            if len(in_flat) == len(layer.parameters):
                return pieces
        for record, place in zip(layer.parameters, layer.image.places, strict=True):
            if record not in in_flat and place.num_bytes:
                pieces += _parameter_pieces(place, image, record, buffers[record.home])
        return pieces

    def can_land(self, call: Hashable, layer_id: int, generation: int) -> bool:
        """Whether the call may add its gradients of a layer now; see LayerSlot.can_land."""
        return all(self._slots[home].can_land(call, generation) for home in self._layers[layer_id].homes)

    def upload_issued(self, call: Hashable, layer_id: int, version: int, event: Event) -> None:
        """Record that an upload was queued; `event` passes when the upload has read the weights."""
        with self._monitor:
            for home in self._layers[layer_id].homes:
                self._slots[home].upload_issued(call, version, event)
            self._monitor.changed()

    def upload_dropped(self, call: Hashable, layer_id: int, version: int) -> None:
        """Record that an announced upload will not be issued: the weights may be overwritten."""
        with self._monitor:
            for home in self._layers[layer_id].homes:
                self._slots[home].upload_dropped(call, version)
            self._monitor.changed()

    # Writing weights.

    def keep_two(self, layer_id: int) -> None:
        """Allocate the layer's second buffer, so that a new version no longer overwrites the version before it."""
        missing = [r for r in self._layers[layer_id].at_home if r.master is not None and r.back is None]
        if missing:
            self._give_second_memory(self._layers[layer_id], missing)

    def begin(self, layer_id: int, version: int) -> WeightBuffer:
        """Return the buffer to write `version` into, after waiting for the uploads that still read the buffer."""
        slot = self._slots[layer_id]
        has_two = any(record.back is not None for record in self._layers[layer_id].at_home)
        with self._monitor:
            # With two buffers, choose the one without the newest version: calls can go on reading that version.
            newest = slot.buffer_of(version - 1)
            assert newest is not None
            target = newest.other if has_two else WeightBuffer.FRONT
            self._monitor.wait_until(
                lambda: slot.can_write(version, target), f"uploads of layer {layer_id} to be issued"
            )
            events = slot.write_begun(version, target)
        failure = _wait_for_all(events)  # outside the monitor: copies take long and must not block other threads
        if failure is not None:
            self._failed_uploads[layer_id] = failure
        return target

    def end(self, layer_id: int, version: int, target: WeightBuffer) -> None:
        """Allow calls to read `version`, then raise the error of an upload that failed while `begin` waited for it."""
        with self._monitor:
            self._slots[layer_id].written(version, target)
            self._monitor.changed()
        failure = self._failed_uploads.pop(layer_id, None)
        if failure is not None:
            raise failure

    def revoke(self, layer_id: int, version: int, target: WeightBuffer) -> None:
        """Discard the new weights in buffer `target`: `version` gets the weights of the version before."""
        with self._monitor:
            self._slots[layer_id].write_revoked(version, target)
            self._monitor.changed()

    def unchanged(self, layer_id: int, version: int) -> None:
        """Record that step `version` did not change the layer."""
        with self._monitor:
            self._slots[layer_id].unchanged(version)
            self._monitor.changed()

    def publish(self, layer_id: int, version: int, *, copy: bool) -> None:
        """Write the values of all masters as weights of `version`, unless the layer already has that version.

        `copy`: False for the version of a failed step, which gets the weights of the version before.
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
        """Bring `version` into the front buffers, which are the memory of the user's parameters.

        Waits for the uploads of running calls. Allowed only while the optimizer is idle and no call can be announced.
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
            # Shielded: after a Ctrl-C between the copy and its record, the slot would name the wrong buffer.
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
        """Allocate second buffer for the parameters `missing` of a layer.

        If other parameters of the layer have second buffer, the back buffer holds a version already. The new memory
        then starts with the current weights, so that this version is complete.
        """
        others_have = any(record.back is not None for record in layer.at_home)
        layout = lay_out([record.weights for record in missing])
        self._require_second_memory()
        flat = HostBuffer(layout.total_bytes, self._pinner)
        self._backs.append(flat)
        # These views may share one storage, unlike the views of [Note: one storage per tensor]: users never get them.
        for record, view in zip(missing, layout.views(flat.tensor), strict=True):
            record.back = view.copy_(record.weights) if others_have else view
        if len(missing) == len(layer.at_home):
            layer.back = flat

    def _require_second_memory(self) -> None:
        """Raise HostMemoryError if the second buffers that parameters still lack do not fit.

        Counts all layers at once: the system counts memory that is allocated but not yet written as free, so a check
        layer by layer would miss what earlier layers have allocated.
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
    """Copy a parameter's second buffer to the first. Also copy the first to the second if its content is still needed.

    It is needed with `keep_old`, and if it holds the master's high halves, which can happen after a failed step.
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
    """Wait for all events and return the first error, if any. A copy that failed does not read its memory any more."""
    failure: BaseException | None = None
    for event in events:
        try:
            event.wait()
        except BaseException as error:
            failure = failure or error
    return failure


def _parameter_pieces(
    place: TensorPlace, image: torch.Tensor, record: ParameterRecord, buffer: WeightBuffer
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (part of the image, host memory) for each copy that fills one parameter's place in a device image.

    That is one copy, or one per range between the parameter's `cuts`.
    """
    memory = record.memory(buffer)
    if not record.cuts or memory is not record.weights:
        return [(place.view(image), memory)]
    weights, size = record.weights, record.weights.nbytes
    storage, offset = weights.untyped_storage(), weights.storage_offset() * weights.itemsize
    host = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))
    device = image[place.offset_bytes : place.offset_bytes + size]
    return [(device[a:b], host[a:b]) for a, b in itertools.pairwise((0, *record.cuts, size))]


class Masters:
    """The masters of one model; `of` makes each when it is first needed."""

    def __init__(
        self,
        layers: Sequence[LayerRecord],
        optim_dtype: torch.dtype | None,
        home: Callable[[], CopyHome | None],
        bits: int = 32,
    ) -> None:
        """Copies are made later, by `of`.

        `optim_dtype`: the dtype of all copies; None gives each the dtype of its parameter. `home`: returns the store
        of the copies, or None once the store is gone. `bits`: of the values of float32 masters of bfloat16 weights.
        """
        self._layers = layers
        self.optim_dtype, self.bits = optim_dtype, bits
        self._home = home
        # Masters that code outside of steps has used since the last call, by id. The value is the version counter of a
        # master with changes of a failed step, which only a write may publish, else None.
        self.used: dict[int, int | None] = {}
        self.shared: set[int] = set()  # ids of masters used earlier whose memory code may still write
        self._may_lose_updates = optim_dtype is None and any(
            record.weights.dtype in _LOW_PRECISIONS for layer in layers for record in layer.parameters
        )

    def rearrange(self, layers: Sequence[LayerRecord]) -> None:
        """Replace the layers by others with the same parameters."""
        self._layers = layers

    def of(self, record: ParameterRecord) -> OptimizerCopy:
        """The master of a parameter; the first call makes it from the current weights."""
        if record.master is None:
            home = self._home()
            share = None if home is None or home.is_read_on_host else home.share
            dtype = self.optim_dtype or record.weights.dtype
            record.master = OptimizerCopy.of_weight(record.weights, dtype, share, self.bits)
            record.master.home = self._home
        return record.master

    def note_use(self, masters: Sequence[OptimizerCopy]) -> None:
        """Note that code outside of steps may write masters, so that the next call looks for written values."""
        for master in masters:
            self.used.setdefault(id(master), master._version if master.may_be_ahead else None)

    def written(self, slots: Sequence[LayerSlot], newest: int) -> list[ParameterRecord]:
        """Parameters whose newest weights lack values that code outside of steps has written into their masters.

        `newest`: the newest version. Weights of that version which are still to be written will be complete.
        """
        wanted = self.used.keys() | self.shared
        records = [record for layer in self._layers for record in layer.at_home if id(record.master) in wanted]
        return [record for record in records if self._is_written(record, slots[record.home], newest)]

    def _is_written(self, record: ParameterRecord, slot: LayerSlot, newest: int) -> bool:
        master, buffer = record.master, slot.buffer_of(newest)
        if master is None or buffer is None or self.used.get(id(master)) == master._version:
            return False
        return master.is_ahead_of(record.memory(buffer))

    def publish_written(self, records: Sequence[ParameterRecord], slots: Sequence[LayerSlot], newest: int) -> None:
        """Write the values of masters into the newest weights. Only while nothing runs."""
        for record in records:
            buffer = slots[record.home].buffer_of(newest)
            if record.master is not None and buffer is not None:
                record.master.write_weight(record.memory(buffer))

    def forget_uses(self) -> None:
        """Forget noted uses. Masters that share memory with another tensor, which may be written later, are kept."""
        wanted = self.used.keys() | self.shared
        self.shared = {id(master) for master in self.existing() if id(master) in wanted and master.has_other_users}
        self.used = {}

    def has_own_precision(self, record: ParameterRecord) -> bool:
        """Whether the dtype of the master differs from the parameter's."""
        return self.optim_dtype is not None and self.optim_dtype is not record.weights.dtype

    def losing_updates(self) -> list[ParameterRecord]:
        """Trainable parameters that are updated in bfloat16 or float16 because the user gave no `optim_dtype`."""
        if not self._may_lose_updates:
            return []
        trained = {record.name: record for layer in self._layers for record in layer.trainable}
        return [record for record in trained.values() if record.weights.dtype in _LOW_PRECISIONS]

    def training_begins(self) -> None:
        """Call the `when_training` function of every copy that has one, and remove it so that it runs only once."""
        for master in self.existing():
            notify, master.when_training = master.when_training, None
            if notify is not None:
                notify()

    @property
    def exist(self) -> bool:
        """Whether any copy was made so far."""
        return next(self.existing(), None) is not None

    def existing(self) -> Iterator[OptimizerCopy]:
        """Iterate over the copies made so far, in the order of layers. A copy that layers share comes once."""
        for layer in self._layers:
            for record in layer.parameters:
                if record.home == layer.layer_id and record.master is not None:
                    yield record.master


def one_by_one(named: Sequence[tuple[str, OptimizerCopy]]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield masters one by one. When the next one is requested, the master before it releases memory.

    This limits memory use in code that saves all masters to a file.
    """
    for name, master in named:
        yield name, master
        master.rest_between_steps()
