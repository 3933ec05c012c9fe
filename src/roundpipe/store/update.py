"""The update of one layer by one optimizer step: takes the layer's gradients and writes its new weights.

During the step a LayerUpdate is the GradientSource of the layer's masters. Knows the rules of the store, no optimizer.

[Note: several machines] With a process group, the gradients that have landed here are one part of the batch's gradient.
`fetch` exchanges them: this machine gets the parts of all machines for its range (Share) of every parameter. The
one-pass optimizer adds them up, updates this range and calls `gather`, which completes the new weights with the ranges
of the other machines. Code that reads a gradient gets the whole sum, by another exchange. All machines do the same in
the same order, because they run the same step function.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from roundpipe.devices import Device, HostPinner
from roundpipe.errors import UsageError
from roundpipe.store.host_memory import dense_stride
from roundpipe.store.records import HostGradient, ParameterRecord, WeightBuffer

if TYPE_CHECKING:
    from roundpipe.store.store import LayerStore
    from roundpipe.store.surroundings import StepExchange

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class StepMode(enum.Enum):
    """When the call after a step may begin, and which weights it reads.

    [Note: publishing layer by layer] A step of mode BY_LAYER publishes each layer as soon as the one-pass optimizer has
    updated all of its masters that have a gradient. The uploads of the next call wait for their layer and for no other.
    So step_fn must not write masters afterwards. A first step of mode EXACT shows whether it does
    (`written_besides`); the masters of a layer that was published are compared again when step_fn has returned.
    """

    STALE = "stale"  # at once; the call reads the weights before the step
    EXACT = "exact"  # when the step is done
    BY_LAYER = "by layer"  # at once; the call reads the new weights, layer by layer


class Caller(Protocol):
    """What the store needs of the user's thread while that thread runs the body of a step (HandedStep)."""

    thread: int  # the identifier from threading.get_ident()

    def carry_out(self, work: Callable[[], T]) -> T:
        """Run `work` on the optimizer thread and return its result."""


class StepAbandoned(BaseException):
    """Raised inside a step function whose gradients will never land. RoundPipe catches it, so users never see it."""


class LayerUpdate:
    """The update of one layer by one step. During the step it is the GradientSource of the layer's masters.

    Runs on the optimizer thread, with three exceptions: the landing thread may call `_take`, the `caller` of a handed
    step may read gradients, and the thread that exchanges with other machines waits for gradients.
    """

    def __init__(
        self,
        store: LayerStore,
        layer_id: int,
        order: int,
        *,
        step: int,
        mode: StepMode,
        abandoned: Callable[[], bool],
        caller: Caller | None = None,
        exchange: StepExchange | None = None,
    ) -> None:
        """Note which parameters the step may change; `prepare` begins the update.

        `order`: position of the layer in the order in which the gradients of all layers land. `abandoned`: returns
        True once the step's gradients will never land. `caller`: the thread that runs the body of the step, if that is
        not the optimizer thread. `exchange`: the other machines, see [Note: several machines].
        """
        self.order = order
        # If the host also computes with the user's parameters, they are the only buffer, and after an asynchronous step
        # calls still read the old weights there. The new weights stay in the masters until the next step writes them.
        self.publishes_late: bool = mode is StepMode.STALE and store.is_read_on_host
        self._store, self._layer_id = store, layer_id
        self._generation, self._version = step - 1, step
        self._mode = mode
        self._abandoned = abandoned
        self._thread = threading.get_ident()
        self._caller = caller
        self.exchange = exchange
        self._fetched: Pending[Mapping[ParameterRecord, list[torch.Tensor]]] | None = None
        self._gathers: list[tuple[list[ParameterRecord], Pending[None]]] = []
        self._records = [
            record
            for record in store.layers[layer_id].at_home
            if record.master is not None or record.param.requires_grad or record.gathered is not None
        ]
        self._gradients: dict[ParameterRecord, HostGradient] | None = None  # None until all of them have landed
        self._unwanted: list[ParameterRecord] = []  # parameters whose gradient was released before it landed
        self._settled = False  # whether the update was published or revoked
        self._is_published = False  # whether calls may read the new weights
        self._target: WeightBuffer | None = None  # the buffer for the new weights; None until writing begins
        self.reads_gradients_first = False  # whether step_fn has read gradients, as for a norm, before the update
        self.squares: dict[ParameterRecord, float] = {}  # of gradients, see `known_squares`
        self._versions: dict[ParameterRecord, int] = {}  # of masters when the step began
        self.updated: set[ParameterRecord] = set()  # parameters that the one-pass optimizer has updated
        self._updated_again: ParameterRecord | None = None  # a parameter that it has updated more than once

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
            if self._mode is not StepMode.STALE:
                self._versions[record] = master.version
        lacks_second = any(record.back is None for record in self._records)
        if self._mode is StepMode.STALE and lacks_second and not self.publishes_late:
            self._store.weights.keep_two(self._layer_id)
        if self._mode is StepMode.BY_LAYER and not self._records:
            self._complete_weights()  # nothing of this layer can change

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
        return self._gradients is not None and not self._store.is_held(self._layer_id)

    def wait_until_landed(self) -> None:
        """Block until the layer's gradients have landed; raises StepAbandoned if they never will."""
        self.wait_until(lambda: self._gradients is not None, f"gradients of layer {self._layer_id}")

    def wait_for_gradients(self) -> None:
        """Block until the gradients have landed and no checkpoint still reads the layer: the step may change it.

        Raises StepAbandoned if the gradients will never land.
        """
        if not self.may_be_changed:
            self.wait_until_landed()
            self.wait_until(lambda: self.may_be_changed, f"a checkpoint to read layer {self._layer_id}")
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
        if self.exchange is not None:
            return whole_gradient(self.exchange, record, self.sources_of(record))
        assert self._gradients is not None
        gradient = self._gradients.get(record)
        return None if gradient is None else gradient.tensor

    def known_squares(self) -> dict[ParameterRecord, float]:
        """The sums of squares that this step has computed: its gradients have landed and do not change any more."""
        return self.squares

    def note_reading(self) -> None:
        """Note that step_fn reads all gradients, as for a norm."""
        self.reads_gradients_first = not self.updated

    def release(self, record: ParameterRecord) -> None:
        """Release a gradient that the step does not need any more, now or as soon as it has landed."""
        with self._store.monitor:  # the gradient may be landing on another thread right now
            if self._gradients is None:
                self._unwanted.append(record)
            elif record in self._gradients:
                self._gradients.pop(record).release()

    # Several machines.

    def fetch(self) -> None:
        """Begin to exchange the layer's gradients, as soon as they have landed. A second call does nothing."""
        if self.exchange is not None and self._fetched is None:
            what = f"gradients of layer {self._layer_id}"
            self._fetched = self.exchange.fetch(what, self._records, self._landed, may_overwrite=True)

    @property
    def is_fetched(self) -> bool:
        """Whether the exchange of the layer's gradients has begun."""
        return self._fetched is not None

    def _landed(self) -> Mapping[ParameterRecord, HostGradient]:
        self.wait_until_landed()
        with self._store.monitor:
            return dict(self._gradients or {})

    def sources_of(self, record: ParameterRecord) -> list[torch.Tensor] | None:
        """The tensors whose sum is the gradient of a parameter; see GradientSource."""
        if self.exchange is None:
            gradient = self.gradient_of(record)
            return None if gradient is None else [gradient]
        self.fetch()
        assert self._fetched is not None
        return self._fetched.wait().get(record)

    def _gather(self, updated: Container[ParameterRecord]) -> None:
        """Begin to complete the new weights of parameters of which this machine has written its range."""
        in_order = [record for record in self._records if record in updated]  # not the order of an optimizer
        if self.exchange is not None and in_order:
            memories = [record.memory(self._begun()) for record in in_order]
            what = f"new weights of layer {self._layer_id}"
            self._gathers.append((in_order, self.exchange.gather(what, in_order, memories)))

    def unfinished(self) -> list[int]:
        """The parameters, by position, of which this machine has updated its range and nothing else."""
        whole = {record for records, pending in self._gathers if pending.has_succeeded for record in records}
        open_ = [record in self.updated and record not in whole for record in self._records]
        return [position for position, is_open in enumerate(open_) if is_open]

    def settled(self, positions: Sequence[int]) -> list[torch.Tensor]:
        """The memory of the new weights of some parameters, with this machine's range in it, updated or not.

        Called when a step has failed after some machines have updated their ranges of these parameters.
        """
        self._gathers = []
        memories = []
        for position in positions:
            record = self._records[position]
            memory = record.memory(self._begun())
            if record not in self.updated:
                self._store.masters.of(record).write_weight(memory)
            memories.append(memory)
        return memories

    # The new weights.

    @property
    def devices(self) -> Sequence[Device]:
        """The devices of the model, which may take a share of the update."""
        return self._store.devices()

    @property
    def pinner(self) -> HostPinner | None:
        """Pins host memory for copies of these devices; None if the model's memory is not pinned."""
        return self._store.pinner

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
        if self._is_published:
            raise UsageError(
                f"an optimizer has updated layer {self._layer_id} a second time in one step, after the next call could "
                "read its new weights; the steps before did not do that. Update a parameter twice in every step from "
                "the first one on, or call step() with is_async=False."
            )
        if self._target is None:
            self._refuse_writes_of_user()
            self._target = self._store.weights.begin(self._layer_id, self._version)
        return self._target

    def _refuse_writes_of_user(self) -> None:
        """Raise if the user has written into parameters that this step overwrites after it was issued."""
        if self._mode is not StepMode.BY_LAYER:
            return
        with self._store.monitor:
            written = [record.name for record in self._records if record.param._version != record.seen_version]
        if written:
            raise UsageError(
                f"parameter {written[0]!r} was written while step() was still computing its new value, which would "
                "overwrite what was written. With staleness=0, step() returns at once: call synchronize() before you "
                "write into parameters, as by load_state_dict() of the plain module."
            )

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

    def publish_if_complete(self) -> None:
        """Allow calls to read the new weights now, if the layer is updated: see [Note: publishing layer by layer].

        Called when the one-pass optimizer has updated parameters of the layer, and again after each of the step's later
        layers, because other machines may still send their ranges.
        """
        if self._is_published or not self._is_updated():
            return
        if all(pending.has_succeeded for _, pending in self._gathers):  # no machine still sends its range
            self._complete_weights()

    def _is_updated(self) -> bool:
        """Whether the one-pass optimizer has updated every master of the layer that this step may change."""
        with self._store.monitor:
            waiting = [record for record in self._gradients or () if record not in self.updated]
        others = [self._store.masters.of(record) for record in self._records if record not in self.updated]
        return bool(self.updated) and not waiting and not any(m.was_touched() or m.has_own_gradient for m in others)

    def masters_updated(self, records: Sequence[ParameterRecord]) -> None:
        """Record that the one-pass optimizer has updated masters, and publish the layer if it may be published now."""
        for record in records:
            if record in self.updated:
                self._updated_again = record
            self.updated.add(record)
        if self.exchange is not None:
            self._gather({record for record in records if record.master is not None and record.master.share})
        if self._mode is StepMode.BY_LAYER:
            self.publish_if_complete()

    def written_besides(self) -> str | None:
        """The name of a parameter whose master was written other than by one update in one pass; None if none was.

        Called when step_fn has returned.
        """
        if self._updated_again is not None:
            return self._updated_again.name
        return next((record.name for record in self._records if self._was_written(record)), None)

    def _was_written(self, record: ParameterRecord) -> bool:
        """Whether a master was written in this step other than by the one-pass optimizer.

        A write counts even if it has changed no value: a clamp may change one in a later step. After the layer was
        published only changed values count.
        """
        master = self._store.masters.of(record)
        if not self._is_published and master.version != self._versions.get(record, master.version):
            return True
        return master.was_touched() and self._is_ahead(record)

    def _is_ahead(self, record: ParameterRecord) -> bool:
        """Whether the values of a master differ from the newest weight that was written from it."""
        is_written = record in self.updated or self._is_published
        newest = None if is_written else self._store.slots[self._layer_id].buffer_of(self._version - 1)
        buffer = next((found for found in (newest, self._target) if found is not None), WeightBuffer.FRONT)
        return self._store.masters.of(record).is_ahead_of(record.memory(buffer))

    def check_published(self) -> None:
        """Raise UsageError if code has written a master after the layer was published, so that weights differ."""
        name = self.written_besides() if self._is_published else None
        if name is not None:
            raise UsageError(
                f"step_fn has written the optimizer's master of {name!r} after the optimizer had updated it, and the "
                "next call has already read the weight without what was written; the steps before did not do that. "
                "Write masters in every step from the first one on, or call step() with is_async=False."
            )

    def publish(self) -> None:
        """Complete the new weights and allow calls to read them. Called when the step has succeeded in all layers."""
        if not self.publishes_late and not self._is_published:
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
                record.master.may_be_ahead = True
        for record in list(self._gradients or ()):
            self.release(record)
        if self.publishes_late or self._is_published:
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
            self._is_published = True
            self._store.weights.unchanged(self._layer_id, self._version)
            return
        target = self._begun()
        self._is_published = True
        try:
            for _, pending in self._gathers:
                pending.wait()
            with torch.no_grad():
                for record in self._records:
                    master = self._store.masters.of(record)
                    # Write every master that was not updated in one pass, even if its version counter is unchanged:
                    # not every kernel changes the counter.
                    if record not in self.updated or master.was_touched():
                        master.write_weight(record.memory(target))
                        master.forget_touches()
                    master.rest_after_step()
            self._refuse_writes_of_user()
        finally:
            self._store.weights.end(self._layer_id, self._version, target)


def in_order_of_change(updates: Sequence[LayerUpdate]) -> Iterator[tuple[LayerUpdate, LayerUpdate | None]]:
    """Yield updates, which are in the order of landing, in the order in which a step carries them out.

    With each comes the one that probably follows, so that its state can be read ahead; None with the last one. With
    several machines, all of them carry out the updates in one order, and the gradients of the next layer are exchanged
    while a layer is updated.
    """
    left = list(updates)
    if left and left[0].exchange is not None:
        if all(update.is_fetched for update in left):  # by all machines: the next call needs the first layers first
            left.reverse()
        for position, update in enumerate(left):
            pair = left[position : position + 2]
            for each in pair:
                each.fetch()
            yield update, (*pair, None)[1]
            if update._mode is StepMode.BY_LAYER:
                for each in left[:position]:  # earlier ones may have waited for the ranges of other machines
                    each.publish_if_complete()
        return
    while left:
        # Of the layers that wait neither for gradients nor for a checkpoint, the next call needs the last one first.
        while not (ready := [update for update in left if update.may_be_changed]):
            left[0].wait_until_landed()
            what = f"a checkpoint to read layer {left[0]._layer_id}"
            left[0].wait_until(lambda: any(update.may_be_changed for update in left), what)
        update = ready[-1]
        left.remove(update)
        ready = [each for each in left if each.may_be_changed]
        yield update, ready[-1] if ready else next(iter(left), None)


# Several machines.


class Pending(Protocol[T_co]):
    """An exchange that has begun."""

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended without an error. Does not wait."""

    def wait(self) -> T_co:
        """Wait for its end and return its result."""


class SharedSums:
    """Shows the masters of one layer their gradients outside of steps, summed over all machines: a GradientSource.

    The sums of each machine stay as they are: a later call adds to them, and a step exchanges them again.
    """

    def __init__(
        self, store: LayerStore, layer_id: int, exchange: StepExchange, failed: Callable[[BaseException], None]
    ) -> None:
        """`failed`: called with the error of an exchange that has failed."""
        self.exchange = exchange
        self._failed = failed
        self._gradients = store.gradients
        records = [record for record in store.layers[layer_id].at_home if record.master is not None]
        gathered = {record: record.gathered for record in records if record.gathered is not None}
        what = f"gathered gradients of layer {layer_id}"
        self._fetch = lambda: exchange.fetch(what, records, lambda: gathered, may_overwrite=False)
        self._fetched: Pending[Mapping[ParameterRecord, list[torch.Tensor]]] | None = None

    def is_usable(self) -> bool:
        """Return True: outside steps any thread may read a sum."""
        return True

    def gradient_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """The sum of the gradients of all machines."""
        return whole_gradient(self.exchange, record, self.sources_of(record))

    def sources_of(self, record: ParameterRecord) -> list[torch.Tensor] | None:
        """The gradients of all machines in this machine's range. The first call for a layer exchanges them."""
        try:
            if self._fetched is None:
                self._fetched = self._fetch()
            return self._fetched.wait().get(record)
        except BaseException as error:
            self._failed(error)
            raise

    def known_squares(self) -> dict[ParameterRecord, float]:
        """Nothing: sums change until a step takes them."""
        return {}

    def note_reading(self) -> None:
        """Do nothing: this is not a step."""

    def release(self, record: ParameterRecord) -> None:
        """Drop this machine's sum, because `.grad` of the master has replaced the sum of all machines."""
        self._gradients.release(record)


def summed(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of gradients, one after the other, in float32 or in their own precision if that is higher.

    The one-pass kernel computes the same bits.
    """
    own = sources[0].dtype
    total = sources[0].to(torch.promote_types(own, torch.float32), copy=True)
    for source in sources[1:]:
        total.add_(source)
    return total


def whole_gradient(
    exchange: StepExchange, record: ParameterRecord, sources: Sequence[torch.Tensor] | None
) -> torch.Tensor | None:
    """The gradient of a parameter, from the gradients of all machines in this machine's range."""
    if sources is None:
        return None
    weights, own = record.weights, summed(sources)
    whole = torch.empty(weights.numel(), dtype=own.dtype)
    whole[exchange.share.range_of(weights.numel())] = own
    exchange.gather(f"the gradient of {record.name}", [record], [whole]).wait()
    return whole.as_strided(weights.shape, dense_stride(weights))
