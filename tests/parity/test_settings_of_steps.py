"""Settings of optimizers that are changed while a step runs: each step has those with which it was issued.

The optimizer thread is held in step_fn until the user's thread has changed the settings. Gradients of the model do not
depend on its weights, so old weights make no difference to a plain loop.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LRScheduler, OneCycleLR

from helpers_parity import WAIT_S, assert_same, batch, microbatches, seeded, total
from roundpipe import RoundPipe, optim
from roundpipe.api.plain_loop import PlainLoop

WIDTH = 4
STEPS = 5
MakeOptimizer = Callable[[list[Any]], Optimizer]
MakeSchedule = Callable[[Any], LRScheduler]

OPTIMIZERS: dict[str, tuple[MakeOptimizer, MakeOptimizer]] = {  # ours, and the same in plain PyTorch
    "torch SGD": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "torch Adam, rate in a tensor": (
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    ),
    "SGD": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "AdamW": (lambda p: optim.AdamW(p, lr=0.1), lambda p: optim.AdamW(p, lr=0.1)),
}
SCHEDULES: dict[str, MakeSchedule] = {
    "exponential": lambda o: ExponentialLR(o, 0.5),
    "one cycle": lambda o: OneCycleLR(o, 0.3, total_steps=STEPS + 1, cycle_momentum=False),
}
EACH_OPTIMIZER = pytest.mark.parametrize("kind", OPTIMIZERS)


class Held:
    """A model whose optimizer thread waits in step_fn until `release` is set."""

    def __init__(self, make: MakeOptimizer, *, staleness: int = 1, after: Callable[[], object] = lambda: None) -> None:
        network = seeded(lambda: nn.Linear(WIDTH, WIDTH))
        self.model = RoundPipe(network, devices=["cpu"], staleness=staleness, model_run_config=microbatches(1))
        self.optimizer = make(list(self.model.optim_parameters()))
        self.release, self.after, self.number = threading.Event(), after, 0

    def step(self, *, held: bool = True) -> None:
        """Gather a gradient and issue a step that waits for `release`."""
        self.model.forward_backward((points_of(self.number),), loss_fn=total)
        self.number += 1
        self.release.clear()
        if not held:
            self.release.set()
        self.model.step(self.step_fn)

    def step_fn(self) -> None:
        assert self.release.wait(WAIT_S)
        self.optimizer.step()
        self.after()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        self.release.set()
        self.model.synchronize()
        return [param.detach().clone() for param in self.model.model.parameters()]


def points_of(number: int) -> Tensor:
    return batch(3, WIDTH, seed=number)


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(*args: Any, **kwargs: Any) -> Held:
        made.append(Held(*args, **kwargs))
        return made[-1]

    yield make
    for held in made:
        held.release.set()
        held.model.close()


def plain_weights(make: MakeOptimizer, change: Callable[[int, Optimizer], object], steps: int = STEPS) -> list[Tensor]:
    """The weights of a plain loop that calls `change` after each step."""
    network = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    optimizer = make(list(network.parameters()))
    for number in range(steps):
        total(network(points_of(number)), None).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(number, optimizer)
    return [param.detach().clone() for param in network.parameters()]


def scheduled(make: MakeOptimizer, make_schedule: MakeSchedule) -> list[Tensor]:
    made: list[LRScheduler] = []

    def make_both(params: list[Any]) -> Optimizer:
        optimizer = make(params)
        made.append(make_schedule(optimizer))
        return optimizer

    return plain_weights(make_both, lambda *_: made[0].step())


@EACH_OPTIMIZER
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_stepped_after_the_step_counts_from_the_next_one_on(
    hold: Callable[..., Held], kind: str, schedule: str
) -> None:
    ours, plain = OPTIMIZERS[kind]
    held = hold(ours)
    rates = SCHEDULES[schedule](held.optimizer)
    for _ in range(STEPS):
        held.step()
        rates.step()
        held.release.set()
        assert held.optimizer.param_groups[0]["lr"] == rates.get_last_lr()[0]
    assert_same(held.weights(), scheduled(plain, SCHEDULES[schedule]))


def test_with_staleness_0_a_schedule_counts_from_the_next_step_on(hold: Callable[..., Held]) -> None:
    ours, plain = OPTIMIZERS["AdamW"]
    held = hold(ours, staleness=0)
    rates = SCHEDULES["exponential"](held.optimizer)
    for number in range(STEPS):
        held.step(held=number > 0)  # the first step is waited for
        rates.step()
        held.release.set()
    assert_same(held.weights(), scheduled(plain, SCHEDULES["exponential"]))


@EACH_OPTIMIZER
def test_two_steps_that_wait_have_each_their_own_settings(hold: Callable[..., Held], kind: str) -> None:
    ours, plain = OPTIMIZERS[kind]
    held = hold(ours)
    rates = SCHEDULES["exponential"](held.optimizer)
    for number in range(STEPS):
        held.step(held=number < 1)
        if number:
            rates.step()
            rates.step()
            held.model.synchronize()
    expected: list[LRScheduler] = []

    def make_plain(params: list[Any]) -> Optimizer:
        optimizer = plain(params)
        expected.append(SCHEDULES["exponential"](optimizer))
        return optimizer

    assert_same(held.weights(), plain_weights(make_plain, lambda n, _: n and [expected[0].step() for _ in range(2)]))


@EACH_OPTIMIZER
def test_a_schedule_in_step_fn_counts_although_the_next_step_was_issued_before_it(
    hold: Callable[..., Held], kind: str
) -> None:
    ours, plain = OPTIMIZERS[kind]
    held = hold(ours, after=lambda: rates.step())
    rates = SCHEDULES["exponential"](held.optimizer)
    held.step()
    for _ in range(STEPS - 1):  # a step is always issued while the one before it is still to come
        held.model.forward_backward((points_of(held.number),), loss_fn=total)
        held.number += 1
        held.model.step(held.step_fn)
        held.release.set()
    assert_same(held.weights(), scheduled(plain, SCHEDULES["exponential"]))
    assert held.optimizer.param_groups[0]["lr"] == rates.get_last_lr()[0]


@EACH_OPTIMIZER
def test_writes_of_both_threads_come_in_the_order_of_their_steps(hold: Callable[..., Held], kind: str) -> None:
    """step_fn halves the rate after each step; the user sets it anew after the second one, and a decay."""
    ours, plain = OPTIMIZERS[kind]

    def halve(optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5

    def change(number: int, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        if number == 1 and isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.2)
        elif number == 1:
            group["lr"] = 0.2
        group["weight_decay"] = 0.125 * number

    held = hold(ours, after=lambda: halve(held.optimizer))
    for number in range(STEPS):
        held.step()
        change(number, held.optimizer)
        held.release.set()

    def change_plain(number: int, optimizer: Optimizer) -> None:
        halve(optimizer)
        change(number, optimizer)

    assert_same(held.weights(), plain_weights(plain, change_plain))
    assert float(held.optimizer.param_groups[0]["lr"]) == pytest.approx(0.2 * 0.5 ** (STEPS - 2))


@pytest.mark.parametrize("holds", ["the group", "the dict that became the group", "the group of a wrapped list"])
def test_a_group_that_the_user_holds_is_that_of_the_optimizer(hold: Callable[..., Held], holds: str) -> None:
    given: dict[str, Any] = {}

    def make(params: list[Any]) -> Optimizer:
        given["params"] = params
        optimizer = torch.optim.SGD([given], lr=0.1)
        if holds == "the group":
            kept.append(optimizer.param_groups[0])
        elif holds == "the dict that became the group":
            kept.append(given)
        else:
            lists.append(optimizer.param_groups)
            kept.append(lists[0][0])
        return optimizer

    kept: list[dict[str, Any]] = []
    lists: list[Any] = []
    held = hold(make)
    for number in range(STEPS):
        held.step()
        kept[0]["lr"] = 0.1 * (number + 2)
        held.release.set()
    assert_same(
        held.weights(),
        plain_weights(lambda p: torch.optim.SGD(p, lr=0.1), lambda n, o: o.param_groups[0].update(lr=0.1 * (n + 2))),
    )
    assert not lists or lists[0] is held.optimizer.param_groups


def test_a_schedule_does_not_warn_that_the_step_is_still_to_come(
    hold: Callable[..., Held], recwarn: pytest.WarningsRecorder
) -> None:
    held = hold(OPTIMIZERS["SGD"][0])
    rates = SCHEDULES["exponential"](held.optimizer)
    held.step()
    rates.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_momentum_and_betas_follow_a_schedule_too(hold: Callable[..., Held]) -> None:
    def cycle(optimizer: Any) -> LRScheduler:
        return CyclicLR(optimizer, 0.01, 0.3, step_size_up=2)

    held = hold(OPTIMIZERS["AdamW"][0])
    rates = cycle(held.optimizer)
    for _ in range(STEPS):
        held.step()
        rates.step()
        held.release.set()
    assert_same(held.weights(), scheduled(OPTIMIZERS["AdamW"][1], cycle))


def test_masters_put_into_an_optimizer_by_hand_are_followed_from_the_second_step_on(
    hold: Callable[..., Held],
) -> None:
    def make(params: list[Any]) -> Optimizer:
        optimizer = torch.optim.SGD([nn.Parameter(param.detach().clone()) for param in params], lr=0.1)
        optimizer.param_groups[0]["params"] = params
        return optimizer

    held = hold(make)
    rates = SCHEDULES["exponential"](held.optimizer)
    for number in range(STEPS):
        held.step(held=number > 0)
        if number == 0:
            held.model.synchronize()
        rates.step()
        held.release.set()
    assert_same(held.weights(), scheduled(lambda p: torch.optim.SGD(p, lr=0.1), SCHEDULES["exponential"]))


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """Releases the held models in this list when the user's thread begins to wait for their steps."""
    models: list[Held] = []
    real = PlainLoop.wait_for_steps

    def wait_for_steps(self: PlainLoop) -> bool:
        for held in models:
            held.release.set()
        return real(self)

    monkeypatch.setattr(PlainLoop, "wait_for_steps", wait_for_steps)
    return models


@EACH_OPTIMIZER
def test_a_state_dict_is_that_of_all_steps_issued(hold: Callable[..., Held], waited: list[Held], kind: str) -> None:
    held = hold(OPTIMIZERS[kind][0])
    held.step(held=False)
    held.step()
    waited.append(held)
    early = copy.deepcopy(held.optimizer.state_dict())
    held.model.synchronize()
    late = held.optimizer.state_dict()
    assert_same(list(early["state"].values()), list(late["state"].values()))


@EACH_OPTIMIZER
def test_loading_a_state_waits_for_steps_and_the_loaded_rate_counts(
    hold: Callable[..., Held], waited: list[Held], kind: str
) -> None:
    ours, plain = OPTIMIZERS[kind]
    held = hold(ours)
    start = copy.deepcopy(held.optimizer.state_dict())
    start["param_groups"][0]["lr"] = start["param_groups"][0]["lr"] * 0 + 0.05
    held.step()
    waited.append(held)
    held.optimizer.load_state_dict(start)
    waited.clear()
    for number in range(1, STEPS):
        held.step()
        held.optimizer.param_groups[0]["weight_decay"] = 0.25 * number
        held.release.set()

    def change(number: int, optimizer: Optimizer) -> None:
        if number == 0:
            optimizer.load_state_dict(start)
        else:
            optimizer.param_groups[0]["weight_decay"] = 0.25 * number

    assert_same(held.weights(), plain_weights(plain, change))


def test_a_group_added_while_a_step_runs_counts_from_the_next_step_on(
    hold: Callable[..., Held], waited: list[Held]
) -> None:
    held = hold(lambda params: torch.optim.SGD(params[:1], lr=0.1))
    held.step()
    waited.append(held)
    held.optimizer.add_param_group({"params": list(held.model.optim_parameters())[1:], "lr": 0.3})
    waited.clear()
    held.step()
    held.optimizer.param_groups[1]["lr"] = 7.0

    def add(number: int, optimizer: Optimizer) -> None:
        if number == 0:
            optimizer.add_param_group({"params": rest[0], "lr": 0.3})

    rest: list[Any] = []

    def make(params: list[Any]) -> Optimizer:
        rest.append(params[1:])
        return torch.optim.SGD(params[:1], lr=0.1)

    assert_same(held.weights(), plain_weights(make, add, 2))


def test_groups_look_like_dicts_and_are_copied_as_dicts(hold: Callable[..., Held]) -> None:
    optimizer = hold(OPTIMIZERS["torch SGD"][0]).optimizer
    (group,) = optimizer.param_groups
    plain = dict(group)
    assert type({**group}) is dict
    assert {**group}.keys() == plain.keys() == set(group)
    assert group == plain
    assert group | {"a": 1} == {**plain, "a": 1}
    assert {"a": 1} | group == {**plain, "a": 1}
    assert repr(group) == repr(plain)
    assert list(reversed(group)) == list(reversed(plain))
    assert type(group.copy()) is dict
    assert isinstance(group, dict)
    assert "lr" in group
    group |= {"a": 1}
    assert group.pop("a") == 1
    assert "a" not in group
    assert len(group) == len(plain)
    assert group.pop("a", 2) == 2
    with pytest.raises(KeyError):
        group.pop("a")
    with pytest.raises(KeyError):
        del group["a"]
    loaded = pickle.loads(pickle.dumps({key: value for key, value in group.items() if key != "params"}))
    assert loaded["lr"] == 0.1
    assert type(copy.copy(group)) is dict
    twin = copy.deepcopy(optimizer)
    assert type(twin.param_groups) is list
    assert type(twin.param_groups[0]) is dict
