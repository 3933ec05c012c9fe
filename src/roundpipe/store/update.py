"""One layer in one optimizer step: the gradients the step takes and the weights it writes.

Knows the store's gates, but no optimizer. Optimizer copies refer to the update of their layer, so that an optimizer can
update a layer as soon as its gradients have landed, and not only when those of all layers have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from roundpipe.store.records import HostGradient, ParameterRecord
from roundpipe.store.slot import WeightBuffer

if TYPE_CHECKING:
    from roundpipe.store.store import LayerStore

T = TypeVar("T")


class Caller(Protocol):
    """The user's thread while it runs the body of a step; see HandedStep."""

    thread: int

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work` on the optimizer thread and return its result."""


class StepAbandoned(BaseException):
    """Ends a step function whose gradients will never land. Is caught before it reaches a user."""


class LayerUpdate:
    """The update of one layer by one step; the GradientSource of the layer's optimizer copies meanwhile.

    Used on the optimizer thread, except `_take`, and except reads by a `caller`.
    """

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
        """`order`: position of the layer among all layers in the order in which gradients land.

        `caller`: the thread that runs the body of the step, if that is not the optimizer thread.
        """
        self.order = order
        # Calls on the host read the old weights where the new ones would go: the next step writes these instead.
        self.publishes_late = is_async and store.is_read_on_host
        self._store, self._layer_id = store, layer_id
        self._generation, self._version = step - 1, step
        self._is_async = is_async
        self._abandoned = abandoned
        self._thread = threading.get_ident()
        self._caller = caller
        self._records = [
            record
            for record in store.layers[layer_id].at_home
            if record.master is not None or record.param.requires_grad or record.gathered is not None
        ]
        self._gradients: dict[ParameterRecord, HostGradient] | None = None  # None until they have landed
        self._unwanted: list[ParameterRecord] = []  # parameters whose gradient was released before it landed
        self._settled = False  # published or revoked
        self._target: WeightBuffer | None = None
        self.updated: set[ParameterRecord] = set()  # parameters whose new weights are in `_target` already

    # Gradients.

    def prepare(self) -> None:
        """Make this the gradient source of the layer's copies, and allocate second weights if the step needs them."""
        # First of all: whatever fails later, the layer's gradients are taken and the next generation may land.
        self._store.when_landed(self._layer_id, self._generation, self._take)
        for record in self._records:
            master = self._store.masters.of(record)
            if not self.publishes_late:
                master.rest_between_steps()
            master.begin_step(self, record)
        if self._is_async and not self.publishes_late:
            self._store.weights.keep_two(self._layer_id)

    def _take(self) -> None:
        """Take the landed sums. Called under the monitor, possibly by the landing thread."""
        self._gradients = self._store.gradients.take(self._records)
        for record in list(self._gradients) if self._settled else self._unwanted:
            self.release(record)

    @property
    def has_landed(self) -> bool:
        """Whether the layer's gradients are in host memory; does not wait."""
        return self._gradients is not None

    def wait_for_gradients(self) -> None:
        """Block until the layer's gradients have landed; raises StepAbandoned if they never will."""
        if self._gradients is None:
            monitor = self._store.monitor
            with monitor:
                monitor.wait_until(
                    lambda: self._abandoned() or self._gradients is not None, f"gradients of layer {self._layer_id}"
                )
        if self._abandoned():
            raise StepAbandoned

    def is_usable(self) -> bool:
        """Whether the calling thread may use the step's gradients.

        These are the optimizer thread and the caller's. Once the step is settled any thread may: a caller's loop may
        read gradients that it has not cleared.
        """
        ident = threading.get_ident()
        is_callers = self._caller is not None and (self._settled or ident == self._caller.thread)
        return ident == self._thread or is_callers

    def gradient_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """The gradient of a parameter; waits until it has landed."""
        self.wait_for_gradients()
        assert self._gradients is not None
        gradient = self._gradients.get(record)
        return None if gradient is None else gradient.tensor

    def release(self, record: ParameterRecord) -> None:
        """The step does not need a gradient any more; possibly before it has landed."""
        with self._store.monitor:  # the gradient may be landing on another thread right now
            if self._gradients is None:
                self._unwanted.append(record)
            elif record in self._gradients:
                self._gradients.pop(record).release()

    # Weights.

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work`, which writes weights, on the optimizer thread: no signal handler can interrupt it there."""
        if self._caller is None or threading.get_ident() == self._thread:
            return work()
        return self._caller.carry_out(work)

    def target(self) -> WeightBuffer | None:
        """The buffer that the new weights are written into; waits until uploads have read what it holds.

        None if the weights are to be written from the masters later.
        """
        if self.publishes_late:
            return None
        if self._target is None:
            self._target = self._store.weights.begin(self._layer_id, self._version)
        return self._target

    @property
    def has_replaced_weights(self) -> bool:
        """Whether new weights lie where the weights before this step were."""
        is_old_there = self._store.slots[self._layer_id].can_upload(self._version - 1)
        return self._target is not None and not is_old_there

    def end_step(self) -> None:
        """End the step function's turn: gradients that it has not cleared stay with the copies.

        A caller's loop clears gradients after the step, so there they stay in host memory until then.
        """
        self.wait_for_gradients()
        for record in self._records:
            self._store.masters.of(record).end_step(keeps_source=self._caller is not None)

    def publish(self) -> None:
        """Complete the new weights and let calls read them. Called when the step has succeeded in all layers."""
        if not self.publishes_late:
            self._complete_weights()
        self._settled = True

    def revoke(self) -> None:
        """The step failed: drop its gradients, and its weights unless they have replaced the old ones.

        Waits for nothing: gradients that have not landed yet are dropped when they land.
        """
        if self._settled:
            return
        with self._store.monitor:  # from here on `_take` drops what lands
            self._settled = True
        for record in self._records:
            if record.master is not None:
                record.master.grad = None
                record.master.end_step()
                record.master.mark_touched()  # changes of the master stay, and the next step publishes them
        for record in list(self._gradients or ()):
            self.release(record)
        if self.publishes_late:
            return
        if self._target is None:
            self._store.weights.unchanged(self._layer_id, self._version)
        elif self.has_replaced_weights:
            self._complete_weights()
        else:
            self._store.weights.revoke(self._layer_id, self._version, self._target)

    def _complete_weights(self) -> None:
        """Write the weights of masters that the optimizer has not written, and make the version readable."""
        if not self._records:
            self._store.weights.unchanged(self._layer_id, self._version)
            return
        target = self.target()
        assert target is not None
        try:
            with torch.no_grad():
                for record in self._records:
                    master = self._store.masters.of(record)
                    # Not every kernel changes the version counter: a master that was not updated in one pass counts
                    # as changed.
                    if record not in self.updated or master.was_touched():
                        master.write_weight(record.memory(target))
                        master.forget_touches()
                    master.rest_after_step()
        finally:
            self._store.weights.end(self._layer_id, self._version, target)
