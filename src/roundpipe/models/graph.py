"""Questions about autograd graphs, answered by walking them: nothing is differentiated and no memory is taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def leaves_reached(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the leaf tensors that gradients of any of `outputs` would flow to."""
    reached = {id(tensor) for tensor in outputs if tensor.requires_grad and tensor.grad_fn is None}
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return reached
