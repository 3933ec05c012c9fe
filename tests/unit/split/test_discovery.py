"""Discovery finds the blocks of a model, and the taps between them, from one recorded forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelSplitError
from roundpipe.split.discovery import ModuleEvent, block_paths, discover, record_events

WIDTH = 4
X = torch.ones(2, WIDTH)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, :WIDTH]


class Model(nn.Module):
    """Calls a function that the test gives it as its forward."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def blocks(num: int = 2) -> nn.ModuleList:
    return nn.ModuleList([Block() for _ in range(num)])


def through(modules: Any, x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def found(model: nn.Module) -> tuple[list[str], list[tuple[str, int]]]:
    events, _ = record_events(model, lambda: model(X))
    discovery = discover(model, events)
    return list(discovery.calls), [(tap.path, tap.segment) for tap in discovery.taps]


# Recording.


def test_the_start_and_end_of_each_forward_are_recorded_and_the_result_is_returned() -> None:
    model = Model(lambda self, x: self.a(x) + 1, a=Block())
    events, value = record_events(model, lambda: model(X))
    assert events == [
        *(ModuleEvent("", True), ModuleEvent("a", True), ModuleEvent("a.linear", True)),
        *(ModuleEvent("a.linear", False), ModuleEvent("a", False), ModuleEvent("", False)),
    ]
    assert torch.equal(value, model(X))


def test_a_direct_call_of_forward_is_recorded_and_hooks_still_run() -> None:
    model = Model(lambda self, x: self.a.forward(x), a=Block())
    seen: list[str] = []
    model.register_forward_hook(lambda *args: seen.append("hook"))
    events, _ = record_events(model, lambda: model(X))
    assert [event.path for event in events if event.enters] == ["", "a", "a.linear"]
    assert seen == ["hook"]


@pytest.mark.parametrize("raises", [False, True])
def test_recording_leaves_the_model_unchanged(raises: bool) -> None:
    model = Model(lambda self, x: self.a(x) / (1 // (not raises)), a=Block())
    own = model.a.forward
    model.a.forward = own
    if raises:
        with pytest.raises(ZeroDivisionError):
            record_events(model, lambda: model(X))
    else:
        record_events(model, lambda: model(X))
    assert model.a.__dict__["forward"] is own
    assert "forward" not in model.__dict__
    assert "forward" not in model.a.linear.__dict__


# Blocks.


def test_calls_of_blocks_in_their_order_and_taps_by_segment() -> None:
    model = Model(
        lambda self, x: self.head(self.norm(self.blocks[0](self.norm(self.blocks[1](self.embed(x)))))),
        embed=nn.Linear(WIDTH, WIDTH),
        blocks=blocks(),
        norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, WIDTH),
    )
    assert found(model) == (
        ["blocks.1", "blocks.0"],
        [("embed", 0), ("norm", 1), ("norm", 2), ("head", 2)],
    )


def test_a_block_called_twice_is_two_calls() -> None:
    model = Model(lambda self, x: through([*self.blocks, *self.blocks], x), blocks=blocks())
    assert found(model)[0] == ["blocks.0", "blocks.1", "blocks.0", "blocks.1"]


def test_a_block_under_two_names_has_one_path() -> None:
    model = Model(lambda self, x: through([self.first, *self.blocks], x), blocks=blocks())
    model.first = model.blocks[0]
    calls = found(model)[0]
    assert len(calls) == 3
    assert calls[0] == calls[1] == "blocks.0"


def test_lists_inside_a_block_belong_to_it() -> None:
    inner = [Model(lambda self, x: through(self.experts, x), experts=blocks()) for _ in range(2)]
    model = Model(lambda self, x: through(self.blocks, x), blocks=nn.ModuleList(inner))
    assert found(model) == (["blocks.0", "blocks.1"], [])


def test_a_list_of_lists_is_opened() -> None:
    model = Model(
        lambda self, x: through([block for stage in self.stages for block in stage], x),
        stages=nn.ModuleList([blocks(2), blocks(1)]),
    )
    assert found(model)[0] == ["stages.0.0", "stages.0.1", "stages.1.0"]


def test_dicts_of_modules_and_sequentials_of_one_kind_are_lists_too() -> None:
    model = Model(
        lambda self, x: through([*self.named.values(), *self.row], x),
        named=nn.ModuleDict({"a": Block(), "b": Block()}),
        row=nn.Sequential(Block(), Block()),
    )
    assert found(model)[0] == ["named.a", "named.b", "row.0", "row.1"]


def test_a_sequential_of_different_modules_is_a_tap() -> None:
    model = Model(
        lambda self, x: self.head(through(self.blocks, x)),
        blocks=blocks(),
        head=nn.Sequential(Block(), Model(lambda self, x: self.a(x), a=nn.Linear(WIDTH, WIDTH))),
    )
    assert found(model) == (["blocks.0", "blocks.1"], [("head", 2)])


def test_lists_of_single_operators_or_of_few_parameters_give_no_blocks() -> None:
    model = Model(
        lambda self, x: through([*self.linears, *self.blocks, *self.small], x),
        linears=nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]),
        blocks=nn.ModuleList([Block(1000), Block(1000)]),
        small=blocks(),
    )
    assert found(model) == (
        ["blocks.0", "blocks.1"],
        [("linears.0", 0), ("linears.1", 0), ("small.0", 2), ("small.1", 2)],
    )


def test_blocks_that_are_not_called_do_not_count() -> None:
    model = Model(lambda self, x: self.blocks[1](x), blocks=blocks(3), never=nn.ModuleList([Block(5000)]))
    assert found(model) == (["blocks.1"], [])
    assert block_paths(model) == {"never.0"}, "without a run the largest lists are"


@pytest.mark.parametrize(
    "model",
    [
        Model(lambda self, x: self.a(x), a=nn.Linear(WIDTH, WIDTH)),
        Model(lambda self, x: self.a(x), a=nn.Linear(WIDTH, WIDTH), blocks=blocks()),
    ],
    ids=["no list", "never called"],
)
def test_without_a_list_that_is_called_there_is_nothing_to_split(model: nn.Module) -> None:
    with pytest.raises(ModelSplitError, match="no repeated list of modules that its forward calls"):
        found(model)


# Taps.


def test_a_module_that_calls_blocks_is_no_tap_but_other_modules_it_calls_are() -> None:
    inner = Model(
        lambda self, x: self.norm(through(self.blocks, self.embed(x))),
        embed=nn.Linear(WIDTH, WIDTH),
        blocks=blocks(),
        norm=nn.LayerNorm(WIDTH),
    )
    model = Model(lambda self, x: self.head(self.inner(x)), inner=inner, head=nn.Linear(WIDTH, WIDTH))
    assert found(model) == (
        ["inner.blocks.0", "inner.blocks.1"],
        [("inner.embed", 0), ("inner.norm", 2), ("head", 2)],
    )


def test_the_outermost_module_that_calls_no_block_is_the_tap() -> None:
    outer = Model(lambda self, x: self.a(self.b(x)), a=Block(), b=Block())
    model = Model(lambda self, x: through(self.blocks, self.outer(x)), outer=outer, blocks=blocks())
    assert found(model)[1] == [("outer", 0)]


def test_a_module_whose_part_is_also_called_separately_is_opened() -> None:
    """The parts are the taps, because stubs cannot be nested."""
    outer = Model(lambda self, x: self.a(x), a=nn.Linear(WIDTH, WIDTH))
    model = Model(lambda self, x: self.outer.a(through(self.blocks, self.outer(x))), outer=outer, blocks=blocks())
    assert found(model)[1] == [("outer.a", 0), ("outer.a", 2)]


def test_what_runs_inside_a_block_is_no_tap() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    parts = [Model(lambda self, x: self.shared(self.own(x)), own=nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    for part in parts:
        part.shared = shared
    model = Model(lambda self, x: through(self.blocks, x), blocks=nn.ModuleList(parts))
    assert found(model) == (["blocks.0", "blocks.1"], [])
