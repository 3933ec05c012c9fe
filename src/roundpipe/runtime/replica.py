"""Layers on one device: replicas of their modules, and images of their weights.

A replica runs the user's code, hooks and settings on device tensors. Its modules are shallow copies, so attributes are
the user's own. Its parameters are stand-ins: `bind` points them to an image that a task uploaded,
`unbind` releases the image. Buffers are set for each microbatch. Images are uploaded before they are needed, into
reusable device buffers. A task's image of a layer exists from its upload until the task no longer needs the layer.

Called on one worker's thread, or on autograd's thread while the worker waits for it.

[Note: attributes]
Attributes that the user changes on a module (training mode, a dropout rate) reach the replica at each `bind`.
Attributes that a forward sets stay on the replica, where a cache of device tensors belongs. Only plain numbers, strings
and None (a counter, a flag) are written back to the user's module, after the forward of the last microbatch and before
the call returns. Attributes that a recomputation or a failed forward set are dropped, so that nothing counts twice.

[Note: hooks]
A replica has the hooks that the user's modules had when the call began, also in recomputations: the hooks may have been
removed since. It has its own dicts of hooks, because a forward may register hooks for its duration while another device
runs the same layer.

[Note: weights that stay]
An image may outlive its task where the planner finds memory for it (`Costs.staying`); the next task that needs it there
uploads nothing. It must hold the bytes that an upload would bring. Version counters do not prove that: writes through
`.data`, which is how adapters are merged, leave no trace, and comparing all weights would read as much host memory as
an upload. So images stay only while weights are not to be written: from a task to a later one of the same run, and
between forward passes of one WeightScope: one generate(), or one evaluation of a trainer. A device keeps images of one
residence at a time: those of a run with another model, plan or version of the weights take their place. A failed run
and a lack of memory drop them, too. An image into which its layer has written does not stay.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from roundpipe.compiled import CompiledPart, Compiling, inside_of
from roundpipe.config import RecomputeGrain
from roundpipe.context import LayerPhase
from roundpipe.devices import Device, Event, StreamKind
from roundpipe.errors import UsageError
from roundpipe.module_copy import Hooks, copy_tree, module_hooks, set_hooks
from roundpipe.plan import StageTask, TaskKind
from roundpipe.runtime.autograd import ParameterHooks
from roundpipe.runtime.rng import drawing_mode
from roundpipe.runtime.run import LayerSettings, Place, Residence, Run
from roundpipe.runtime.transfer import Bundle, DeviceBuffers, duplicate, views_of
from roundpipe.store import LayerRecord, LayerStore, Layout


@dataclasses.dataclass
class Behaviour:
    """Observed properties of a layer's forwards, for one set of training flags.

    The defaults assume the worst case; they apply before the first forward.
    """

    is_known: bool = False
    changes_input: bool = True
    draws_on_host: bool = True
    draws_in_backward: bool | None = None  # on the host, in hooks or by running forward code again; None: unknown
    writes_buffers: bool | None = None  # None: unknown
    returns_own_memory: bool = True  # outputs share memory with weights or buffers, which are overwritten later
    # The next two are observed in forwards with grad; None before the first one.
    leaves_device: bool | None = None  # whether the layer's autograd graph has nodes on another device
    calls_autograd: bool | None = None  # whether the layer's forward computes gradients

    @property
    def suits_one_graph(self) -> bool:
        """Whether the layer may share an autograd graph with the layers around it."""
        knows_graph = self.leaves_device is False and self.calls_autograd is False
        return knows_graph and not (self.changes_input or self.returns_own_memory)


class Replica:
    """A layer's module on one device. Between `bind` and `unbind` it can run."""

    def __init__(self, record: LayerRecord, image_layout: Layout, device: torch.device) -> None:
        self.record = record
        self.image_layout = image_layout
        self.parameters = [_stand_in(p.param, device) for p in record.parameters]
        self._nothing = [p.data for p in self.parameters]
        stand_ins = {id(p.param): new for p, new in zip(record.parameters, self.parameters, strict=True)}
        self.module, self._pairs = copy_tree(
            record.module,
            parameter=lambda param: stand_ins.get(id(param), param),
            unwrap=inside_of,
            not_followed=frozenset({"training"}),  # `bind` sets it
            own_hooks=True,  # `bind` sets them: see [Note: hooks]
        )
        self._copies = {id(pair.original): pair.copy for pair in self._pairs}
        copies = self._copies
        # The order is that of LayerSettings.training. It stays valid: the store refuses models whose modules changed.
        self._modules = [copies[id(inside_of(module))] for module in record.modules]
        self.parts: list[CompiledPart] | None = None  # None before the first call whose layers are compiled
        self._buffer_homes = [(copies[id(buffer.owner)], buffer.key) for buffer in record.buffers]
        self._device = device
        self.behaviour = Behaviour()  # for the training flags of the last `bind`
        self.has_run = False  # whether it has run since attributes were last written back
        self._hooks: Mapping[int, Hooks] = {}  # of the last `bind`, by position in `_modules`
        self._image_address = 0
        self._versions: list[int] = []  # of the parameters, after the last `bind`
        self._put_back = _put_back_by_adapters(self._modules)
        self.written: list[str] = []  # parameters into which the layer has written between the last bind and unbind
        self._hook_handles: list[RemovableHandle] = []

    def behaviour_with(self, settings: LayerSettings) -> Behaviour:
        """Return the behaviour of the layer with these training flags. Devices of one type share the object.

        Two workers may write to it at the same time. Each only sets flags, so no lock is needed.
        """
        key = self._device.type, settings.training
        known: Behaviour | None = self.record.observed.get(key)
        if known is None:
            known = Behaviour(writes_buffers=None if self.record.buffers else False)
            known = self.record.observed.setdefault(key, known)
        return known

    def bind(
        self,
        views: Sequence[torch.Tensor],
        settings: LayerSettings,
        hooks: Sequence[ParameterHooks] = (),
        compiling: Compiling | None = None,
    ) -> None:
        """Point the parameters to `views` of the layer's image, with the call's settings and the user's attributes.

        compiling: what is compiled in the call; None: everything runs eagerly.
        """
        self.behaviour = self.behaviour_with(settings)
        self._image_address = views[0].untyped_storage().data_ptr() if views else 0
        for stand_in, view, trains in zip(self.parameters, views, settings.requires_grad, strict=True):
            stand_in.data = view
            if stand_in.requires_grad is not trains:
                stand_in.requires_grad_(trains)
        self._versions = [stand_in._version for stand_in in self.parameters]
        for of_parameter in hooks:
            self._hook_handles += of_parameter.attach(self.parameters[of_parameter.position])
        for pair in self._pairs:
            pair.sync()
        self.has_run = False
        for module, training in zip(self._modules, settings.training, strict=True):
            module.__dict__["training"] = training
        for position in self._hooks.keys() | settings.hooks.keys():
            set_hooks(self._modules[position], settings.hooks.get(position))
        self._hooks = settings.hooks
        if compiling is not None and self.parts is None:
            self.parts = [
                CompiledPart(self._copies[id(module)], options, self._device, drawing_mode, compiling.constants)
                for module, options in compiling.parts.of(self.record.module)
            ]
        for part in self.parts or ():
            if compiling is None:
                part.unbind()
            else:
                part.bind(settings.key, compiling.constants)

    def unbind(self) -> None:
        """Release the image, gradients, hooks and buffers.

        Attributes that forwards have set on the replica and that were not written to the user's modules are dropped.
        """
        bound = zip(self.record.parameters, self.parameters, self._versions, strict=False)  # none before a `bind`
        changed = [(record, stand_in) for record, stand_in, version in bound if stand_in._version != version]
        self.written = [record.name for record, stand_in in changed if id(stand_in) not in self._put_back]
        for stand_in, nothing in zip(self.parameters, self._nothing, strict=True):
            stand_in.data = nothing
            stand_in.grad = None
        while self._hook_handles:
            self._hook_handles.pop().remove()
        if self.has_run:
            for pair in self._pairs:
                pair.drop_changes()
        for module, key in self._buffer_homes:
            module._buffers[key] = None

    def note_forward(self, *, changed_input: bool, drew_on_host: bool | None, returned_own_memory: bool) -> None:
        """Update the behaviour after a forward. `drew_on_host` is None if draws on the host were not watched."""
        known = self.behaviour
        if not known.is_known:
            self._refuse_new_hooks()
        if changed_input:
            self.refuse_new_change_of_input()
        known.changes_input = changed_input or (known.is_known and known.changes_input)
        known.returns_own_memory = returned_own_memory or (known.is_known and known.returns_own_memory)
        if drew_on_host is not None:
            known.draws_on_host = drew_on_host or (known.is_known and known.draws_on_host)
        known.is_known = True

    def _refuse_new_hooks(self) -> None:
        """Raise if a forward has left hooks behind: they are on this copy, and copies on other devices lack them."""
        for position, module in enumerate(self._modules):
            if module_hooks(module) != self._hooks.get(position):
                raise UsageError(
                    f"the forward of layer {self.record.layer_id} has registered or removed hooks of its "
                    f"{type(module).__name__}. Each device runs a copy of the layer, so run the module once on the "
                    "host before you wrap it, or register the hooks before wrapping."
                )

    def refuse_new_change_of_input(self) -> None:
        """Raise if the layer, which had never changed its input in place, has now done so.

        A queued download may still have to read the input, and this task has not made the layer wait for it.
        """
        if self.behaviour.is_known and not self.behaviour.changes_input:
            raise UsageError(
                f"layer {self.record.layer_id} changed its input in place, which it had not done before; a layer must "
                "either always or never do so. Use an out-of-place operation."
            )

    def refuse_written(self) -> None:
        """Raise if the layer has written into a parameter: the write was lost with the image."""
        if self.written:
            raise UsageError(
                f"layer {self.record.layer_id} writes into its parameter {self.written[0]!r} in its forward, as "
                "nn.Embedding with max_norm does. Devices compute with copies of the weights, so training would lose "
                "the write. Make it an operation on the value, keep what changes in a buffer, or write the optimizer's "
                "parameters in step_fn."
            )

    def write_attributes_back(self) -> None:
        """Write plain values that a forward has set to the user's modules; see [Note: attributes]."""
        for pair in self._pairs:
            pair.write_back()
        self.has_run = False

    def set_buffers(self, values: Sequence[torch.Tensor | None]) -> None:
        for (module, key), value in zip(self._buffer_homes, values, strict=True):
            module._buffers[key] = value

    def get_buffers(self) -> list[torch.Tensor | None]:
        return [module._buffers.get(key) for module, key in self._buffer_homes]

    def copy_own_memory(self, bundle: Bundle) -> tuple[Bundle, bool]:
        """Return the bundle with copies of the tensors that share memory with the layer's weights or buffers.

        Also returns whether there are any. Weights and buffers may be overwritten once the task is done with the layer.
        """
        own = {b.untyped_storage().data_ptr() for b in self.get_buffers() if b is not None} | {self._image_address}
        own.discard(0)
        is_own = [_memory_of(tensor) in own for tensor in bundle.tensors]
        if not any(is_own):
            return bundle, False
        pairs = zip(bundle.tensors, is_own, strict=True)
        return bundle.with_tensors([duplicate(tensor) if mine else tensor for tensor, mine in pairs]), True


def refuse_late_gradients(replicas: Iterable[Replica]) -> None:
    """Raise if autograd has reached a parameter after the gradients of its layer were taken as complete."""
    for replica in replicas:
        for record, stand_in in zip(replica.record.parameters, replica.parameters, strict=True):
            if stand_in.grad is not None:
                stand_in.grad = None
                raise UsageError(
                    f"the gradient of parameter {record.name!r} arrived after layer {replica.record.layer_id} was "
                    "done: the layer computes partly on another device, which it had not done before. Keep a layer's "
                    "computation on one device, or do this from the first call on."
                )


def _put_back_by_adapters(modules: Sequence[nn.Module]) -> frozenset[int]:
    """The ids of parameters that PEFT adapts directly (`target_parameters`).

    Its adapters replace the parameter in each forward, and put it back by `Tensor.set_`, which counts as a write.
    """
    found = (getattr(module, "parameter_name", None) and getattr(module, "get_param", None) for module in modules)
    return frozenset(id(get_param()) for get_param in found if callable(get_param))


def _stand_in(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=param.dtype, device=device), requires_grad=param.requires_grad)


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None for nested and sparse tensors, which have no single one."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_plain else None


@dataclasses.dataclass
class _Image:
    buffer: torch.Tensor
    uploaded: Event
    is_counted: bool = True  # whether DeviceBuffers counts the buffer: not once it has stayed


class _TaskImages:
    """The images of one task: those on the device, and the layers still to be uploaded in the order of use."""

    def __init__(self, run: Run, task: StageTask) -> None:
        by_layer = task.kind is TaskKind.BACKWARD and run.recall.grain is RecomputeGrain.LAYER
        self.to_upload = deque(reversed(task.layers) if by_layer else task.layers)
        self.images: dict[int, _Image] = {}
        self.is_read_ahead = False  # the first of them
        self.residence = run.residence
        self.may_stay = run.staying  # layers whose images stay after this task
        if run.residence.scope is None and run.staying:
            workers = {each.index: worker for each, worker in zip(run.tasks, run.workers, strict=True)}
            later = [t for t in run.tasks if t.index > task.index and workers[t.index] == workers[task.index]]
            self.may_stay = run.staying & {layer_id for each in later for layer_id in each.layers}


@dataclasses.dataclass
class _Staying:
    """Images that stay for runs with this residence, by layer: [Note: weights that stay]."""

    residence: Residence | None = None
    images: dict[int, _Image] = dataclasses.field(default_factory=dict)


class LayerImages:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = DeviceBuffers(device, StreamKind.WEIGHTS_UP, StreamKind.COMPUTE)
        self._tasks: dict[tuple[int, int], _TaskImages] = {}  # by (run number, task index)
        self._staying = _Staying()  # changed on the worker's thread; other threads only replace it
        self._layouts: dict[Layout, Layout] = {}  # maps each layout to one object for all equal layouts
        self._replicas: weakref.WeakKeyDictionary[LayerStore, dict[int, Replica]] = weakref.WeakKeyDictionary()

    def replica(self, store: LayerStore, layer_id: int) -> Replica:
        """Return the layer's replica on this device. Made at first use, and again after the store's layers changed."""
        of_store = self._replicas.setdefault(store, {})
        known = of_store.get(layer_id)
        if known is None or known.record is not store.layers[layer_id]:
            layout = store.layers[layer_id].image
            layout = self._layouts.setdefault(layout, layout)
            known = of_store[layer_id] = Replica(store.layers[layer_id], layout, self._device.torch_device)
        return known

    def release_unused(self) -> None:
        self.drop_staying()
        self._buffers.release_unused()

    def drop_staying(self) -> None:
        """Let no image stay. Tasks go on using those that they have. Any thread may call this."""
        self._staying = _Staying()

    def prefetch(self, run: Run, task: StageTask, place: Place, *, within_room: bool = False) -> None:
        """Start every upload of the task that need not wait for the optimizer, in the order of use.

        within_room: only while free buffers or `run.weight_room_bytes` suffice.
        """
        of_task = self._of(run, task)
        for layer_id in tuple(of_task.to_upload):
            if run.failed or not run.store.weights.can_upload(layer_id, run.version):
                return
            if self._will_stay(of_task, layer_id):
                continue
            size = run.store.layers[layer_id].image.total_bytes
            stays = layer_id in self._staying_for(run)
            if within_room and not stays and not self._buffers.has_one(size, self._room_bytes(run)):
                return
            self._upload(run, of_task, layer_id, place)

    def read_ahead(self, run: Run, task: StageTask) -> None:
        """Begin to read the layer that the task uploads first, if it lies in mapped files."""
        of_task = self._of(run, task)
        if of_task.to_upload and not of_task.is_read_ahead:
            of_task.is_read_ahead = True
            run.store.read_ahead(of_task.to_upload[0])

    def ready(self, run: Run, task: StageTask, replica: Replica, place: Place) -> list[torch.Tensor]:
        """Return the layer's weights. Compute that is queued later waits for the upload of this layer only."""
        of_task, layer_id = self._of(run, task), replica.record.layer_id
        if layer_id not in of_task.images:
            if not run.store.weights.wait_for(layer_id, run.version, lambda: run.failed):
                run.check()
            self._upload(run, of_task, layer_id, place)
            self.prefetch(run, task, place)
        place.layer_id, place.phase = layer_id, "weight upload"
        image = of_task.images[layer_id]
        self._device.stream_wait(StreamKind.COMPUTE, image.uploaded)
        return views_of(image.buffer, replica.image_layout)

    def finish(self, run: Run, task: StageTask) -> None:
        """Free the buffers of a task that is done or dropped, as soon as the compute stream has passed this point."""
        of_task = self._of(run, task)
        for layer_id in list(of_task.images):
            self._free(run, of_task, layer_id)
        # A backward without gradients runs no layer, and needs none that could not be uploaded when it began.
        for layer_id in of_task.to_upload:
            run.store.weights.upload_dropped(run, layer_id, run.version)
        if run.failed and self._staying.residence == run.residence:
            self.drop_staying()
        del self._tasks[run.number, task.index]

    def finish_layer(self, run: Run, task: StageTask, layer_id: int) -> None:
        """Free the buffer of a layer that the task no longer needs. Raises if training would lose what it wrote."""
        if run.forward_phase is not LayerPhase.INFERENCE and not run.is_probe:
            self.replica(run.store, layer_id).refuse_written()
        self._free(run, self._of(run, task), layer_id)

    def _free(self, run: Run, of_task: _TaskImages, layer_id: int) -> None:
        """Free the buffer of a layer, once the compute stream has passed this point.

        The image stays instead where that is planned: [Note: weights that stay].
        """
        staying = self._staying_for(run)
        image = of_task.images.pop(layer_id)
        if self._may_stay(run, of_task, layer_id):
            staying[layer_id] = image
            if image.is_counted:
                image.is_counted = False
                self._buffers.part_with(image.buffer)
            if run.residence.scope is not None and run.residence.scope.has_ended:  # while the image was put there
                self.drop_staying()
            return
        staying.pop(layer_id, None)
        if not image.is_counted:
            self._buffers.take_back(image.buffer)
        self._buffers.give(image.buffer, [self._device.record(StreamKind.COMPUTE), image.uploaded])

    def _may_stay(self, run: Run, of_task: _TaskImages, layer_id: int) -> bool:
        is_wanted = layer_id in of_task.may_stay and not run.failed
        return is_wanted and not self.replica(run.store, layer_id).written

    def _will_stay(self, of_task: _TaskImages, layer_id: int) -> bool:
        """Whether an earlier task still uses an image that will probably stay for this task."""
        return any(
            each is not of_task
            and each.residence == of_task.residence
            and layer_id in each.images
            and layer_id in each.may_stay
            for each in self._tasks.values()
        )

    def _staying_for(self, run: Run) -> dict[int, _Image]:
        """The images that stay for the run, by layer. Drops those of runs with another residence."""
        staying = self._staying
        if staying.residence != run.residence:
            staying = self._staying = _Staying(run.residence)
            if run.residence.scope is not None:
                run.residence.scope.holders.add(self)
        return staying.images

    def _room_bytes(self, run: Run) -> int:
        """The weight budget of the run, without the images that stay."""
        return run.weight_room_bytes - sum(image.buffer.numel() for image in self._staying.images.values())

    def _of(self, run: Run, task: StageTask) -> _TaskImages:
        known = self._tasks.get((run.number, task.index))
        if known is None:
            known = self._tasks[run.number, task.index] = _TaskImages(run, task)
        return known

    def _upload(self, run: Run, of_task: _TaskImages, layer_id: int, place: Place) -> None:
        place.layer_id, place.phase = layer_id, "weight upload"
        image = self._staying_for(run).get(layer_id)
        if image is None:
            if len(of_task.to_upload) > 1:  # first: a copy from pageable memory waits until it is done
                run.store.read_ahead(of_task.to_upload[1])
            image = self._uploaded(run, layer_id)
        else:
            run.trace.kept_bytes.append(image.buffer.nbytes)
        of_task.images[layer_id] = image
        of_task.to_upload.remove(layer_id)
        run.store.weights.upload_issued(run, layer_id, run.version, image.uploaded)

    def _uploaded(self, run: Run, layer_id: int) -> _Image:
        """Start the upload of a layer into a buffer."""
        size = run.store.layers[layer_id].image.total_bytes
        try:
            buffer = self._buffers.take(size, self._room_bytes(run))
        except torch.OutOfMemoryError:
            if not self._staying.images:
                raise
            self.drop_staying()
            buffer = self._buffers.take(size)
        for part, host in run.store.weights.upload_pieces(layer_id, run.version, buffer):
            self._device.copy(part, host, StreamKind.WEIGHTS_UP)
            run.trace.upload_bytes.append(part.nbytes)
        return _Image(buffer, self._device.record(StreamKind.WEIGHTS_UP))
