"""One layer in one optimizer step: the gradients it takes and the weights it makes.

Made by optim.stepper for every layer and step, used on the optimizer thread only. An optimizer that works in one pass
finds it through its parameters, so that a layer is updated when its gradients have landed and not when all have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from roundpipe.store.master import OptimizerCopy
from roundpipe.store.records import Gathered, ParameterRecord
from roundpipe.store.slot import WeightBuffer

if TYPE_CHECKING:
    from roundpipe.store.store import LayerStore

T = TypeVar("T")


class Caller(Protocol):
    """The thread that an open step was handed to; see optim.handed_step."""

    thread: int

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work` on the optimizer thread and return its result."""


class StepAbandoned(BaseException):
    """Unwinds a step function whose gradients will not come. Never reaches a user."""


class LayerUpdate:
    def __init__(
        self,
        store: LayerStore,
        layer_id: int,
        order: int,
        *,
        step: int,
        is_async: bool,
        abandoned: Callable[[], bool],
        caller: Caller | None = None,
    ) -> None:
        """`order`: the place of its gradients among those of all layers, by the time they land.

        `caller`: given where the step's body runs on another thread than the step itself.
        """
        self.order = order
        self._store, self._layer_id = store, layer_id
        self._generation, self._version = step - 1, step
        self._is_async = is_async
        self._abandoned = abandoned
        self._thread = threading.get_ident()
        self._caller = caller
        self._records = [record for record in store.layers[layer_id].at_home if store.masters.wanted(record)]
        self._gradients: dict[ParameterRecord, Gathered] | None = None  # once they have landed
        self._unwanted: list[ParameterRecord] = []  # whose gradients were cleared before they came
        self._settled = False
        self._target: WeightBuffer | None = None
        self._updated: set[ParameterRecord] = set()

    @property
    def publishes_late(self) -> bool:
        """Whether these weights must not be written before the next step: calls on the host read the old ones."""
        return self._is_async and self._store.is_read_on_host

    # Gradients.

    def prepare(self) -> None:
        """Tell the optimizer's copies where their gradients come from, and take the memory the step will need."""
        self._store.when_landed(self._layer_id, self._generation, self._take)
        for record in self._records:
            master = self._store.masters.of(record)
            if not self.publishes_late:
                master.rest_between_steps()
            master.begin_step(Source(self, record))
        if self._is_async and not self.publishes_late:
            self._store.weights.keep_two(self._layer_id)

    def _take(self) -> None:
        """Called under the monitor, perhaps by the thread that lands: what is gathered is the step's from now on."""
        self._gradients = self._store.gradients.take(self._records)
        if self._settled:
            self._drop_gradients()
        for record in self._unwanted:
            self.release(record)

    def _drop_gradients(self) -> None:
        for record in list(self._gradients or ()):
            self.release(record)

    @property
    def has_landed(self) -> bool:
        return self._gradients is not None

    def wait_for_gradients(self) -> None:
        self._store.wait_for_step(lambda: self._gradients is not None, self._abandoned, self._layer_id)
        if self._abandoned():
            raise StepAbandoned

    def gradient_of(self, record: ParameterRecord) -> torch.Tensor | None:
        self.wait_for_gradients()
        assert self._gradients is not None
        return self._gradients[record].tensor if record in self._gradients else None

    def release(self, record: ParameterRecord) -> None:
        """The step is done with a gradient, perhaps before it has come."""
        with self._store.monitor:  # they may be landing just now
            if self._gradients is None:
                self._unwanted.append(record)
            elif record in self._gradients:
                self._gradients.pop(record).let_go()

    def is_current_thread(self) -> bool:
        ident = threading.get_ident()
        is_callers = self._caller is not None and (self._settled or ident == self._caller.thread)
        return ident == self._thread or is_callers

    @property
    def can_be_put_back(self) -> bool:
        return self._caller is not None and not self._settled

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work`, which writes weights, on the optimizer thread: an interrupt must not leave it half done."""
        is_there = self._caller is None or threading.get_ident() == self._thread
        return work() if is_there or self._caller is None else self._caller.carry_out(work)

    # Weights.

    def target_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """Where new weights may be written at once; None if they are to be made from the masters later."""
        return None if self.publishes_late else record.memory(self._begun())

    @property
    def has_updated(self) -> bool:
        """Whether the optimizer has updated any of it in one pass."""
        return bool(self._updated)

    @property
    def has_replaced_weights(self) -> bool:
        """Whether what it has written lies where the weights before it were."""
        return self._target is not None and self._old() is None

    def was_updated(self, record: ParameterRecord) -> None:
        self._updated.add(record)

    def end_step(self) -> None:
        """The step function has come to its end: gradients that it has not cleared stay with the copies.

        A caller's own loop clears them after the step, so there they stay as they came until then.
        """
        self.wait_for_gradients()
        for record in self._records:
            self._store.masters.of(record).end_step(keeps_source=self._caller is not None)

    def publish(self) -> None:
        """All has gone well, in all layers: the weights are made complete and count from now on."""
        if not self.publishes_late:
            self._complete_weights()
        self._settled = True

    def revoke(self) -> None:
        """The step failed: its gradients are dropped, and its weights, unless they have replaced the old ones.

        Waits for nothing: gradients that are still to come are dropped when they do.
        """
        if self._settled:
            return
        with self._store.monitor:
            self._settled = True
        for master in self._existing_masters():
            master.grad = None
            master.end_step()
            master.mark_touched()  # what the step has changed stays, and is published by the next one
        self._drop_gradients()
        if not self.publishes_late:
            self._revoke_weights()

    def _existing_masters(self) -> list[OptimizerCopy]:
        return [record.master for record in self._records if record.master is not None]

    def _revoke_weights(self) -> None:
        if self._target is None:
            self._store.weights.unchanged(self._layer_id, self._version)
        elif self.has_replaced_weights:
            self._complete_weights()
        else:
            self._store.weights.revoke(self._layer_id, self._version, self._target)

    def _begun(self) -> WeightBuffer:
        if self._target is None:
            self._target = self._store.weights.begin(self._layer_id, self._version)
        return self._target

    def _old(self) -> WeightBuffer | None:
        """The buffer with the weights before this step; None if they have been overwritten."""
        return self._store.slots[self._layer_id].buffer_of(self._version - 1)

    def _complete_weights(self) -> None:
        if not self._records:
            self._store.weights.unchanged(self._layer_id, self._version)
            return
        target = self._begun()
        try:
            with torch.no_grad():
                for record in self._records:
                    master = self._store.masters.of(record)
                    # Not every kernel leaves a trace: what was not written in one pass may have changed.
                    if record not in self._updated or master.was_touched():
                        master.write_weight(record.memory(target))
                        master.forget_touches()
                    master.rest_after_step()
        finally:
            self._store.weights.end(self._layer_id, self._version, target)


class Source:
    """Where one step's gradient of one copy comes from, and where its weights go."""

    def __init__(self, update: LayerUpdate, record: ParameterRecord) -> None:
        self.update, self.record = update, record

    def is_usable(self) -> bool:
        return self.update.is_current_thread()

    def get(self) -> torch.Tensor | None:
        return self.update.gradient_of(self.record)

    def release(self) -> None:
        self.update.release(self.record)
