"""The same script gives the same losses and weights on 1, 3 and 7 devices, and those of plain PyTorch.

Ten SGD steps with default settings over a data set of ragged labels whose last batch is short. Plain PyTorch runs
whole batches, so sums are in another order and nothing else may differ. Losses and weights are of size 1, so they are
off by a few roundings: 1e-12 in float64 (epsilon 2e-16) and 5e-6 in float32 (epsilon 1e-7) leave room for these and
for nothing else. Another weighting of microbatches changes the very first loss by more than 1e-3, as a test shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import IGNORED, Batch, small, tokens
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

pytest.importorskip("transformers")

NUM_STEPS = 10
NUM_ROWS, BATCH_SIZE = 45, 10  # five batches, the last of five rows
RATE = 0.1
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}

Trajectory = tuple[Tensor, dict[str, Tensor]]  # losses, and weights at the end


def in_double(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    """The library's loss of causal models, which it computes in float32 whatever the model's dtype is."""
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits.view(-1, vocab_size), targets, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def causal() -> nn.Module:
    model = small("llama")
    model.loss_function = in_double
    return model


def data_set(seed: int) -> Batch:
    """Rows of one to eight labels."""
    labels = tokens(NUM_ROWS, 9, seed + 1)
    for row in range(NUM_ROWS):
        labels[row, : 1 + (5 * row) % 8] = IGNORED
    return {"input_ids": tokens(NUM_ROWS, 9, seed), "labels": labels}


def batches() -> Iterator[Batch]:
    """Ten, over two epochs."""
    rows = data_set(seed=5)
    for step in range(NUM_STEPS):
        start = step % 5 * BATCH_SIZE
        yield {name: tensor[start : start + BATCH_SIZE] for name, tensor in rows.items()}


def train_plain(model: nn.Module) -> Trajectory:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), dict(model.state_dict())


def stepping(model: RoundPipe) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=RATE)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_wrapped(module: nn.Module, num_devices: int) -> Trajectory:
    with wrap_model_to_roundpipe(module, devices=["cpu"] * num_devices) as model:
        assert isinstance(model, RoundPipe)
        step, losses = stepping(model), []
        for batch in batches():
            losses.append(model.forward_backward(input_kwargs=batch))
            model.step(step, is_async=False)
        model.synchronize()
        return torch.stack(losses), {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_course(found: Trajectory, expected: Trajectory, tolerance: float) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=0.0, rtol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, atol=tolerance, rtol=0.0)


SLOW = pytest.mark.slow
CASES = [
    pytest.param(causal, torch.float64, (1, 3, 7), id="causal_in_double"),
    pytest.param(lambda: small("t5"), torch.float64, (3,), id="encoder_decoder_in_double"),
    pytest.param(lambda: small("t5"), torch.float64, (1, 7), id="encoder_decoder_on_other_devices", marks=SLOW),
    pytest.param(lambda: small("llama"), torch.float32, (7,), id="causal_as_it_comes", marks=SLOW),
    pytest.param(lambda: small("llama"), torch.float32, (1, 3), id="causal_on_other_devices", marks=SLOW),
]


@pytest.mark.parametrize(("build", "dtype", "device_counts"), CASES)
def test_a_models_own_loss_on_any_number_of_devices(
    build: Callable[[], nn.Module], dtype: torch.dtype, device_counts: tuple[int, ...]
) -> None:
    plain = build().to(dtype)
    modules = [copy.deepcopy(plain) for _ in device_counts]
    expected = train_plain(plain)
    assert expected[0][-1] < expected[0][4] - 0.05, "nothing is learned"
    for module, num_devices in zip(modules, device_counts, strict=True):
        assert_same_course(train_wrapped(module, num_devices), expected, TOLERANCE[dtype])


def test_another_weighting_gives_other_losses() -> None:
    """Means of microbatches, equally weighed: the tolerances would not hide it."""
    plain = causal().double()
    module = copy.deepcopy(plain)
    expected = train_plain(plain)
    config = RoundPipeRunConfig(whole_batch_loss=False, num_microbatch=4)
    with wrap_model_to_roundpipe(module, devices=["cpu"] * 3, model_run_config=config) as model:
        first = model.forward_backward(input_kwargs=next(batches())) / 4
    assert (first / expected[0][0] - 1).abs() > 1e-3


# With an own loss function.


WIDTH = 6


def layers() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def points() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    labels = x[:, :3].argmax(1)
    for step in range(NUM_STEPS):
        rows = slice(step % 5 * BATCH_SIZE, (step % 5 + 1) * BATCH_SIZE)
        yield x[rows], labels[rows]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_own_loss_function_with_the_mean_on_any_number_of_devices(dtype: torch.dtype) -> None:
    loss_fn = nn.functional.cross_entropy
    plain = layers().to(dtype)
    modules = [copy.deepcopy(plain) for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    expected = []
    for x, labels in points():
        loss = loss_fn(plain(x.to(dtype)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    config = RoundPipeRunConfig(loss_reduction="mean")
    for module, num_devices in zip(modules, (1, 3, 7), strict=True):
        with RoundPipe(module, devices=["cpu"] * num_devices, model_run_config=config) as model:
            step, losses = stepping(model), []
            for x, labels in points():
                losses.append(model.forward_backward((x.to(dtype),), label=labels, loss_fn=loss_fn))
                model.step(step, is_async=False)
            model.synchronize()
            found = torch.stack(losses), {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert_same_course(found, (torch.stack(expected), dict(plain.state_dict())), TOLERANCE[dtype])
