"""Moments are allocated when a model begins to train: same numbers, and no memory for models that do not train."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, optim
from roundpipe.optim import one_pass
from roundpipe.optim import states as reserve
from roundpipe.optim.states import Reserve
from roundpipe.store import OptimizerCopy
from roundpipe.store.forms import PLAIN
from roundpipe.store.host_memory import HUGE_PAGE_BYTES, make_pages_ready

WIDTH = 1024  # a float32 copy of a WIDTH x WIDTH weight has two huge pages


@pytest.fixture
def model() -> Iterator[RoundPipe]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16)
    made = RoundPipe(net, optim_dtype=torch.float32)
    yield made
    made.close()


@pytest.fixture
def made_ready(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    seen: list[Tensor] = []
    monkeypatch.setattr(reserve, "make_pages_ready", seen.append)
    monkeypatch.setattr(reserve, "usable_cores", lambda: 16)
    return seen


def call(model: RoundPipe) -> None:
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    model.forward_backward(input_args=(x,), label=None, loss_fn=lambda output, label: output.float().pow(2).mean())


def step(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad(), None)[-1], is_async=False)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_first_step_uses_what_was_made_ready(model: RoundPipe, made_ready: list[Tensor], amsgrad: bool) -> None:
    optimizer = optim.Adam(list(model.optim_parameters()), lr=1e-3, amsgrad=amsgrad)
    assert not made_ready
    call(model)
    model.synchronize()
    addresses = {tensor.data_ptr() for tensor in made_ready}
    assert all(tensor.nbytes >= HUGE_PAGE_BYTES for tensor in made_ready), "biases are too small for the reserve"
    model.step(lambda: optimizer.step(), is_async=False)
    moments = [
        value
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and value.nbytes >= HUGE_PAGE_BYTES
    ]
    assert len(moments) == 2 * (3 if amsgrad else 2)
    assert {moment.data_ptr() for moment in moments} <= addresses
    assert len({moment.data_ptr() for moment in moments}) == len(moments)
    assert optimizer._reserve is None, "moments that were not needed are freed"


def test_it_happens_once_and_changes_nothing(model: RoundPipe, made_ready: list[Tensor]) -> None:
    optimizer = optim.Adam(list(model.optim_parameters()), lr=1e-3)
    step(model, optimizer)
    count = len(made_ready)
    for _ in range(2):
        step(model, optimizer)
    assert len(made_ready) == count
    masters = [param.detach().clone() for param in model.optim_parameters()]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16)
    other = RoundPipe(net, optim_dtype=torch.float32)
    copies = list(other.optim_parameters())
    plain = optim.Adam(copies, lr=1e-3)
    for copy in copies:
        assert isinstance(copy, OptimizerCopy)
        copy.when_training = None
    for _ in range(3):
        step(other, plain)
    assert len(made_ready) == count
    assert all(torch.equal(one, two.detach()) for one, two in zip(masters, other.optim_parameters(), strict=True))
    other.close()


def test_states_are_in_the_order_of_parameters(model: RoundPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although layers are updated as their gradients land, the last one first."""
    monkeypatch.setattr(one_pass, "in_order_of_change", lambda updates: ((update, None) for update in updates))
    optimizer = optim.Adam(list(model.optim_parameters()), lr=1e-3)
    step(model, optimizer)
    assert list(optimizer.state_dict()["state"]) == [0, 1, 2, 3]


def test_nothing_is_taken_for_state_that_was_loaded(model: RoundPipe, made_ready: list[Tensor]) -> None:
    params = list(model.optim_parameters())
    source = torch.optim.Adam([nn.Parameter(torch.zeros(p.shape)) for p in params])
    for param in source.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    source.step()
    optimizer = optim.Adam(params)
    optimizer.load_state_dict(source.state_dict())
    call(model)
    assert not made_ready


def test_an_optimizer_that_is_gone_takes_nothing(model: RoundPipe, made_ready: list[Tensor]) -> None:
    optimizer = optim.Adam(list(model.optim_parameters()))
    del optimizer
    gc.collect()
    call(model)
    assert not made_ready


@pytest.mark.parametrize(("found", "value"), [("available_host_bytes", 1000), ("usable_cores", 2)])
def test_what_does_not_fit_or_has_no_cores_is_not_tried(
    model: RoundPipe, made_ready: list[Tensor], monkeypatch: pytest.MonkeyPatch, found: str, value: int
) -> None:
    monkeypatch.setattr(reserve, found, lambda: value)
    made = Reserve()
    copies = [param for param in model.optim_parameters() if isinstance(param, OptimizerCopy)]
    made.fill(copies, lambda copy: [PLAIN, PLAIN])
    assert not made_ready
    assert made.parts_for(PLAIN, copies[0])[0].shape == copies[0].shape


def test_making_pages_ready_leaves_values_alone() -> None:
    tensor = torch.arange(3 * HUGE_PAGE_BYTES // 4, dtype=torch.int32)
    make_pages_ready(tensor[5:-7])
    make_pages_ready(torch.empty(0))
    assert torch.equal(tensor, torch.arange(3 * HUGE_PAGE_BYTES // 4, dtype=torch.int32))


def test_training_goes_on_where_no_thread_can_be_started(
    model: RoundPipe, made_ready: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(reserve, "start_thread", refuse)
    optimizer = optim.AdamW(model.optim_parameters())
    call(model)
    model.step(optimizer.step, False)
    assert not made_ready
    assert len(optimizer.state) == 4
