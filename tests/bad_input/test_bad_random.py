"""Random numbers that a recomputation could not repeat are refused in the first call."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from bad_input_scene import notes_of, refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe import RoundPipe
from roundpipe.errors import UsageError

Draw = Callable[[], float]


class Drawing(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.draw()
        return y


class CheckpointedDrawing(Drawing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


@pytest.fixture
def open_models() -> Iterator[list[RoundPipe]]:
    models: list[RoundPipe] = []
    yield models
    for model in models:
        model.close()


def train(models: list[RoundPipe], layer: nn.Module) -> None:
    models.append(RoundPipe(nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2)), devices=["cpu"] * 2))
    models[-1].forward_backward((torch.randn(6, 4),), loss_fn=lambda o, y: o.sum())


# Bound methods of the shared generator, as a module has them that imported them before any model ran.
STORED: dict[str, tuple[Draw, str]] = {
    "random": (random._inst.random, "random"),  # type: ignore[attr-defined]
    "numpy": (np.random.mtrand._rand.random_sample, "numpy.random"),
}


@pytest.mark.parametrize("kind", STORED)
def test_a_stored_function_of_the_shared_generator_is_refused(open_models: list[RoundPipe], kind: str) -> None:
    draw, module = STORED[kind]
    with refused(UsageError, f"shared generator of {module}", f"{module}.<function>()", "torch.rand()") as caught:
        train(open_models, Drawing(draw))
    assert "layer 1, microbatch 0, forward" in notes_of(caught.value)


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: float(np.random.rand())])
def test_drawing_inside_a_checkpoint_is_refused(open_models: list[RoundPipe], draw: Draw) -> None:
    with refused(UsageError, "torch.utils.checkpoint", "switch the layer's own checkpointing off"):
        train(open_models, CheckpointedDrawing(draw))


# One process imports everything; each method runs in a child forked before any model exists.
SCRIPT = """
import os
import random
import sys
from random import random as imported

import torch
from torch import nn
from roundpipe import RoundPipe

def train(method):
    class Layer(nn.Module):
        exec(method)

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

    model = RoundPipe(nn.Sequential(Layer(), Layer(), nn.Linear(4, 2)), devices=["cpu"] * 2)
    try:
        model.forward_backward((torch.randn(6, 4),), loss_fn=lambda o, y: o.sum())
        print("trained", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
    model.close()

for method in sys.argv[1:]:
    if not (pid := os.fork()):
        train(method)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, method
"""
METHODS = {
    "def forward(self, x): return self.linear(x) * imported()": "trained",
    "def forward(self, x, draw=random.random): return self.linear(x) * draw()": "UsageError",
    "def forward(self, x): import numpy; return self.linear(x) * numpy.random.rand()": "trained",
}


def test_in_a_fresh_process_what_cannot_be_repeated_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *METHODS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert dict(zip(METHODS, done.stdout.split(), strict=True)) == METHODS, done.stderr
