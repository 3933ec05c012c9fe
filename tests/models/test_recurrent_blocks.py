"""Recurrent layers in a list are blocks: with examples of its inputs such a model is split, and trains exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_split import WIDTH, SplitModels, check_split, layer_kinds, rows

LAYERS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}


class Recurrent(nn.Module):
    """Adds each layer's input to its output; passes its state to the next layer, or drops it."""

    def __init__(self, layer: Callable[..., nn.Module], batch_first: bool, hands_on: bool) -> None:
        super().__init__()
        self.batch_first, self.hands_on = batch_first, hands_on
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer(WIDTH, WIDTH, batch_first=batch_first) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        state: Any = None
        for layer in self.layers:
            y, new_state = layer(x, state)
            state = new_state if self.hands_on else None
            x = x + y
        x = x if self.batch_first else x.transpose(0, 1)
        last = new_state[0] if isinstance(new_state, tuple) else new_state
        return self.head(x) + last[-1].unsqueeze(1)


def sequences() -> Tensor:
    return torch.stack([rows(4, seed=seed) for seed in range(6)])


# Every kind of layer, every order and both uses of states at least once; all combinations are slow.
FAST = {("GRU", True, False), ("GRU", False, True), ("LSTM", True, True), ("RNN", False, False)}
COMBINATIONS = [
    pytest.param(*each, marks=() if each in FAST else pytest.mark.slow)
    for each in itertools.product(LAYERS, (True, False), (False, True))
]


@pytest.mark.parametrize(("kind", "batch_first", "hands_on"), COMBINATIONS)
def test_a_list_of_recurrent_layers_is_split_and_trains_exactly(
    models: SplitModels, kind: str, batch_first: bool, hands_on: bool, num_devices: int
) -> None:
    torch.manual_seed(3)
    module = Recurrent(LAYERS[kind], batch_first, hands_on)
    model = check_split(models, module, {"x": sequences()}, num_devices)
    assert layer_kinds(model).count("Block") == 3
