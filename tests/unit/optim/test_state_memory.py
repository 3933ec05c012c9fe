"""An optimizer checks that its state fits into the available memory before it allocates any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import HostMemoryError, RoundPipe, optim
from roundpipe.optim import states as reserve
from roundpipe.store import host_memory

WIDTH = 64
NUM_PARAMETERS = 3 * WIDTH * WIDTH
COPIES, MOMENTS = 2, 8  # bytes per parameter: the low half of a float32 copy, and two float32 moments


@pytest.fixture
def model() -> Iterator[RoundPipe]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    made = RoundPipe(nn.Sequential(*layers).to(torch.bfloat16), optim_dtype=torch.float32, devices=["cpu"] * 3)
    yield made
    made.close()


def train(model: RoundPipe) -> None:
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    model.forward_backward(input_args=(x,), loss_fn=lambda out, _: out.float().pow(2).mean())


def let_be_available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: num_bytes)
    monkeypatch.setattr(reserve, "available_host_bytes", lambda: num_bytes)


def values(model: RoundPipe) -> list[Tensor]:
    return [p.detach().clone() for p in model.model.parameters()]


def refused(model: RoundPipe, optimizer: Any, *fragments: str) -> None:
    before = values(model)
    with pytest.raises(HostMemoryError) as caught:
        model.step(lambda: optimizer.step(), is_async=False)
    for fragment in (*fragments, "needed in all", "available", "missing"):
        assert fragment in str(caught.value)
    assert not any(optimizer.state.values())
    assert all(torch.equal(one, two) for one, two in zip(values(model), before, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "num_states"),
    [
        (optim.Adam, {}, 2),
        (optim.AdamW, {}, 2),
        (optim.Adam, {"amsgrad": True}, 3),
        (optim.Lion, {}, 1),
        (optim.SGD, {"momentum": 0.9}, 1),
        (optim.SGD, {}, 0),
    ],
)
def test_our_optimizers_make_no_state_unless_all_fits(
    model: RoundPipe, kind: Any, options: dict[str, Any], num_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = kind(model.optim_parameters(), lr=1e-2, **options)
    needed = (COPIES + 4 * num_states) * NUM_PARAMETERS
    let_be_available(monkeypatch, needed - 1)
    train(model)
    refused(model, optimizer, *(["optimizer state"] if num_states else []), "master weights", kind.__name__)
    train(model)
    refused(model, optimizer)
    before = values(model)
    let_be_available(monkeypatch, needed)
    train(model)
    model.step(lambda: optimizer.step(), is_async=False)
    counts = [sum(bool(value.dim()) for value in state.values()) for state in optimizer.state.values()]
    assert counts == [num_states] * (3 if num_states else 0)
    assert not any(torch.equal(one, two) for one, two in zip(values(model), before, strict=True))


def test_state_that_exists_is_not_counted_again(model: RoundPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = optim.Adam(model.optim_parameters(), lr=1e-2)
    train(model)
    model.step(lambda: optimizer.step(), is_async=False)
    let_be_available(monkeypatch, 0)
    train(model)
    model.step(lambda: optimizer.step(), is_async=False)


def test_parameters_that_are_added_are_counted_when_they_come(
    model: RoundPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = model.optim_parameters()
    optimizer = optim.Adam([first], lr=1e-2)
    train(model)
    model.step(lambda: optimizer.step(), is_async=False)
    optimizer.add_param_group({"params": others})
    let_be_available(monkeypatch, 2 * WIDTH * WIDTH * (COPIES + MOMENTS) - 1)
    train(model)
    with pytest.raises(HostMemoryError, match="optimizer state"):
        model.step(lambda: optimizer.step(), is_async=False)
    assert set(optimizer.state) == {first}


def test_what_was_made_ready_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are in use already, so that less memory is available."""
    width = 1024
    net = nn.Sequential(nn.Linear(width, width, bias=False)).to(torch.bfloat16)
    monkeypatch.setattr(reserve, "usable_cores", lambda: 16)
    with RoundPipe(net, optim_dtype=torch.float32, devices=["cpu"]) as model:
        optimizer = optim.Adam(model.optim_parameters(), lr=1e-2)
        x = torch.ones(4, width, dtype=torch.bfloat16)
        model.forward_backward(input_args=(x,), loss_fn=lambda out, _: out.float().pow(2).mean())
        let_be_available(monkeypatch, 0)
        model.step(lambda: optimizer.step(), is_async=False)


@pytest.mark.parametrize(
    ("make", "per_parameter"),
    [
        (lambda p: torch.optim.Adam(p), 8 + 4 + 4),  # moments, full copies, float32 gradients
        (lambda p: torch.optim.AdamW(p), 8 + 4 + 4),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4 + 4 + 4),
        (lambda p: torch.optim.SGD(p, lr=0.1), 4 + 4),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 12 + 4 + 4),
    ],
    ids=["Adam", "AdamW", "momentum", "SGD", "RMSprop"],
)
def test_optimizers_of_torch_are_checked_before_their_first_step(
    model: RoundPipe, make: Any, per_parameter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make(model.optim_parameters())
    let_be_available(monkeypatch, per_parameter * NUM_PARAMETERS - 1)
    train(model)
    refused(model, optimizer, "master weights", "gradients in the masters' precision", type(optimizer).__name__)
    let_be_available(monkeypatch, per_parameter * NUM_PARAMETERS)
    train(model)
    before = values(model)
    model.step(lambda: optimizer.step(), is_async=False)
    assert not any(torch.equal(one, two) for one, two in zip(values(model), before, strict=True))


def test_our_adam_checks_on_ordinary_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(100))
    param.grad = torch.ones(100)
    optimizer = optim.Adam([param])
    let_be_available(monkeypatch, 799)
    with pytest.raises(HostMemoryError, match="optimizer state"):
        optimizer.step()
    assert torch.equal(param, torch.ones(100))
    assert not optimizer.state
    let_be_available(monkeypatch, 800)
    optimizer.step()
    assert len(optimizer.state[param]) == 3
