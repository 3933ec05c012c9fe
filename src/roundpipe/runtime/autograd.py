"""Ties a pipelined forward into torch's autograd graph.

Called by api after a forward run. The node's outputs lie on the CPU, so its backward runs on the thread that called
backward() and may block there: a GPU's own autograd thread stays free for the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe.errors import StaleGraphError

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
