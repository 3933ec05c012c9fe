"""Looking at optimizer copies takes memory that comes back, and changes no number of the training."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same, batch, microbatches, mlp, mse
from roundpipe import AutoRoundPipe, RoundPipe, optim, wrap_model_to_roundpipe
from roundpipe.store import OptimizerCopy

WIDTH, ROWS, NUM_STEPS = 16, 8, 6
BF16 = torch.bfloat16


def memory_of(model: Any) -> int:
    """Bytes that the copies themselves have, without their lower halves."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(param.untyped_storage().nbytes() for param in model.optim_parameters())


def full_memory_of(model: Any) -> int:
    return sum(param.nbytes for param in model.optim_parameters())


def wrapped(num_devices: int = 3, **options: Any) -> RoundPipe:
    torch.manual_seed(0)
    return RoundPipe(mlp(width=WIDTH).to(BF16), optim_dtype=torch.float32, devices=["cpu"] * num_devices, **options)


class Training:
    def __init__(self, model: RoundPipe, optimizer: torch.optim.Optimizer, is_async: bool) -> None:
        self.model, self.optimizer, self.is_async = model, optimizer, is_async
        self.num_steps = 0

    def step(self, in_step: Callable[[], object] = lambda: None) -> None:
        x, y = (batch(ROWS, WIDTH, seed=2 * self.num_steps + i).to(BF16) for i in range(2))
        self.num_steps += 1
        torch.manual_seed(self.num_steps)
        self.model.forward_backward(
            (x,), label=y, loss_fn=lambda out, label: mse(out.float(), label.float()), run_config=microbatches(3)
        )

        def step_fn() -> None:
            self.optimizer.step()
            in_step()
            self.optimizer.zero_grad()

        self.model.step(step_fn, self.is_async)

    def result(self) -> list[Tensor]:
        self.model.synchronize()
        copies = [param.detach().clone() for param in self.model.optim_parameters()]
        return [*copies, *(param.detach().clone() for param in self.model.model.parameters())]


def adam(model: RoundPipe) -> torch.optim.Optimizer:
    return optim.AdamW(model.optim_parameters(), lr=1e-2)


def undisturbed(is_async: bool) -> list[Tensor]:
    with wrapped() as model:
        training = Training(model, adam(model), is_async)
        for _ in range(NUM_STEPS):
            training.step()
        return training.result()


def cloned(model: RoundPipe) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.optim_named_parameters()}


def test_a_checkpoint_of_clones_leaves_no_memory_behind() -> None:
    """Copy by copy: never more than one of them has memory."""
    with wrapped() as model:
        training = Training(model, adam(model), is_async=False)
        training.step()
        most = 0
        for _, param in model.optim_named_parameters():
            param.detach().clone()
            with torch._C.DisableTorchFunctionSubclass():
                most = max(most, sum(other.untyped_storage().nbytes() for other in model.optim_parameters()))
        assert 0 < most <= max(param.nbytes for param in model.optim_parameters())
        assert memory_of(model) == 0
        cloned(model)
        assert memory_of(model) == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_checkpoint_of_views_gives_memory_back_with_the_next_step(is_async: bool) -> None:
    with wrapped() as model:
        training = Training(model, adam(model), is_async)
        training.step()
        model.synchronize()
        checkpoint = {name: param.detach() for name, param in model.optim_named_parameters()}
        assert memory_of(model) == full_memory_of(model)
        training.step()
        model.synchronize()
        assert memory_of(model) == full_memory_of(model), "the checkpoint still shows the copies"
        del checkpoint
        training.step()
        model.synchronize()
        assert memory_of(model) == 0
        copies = list(model.optim_parameters())
        values = [param.detach() for param in copies]
        del values
        assert memory_of(model) == full_memory_of(model)
        training.step()
        model.synchronize()
        assert memory_of(model) == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("look", ["clones", "views", "every step", "in the step"])
def test_reading_copies_changes_no_number(look: str, is_async: bool) -> None:
    kept: list[Any] = []
    with wrapped() as model:
        training = Training(model, adam(model), is_async)
        for number in range(NUM_STEPS):
            training.step(lambda: cloned(model) if look == "in the step" else None)
            if look == "clones" and number == 2:
                cloned(model)
            elif look == "views" and number in (1, 2):
                kept.append([param.detach() for param in model.optim_parameters()])
            elif look == "views" and number == 3:
                kept.clear()
            elif look == "every step":
                cloned(model)
        assert_same(training.result(), undisturbed(is_async), "copies and weights")


def test_views_that_are_kept_follow_the_training() -> None:
    with wrapped() as model:
        training = Training(model, adam(model), is_async=True)
        views = [param.detach() for param in model.optim_parameters()]
        for _ in range(NUM_STEPS):
            training.step()
        model.synchronize()
        assert_same(views, [param.detach() for param in model.optim_parameters()], "views")
        assert memory_of(model) == full_memory_of(model)


def test_a_value_that_is_loaded_is_trained_from() -> None:
    with wrapped() as model, wrapped() as other:
        one, two = Training(model, adam(model), is_async=False), Training(other, adam(other), is_async=False)
        for _ in range(3):
            one.step()
        model.synchronize()
        other.load_state_dict(model.state_dict())
        two.optimizer.load_state_dict(deepcopy(one.optimizer.state_dict()))
        saved = cloned(model)
        with torch.no_grad():
            for name, param in other.optim_named_parameters():
                param.copy_(saved[name])
        two.num_steps = one.num_steps
        one.step()
        two.step()
        assert memory_of(other) == 0
        assert_same(two.result(), one.result(), "copies and weights")


def test_an_optimizer_of_torch_keeps_the_memory_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting and joining in every step would cost more time than the memory is worth."""
    given_back: list[OptimizerCopy] = []
    real = OptimizerCopy._become_halved
    monkeypatch.setattr(
        OptimizerCopy, "_become_halved", lambda param, value: (given_back.append(param), real(param, value))
    )
    with wrapped() as model:
        training = Training(model, torch.optim.AdamW(model.optim_parameters(), lr=1e-2), is_async=False)
        for _ in range(NUM_STEPS):
            training.step(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        assert memory_of(model) == full_memory_of(model)
        assert not given_back


def test_penalties_on_copies_can_be_run_backward() -> None:
    with wrapped() as model:
        Training(model, adam(model), is_async=False).step()
        penalty = sum((param.square().sum() for param in model.optim_parameters()), torch.zeros(()))
        penalty.backward()
        for param in model.optim_parameters():
            assert torch.equal(param.grad, 2 * param.detach())


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(width=WIDTH), mlp(width=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + 1)


def test_a_model_in_parts_gives_memory_back() -> None:
    model = wrap_model_to_roundpipe(
        InParts().to(BF16),
        use_sequential_preset=False,
        upper_threshold=0,
        optim_dtype=torch.float32,
        devices=["cpu"] * 3,
    )
    assert isinstance(model, AutoRoundPipe)
    with model:
        optimizer = optim.Adam(model.optim_parameters())
        for _ in range(2):
            model(batch(ROWS, WIDTH, seed=1).to(BF16)).float().square().mean().backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            kept = [param.detach() for param in model.optim_parameters()]
            assert memory_of(model) == full_memory_of(model)
            del kept
        for _ in range(2):
            model(batch(ROWS, WIDTH, seed=1).to(BF16)).float().square().mean().backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        assert memory_of(model) == 0


def test_copies_saved_and_loaded_by_hand_give_memory_back() -> None:
    """As docs/training-loop.md describes; the training then goes on as from the saved copies."""
    with wrapped() as model:
        training = Training(model, adam(model), is_async=False)
        training.step()
        model.synchronize()
        saved, weights = cloned(model), deepcopy(dict(model.state_dict()))
        optimizer_state = deepcopy(training.optimizer.state_dict())
        training.step()
        expected = training.result()
        training.step()
        assert memory_of(model) == 0
        model.load_state_dict(weights)
        with torch.no_grad():
            for name, param in model.optim_named_parameters():
                param.copy_(saved[name])
        training.optimizer.load_state_dict(optimizer_state)
        training.num_steps = 1
        training.step()
        assert_same(training.result(), expected)
        training.step()
        assert memory_of(model) == 0


def test_weights_with_gaps_are_trained_as_dense_ones_are() -> None:
    results = []
    for has_gaps in (False, True):
        with wrapped(1, pin_model="off") as probe:
            network = probe.model
        if has_gaps:
            for param in network.parameters():
                memory = torch.zeros(*param.shape[:-1], 2 * param.shape[-1], dtype=BF16)
                memory[..., ::2] = param.data
                param.data = memory[..., ::2]
        with RoundPipe(network, optim_dtype=torch.float32, pin_model="off", devices=["cpu"]) as model:
            training = Training(model, adam(model), is_async=True)
            for _ in range(NUM_STEPS):
                training.step()
            results.append(training.result())
    assert_same(results[1], results[0], "copies and weights")
