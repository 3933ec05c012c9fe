"""Gradient hooks and Python's random numbers on a real GPU, where autograd runs on a thread of its own."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, doing_recompute
from roundpipe.context import current_iteration, in_gradient_hook

WORKERS = [["cuda:0"], ["cuda:0"] * 3]
RECOMPUTED = RoundPipeRunConfig(num_microbatch=3, execute_plan=ModelExecutePlan([range(2)], [range(2, 3), range(2)]))


def loss_fn(outputs: torch.Tensor, labels: object) -> torch.Tensor:
    return outputs.square().sum()


@pytest.mark.parametrize("devices", WORKERS, ids=len)
def test_hooks_run_as_in_a_plain_loop(devices: list[str]) -> None:
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    module = copy.deepcopy(reference)
    reference = reference.cuda()
    x = torch.randn(6, 8)
    sums: list[list[torch.Tensor]] = [[], []]
    inside: list[bool] = []
    for net, noted in zip((reference, module), sums, strict=True):
        mask = torch.arange(8).remainder(2).unsqueeze(1)
        net[0].weight.register_hook(lambda grad, mask=mask: grad * mask.to(grad.device))
        net[1].weight.register_post_accumulate_grad_hook(lambda p, noted=noted: noted.append(p.grad.cpu().clone()))
    module[0].bias.register_hook(lambda grad: inside.append(in_gradient_hook() and current_iteration() is not None))
    with RoundPipe(module, devices=devices, model_run_config=RECOMPUTED) as model:
        model.forward_backward((x,), loss_fn=loss_fn)
        model.synchronize()
    for part in x.cuda().tensor_split(3):
        loss_fn(reference(part), None).backward()
    for param, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad.cpu())
    assert not module[0].weight.grad[::2].any()
    assert len(sums[1]) == 3
    for ours, expected in zip(sums[1], sums[0], strict=True):
        torch.testing.assert_close(ours, expected)
    assert inside == [True] * 3


@pytest.mark.parametrize("devices", WORKERS, ids=len)
def test_recomputation_repeats_pythons_random_numbers(devices: list[str]) -> None:
    drawn: dict[bool, list[float]] = {False: [], True: []}

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            number = random.random()
            drawn[doing_recompute()].append(number)
            return super().forward(x) * number

    with RoundPipe(nn.Sequential(Scaled(8, 8), Scaled(8, 8), nn.Linear(8, 4)), devices=devices) as model:
        model.forward_backward((torch.randn(6, 8),), loss_fn=loss_fn, run_config=RECOMPUTED)
        model.synchronize()
    assert len(set(drawn[False])) == 6
    assert sorted(drawn[True]) == sorted(drawn[False])


class Dropping(nn.Linear):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__(8, 8)
        self.use_reentrant = use_reentrant  # None: without a checkpoint

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x) * torch.rand(()).item()).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return self.drop(x)
        y: torch.Tensor = checkpoint(self.drop, x, use_reentrant=self.use_reentrant)
        return y


@pytest.mark.parametrize("devices", WORKERS, ids=len)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_a_layer_repeats_its_numbers(devices: list[str], use_reentrant: bool) -> None:
    """Numbers of the GPU and of the host; the generators of the process stay as they are."""
    found = []
    for kind in (None, use_reentrant):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(8, 8), Dropping(kind), Dropping(kind))
        x = torch.randn(6, 8)
        with RoundPipe(module, devices=devices, model_run_config=RECOMPUTED) as model:
            for _ in range(2):
                model.forward_backward((x,), loss_fn=loss_fn)
            model.synchronize()
        found.append(
            [*(param.grad for param in module.parameters()), torch.rand(4), torch.rand(4, device="cuda").cpu()]
        )
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain)
