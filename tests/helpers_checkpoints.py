"""A small training run whose whole state is compared bit for bit, and changes to the files of its checkpoints."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, checkpoint, optim
from roundpipe.checkpoint import PendingSave

WIDTH, ROWS, NUM_MICROBATCH = 16, 6, 3
MANIFEST, STATE = "manifest.json", "state.json"


def network(width: int = WIDTH, num_layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Layers with dropout, and one with a buffer that training changes."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2)) for _ in range(num_layers)]
    layers[1].append(nn.BatchNorm1d(width))
    return nn.Sequential(*layers).to(dtype)


def half_mse(output: Tensor, label: Tensor) -> Tensor:
    return (output.float() - label.float()).square().mean() / 2


class TrainingRun:
    """A wrapped model with optimizer, scheduler and scaler. The batch of a step depends on the step alone."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        num_devices: int = 2,
        is_async: bool = False,
        seed: int = 1,
        make_optimizer: Callable[..., torch.optim.Optimizer] = optim.AdamW,
        optim_dtype: torch.dtype | None = torch.float32,
        growth_interval: int = 3,
    ) -> None:
        torch.manual_seed(seed)
        plain = network() if model is None else model
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
        self.model = RoundPipe(
            plain, devices=["cpu"] * num_devices, optim_dtype=optim_dtype, model_run_config=config, name="run"
        )
        self.dtype = next(plain.parameters()).dtype
        self.optimizer = make_optimizer(self.model.optim_parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler = GradScaler(init_scale=8.0, growth_interval=growth_interval)
        self.is_async = is_async
        self.step_number = 0

    def train(self, num_steps: int = 1) -> list[float]:
        """Train, and return the scaled losses."""
        return [self._step() for _ in range(num_steps)]

    def _step(self) -> float:
        generator = torch.Generator().manual_seed(1000 + self.step_number)
        x, label = (torch.randn(ROWS, WIDTH, generator=generator).to(self.dtype) for _ in range(2))
        loss: Tensor = self.model.forward_backward(
            (x,), label=label, loss_fn=lambda output, label: self.scaler.scale(half_mse(output, label))
        )
        self.model.step(self._step_fn, self.is_async)
        self.scaler.update()
        self.step_number += 1
        return float(loss)

    def _step_fn(self) -> None:
        self.scaler.step(self.optimizer)
        self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, **options: Any) -> PendingSave:
        return checkpoint.save(
            folder,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            extra={"step": self.step_number},
            **options,
        )

    def load(self, folder: Path) -> Any:
        extra = checkpoint.load(folder, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler)
        self.step_number = extra["step"]
        return extra

    def snapshot(self) -> Any:
        """Everything that a checkpoint restores, as values that can be compared and that share no memory."""
        self.model.synchronize()
        kind, keys, *rest = numpy.random.get_state()
        state = {
            "weights and buffers": dict(self.model.state_dict()),
            "masters": [copy.detach() for copy in self.model.optim_parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "torch's generator": torch.get_rng_state(),
            "python's generator": random.getstate(),
            "numpy's generator": (kind, keys.tobytes(), *rest),
        }
        leaves, spec = tree_flatten(state)
        return spec, [_bits(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def close(self) -> None:
        self.model.close()


def _bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    plain = tensor.detach().contiguous()
    return plain.dtype, tuple(plain.shape), plain.flatten().view(torch.uint8).numpy().tobytes()


# Files of a checkpoint.


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a checksum that matches, as only its writer would."""
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    data.pop("sha256", None)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(data))


def rewrite_file(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree."""
    (folder / name).write_bytes(content)
    entry = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_manifest(folder, lambda data: data["files"].update({name: entry}))


def rewrite_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the values in the state file and make the manifest agree."""
    state = json.loads((folder / STATE).read_text())
    change(state)
    rewrite_file(folder, STATE, json.dumps(state).encode())
