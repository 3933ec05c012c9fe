"""A small training run that can be saved and resumed, comparison bit for bit, and changes to files of checkpoints."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe import GradScaler, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, checkpoint, optim

WIDTH, ROWS, NUM_MICROBATCH = 16, 6, 3
MANIFEST, STATE = "manifest.json", "state.json"

MakeOptimizer = Callable[..., torch.optim.Optimizer]


def network(
    width: int = WIDTH, num_layers: int = 3, dtype: torch.dtype = torch.bfloat16, seed: int | None = None
) -> nn.Sequential:
    """Layers with dropout, one of them with a buffer that training changes, and a last one without parameters."""
    if seed is not None:
        torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2)) for _ in range(num_layers)]
    layers[1].append(nn.BatchNorm1d(width))
    return nn.Sequential(*layers, nn.Tanh()).to(dtype)


def half_mse(output: Tensor, label: Tensor) -> Tensor:
    return (output.float() - label.float()).square().mean() / 2


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer that is not RoundPipe's and has a state."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


class Training:
    """A wrapped model with optimizer, scheduler and scaler. The batch of a step depends on the step alone."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        optim_dtype: torch.dtype | None = torch.float32,
        num_devices: int = 2,
        device: str = "cpu",
        plan: ModelExecutePlan | None = None,
        is_async: bool = False,
        make_optimizer: MakeOptimizer = optim.AdamW,
        scaled: bool = False,
        seed: int = 1,
    ) -> None:
        plain = network(dtype=dtype, seed=seed) if model is None else model
        config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH, execute_plan=plan)
        self.model = RoundPipe(
            plain, devices=[device] * num_devices, optim_dtype=optim_dtype, model_run_config=config, name="run"
        )
        self.dtype = next(plain.parameters()).dtype
        self.optimizer = make_optimizer(self.model.optim_parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler = GradScaler(init_scale=8.0, growth_interval=3) if scaled else None
        self.is_async = is_async
        self.step = 0
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)

    def train(self, num_steps: int = 1, save_in: Path | None = None, save_every: int = 2) -> list[float]:
        """Train, and return the losses. Saves every `save_every` steps if `save_in` is given."""
        losses = []
        for _ in range(num_steps):
            losses.append(self.compute())
            self.update()
            if save_in is not None and self.step % save_every == 0:
                self.save(save_in / f"step-{self.step}")
        return losses

    def compute(self) -> float:
        """Compute the gradients of the next step, and return its (scaled) loss."""
        generator = torch.Generator().manual_seed(1000 + self.step)
        x, label = (torch.randn(ROWS, WIDTH, generator=generator).to(self.dtype) for _ in range(2))
        return float(self.model.forward_backward((x,), label=label, loss_fn=self._loss_fn))

    def update(self) -> None:
        """Make an optimizer step with the computed gradients."""
        self.model.step(self._step_fn, self.is_async)
        if self.scaler is not None:
            self.scaler.update(is_async=self.is_async)
        self.step += 1

    def _loss_fn(self, output: Tensor, label: Tensor) -> Tensor:
        loss = half_mse(output, label)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _step_fn(self) -> None:
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

    def load(self, folder: Path) -> Any:
        extra = checkpoint.load(folder, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler)
        self.step = extra["step"]
        return extra

    def bits(self) -> dict[str, Any]:
        """Everything that a checkpoint restores, in memory that training does not use."""
        self.model.synchronize()
        numpy = sys.modules.get("numpy")
        state = {
            "weights and buffers": dict(self.model.state_dict()),
            "masters": {name: master.detach() for name, master in self.model.optim_named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "torch's generator": torch.get_rng_state(),
            "python's generator": random.getstate(),
            "numpy's generator": None if numpy is None else numpy.random.get_state()[1].tolist(),
        }
        return copy.deepcopy(state)

    def close(self) -> None:
        self.model.close()


def assert_same_bits(found: Any, expected: Any, where: str = "state") -> None:
    """Compare nested values; tensors bit for bit."""
    assert type(found) is type(expected) or isinstance(found, Tensor), where
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        same = (value.detach().contiguous().view(-1).view(torch.uint8) for value in (found, expected))
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
