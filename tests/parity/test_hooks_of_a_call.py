"""Layers run with the module hooks that were there when the call began, on every device and in recomputations.

A forward may register hooks for its duration. What it leaves behind would be on one device's copy alone, and is
refused. Copies never run the finalizer of a module's class.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    Models,
    PendingForward,
    assert_same,
    assert_same_grads,
    batch,
    call_reference,
    microbatches,
    mse,
    seeded,
)
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, UsageError

WIDTH = 5


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def shifted(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 1,)


def chain(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(layer(), nn.Tanh()) for layer in layers])


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def by_layer(*, is_fused: bool) -> RoundPipeRunConfig:
    """One stage per layer; all are recomputed but the last one of a fused call."""
    stages = [range(i, i + 1) for i in range(3)]
    plan = ModelExecutePlan(stages[:2] if is_fused else stages, stages[::-1])
    return RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_is_removed_before_backward_counts_in_it(models: Models, num_devices: int, kind: str) -> None:
    """The plain model's graph contains what the hook did."""
    module = seeded(lambda: chain(linear, linear, linear))
    hook: Any = doubled if kind == "register_forward_hook" else shifted
    model = models.wrap_copy(module, num_devices, model_run_config=by_layer(is_fused=False))
    x = batch(6, WIDTH)
    handle = getattr(module[0][0], kind)(hook)
    expected = PendingForward(module, (x,), {}, 3)
    handle.remove()
    expected.output.square().sum().backward()
    expected.backward()
    handle = getattr(model.model[0][0], kind)(hook)
    output = model(x)
    handle.remove()
    output.square().sum().backward()
    model.synchronize()
    assert_same_grads(model.model, module)
    assert_same(model(x).detach(), torch.cat([module(part) for part in x.tensor_split(3)]).detach())


class Temporary(nn.Module):
    """Registers a hook on its own submodule for the time of its forward; the hook depends on the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().sum()
        handle = self.linear.register_forward_hook(lambda module, args, output: output * scale.cos())
        result: Tensor = self.linear(x)
        handle.remove()
        return result


def test_a_forward_may_register_hooks_for_its_duration(models: Models, num_devices: int) -> None:
    module = seeded(lambda: chain(Temporary, Temporary, Temporary))
    model = models.wrap_copy(module, num_devices)
    for _ in range(3):
        loss = model.forward_backward(
            (batch(6, WIDTH),), label=batch(6, WIDTH), loss_fn=mse, run_config=by_layer(is_fused=True)
        )
        expected = call_reference(module, (batch(6, WIDTH),), label=batch(6, WIDTH), num_microbatch=3)
        assert_same(loss, expected.loss)
    model.synchronize()
    assert_same_grads(model.model, module)


class Installing(nn.Module):
    """Installs a hook in its first forward, as libraries do that capture outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_installed:
            self.linear.register_forward_hook(doubled)
            self.is_installed = True
        result: Tensor = self.linear(x)
        return result


def test_a_hook_that_a_forward_leaves_behind_is_refused(models: Models, num_devices: int) -> None:
    module = seeded(lambda: chain(linear, Installing, linear))
    model = models.wrap_copy(module, num_devices)
    with pytest.raises(UsageError, match=r"the forward of layer 1 has registered or removed hooks of its Linear"):
        model(batch(6, WIDTH), roundpipe_run_config=microbatches(2))
    assert not model.model[1][0].is_installed
    module(batch(6, WIDTH))  # as the message says: once on the host, before wrapping
    ready = models.wrap_copy(module, num_devices)
    for _ in range(2):
        found = ready(batch(6, WIDTH), roundpipe_run_config=microbatches(1))
        assert_same(found.detach(), module(batch(6, WIDTH)).detach())


class Releasing(nn.Module):
    """Removes its gradient hook when it is finalized, as some adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.handles = [self.linear.weight.register_hook(lambda grad: grad * 3)]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result

    def __del__(self) -> None:
        for handle in self.handles:
            handle.remove()


def test_the_end_of_a_copy_does_not_finalize_the_original(models: Models) -> None:
    module = seeded(lambda: chain(Releasing))
    model = models.wrap(module, 2, model_run_config=microbatches(3))
    model(batch(6, WIDTH)).sum().backward()
    model.synchronize()
    first = copy.deepcopy(module[0][0].linear.weight.grad)
    # A new pool makes new copies; those of the old one are collected.
    model.close()
    gc.collect()
    again = models.wrap(module, 3, model_run_config=microbatches(3))
    again.zero_grad()
    again(batch(6, WIDTH)).sum().backward()
    again.synchronize()
    assert_same(module[0][0].linear.weight.grad, first)
    plain = seeded(lambda: chain(linear))
    for part in batch(6, WIDTH).tensor_split(3):
        plain(part).sum().backward()
    torch.testing.assert_close(first, plain[0][0].weight.grad * 3)
