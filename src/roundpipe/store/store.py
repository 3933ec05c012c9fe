"""The layers of one model in host memory: which thread may read or write weights and gradients, and when.

HostGradients holds each parameter's sum of gradients from the first landing after a step until the next step takes it.
LayerUpdate updates one layer in one optimizer step: it takes the layer's gradients and writes its new weights.
LayerStore owns all parts of the store and decides when gradients may land and be taken. Threads wait in the monitor
until a LayerSlot, which implements the rules, allows the access. Knows no schedule and no optimizer.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from roundpipe.devices import HostPinner
from roundpipe.errors import ModelChangedError
from roundpipe.monitor import Monitor
from roundpipe.store import adopt as adoption
from roundpipe.store.adopt import Composition, PinMode, refuse_unusable, require_training_memory
from roundpipe.store.host_memory import LandingBuffers, RegisteredPages
from roundpipe.store.master import GradientOwner
from roundpipe.store.records import HostGradient, LayerRecord, ParameterRecord, WeightBuffer
from roundpipe.store.weights import LayerSlot, LayerWeights, Masters


class HostGradients:
    """The gradient sums of one model's parameters, kept in `ParameterRecord.gathered`.

    While no step runs, masters take their gradients from this object: `.grad` of a master shows its parameter's sum.
    """

    def __init__(self, parameters: Sequence[ParameterRecord]) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()
        self.num_additions = 0  # grows with every addition: an unchanged number means that no sum has changed

    def add(self, gradients: list[HostGradient], cancelled: Callable[[], bool]) -> None:
        """Add each gradient to the sum of its parameter. Does nothing if the run was cancelled.

        Removes each gradient that was added from the list; the caller still owns those that remain. The first gradient
        of a parameter becomes the sum without a copy, as in autograd.
        """
        with self._lock, torch.no_grad():
            # Checked under the lock: otherwise a cancelled run could add a gradient after `drop` has cleared the sums.
            if cancelled():
                return
            self.num_additions += len(gradients)
            pairs = [(gradient.record.gathered, gradient) for gradient in gradients]
            later = [(total.tensor, gradient.tensor) for total, gradient in pairs if total is not None]
            if later:
                # One operation for all tensors: every Python operation takes the interpreter lock away from the thread
                # that launches kernels.
                torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later])
            while gradients:  # a gradient leaves the list only after it was added: an error cannot lose it
                total, gradient = pairs.pop()
                if total is None:
                    gradient.record.gathered = gradients.pop()
                else:
                    gradients.pop().release()

    def has_any(self) -> bool:
        """Whether any gradient has landed since the last step."""
        return any(record.gathered is not None for record in self._parameters)

    def take(self, records: Sequence[ParameterRecord]) -> dict[ParameterRecord, HostGradient]:
        """Return the sums of `records` and forget them: the caller releases them, and new gradients start new sums."""
        with self._lock:
            taken = {}
            for record in records:
                if record.exposed:
                    _conceal(record)
                if record.gathered is not None:
                    taken[record], record.gathered = record.gathered, None
            return taken

    def drop(self) -> None:
        """Release all sums and clear `.grad` of every parameter, even where the user has set `.grad`."""
        with self._lock:
            for record in self._parameters:
                record.exposed, record.param.grad = False, None
                _forget(record)

    # Sums shown as `.grad` of the user's parameters.

    def expose(self) -> None:
        """Set `.grad` of every parameter to its sum, or to None if it has no sum."""
        with self._lock:
            for record in self._parameters:
                if record.gathered is not None and not record.exposed:
                    # Show a new tensor object: landing buffers reuse theirs, and attributes that the user sets on
                    # `.grad` must not reappear on a later gradient.
                    record.gathered.tensor = record.gathered.tensor.detach()
                record.param.grad = None if record.gathered is None else record.gathered.tensor
                record.exposed = record.gathered is not None

    def conceal(self) -> None:
        """Clear `.grad` where it shows a sum.

        The sum itself stays for the step that will take it. Gradients that land afterwards belong to the next step.
        """
        with self._lock:
            for record in self._parameters:
                _conceal(record)

    def touched_by_user(self) -> list[ParameterRecord]:
        """Parameters whose `.grad` the user has set, replaced or cleared since the last `expose` or `conceal`."""
        return [
            record
            for record in self._parameters
            if record.param.grad is not (record.gathered.tensor if record.exposed and record.gathered else None)
        ]

    def adopt_touched(self, records: Sequence[ParameterRecord]) -> None:
        """Change the sums of `records` as the user has changed `.grad`.

        If `.grad` showed the sum, the user's tensor replaces the sum, or the sum is dropped if `.grad` is None now.
        If `.grad` did not show the sum, the user's tensor is added to it. Each sum changes by one assignment, so an
        interrupt neither loses a gradient nor counts it twice.
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

    # Sums shown as `.grad` of masters outside steps. These methods implement GradientSource.

    def is_usable(self) -> bool:
        """Return True: outside steps any thread may read a sum."""
        return True

    def gradient_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """The gradient sum of one parameter, or None. Does not wait: it is asked for only after all landings."""
        return None if record.gathered is None else record.gathered.tensor

    def release(self, record: ParameterRecord) -> None:
        """Drop the sum of one parameter, because `.grad` of its master has replaced the sum."""
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


class LayerStore:
    """The layers of one model in host memory, from wrapping to closing."""

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
        # All checks that can refuse the model run before the first weight moves.
        refuse_unusable(layers, names)
        # A model wrapped under no_grad is for inference. Memory for training is checked when a call first trains.
        self._training_fits = torch.is_grad_enabled()
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
            # A copy must not cross the edge of registered memory: `cuts` says where to divide copies of a parameter.
            self._registered = RegisteredPages([record.weights for record in self.parameters], pinner)
            for record in self.parameters:
                record.cuts = self._registered.cuts(record.weights)
        self.slots = [LayerSlot() for _ in self.layers]
        self.gradients = HostGradients(self.parameters)
        self.masters = Masters(self.layers, optim_dtype, weakref.ref(self))
        self.gradient_owner: GradientOwner | None = None  # makes masters show gradients outside steps
        is_pinned = pin_mode is not PinMode.OFF
        self.weights = LayerWeights(self.layers, self.slots, monitor, pinner if is_pinned else None)
        self.landing_buffers = LandingBuffers(pinner if is_pinned else None)
        self._takers: dict[tuple[int, int], Callable[[], None]] = {}  # `take` of `when_landed`, by layer and generation
        self.is_read_on_host = False  # whether calls also compute with the user's parameters on the host
        self.graphs_version = 0  # version of the weights that autograd graphs on the host have saved
        self.held: set[int] = set()  # layers that a checkpoint still reads; a step must not change them yet
        self._names = names
        self._compositions = [Composition(layer, names) for layer in self.layers]

    def close(self) -> None:
        """Unpin all memory and end the ownership of the parameters; their values stay in the same memory."""
        self.weights.close()
        self.landing_buffers.close()
        if self._registered is not None:
            self._registered.close()
        adoption.release(self.parameters, self)
        self.gradient_owner = None

    def rearrange(self, layers: Sequence[nn.Module], *, visible: int, newest: int) -> None:
        """Divide the same parameters into other layers. Only while nothing runs.

        `visible`: the version that calls read, which is in the front buffers. `newest`: the version of the last step.
        """
        self.weights.bring_to_back(newest)
        self.layers = adoption.rearrange(layers, self._names, self.parameters, self.layers)
        self.slots = [self._slot_of(layer, visible, newest) for layer in self.layers]
        self.weights.rearrange(self.layers, self.slots)
        self.masters.rearrange(self.layers)
        self._compositions = [Composition(layer, self._names) for layer in self.layers]

    @staticmethod
    def _slot_of(layer: LayerRecord, visible: int, newest: int) -> LayerSlot:
        # After an asynchronous step the front buffer holds `visible`, which calls read, and the back holds `newest`.
        if any(record.back is not None for record in layer.at_home) and visible != newest:
            return LayerSlot(range(visible, visible + 1), range(newest, newest + 1), generation=newest)
        return LayerSlot(range(visible, newest + 1), generation=newest)

    def record_of(self, param: torch.Tensor) -> ParameterRecord:
        """The record of `param`, which must be a parameter of this model."""
        return self._by_param[id(param)]

    def owns(self, param: torch.Tensor) -> bool:
        """Whether a tensor is a parameter of this model."""
        return id(param) in self._by_param

    def wait_until_written(self, master: torch.Tensor) -> None:
        """Block until no checkpoint reads a master any more."""
        layer_id = next((record.home for record in self.parameters if record.master is master), None)
        with self.monitor:
            self.monitor.wait_until(lambda: layer_id not in self.held, f"a checkpoint to read layer {layer_id}")

    def check_training_memory(self) -> None:
        """Raise HostMemoryError if training does not fit into host memory.

        Does nothing if an earlier check has passed. If gradients were enabled while wrapping, wrapping has checked it.
        """
        if not self._training_fits:
            require_training_memory([layer.module for layer in self.layers], self.masters.optim_dtype, PinMode.OFF)
            self._training_fits = True

    # Announcements of uploads and landings. A call is announced before it starts, so that steps and later calls wait
    # for its uploads and landings.

    def expect(
        self, call: Hashable, *, uploads: Mapping[int, int], version: int, landings: Sequence[int], generation: int
    ) -> None:
        """Announce a call. `uploads`: number of uploads by layer; `landings`: layers whose gradients will land once."""
        with self.monitor:
            for layer_id, count in uploads.items():
                for home in self.layers[layer_id].homes:
                    self.slots[home].expect_uploads(call, version, count)
            for layer_id in landings:
                for home in self.layers[layer_id].homes:
                    self.slots[home].expect_landings(call, generation, 1)

    def cancel(self, call: Hashable) -> None:
        """Forget the announced uploads and landings of a call that failed, so that no step or call waits for them."""
        with self.monitor:
            for layer_id, slot in enumerate(self.slots):
                slot.cancel(call)
                self._let_take(layer_id)
            self.monitor.changed()

    # Landings of gradients.

    def landed(self, call: Hashable, layer_id: int, generation: int) -> None:
        """Record that a call has added its gradients of a layer, so that the next call may land or a step take them."""
        with self.monitor:
            for home in self.layers[layer_id].homes:
                self.slots[home].landed(call, generation)
                self._let_take(home)
            self.monitor.changed()

    def wait_until_landed(self, generation: int) -> None:
        """Block until every gradient expected for `generation` has landed or its call was cancelled."""
        for layer_id, slot in enumerate(self.slots):
            with self.monitor:
                self.monitor.wait_until(
                    lambda slot=slot: slot.can_consume(generation),  # type: ignore[misc]
                    f"gradients of layer {layer_id}",
                )

    # Steps take gradients.

    def when_landed(self, layer_id: int, generation: int, take: Callable[[], None]) -> None:
        """Call `take` as soon as all gradients of the layer and generation have landed.

        `take` runs now or later on the landing thread, in both cases under the monitor. When it has returned, gradients
        of the next generation may land.
        """
        with self.monitor:
            self._takers[layer_id, generation] = take
            self._let_take(layer_id)

    def _let_take(self, layer_id: int) -> None:
        """Call `take` for each generation of a layer whose gradients have all landed. The caller holds the monitor."""
        slot = self.slots[layer_id]
        while slot.can_consume(slot.open_generation) and (layer_id, slot.open_generation) in self._takers:
            generation = slot.open_generation
            self._takers[layer_id, generation]()
            slot.consumed(generation)
            del self._takers[layer_id, generation]  # last: after an interrupt before this line `take` runs again
            self.monitor.changed()

    # Changes that the user makes to modules and parameters.

    def check_unchanged(self) -> None:
        """Raise ModelChangedError if the user has changed modules, or moved or cast parameters, since wrapping."""
        for composition in self._compositions:
            composition.check()
        for record in self.parameters:
            param, weights = record.param, record.weights
            if param.data_ptr() != weights.data_ptr() or param.dtype != weights.dtype:
                now, then = record.param, record.weights
                resized = (
                    "" if now.shape == then.shape else f", of shape {tuple(now.shape)} instead of {tuple(then.shape)}"
                )
                raise ModelChangedError(
                    f"parameter {record.name!r} was moved or cast after wrapping (now {now.dtype} on {now.device}"
                    f"{resized}); convert or resize the model before wrapping it, or close() and wrap it again."
                )

    def written_by_user(self) -> list[ParameterRecord]:
        """Parameters into which the user has written since the last call. Their version counters show the writes."""
        return [record for record in self.parameters if record.param._version != record.seen_version]

    def adopt_written(self, records: Sequence[ParameterRecord]) -> None:
        """Copy the values that the user wrote to the masters and the second buffer. Only while nothing runs."""
        for record in records:
            version = record.param._version
            if record.master is not None:
                with torch.no_grad():
                    record.master.follow_weight(record.weights)
                    if record.back is not None:
                        record.back.copy_(record.param)
            record.seen_version = version  # last: after an interrupt the next call repeats the whole update


class Caller(Protocol):
    """What the store needs of the user's thread while that thread runs the body of a step (HandedStep)."""

    thread: int  # the identifier from threading.get_ident()

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work` on the optimizer thread and return its result."""


class StepAbandoned(BaseException):
    """Raised inside a step function whose gradients will never land. RoundPipe catches it, so users never see it."""


class LayerUpdate:
    """The update of one layer by one step. During the step it is the GradientSource of the layer's masters.

    Runs on the optimizer thread, with two exceptions: the landing thread may call `_take`, and the `caller` of a handed
    step may read gradients.
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
        """Note which parameters the step may change; `prepare` begins the update.

        `order`: position of the layer in the order in which the gradients of all layers land. `abandoned`: returns
        True once the step's gradients will never land. `caller`: the thread that runs the body of the step, if that is
        not the optimizer thread.
        """
        self.order = order
        # If the host also computes with the user's parameters, they are the only buffer, and after an asynchronous step
        # calls still read the old weights there. The new weights stay in the masters until the next step writes them.
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
        self._gradients: dict[ParameterRecord, HostGradient] | None = None  # None until all of them have landed
        self._unwanted: list[ParameterRecord] = []  # parameters whose gradient was released before it landed
        self._settled = False  # whether the update was published or revoked
        self._target: WeightBuffer | None = None  # the buffer for the new weights; None until writing begins
        self.updated: set[ParameterRecord] = set()  # parameters that the one-pass optimizer has updated

    # The step's gradients.

    def prepare(self) -> None:
        """Become the gradient source of the layer's copies, and allocate second weights if the step needs them."""
        # First: even if a later line fails, the layer's gradients are taken and the next generation may land.
        self._store.when_landed(self._layer_id, self._generation, self._take)
        for record in self._records:
            master = self._store.masters.of(record)
            if not self.publishes_late:
                master.rest_between_steps()
            master.begin_step(self, record)
        if self._is_async and not self.publishes_late:
            self._store.weights.keep_two(self._layer_id)

    def _take(self) -> None:
        """Take the landed sums, and release those that the step does not need any more.

        Called under the monitor, possibly on the landing thread.
        """
        self._gradients = self._store.gradients.take(self._records)
        for record in list(self._gradients) if self._settled else self._unwanted:
            self.release(record)

    @property
    def may_be_changed(self) -> bool:
        """Whether the layer's gradients have all landed and no checkpoint still reads the layer. Does not wait."""
        return self._gradients is not None and self._layer_id not in self._store.held

    def wait_until_landed(self) -> None:
        """Block until the layer's gradients have landed; raises StepAbandoned if they never will."""
        self.wait_until(lambda: self._gradients is not None, f"gradients of layer {self._layer_id}")

    def wait_for_gradients(self) -> None:
        """Block until the gradients have landed and no checkpoint still reads the layer: the step may change it.

        Raises StepAbandoned if the gradients will never land.
        """
        if not self.may_be_changed:
            self.wait_until_landed()
            held = self._store.held
            self.wait_until(lambda: self._layer_id not in held, f"a checkpoint to read layer {self._layer_id}")
        if self._abandoned():
            raise StepAbandoned

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Block until `ready()` is true; raises StepAbandoned if the step's gradients will never land."""
        with self._store.monitor:
            self._store.monitor.wait_until(lambda: self._abandoned() or ready(), what)
        if self._abandoned():
            raise StepAbandoned

    def is_usable(self) -> bool:
        """Whether the calling thread may use the step's gradients.

        The optimizer thread and the thread of a `caller` may. After a step with a `caller` any thread may, because the
        user's loop may read gradients that it has not cleared.
        """
        ident = threading.get_ident()
        is_callers = self._caller is not None and (self._settled or ident == self._caller.thread)
        return ident == self._thread or is_callers

    def gradient_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """The gradient of a parameter, or None if it has none. Waits until the layer's gradients have landed."""
        self.wait_for_gradients()
        assert self._gradients is not None
        gradient = self._gradients.get(record)
        return None if gradient is None else gradient.tensor

    def release(self, record: ParameterRecord) -> None:
        """Release a gradient that the step does not need any more, now or as soon as it has landed."""
        with self._store.monitor:  # the gradient may be landing on another thread right now
            if self._gradients is None:
                self._unwanted.append(record)
            elif record in self._gradients:
                self._gradients.pop(record).release()

    # The new weights.

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work`, which writes weights, on the optimizer thread: no signal handler can interrupt it there."""
        if self._caller is None or threading.get_ident() == self._thread:
            return work()
        return self._caller.carry_out(work)

    def new_weight_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """The memory for a parameter's new weight, after waiting for uploads that still read this memory.

        None if the next step writes the new weights, see `publishes_late`.
        """
        return None if self.publishes_late else record.memory(self._begun())

    def _begun(self) -> WeightBuffer:
        """The buffer for the new weights. The first call waits for uploads that still read this buffer."""
        if self._target is None:
            self._target = self._store.weights.begin(self._layer_id, self._version)
        return self._target

    @property
    def has_replaced_weights(self) -> bool:
        """Whether the step has begun to overwrite the old weights, so that they cannot be restored."""
        is_old_there = self._store.slots[self._layer_id].can_upload(self._version - 1)
        return self._target is not None and not is_old_there

    def end_step(self) -> None:
        """Called when the step function has returned: gradients that it has not cleared become `.grad` of the copies.

        With a `caller` they stay unconverted in host memory, because a user's loop clears them after the step.
        """
        self.wait_for_gradients()
        for record in self._records:
            self._store.masters.of(record).end_step(keeps_source=self._caller is not None)

    def publish(self) -> None:
        """Complete the new weights and allow calls to read them. Called when the step has succeeded in all layers."""
        if not self.publishes_late:
            self._complete_weights()
        self._settled = True

    def revoke(self) -> None:
        """Undo a failed step: drop its gradients, and its new weights unless they have overwritten the old ones.

        Waits for nothing: gradients that have not landed yet are dropped when they land.
        """
        if self._settled:
            return
        with self._store.monitor:  # from here on `_take` releases the gradients that it takes
            self._settled = True
        for record in self._records:
            if record.master is not None:
                record.master.grad = None
                record.master.end_step()
                record.master.mark_touched()  # the master keeps its changes, and the next step publishes them
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
        """Write the weights that the one-pass optimizer has not written, and allow calls to read the new version."""
        if not self._records:
            self._store.weights.unchanged(self._layer_id, self._version)
            return
        target = self._begun()
        try:
            with torch.no_grad():
                for record in self._records:
                    master = self._store.masters.of(record)
                    # Write every master that was not updated in one pass, even if its version counter is unchanged:
                    # not every kernel changes the counter.
                    if record not in self.updated or master.was_touched():
                        master.write_weight(record.memory(target))
                        master.forget_touches()
                    master.rest_after_step()
        finally:
            self._store.weights.end(self._layer_id, self._version, target)


def next_to_change(updates: Sequence[LayerUpdate]) -> LayerUpdate:
    """The update, of those that are left, that a step carries out next. They are in the order of landing.

    While some layers wait for gradients or for a checkpoint, this is the first that waits for neither. Once all may be
    changed, it is the last: the next call needs its weights first.
    """
    while not (ready := [update for update in updates if update.may_be_changed]):
        first = updates[0]
        first.wait_until_landed()
        what = f"a checkpoint to read layer {first._layer_id}"
        first.wait_until(lambda: any(update.may_be_changed for update in updates), what)
    return updates[-1] if len(ready) == len(updates) else ready[0]
