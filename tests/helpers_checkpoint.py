"""A small training run that can be saved and resumed, for the tests of checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe import GradScaler, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, checkpoint, optim

NUM_MICROBATCH = 3
BATCH = 6
WIDTH = 8

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Layers with dropout, with buffers that training changes, and without parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Sequential(nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH)),
        nn.Linear(2 * WIDTH, 2),
    ).to(dtype)


@dataclass
class Training:
    """A model with everything that a run needs. Use `open_training` to make one."""

    model: RoundPipe
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: GradScaler | None
    is_async: bool
    config: RoundPipeRunConfig
    step: int = 0

    def train(self, until: int, save_in: Path | None = None, save_every: int = 2) -> list[float]:
        """Train until step `until`; returns the losses. Saves every `save_every` steps if `save_in` is given."""
        losses = []
        while self.step < until:
            inputs, label = batch_of(self.step, next(self.model.original_model.parameters()).dtype)
            loss = self.model.forward_backward((inputs,), label=label, loss_fn=self.loss_fn, run_config=self.config)
            losses.append(loss.item())
            self.model.step(self.step_fn, is_async=self.is_async)
            if self.scaler is not None:
                self.scaler.update(is_async=self.is_async)
            self.step += 1
            if save_in is not None and self.step % save_every == 0:
                self.save(save_in / f"step-{self.step}")
        return losses

    def loss_fn(self, output: Tensor, label: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(output, label)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step_fn(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        self.scheduler.step()  # here: after an asynchronous step, the optimizer thread reads the learning rate later

    def save(self, folder: Path, **options: Any) -> checkpoint.PendingSave:
        return checkpoint.save(
            folder,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            extra={"step": self.step},
            **options,
        )

    def load(self, folder: Path) -> None:
        extra = checkpoint.load(folder, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler)
        self.step = extra["step"]

    def bits(self) -> dict[str, Any]:
        """Copies of everything that a checkpoint restores."""
        self.model.synchronize()
        masters = {name: master.detach().clone() for name, master in self.model.optim_named_parameters()}
        return {
            "weights": {key: value.clone() for key, value in self.model.state_dict().items()},
            "masters": masters,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": copy.deepcopy(self.scheduler.state_dict()),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": torch.get_rng_state().clone(),
        }


def open_training(
    dtype: torch.dtype = torch.float32,
    *,
    is_async: bool = False,
    make_optimizer: MakeOptimizer = adamw,
    scaled: bool = False,
    num_devices: int = 2,
    plan: ModelExecutePlan | None = None,
    model: nn.Module | None = None,
) -> Training:
    wrapped = RoundPipe(
        build(dtype) if model is None else model, optim_dtype=torch.float32, devices=["cpu"] * num_devices
    )
    optimizer = make_optimizer(wrapped.optim_parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = GradScaler(init_scale=2.0**8, growth_interval=3) if scaled else None
    torch.manual_seed(1)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=plan)
    return Training(wrapped, optimizer, scheduler, scaler, is_async, config)


def batch_of(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    inputs, labels = torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 2, generator=generator)
    return inputs.to(dtype), labels.to(dtype)


def assert_same_bits(found: Any, expected: Any, where: str = "state") -> None:
    """Compare nested values; tensors bit for bit."""
    assert type(found) is type(expected) or isinstance(found, Tensor), where
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        same = found.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(*same), f"{where} differs"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same_bits(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(*pair, f"{where}[{index}]")
    else:
        assert found == expected, f"{where}: {found!r}, expected {expected!r}"
