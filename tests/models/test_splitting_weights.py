"""The layers of a split model have the weights and buffers that their code reads, however it reads them.

Compared with the plain model as in test_splitting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same
from helpers_split import (
    WIDTH,
    Block,
    SplitModels,
    Toy,
    assert_same_training,
    check_split,
    own_loss,
    plain_call,
    recomputing,
    rows,
    train_call,
)
from roundpipe import RoundPipeRunConfig


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def layers_with(model: Any, name: str) -> list[int]:
    """The layers that hold a parameter, by its name in the model."""
    wanted = dict(model.named_parameters())[name]
    return [i for i, layer in enumerate(model.model) if any(param is wanted for param in layer.parameters())]


# Parameters read by the code between blocks.


class Scaled(Toy):
    """A parameter of the model itself in the middle, others at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.end = (nn.Parameter(torch.rand(WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * self.start
        for i, block in enumerate(self.blocks):
            h = block(h) * self.middle if i == 1 else block(h)
        return self.head(h) * self.end


def test_parameters_of_the_model_itself_are_where_its_code_reads_them(models: SplitModels, num_devices: int) -> None:
    model = check_split(models, seeded(Scaled), {"x": rows()}, num_devices)
    assert [layers_with(model, name) for name in ("start", "middle", "end")] == [[0], [3], [5]]


READERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "no_grad": lambda param: param.detach().clone(),
    "data": lambda param: param.data,
    "number": lambda param: float(param.detach().mean()),
    "integer": lambda param: (param.detach() > 0.5).long().sum(),
}


class ReadInSecret(Toy):
    """Reads a parameter without autograd."""

    read: Callable[[nn.Parameter], Any]

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            with torch.no_grad():
                factor = type(self).read(self.scale)
            h = h * factor
        return self.head(h)


@pytest.mark.parametrize("how", READERS)
def test_a_parameter_read_without_autograd(models: SplitModels, how: str) -> None:
    kind = type("ReadInSecret", (ReadInSecret,), {"read": staticmethod(READERS[how])})
    model = check_split(models, seeded(kind), {"x": rows()}, 2)
    assert model.scale.grad is None


class Tied(Toy):
    """The epilogue multiplies with the embedding's own weight."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.linear(self.head(h), self.embed.weight)


def test_the_epilogue_reads_the_weight_of_a_module_of_the_prologue(models: SplitModels, num_devices: int) -> None:
    model = check_split(models, seeded(Tied), {"x": rows()}, num_devices, shared=["embed.weight"])
    assert layers_with(model, "embed.weight") == [0, 4]


class TiedModules(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_two_modules_with_one_weight(models: SplitModels) -> None:
    model = check_split(models, seeded(TiedModules), {"x": rows()}, 2, shared=["embed.weight"])
    assert model.head.weight is model.embed.weight


class BlockWeightRead(Toy):
    """The code after the blocks reads a weight that lies inside one of them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h) @ self.blocks[0].linear.weight


def test_a_weight_inside_a_block_read_by_the_code_outside(models: SplitModels) -> None:
    check_split(models, seeded(BlockWeightRead), {"x": rows()}, 3, shared=["blocks.0.linear.weight"])


class SharedBetweenBlocks(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear = self.blocks[0].linear


def test_blocks_with_a_module_in_common(models: SplitModels) -> None:
    shared = ["blocks.0.linear.weight", "blocks.0.linear.bias"]
    check_split(models, seeded(SharedBetweenBlocks), {"x": rows()}, 2, shared=shared)


class Asking(Toy):
    """Reads dtype, device, shape and settings of modules whose weights are in other layers."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        h = self.embed(x.to(dtype))
        for block in self.blocks:
            assert next(block.parameters()).dtype is dtype
            assert block.linear.weight.shape == (WIDTH, WIDTH)
            h = block(h.to(block.linear.weight.device)) * block.linear.in_features
        assert {param.dtype for param in self.blocks.parameters()} == {dtype}
        assert self.embed.weight.dtype is dtype
        return self.head(h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_code_that_asks_modules_for_dtype_shape_and_settings(models: SplitModels, dtype: torch.dtype) -> None:
    model = check_split(models, seeded(Asking).to(dtype), {"x": rows()}, 2)
    assert model.num_layers == 7


class Unused(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.rand(2))


def test_a_parameter_that_no_code_reads_is_kept_and_has_no_gradient(models: SplitModels) -> None:
    model = check_split(models, seeded(Unused), {"x": rows()}, 3)
    assert model.never.weight.grad is None
    assert {"never.weight", "nothing"} <= set(dict(model.optim_named_parameters()))


# Frozen.


FROZEN: dict[str, Callable[[Any], Any]] = {
    "all but one block": lambda toy: [toy.embed, toy.head, toy.blocks[0], toy.blocks[2]],
    "the beginning": lambda toy: [toy.embed, toy.blocks[0]],
    "everything but the head": lambda toy: [toy.embed, toy.blocks],
    "everything but the embedding": lambda toy: [toy.head, toy.blocks],
    "linears of blocks": lambda toy: [block.linear for block in toy.blocks],
}


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters_stay_without_gradient(models: SplitModels, which: str) -> None:
    module = seeded(Scaled)
    for part in FROZEN[which](module):
        part.requires_grad_(False)
    model = check_split(models, module, {"x": rows()}, 2)
    trained = {name for name, param in model.named_parameters() if param.grad is not None}
    assert trained == {name for name, param in module.named_parameters() if param.requires_grad}


def test_a_parameter_frozen_after_wrapping_gets_no_more_gradient(models: SplitModels) -> None:
    module = seeded(Scaled)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, 2)
    for side in (model, reference):
        side.blocks[1].requires_grad_(False)
        side.middle.requires_grad_(False)
    expected = plain_call(reference, {"x": rows()})
    loss, _ = train_call(model, {"x": rows()})
    assert_same(loss, expected.loss)
    assert_same_training(model, reference)


def test_a_parameter_frozen_at_wrapping_and_trained_later_gets_its_gradient(models: SplitModels) -> None:
    module = seeded(Tied)
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, 2)
    for side in (model, reference):
        side.requires_grad_(True)
    expected = plain_call(reference, {"x": rows()})
    loss, _ = train_call(model, {"x": rows()}, config=recomputing(model, 3))
    assert_same(loss, expected.loss)
    assert_same_training(model, reference, ["embed.weight"])


# Buffers.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(self.linear(h))


def test_buffers_written_by_blocks_are_those_of_the_model(models: SplitModels, num_devices: int) -> None:
    module = seeded(lambda: Toy(block=Normed))
    model = check_split(models, module, {"x": rows(9)}, num_devices)
    assert int(model.blocks[0].norm.num_batches_tracked) == 9
    assert int(module.blocks[0].norm.num_batches_tracked) == 0


def test_a_model_in_evaluation_reads_its_buffers(models: SplitModels) -> None:
    module = seeded(lambda: Toy(block=Normed))
    for _ in range(3):
        module(rows(8, seed=1) + 2.0)
    model = check_split(models, module.eval(), {"x": rows(9)}, 2)
    assert int(model.blocks[0].norm.num_batches_tracked) == 3


class WithBuffers(Toy):
    """The code between blocks reads a buffer of the model, and one inside a block."""

    def __init__(self) -> None:
        super().__init__(block=Normed)
        self.register_buffer("shift", torch.arange(WIDTH) / 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.shift
        for block in self.blocks:
            h = block(h) * (1 + self.shift)
        return self.head(h)


def test_buffers_read_by_the_code_between_blocks(models: SplitModels, num_devices: int) -> None:
    check_split(models, seeded(WithBuffers), {"x": rows(9)}, num_devices)


def test_a_buffer_changed_by_the_user_reaches_every_layer(models: SplitModels) -> None:
    module = seeded(WithBuffers)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, 3)
    for value in (0.5, -1.0):
        for side in (model, reference):
            side.shift.fill_(value)
        expected = plain_call(reference, {"x": rows()})
        loss, _ = train_call(model, {"x": rows()}, config=recomputing(model, 3))
        assert_same(loss, expected.loss)
    assert_same_training(model, reference)


class Counting(Toy):
    """Its own code writes a buffer and an attribute, once in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean += x.mean(0)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h) + self.mean


def test_a_buffer_that_the_models_own_code_writes_is_refused(models: SplitModels) -> None:
    """The code runs again for each segment, so it would add to the buffer several times."""
    module = seeded(Counting)
    with pytest.raises(NotImplementedError, match="not split into layers"):
        models.wrap(module, {"x": rows()})
    assert module.mean.count_nonzero() == 0


def test_wrapping_leaves_weights_and_buffers_as_they_were(models: SplitModels) -> None:
    module = seeded(lambda: Toy(block=Normed))
    before = copy.deepcopy(module.state_dict())
    model = models.wrap(module, {"x": rows()})
    assert_same(dict(model.state_dict()), dict(before))
    assert all(param.grad is None for param in model.parameters())


def test_inference_without_grad_is_the_plain_models(models: SplitModels) -> None:
    module = seeded(WithBuffers).eval()
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, 2)
    with torch.no_grad():
        output = model(x=rows(7), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        assert_same(output, reference(x=rows(7)))
    assert not output.requires_grad


class InputTwice(Toy):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        for block in self.blocks:
            h = block(h)
        return self.head(h) * x


def test_gradients_flow_to_inputs(models: SplitModels) -> None:
    module = seeded(InputTwice)
    model = models.wrap(copy.deepcopy(module), {"x": rows()}, 3)
    x = rows().requires_grad_()
    train_call(model, {"x": x}, config=recomputing(model, 3))
    pieces = [piece.detach().requires_grad_() for piece in x.tensor_split(3)]
    for piece in pieces:
        own_loss(module(piece), None).backward()
    assert_same(x.grad, torch.cat([piece.grad for piece in pieces if piece.grad is not None]))
    assert_same_training(model, module)


def test_a_block_that_is_used_outside_its_list_too(models: SplitModels) -> None:
    class Aliased(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.blocks[0]

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(self.embed(x))
            for block in self.blocks:
                h = block(h)
            return self.head(h)

    shared = [f"first.{name}" for name in dict(Block().named_parameters())]
    shared += [name.replace("first", "blocks.0") for name in shared]
    check_split(models, seeded(Aliased), {"x": rows()}, 2, shared=shared)


class Meter(nn.Module):
    """A module with a buffer and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls = self.num_calls + 1
        return x * 1.5


class Metered(Toy):
    """Runs such a module in its prologue, and has code between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        h = self.meter(self.embed(x))
        for block in self.blocks:
            h = block(h * 0.9)
        return self.head(h)


def test_a_module_with_state_and_without_weights_runs_in_one_layer_alone(models: SplitModels) -> None:
    """Its buffer counts microbatches, as with the plain model."""
    model = check_split(models, seeded(Metered), {"x": rows()}, 2)
    holding = [layer for layer in model.model if any("num_calls" in name for name, _ in layer.named_buffers())]
    assert len(holding) == 1
    before = float(model.meter.num_calls)
    with torch.no_grad():
        model(x=rows(), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
    model.synchronize()
    assert float(model.meter.num_calls) == before + 2
