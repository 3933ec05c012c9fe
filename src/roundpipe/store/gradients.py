"""The host's sums of gradients, and the hand-over of one layer's gradients and weights to an optimizer step.

HostGradients holds the sums from the first landing after a step until the next step takes them. The landing thread
adds, the optimizer thread takes, callers read and drop. One lock makes each operation atomic; LayerStore decides the
order of the operations.

LayerUpdate is one layer in one step: the gradients that the step takes and the weights that it writes. Optimizer copies
refer to the update of their layer, so an optimizer can update a layer as soon as its gradients have landed. Knows no
device, no call and no optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from roundpipe.store.records import HostGradient, ParameterRecord, WeightBuffer

if TYPE_CHECKING:
    from roundpipe.store.store import LayerStore


class HostGradients:
    """The sums of all parameters of one model, kept in `ParameterRecord.gathered`.

    Also the GradientSource of optimizer copies outside steps: a copy then shows the sum of its parameter.
    """

    def __init__(self, parameters: Sequence[ParameterRecord]) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()
        self.num_additions = 0  # grows with every addition: an unchanged number means that no sum has changed

    def add(self, gradients: list[HostGradient], cancelled: Callable[[], bool]) -> None:
        """Add each gradient to the sum of its parameter. Does nothing if the run was cancelled.

        Removes from the list what it has added; the caller still owns the rest. The first gradient of a parameter
        becomes the sum without a copy, as in autograd.
        """
        with self._lock, torch.no_grad():
            # Asked under the lock: after a failure `drop` must not miss a late addition.
            if cancelled():
                return
            self.num_additions += len(gradients)
            while gradients:
                gradient = gradients[-1]  # leaves the list once it was added, so that an error cannot lose it
                total = gradient.record.gathered
                if total is None:
                    gradient.record.gathered = gradients.pop()
                else:
                    total.tensor.add_(gradient.tensor)
                    gradients.pop().release()

    def has_any(self) -> bool:
        """Whether any gradient has landed since the last step."""
        return any(record.gathered is not None for record in self._parameters)

    def take(self, records: Sequence[ParameterRecord]) -> dict[ParameterRecord, HostGradient]:
        """Hand the sums of `records` to the caller, who releases them; the next gradient starts a new sum."""
        with self._lock:
            taken = {}
            for record in records:
                if record.exposed:
                    _conceal(record)
                if record.gathered is not None:
                    taken[record], record.gathered = record.gathered, None
            return taken

    def drop(self) -> None:
        """Forget all sums, and clear `.grad` of every parameter, also where the user has set it."""
        with self._lock:
            for record in self._parameters:
                record.exposed, record.param.grad = False, None
                _forget(record)

    # Shown as `.grad` of the user's parameters.

    def expose(self) -> None:
        """Set `.grad` of every parameter to its sum."""
        with self._lock:
            for record in self._parameters:
                if record.gathered is not None and not record.exposed:
                    # Landing buffers use their views again: what the user does to this tensor object must not stay.
                    record.gathered.tensor = record.gathered.tensor.detach()
                record.param.grad = None if record.gathered is None else record.gathered.tensor
                record.exposed = record.gathered is not None

    def conceal(self) -> None:
        """Clear `.grad` where it shows a sum: a step will take the sum, and later additions belong to the next step."""
        with self._lock:
            for record in self._parameters:
                _conceal(record)

    def touched_by_user(self) -> list[ParameterRecord]:
        """Parameters whose `.grad` the user has set, replaced or cleared since it was exposed or concealed."""
        return [
            record
            for record in self._parameters
            if record.param.grad is not (record.gathered.tensor if record.exposed and record.gathered else None)
        ]

    def adopt_touched(self, records: Sequence[ParameterRecord]) -> None:
        """Follow the user's changes of `.grad`: drop a sum that was cleared, take one that was replaced, add a new one.

        Each sum changes by one assignment, so an interrupt neither loses a gradient nor counts it twice.
        """
        with self._lock, torch.no_grad():
            for record in records:
                users, old = record.param.grad, record.gathered
                new = None if record.exposed else old
                if users is not None:
                    own = torch.empty_like(record.weights, memory_format=torch.preserve_format).copy_(users)
                    new = HostGradient(record, own if new is None else new.tensor + own)
                record.gathered, record.param.grad, record.exposed = new, None, False
                if old is not None and new is not old:
                    old.release()

    # Shown as `.grad` of optimizer copies outside steps; see GradientSource.

    def is_usable(self) -> bool:
        """Any thread may read a sum outside steps."""
        return True

    def gradient_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """The sum of one parameter. Does not wait: a view begins when all gradients have landed."""
        return None if record.gathered is None else record.gathered.tensor

    def release(self, record: ParameterRecord) -> None:
        """Drop the sum of one parameter: its optimizer copy has a gradient tensor or none instead."""
        with self._lock:
            _conceal(record)
            _forget(record)


def _forget(record: ParameterRecord) -> None:
    if record.gathered is not None:
        record.gathered.release()
        record.gathered = None


def _conceal(record: ParameterRecord) -> None:
    if record.exposed:
        record.param.grad, record.exposed = None, False


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
