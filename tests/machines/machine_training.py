"""Trainings that the tests of machines run: on one machine with all microbatches, or on several with a part of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, clip_grad_norm_, optim
from roundpipe.api import engine, loss_weights
from roundpipe.runtime.rng import draw_call_seed
from roundpipe.store.values import Rounding, flat

WIDTH = 12
ROWS = 24  # divisible by 1, 2, 3, 4 machines and by their microbatches
MICROBATCHES = 12  # of all machines together


@dataclasses.dataclass(frozen=True)
class Case:
    """One training. `dtype`: of the weights; `optim_dtype`: of the masters."""

    dtype: torch.dtype = torch.float32
    optim_dtype: torch.dtype | None = None
    is_async: bool = False
    by_layer: bool = False  # staleness=0
    dropout: float = 0.0
    calls_per_step: int = 1
    clip: str = ""  # "", "ours" or "torch's"
    norm_type: float = 2.0
    scaler: bool = False
    optimizer: str = "AdamW"  # of roundpipe.optim, or "torch.<name>"
    moments: str = ""  # the option of the optimizer, if it is given
    state_folder: str = ""  # the same
    loss_reduction: str = "sum"
    loop: str = "step"  # "step", "plain"
    num_steps: int = 3
    tied: bool = False
    frozen: bool = False
    unused: bool = False  # one layer gets no gradient
    overflow: bool = False  # in the second step, the gradient of one row is infinite
    width: int = WIDTH
    master_bits: int = 32


class Skipped(nn.Module):
    """A layer whose parameter gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x


def network(case: Case) -> nn.Sequential:
    """The same network on every machine."""
    torch.manual_seed(11)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(case.width, case.width), nn.Tanh(), nn.Dropout(case.dropout)) for _ in range(4)
    ]
    if case.tied:
        layers[3][0].weight = layers[0][0].weight
    if case.frozen:
        layers[1].requires_grad_(False)
        layers[2][0].bias.requires_grad_(False)
    if case.unused:
        layers.insert(2, Skipped())
    return nn.Sequential(*layers).to(case.dtype)


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    return ((output - label) ** 2).float().sum() if output.dtype is torch.bfloat16 else ((output - label) ** 2).sum()


def mean_loss(output: Tensor, label: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, label)


def optimizer_of(case: Case, params: Any) -> torch.optim.Optimizer:
    module, _, name = case.optimizer.rpartition(".")
    given = {key: value for key in ("moments", "state_folder") if (value := getattr(case, key))}
    return getattr(torch.optim if module else optim, name)(params, lr=0.01, **given)


def part(tensor: Tensor, rank: int, size: int) -> Tensor:
    """This machine's rows of a batch."""
    return tensor.tensor_split(size)[rank]


def train(rank: int, size: int, case: Case, has_group: bool = True, copies_seed: int | None = None) -> dict[str, Any]:
    """Train on this machine's part of every batch; returns losses and weights.

    copies_seed: decides when virtual devices run their copies.
    """
    os.environ.pop("ROUNDPIPE_VIRTUAL_SEED", None)
    if copies_seed is not None:
        os.environ["ROUNDPIPE_VIRTUAL_SEED"] = str(copies_seed + rank)
    torch.manual_seed(5)
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES // size, loss_reduction=case.loss_reduction)
    model = RoundPipe(
        network(case),
        optim_dtype=case.optim_dtype,
        name="net",
        model_run_config=config,
        devices=["cpu"] * 2,
        process_group=dist.group.WORLD if has_group else None,
        staleness=0 if case.by_layer else 1,
        master_bits=case.master_bits,
    )
    with model:
        params = list(model.optim_parameters())
        optimizer = optimizer_of(case, params)
        scaler = GradScaler(init_scale=8.0, growth_interval=1, enabled=case.scaler)
        norms: list[float] = []

        def clip() -> None:
            if case.clip:
                clips: dict[str, Callable[..., Tensor]] = {"ours": clip_grad_norm_}
                norms.append(float(clips.get(case.clip, nn.utils.clip_grad_norm_)(params, 0.5, case.norm_type)))

        def step_fn() -> None:
            scaler.unscale_(optimizer)
            clip()
            scaler.step(optimizer)
            optimizer.zero_grad()

        fn = mean_loss if case.loss_reduction == "mean" else loss_fn
        losses = []

        def scaled(output: Tensor, label: Tensor) -> Tensor:
            return scaler.scale(fn(output, label))

        for step in range(case.num_steps):
            for call in range(case.calls_per_step):
                generator = torch.Generator().manual_seed(100 * step + call)
                x = torch.randn(ROWS, case.width, generator=generator).to(case.dtype)
                y = torch.randn(ROWS, case.width, generator=generator).to(case.dtype)
                if case.overflow and step == 1:
                    y[13, 0] = 3e38
                x, y = part(x, rank, size), part(y, rank, size)
                if case.loop == "plain":
                    loss = fn(model(x), y)
                    loss.backward()
                    losses.append(loss.item())
                else:
                    loss = model.forward_backward((x,), label=y, loss_fn=scaled)
                    losses.append(loss.item())
            if case.loop == "plain":
                clip()
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.step(step_fn, case.is_async or case.by_layer)
                scaler.update(is_async=case.is_async)
        model.synchronize()
        norms.append(scaler.get_scale())
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        machines = model._engine.group.machines
        sent = None if machines is None else machines.sent_bytes
        num_files = Path("/proc/self/maps").read_text().count(case.state_folder) if case.state_folder else 0
    return {"losses": losses, "weights": weights, "norms": norms, "sent": sent, "num_files": num_files}


def reference_of_ranges(rank: int, size: int, case: Case, num_machines: int) -> dict[str, Any]:
    """The training of `train` on `num_machines` machines, computed by one that plays all of them in turn.

    The gradients of the machines' parts are added in float32, in the order of ranks, and the optimizer updates float32
    masters.
    """
    torch.manual_seed(5)
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES // num_machines)
    model = RoundPipe(network(case), name="net", model_run_config=config, devices=["cpu"] * 2, optim_dtype=case.dtype)
    with model:
        params = list(model.model.parameters())
        masters = [nn.Parameter(param.detach().float()) for param in params]
        optimizer = optimizer_of(case, masters)
        losses: list[float] = []
        weights = [param.detach().clone() for param in params]  # those of the next call
        rounding = Rounding()
        for step in range(case.num_steps):
            sums: list[list[Tensor]] = []
            seeds: dict[int, int] = {}
            totals = [0.0] * case.calls_per_step
            for machine in range(num_machines):
                for call in range(case.calls_per_step):
                    generator = torch.Generator().manual_seed(100 * step + call)
                    x = torch.randn(ROWS, case.width, generator=generator).to(case.dtype)
                    y = torch.randn(ROWS, case.width, generator=generator).to(case.dtype)
                    x, y = part(x, machine, num_machines), part(y, machine, num_machines)
                    seed = seeds.setdefault(call, 0) or draw_call_seed()
                    seeds[call] = seed
                    with numbered(seed, machine * MICROBATCHES // num_machines):
                        totals[call] += model.forward_backward((x,), label=y, loss_fn=loss_fn).item()
                model.synchronize()
                sums.append([param.grad.float() for param in params if param.grad is not None])
                model.zero_grad()
            losses += totals
            for master, *parts in zip(masters, *sums, strict=True):
                master.grad = parts[0].clone()
                for further in parts[1:]:
                    master.grad.add_(further)
            if case.clip:
                nn.utils.clip_grad_norm_(masters, 0.5)
            optimizer.step()
            for master in masters if case.master_bits == 24 else ():
                rounding.round(flat(master.detach()))
            rounding.count += 1
            new = [master.detach().to(case.dtype) for master in masters]
            with torch.no_grad():
                for param, value in zip(params, weights if case.is_async else new, strict=True):
                    param.copy_(value)
            weights = new
        names = [name for name, _ in model.model.named_parameters()]
    return {"losses": losses, "weights": dict(zip(names, weights, strict=True))}


@contextlib.contextmanager
def numbered(seed: int, first_microbatch: int) -> Iterator[None]:
    """Inside, calls have this seed, and their microbatches are numbered from `first_microbatch` on."""
    real = loss_weights.WholeBatch

    class Numbered(real):  # type: ignore[misc, valid-type]
        def call_seed(self) -> int:
            self.first_microbatch = first_microbatch
            return seed

    engine.WholeBatch = Numbered  # type: ignore[misc, attr-defined]
    try:
        yield
    finally:
        engine.WholeBatch = real  # type: ignore[misc, attr-defined]
