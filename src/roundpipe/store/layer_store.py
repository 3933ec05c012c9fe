"""The host's side of all layers: who may read or write which weights and gradients, and when.

Opened by api for one model; used by runtime (uploads, landings), by optim.stepper (publish, consume) and by api.
All waiting goes through the monitor; the rules themselves are LayerSlot's. Knows no schedule and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import nn

from roundpipe.devices import Event, HostPinner
from roundpipe.errors import ModelChangedError
from roundpipe.store import adoption
from roundpipe.store.adoption import PinMode
from roundpipe.store.composition import Composition
from roundpipe.store.host_gradients import HostGradients
from roundpipe.store.intake import refuse_unusable
from roundpipe.store.layer_slot import LayerSlot
from roundpipe.store.masters import Masters
from roundpipe.store.records import ParameterRecord
from roundpipe.store.registered_pages import RegisteredPages
from roundpipe.waiting import Monitor

__all__ = ["LayerStore", "PinMode"]


class LayerStore:
    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: Mapping[int, str],
        *,
        optim_dtype: torch.dtype | None,
        pin_mode: PinMode,
        pinner: HostPinner,
        monitor: Monitor,
    ) -> None:
        refuse_unusable(layers, names)
        adoption.check_memory(layers, optim_dtype, pin_mode)
        self.monitor = monitor
        self.layers = adoption.adopt(layers, dict(names), pin_mode, pinner)
        self.parameters: list[ParameterRecord] = list(
            {id(record.param): record for layer in self.layers for record in layer.parameters}.values()
        )
        adoption.claim(self.parameters, self)
        self._registered = None
        if pin_mode is PinMode.REGISTER:
            self._registered = RegisteredPages([record.weights for record in self.parameters], pinner)
            for record in self.parameters:
                record.cuts = self._registered.cuts(record.weights)
        self.slots = [LayerSlot() for _ in self.layers]
        self.gradients = HostGradients(self.parameters)
        self.masters = Masters(self.layers, optim_dtype)
        self._compositions = [Composition(layer) for layer in self.layers]

    def close(self) -> None:
        """Unpin and give the parameters free; their values stay where they are."""
        for layer in self.layers:
            if layer.flat is not None:
                layer.flat.close()
        if self._registered is not None:
            self._registered.close()
        adoption.release(self.parameters, self)

    # What a call will do. Registered before it starts, so that nobody overtakes it.

    def expect(
        self, call: Hashable, *, uploads: Mapping[int, int], version: int, landings: Sequence[int], generation: int
    ) -> None:
        """`uploads`: how often each layer goes up; `landings`: the layers whose gradients come down once."""
        with self.monitor:
            for layer_id, count in uploads.items():
                for home in self.layers[layer_id].homes:
                    self.slots[home].expect_uploads(call, version, count)
            for layer_id in landings:
                for home in self.layers[layer_id].homes:
                    self.slots[home].expect_landings(call, generation, 1)

    def cancel(self, call: Hashable) -> None:
        with self.monitor:
            for slot in self.slots:
                slot.cancel(call)
            self.monitor.changed()

    # Uploads.

    def can_upload(self, layer_id: int, version: int) -> bool:
        return all(self.slots[home].can_upload(version) for home in self.layers[layer_id].homes)

    def wait_for_weights(self, layer_id: int, version: int, cancelled: Callable[[], bool]) -> bool:
        """Returns whether the weights of `version` may be read now; False when `cancelled` first."""
        with self.monitor:
            self.monitor.wait_until(
                lambda: cancelled() or self.can_upload(layer_id, version),
                f"weights of layer {layer_id}, version {version}",
            )
            return not cancelled()

    def wait_for_version(self, version: int) -> None:
        with self.monitor:
            self.monitor.wait_until(
                lambda: all(slot.weights_version == version for slot in self.slots), f"weights of version {version}"
            )

    def upload_issued(self, call: Hashable, layer_id: int, version: int, event: Event) -> None:
        with self.monitor:
            for home in self.layers[layer_id].homes:
                self.slots[home].upload_issued(call, version, event)
            self.monitor.changed()

    # Landings.

    def can_land(self, call: Hashable, layer_id: int, generation: int) -> bool:
        return all(self.slots[home].can_land(call, generation) for home in self.layers[layer_id].homes)

    def landed(self, call: Hashable, layer_id: int, generation: int) -> None:
        with self.monitor:
            for home in self.layers[layer_id].homes:
                self.slots[home].landed(call, generation)
            self.monitor.changed()

    def wait_until_landed(self, generation: int) -> None:
        """Block until every expected gradient of `generation` is in host memory (or its call was cancelled)."""
        for layer_id, slot in enumerate(self.slots):
            with self.monitor:
                self.monitor.wait_until(
                    lambda slot=slot: slot.can_consume(generation),  # type: ignore[misc]
                    f"gradients of layer {layer_id}",
                )

    # The optimizer's side.

    def publish(self, layer_id: int, version: int, *, copy: bool) -> None:
        """Make the masters the weights of `version`, once nobody reads the older ones any more."""
        slot = self.slots[layer_id]
        if slot.weights_version >= version:
            return
        with self.monitor:
            self.monitor.wait_until(lambda: slot.can_publish(version), f"uploads of layer {layer_id} to be issued")
            events = slot.take_upload_events()
        failure: BaseException | None = None
        for event in events:
            try:
                event.wait()
            except BaseException as error:  # a copy that failed does not read any more either
                failure = failure or error
        if copy:
            self.masters.copy_to_weights(layer_id)
        with self.monitor:
            slot.published(version)
            self.monitor.changed()
        if failure is not None:
            raise failure

    def consume(self, layer_id: int, generation: int, abandoned: Callable[[], bool]) -> bool:
        """Hand the gathered gradients of a layer to the optimizer's copies; False when `abandoned` first."""
        slot = self.slots[layer_id]
        with self.monitor:
            self.monitor.wait_until(
                lambda: abandoned() or slot.can_consume(generation), f"gradients of layer {layer_id}"
            )
            if abandoned():
                return False
        at_home = [record for record in self.layers[layer_id].parameters if record.home == layer_id]
        try:
            self.gradients.hand_over(at_home, self.masters)
        finally:
            self.skip_generation(layer_id, generation)
        return True

    def skip_generation(self, layer_id: int, generation: int) -> None:
        """The slot takes gradients of the next generation from now on."""
        with self.monitor:
            slot = self.slots[layer_id]
            if slot.open_generation == generation:
                slot.consumed(generation)
                self.monitor.changed()

    # The user's hands on the model.

    def check_unchanged(self) -> None:
        """The model must still consist of what was wrapped, and the parameters be where we put them."""
        for composition in self._compositions:
            composition.check()
        for record in self.parameters:
            if not record.is_untouched():
                raise ModelChangedError(
                    f"parameter {record.name!r} was moved or cast after wrapping (now {record.param.dtype} on "
                    f"{record.param.device}); convert the model before wrapping it."
                )

    def written_by_user(self) -> list[ParameterRecord]:
        return [record for record in self.parameters if record.param._version != record.seen_version]

    def adopt_written(self, records: Sequence[ParameterRecord]) -> None:
        """The user wrote into these parameters: the optimizer's copies follow. Only while the optimizer is idle."""
        for record in records:
            record.seen_version = record.param._version
            if record.master is not None:
                with torch.no_grad():
                    record.master.copy_(record.param)
