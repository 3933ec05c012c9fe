"""GradScaler in RoundPipe's training loop: scales and weights are those of the documented semantics, to the bit.

The reference is plain PyTorch on one thread. It keeps every version of the weights and every decision about the scale,
and says for each iteration which ones count:

    iteration i computes with     sync step: update i - 1          async step: update i - 2
    iteration i scales with       sync update: windows to i - 1    async update: windows to i - 2
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig

NUM_MICROBATCH = 4
NUM_ITERATIONS = 8
NUM_CALLS = 2  # of forward_backward between two steps
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 2
SCALE_GIVEN = {5: 48.0}  # by iteration, to update()
MAX_NORM = 0.5


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    init_scale: float
    overflowing: tuple[int, ...] = ()  # iterations (from 0) whose loss is multiplied with infinity


FINITE = Case(torch.float32, 64.0)
ONE_INF = Case(torch.float32, 64.0, overflowing=(2,))
TWO_INFS = Case(torch.float32, 64.0, overflowing=(0, 3))
HALF = Case(torch.float16, 2.0**19)  # too large for float16 gradients: overflows until it has shrunk


@dataclass
class History:
    """Everything that the loop computed, by iteration."""

    losses: list[torch.Tensor] = field(default_factory=list)
    loss_scales: list[set[float]] = field(default_factory=list)  # seen in loss_fn
    step_scales: list[float] = field(default_factory=list)  # seen in step_fn
    scales_before: list[float] = field(default_factory=list)  # seen on the main thread before the call
    norms: list[torch.Tensor] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)
    end_scale: float = 0.0
    weights: list[torch.Tensor] = field(default_factory=list)


@pytest.fixture(autouse=True)
def one_thread_per_worker() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build(case: Case) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(case.dtype)


def batch(case: Case, iteration: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * iteration + call)
    x = torch.randn(2 * NUM_MICROBATCH, 3, generator=generator).to(case.dtype)
    y = torch.randn(2 * NUM_MICROBATCH, 2, generator=generator)
    if iteration in case.overflowing and call == NUM_CALLS - 1:
        y[-1, -1] = math.inf  # one element of one microbatch of one call
    return x, y


def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - labels).square().mean()


def flat(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])


# ---- RoundPipe -------------------------------------------------------------------------------------------------------


def train(case: Case, num_devices: int, step_async: bool, update_async: bool, clip: bool) -> History:
    history = History()
    scaler = GradScaler(case.init_scale, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH)
    model = RoundPipe(build(case), torch.float32, model_run_config=config, devices=["cpu"] * num_devices)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.5, momentum=0.9)

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        history.loss_scales[-1].add(scaler.get_scale())
        return scaler.scale(criterion(outputs, labels)) / NUM_MICROBATCH

    def step_fn() -> None:
        history.step_scales.append(scaler.get_scale())
        if clip:
            scaler.unscale_(optimizer)
            history.norms.append(nn.utils.clip_grad_norm_(list(model.parameters()), MAX_NORM))
        scaler.step(optimizer)
        optimizer.zero_grad()
        history.masters.append(flat(model.parameters()))

    for iteration in range(NUM_ITERATIONS):
        history.loss_scales.append(set())
        history.scales_before.append(scaler.get_scale())
        for call in range(NUM_CALLS):
            x, y = batch(case, iteration, call)
            history.losses.append(model.forward_backward((x,), label=y, loss_fn=loss_fn))
        model.step(step_fn, is_async=step_async)
        scaler.update(SCALE_GIVEN.get(iteration), is_async=update_async)
    model.synchronize()
    history.end_scale = scaler.get_scale()
    history.weights = [flat(model.model.parameters())]
    model.close()
    return history


# ---- plain PyTorch ---------------------------------------------------------------------------------------------------


class ReferenceScale:
    """The scale, decision by decision."""

    def __init__(self, init_scale: float) -> None:
        self.scale, self.clean_windows = init_scale, 0

    def decide(self, found_inf: bool, given: float | None) -> None:
        if given is not None:
            self.scale = given
        elif found_inf:
            self.scale, self.clean_windows = self.scale * BACKOFF_FACTOR, 0
        else:
            self.clean_windows += 1
            if self.clean_windows == GROWTH_INTERVAL:
                self.scale, self.clean_windows = self.scale * GROWTH_FACTOR, 0


class Reference:
    def __init__(self, case: Case, step_async: bool, update_async: bool, clip: bool) -> None:
        self.case, self.clip = case, clip
        self.step_lag, self.update_lag = int(step_async), int(update_async)
        self.model = build(case)
        self.masters = [nn.Parameter(param.detach().float().clone()) for param in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.5, momentum=0.9)
        self.versions = [copy.deepcopy(self.masters)]
        self.scale = ReferenceScale(case.init_scale)
        self.decisions: list[Callable[[], None]] = []
        self.history = History()

    def run(self) -> History:
        for iteration in range(NUM_ITERATIONS):
            scale = self.scale.scale
            self.history.scales_before.append(scale)
            self.history.loss_scales.append({scale})
            self.history.step_scales.append(scale)
            self._publish(max(0, iteration - self.step_lag))
            self._compute_gradients(iteration, scale)
            found_inf = self._step(scale)
            given = SCALE_GIVEN.get(iteration)
            self.decisions.append(lambda found_inf=found_inf, given=given: self.scale.decide(found_inf, given))
            while len(self.decisions) > self.update_lag:
                self.decisions.pop(0)()
        self._publish(NUM_ITERATIONS)
        self.history.end_scale = self.scale.scale
        self.history.weights = [flat(self.model.parameters())]
        return self.history

    def _publish(self, version: int) -> None:
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.versions[version], strict=True):
                param.copy_(master)

    def _compute_gradients(self, iteration: int, scale: float) -> None:
        """autograd sums the microbatches of each call, and the sum of the call is added to the sum so far."""
        totals: list[torch.Tensor] = []
        for call in range(NUM_CALLS):
            self.model.zero_grad()
            losses = []
            for x, y in zip(
                *(part.tensor_split(NUM_MICROBATCH) for part in batch(self.case, iteration, call)), strict=True
            ):
                loss = criterion(self.model(x), y) * torch.tensor(scale) / NUM_MICROBATCH
                loss.backward()
                losses.append(loss.detach())
            self.history.losses.append(sum(losses[1:], losses[0]))
            grads = [param.grad for param in self.model.parameters() if param.grad is not None]
            totals = [total + grad for total, grad in zip(totals, grads, strict=True)] if totals else grads
        for master, total in zip(self.masters, totals, strict=True):
            master.grad = total.float()

    def _step(self, scale: float) -> bool:
        """Unscale the gradients, and step if all are finite; returns whether one was not finite."""
        for master in self.masters:
            assert master.grad is not None
            master.grad.mul_(torch.tensor(1.0 / scale))
        found_inf = not all(bool(master.grad.isfinite().all()) for master in self.masters if master.grad is not None)
        if self.clip:
            self.history.norms.append(nn.utils.clip_grad_norm_(self.masters, MAX_NORM))
        if not found_inf:
            self.optimizer.step()
        self.versions.append(copy.deepcopy(self.masters))
        self.history.masters.append(flat(list(self.masters)))
        return found_inf


# ---- the comparison --------------------------------------------------------------------------------------------------


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert len(found) == len(expected), what
    for position, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert left.dtype is right.dtype
        same = torch.equal(*(t.nan_to_num(math.pi, math.inf, -math.inf) for t in (left, right)))
        assert same, f"{what} {position} differs: {left} instead of {right}"


@pytest.mark.parametrize("update_async", [False, True], ids=["update-sync", "update-async"])
@pytest.mark.parametrize("step_async", [False, True], ids=["step-sync", "step-async"])
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("case", [ONE_INF, HALF], ids=["one-inf", "half"])
def test_scales_and_weights_are_the_references(
    case: Case, num_devices: int, step_async: bool, update_async: bool
) -> None:
    clip = num_devices == 3
    expected = Reference(case, step_async, update_async, clip).run()
    found = train(case, num_devices, step_async, update_async, clip)
    assert found.scales_before == expected.scales_before
    assert found.loss_scales == expected.loss_scales
    assert found.step_scales == expected.step_scales
    assert found.end_scale == expected.end_scale
    assert_equal(found.losses, expected.losses, "loss")
    assert_equal(found.norms, expected.norms, "norm")
    assert_equal(found.masters, expected.masters, "masters after step")
    assert_equal(found.weights, expected.weights, "weights")


@pytest.mark.parametrize("case", [FINITE, TWO_INFS], ids=["finite", "two-infs"])
def test_the_usual_loop_on_two_devices(case: Case) -> None:
    expected = Reference(case, True, True, clip=False).run()
    found = train(case, 2, True, True, clip=False)
    assert found.scales_before == expected.scales_before
    assert_equal(found.masters, expected.masters, "masters after step")


def test_the_reference_shows_what_is_claimed() -> None:
    """The cases test something: a step is skipped, and an async scale changes one update later."""
    sync = Reference(ONE_INF, False, False, clip=False).run()
    late = Reference(ONE_INF, True, True, clip=False).run()
    assert torch.equal(sync.masters[2], sync.masters[1])
    assert not torch.equal(sync.masters[3], sync.masters[2])
    assert sync.scales_before == [64.0, 64.0, 128.0, 64.0, 64.0, 128.0, 48.0, 48.0]
    assert late.scales_before[1:] == sync.scales_before[:-1]
    half = Reference(HALF, True, True, clip=False).run()
    assert torch.equal(half.masters[0], half.masters[1])
    assert not torch.equal(half.masters[-1], half.masters[0])
