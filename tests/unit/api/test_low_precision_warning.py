"""Training low-precision weights without optimizer copies of higher precision logs one warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import AutoRoundPipe, OptimizerCtx, RoundPipe, optim, wrap_model_to_roundpipe

DEVICES = ["cpu"] * 3
FIX = "optim_dtype=torch.float32"


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(6, 4, dtype=dtype)


def loss_fn(outputs: Tensor, _: Any) -> Tensor:
    return outputs.float().sum()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and FIX in r.getMessage()]


def train(model: RoundPipe, dtype: torch.dtype = torch.bfloat16) -> None:
    model.forward_backward(input_args=(inputs(dtype),), loss_fn=loss_fn)


TRAINING: dict[str, Callable[[RoundPipe], Any]] = {
    "forward_backward": train,
    "forward with grad": lambda model: model(inputs()),
    "optim_parameters": lambda model: list(model.optim_parameters()),
    "optim_named_parameters": lambda model: dict(model.optim_named_parameters()),
}


@pytest.mark.parametrize("first", TRAINING)
def test_it_is_said_once_with_the_remedy(first: str, caplog: pytest.LogCaptureFixture) -> None:
    with RoundPipe(network(), name="small", devices=DEVICES) as model:
        assert not warnings(caplog), "wrapping alone trains nothing"
        TRAINING[first](model)
        (message,) = warnings(caplog)
        for fragment in ("small", "6 trainable parameters", "'0.weight'", "torch.bfloat16", "1e-5"):
            assert fragment in message
        for again in TRAINING.values():
            again(model)
        model.synchronize()
        assert len(warnings(caplog)) == 1


def test_float16_is_low_precision_too(caplog: pytest.LogCaptureFixture) -> None:
    with RoundPipe(network(torch.float16), devices=DEVICES) as model:
        optim.Adam(model.optim_parameters())
    assert "torch.float16" in warnings(caplog)[0]


def test_each_model_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with RoundPipe(network(), devices=DEVICES) as one, RoundPipe(network(), devices=DEVICES) as other:
        train(one)
        train(other)
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("optim_dtype", [torch.float32, torch.bfloat16])
def test_a_chosen_precision_is_not_questioned(optim_dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    with RoundPipe(network(), optim_dtype=optim_dtype, devices=DEVICES) as model:
        for use in TRAINING.values():
            use(model)
    assert not warnings(caplog)


def test_inference_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with RoundPipe(network(), devices=DEVICES) as model, torch.no_grad():
        model(inputs())
    assert not warnings(caplog)


def test_full_precision_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with RoundPipe(network(torch.float32), devices=DEVICES) as model:
        list(model.optim_parameters())
        train(model, torch.float32)
    assert not warnings(caplog)


def test_frozen_low_precision_weights_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A frozen bfloat16 base, as with adapters, needs no warning; training it later does."""
    net = network()
    net[0].requires_grad_(False)
    net[1:].float()
    net.insert(1, AsFloat32())
    with RoundPipe(net, devices=DEVICES) as model:
        train(model)
        assert not warnings(caplog)
        model.synchronize()
        net[0].requires_grad_(True)
        train(model)
        assert "2 trainable parameters" in warnings(caplog)[0]


class AsFloat32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class InParts(nn.Module):
    """Its forward runs on the host between its parts and uses a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(), network()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


@pytest.mark.parametrize("first", ["forward", "optim_parameters", "context"])
def test_a_model_in_parts_is_warned_of_once(first: str, caplog: pytest.LogCaptureFixture) -> None:
    model = wrap_model_to_roundpipe(
        InParts().to(torch.bfloat16), name="parts", devices=DEVICES, use_sequential_preset=False, upper_threshold=60
    )
    assert isinstance(model, AutoRoundPipe)
    with model:
        assert not warnings(caplog)
        with torch.no_grad():
            model(inputs())
        assert not warnings(caplog)
        if first == "optim_parameters":
            list(model.optim_parameters())
        elif first == "context":
            with OptimizerCtx():
                list(model.parameters())
        model(inputs()).float().sum().backward()
        list(model.optim_parameters())
    (message,) = warnings(caplog)
    assert message.startswith("parts: 13 trainable parameters")
