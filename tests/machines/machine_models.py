"""Further trainings on several machines: memory and bytes, models of transformers, LoRA, parts, several models."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from machine_training import part
from torch import Tensor, nn
from torch import distributed as dist

import helpers_tiny_hf  # sets the environment of transformers
from roundpipe import (
    AutoRoundPipe,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    UsageError,
    clip_grad_norm_,
    optim,
    wrap_model_to_roundpipe,
)

# Memory and bytes.


def bytes_of_tensors() -> int:
    """Memory of all tensors that are alive in this process, those of virtual devices included."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train_wide(num_layers: int, width: int, num_steps: int) -> tuple[RoundPipe, optim.AdamW, list[int]]:
    """Train a chain of linear layers with one layer per stage; returns the bytes sent after each step, too."""
    layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(num_layers)]
    stages = [range(i, i + 1) for i in range(num_layers)]
    plan = ModelExecutePlan(fwd_plan=stages[:-1], bwd_plan=stages[::-1])
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    model = RoundPipe(
        nn.Sequential(*layers),
        optim_dtype=torch.float32,
        name="wide",
        model_run_config=config,
        devices=["cpu"],
        process_group=dist.group.WORLD,
    )
    del layers
    optimizer = optim.AdamW(model.optim_parameters(), lr=1e-3)

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    sent = []
    for _ in range(num_steps):
        x = torch.randn(2, width, dtype=torch.bfloat16)
        model.forward_backward((x,), label=x, loss_fn=lambda out, label: (out - label).float().square().sum())
        model.step(step_fn, is_async=False)
        machines = model._engine.group.machines
        sent.append(0 if machines is None else machines.sent_bytes)
    return model, optimizer, sent


def memory_and_bytes(rank: int, size: int) -> dict[str, float]:
    """Bytes of memory per parameter that training takes, and bytes sent per parameter and step."""
    before = bytes_of_tensors()
    num_layers, width = 40, 384
    model, _optimizer, sent = train_wide(num_layers, width, 3)
    model.synchronize()
    num_parameters = num_layers * width * width
    taken = bytes_of_tensors() - before
    model.close()
    return {"memory": taken / num_parameters, "sent": (sent[2] - sent[1]) / num_parameters}


# Models of transformers.


def train_transformer(rank: int, size: int, has_group: bool, lora: bool, loop: str, dtype: torch.dtype) -> Any:
    """Train a tiny model on rows with different numbers of labels; returns losses and trained weights."""
    network = helpers_tiny_hf.tiny_model("llama").to(dtype)
    if lora:
        import peft

        config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        torch.manual_seed(4)
        network = peft.get_peft_model(network, config)
    torch.manual_seed(9)
    wrapped = wrap_model_to_roundpipe(
        network,
        name="llama",
        devices=["cpu"] * 2,
        model_run_config=RoundPipeRunConfig(num_microbatch=6 // size),
        process_group=dist.group.WORLD if has_group else None,
    )
    losses = []
    with wrapped as model:
        optimizer = optim.AdamW(model.optim_parameters(), lr=0.01)

        def step_fn() -> None:
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(2, 64, (12, 9), generator=generator)
            labels = ids.clone()
            for row in range(12):
                labels[row, : row % 7] = -100
            ids, labels = part(ids, rank, size), part(labels, rank, size)
            if loop == "plain":
                loss = model(input_ids=ids, labels=labels).loss
                loss.backward()
                clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                loss = model.forward_backward(input_kwargs={"input_ids": ids, "labels": labels})
                model.step(step_fn, is_async=loop == "stale")
            losses.append(loss.item())
        model.synchronize()
        with torch.no_grad():
            evaluated = model(input_ids=ids, labels=labels).loss.item()
        weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return {"losses": [*losses, evaluated], "weights": weights}


# Parts, and several models.


class Parts(nn.Module):
    """A model whose own code runs between two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() * self.scale)


def train_parts(rank: int, size: int, has_group: bool, is_async: bool) -> Any:
    """Train an AutoRoundPipe."""
    torch.manual_seed(2)
    group = dist.group.WORLD if has_group else None
    network = Parts().double()
    config = RoundPipeRunConfig(num_microbatch=6 // size)
    options: dict[str, Any] = {"devices": ["cpu"], "process_group": group, "model_run_config": config}
    network.first = RoundPipe(network.first, name="first", **options)
    network.second = RoundPipe(network.second, name="second", **options)
    with AutoRoundPipe(network, name="auto", devices=["cpu"], process_group=group) as model:
        optimizer = optim.AdamW(model.optim_parameters(), lr=0.01)

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for step in range(3):
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            x = part(x, rank, size)
            (model(x) - x).square().sum().backward()
            model.step(step_fn, is_async)
        model.synchronize()
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_two_models(rank: int, size: int, has_group: bool) -> Any:
    """Train two models in turn, with asynchronous steps that run at the same time; one optimizer clips both."""
    group = dist.group.WORLD if has_group else None
    torch.manual_seed(2)
    options: dict[str, Any] = {
        "devices": ["cpu"],
        "process_group": group,
        "model_run_config": RoundPipeRunConfig(num_microbatch=6 // size),
    }
    models = [RoundPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), name=f"m{i}", **options) for i in range(2)]
    optimizers = [optim.AdamW(model.optim_parameters(), lr=0.01) for model in models]
    both = [param for model in models for param in model.optim_parameters()]

    def loss_fn(out: Tensor, label: Tensor) -> Tensor:
        return (out - label).square().sum()

    for step in range(4):
        x = part(torch.randn(12, 8, generator=torch.Generator().manual_seed(step)), rank, size)
        for model, optimizer in zip(models, optimizers, strict=True):
            model.forward_backward((x,), label=x, loss_fn=loss_fn)
            if step < 3:
                model.step(lambda o=optimizer: (o.step(), o.zero_grad()))  # type: ignore[misc]
    joint = optim.AdamW(both, lr=0.01)
    norm = clip_grad_norm_(both, 0.1)
    joint.step()
    joint.zero_grad()
    for model in models:
        model.synchronize()
    weights = [param.detach().clone() for model in models for param in model.model.parameters()]
    for model in models:
        model.close()
    return {"norm": float(norm), "weights": weights}


# The start, and values that no machine has completely.


def start_with_other_weights(rank: int, size: int, differ: bool) -> Any:
    """Wrap a model whose weights differ between the machines."""
    torch.manual_seed(rank if differ else 0)
    network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    network[1].running_mean.fill_(rank if differ else 0)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("roundpipe")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        with RoundPipe(network, name="net", devices=["cpu"], process_group=dist.group.WORLD) as model:
            optimizer = optim.AdamW(model.optim_parameters(), lr=0.0, weight_decay=0.0)
            x = torch.randn(4, 8)
            model.forward_backward((x,), label=x, loss_fn=lambda out, _: out.sum())
            model.step(lambda: optimizer.step(), is_async=False)
            return {name: value.clone() for name, value in model.state_dict().items()}, records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def read_what_is_divided(rank: int, size: int) -> list[str]:
    """Read and save values that are divided between the machines; returns the errors."""
    torch.manual_seed(0)
    errors = []
    with RoundPipe(nn.Linear(8, 8), name="net", devices=["cpu"], process_group=dist.group.WORLD) as model:
        copy = next(model.optim_parameters())
        before = copy.sum().item()  # nothing is divided yet
        assert before == next(model.model.parameters()).sum().item()
        kept = copy.data
        optimizer = optim.AdamW(model.optim_parameters(), lr=0.1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)

        def train() -> None:
            model.forward_backward((torch.ones(4, 8),), loss_fn=lambda out, _: out.sum())
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

        def attempt(action: Any) -> None:
            try:
                action()
            except UsageError as error:
                errors.append(str(error))

        attempt(train)  # `kept` shares the memory
        del kept
        train()
        attempt(lambda: copy + 1)
        attempt(lambda: copy.data)
        model.forward_backward((torch.ones(4, 8),), loss_fn=lambda out, _: out.sum())
        attempt(plain.step)
        model.zero_grad()
        assert copy.shape == (8, 8)
        state = optimizer.state[copy]["exp_avg"]
        assert state.shape == (copy.share.count_of(64),)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        train()
    return errors


def say_alone(rank: int, size: int) -> list[str]:
    """Wrap two models without a process group; returns what the log says."""
    from roundpipe.distributed import machines

    machines._has_said_alone.clear()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("roundpipe")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for _ in range(2):
            RoundPipe(nn.Linear(2, 2), name="net", devices=["cpu"]).close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.ERROR)
    return [record for record in records if "trains alone" in record]
