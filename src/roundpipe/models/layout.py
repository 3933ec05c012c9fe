"""Which layers a split model has: grown so that every plan made so far has its place among them.

A plan is a row of elements, points and calls in turn. Its first and last element are the first and last layer; between
them elements are laid onto layers in order, blocks onto layers of the same block. Where a new plan does not fit, layers
are added, as few as can be.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from roundpipe.models.calibration import element_tree
from roundpipe.models.discovery import block_paths
from roundpipe.models.split_layers import BlockLayer, GlueLayer, PlacedPlan, PlanBook
from roundpipe.models.split_plan import SplitPlan
from roundpipe.models.stub_tree import Ghosts, StubTree

GLUE = ""  # the path of a layer that is no block's


@dataclasses.dataclass(frozen=True)
class Element:
    path: str  # of the block; GLUE for a point
    number: int  # the call, or the point


def elements_of(plan: SplitPlan) -> list[Element]:
    row = []
    for k, path in enumerate(plan.calls):
        if k in plan.points:
            row.append(Element(GLUE, k))
        row.append(Element(path, k))
    return [*row, Element(GLUE, plan.num_calls)]


class Layout:
    """The layers, and the place of every plan among them."""

    def __init__(self, model: nn.Module, book: PlanBook) -> None:
        self._model, self._book = model, book
        self._ghosts = Ghosts(model)
        self._paths: list[str] = []
        self._plans: list[SplitPlan] = []
        self.placed: list[PlacedPlan] = []
        self.layers: list[nn.Module] = []

    def add(self, plan: SplitPlan) -> bool:
        """Give the plan a place, the last of `placed`; returns whether the layers are others than before."""
        self._plans.append(plan)
        trees = self._num_trees()
        if self._needed_paths() == self._paths:
            self.placed.append(self._place(plan))
            if self._num_trees() == trees:
                return False
            self.layers[-1].rest = self._rest()
            return True
        self.build()
        return True

    def build(self) -> None:
        """Make all layers anew, with a place for every plan."""
        self._paths = paths = self._needed_paths()
        by_path = dict(self._model.named_modules())
        self.layers = [
            BlockLayer(i, by_path[path]) if path else GlueLayer(i, self._book) for i, path in enumerate(paths)
        ]
        self.placed = [self._place(plan) for plan in self._plans]
        self.layers[-1].rest = self._rest()

    def _needed_paths(self) -> list[str]:
        """Of all layers: those of the plans, and before them blocks that no plan calls, which must live somewhere."""
        row: list[str] = []
        for plan in self._plans:
            row = _merged(row, [element.path for element in elements_of(plan)[1:-1]])
        blocks = block_paths(self._model)
        unused = [path for path, _ in self._model.named_modules() if path in blocks and not _is_among(path, row)]
        return [GLUE, *unused, *row, GLUE]

    def _rest(self) -> nn.Module:
        """Holds parameters that no layer has."""
        rest = nn.Module()
        self.layers[-1]._modules.pop("rest", None)
        used = {id(param) for layer in self.layers for param in layer.parameters()}
        unused = [param for param in (*self._model.parameters(), *self._ghosts.all()) if id(param) not in used]
        rest.__dict__["_parameters"] = {str(i): param for i, param in enumerate(unused)}
        return rest

    def _num_trees(self) -> int:
        return sum(len(layer.trees) for layer in self.layers if isinstance(layer, GlueLayer))

    def _place(self, plan: SplitPlan) -> PlacedPlan:
        points, calls, trees = {}, {}, {}
        row = elements_of(plan)
        layer_id = -1
        for element in row[:-1]:
            layer_id = self._paths.index(element.path, layer_id + 1)
            if element.path:
                calls[layer_id] = element.number
            else:
                points[layer_id], trees[layer_id] = element.number, self._tree(plan, layer_id, element.number)
        last = len(self._paths) - 1
        points[last], trees[last] = plan.num_calls, self._tree(plan, last, plan.num_calls)
        return PlacedPlan(plan, points, calls, trees)

    def _tree(self, plan: SplitPlan, layer_id: int, point: int) -> str:
        """The name of a tree in this layer that serves the plan's point, made where there is none yet."""
        layer = self.layers[layer_id]
        assert isinstance(layer, GlueLayer)
        for name, tree in layer.trees.items():
            assert isinstance(tree, StubTree)
            serves = tree.needs >= plan.needs[point] and tree.at_hand >= plan.taps_of(point)
            if tree.stubs == plan.stub_paths and serves:
                return name
        tree = element_tree(self._model, plan, point, plan.needs[point], self._ghosts)
        name = str(len(layer.trees))
        layer.trees[name] = tree
        return name


def _is_among(path: str, row: list[str]) -> bool:
    """Whether a module is one of a row, or inside one, or one of them is inside it."""
    return any(f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.") for other in row if other)


def _merged(old: list[str], new: list[str]) -> list[str]:
    """The shortest row that contains both rows in their order."""
    rest = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in range(len(old), -1, -1):
        for j in range(len(new), -1, -1):
            if i == len(old) or j == len(new):
                rest[i][j] = len(old) - i + len(new) - j
            elif old[i] == new[j]:
                rest[i][j] = 1 + rest[i + 1][j + 1]
            else:
                rest[i][j] = 1 + min(rest[i + 1][j], rest[i][j + 1])
    row, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            row.append(old[i])
            i, j = i + 1, j + 1
        elif j == len(new) or (i < len(old) and rest[i + 1][j] <= rest[i][j + 1]):
            row.append(old[i])
            i += 1
        else:
            row.append(new[j])
            j += 1
    return row
