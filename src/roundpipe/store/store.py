"""The layers of one model in host memory: which thread may read or write weights and gradients, and when.

HostGradients holds each parameter's sum of gradients from the first landing after a step until the next step takes it.
LayerStore owns all parts of the store and decides when gradients may land and be taken. Threads wait in the monitor
until a LayerSlot, which implements the rules, allows the access. Knows no schedule and no optimizer.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from roundpipe.devices import Device, HostPinner
from roundpipe.errors import ModelChangedError, UsageError
from roundpipe.monitor import Monitor
from roundpipe.param_groups import follow
from roundpipe.progress import phase
from roundpipe.store import adopt as adoption
from roundpipe.store.adopt import Composition, refuse_unusable
from roundpipe.store.host_memory import LandingBuffers, MappedFiles, RegisteredPages, read_ahead
from roundpipe.store.master import OptimizerCopy, owners_outside_steps
from roundpipe.store.records import HostGradient, LayerRecord, ParameterRecord
from roundpipe.store.surroundings import GradientOwner, OpenStep, StepExchange
from roundpipe.store.training_memory import PinMode, assumed_optimizer, require_training_memory
from roundpipe.store.values import Share
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

    exchange: StepExchange | None = None  # with several machines, SharedSums is the source instead

    def sources_of(self, record: ParameterRecord) -> list[torch.Tensor] | None:
        """As `gradient_of`, in a list."""
        return None if record.gathered is None else [record.gathered.tensor]

    def known_squares(self) -> dict[ParameterRecord, float]:
        """Nothing: sums change until a step takes them."""
        return {}

    def note_reading(self) -> None:
        """Do nothing: this is not a step."""

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


def _adopted(
    layers: Sequence[nn.Module], names: Mapping[int, str], mode: PinMode, pinner: HostPinner
) -> list[LayerRecord]:
    size_bytes = sum(param.nbytes for param in nn.ModuleList(layers).parameters())
    with phase(f"moving {size_bytes / 1e9:.3g} GB of weights into the host memory of {len(layers)} layers"):
        return adoption.adopt(layers, names, mode, pinner)


class LayerStore:
    """The layers of one model in host memory, from wrapping to closing."""

    devices: Callable[[], Sequence[Device]] = tuple  # returns those of the model's pool, which it does not keep open

    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: Mapping[int, str],
        *,
        optim_dtype: torch.dtype | None,
        pin_mode: PinMode,
        pinner: HostPinner,
        monitor: Monitor,
        share: Share | None = None,
        staleness: int = 1,
        master_bits: int = 32,
    ) -> None:
        """`share`: this machine's part of every parameter, if several machines train the model together.

        staleness: if it is 0, no step keeps the weights twice, and their memory is not counted.
        master_bits: 24 for masters of 24 bits where weights are bfloat16 and `optim_dtype` is float32.
        """
        self.pid = os.getpid()
        # All checks that can refuse the model run before the first weight moves.
        refuse_unusable(layers, names)
        # A model wrapped under no_grad is for inference. Memory for training is checked when a call first trains.
        self._training_fits = torch.is_grad_enabled()
        self.share = share
        self._require_memory = functools.partial(
            require_training_memory,
            num_machines=1 if share is None else share.size,
            warns_of_async=staleness > 0,
            optimizer=assumed_optimizer(),
            master_bits=master_bits,
        )
        self._require_memory(layers, optim_dtype, pin_mode, trains=self._training_fits)
        self.monitor = monitor
        self.layers = _adopted(layers, names, pin_mode, pinner)
        self.parameters: list[ParameterRecord] = list(
            {id(record.param): record for layer in self.layers for record in layer.parameters}.values()
        )
        self._by_param = {id(record.param): record for record in self.parameters}
        adoption.claim(self.parameters, self)
        self._find_mapped_weights()
        self._registered = self._register_pages(pinner) if pin_mode is PinMode.REGISTER else None
        self.slots = [LayerSlot() for _ in self.layers]
        self.gradients = HostGradients(self.parameters)
        self.masters = Masters(self.layers, optim_dtype, weakref.ref(self), master_bits)
        self.gradient_owner: GradientOwner | None = None  # makes masters show gradients outside steps
        self.open_step: OpenStep | None = None  # the last step of an optimizer outside of step_fn
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that hold masters
        self.pinner = None if pin_mode is PinMode.OFF else pinner
        self.weights = LayerWeights(self.layers, self.slots, monitor, self.pinner)
        self.landing_buffers = LandingBuffers(self.pinner)
        self._takers: dict[tuple[int, int], Callable[[], None]] = {}  # `take` of `when_landed`, by layer and generation
        # Set before the first master is made: several machines do not divide the masters of such a model.
        self.is_read_on_host: bool = False  # whether calls also compute with the user's parameters on the host
        self.graphs_version = 0  # version of the weights that autograd graphs on the host have saved
        self._held: set[int] = set()  # layers that a checkpoint still reads; a step must not change them yet
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

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note that an optimizer adds a group with masters: see [Note: settings of a step] in param_groups."""
        if optimizer.param_groups and self.gradient_owner is not None:
            self.gradient_owner.wait_for_steps()  # which must not meet the new group
        follow(optimizer, _wait_for_steps)
        self.optimizers.add(optimizer)

    def rearrange(self, layers: Sequence[nn.Module], *, visible: int, newest: int) -> None:
        """Divide the same parameters into other layers. Only while nothing runs.

        `visible`: the version that calls read, which is in the front buffers. `newest`: the version of the last step.
        """
        self.weights.bring_to_back(newest)
        self.layers = adoption.rearrange(layers, self._names, self.parameters, self.layers)
        self._find_mapped_weights()
        self.slots = [self._slot_of(layer, visible, newest) for layer in self.layers]
        self.weights.rearrange(self.layers, self.slots)
        self.masters.rearrange(self.layers)
        self._compositions = [Composition(layer, self._names) for layer in self.layers]

    def _register_pages(self, pinner: HostPinner) -> RegisteredPages:
        """Pin the weights where they are, and note in the records where copies must be divided.

        A copy must not cross the edge of pinned memory.
        """
        registered = RegisteredPages([record.weights for record in self.parameters], pinner)
        for record in self.parameters:
            record.cuts = registered.cuts(record.weights)
        return registered

    def _find_mapped_weights(self) -> None:
        files = MappedFiles()
        # By layer: the weights that do not train and lie in mapped files.
        self._mapped: dict[int, list[torch.Tensor]] = {
            layer.layer_id: [
                record.weights
                for record in layer.parameters
                if not record.param.requires_grad and files.hold(record.weights)
            ]
            for layer in self.layers
        }
        self.has_mapped_weights = any(self._mapped.values())

    def read_ahead(self, layer_id: int) -> None:
        """Begin to read what a layer has in mapped files, because its upload comes next. Does not wait."""
        read_ahead(self._mapped[layer_id])

    @staticmethod
    def _slot_of(layer: LayerRecord, visible: int, newest: int) -> LayerSlot:
        # After an asynchronous step the front buffer holds `visible`, which calls read, and the back holds `newest`.
        if any(record.back is not None for record in layer.at_home) and visible != newest:
            return LayerSlot(range(visible, visible + 1), range(newest, newest + 1), generation=newest)
        return LayerSlot(range(visible, newest + 1), generation=newest)

    @property
    def is_training(self) -> bool:
        """Whether a layer is in training mode."""
        return any(layer.module.training for layer in self.layers)

    def record_of(self, param: torch.Tensor) -> ParameterRecord:
        """The record of `param`, which must be a parameter of this model."""
        return self._by_param[id(param)]

    def owns(self, param: torch.Tensor) -> bool:
        """Whether a tensor is a parameter of this model."""
        return id(param) in self._by_param

    def refuse_as_leaves(self, layer_id: int, leaves: Iterable[torch.Tensor]) -> None:
        """Raise if the graph of a layer that ran on a device accumulates gradients in the user's own parameters.

        Devices compute with copies of the layer's modules. Gradients beside them would be lost.
        """
        for leaf in leaves:
            if self.owns(leaf):
                raise UsageError(
                    f"layer {layer_id} has computed with the parameter {self.record_of(leaf).name!r} in host memory "
                    "instead of its copy on the device, so it would not be trained: its forward, or a hook, holds the "
                    "module of this parameter in a global variable, a container or an object. Use modules through "
                    "`self`, or through the closure of a function that was set as `forward` before wrapping."
                )

    def hold(self, layer_id: int) -> None:
        """Let no step or write change the layer until `let_go`: a checkpoint reads it. The caller holds the monitor."""
        self._held.add(layer_id)

    def let_go(self, layer_id: int) -> None:
        """End what `hold` began. Does nothing for a layer that is not held. The caller holds the monitor."""
        self._held.discard(layer_id)
        self.monitor.changed()

    def is_held(self, layer_id: int | None) -> bool:
        """Whether a checkpoint still reads the layer."""
        return layer_id in self._held

    def wait_until_written(self, master: torch.Tensor) -> None:
        """Block until no checkpoint reads a master any more."""
        if not self._held:
            return
        layer_id = next((record.home for record in self.parameters if record.master is master), None)
        with self.monitor:
            self.monitor.wait_until(lambda: not self.is_held(layer_id), f"a checkpoint to read layer {layer_id}")

    def check_training_memory(self) -> None:
        """Raise HostMemoryError if training does not fit into host memory.

        Does nothing if an earlier check has passed. If gradients were enabled while wrapping, wrapping has checked it.
        """
        if not self._training_fits:
            modules = [layer.module for layer in self.layers]
            self._require_memory(modules, self.masters.optim_dtype, PinMode.OFF)
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

    def has_gradients(self, generation: int) -> bool:
        """Whether gradients of a generation have landed. Those that an earlier step has yet to take do not count."""
        landed = [record.home for record in self.parameters if record.gathered is not None]
        return any(self.slots[home].open_generation >= generation for home in landed)

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

    def adopt_written_through_data(self) -> None:
        """Give masters the weights that were written since they were made, also through `.data`. In the first step.

        This reads all weights and masters, so later steps do not do it. Masters without memory contain their weight.
        """
        for record in self.parameters:
            if record.master is not None and record.master.is_ahead_of(record.weights):
                record.master.follow_weight(record.weights)

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


def _wait_for_steps(optimizer: Optimizer) -> None:
    """Wait for all steps of the models whose masters an optimizer holds. Does nothing in a step."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for owner, _ in owners_outside_steps([param for param in params if isinstance(param, OptimizerCopy)]):
        owner.wait_for_steps()
