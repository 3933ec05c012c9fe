"""Where the pipeline meets autograd: the inputs of a graph, its layers, and the node of a whole pipelined forward.

Knows tensors and their graphs, never tasks, devices or weights.

[Note: one graph per layer or per stage]
A layer that runs for the first time, and every layer of the tail, has its own graph: `Leaves` are its inputs, the
backward walks the layers in reverse, and the runtime observes each layer by itself. Layers whose behaviour is known run
in one graph per stage and microbatch: one call of the autograd engine instead of one per layer, which on CUDA saves a
hand-over between two threads each time. Both ways compute the same bits. A gradient that crosses from one layer to the
one before it is the same tensor in both, and autograd adds up the gradients of a tensor in the same order: it runs the
nodes that were created last first.

[Note: layers are done in order]
`StageGraph` tells when the backward has left a layer, by a hook on the outputs of the layer before it. The hook runs
when autograd starts the node that made such an output. Autograd always starts the ready node that was created last, and
accumulates into parameters before anything else. All nodes of later layers were created later, so all of them, and
the gradients of their parameters, are done. This holds for graphs on one device only, because nodes on another device
run on another thread, and for layers that do not call autograd themselves, because that runs the hooks, too. The first
run of a layer shows both: `stays_on_device` and `GradientWatch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from roundpipe.errors import StaleGraphError, UsageError
from roundpipe.runtime.transfer import Bundle

Gradients = list[torch.Tensor | None]
Backward = Callable[[tuple[torch.Tensor | None, ...]], Sequence[torch.Tensor | None]]


class Leaves:
    """The tensors of a value as leaves of a new graph. `gradients` holds theirs once the graph's backward has run."""

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
        """Return the value without recording gradients, for a layer that does not change its input in place."""
        return self._bundle.unpack()

    def were_changed(self) -> bool:
        """Return whether some tensor was changed in place since the construction."""
        before = zip(self.tensors, self._versions, strict=True)
        changed = {position for position, (tensor, version) in enumerate(before) if tensor._version != version}
        if changed & self._bundle.sharing_memory:
            raise UsageError(
                "a tensor was changed in place while another one that shares its memory (a view of it, say) is handed "
                "along with it; between layers each of them travels alone. Use an out-of-place operation, or clone()."
            )
        return bool(changed)


class _Boundary(torch.autograd.Function):
    """Separates a leaf from the tensor that a layer gets: autograd forbids changing a leaf in place.

    Its backward stores the gradient as it arrives. `leaf.grad` might get other strides, and kernels that read it would
    then sum in another order.
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


class StageGraph:
    """The layers of a stage in one autograd graph; see [Note: layers are done in order].

    Calls `on_layer_done(position)` once for each layer, from the last to the first, during the backward.
    """

    def __init__(self, num_layers: int, on_layer_done: Callable[[int], None]) -> None:
        self._num_left = num_layers
        self._on_layer_done = on_layer_done
        self._is_in_backward = False

    def watch(self, position: int, outputs: Iterable[torch.Tensor]) -> None:
        """Notice when gradients reach the outputs of the layer at `position`: the layers after it are done then."""
        for output in outputs:
            if output.requires_grad and not output.is_leaf:
                output.register_hook(functools.partial(self._reached, position))

    def backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Run the backward from `roots`, and report the layers that no gradient passes at its end."""
        self._is_in_backward = True
        if roots:
            torch.autograd.backward(roots, gradients)
        self._reached(-1, None)

    def _reached(self, position: int, _gradient: torch.Tensor | None) -> None:
        while self._is_in_backward and self._num_left > position + 1:
            self._num_left -= 1
            self._on_layer_done(self._num_left)


class GradientWatch:
    """Notices whether gradients reach any of `tensors` before `end()`: whether a forward calls autograd itself."""

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
    """Return the tensors of a nested value; one that occurs twice comes twice."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def stays_on_device(outputs: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Return whether every node of the graph behind `outputs` gets its gradients on `device`."""
    todo = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if any(metadata.device.type != device.type for metadata in node._input_metadata):
            return False
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return True


def attach(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], backward: Backward
) -> tuple[torch.Tensor, ...]:
    """Return `outputs` as outputs of an autograd node with the inputs `inputs`.

    backward: maps gradients of the outputs to gradients of the inputs. The outputs lie on the CPU, so it runs on the
    thread that calls backward() and may block there; the autograd threads of GPUs stay free for the workers.
    """
    if not outputs:
        return ()
    # Parameters are no inputs of the node, so something else must make its outputs require grad.
    anchor = torch.empty(0, requires_grad=True)
    # A strided output is a view of memory that is still being filled. `data` shares the memory but not the version
    # counter, by which autograd would take the filling for a write in place.
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
