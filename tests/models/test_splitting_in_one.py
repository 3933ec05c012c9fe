"""Blocks that cannot be separate layers become one layer with the module that calls them; models that change once."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_split import WIDTH, Block, SplitModels, Toy, check_split, layer_kinds, rows
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.split import discovery as discovery


class _Reversed(torch.autograd.Function):
    """Runs blocks without a graph and computes their gradients in its own autograd function."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, blocks: nn.ModuleList) -> Tensor:
        ctx.blocks, ctx.inputs = blocks, []
        for block in blocks:
            ctx.inputs.append(h)
            h = block(h)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        for block, given in zip(reversed(ctx.blocks), reversed(ctx.inputs), strict=True):
            with torch.enable_grad():
                leaf = given.detach().requires_grad_()
                block(leaf).backward(grad)
            assert leaf.grad is not None
            grad = leaf.grad
        return grad, None


class Reversing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = _Reversed.apply(h, self.layers)
        return result


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Linear(WIDTH, WIDTH), Reversing(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def seeded(build: Any) -> nn.Module:
    torch.manual_seed(3)
    module: nn.Module = build()
    return module


def test_a_module_that_calls_blocks_in_an_unusual_way_is_one_layer(
    models: SplitModels, num_devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        model = check_split(models, seeded(Around), {"x": rows()}, num_devices)
    assert layer_kinds(model) == ["Glue", "Block", "Glue"]
    assert model.model[1].block is model.encoder
    assert "encoder hold all of their blocks in one layer" in caplog.text


def test_if_one_layer_would_be_too_large_the_reason_is_that_of_separate_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_LARGEST_IN_ONE", 100)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        wrap_model_to_roundpipe(
            seeded(Around), use_sequential_preset=True, example_inputs={"x": rows()}, devices=["cpu"]
        )


class ReversingItself(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Reversed.apply(self.embed(x), self.blocks))


def test_a_model_that_calls_its_blocks_itself_is_not_one_layer() -> None:
    with pytest.raises(NotImplementedError, match="has no gradient"):
        wrap_model_to_roundpipe(
            seeded(ReversingItself), use_sequential_preset=True, example_inputs={"x": rows()}, devices=["cpu"]
        )


class _Scaled(nn.Module):
    """The same linear map, and twice as much."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * nn.functional.linear(x, self.weight, self.bias)


class Settling(Toy):
    """Exchanges a module in each block, over the same parameters, when it first meets few rows."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4 and isinstance(self.blocks[0].linear, nn.Linear):
            for block in self.blocks:
                block.linear = _Scaled(block.linear)  # type: ignore[arg-type]
        result: Tensor = super().forward(x)
        return result


@pytest.mark.parametrize("num_rows", [3, 12])
def test_a_model_that_exchanges_its_modules_once_does_so_as_without_wrapping(
    models: SplitModels, num_rows: int
) -> None:
    module = seeded(Settling)
    reference = copy.deepcopy(module)
    inputs = rows(num_rows)
    model = models.wrap(module, {"x": inputs}, 2)
    with torch.no_grad():
        expected = reference(inputs)
        found = model(x=inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert isinstance(model.blocks[0].linear, nn.Linear) is (num_rows == 12)
    assert list(model.state_dict()) == list(reference.state_dict())
