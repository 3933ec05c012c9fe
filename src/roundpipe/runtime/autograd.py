"""Connects the pipeline to autograd: graphs of layers and stages, the node of a whole forward, gradient hooks.

Knows tensors and their graphs, never tasks, devices or weights.

[Note: one graph per layer or per stage]
A layer that runs for the first time, and every layer of the tail, has its own graph: `Leaves` are its inputs, the
backward walks the layers in reverse, and the runtime observes each layer by itself. Layers whose behaviour is known run
in one graph per stage and microbatch: one call of the autograd engine instead of one per layer, which on CUDA saves a
hand-over between two threads each time. Both ways compute the same bits. A gradient that crosses from one layer to the
one before it is the same tensor in both, and autograd adds up the gradients of a tensor in the same order: it runs the
nodes in the reverse order of their creation.

[Note: layers are done in order]
`StageGraph` tells when the backward has left a layer, by a hook on the outputs of the layer before it. The hook runs
when autograd starts the node that made such an output. Autograd always starts the ready node that was created last, and
accumulates into parameters before anything else. All nodes of later layers were created later, so all of them, and
the gradients of their parameters, are done. This holds for graphs on one device only, because nodes on another device
run on another thread, and for layers that do not call autograd themselves, because such a call also runs the hooks.
`ObservedGraph` and `GradientWatch` check both conditions in the first run of a layer.

[Note: gradient hooks]
When a run is made, it stores the gradient hooks that the user has registered on parameters by then: removing a hook
during a backward does not change that backward. Replicas register the hooks on their stand-ins while they are bound, so
autograd runs them as in a plain model, once per microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from roundpipe.context import gradient_hook_context
from roundpipe.errors import ArgumentTypeError, RecomputeError, StaleGraphError, UsageError
from roundpipe.runtime.transfer import Bundle
from roundpipe.store import LayerRecord, ParameterRecord

Gradients = list[torch.Tensor | None]
Hook = Callable[[torch.Tensor], Any]
Backward = Callable[[tuple[torch.Tensor | None, ...]], Sequence[torch.Tensor | None]]


class Leaves:
    """The tensors of a value as leaves of a new graph. `gradients` holds the leaves' gradients after its backward."""

    def __init__(self, bundle: Bundle, flags: Sequence[bool]) -> None:
        """`flags`: which tensors require grad."""
        self._bundle = bundle
        self.tensors = [t.requires_grad_(flag) for t, flag in zip(bundle.tensors, flags, strict=True)]
        self.gradients: Gradients = [None] * len(self.tensors)
        self._versions = [tensor._version for tensor in self.tensors]

    def value(self) -> Any:
        """Return the value for a layer or loss_fn, which may change its tensors in place as in a plain model."""
        seen = [
            _Boundary.apply(leaf, self.gradients, position) if leaf.requires_grad else leaf
            for position, leaf in enumerate(self.tensors)
        ]
        return self._bundle.with_tensors(seen).unpack()

    def bare_value(self) -> Any:
        """Return the value with the leaves themselves, for a layer that has no backward and does not change its input.

        `gradients` is not filled.
        """
        return self._bundle.unpack()

    def were_changed(self) -> bool:
        """Return whether one of the tensors was changed in place since this object was constructed."""
        before = zip(self.tensors, self._versions, strict=True)
        changed = {position for position, (tensor, version) in enumerate(before) if tensor._version != version}
        if changed & self._bundle.sharing_memory:
            raise UsageError(
                "a tensor was changed in place while another one that shares its memory (a view of it, say) is handed "
                "along with it; between layers each of them travels alone. Use an out-of-place operation, or clone()."
            )
        return bool(changed)


def results_of(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of a graph and the gradients of its leaves, by name, for made-up gradients of the outputs.

    Changes the `grad` of no leaf.
    """
    found = {f"output {i}": tensor for i, tensor in enumerate(outputs) if tensor.is_floating_point()}
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if roots and wanted:
        gradients = torch.autograd.grad(roots, wanted, [_made_up(root) for root in roots], allow_unused=True)
        found |= {f"the gradient of leaf {i}": grad for i, grad in enumerate(gradients) if grad is not None}
    return found


def _made_up(tensor: torch.Tensor) -> torch.Tensor:
    """Return values of both signs that are the same for every tensor of this size."""
    steps = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32)
    return torch.sin(steps * 0.7 + 0.3).to(tensor.dtype).view(tensor.shape)


class _Boundary(torch.autograd.Function):
    """Separates a leaf from the tensor that a layer gets: autograd forbids changing a leaf in place.

    The backward of this function stores the gradient as it arrives. A gradient in `leaf.grad` might have other strides,
    and kernels that read it would then sum in another order.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, gradients: Gradients, position: int) -> torch.Tensor:
        ctx.gradients, ctx.position = gradients, position
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.gradients[ctx.position] = arrived[0]
        return None, None, None


@dataclasses.dataclass(eq=False)
class StageGraph:
    """The layers of a stage in one autograd graph; see [Note: layers are done in order].

    Calls `on_layer_done(position)` once for each layer, from the last to the first, during the backward.
    """

    num_left: int  # layers that are not done; at first, all layers of the stage
    on_layer_done: Callable[[int], None]
    is_in_backward: bool = False

    def watch(self, position: int, outputs: Iterable[torch.Tensor]) -> None:
        """Register hooks on the outputs of the layer at `position`. When they run, all later layers are done."""
        for output in outputs:
            if output.requires_grad and not output.is_leaf:
                handle = output.register_hook(functools.partial(self._reached, position))
                if len(output._backward_hooks or ()) > 1:
                    _move_to_front(handle, output)  # the layer's own hooks belong to its backward, which begins here

    def backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Run the backward from `roots`. Afterwards, report the layers as done that no gradient has reached."""
        self.is_in_backward = True
        if roots:
            torch.autograd.backward(roots, gradients)
        self._reached(-1, None)

    def _reached(self, position: int, _gradient: torch.Tensor | None) -> None:
        while self.is_in_backward and self.num_left > position + 1:
            self.num_left -= 1
            self.on_layer_done(self.num_left)


def _move_to_front(handle: RemovableHandle, tensor: torch.Tensor) -> None:
    """Let the hook of `handle` run before all other hooks of the tensor."""
    hooks: dict[int, Hook] = tensor._backward_hooks  # type: ignore[assignment]
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)  # hooks run in the order of insertion


class GradientWatch:
    """Detects whether a forward calls autograd itself: whether gradients reach any of `tensors` before `end()`."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._saw_gradient = False
        self._handles = [tensor.register_hook(self._note) for tensor in tensors if tensor.requires_grad]

    def end(self) -> bool:
        for handle in self._handles:
            handle.remove()
        return self._saw_gradient

    def _note(self, _gradient: torch.Tensor) -> None:
        self._saw_gradient = True


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value. A tensor that occurs twice is returned twice."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class ObservedGraph:
    """Properties of the autograd graph behind a layer's outputs."""

    leaves_device: bool  # whether a node of the graph gets its gradients on another device
    leaves: Sequence[torch.Tensor]  # the tensors in which the graph accumulates gradients

    @classmethod
    def behind(cls, outputs: Iterable[torch.Tensor], device: torch.device) -> ObservedGraph:
        leaves_device = False
        leaves: list[torch.Tensor] = []
        todo = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            leaves_device |= any(metadata.device.type != device.type for metadata in node._input_metadata)
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
        return cls(leaves_device, leaves)


def attach(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], backward: Backward
) -> tuple[torch.Tensor, ...]:
    """Return `outputs` as outputs of an autograd node with the inputs `inputs`.

    backward: maps gradients of the outputs to gradients of the inputs. The outputs lie on the CPU, so it runs on the
    thread that calls backward() and may block there; the autograd threads of GPUs stay free for the workers.
    """
    if not outputs:
        return ()
    # Parameters are no inputs of the node. The anchor is one, so that the outputs require grad even if no input does.
    anchor = torch.empty(0, requires_grad=True)
    # A download may still be filling the memory that a strided output is a view of. `data` shares the memory but not
    # the version counter, so autograd does not take the download for a write in place.
    attached = _Pipeline.apply(backward, tuple(output.data for output in outputs), anchor, *inputs)
    return tuple(attached)


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, outputs: tuple[torch.Tensor, ...], *inputs: torch.Tensor) -> Any:
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise StaleGraphError(
                "a second derivative (create_graph=True) cannot be taken through RoundPipe; use the plain model for it."
            )
        if not torch.autograd._is_checkpoint_valid():
            raise StaleGraphError(
                "torch.autograd.grad() and backward(inputs=...) cannot go through RoundPipe: gradients of parameters "
                "are gathered in host memory. Use backward() and read .grad after model.synchronize()."
            )
        if ctx.run_backward is None:
            raise StaleGraphError(
                "backward through this RoundPipe forward ran already and its saved inputs are gone; call forward again."
            )
        run_backward, ctx.run_backward = ctx.run_backward, None
        return (None, None, None, *run_backward(gradients))


# Gradient hooks of the user.


@dataclasses.dataclass(frozen=True)
class ParameterHooks:
    """The hooks of one parameter, each kind in the order of registration."""

    record: ParameterRecord
    position: int  # index among the parameters of its layer
    on_gradient: tuple[Hook, ...]  # registered with register_hook
    after_accumulation: tuple[Hook, ...]  # registered with register_post_accumulate_grad_hook

    def attach(self, stand_in: nn.Parameter) -> list[RemovableHandle]:
        """Register the hooks on a stand-in, which also gets the attributes of the user's parameter."""
        stand_in.__dict__.update(self.record.param.__dict__)
        context = gradient_hook_context()
        handles = [stand_in.register_hook(functools.partial(_run_in, context, hook)) for hook in self.on_gradient]
        for hook in self.after_accumulation:
            run = functools.partial(self._run_after_accumulation, context, hook)
            handles.append(stand_in.register_post_accumulate_grad_hook(run))
        return handles

    def _run_after_accumulation(self, context: Context, hook: Hook, stand_in: torch.Tensor) -> Any:
        version = stand_in._version
        try:
            result = _run_in(context, hook, stand_in)
        except KeyError as error:
            if error.args and error.args[0] is stand_in:
                raise self._refusal("looked up the parameter it was given, which is the device's copy") from error
            raise
        if stand_in.grad is None:
            raise self._refusal("set .grad to None")
        if stand_in._version != version:
            raise self._refusal("wrote to the parameter's values")
        return result

    def _refusal(self, what: str) -> UsageError:
        return UsageError(
            f"a post-accumulate-grad hook of parameter {self.record.name!r} {what}. Hooks run on the device, where "
            "they may read and change gradients; the optimizer's parameters are on the host. Update weights and clear "
            "gradients in step_fn."
        )


def _run_in(context: Context, hook: Hook, tensor: torch.Tensor) -> Any:
    return context.run(hook, tensor)


def hooks_of(layer: LayerRecord, requires_grad: Sequence[bool]) -> tuple[ParameterHooks, ...]:
    """Return the gradient hooks of the layer's parameters that train; raise for hooks that cannot work."""
    found = []
    for position, (record, trains) in enumerate(zip(layer.parameters, requires_grad, strict=True)):
        on_gradient, after = record.param._backward_hooks, record.param._post_accumulate_grad_hooks
        if trains and (on_gradient or after):
            hooks = ParameterHooks(record, position, tuple((on_gradient or {}).values()), tuple((after or {}).values()))
            _refuse_multi_grad_hooks(hooks)
            found.append(hooks)
    return tuple(found)


def refuse_hooks_on_shared(
    hooks: Mapping[int, tuple[ParameterHooks, ...]], contributors: Mapping[ParameterRecord, Sequence[int]]
) -> None:
    """Raise for a gradient hook on a parameter of several layers. contributors: the layers of each such parameter."""
    for of_parameter in (each for of_layer in hooks.values() for each in of_layer):
        layers = contributors.get(of_parameter.record)
        if layers is not None:
            raise UsageError(
                f"parameter {of_parameter.record.name!r} has gradient hooks and is used by layers "
                f"{', '.join(map(str, sorted(layers)))}. Each layer computes its part of the gradient by itself, so a "
                "hook cannot get the sum of all parts as in plain PyTorch. Give the layers separate parameters, or "
                "remove the hook and change .grad of the optimizer's parameter in step_fn."
            )


def _refuse_multi_grad_hooks(hooks: ParameterHooks) -> None:
    for hook in hooks.on_gradient:
        code = getattr(hook, "__code__", None)
        if code is not None and code.co_filename == torch.autograd.graph.__file__:
            raise UsageError(
                f"parameter {hooks.record.name!r} has a hook of torch.autograd.graph.register_multi_grad_hook. Layers "
                "go backward one by one, so it cannot wait for the gradients of several parameters. Use "
                "Tensor.register_hook on each parameter, or look at the gradients in step_fn."
            )


# Where a backward begins.


def roots_of(
    layer_id: int, outputs: Sequence[torch.Tensor], gradients: Gradients
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs that a backward starts from, and their gradients."""
    if len(outputs) != len(gradients):
        raise RecomputeError(
            f"layer {layer_id} returned {len(outputs)} tensors when recomputed but {len(gradients)} in the "
            "forward pass; a layer must do the same both times (see save_for_recompute)."
        )
    pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None and t.requires_grad]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]


def checked_losses(value: Any) -> list[torch.Tensor]:
    """Return the result of loss_fn as a list of losses; raise if backward cannot start from all of them."""
    if isinstance(value, Mapping) and value.get("loss") is None:
        raise ArgumentTypeError(
            f"there is no loss in the {type(value).__name__} with {', '.join(map(str, value))}: give the model labels, "
            "so that it computes one, or give forward_backward() a loss_fn that returns a tensor."
        )
    losses = [value] if isinstance(value, torch.Tensor) else value
    is_sequence = isinstance(losses, Sequence) and not isinstance(losses, str)
    if not is_sequence or not losses or not all(isinstance(loss, torch.Tensor) for loss in losses):
        raise ArgumentTypeError(
            f"loss_fn must return a tensor or a non-empty sequence of tensors, got {type(value).__name__}: {value!r}."
        )
    for position, loss in enumerate(losses):
        if not loss.requires_grad:
            raise UsageError(
                f"loss {position} of shape {tuple(loss.shape)} does not require grad: nothing it was computed from is "
                "trainable. Train at least one parameter the loss depends on, and do not detach() the outputs."
            )
        if loss.numel() != 1:
            raise UsageError(
                f"loss {position} has shape {tuple(loss.shape)}; loss_fn must return losses of one element each: "
                "reduce it with .mean() or .sum()."
            )
    return list(losses)
