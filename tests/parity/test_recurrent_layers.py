"""Recurrent layers hold their weights in lists beside the parameters: on devices these must be the uploaded weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import (
    Models,
    StalenessReference,
    assert_same,
    assert_same_state,
    batch,
    call_reference,
    check_forward,
    check_fused,
    microbatches,
    seeded,
    total,
)
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.microbatch import Chunk

WIDTH = 6
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
    "RNN": nn.RNN,
    "two layers": lambda *args, **options: nn.GRU(*args, num_layers=2, **options),
    "without bias": lambda *args, **options: nn.LSTM(*args, bias=False, **options),
    "both ways": lambda *args, **options: nn.GRU(*args, bidirectional=True, **options),
}


class First(nn.Module):
    """The sequence of what a recurrent layer returns, as wide as its input."""

    def forward(self, output: tuple[Tensor, Any]) -> Tensor:
        return output[0][..., :WIDTH]


def chain(kind: str) -> nn.Sequential:
    layer = LAYERS[kind]
    return nn.Sequential(
        layer(WIDTH, WIDTH, batch_first=True),
        First(),
        nn.Linear(WIDTH, WIDTH),
        layer(WIDTH, WIDTH, batch_first=True),
        First(),
    )


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "RNN module weights are not part of single contiguous chunk of memory"
        yield


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_a_chain_train_as_plain_ones(models: Models, kind: str) -> None:
    check_fused(models, seeded(lambda: chain(kind)), 3, (batch(6, 5, WIDTH),), loss_fn=total)
    check_forward(models, seeded(lambda: chain(kind)), 2, (batch(6, 5, WIDTH),))


def test_recomputed_layers_have_the_same_gradients(models: Models) -> None:
    module = seeded(lambda: chain("LSTM"))
    model, plain = models.wrap_copy(module, 2), copy.deepcopy(module)
    stages = [range(i, i + 1) for i in range(4)]
    plan = ModelExecutePlan(stages, [range(4, 5), *reversed(stages)])
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    loss = model.forward_backward((batch(6, 5, WIDTH),), loss_fn=total, run_config=config)
    assert_same(loss, call_reference(plain, (batch(6, 5, WIDTH),), loss_fn=total, num_microbatch=3).loss)
    model.synchronize()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
def test_new_weights_reach_the_devices(models: Models, is_async: bool) -> None:
    module = seeded(lambda: chain("GRU"))
    model = models.wrap_copy(module, 2)
    reference = StalenessReference(module, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.05, momentum=0.9)
    for seed in range(5):
        x = batch(6, 5, WIDTH, seed=seed)
        loss = model.forward_backward((x,), loss_fn=total, run_config=microbatches(3))
        assert_same(loss, call_reference(module, (x,), loss_fn=total, num_microbatch=3).loss, f"loss {seed}")
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        reference.step(is_async)
    model.synchronize()
    reference.synchronize()
    assert_same_state(model, reference.module)


def test_a_whole_layer_with_its_states(models: Models) -> None:
    """Where its batch is not the first dimension, it is told how to cut."""
    layer = seeded(lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2))
    x, state = batch(5, 6, WIDTH), (batch(2, 6, WIDTH), batch(2, 6, WIDTH, seed=2))
    config = RoundPipeRunConfig(
        num_microbatch=3,
        split_input=((Chunk(1), (Chunk(1), Chunk(1))), None),
        merge_output=(Chunk(1), (Chunk(1), Chunk(1))),
    )
    model = models.wrap_copy(layer, 2)
    with torch.no_grad():
        torch.testing.assert_close(model(x, state, roundpipe_run_config=config), layer(x, state))
