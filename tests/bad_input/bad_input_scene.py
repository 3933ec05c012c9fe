"""A model in training, and the check that a refused input has not changed it.

The check compares with a second model that was built and trained in the same way and never saw the input: present
state, and the results of the next call and the next steps, must be equal bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import RoundPipeError

NUM_LAYERS = 5
NUM_MICROBATCH = 3
BATCH = 6
Snapshot = dict[str, torch.Tensor]


def build() -> nn.Sequential:
    """Layers with buffers that are written, random numbers, and weights that depend on each other."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


class Scene:
    """A RoundPipe on two virtual devices after one optimizer step, and a batch `x`, `y`."""

    def __init__(self) -> None:
        self.model = RoundPipe(
            build(),
            devices=["cpu"] * 2,
            name="scene",
            model_run_config=RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH),
        )
        self.optimizer = torch.optim.SGD(self.model.optim_parameters(), lr=0.1, momentum=0.9)
        self.x, self.y = torch.randn(BATCH, 4), torch.randn(BATCH, 2)
        self.train_once(seed=11)

    def step_fn(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train_once(self, seed: int) -> torch.Tensor:
        loss = self.forward_backward(seed)
        self.model.step(self.step_fn, is_async=False)
        return loss

    def forward_backward(self, seed: int = 0, **options: Any) -> Any:
        torch.manual_seed(seed)
        call: dict[str, Any] = {"input_args": (self.x,), "label": self.y, "loss_fn": loss_fn}
        return self.model.forward_backward(**(call | options))

    def with_config(self, **fields: Any) -> Any:
        return self.forward_backward(run_config=RoundPipeRunConfig(**fields))

    def present(self) -> Snapshot:
        """Copies of weights, buffers, the optimizer's copies and the optimizer's state."""
        now = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        now |= {f"master.{key}": value.detach() for key, value in self.model.optim_named_parameters()}
        moments = self.optimizer.state_dict()["state"]
        now |= {f"momentum.{key}": value["momentum_buffer"] for key, value in moments.items()}
        return copy.deepcopy(now)

    def future(self) -> Snapshot:
        """The results of a call, of its gradients, of an asynchronous step and of the call after it."""
        then: Snapshot = {"loss": self.forward_backward(seed=21)}
        self.model.synchronize()
        for name, param in self.model.named_parameters():
            assert param.grad is not None, name
            then[f"grad.{name}"] = param.grad.clone()
        self.model.step(self.step_fn, is_async=True)
        torch.manual_seed(22)
        with torch.no_grad():
            then["output"] = self.model(self.x)
        self.model.synchronize()
        return then | {f"end.{key}": value for key, value in self.present().items()}

    def close(self) -> None:
        self.model.close()


@functools.cache
def undisturbed() -> tuple[Snapshot, Snapshot]:
    scene = Scene()
    try:
        return scene.present(), scene.future()
    finally:
        scene.close()


def assert_same(found: Snapshot, expected: Snapshot) -> None:
    assert found.keys() == expected.keys()
    different = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert not different, f"disturbed: {different}"


@contextlib.contextmanager
def refused(kind: type[BaseException], *fragments: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Assert that the block raises exactly our `kind` with a message that contains every fragment."""
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind, repr(caught.value)
    if issubclass(kind, RoundPipeError):
        assert kind.__module__ == "roundpipe.errors"
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"the message lacks {missing}: {message}"


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail
