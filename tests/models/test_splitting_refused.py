"""Models that cannot be split into layers are refused with the reason, and left as they were."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from helpers_parity import assert_same
from helpers_split import WIDTH, Block, Inputs, SplitModels, Toy, own_loss, rows
from roundpipe import AutoRoundPipe, wrap_model_to_roundpipe
from roundpipe.store.adopt import refuse_owned


class Inner(nn.Module):
    """A toy inside another module, as a language model is inside one with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy()
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.toy(x))


def with_forward_from_a_container() -> nn.Module:
    """A forward that finds the modules of the original where a copy cannot exchange them."""
    model = Toy()
    held = [model.forward]
    model.forward = lambda x: held[0](x)
    return model


class Dropping(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.1


class Cell:
    """A mutable object of an unknown class."""

    def __init__(self) -> None:
        self.held: Any = None


class Writing(Block):
    def forward(self, h: Tensor, cell: Cell | None = None) -> Tensor:  # type: ignore[override]
        assert cell is not None
        out = super().forward(h, cell.held)
        cell.held = out.tanh()
        return out


class Opaque(Toy):
    def __init__(self) -> None:
        super().__init__(block=Writing)

    def forward(self, x: Tensor) -> Tensor:
        h, cell = self.embed(x), Cell()
        for block in self.blocks:
            h = block(h, cell)
        return self.head(h)


class Memorising(Block):
    """Keeps state in a dict that all blocks share, not in arguments."""

    memory: ClassVar[dict[str, Tensor]] = {}

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        out = super().forward(h, self.memory.get("last"))
        self.memory["last"] = out.detach().tanh()
        return out


class Bypassing(Toy):
    """Calls blocks from a nested attribute, not from its module tree."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = {"blocks": [[*self.blocks]]}

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.secret["blocks"][0]:
            h = block(h)
        return self.head(h)


class NoList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class NoBlocks(nn.Module):
    """A list of modules without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class NeverCalled(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


class Unrepeatable(Toy):
    """Takes another random path each time, from a generator that cannot be restored."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        h = self.embed(x) * type(self).calls
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Restructuring(Toy):
    """Replaces a module at its first call; the parameters then have other names."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.head, nn.Sequential):
            self.head = nn.Sequential(self.head)
        return super().forward(x)


class Observing(nn.Module):
    """A linear map with a buffer that holds the largest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        result: Tensor = self.linear(x)
        return result


class ObservingTied(Toy):
    """The first and the last layer share a weight, and the module it is in writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Observing()  # type: ignore[assignment]
        self.head.weight = self.embed.linear.weight


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a forward that holds the original's modules in a container": (
        with_forward_from_a_container,
        "forward of its Toy was replaced on the instance by a function that calls modules which it holds",
    ),
    "layerdrop": (Dropping, r"the model drops layers at random \(layerdrop=0.1\); set it to 0"),
    "an object of an unknown class": (Opaque, "blocks.0 receives a Cell object; only tensors, numbers, strings"),
    "state that blocks share in secret": (lambda: Toy(block=Memorising), "."),
    "blocks called past the tree": (Bypassing, "no repeated list of modules that its forward calls"),
    "no list": (NoList, "no repeated list of modules"),
    "a list of single operators": (NoBlocks, "no repeated list of modules .* an nn.Linear, is no block"),
    "a list that is never called": (NeverCalled, "no repeated list of modules that its forward calls"),
    "a forward that does not repeat itself": (Unrepeatable, "other (values|results)"),
    "a buffer that several layers would write": (ObservingTied, "writes to embed.largest, a buffer that several"),
    "a forward that exchanges its modules": (Restructuring, "exchanges its own modules and their parameters"),
}


@pytest.fixture(autouse=True)
def _no_memory() -> None:
    Memorising.memory.clear()
    Unrepeatable.calls = 0


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_cannot_be_split_are_refused_with_the_reason(why: str) -> None:
    build, reason = REFUSED[why]
    torch.manual_seed(3)
    module = build()
    before, modules = copy.deepcopy(module.state_dict()), list(module.modules())
    with pytest.raises(NotImplementedError, match=reason) as raised:
        wrap_model_to_roundpipe(module, use_sequential_preset=True, example_inputs={"x": rows()}, devices=["cpu"])
    assert f"no preset for {type(module).__name__}, and it is not split into layers" in str(raised.value)
    assert_same(dict(module.state_dict()), dict(before))
    assert list(module.modules()) == modules
    refuse_owned(module)


@pytest.mark.parametrize("why", ["layerdrop", "no list"])
def test_without_insisting_a_refused_model_is_wrapped_part_by_part(
    models: SplitModels, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    build, _ = REFUSED[why]
    torch.manual_seed(3)
    module = build()
    reference = copy.deepcopy(module)
    inputs: Inputs = {"x": rows()}
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        model = models.keep(wrap_model_to_roundpipe(module, example_inputs=inputs, devices=["cpu"] * 2))
    assert isinstance(model, AutoRoundPipe)
    assert "is wrapped part by part" in caplog.text
    output, expected = model(**inputs), reference(**inputs)
    torch.testing.assert_close(output, expected)
    own_loss(output, None).backward()
    own_loss(expected, None).backward()
    model.synchronize()
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, msg=name)


def test_layerdrop_does_not_matter_in_evaluation(models: SplitModels) -> None:
    torch.manual_seed(3)
    module = Dropping().eval()
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()})
    torch.testing.assert_close(model(x=rows()), reference(rows()))


def test_a_hook_on_an_inner_module_is_allowed(models: SplitModels) -> None:
    """Hooks are part of the model, and run."""
    torch.manual_seed(3)
    module = Inner()
    for part in (module.toy, module.toy.blocks[1], module.toy.head, module):
        part.register_forward_hook(lambda module, args, output: output * 1.5)
        part.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    reference = copy.deepcopy(module)
    model = models.wrap(module, {"x": rows()}, 2)
    torch.testing.assert_close(model(x=rows()), reference(rows()))


def test_a_method_set_as_forward_on_its_own_instance_is_allowed(models: SplitModels) -> None:
    """It is bound to the module, so it can be bound to each copy."""
    torch.manual_seed(3)
    module = Inner()
    module.toy.forward = module.toy.forward
    reference = copy.deepcopy(Inner())
    reference.load_state_dict(module.state_dict())
    model = models.wrap(module, {"x": rows()}, 2)
    torch.testing.assert_close(model(x=rows()), reference(rows()))
