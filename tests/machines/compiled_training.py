"""A training with compiled layers whose batches have another length on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, checkpoint, optim
from roundpipe.compiled import compilations

WIDTH = 12


def network() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)])


def squares(output: Tensor, label: Any) -> Tensor:
    return output.square().sum()


def train(rank: int, size: int, backend: str, folder: str, first_step: int, num_steps: int) -> dict[str, Any]:
    """Train from `first_step` on, where the checkpoint of `folder` begins, and save the run at the end.

    backend: of torch.compile; empty to run eagerly.
    """
    torch.manual_seed(5)
    model = RoundPipe(
        network(),
        model_run_config=RoundPipeRunConfig(num_microbatch=2, loss_reduction="sum"),
        devices=["cpu"] * 2,
        process_group=distributed.group.WORLD,
        compile={"backend": backend} if backend else False,
    )
    before = compilations().graphs
    with model:
        optimizer = optim.AdamW(model.optim_parameters(), lr=0.01)
        if first_step:
            checkpoint.load(f"{folder}/{first_step}", model, optimizer)
        losses = []
        for step in range(first_step, first_step + num_steps):
            length = 3 + (step * (rank + 1)) % 4  # 3, 4, 5, 6 on the first machine, 3, 5, 3, 5 on the second
            x = torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            losses.append(float(model.forward_backward((x,), loss_fn=squares)))
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        checkpoint.save(f"{folder}/{first_step + num_steps}", model, optimizer).wait()
        (member,) = model._engine.group.members
        sizes = None if member.compiling is None else member.compiling.state()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "weights": weights, "sizes": sizes, "graphs": compilations().graphs - before}
