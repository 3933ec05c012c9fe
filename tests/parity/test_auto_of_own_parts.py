"""AutoRoundPipe(model): wraps nothing, and steps the RoundPipes a user has put into a model together with the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same, assert_same_grads, assert_same_state, batch, mlp, seeded
from roundpipe import (
    ArgumentTypeError,
    AutoRoundPipe,
    ClosedError,
    ConfigError,
    OwnershipError,
    RoundPipe,
    RoundPipeRunConfig,
    UsageError,
)

WHOLE = RoundPipeRunConfig(num_microbatch=1)  # as plain torch runs a batch
WIDTH = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.first, self.second = mlp(2), mlp(1)
        self.head = nn.Linear(WIDTH, 2)
        self.vocab_size = 17

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x * self.scale) - self.scale))


def part(module: nn.Module, num_devices: int = 2, **options: Any) -> RoundPipe:
    return RoundPipe(module, model_run_config=WHOLE, devices=["cpu"] * num_devices, **options)


def with_parts(net: nn.Module) -> nn.Module:
    net = copy.deepcopy(net)
    net.first, net.second = part(net.first), part(net.second)
    return net


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("prepare", [with_parts, copy.deepcopy], ids=["parts", "no parts"])
def test_it_trains_as_the_plain_model(prepare: Callable[[nn.Module], nn.Module]) -> None:
    plain = seeded(Net)
    with AutoRoundPipe(prepare(plain)) as model:
        assert [name for name, _ in model.optim_named_parameters()] == [name for name, _ in plain.named_parameters()]
        ours, theirs = sgd(model.optim_parameters()), sgd(plain.parameters())
        for seed in range(4):
            losses = [one(batch(6, WIDTH, seed=seed)).square().sum() for one in (model, plain)]
            assert_same(losses[0].detach(), losses[1].detach(), f"loss {seed}")
            for loss in losses:
                loss.backward()
            if seed == 3:
                break
            model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            theirs.step()
            theirs.zero_grad()
        model.synchronize()
        assert_same_grads(model, plain)
        assert_same_state(model, plain)


def test_it_looks_like_the_model() -> None:
    net = with_parts(seeded(Net))
    keys = list(net.state_dict())
    with AutoRoundPipe(net, name="mine", optim_dtype=torch.float64) as model:
        assert model.model is net
        assert model.original_model is net
        assert model.name == "mine"
        assert list(model.state_dict()) == keys
        assert model.first is net.first
        assert model.vocab_size == 17
        model.vocab_size = 18
        assert net.vocab_size == 18
        del model.vocab_size
        assert not hasattr(net, "vocab_size")
        copies = dict(model.optim_named_parameters())
        assert copies["scale"].dtype is torch.float64
        assert copies["first.0.0.weight"].dtype is torch.float32
        with pytest.raises(UsageError, match="AutoRoundPipe"):
            model.forward_backward((batch(6, WIDTH),))
    assert isinstance(net.first, RoundPipe)


def test_set_original_model_gives_its_names_and_attributes() -> None:
    class Original(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.inner = net
            self.config = "original"

    net = with_parts(seeded(Net))
    original = Original(net)
    with AutoRoundPipe(net) as model:
        model.set_original_model(original)
        assert model.original_model is original
        assert model.config == "original"
        assert list(model.state_dict()) == [f"inner.{name}" for name in net.state_dict()]
        assert next(iter(model.optim_named_parameters()))[0] == "inner.scale"


def test_the_pool_is_that_of_the_parts() -> None:
    net = seeded(Net)
    net.first = part(net.first, 3)
    with AutoRoundPipe(net) as model:
        assert model._engine.num_devices == 3
    plain = seeded(Net)
    with AutoRoundPipe(plain, devices=["cpu"] * 2) as model:
        assert model._engine.num_devices == 2


def test_closing_it_leaves_a_module_that_can_be_wrapped_again() -> None:
    net = seeded(Net)
    AutoRoundPipe(net, devices=["cpu"]).close()
    with RoundPipe(net, devices=["cpu"]):
        pass


def test_parts_of_other_devices_are_refused() -> None:
    net = seeded(Net)
    net.first, net.second = part(net.first, 2), part(net.second, 3)
    with pytest.raises(ConfigError, match="same devices"):
        AutoRoundPipe(net)


def test_parts_that_were_used_or_closed_are_refused() -> None:
    net = with_parts(seeded(Net))
    net.first(batch(6, WIDTH))
    with pytest.raises(UsageError, match="make the AutoRoundPipe first"):
        AutoRoundPipe(net)
    net.first.close()
    with pytest.raises(ClosedError, match="was closed"):
        AutoRoundPipe(net)


def test_models_of_other_wrappers_are_refused() -> None:
    net = with_parts(seeded(Net))
    with AutoRoundPipe(net) as model:
        with pytest.raises(UsageError, match="already"):
            AutoRoundPipe(model)
        with pytest.raises(UsageError, match="another AutoRoundPipe"):
            AutoRoundPipe(net)
        with pytest.raises(UsageError, match="submodule '0' of the model is an AutoRoundPipe"):
            AutoRoundPipe(nn.Sequential(model))
    plain = seeded(Net)
    with RoundPipe(plain, devices=["cpu"]), pytest.raises(OwnershipError, match="'scale'"):
        AutoRoundPipe(plain, devices=["cpu"])
    for wrong in ({"model": None}, {"model": plain, "optim_dtype": torch.int8}, {"model": plain, "name": 3}):
        with pytest.raises(ArgumentTypeError):
            AutoRoundPipe(**wrong)
