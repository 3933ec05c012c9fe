"""Models with their own code between blocks are split into layers that compute exactly the same.

Loss, outputs, gradients of every parameter and buffers are those of the plain model over the same microbatches, to the
last bit, whether layers are recomputed or not. What blocks hand to each other is in test_splitting_values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_split import WIDTH, Block, SplitModels, Toy, check_split, layer_kinds, rows


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


# Models whose code between blocks needs no layer.


def test_blocks_in_a_row_become_layers_between_a_prologue_and_an_epilogue(
    models: SplitModels, num_devices: int
) -> None:
    model = check_split(models, seeded(Toy), {"x": rows()}, num_devices)
    assert layer_kinds(model) == ["Glue", "Block", "Block", "Block", "Glue"]


class WithLoss(Toy):
    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


def test_a_loss_the_model_computes_itself_is_trained_on(models: SplitModels, num_devices: int) -> None:
    check_split(models, seeded(WithLoss), {"x": rows(), "target": rows(seed=8)}, num_devices)


def test_a_loss_can_come_from_loss_fn_and_a_label(models: SplitModels) -> None:
    def loss_fn(output: Tensor, label: Tensor | None) -> Tensor:
        return nn.functional.mse_loss(output, torch.ones_like(output) if label is None else label)

    check_split(models, seeded(Toy), {"x": rows()}, 2, loss_fn=loss_fn, label=rows(seed=9))


class Masked(Toy):
    """One mask for all blocks, made in the prologue."""

    class Block(Block):
        def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
            assert bias is not None
            assert not bias.requires_grad, "a mask that requires grad forces attention off its fast path"
            return super().forward(h, bias)

    def __init__(self) -> None:
        super().__init__(block=self.Block)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.where(x > 0, 0.0, -1.0)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, bias=bias)
        return self.head(h)


def test_a_float_mask_still_does_not_require_grad(models: SplitModels) -> None:
    model = check_split(models, seeded(Masked), {"x": rows()}, 3)
    assert layer_kinds(model) == ["Glue", "Block", "Block", "Block", "Glue"]


class InOrder(Toy):
    """Calls its blocks in the order it is told."""

    order = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number in self.order:
            h = self.blocks[number](h)
        return self.head(h)


class Repeated(InOrder):
    order = (0, 1, 0, 0, 2, 1)


def test_a_block_called_several_times_is_a_layer_each_time(models: SplitModels, num_devices: int) -> None:
    shared = [f"blocks.{i}.{name}" for i in (0, 1) for name in dict(Block().named_parameters())]
    model = check_split(models, seeded(Repeated), {"x": rows()}, num_devices, shared=shared)
    assert layer_kinds(model) == ["Glue", *["Block"] * 6, "Glue"]
    assert model.model[1].block is model.model[3].block is model.blocks[0]


class Partly(InOrder):
    order = (2, 0)


def test_a_block_that_is_never_called_has_no_gradient_and_stays(models: SplitModels) -> None:
    model = check_split(models, seeded(Partly), {"x": rows()}, 2)
    assert all(param.grad is None for param in model.blocks[1].parameters())
    assert "blocks.1.linear.weight" in dict(model.optim_named_parameters())


class NestedLists(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for stage in self.blocks:
            for block in stage:
                h = block(h)
        return self.head(h)


def test_blocks_of_a_list_in_a_list_are_layers(models: SplitModels) -> None:
    model = check_split(models, seeded(NestedLists), {"x": rows()}, 3)
    assert layer_kinds(model) == ["Glue", "Block", "Block", "Block", "Glue"]


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        for block in self.inner:
            h = block(h) * self.scale
        return h


def test_a_block_that_contains_a_list_stays_whole(models: SplitModels) -> None:
    model = check_split(models, seeded(lambda: Toy(block=Stage)), {"x": rows()}, 2)
    assert layer_kinds(model) == ["Glue", "Block", "Block", "Block", "Glue"]


class EncoderDecoder(nn.Module):
    class Cross(Block):
        def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
            assert bias is not None
            return super().forward(h, bias.mean(-1, keepdim=True))

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Toy(2), Toy(2, self.Cross)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, x: Tensor) -> Tensor:
        memory = self.encoder(source)
        h = self.decoder.embed(x)
        for block in self.decoder.blocks:
            h = block(h, bias=memory)
        return self.head(h)


def test_two_lists_follow_each_other_and_the_second_reads_the_firsts_result(
    models: SplitModels, num_devices: int
) -> None:
    model = check_split(models, seeded(EncoderDecoder), {"source": rows(seed=2), "x": rows()}, num_devices)
    assert layer_kinds(model) == ["Glue", "Block", "Block", "Glue", "Block", "Block", "Glue"]


# Models whose code between blocks needs a layer.


class Projected(Toy):
    """Each block gets a projection of the hidden state; the projector begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.projector.weight)
        nn.init.zeros_(self.projector.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, bias=self.projector(h))
        return self.head(h)


def test_a_dependence_through_a_projector_of_zeros_is_found(models: SplitModels, num_devices: int) -> None:
    module = seeded(Projected)
    model = check_split(models, module, {"x": rows()}, num_devices, shared=["projector.weight", "projector.bias"])
    grad = model.projector.weight.grad
    assert grad is not None
    assert grad.abs().min() > 0


class ZeroGated(Toy):
    """A single projector with zeros, so that its gradient is that of one layer."""

    def __init__(self) -> None:
        super().__init__(2)
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.embed(x))
        return self.head(self.blocks[1](torch.ones_like(x), bias=first * self.gate))


def test_a_parameter_of_zeros_between_blocks_gets_its_gradient(models: SplitModels) -> None:
    model = check_split(models, seeded(ZeroGated), {"x": rows()}, 3)
    assert model.gate.grad is not None
    assert model.gate.grad.abs().min() > 0


class InPlace(Toy):
    """Scales and shifts the hidden state in place, in each kind of segment."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h += 1.0
        for i, block in enumerate(self.blocks):
            h = block(h)
            h *= 0.5 + i
        h.add_(1.0)
        return self.head(h)


def test_in_place_glue_is_followed(models: SplitModels, num_devices: int) -> None:
    check_split(models, seeded(InPlace), {"x": rows()}, num_devices)


class InPlaceOnOutputs(Toy):
    """Changes outputs of its last blocks in place; none of them is an argument of another block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.embed(x))
        found = []
        for block in list(self.blocks)[1:]:
            found.append(block(h))
            found[-1][..., :2] += x[..., :2]
        return self.head(torch.stack(found).sum(0))


def test_outputs_of_blocks_may_be_changed_in_place(models: SplitModels, num_devices: int) -> None:
    """A replay has placeholders for outputs that it does not need. Its code writes into them all the same."""
    check_split(models, seeded(InPlaceOnOutputs), {"x": rows()}, num_devices)


class InPlaceOnInput(Toy):
    """Writes into its input tensor, before and after its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            x *= 2.0
            h = h + x
        return self.head(h)


def test_glue_that_writes_into_the_models_input_is_refused(models: SplitModels) -> None:
    """Its code runs again for each segment, and would write each time."""
    x = rows()
    with pytest.raises(NotImplementedError, match="other values"):
        models.wrap(seeded(InPlaceOnInput), {"x": x})
    assert torch.equal(x, rows()), "the example is the user's"


class InPlaceOnce(Toy):
    """Writes the same values into its input each time."""

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(min=0.0)
        h = self.embed(x)
        for block in self.blocks:
            h = block(h) + x
        return self.head(h)


def test_writing_the_same_values_into_the_input_each_time_is_allowed(models: SplitModels) -> None:
    check_split(models, seeded(InPlaceOnce), {"x": rows()}, 2)


class LaterInPlace(Toy):
    """Changes a tensor after a block got it: the block must see the old value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        bias = torch.zeros_like(x)
        for block in self.blocks:
            h = block(h, bias=bias)
            bias += 1.0
        return self.head(h) + bias


def test_a_tensor_changed_between_two_calls_has_its_own_value_in_each(models: SplitModels) -> None:
    check_split(models, seeded(LaterInPlace), {"x": rows()}, 3)


class Collected(Toy):
    """The result is a weighted sum of all hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.embed(x)
        states = []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        mixed = self.head((torch.stack(states) * self.weights.view(-1, 1, 1)).sum(0))
        return {"loss": mixed.square().mean(), "states": tuple(states)}


def test_hidden_states_collected_between_blocks_reach_the_epilogue(models: SplitModels, num_devices: int) -> None:
    model = check_split(models, seeded(Collected), {"x": rows()}, num_devices)
    assert layer_kinds(model) == ["Glue", "Block", "Block", "Block", "Glue"]


class EmbeddingReadLater(Toy):
    """Adds the output of the prologue's module after every block and at the end."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.embed(x)
        h = start
        for block in self.blocks:
            h = block(h) + 0.1 * start
        return self.head(h) * start


def test_the_output_of_an_earlier_module_reaches_the_code_that_reads_it(models: SplitModels) -> None:
    shared = ["embed.weight", "embed.bias"]
    check_split(models, seeded(EmbeddingReadLater), {"x": rows()}, 2, shared=shared)


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_any_number_of_blocks(models: SplitModels, num_blocks: int) -> None:
    model = check_split(models, seeded(lambda: Toy(num_blocks)), {"x": rows()}, 3)
    assert model.num_layers == num_blocks + 2


class ConditionalOnTraining(Toy):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            if self.training:
                h = h * 2
        return self.head(h)


@pytest.mark.parametrize("training", [True, False])
def test_code_that_asks_for_the_training_mode(models: SplitModels, training: bool) -> None:
    check_split(models, seeded(ConditionalOnTraining).train(training), {"x": rows()}, 2)
