"""The host's side of all layers: who may read or write which weights and gradients, and when.

Opened by api for one model; used by runtime (uploads, landings), by optim.stepper (gradients, weights) and by api.
All waiting goes through the monitor; the rules themselves are LayerSlot's. Knows no schedule and no optimizer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import nn

from roundpipe.devices import HostPinner
from roundpipe.errors import ModelChangedError
from roundpipe.store import adoption
from roundpipe.store.adoption import PinMode
from roundpipe.store.composition import Composition
from roundpipe.store.host_gradients import HostGradients
from roundpipe.store.intake import refuse_unusable
from roundpipe.store.landing_buffers import LandingBuffers
from roundpipe.store.layer_slot import LayerSlot
from roundpipe.store.layer_weights import LayerWeights
from roundpipe.store.masters import Masters
from roundpipe.store.optimizer_copy import GradientOwner
from roundpipe.store.records import LayerRecord, ParameterRecord
from roundpipe.store.registered_pages import RegisteredPages
from roundpipe.store.training_memory import require_training_memory
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
        self.pid = os.getpid()
        refuse_unusable(layers, names)
        self._training_fits = torch.is_grad_enabled()  # without grad: for inference, as long as no call trains
        require_training_memory(layers, optim_dtype, pin_mode, trains=self._training_fits)
        self.monitor = monitor
        self.layers = adoption.adopt(layers, names, pin_mode, pinner)
        self.parameters: list[ParameterRecord] = list(
            {id(record.param): record for layer in self.layers for record in layer.parameters}.values()
        )
        self._by_param = {id(record.param): record for record in self.parameters}
        adoption.claim(self.parameters, self)
        self._registered = None
        if pin_mode is PinMode.REGISTER:
            self._registered = RegisteredPages([record.weights for record in self.parameters], pinner)
            for record in self.parameters:
                record.cuts = self._registered.cuts(record.weights)
        self.slots = [LayerSlot() for _ in self.layers]
        self.gradients = HostGradients(self.parameters)
        self.masters = Masters(self.layers, optim_dtype, weakref.ref(self))
        self.gradient_owner: GradientOwner | None = None  # for copies whose gradients are asked for outside steps
        is_pinned = pin_mode is not PinMode.OFF
        self.weights = LayerWeights(self.layers, self.slots, monitor, pinner if is_pinned else None)
        self.landing_buffers = LandingBuffers(pinner if is_pinned else None)
        self._takers: dict[tuple[int, int], Callable[[], None]] = {}
        self.is_read_on_host = False  # whether calls use the parameters where they lie
        self.graphs_version = 0  # of the weights that graphs made on the host since then have read
        self._names = names
        self._compositions = [Composition(layer, names) for layer in self.layers]

    def close(self) -> None:
        """Unpin and give the parameters free; their values stay where they are."""
        self.weights.close()
        self.landing_buffers.close()
        if self._registered is not None:
            self._registered.close()
        adoption.release(self.parameters, self)
        self.gradient_owner = None

    def rearrange(self, layers: Sequence[nn.Module], *, visible: int, newest: int) -> None:
        """Let other layers have the same parameters.

        Only while nothing runs: calls read version `visible`, which lies in front, and steps up to `newest` are done.
        """
        self.weights.bring_to_back(newest)
        self.layers = adoption.rearrange(layers, self._names, self.parameters, self.layers)
        self.slots = [self._slot_of(layer, visible, newest) for layer in self.layers]
        self.weights.rearrange(self.layers, self.slots)
        self.masters.rearrange(self.layers)
        self._compositions = [Composition(layer, self._names) for layer in self.layers]

    @staticmethod
    def _slot_of(layer: LayerRecord, visible: int, newest: int) -> LayerSlot:
        if any(record.back is not None for record in layer.at_home) and visible != newest:
            return LayerSlot(range(visible, visible + 1), range(newest, newest + 1), generation=newest)
        return LayerSlot(range(visible, newest + 1), generation=newest)

    def record_of(self, param: torch.Tensor) -> ParameterRecord:
        """The record of a parameter that belongs to this store."""
        return self._by_param[id(param)]

    def owns(self, param: torch.Tensor) -> bool:
        return id(param) in self._by_param

    def check_training_memory(self) -> None:
        """Refuse training that cannot fit, if wrapping has not counted it."""
        if not self._training_fits:
            require_training_memory([layer.module for layer in self.layers], self.masters.optim_dtype, PinMode.OFF)
            self._training_fits = True

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
            for layer_id, slot in enumerate(self.slots):
                slot.cancel(call)
                self._let_take(layer_id)
            self.monitor.changed()

    # Landings.

    def can_land(self, call: Hashable, layer_id: int, generation: int) -> bool:
        return all(self.slots[home].can_land(call, generation) for home in self.layers[layer_id].homes)

    def landed(self, call: Hashable, layer_id: int, generation: int) -> None:
        with self.monitor:
            for home in self.layers[layer_id].homes:
                self.slots[home].landed(call, generation)
                self._let_take(home)
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

    def when_landed(self, layer_id: int, generation: int, take: Callable[[], None]) -> None:
        """Call `take` as soon as the layer's gradients have landed, on whatever thread, under the monitor.

        Those of the next generation may land from then on.
        """
        with self.monitor:
            self._takers[layer_id, generation] = take
            self._let_take(layer_id)

    def _let_take(self, layer_id: int) -> None:
        slot = self.slots[layer_id]
        while slot.can_consume(slot.open_generation) and (layer_id, slot.open_generation) in self._takers:
            generation = slot.open_generation
            self._takers[layer_id, generation]()
            slot.consumed(generation)
            del self._takers[layer_id, generation]  # last: what is interrupted before is repeated
            self.monitor.changed()

    def wait_for_step(self, ready: Callable[[], bool], abandoned: Callable[[], bool], layer_id: int) -> None:
        with self.monitor:
            self.monitor.wait_until(lambda: abandoned() or ready(), f"gradients of layer {layer_id}")

    # The user's hands on the model.

    def check_unchanged(self) -> None:
        """The model must still consist of what was wrapped, and the parameters be where we put them."""
        for composition in self._compositions:
            composition.check()
        for record in self.parameters:
            if not record.is_untouched():
                now, then = record.param, record.weights
                resized = (
                    "" if now.shape == then.shape else f", of shape {tuple(now.shape)} instead of {tuple(then.shape)}"
                )
                raise ModelChangedError(
                    f"parameter {record.name!r} was moved or cast after wrapping (now {now.dtype} on {now.device}"
                    f"{resized}); convert or resize the model before wrapping it, or close() and wrap it again."
                )

    def written_by_user(self) -> list[ParameterRecord]:
        return [record for record in self.parameters if record.param._version != record.seen_version]

    def adopt_written(self, records: Sequence[ParameterRecord]) -> None:
        """The user wrote into these parameters: the optimizer's copies follow. Only while nothing runs."""
        for record in records:
            version = record.param._version
            if record.master is not None:
                with torch.no_grad():
                    record.master.follow_weight(record.weights)
                    if record.back is not None:
                        record.back.copy_(record.param)
            record.seen_version = version  # last: after an interrupt the next call adopts again
