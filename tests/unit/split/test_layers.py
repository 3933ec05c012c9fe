"""LayerArrangement has a place for every plan, adds as few layers as possible, and holds every parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.split.layers import GLUE, BlockLayer, Element, GlueLayer, LayerArrangement, PlacedPlan, elements_of
from roundpipe.split.plan import CallOutline, SplitPlan, TapCall
from roundpipe.split.values import Outline

WIDTH = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, WIDTH)


class NoBook:
    def find(self, *args: Any) -> PlacedPlan:
        raise AssertionError("nobody runs the layers here")


OUTLINE = CallOutline(
    {"ret": Outline(torch.Size([2, WIDTH]), torch.float32), "side": {}}, (None,), (0,), {}, False, False
)


def plan(
    numbers: Sequence[int], points: Sequence[int] = (), needs: dict[int, set[str]] | None = None, stubs: str = "head"
) -> SplitPlan:
    """A plan that calls these blocks, with points before the calls in `points`, before the first and after the last."""
    all_points = tuple(sorted({0, *points, len(numbers)}))
    own = {point: frozenset(names) for point, names in (needs or {}).items()}
    return SplitPlan(
        calls=tuple(f"blocks.{number}" for number in numbers),
        taps=(TapCall("embed", 0), TapCall(stubs, len(numbers))),
        outlines=(OUTLINE,) * len(numbers),
        points=all_points,
        reads={},
        needs={point: own.get(point, frozenset()) for point in all_points},
        copying=frozenset(),
        reasons={},
    )


def layout_of(model: nn.Module, *plans: SplitPlan) -> LayerArrangement:
    layout = LayerArrangement(model, NoBook())
    layout.build()
    for one in plans:
        layout.add(one)
    return layout


def row(layout: LayerArrangement) -> list[str]:
    """The layers as letters: G for code, digits for blocks."""
    blocks = {id(block): str(i) for i, block in enumerate(layout._model.blocks)}  # type: ignore[arg-type]
    return ["G" if isinstance(layer, GlueLayer) else blocks[id(layer.block)] for layer in layout.layers]


def in_order(layout: LayerArrangement, placed: PlacedPlan) -> list[tuple[str, int]]:
    """The elements of a plan, in the order of the layers they are placed on."""
    letters = row(layout)
    at = {**placed.points, **placed.calls}
    return [("G" if letters[i] == "G" else letters[i], at[i]) for i in sorted(at)]


def expected_order(one: SplitPlan) -> list[tuple[str, int]]:
    return [(element.path[-1:] or "G", element.number) for element in elements_of(one)]


def test_a_plan_is_a_row_of_points_and_calls() -> None:
    assert elements_of(plan([0, 1, 0], [2])) == [
        Element(GLUE, 0),
        Element("blocks.0", 0),
        Element("blocks.1", 1),
        Element(GLUE, 2),
        Element("blocks.0", 2),
        Element(GLUE, 3),
    ]


def test_before_any_plan_there_is_a_layer_for_every_block() -> None:
    layout = layout_of(Model())
    assert row(layout) == ["G", "0", "1", "2", "G"]
    assert [layer.layer_id for layer in layout.layers] == [0, 1, 2, 3, 4]


def test_blocks_that_a_plan_does_not_call_come_first() -> None:
    layout = layout_of(Model(4), plan([3, 1]))
    assert row(layout) == ["G", "0", "2", "3", "1", "G"]
    assert layout.placed[0].calls == {3: 0, 4: 1}


def test_layers_are_those_of_the_plan() -> None:
    one = plan([0, 0, 1, 2], [2])
    layout = layout_of(Model(), one)
    assert row(layout) == ["G", "0", "0", "G", "1", "2", "G"]
    assert in_order(layout, layout.placed[0]) == expected_order(one)
    blocks = [layer.block for layer in layout.layers if isinstance(layer, BlockLayer)]
    assert blocks[0] is blocks[1] is layout._model.blocks[0]  # type: ignore[index]


def test_a_plan_that_fits_changes_nothing() -> None:
    layout = layout_of(Model(), plan([0, 1, 2], [1, 2]))
    layers = list(layout.layers)
    for fitting in (plan([0, 1, 2], [1, 2]), plan([0, 1, 2]), plan([0, 1, 2], [2]), plan([0, 1, 2], [1])):
        assert layout.add(fitting) is False
        assert list(layout.layers) == layers
        assert in_order(layout, layout.placed[-1]) == expected_order(fitting)


def test_a_plan_of_fewer_calls_is_placed_on_the_same_layers() -> None:
    layout = layout_of(Model(), plan([0, 1, 2], [1, 2]))
    layers = list(layout.layers)
    for fitting in (plan([0, 2], [1]), plan([1]), plan([0, 1])):
        layout.add(fitting)
        assert list(layout.layers) == layers
        assert in_order(layout, layout.placed[-1]) == expected_order(fitting)


def test_a_plan_that_needs_other_weights_gets_another_tree() -> None:
    layout = layout_of(Model(), plan([0, 1, 2]))
    before = layout.layers
    assert layout.add(plan([0, 1, 2], needs={3: {"scale"}})) is True
    assert layout.layers is before
    first, second = (placed.trees[4] for placed in layout.placed)
    assert first != second
    assert layout.placed[0].trees[0] == layout.placed[1].trees[0]
    assert layout.add(plan([0, 1, 2], needs={3: {"scale"}})) is False


def test_a_plan_with_other_taps_gets_other_trees() -> None:
    layout = layout_of(Model(), plan([0, 1, 2]))
    assert layout.add(plan([0, 1, 2], stubs="embed")) is True
    assert layout.placed[0].trees[0] != layout.placed[1].trees[0]


def test_layers_are_added_only_where_a_plan_does_not_fit() -> None:
    layout = layout_of(Model(), plan([0, 1, 2]))
    assert layout.add(plan([0, 1, 2], [1])) is True
    assert row(layout) == ["G", "0", "G", "1", "2", "G"]
    assert layout.add(plan([0, 0, 1, 2])) is True
    assert len(row(layout)) == 7
    for number, one in enumerate((plan([0, 1, 2]), plan([0, 1, 2], [1]), plan([0, 0, 1, 2]))):
        assert in_order(layout, layout.placed[number]) == expected_order(one)


def shortest(rows: Sequence[Sequence[str]]) -> int:
    """The length of the shortest row that contains both rows, found by trying all rows."""
    letters = sorted({letter for one in rows for letter in one})

    def contains(long: Sequence[str], short: Sequence[str]) -> bool:
        rest = iter(long)
        return all(letter in rest for letter in short)

    for length in itertools.count(max(map(len, rows))):
        if any(all(contains(tried, one) for one in rows) for tried in itertools.product(letters, repeat=length)):
            return length
    raise AssertionError


@pytest.mark.parametrize("seed", range(12))
def test_as_few_layers_as_possible_are_added(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plans = []
    for _ in range(2):
        numbers = torch.randint(2, (int(torch.randint(1, 4, (1,), generator=generator)),), generator=generator).tolist()
        points = torch.randint(len(numbers) + 1, (1,), generator=generator).tolist()
        plans.append(plan(numbers, points))
    layout = layout_of(Model(2), *plans)
    rows = [[letter for letter, _ in expected_order(one)][1:-1] for one in plans]
    used = {path for one in plans for path in one.calls}
    assert len(layout.layers) == 2 + shortest(rows) + (2 - len(used))
    for placed, one in zip(layout.placed, plans, strict=True):
        assert in_order(layout, placed) == expected_order(one)
        assert placed.points[0] == 0
        assert placed.points[len(layout.layers) - 1] == one.num_calls


@pytest.mark.parametrize(
    "plans",
    [
        [],
        [plan([0, 1, 2])],
        [plan([1])],
        [plan([0, 1, 2], needs={0: {"embed.weight", "embed.bias"}, 3: {"head.weight"}})],
        [plan([0, 1, 2]), plan([0, 1, 2], [1], needs={1: {"scale"}})],
        [plan([0, 1, 2]), plan([0, 1, 2], needs={3: {"scale"}})],
    ],
)
def test_every_parameter_of_the_model_is_in_some_layer(plans: list[SplitPlan]) -> None:
    model = Model()
    layout = layout_of(model, *plans)
    held = {id(param) for layer in layout.layers for param in layer.parameters()}
    assert {id(param) for param in model.parameters()} <= held
    foreign = [p for layer in layout.layers for p in layer.parameters() if p not in set(model.parameters())]
    assert all(param.numel() == 0 for param in foreign), "and nothing else but empty ones"


def test_a_parameter_is_only_where_it_is_needed() -> None:
    model = Model()
    layout = layout_of(model, plan([0, 1, 2], needs={0: {"embed.weight", "embed.bias"}, 3: {"head.weight", "scale"}}))
    first, *_, last = [{id(param) for param in layer.parameters()} for layer in layout.layers]
    assert id(model.embed.weight) in first - last
    assert {id(model.head.weight), id(model.scale)} <= last - first
