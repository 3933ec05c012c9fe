"""Trainings on several machines in which one machine has another setting."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from machine_training import WIDTH, part
from torch import Tensor, nn
from torch import distributed as dist

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, clip_grad_norm_, optim, wrap_model_to_roundpipe
from roundpipe.distributed import machines as machines_module
from roundpipe.distributed import settings as settings_module

BAD_RANK = 1


class Halves(nn.Module):
    """A model that is no sequence: its forward runs on the host and calls its parts."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.second = nn.ModuleList(layers[:2]), nn.ModuleList(layers[2:])
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.first, *self.second):
            x = layer(x)
        return x * self.scale.sum()


class Training:
    """A model in training: `loop` is "exact", "stale", "plain" or "auto" (part by part, exact steps)."""

    def __init__(
        self, rank: int, size: int, loop: str, make: Callable[..., torch.optim.Optimizer] = optim.AdamW
    ) -> None:
        torch.manual_seed(11)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).bfloat16()
        self.rank, self.size, self.loop = rank, size, loop
        options: dict[str, Any] = {
            "optim_dtype": torch.float32,
            "model_run_config": RoundPipeRunConfig(num_microbatch=2),
            "devices": ["cpu"] * 2,
            "name": "net",
            "process_group": dist.group.WORLD,
        }
        model: Any = layers
        self.model = (
            wrap_model_to_roundpipe(Halves(model), **options) if loop == "auto" else RoundPipe(model, **options)
        )
        every = list(self.model.optim_parameters())
        groups = [{"params": every[::2], "lr": 0.01}, {"params": every[1::2], "lr": 0.02}]
        self.optimizer = make(groups, lr=0.01, weight_decay=0.1)
        self.scaler = GradScaler(init_scale=4.0)
        self.max_norm = 1.0
        self.config = RoundPipeRunConfig()
        self.batch = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()

    def loss_fn(self, output: Tensor, label: Tensor) -> Tensor:
        return self.scaler.scale(((output - label) ** 2).float().mean())

    def step_fn(self) -> None:
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model, self.max_norm)
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def iteration(self) -> None:
        """One call and one step, and what appears in the background."""
        x = part(self.batch, self.rank, self.size)
        if self.loop in ("exact", "stale"):
            self.model.forward_backward((x,), label=x.flip(0), loss_fn=self.loss_fn, run_config=self.config)
            self.model.step(self.step_fn, self.loop == "stale")
        else:
            self.loss_fn(self.model(x), x.flip(0)).backward()
            if self.loop == "plain":
                self.step_fn()
            else:
                self.model.step(self.step_fn, is_async=False)
        self.scaler.update(is_async=self.loop == "stale")
        self.model.synchronize()

    def weights(self) -> Tensor:
        self.model.synchronize()
        return torch.cat([p.detach().float().flatten() for p in self.model.original_model.parameters()])


# What differs, and how. Each is undone when the context ends.


@contextlib.contextmanager
def other_value(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute of an object, or value of a dict."""
    is_dict = isinstance(owner, dict)
    before = owner[name] if is_dict else getattr(owner, name)

    def put(new: Any) -> None:
        if is_dict:
            owner[name] = new
        else:
            setattr(owner, name, new)

    put(value)
    try:
        yield
    finally:
        put(before)


def other_order(training: Training) -> Any:
    group = training.optimizer.param_groups[0]
    return other_value(group, "params", group["params"][::-1])


def other_groups(training: Training) -> Any:
    one, two = training.optimizer.param_groups
    stack = contextlib.ExitStack()
    stack.enter_context(other_value(one, "params", [*one["params"], two["params"][0]]))
    stack.enter_context(other_value(two, "params", two["params"][1:]))
    return stack


def other_class(training: Training) -> Any:
    groups = [{**group, "fused": None} for group in training.optimizer.param_groups]
    return other_value(training, "optimizer", optim.Adam(groups, lr=0.01))


def other_option(name: str, value: Any) -> Callable[[Training], Any]:
    return lambda training: other_value(training.optimizer.param_groups[1], name, value)


@contextlib.contextmanager
def frozen(training: Training) -> Iterator[None]:
    param = next(training.model.original_model.parameters())
    param.requires_grad_(False)
    try:
        yield
    finally:
        param.requires_grad_(True)


@contextlib.contextmanager
def evaluating(training: Training) -> Iterator[None]:
    training.model.eval()
    try:
        yield
    finally:
        training.model.train()


def other_config(**fields: Any) -> Callable[[Training], Any]:
    return lambda training: other_value(training, "config", RoundPipeRunConfig(**fields))


DIFFERENCES: dict[str, Callable[[Training], Any]] = {
    "order": other_order,
    "groups": other_groups,
    "class": other_class,
    "lr": other_option("lr", 0.03),
    "lr in its last bit": other_option("lr", 0.02 + 2**-58),
    "lr as a tensor": other_option("lr", torch.tensor(0.25)),
    "weight_decay": other_option("weight_decay", 0.2),
    "betas": other_option("betas", (0.9, 0.98)),
    "requires_grad": frozen,
    "mode": evaluating,
    "loss_reduction": other_config(loss_reduction="mean"),
    "whole_batch_loss": other_config(whole_batch_loss=True),
    "scale": lambda training: other_value(training, "scaler", GradScaler(init_scale=8.0)),
    "max_norm": lambda training: other_value(training, "max_norm", 2.0),
}


def differ(rank: int, size: int, kind: str, loop: str, optimizer: str = "AdamW") -> dict[str, Any]:
    """Train; in the third iteration, one machine has another setting; then train on without it."""
    make = (
        getattr(torch.optim, optimizer.removeprefix("torch."), None) if "." in optimizer else getattr(optim, optimizer)
    )
    assert make is not None
    training = Training(rank, size, loop, make)
    error: tuple[str, str, int | None] | None = None
    with training.model:
        for _ in range(2):
            training.iteration()
        before = training.weights()
        with DIFFERENCES[kind](training) if rank == BAD_RANK else contextlib.nullcontext():
            try:
                training.iteration()
            except Exception as raised:
                error = (type(raised).__name__, str(raised), getattr(raised, "rank", None))
            failed = training.weights()
        training.model.zero_grad()
        training.optimizer.zero_grad()
        training.scaler = GradScaler(init_scale=4.0)
        for _ in range(2):
            training.iteration()
        return {"error": error, "before": before, "failed": failed, "after": training.weights()}


def list_of_a_set(rank: int, size: int) -> None:
    """Every machine makes the list of parameters in another order, as from a set of names."""
    training = Training(rank, size, "exact")
    with training.model:
        every = list(training.model.optim_parameters())
        optimizer = optim.AdamW(every[rank:] + every[:rank], lr=0.01)
        x = part(training.batch, rank, size)
        training.model.forward_backward((x,), label=x, loss_fn=training.loss_fn)
        training.model.step(optimizer.step, is_async=False)


def may_differ(rank: int, size: int) -> tuple[list[float], Tensor]:
    """Numbers of devices and microbatches, plans and grains may differ: nothing is compared that changes no number."""
    torch.manual_seed(11)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    config = RoundPipeRunConfig(
        num_microbatch=1 + rank, recompute_grain="layer" if rank else "stage", loss_reduction="sum" if rank else None
    )
    model = RoundPipe(layers, devices=["cpu"] * (1 + rank), model_run_config=config, process_group=dist.group.WORLD)
    with model:
        optimizer = optim.AdamW(model.optim_parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
        losses = []

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        for _ in range(3):
            x = part(torch.ones(12, WIDTH), rank, size)
            loss = model.forward_backward((x,), label=x, loss_fn=lambda a, b: (a - b).square().sum())
            model.step(step_fn, is_async=False)
            losses.append(float(loss))
        model.synchronize()
        return losses, torch.cat([param.detach().flatten() for param in layers.parameters()])


def two_models(rank: int, size: int) -> None:
    """One optimizer trains two models. One machine has their parameters in the other order."""
    torch.manual_seed(11)
    models = [RoundPipe(nn.Linear(4, 4), devices=["cpu"], process_group=dist.group.WORLD) for _ in range(2)]
    with models[0], models[1]:
        for model in models:
            model(torch.ones(2, 4)).sum().backward()
        chosen = models[::-1] if rank == BAD_RANK else models
        optim.AdamW([param for model in chosen for param in model.optim_parameters()], lr=0.01).step()


def count_descriptions(rank: int, size: int) -> int:
    """How often the parameters of the optimizer were described in five steps."""
    real, made = settings_module._Parameters, []

    def describe(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    settings_module._Parameters = describe  # type: ignore[misc, assignment]
    try:
        training = Training(rank, size, "exact")
        with training.model:
            for step in range(5):
                training.optimizer.param_groups[0]["lr"] = 0.01 * step
                training.iteration()
    finally:
        settings_module._Parameters = real  # type: ignore[misc]
    return len(made)


def warnings_of_hosts(rank: int, size: int, hosts: list[str] | None) -> list[str]:
    """What this machine's log says of hosts when a model is called. `hosts`: of the ranks; None: as they are."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger, real, level = logging.getLogger("roundpipe"), machines_module._host, logging.getLogger("roundpipe").level
    machines_module._has_said_shared.clear()
    if hosts is not None:
        machines_module._host = lambda: hosts[rank]
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        for _ in range(2):
            training = Training(rank, size, "exact")
            with training.model:
                training.iteration()
    finally:
        machines_module._host = real
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [record for record in records if "host" in record]


def wrap_other_models(rank: int, size: int) -> None:
    """One machine wraps a model with another layer."""
    width = 5 if rank == BAD_RANK else 4
    with RoundPipe(nn.Linear(4, width), devices=["cpu"], name="net", process_group=dist.group.WORLD) as model:
        model(torch.ones(2, 4))
