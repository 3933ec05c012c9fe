"""Gradient hooks on parameters run as in the plain loop: once per microbatch, on its gradient, in order."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    WAIT_S,
    Models,
    PendingForward,
    StalenessReference,
    assert_same,
    assert_same_grads,
    assert_same_state,
    call_reference,
    microbatches,
    seeded,
    total,
)
from roundpipe import AutoRoundPipe, ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.context import in_gradient_hook

NUM_MICROBATCH = 3
ROWS, WIDTH, NUM_LAYERS = 10, 4, 4
PLANS = {
    "planned": None,
    "one stage": ModelExecutePlan([], [range(4)]),
    "recomputed": ModelExecutePlan([range(3)], [range(3, 4), range(3)]),
    "layer by layer": ModelExecutePlan(
        [range(i, i + 1) for i in range(3)], [range(i, i + 1) for i in reversed(range(4))]
    ),
}
Calls = dict[str, list[Tensor]]  # by parameter, what its hooks were given


class Twice(nn.Module):
    """A layer that uses its weight two times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.linear(x).tanh())
        return y


def embedding_model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), Twice(), nn.Tanh(), nn.Linear(WIDTH, 2))


def token_ids(seed: int = 7) -> Tensor:
    return torch.randint(ROWS, (7, 5), generator=torch.Generator().manual_seed(seed))


def mask_rows(grad: Tensor) -> Tensor:
    """The usual way to train some rows of an embedding only."""
    mask = torch.ones(ROWS, 1)
    mask[: ROWS // 2] = 0
    return grad * mask


# What a hook may do. Each takes a module and notes what its hooks were given.


def masked_embedding(module: nn.Module, calls: Calls) -> None:
    def hook(grad: Tensor) -> Tensor:
        calls.setdefault("embedding", []).append(grad.clone())
        return mask_rows(grad)

    module[0].weight.register_hook(hook)


def only_looking(module: nn.Module, calls: Calls) -> None:
    for name, param in module.named_parameters():
        param.register_hook(lambda grad, name=name: calls.setdefault(name, []).append(grad.clone()))


def in_order(module: nn.Module, calls: Calls) -> None:
    weight = module[1].linear.weight

    def noting(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            calls.setdefault("twice", []).append(grad.clone())
            return change(grad)

        return hook

    weight.register_hook(noting(lambda grad: grad + 1))
    weight.register_hook(noting(lambda grad: grad * 2))
    weight.register_hook(noting(lambda grad: grad.clamp(-1, 1)))


def in_place(module: nn.Module, calls: Calls) -> None:
    module[3].weight.register_hook(_halve)


def _halve(grad: Tensor) -> None:
    grad.mul_(0.5)


def looking_at_sums(module: nn.Module, calls: Calls) -> None:
    for name, param in module.named_parameters():

        def hook(param: Tensor, name: str = name) -> None:
            assert param.grad is not None
            calls.setdefault(name, []).extend([param.grad.clone(), param.detach().clone()])

        param.register_post_accumulate_grad_hook(hook)


def clipping_sums(module: nn.Module, calls: Calls) -> None:
    def clip(param: Tensor) -> None:
        assert param.grad is not None
        calls.setdefault("twice", []).append(param.grad.clone())
        param.grad.clamp_(-0.5, 0.5)

    module[1].linear.weight.register_post_accumulate_grad_hook(clip)


def replacing_sums(module: nn.Module, calls: Calls) -> None:
    def replace(param: Tensor) -> None:
        assert param.grad is not None
        calls.setdefault("head", []).append(param.grad.clone())
        param.grad = param.grad * 0.5

    module[3].weight.register_post_accumulate_grad_hook(replace)


def both_kinds(module: nn.Module, calls: Calls) -> None:
    masked_embedding(module, calls)
    looking_at_sums(module, calls)


def by_attribute(module: nn.Module, calls: Calls) -> None:
    module[0].weight.row_mask = torch.arange(ROWS).remainder(2).unsqueeze(1)
    module[0].weight.register_post_accumulate_grad_hook(_mask_by_attribute)


def _mask_by_attribute(param: Any) -> None:
    param.grad.mul_(param.row_mask)


HOOKS: dict[str, Callable[[nn.Module, Calls], None]] = {
    "mask": masked_embedding,
    "look": only_looking,
    "order": in_order,
    "in place": in_place,
    "sums": looking_at_sums,
    "clip sums": clipping_sums,
    "replace sums": replacing_sums,
    "both": both_kinds,
    "attribute": by_attribute,
}


def train_both(models: Models, hooks: str, num_devices: int, config: RoundPipeRunConfig, *, set_before: bool) -> None:
    reference = seeded(embedding_model)
    module = copy.deepcopy(reference)
    expected_calls: Calls = {}
    calls: Calls = {}
    HOOKS[hooks](reference, expected_calls)
    if set_before:
        HOOKS[hooks](module, calls)
    model = models.wrap(module, num_devices, model_run_config=config)
    if not set_before:
        HOOKS[hooks](module, calls)
    for seed in (7, 8):
        expected = call_reference(reference, (token_ids(seed),), loss_fn=total, num_microbatch=NUM_MICROBATCH)
        loss = model.forward_backward((token_ids(seed),), loss_fn=total)
        model.synchronize()
        assert_same(loss, expected.loss, "loss")
    assert_same_grads(model.model, reference)
    assert_same(calls, {name: expected_calls[name] for name in calls}, "what hooks were given")
    assert calls.keys() == expected_calls.keys()


@pytest.mark.parametrize("set_before", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_run_as_in_the_plain_loop(models: Models, hooks: str, set_before: bool) -> None:
    train_both(models, hooks, 3, microbatches(NUM_MICROBATCH), set_before=set_before)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("hooks", ["both", "order", "clip sums"])
def test_hooks_run_once_per_microbatch_under_every_plan(models: Models, hooks: str, plan: str, grain: str) -> None:
    for num_devices in (1, 2, 5):
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=PLANS[plan], recompute_grain=grain)
        train_both(models, hooks, num_devices, config, set_before=False)


@pytest.mark.parametrize("is_async", [False, True])
def test_masked_rows_are_not_trained(models: Models, num_devices: int, is_async: bool) -> None:
    reference = seeded(embedding_model)
    model = models.wrap_copy(reference, num_devices)
    before = reference[0].weight.detach().clone()
    reference[0].weight.register_hook(mask_rows)
    model.model[0].weight.register_hook(mask_rows)
    plain = StalenessReference(reference, lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(4):
        call_reference(reference, (token_ids(seed),), loss_fn=total, num_microbatch=NUM_MICROBATCH)
        plain.step(is_async)
        model.forward_backward((token_ids(seed),), loss_fn=total, run_config=microbatches(NUM_MICROBATCH))
        model.step(step_fn, is_async)
    plain.synchronize()
    model.synchronize()
    assert_same_state(model.model, reference)
    assert torch.equal(model.model[0].weight[: ROWS // 2], before[: ROWS // 2])
    assert not torch.equal(model.model[0].weight[ROWS // 2 :], before[ROWS // 2 :])


def test_hooks_may_be_added_and_removed_between_calls(models: Models) -> None:
    reference = seeded(embedding_model)
    model = models.wrap_copy(reference, 2, model_run_config=microbatches(NUM_MICROBATCH))

    def call() -> None:
        call_reference(reference, (token_ids(),), loss_fn=total, num_microbatch=NUM_MICROBATCH)
        model.forward_backward((token_ids(),), loss_fn=total)
        model.synchronize()
        assert_same_grads(model.model, reference)

    call()
    masks = [net[0].weight.register_hook(mask_rows) for net in (reference, model.model)]
    call()
    sums = [net[3].bias.register_post_accumulate_grad_hook(_double_sum) for net in (reference, model.model)]
    call()
    for handle in masks:
        handle.remove()
    call()
    for handle in sums:
        handle.remove()
    call()


def _double_sum(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def test_a_hook_that_is_removed_while_backward_runs_still_counts_for_that_call(models: Models) -> None:
    running, may_go_on = threading.Event(), threading.Event()

    def hold(grad: Tensor) -> None:
        running.set()
        assert may_go_on.wait(WAIT_S)

    reference = seeded(embedding_model)
    model = models.wrap_copy(reference, 2)
    reference[0].weight.register_hook(mask_rows)
    model.model[3].bias.register_hook(hold)
    handle = model.model[0].weight.register_hook(mask_rows)
    call_reference(reference, (token_ids(),), loss_fn=total, num_microbatch=1)
    # One microbatch: the loss is known before its backward, which waits for this test, so the call returns.
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=PLANS["recomputed"])
    model.forward_backward((token_ids(),), loss_fn=total, run_config=config)
    assert running.wait(WAIT_S)
    handle.remove()
    may_go_on.set()
    model.synchronize()
    assert_same_grads(model.model, reference)


def test_hooks_run_in_the_backward_of_a_forward(models: Models, num_devices: int) -> None:
    """One hook is set before the forward, one between forward and backward; inference runs none."""
    reference = seeded(embedding_model)
    model = models.wrap_copy(reference, num_devices)
    calls: list[Calls] = [{}, {}]
    for net, noted in zip((reference, model.model), calls, strict=True):
        masked_embedding(net, noted)
    with torch.no_grad():
        model(token_ids())
    expected = PendingForward(reference, (token_ids(),), {}, NUM_MICROBATCH)
    output = model(token_ids(), roundpipe_run_config=microbatches(NUM_MICROBATCH))
    assert calls[1] == {}
    for net, noted in zip((reference, model.model), calls, strict=True):
        looking_at_sums(net, noted)
    total(expected.output, None).backward()
    expected.backward()
    total(output, None).backward()
    model.synchronize()
    assert_same_grads(model.model, reference)
    assert_same(calls[1], {name: calls[0][name] for name in calls[1]}, "what hooks were given")


def test_a_hook_knows_that_it_is_one(models: Models) -> None:
    """Code that would wait for a call to end must not do so inside it."""
    found: list[bool] = []
    model = models.wrap(seeded(embedding_model), 2)
    model.model[0].weight.register_hook(lambda grad: found.append(in_gradient_hook()))
    model.model[0].weight.register_post_accumulate_grad_hook(lambda param: found.append(in_gradient_hook()))
    model.forward_backward((token_ids(),), loss_fn=total, run_config=microbatches(1))
    model.synchronize()
    assert found == [True, True]
    assert not in_gradient_hook()


def test_hooks_of_parameters_that_do_not_train_do_not_run(models: Models) -> None:
    model = models.wrap(seeded(embedding_model), 2)
    calls: Calls = {}
    only_looking(model.model, calls)
    model.model[1].requires_grad_(False)
    model.forward_backward((token_ids(),), loss_fn=total)
    model.synchronize()
    assert sorted(calls) == ["0.weight", "3.bias", "3.weight"]
    calls.clear()
    model.model[1].requires_grad_(True)
    model.forward_backward((token_ids(),), loss_fn=total)
    model.synchronize()
    assert "1.linear.weight" in calls


def test_hooks_in_every_part_of_an_auto_model_and_outside_of_parts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(ROWS, WIDTH)
            self.chain = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.chain(self.embed(x) * self.scale)
            return y

    def set_hooks(net: nn.Module, calls: Calls) -> None:
        only_looking(net, calls)
        params = dict(net.named_parameters())
        params["embed.weight"].register_hook(mask_rows)
        params["scale"].register_hook(lambda grad: grad * 3)
        params["chain.0.bias"].register_hook(lambda grad: grad * 5)

    reference = seeded(Net)
    net = copy.deepcopy(reference)
    whole = RoundPipeRunConfig(num_microbatch=1)
    model = wrap_model_to_roundpipe(
        net,
        devices=["cpu"] * 2,
        lower_threshold=17,
        upper_threshold=60,
        model_run_config=whole,
        skip_modules=[net.embed],
    )
    assert isinstance(model, AutoRoundPipe)
    try:
        calls: list[Calls] = [{}, {}]
        set_hooks(reference, calls[0])
        set_hooks(net, calls[1])
        total(reference(token_ids()), None).backward()
        total(model(token_ids()), None).backward()
        model.synchronize()
        assert_same(calls[1], {name: calls[0][name] for name in calls[1]}, "what hooks were given")
        assert calls[0].keys() == calls[1].keys()
        assert_same(
            {name: param.grad for name, param in model.named_parameters()},
            {name: param.grad for name, param in reference.named_parameters()},
        )
    finally:
        model.close()
