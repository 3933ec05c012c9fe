"""Memory that gradients land in is used again, however a step function deals with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers_parity import batch, seeded
from roundpipe import RoundPipe, optim
from roundpipe.store import LayerUpdate
from roundpipe.store.update import StepMode

WIDTH = 16


def low_net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(torch.bfloat16)


def stepping(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def clearing(optimizer: torch.optim.Optimizer) -> None:
    """At once: of an exact step before gradients have come."""
    optimizer.zero_grad()


def looking(optimizer: torch.optim.Optimizer) -> None:
    assert all(param.grad is not None for group in optimizer.param_groups for param in group["params"])
    optimizer.zero_grad()


def nothing(optimizer: torch.optim.Optimizer) -> None:
    return


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("step_fn", [stepping, clearing, looking, nothing], ids=lambda function: function.__name__)
def test_landing_memory_does_not_grow(step_fn: Callable[[torch.optim.Optimizer], None], is_async: bool) -> None:
    model = RoundPipe(seeded(low_net), optim_dtype=torch.float32)
    optimizer = optim.Adam(list(model.optim_parameters()), lr=1e-3)
    buffers = model._engine.store.landing_buffers
    x = batch(4, WIDTH).bfloat16()
    counts = []
    for _ in range(8):
        model.forward_backward(input_args=(x,), label=x, loss_fn=lambda out, label: (out - label).float().pow(2).mean())
        model.step(lambda: step_fn(optimizer), is_async=is_async)
        counts.append(len(buffers._all))
    model.synchronize()
    free = sum(len(of_size) for of_size in buffers.free.values())
    assert free == len(buffers._all), "every buffer is free"
    assert counts[-1] <= 2 * 4, "at most two generations of four layers"
    model.close()


def test_releasing_a_gradient_takes_the_lock_of_its_landing() -> None:
    """Otherwise one that lands in the very moment in which it is cleared would be kept for ever."""
    model = RoundPipe(seeded(low_net), optim_dtype=torch.float32)
    store = model._engine.store
    update = LayerUpdate(store, 0, 0, step=1, mode=StepMode.EXACT, abandoned=lambda: False)

    class Watched(list[Any]):
        def append(self, record: Any) -> None:
            assert store.monitor.is_held()
            super().append(record)

    update._unwanted = Watched()
    update.release(store.parameters[0])
    assert update._unwanted == [store.parameters[0]]
    model.close()
