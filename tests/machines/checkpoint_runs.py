"""Trainings that the tests of checkpoints over machines run: they save or load, and return their whole state."""

from __future__ import annotations

import dataclasses
import random
import signal
from pathlib import Path
from typing import Any

import torch
from machine_training import MICROBATCHES, ROWS, WIDTH, part
from torch import Tensor, nn
from torch import distributed as dist

from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, checkpoint, optim, wrap_model_to_roundpipe
from roundpipe.checkpoint import PendingSave, folders
from roundpipe.store.values import ShardedMaster


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    kind: "full", "frozen", "tied", "transposed" (a weight whose memory is not in row-major order) or "auto" (part by
        part).
    """

    dtype: torch.dtype = torch.bfloat16
    is_async: bool = False
    kind: str = "full"
    optimizer: str = "AdamW"  # of roundpipe.optim, or "torch.<name>"
    moments: str = ""  # the option of the optimizer, if it is given
    width: int = WIDTH
    master_bits: int = 32


class Scale(nn.Module):
    """A layer with a parameter of one element and one of three, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * self.factor + self.shift.sum()


def network(run: Run) -> nn.Sequential:
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(run.width, run.width), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    layers.insert(1, nn.Sequential(Scale()))
    if run.kind == "frozen":
        layers[0].requires_grad_(False)
        layers[2][0].bias.requires_grad_(False)
    model = nn.Sequential(*layers).to(run.dtype)
    if run.kind == "transposed":
        model[2][0].weight = nn.Parameter(model[2][0].weight.detach().t().contiguous().t())
        assert not model[2][0].weight.is_contiguous()
    if run.kind == "tied":
        model[3][0].weight = model[0][0].weight
    return model


class Parts(nn.Module):
    """A model that is no sequence: its forward runs on the host and calls its parts."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.ones(3, dtype=layers[0][0].weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale.sum()


class Training:
    """A model with optimizer and scheduler on one machine. The batch of a step depends on the step alone."""

    def __init__(self, rank: int, size: int, run: Run, *, has_group: bool = True) -> None:
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES // size)
        self.rank, self.size, self.run = rank, size, run
        options: dict[str, Any] = {
            "optim_dtype": torch.float32,
            "master_bits": run.master_bits,
            "name": "net",
            "model_run_config": config,
            "devices": ["cpu"] * 2,
            "process_group": dist.group.WORLD if has_group else None,
        }
        self.model: Any
        if run.kind == "auto":
            self.model = wrap_model_to_roundpipe(Parts(network(run)), **options)
            assert isinstance(self.model, AutoRoundPipe)
        else:
            self.model = RoundPipe(network(run), **options)
        module, _, name = run.optimizer.rpartition(".")
        make = getattr(torch.optim if module else optim, name)
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        moments = {"moments": run.moments} if run.moments else {}
        self.optimizer = make(self.model.optim_parameters(), lr=0.02, **momentum, **moments)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.step = 0
        torch.manual_seed(100 + rank)  # every machine has other random numbers
        random.seed(100 + rank)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            x, y = (torch.randn(ROWS, self.run.width, generator=generator).to(self.run.dtype) for _ in range(2))
            x, y = part(x, self.rank, self.size), part(y, self.rank, self.size)
            if self.run.kind == "auto":
                loss = squared(self.model(x), y)
                loss.backward()
                losses.append(float(loss))
            else:
                losses.append(float(self.model.forward_backward((x,), label=y, loss_fn=squared)))
            self.model.step(self.step_fn, self.run.is_async)
            self.step += 1
        return losses

    def step_fn(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def save(self, folder: str, **options: Any) -> checkpoint.PendingSave:
        extra = {"step": self.step}
        return checkpoint.save(folder, self.model, self.optimizer, scheduler=self.scheduler, extra=extra, **options)

    def load(self, folder: str) -> None:
        self.step = checkpoint.load(folder, self.model, self.optimizer, scheduler=self.scheduler)["step"]

    def state(self) -> dict[str, Any]:
        """This machine's state. Of masters and moments that machines divide, its range as a flat tensor."""
        self.model.synchronize()
        masters, moments = {}, {}
        for name, master in self.model.optim_named_parameters():
            with master.lock:
                masters[name] = _flat_values(master)
            for key, value in self.optimizer.state.get(master, {}).items():
                moments[f"{key} of {name}"] = value.clone()
        return {
            "weights": {name: value.clone() for name, value in self.model.state_dict().items()},
            "masters": masters,
            "moments": moments,
            "scheduler": self.scheduler.state_dict()["last_epoch"],
            "random": (torch.get_rng_state(), random.getstate()),
            "step": self.step,
        }


def _flat_values(master: Any) -> Tensor:
    halves = master.halves
    if isinstance(halves, ShardedMaster):
        own = halves.own_values()
        return own.joined().clone()
    whole = master.detach().clone() if halves is None else halves.joined()
    return whole.as_strided((whole.numel(),), (1,)).clone()


def squared(output: Tensor, label: Tensor) -> Tensor:
    return (output.float() - label.float()).square().sum()


# Functions that run on every machine.


def save_and_go_on(rank: int, size: int, run: Run, folder: str, before: int = 2, after: int = 2) -> dict[str, Any]:
    """Train, save, and train on while the checkpoint is written."""
    training = Training(rank, size, run)
    with training.model:
        training.train(before)
        pending = training.save(folder)
        saved = training.state()
        losses = training.train(after)
        pending.wait()
        return {"saved": saved, "losses": losses, "state": training.state()}


def load_and_go_on(
    rank: int, size: int, run: Run, folder: str, after: int = 2, has_group: bool = True
) -> dict[str, Any]:
    """Load a checkpoint into a new training, and train."""
    training = Training(rank, size, run, has_group=has_group)
    with training.model:
        training.load(folder)
        loaded = training.state()
        losses = training.train(after)
        return {"saved": loaded, "losses": losses, "state": training.state()}


def load_alone(rank: int, size: int, run: Run, folder: str) -> dict[str, Any]:
    """Load a checkpoint into a model without process group."""
    return load_and_go_on(rank, size, run, folder, has_group=False)


def save_in_own_folder(rank: int, size: int, folder: str) -> None:
    folders._SEEN_S = 0.2
    training = Training(rank, size, Run())
    with training.model:
        training.train(1)
        training.save(f"{folder}/of-rank-{rank}/step-1").wait()


def fail_to_save(rank: int, size: int, folder: str, failing: int, place: str) -> list[Any]:
    """Save, fail to save on one machine, train on, and save again. Returns what the failed save has raised."""
    training = Training(rank, size, Run())
    with training.model:
        training.train(1)
        training.save(f"{folder}/step-1").wait()
        training.train(1)
        original = getattr(PendingSave, place)

        def fail(self: Any, *args: Any) -> Any:
            raise OSError(28, "No space left on device")

        if rank == failing:
            setattr(PendingSave, place, fail)
        caught: list[Any] = []
        try:
            training.save(f"{folder}/step-2").wait()
        except Exception as error:
            caught = [type(error).__name__, str(error), getattr(error, "rank", None)]
        finally:
            setattr(PendingSave, place, original)
        training.train(1)
        training.save(f"{folder}/step-3").wait()
        return caught


def be_killed_while_saving(rank: int, size: int, folder: str, killed: int) -> None:
    """Save, then save again; one machine is killed when it has written its first file."""
    training = Training(rank, size, Run())
    with training.model:
        training.train(1)
        training.save(f"{folder}/step-1").wait()
        training.train(1)
        write = PendingSave._write_shard

        def die(self: Any, shard: Any) -> None:
            write(self, shard)
            if rank == killed:
                signal.raise_signal(signal.SIGKILL)

        PendingSave._write_shard = die  # type: ignore[method-assign]
        training.save(f"{folder}/step-2").wait()


def load_and_compare(rank: int, size: int, folder: str) -> list[Any]:
    """Try to load a checkpoint. Returns the error, and whether anything has changed."""
    training = Training(rank, size, Run())
    with training.model:
        training.train(1)
        before = training.state()
        caught: list[Any] = []
        try:
            training.load(folder)
        except Exception as error:
            caught = [type(error).__name__, str(error), getattr(error, "rank", None)]
        after = training.state()
        training.train(1)
        return [caught, before, after]


def save_alone(rank: int, size: int, folder: str) -> None:
    """Save on rank 0 only, while the other machines train."""
    training = Training(rank, size, Run())
    with training.model:
        training.train(1)
        if rank == 0:
            training.save(folder)
        training.train(1)


def load_other(rank: int, size: int, folder: str) -> None:
    """Load other checkpoints on different machines."""
    training = Training(rank, size, Run())
    with training.model:
        training.load(str(Path(folder) / f"step-{min(rank, 1) + 1}"))


def save_and_load_with_other_arguments(rank: int, size: int, folder: str) -> list[Any]:
    """One machine saves without optimizer, and loads without scheduler or random numbers. Returns what was raised."""
    training, caught = Training(rank, size, Run()), list[Any]()

    def attempt(call: Any) -> None:
        try:
            call()
        except Exception as error:
            caught.append([type(error).__name__, str(error), getattr(error, "rank", None)])

    with training.model:
        training.train(1)
        model, optimizer, schedule = training.model, training.optimizer, training.scheduler
        attempt(lambda: checkpoint.save(f"{folder}/one", model, None if rank else optimizer))
        training.save(f"{folder}/two").wait()
        before = training.state()
        attempt(lambda: checkpoint.load(f"{folder}/two", model, optimizer, scheduler=None if rank else schedule))
        attempt(lambda: checkpoint.load(f"{folder}/two", model, optimizer, restore_rng=not rank))
        attempt(lambda: checkpoint.load(f"{folder}/two", model, None if rank else optimizer))
        after = training.state()
        training.train(1)
        return [caught, before, after]
