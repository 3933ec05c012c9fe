"""A training on several machines in network namespaces, which saves its state after every step and can be resumed."""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from virtual_network import Place, pause

from roundpipe import RoundPipe, RoundPipeRunConfig, optim

WIDTH = 512  # the ranges of a layer that one of three machines sends take 5 s at 1 Mb/s
NUM_LAYERS = 3
ROWS = 2  # of each machine


class Pauses:
    """Where this process waits until the test has acted."""

    names: Collection[str] = ()

    @classmethod
    def at(cls, name: str) -> None:
        if name in cls.names:
            cls.names = ()
            pause(name)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Pauses.at("forward")
        return x + self.linear(x).tanh()


def train(
    rank: int,
    size: int,
    store: str,
    folder: Path,
    num_steps: int,
    timeout_s: float,
    is_async: bool = False,
    pauses: dict[int, tuple[int, str]] | None = None,
) -> dict[str, Any]:
    """Train from the last complete state in `folder` to step `num_steps`; returns losses, and a hash of the weights.

    pauses: by rank, the step in which this rank pauses, and where: "call", "forward" or "exchange".
    """
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    torch.manual_seed(11)
    model = RoundPipe(
        nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))),
        name="net",
        model_run_config=RoundPipeRunConfig(num_microbatch=1),
        devices=["cpu"],
        process_group=dist.group.WORLD,
    )
    optimizer = optim.AdamW(model.optim_parameters(), lr=0.001)

    def step_fn() -> None:
        Pauses.at("exchange")
        optimizer.step()
        optimizer.zero_grad()

    done = last_complete(folder, size)
    if done:
        state = torch.load(_path(folder, done, rank), weights_only=True)
        model.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
    losses = {}
    paused_step, name = (pauses or {}).get(rank, (0, ""))
    for step in range(done + 1, num_steps + 1):
        if step == paused_step:
            Pauses.names = (name,)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        Pauses.at("call")
        losses[step] = float(model.forward_backward((x,), label=x.flip(0), loss_fn=_loss))
        model.step(step_fn, is_async)
        model.synchronize()  # a state to resume from has the newest weights
        _save(folder, step, rank, {"weights": model.state_dict(), "optimizer": optimizer.state_dict()})
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    model.close()
    dist.destroy_process_group()
    return {"losses": losses, "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(), "resumed from": done}


def _loss(output: Tensor, label: Tensor) -> Tensor:
    return ((output - label) ** 2).mean()


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step}-rank-{rank}.pt"


def _save(folder: Path, step: int, rank: int, state: dict[str, Any]) -> None:
    unfinished = folder / f"unfinished-{rank}"
    torch.save(state, unfinished)
    unfinished.rename(_path(folder, step, rank))


def last_complete(folder: Path, size: int) -> int:
    """The last step whose state all machines have saved; 0 if there is none."""
    steps = [int(path.name.split("-")[1]) for path in folder.glob("step-*-rank-0.pt")]
    complete = [step for step in steps if all(_path(folder, step, rank).exists() for rank in range(size))]
    return max(complete, default=0)


def main() -> None:
    """The training as a script: arguments are rank, size, address, store, namespace, folder and timeout."""
    rank, size, address, store, namespace, folder, timeout_s = sys.argv[1:]
    Place(address, "link0", namespace).enter()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    train(int(rank), int(size), store, Path(folder), 100_000, float(timeout_s))


if __name__ == "__main__":
    main()
