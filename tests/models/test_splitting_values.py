"""Values passed between blocks and the code between them in a split model: containers, choices, weights.

Compared with the plain model as in test_splitting.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict
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
    plain_call,
    recomputing,
    rows,
    train_call,
)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


# Containers that blocks write into.


class Sharing(Block):
    """The first block writes keys and values for all later ones, every third block replaces them."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)
        self.number = 0

    def forward(self, h: Tensor, shared: dict[str, Any] | None = None) -> Tensor:  # type: ignore[override]
        assert shared is not None
        if self.number % 3 == 0:
            shared["keys"] = self.key(h)
            shared["layers"] = [*shared.get("layers", []), self.number]
        return super().forward(h, shared["keys"])


class SharedDict(Toy):
    def __init__(self) -> None:
        super().__init__(5, Sharing)
        for number, block in enumerate(self.blocks):
            block.number = number

    def forward(self, x: Tensor) -> dict[str, Any]:
        h, shared = self.embed(x), {}
        for block in self.blocks:
            h = block(h, shared=shared)
        return {"loss": (self.head(h) + shared["keys"]).square().mean(), "written": shared["layers"]}


def test_a_dict_passed_to_all_blocks_and_written_by_some(models: SplitModels, num_devices: int) -> None:
    model = check_split(models, seeded(SharedDict), {"x": rows()}, num_devices)
    grads = [block.key.weight.grad for block in model.blocks]
    assert [grad is None for grad in grads] == [False, True, True, False, True]


class Appending(Block):
    def forward(self, h: Tensor, seen: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
        assert seen is not None
        h = super().forward(h, seen[-1] if seen else None)
        seen.append(h.tanh())
        return h


class SharedList(Toy):
    def __init__(self) -> None:
        super().__init__(block=Appending)

    def forward(self, x: Tensor) -> Tensor:
        h, seen = self.embed(x), []
        for block in self.blocks:
            h = block(h, seen)
        assert len(seen) == len(self.blocks)
        return self.head(h) * torch.stack(seen).mean(0)


def test_a_list_that_every_block_appends_to(models: SplitModels, num_devices: int) -> None:
    check_split(models, seeded(SharedList), {"x": rows()}, num_devices)


class Nested(Block):
    """Writes into a dict inside a list inside a tuple."""

    def forward(self, h: Tensor, state: Any = None) -> Tensor:  # type: ignore[override]
        h = super().forward(h, state[0][0].get("last"))
        state[0][0]["last"] = h * 0.5
        return h


class NestedContainers(Toy):
    def __init__(self) -> None:
        super().__init__(block=Nested)

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.embed(x), ([{}],)
        for block in self.blocks:
            h = block(h, state)
        return self.head(state[0][0]["last"])


def test_a_dict_deep_inside_an_argument_is_followed(models: SplitModels) -> None:
    check_split(models, seeded(NestedContainers), {"x": rows()}, 3)


class ZeroSharing(Sharing):
    """Writes zeros at first, so values do not show which block reads them."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.key.weight)
        nn.init.zeros_(self.key.bias)

    def forward(self, h: Tensor, shared: Any = None) -> Tensor:  # type: ignore[override]
        if self.number % 3 == 0:
            shared["keys"] = self.key(h)
        return Block.forward(self, h, shared["keys"])


class SharedBy(SharedDict):
    """In a mapping of any kind."""

    make: Callable[[], Any] = dict

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ZeroSharing() for _ in range(4)])
        for number, block in enumerate(self.blocks):
            block.number = number

    def forward(self, x: Tensor) -> dict[str, Any]:
        h, shared = self.embed(x), type(self).make()
        shared["keys"] = torch.zeros_like(x)
        for block in self.blocks:
            h = block(h, shared=shared)
        return {"loss": self.head(h).square().mean()}


MAPPINGS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "UserDict": UserDict,
    "defaultdict": lambda: defaultdict(list),
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_blocks_may_share_any_kind_of_mapping_and_values_of_zero(models: SplitModels, kind: str) -> None:
    build = type("SharedBy", (SharedBy,), {"make": staticmethod(MAPPINGS[kind])})
    model = check_split(models, seeded(build), {"x": rows()}, 2)
    for number, block in enumerate(model.blocks):
        assert (block.key.weight.grad is not None) == (number % 3 == 0)


class TwoNames(Toy):
    """Passes one dict under two names; a block writes to one and reads from the other."""

    class Block(Block):
        def forward(self, h: Tensor, old: Any = None, new: Any = None) -> Tensor:  # type: ignore[override]
            new["h"] = h * 0.5
            return super().forward(h, old["h"])

    def __init__(self) -> None:
        super().__init__(block=self.Block)

    def forward(self, x: Tensor) -> Tensor:
        h, both = self.embed(x), {"h": torch.zeros_like(x)}
        for block in self.blocks:
            h = block(h, old=both, new=both)
        return self.head(h)


def test_a_dict_given_under_two_names_is_refused(models: SplitModels) -> None:
    """In a layer they would be two dicts."""
    with pytest.raises(NotImplementedError, match="other values"):
        models.wrap(seeded(TwoNames), {"x": rows()})


# What blocks return.


class Returning(Block):
    """A tuple of a dict, a number, None and an integer tensor."""

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Any:
        out = super().forward(h, bias)
        return {"h": out, "extra": out.sigmoid()}, 7, None, out.argmax(-1)


class Unpacking(Toy):
    def __init__(self) -> None:
        super().__init__(block=Returning)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None, int]:
        h, extra, number = self.embed(x), None, 0
        for block in self.blocks:
            values, seven, nothing, chosen = block(h, extra)
            assert nothing is None
            h, extra, number = values["h"], values["extra"], number + seven
        return self.head(h), chosen, None, number

    @staticmethod
    def loss(output: Any, label: Any) -> Tensor:
        return (output[0] * output[0].detach().cos()).sum() + output[1].sum() * 0.0 + output[3] * 0.0


def test_tuples_dicts_numbers_and_none_from_blocks(models: SplitModels, num_devices: int) -> None:
    model = check_split(models, seeded(Unpacking), {"x": rows()}, num_devices, loss_fn=Unpacking.loss)
    assert model.num_layers == 5


class WithAuxiliary(Block):
    """Returns a number beside its result, as a router's loss is."""

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Any:
        out = super().forward(h, bias)
        return out, out.square().mean()


class AddingUp(Toy):
    """The first of the numbers is added to in place."""

    def __init__(self) -> None:
        super().__init__(block=WithAuxiliary)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, total = self.embed(x), None
        for block in self.blocks:
            h, auxiliary = block(h)
            if total is None:
                total = auxiliary
            else:
                total += auxiliary
        return {"loss": self.head(h).square().mean() + 0.1 * total}


def test_numbers_from_blocks_may_be_added_up_in_place(models: SplitModels) -> None:
    check_split(models, seeded(AddingUp), {"x": rows()}, 2)


class Echoing(Block):
    """Returns its second input unchanged, as the same object."""

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Any:
        return super().forward(h, bias), bias


class Echo(Toy):
    def __init__(self) -> None:
        super().__init__(block=Echoing)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        bias = h.tanh()
        for block in self.blocks:
            h, bias = block(h, bias)
        return self.head(h + bias)


def test_a_block_may_return_an_input_unchanged(models: SplitModels, num_devices: int) -> None:
    check_split(models, seeded(Echo), {"x": rows()}, num_devices)


class Identity(Block):
    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        return h


def test_a_block_that_returns_its_input(models: SplitModels) -> None:
    module = seeded(Toy)
    module.blocks.insert(1, Identity())
    model = check_split(models, module, {"x": rows()}, 3)
    assert all(param.grad is None for param in model.blocks[1].parameters())


class Overwriting(Block):
    """Changes its input in place and returns it."""

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        mixed = self.linear(self.norm(h * 1.0))
        return h.add_(mixed.tanh())


class Kept(Toy):
    def __init__(self) -> None:
        super().__init__(block=Overwriting)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * 1.0
        for block in self.blocks:
            h = block(h * 1.0)
        return self.head(h)


def test_a_block_that_overwrites_its_input(models: SplitModels) -> None:
    check_split(models, seeded(Kept), {"x": rows()}, 2)


# Dependences that the autograd graph does not show.


class Sorting(Toy):
    """Each block works on the columns in an order that the block before it has chosen."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        order = torch.arange(WIDTH).expand(x.shape[0], -1)
        for block in self.blocks:
            out = block(h, bias=order.to(h.dtype))
            order = out.topk(WIDTH).indices
            h = torch.ones_like(h) * 0.5
        return self.head(out)


class ChoosingOne(Toy):
    """Passes a block the index of the largest of two columns, which random values give correctly half of the time."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        bias = torch.zeros_like(x)
        for block in self.blocks:
            out = block(x, bias=bias)
            bias = (out[:, :2].argmax(-1, keepdim=True) * torch.ones_like(x)).detach()
        return self.head(out) + h


class BranchingOnSign(Toy):
    """A number, not a tensor, that depends on what a block returned."""

    class Block(Block):
        def forward(self, h: Tensor, sign: int = 1) -> Tensor:  # type: ignore[override]
            return super().forward(h) * sign

    def __init__(self) -> None:
        super().__init__(block=self.Block)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            out = block(h, sign=1)
            h = block(h, sign=1 if float(out.sum()) > 0 else -1)
        return self.head(h)


CHOICES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "top-k": (Sorting, False),
    "argmax of two": (ChoosingOne, False),
    "sign as a number": (BranchingOnSign, True),
}


@pytest.mark.parametrize("kind", CHOICES)
def test_integers_computed_from_a_blocks_output_are_computed_for_every_batch(models: SplitModels, kind: str) -> None:
    """For any random numbers and any batch in calibration."""
    build, shares_blocks = CHOICES[kind]
    module = seeded(build)
    names = [name for name, _ in module.named_parameters() if name.startswith("blocks")] if shares_blocks else []
    for seed in range(6):
        torch.manual_seed(100 + seed)
        reference = copy.deepcopy(module)
        model = models.wrap(copy.deepcopy(module), {"x": rows(2, seed=seed)}, 2)
        for other in range(3):
            inputs = {"x": rows(seed=50 + 10 * seed + other)}
            expected = plain_call(reference, inputs)
            loss, outputs = train_call(model, inputs)
            assert_same(loss, expected.loss, f"loss after calibration {seed}")
            assert_same(outputs, expected.outputs, "outputs")
        assert_same_training(model, reference, names)


class LateChoice(Toy):
    """The epilogue chooses one of two hidden states by their sums; no gradient flows through the choice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        states = []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        is_larger = bool(states[0].detach().sum() > 0)
        return self.head(states[-1]) * (2.0 if is_larger else 1.0)


def test_a_choice_in_the_epilogue_uses_the_values_of_an_early_hidden_state(models: SplitModels) -> None:
    module = seeded(LateChoice)
    for seed in range(6):
        torch.manual_seed(200 + seed)
        reference = copy.deepcopy(module)
        model = models.wrap(copy.deepcopy(module), {"x": rows(2, seed=seed)}, 2)
        for other in range(3):
            inputs = {"x": rows(seed=50 + 10 * seed + other)}
            expected = plain_call(reference, inputs)
            loss, _ = train_call(model, inputs)
            assert_same(loss, expected.loss, f"loss after calibration {seed}")
        assert_same_training(model, reference)


# Random numbers of the process are in test_splitting_random.


def test_every_plan_is_used_with_all_layers_recomputed(models: SplitModels) -> None:
    """So that the comparisons above are about recomputation too."""
    model = models.wrap(seeded(Toy), {"x": rows()}, 2)
    model.forward_backward((), {"x": rows()}, None, lambda out, _: out.sum(), run_config=recomputing(model, 2))
    labels = {span.label for span in model.timeline().spans}
    assert len([label for label in labels if label.startswith("B")]) == model.num_layers - 1
