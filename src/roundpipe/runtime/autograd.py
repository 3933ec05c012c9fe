"""Ties a pipelined forward into torch's autograd graph.

Called by api after a forward run. The node's outputs lie on the CPU, so its backward runs on the thread that called
backward() and may block there: a GPU's own autograd thread stays free for the workers.

A layer's forward on one microbatch, kept for its backward: its inputs as leaves, its outputs as roots.

Made by runtime.stage. Knows tensors and their graph, never tasks or devices.

[Note: one graph per layer]
Every layer is a graph of its own: its inputs are leaves, its outputs roots. Backward walks the layers in reverse and
hands gradients from leaves to roots. So a layer's gradient is final as soon as its own backward has run, times are
known per layer, and how layers are grouped into stages cannot change a single bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe.errors import StaleGraphError, UsageError
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.values import Bundle

Gradients = list[torch.Tensor | None]


@dataclasses.dataclass
class Frame:
    """A layer's forward, kept for its backward."""

    layer_id: int
    replica: Replica
    leaves: Leaves
    outputs: Bundle

    def handed_on(self) -> tuple[Bundle, tuple[bool, ...]]:
        """What the next layer gets: the outputs cut from this layer's graph, and which of them require grad."""
        return self.replica.apart(self.outputs.detached()), self.outputs.requires_grad


class Leaves:
    """A value's tensors as leaves of a graph of their own, and their gradients once its backward has run."""

    def __init__(self, bundle: Bundle, flags: Sequence[bool]) -> None:
        self._bundle = bundle
        self.tensors = [t.requires_grad_(flag) for t, flag in zip(bundle.tensors, flags, strict=True)]
        self.gradients: Gradients = [None] * len(self.tensors)
        self._versions = [tensor._version for tensor in self.tensors]

    def value(self) -> Any:
        """The value as a layer or loss_fn gets it."""
        seen = [
            _Boundary.apply(leaf, self.gradients, position) if leaf.requires_grad else leaf
            for position, leaf in enumerate(self.tensors)
        ]
        return self._bundle.with_tensors(seen).unpack()

    def were_changed(self) -> bool:
        """Whether whoever got the value has changed some of its tensors in place."""
        before = zip(self.tensors, self._versions, strict=True)
        changed = {position for position, (tensor, version) in enumerate(before) if tensor._version != version}
        if changed & self._bundle.sharing_memory:
            raise UsageError(
                "a tensor was changed in place while another one that shares its memory (a view of it, say) is handed "
                "along with it; between layers each of them travels alone. Use an out-of-place operation, or clone()."
            )
        return bool(changed)


class _Boundary(torch.autograd.Function):
    """Separates a leaf from what the layer sees, so that a layer may change its input in place as in a plain model.

    It keeps the gradient that arrives as it is: in `leaf.grad` it might get other strides, and with them other sums.
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


Backward = Callable[[tuple[torch.Tensor | None, ...]], Sequence[torch.Tensor | None]]


def attach(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], backward: Backward
) -> tuple[torch.Tensor, ...]:
    """`outputs`, now depending on `inputs`; `backward` maps gradients of the former to gradients of the latter."""
    if not outputs:
        return ()
    # Parameters are no inputs of the node, so something else must make its outputs require grad.
    anchor = torch.empty(0, requires_grad=True)
    # A strided output is a view of memory that is still being filled; `data` shares the memory, but not the version
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
