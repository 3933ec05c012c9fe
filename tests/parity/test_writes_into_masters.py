"""Writes into masters outside of step_fn: updates by hand, and changes after `optimizer.step()`.

The next call must compute with what was written, as in plain PyTorch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same, batch, microbatches, mlp, seeded
from roundpipe import RoundPipe, checkpoint, optim, wrap_model_to_roundpipe
from roundpipe.errors import StaleGraphError

WIDTH = 5
STEPS = 4
RATE = 0.1
Params = list[Tensor]
MakeOptimizer = Callable[[Params], torch.optim.Optimizer]

PRECISIONS = pytest.mark.parametrize(
    ("dtype", "optim_dtype"), [(torch.float32, None), (torch.bfloat16, torch.float32)], ids=["float32", "bf16"]
)


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Models to close after the test."""
    models: list[Any] = []
    yield models
    for model in models:
        model.close()


def wrapped(
    opened: list[Any], dtype: torch.dtype = torch.float32, optim_dtype: torch.dtype | None = None, number: int = 1
) -> RoundPipe:
    network = seeded(lambda: mlp(4, WIDTH)).to(dtype)
    model = RoundPipe(network, optim_dtype, devices=["cpu"] * 3, model_run_config=microbatches(number))
    opened.append(model)
    return model


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    points, labels = batch(6, WIDTH, seed=step).to(dtype), batch(6, WIDTH, seed=100 + step)
    return nn.functional.mse_loss(model(points).float(), labels)


# Writes, each as users write them.


def subtract_gradients(params: Params) -> None:
    with torch.no_grad():
        for param in params:
            param -= RATE * param.grad  # type: ignore[operator]


def subtract_from_data(params: Params) -> None:
    for param in params:
        assert param.grad is not None
        param.data.add_(param.grad, alpha=-RATE)


def replace_data(params: Params) -> None:
    for param in params:
        assert param.grad is not None
        param.data = param.data - RATE * param.grad


def subtract_all_at_once(params: Params) -> None:
    with torch.no_grad():
        torch._foreach_add_(params, [param.grad for param in params], alpha=-RATE)


def fill_from_vector(params: Params) -> None:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(params) * 0.9
        nn.utils.vector_to_parameters(vector, params)


def write_through_numpy(params: Params) -> None:
    for param in params:
        param.detach().numpy()[...] *= 0.9


UPDATES = (subtract_gradients, subtract_from_data, replace_data, subtract_all_at_once)
WRITES = (*UPDATES, fill_from_vector, write_through_numpy)


@PRECISIONS
@pytest.mark.parametrize("write", WRITES)
def test_updates_by_hand_train(
    opened: list[Any], write: Callable[[Params], None], dtype: torch.dtype, optim_dtype: torch.dtype | None
) -> None:
    """The reference does the same in step_fn, in synchronous steps."""
    model, reference = (wrapped(opened, dtype, optim_dtype, number=2) for _ in range(2))
    params = list(model.optim_parameters())
    losses: list[list[Tensor]] = [[], []]

    def step_fn() -> None:
        own = list(reference.optim_parameters())
        write(own)
        for param in own:
            param.grad = None

    for step in range(STEPS):
        for each, seen in zip((model, reference), losses, strict=True):
            loss = loss_of(each, step, dtype)
            loss.backward()
            seen.append(loss.detach())
        write(params)
        for param in params:
            param.grad = None
        reference.step(step_fn, is_async=False)
    assert_same(losses[0], losses[1])
    assert len({float(loss) for loss in losses[0]}) == STEPS
    model.synchronize()
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("write", WRITES)
def test_updates_by_hand_equal_plain_pytorch(opened: list[Any], write: Callable[[Params], None]) -> None:
    model = wrapped(opened)
    plain = copy.deepcopy(model.original_model)
    for step in range(STEPS):
        losses = []
        for each, params in ((model, list(model.optim_parameters())), (plain, list(plain.parameters()))):
            loss = loss_of(each, step)
            loss.backward()
            write(params)
            for param in params:
                param.grad = None
            losses.append(loss.detach())
        assert_same(losses[0], losses[1])
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, optim.AdamW])
@pytest.mark.parametrize("keeps_alias", [False, True])
def test_changes_after_the_optimizer_count_in_the_next_call(
    opened: list[Any], make_optimizer: Any, keeps_alias: bool
) -> None:
    """keeps_alias: the write goes through tensors that share the masters' memory, taken before the loop."""
    model = wrapped(opened)
    plain = copy.deepcopy(model.original_model)
    jobs = []
    for each, params in ((model, list(model.optim_parameters())), (plain, list(plain.parameters()))):
        plain_class = torch.optim.AdamW if make_optimizer is optim.AdamW else make_optimizer
        optimizer = (make_optimizer if each is model else plain_class)(params, lr=0.05)
        jobs.append((each, params, optimizer, [param.data for param in params] if keeps_alias else []))
    for step in range(STEPS):
        losses = []
        for each, params, optimizer, aliases in jobs:
            loss = loss_of(each, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for tensor in aliases or params:
                    tensor.clamp_(-0.25, 0.25)
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    model.synchronize()
    assert all(float(value.abs().max()) <= 0.25 for value in model.state_dict().values())
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-7)


def test_other_calls_see_what_was_written(opened: list[Any], tmp_path: Any) -> None:
    model = wrapped(opened)

    def fill(value: float) -> None:
        with torch.no_grad():
            for param in model.optim_parameters():
                param.fill_(value)

    def are(value: float, state: dict[str, Tensor]) -> bool:
        return all(bool((tensor == value).all()) for tensor in state.values())

    fill(0.25)
    assert are(0.25, model.state_dict())
    fill(0.5)
    model.synchronize()
    assert are(0.5, dict(model.original_model.named_parameters()))
    fill(0.75)
    checkpoint.save(tmp_path / "saved", model).wait()
    other = wrapped(opened)
    checkpoint.load(tmp_path / "saved", other)
    assert are(0.75, other.state_dict())


def test_writes_wait_for_an_asynchronous_step_and_become_visible_with_it(opened: list[Any]) -> None:
    """Calls after an asynchronous step compute with the weights before it, so also with those before the write."""
    model = wrapped(opened)
    params = list(model.optim_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    release = threading.Event()

    def step_fn() -> None:
        release.wait(20)
        with torch.no_grad():
            for param in params:
                param.fill_(3.0)
                param.grad = None

    loss_of(model, 0).backward()
    model.step(step_fn)
    threading.Timer(0.3, release.set).start()
    with torch.no_grad():
        params[0].fill_(5.0)  # waits: the step would overwrite it
    assert all(bool((param == 3.0).all()) for param in params[1:])
    assert bool((params[0] == 5.0).all())
    loss = loss_of(model, 1)
    plain = copy.deepcopy(model.original_model)
    plain.load_state_dict(before)
    assert_same(loss.detach(), loss_of(plain, 1).detach())
    model.synchronize()
    values = {float(value.unique()) for value in model.state_dict().values()}
    assert values == {3.0, 5.0}


def test_reading_masters_between_forward_and_backward_changes_nothing(opened: list[Any]) -> None:
    model, reference = wrapped(opened), wrapped(opened)
    loss = loss_of(model, 0)
    norm = sum(float(param.detach().norm()) for param in model.optim_parameters())
    assert norm > 0
    loss.backward()
    loss_of(reference, 0).backward()
    for param, other in zip(model.optim_parameters(), reference.optim_parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        assert_same(param.grad, other.grad)


def test_backward_after_a_write_is_refused(opened: list[Any]) -> None:
    model = wrapped(opened)
    loss = loss_of(model, 0)
    with torch.no_grad():
        next(iter(model.optim_parameters())).mul_(2.0)
    with pytest.raises(StaleGraphError, match="between this forward and its backward"):
        loss.backward()


def test_a_failed_step_is_not_published_by_looking_at_its_masters(opened: list[Any]) -> None:
    model = wrapped(opened)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step_fn() -> None:
        with torch.no_grad():
            for param in model.optim_parameters():
                param.add_(1.0)
        raise RuntimeError("stop")

    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="stop"):
        model.step(step_fn, is_async=False)
    assert all(float(param.detach().norm()) >= 0 for param in model.optim_parameters())
    assert_same(dict(model.state_dict()), before)


def test_masters_of_a_model_wrapped_part_by_part(opened: list[Any]) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.first, self.second = mlp(2, WIDTH), mlp(2, WIDTH)

        def forward(self, points: Tensor) -> Tensor:
            return self.second(self.first(points * self.scale))

    network = seeded(Parts)
    plain = copy.deepcopy(network)
    model = wrap_model_to_roundpipe(network, devices=["cpu"] * 2, model_run_config=microbatches(1), lower_threshold=64)
    opened.append(model)
    for step in range(STEPS):
        losses = []
        for each, params in ((model, list(model.optim_parameters())), (plain, list(plain.parameters()))):
            loss = loss_of(each, step)
            loss.backward()
            subtract_gradients(params)
            for param in params:
                param.grad = None
            losses.append(loss.detach())
        assert_same(losses[0], losses[1])


# Writes into parameters through `.data`, which changes no version counter.


def by_plain_loop(model: RoundPipe, optimizer: torch.optim.Optimizer, step: int, dtype: torch.dtype) -> None:
    loss_of(model, step, dtype).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_steps(is_async: bool) -> Callable[[RoundPipe, torch.optim.Optimizer, int, torch.dtype], None]:
    def train(model: RoundPipe, optimizer: torch.optim.Optimizer, step: int, dtype: torch.dtype) -> None:
        loss_of(model, step, dtype).backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)

    return train


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=RATE), lambda p: optim.AdamW(p, lr=RATE)])
@pytest.mark.parametrize("train", [by_plain_loop, by_steps(False), by_steps(True)], ids=["plain", "exact", "stale"])
@PRECISIONS
def test_weights_put_in_through_data_before_the_first_step_are_trained(
    opened: list[Any], dtype: torch.dtype, optim_dtype: torch.dtype | None, train: Callable[..., None], make: Any
) -> None:
    """As by code that loads a checkpoint with `param.data.copy_()` when the optimizer is there already."""
    wanted = seeded(lambda: mlp(4, WIDTH), seed=11).to(dtype)
    results = []
    for writes in (False, True):
        model = wrapped(opened, dtype, optim_dtype)
        if not writes:
            model.load_state_dict(wanted.state_dict())
        optimizer = make(list(model.optim_parameters()))
        if writes:
            with torch.no_grad():
                loss_of(model, 9, dtype)  # the old weights were used
            for param, value in zip(model.model.parameters(), wanted.parameters(), strict=True):
                param.data.copy_(value.data)
        for step in range(2):
            train(model, optimizer, step, dtype)
        model.synchronize()
        results.append([param.detach().clone() for param in model.optim_parameters()])
    assert_same(*results)
