"""A gradient that is not finite stops a step before it reaches weights, masters or moments; training can go on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_faults import notes_of, raised_by
from helpers_parity import assert_same, batch, mlp, mse, seeded
from roundpipe import NonFiniteError, RoundPipe, RoundPipeRunConfig, clip_grad_norm_, optim

WIDTH, ROWS = 13, 6
BAD = "2.0.weight"


class Training:
    """A model whose `BAD` gradient becomes infinite in the calls where `is_bad` is set."""

    def __init__(self, dtype: torch.dtype, own_optimizer: bool, is_async: bool) -> None:
        network = seeded(lambda: mlp(width=WIDTH)).to(dtype)
        self.dtype, self.is_async, self.is_bad = dtype, is_async, False
        dict(network.named_parameters())[BAD].register_hook(self._spoil)
        self.model = RoundPipe(
            network,
            devices=["cpu"] * 3,
            optim_dtype=torch.float32,
            model_run_config=RoundPipeRunConfig(num_microbatch=3),
        )
        kind = optim.AdamW if own_optimizer else torch.optim.AdamW
        self.optimizer = kind(self.model.optim_parameters(), lr=0.05)

    def _spoil(self, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.inf) if self.is_bad else gradient

    def step_fn(self) -> None:
        try:
            clip_grad_norm_(self.model, 1.0, error_if_nonfinite=True)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()

    def call(self, seed: int) -> Tensor:
        x, label = (batch(ROWS, WIDTH, seed=2 * seed + i).to(self.dtype) for i in range(2))
        loss: Tensor = self.model.forward_backward(
            (x,), label=label, loss_fn=lambda output, label: mse(output.float(), label.float())
        )
        return loss

    def iterate(self, seed: int) -> Tensor:
        loss = self.call(seed)
        self.model.step(self.step_fn, self.is_async)
        return loss

    def snapshot(self) -> Any:
        self.model.synchronize()
        return copy.deepcopy(
            {
                "weights": dict(self.model.state_dict()),
                "masters": [copy.detach().clone() for copy in self.model.optim_parameters()],
                "moments": self.optimizer.state_dict()["state"],
            }
        )


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    made: torch.dtype = request.param
    return made


@pytest.fixture
def start(dtype: torch.dtype) -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def start(own_optimizer: bool = True, is_async: bool = False) -> Training:
        made.append(Training(dtype, own_optimizer, is_async))
        return made[-1]

    yield start
    for one in made:
        one.model.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "stale"])
@pytest.mark.parametrize("own_optimizer", [True, False], ids=["optim.AdamW", "torch.optim.AdamW"])
def test_the_step_changes_nothing_and_training_goes_on(
    own_optimizer: bool, is_async: bool, start: Callable[..., Training]
) -> None:
    ours, undisturbed = start(own_optimizer, is_async), start(own_optimizer, is_async)
    for seed in range(3):
        assert_same(ours.iterate(seed), undisturbed.iterate(seed))
    before = ours.snapshot()
    assert_same(undisturbed.snapshot(), before)

    ours.is_bad = True
    error = raised_by(lambda: ours.iterate(3), ours.model.synchronize)
    ours.is_bad = False
    assert isinstance(error, NonFiniteError)
    assert f"1 of {len(before['masters'])} gradients contain infinity or NaN: those of '{BAD}'" in str(error)
    assert "while running step_fn of optimizer step 4" in notes_of(error)[0]
    assert_same(ours.snapshot(), before)

    for seed in range(4, 7):
        assert_same(ours.iterate(seed), undisturbed.iterate(seed), f"loss of call {seed}")
    assert_same(ours.snapshot(), undisturbed.snapshot())


def test_gradients_stay_as_they_are(start: Callable[..., Training]) -> None:
    training = start()
    training.is_bad = True
    training.call(1)
    gradients: list[Any] = []

    def step_fn() -> None:
        # The gradients are pending in the first call and converted to tensors in the second.
        for _ in range(2):
            with pytest.raises(NonFiniteError, match=f"those of '{BAD}'"):
                clip_grad_norm_(training.model, 1.0, error_if_nonfinite=True)
            gradients.append(copy.deepcopy([param.grad for param in training.model.optim_parameters()]))
        training.optimizer.zero_grad()

    training.model.step(step_fn, False)
    assert_same(gradients[0], gradients[1])
    training.call(1)
    assert_same([param.grad for param in training.model.optim_parameters()], gradients[0])
    with pytest.raises(NonFiniteError, match=f"those of '{BAD}'"):  # outside of a step
        clip_grad_norm_(training.model.optim_parameters(), 1.0, error_if_nonfinite=True)
    training.model.zero_grad()


def test_the_plain_loop_can_skip_the_step() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with RoundPipe(network, devices=["cpu"] * 2) as model:
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
        before = copy.deepcopy(dict(model.state_dict()))
        model(torch.full((4, 4), torch.inf)).sum().backward()
        with pytest.raises(NonFiniteError, match=r"2 of 4 gradients .* those of '2.weight', '0.weight'"):
            clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        optimizer.zero_grad()
        assert_same(dict(model.state_dict()), before)
        model(torch.ones(4, 4)).sum().backward()
        assert clip_grad_norm_(model, 1.0, error_if_nonfinite=True).isfinite()
        optimizer.step()
