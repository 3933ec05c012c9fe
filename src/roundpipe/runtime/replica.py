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
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from roundpipe.config import RecomputeGrain
from roundpipe.devices import Device, Event, StreamKind
from roundpipe.errors import UsageError
from roundpipe.module_copy import Hooks, copy_tree, module_hooks, set_hooks
from roundpipe.plan import StageTask, TaskKind
from roundpipe.runtime.autograd import ParameterHooks
from roundpipe.runtime.run import LayerSettings, Place, Run
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
            unwrap=_uncompiled,
            not_followed=frozenset({"training"}),  # `bind` sets it
            own_hooks=True,  # `bind` sets them: see [Note: hooks]
        )
        copies = {id(pair.original): pair.copy for pair in self._pairs}
        # The order is that of LayerSettings.training. It stays valid: the store refuses models whose modules changed.
        self._modules = [copies[id(_uncompiled(module))] for module in record.modules]
        self._buffer_homes = [(copies[id(buffer.owner)], buffer.key) for buffer in record.buffers]
        self._device_type = device.type
        self.behaviour = Behaviour()  # for the training flags of the last `bind`
        self.has_run = False  # whether it has run since attributes were last written back
        self._hooks: Mapping[int, Hooks] = {}  # of the last `bind`, by position in `_modules`
        self._image_address = 0
        self._hook_handles: list[RemovableHandle] = []

    def behaviour_with(self, settings: LayerSettings) -> Behaviour:
        """Return the behaviour of the layer with these training flags. Devices of one type share the object.

        Two workers may write to it at the same time. Each only sets flags, so no lock is needed.
        """
        key = self._device_type, settings.training
        known: Behaviour | None = self.record.observed.get(key)
        if known is None:
            known = Behaviour(writes_buffers=None if self.record.buffers else False)
            known = self.record.observed.setdefault(key, known)
        return known

    def bind(
        self, views: Sequence[torch.Tensor], settings: LayerSettings, hooks: Sequence[ParameterHooks] = ()
    ) -> None:
        """Point the parameters to `views` of the layer's image, with the call's settings and the user's attributes."""
        self.behaviour = self.behaviour_with(settings)
        self._image_address = views[0].untyped_storage().data_ptr() if views else 0
        for stand_in, view, trains in zip(self.parameters, views, settings.requires_grad, strict=True):
            stand_in.data = view
            if stand_in.requires_grad is not trains:
                stand_in.requires_grad_(trains)
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

    def unbind(self) -> None:
        """Release the image, gradients, hooks and buffers.

        Attributes that forwards have set on the replica and that were not written to the user's modules are dropped.
        """
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


def _stand_in(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=param.dtype, device=device), requires_grad=param.requires_grad)


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None for nested and sparse tensors, which have no single one."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_plain else None


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside a torch.compile wrapper: compiled code is tied to the original's tensors."""
    inner = module._modules.get("_orig_mod")
    return inner if inner is not None and type(module).__name__ == "OptimizedModule" else module


@dataclasses.dataclass
class _Image:
    buffer: torch.Tensor
    uploaded: Event


class _TaskImages:
    """The images of one task: those on the device, and the layers still to be uploaded in the order of use."""

    def __init__(self, run: Run, task: StageTask) -> None:
        by_layer = task.kind is TaskKind.BACKWARD and run.recall.grain is RecomputeGrain.LAYER
        self.to_upload = deque(reversed(task.layers) if by_layer else task.layers)
        self.images: dict[int, _Image] = {}


class LayerImages:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = DeviceBuffers(device, StreamKind.WEIGHTS_UP, StreamKind.COMPUTE)
        self._tasks: dict[tuple[int, int], _TaskImages] = {}  # by (run number, task index)
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
        self._buffers.release_unused()

    def prefetch(self, run: Run, task: StageTask, place: Place, *, within_room: bool = False) -> None:
        """Start every upload of the task that need not wait for the optimizer, in the order of use.

        within_room: only while free buffers or `run.weight_room_bytes` suffice.
        """
        of_task = self._of(run, task)
        while of_task.to_upload:
            layer_id = of_task.to_upload[0]
            if run.failed or not run.store.weights.can_upload(layer_id, run.version):
                return
            size = run.store.layers[layer_id].image.total_bytes
            if within_room and not self._buffers.has_one(size, run.weight_room_bytes):
                return
            self._upload(run, of_task, layer_id, place)

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
            self.finish_layer(run, task, layer_id)
        del self._tasks[run.number, task.index]

    def finish_layer(self, run: Run, task: StageTask, layer_id: int) -> None:
        """Free the buffer of a layer that the task no longer needs, once the compute stream has passed this point."""
        image = self._of(run, task).images.pop(layer_id)
        self._buffers.give(image.buffer, [self._device.record(StreamKind.COMPUTE), image.uploaded])

    def _of(self, run: Run, task: StageTask) -> _TaskImages:
        known = self._tasks.get((run.number, task.index))
        if known is None:
            known = self._tasks[run.number, task.index] = _TaskImages(run, task)
        return known

    def _upload(self, run: Run, of_task: _TaskImages, layer_id: int, place: Place) -> None:
        place.layer_id, place.phase = layer_id, "weight upload"
        layer = run.store.layers[layer_id]
        buffer = self._buffers.take(layer.image.total_bytes, run.weight_room_bytes)
        for part, host in run.store.weights.upload_pieces(layer_id, run.version, buffer):
            self._device.copy(part, host, StreamKind.WEIGHTS_UP)
            run.trace.upload_bytes.append(part.nbytes)
        uploaded = self._device.record(StreamKind.WEIGHTS_UP)
        of_task.images[layer_id] = _Image(buffer, uploaded)
        of_task.to_upload.remove(layer_id)
        run.store.weights.upload_issued(run, layer_id, run.version, uploaded)
