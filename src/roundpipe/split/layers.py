"""The layers of a split model, and their arrangement: one sequence of layers that serves all split plans.

There are two kinds of layers: a block layer runs a block, a glue layer replays the model's own code between blocks.
They become the children of an nn.Sequential. The first layer takes the model's inputs, every other layer takes and
returns (state, ledger), and the last layer returns the model's outputs. The ledger says which plan the call follows, so
the same layers serve all plans. A layer that has no part in a call's plan returns its input.

[Note: arrangement]
A plan is a row of elements: points and calls, see split/plan.py. The first element of each plan is placed on the first
layer, the last element on the last layer. The other elements are placed, in order, on the layers between: each point on
a glue layer, each call on a layer of the called block. If a new plan does not fit on the existing layers, as few layers
as possible are added.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from roundpipe.errors import UsageError
from roundpipe.split.determinism import KeptRoutes, own_generators
from roundpipe.split.discovery import block_paths
from roundpipe.split.observe import call_block
from roundpipe.split.plan import CallRecord, KeepLogits, Ledger, SplitPlan, State, without_dead
from roundpipe.split.replay import CallOrderChanged, Replay
from roundpipe.split.stubs import Ghosts, StubTree
from roundpipe.split.tiling import tiled
from roundpipe.split.transformers import Captured, caches_in, is_cache, move_cache, own_caches
from roundpipe.split.values import Outline, filled_in, leaves_of, map_leaves

# Name of a keyword argument of the first layer. Its value is a KeepLogits. The model never receives this argument.
KEEPS_LOGITS = "roundpipe_keeps_logits"
_NOTHING_TO_ENTER = contextlib.nullcontext()
GLUE = ""  # used as the path of a glue layer, which has no block

_NOT_APART = (
    "the layers that a model was split into (wrapper.model) cannot be copied or pickled; copy or save the network "
    "itself, wrapper.original_model, after synchronize()."
)


@dataclasses.dataclass(frozen=True)
class PlacedPlan:
    """A plan, and the layer that carries out each of its elements. The keys of the mappings are layer ids."""

    plan: SplitPlan
    points: Mapping[int, int]  # for each glue layer of the plan: the point (number of a segment) that it replays
    calls: Mapping[int, int]  # for each block layer of the plan: the number of the call that it runs
    trees: Mapping[int, str]  # for each glue layer of the plan: the key of its stub tree in `GlueLayer.trees`


class PlanFinder(Protocol):
    """Returns the plan for a call of the model."""

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> PlacedPlan: ...


class GlueLayer(nn.Module):
    """Replays the model's own code between blocks. Has several stub trees if one does not serve all plans."""

    trees: nn.ModuleDict
    part_to_compile: nn.Module | None = None  # few operations between code that is not worth compiling

    def __init__(self, layer_id: int, finder: PlanFinder) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.finder = finder
        self.trees = nn.ModuleDict()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(_NOT_APART)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(_NOT_APART)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.layer_id == 0:
            keeps_logits = kwargs.pop(KEEPS_LOGITS, KeepLogits.ALWAYS)
            placed = self.finder.find(args, kwargs, self.training)
            state, ledger = Ledger.begin(placed.plan, placed, args, kwargs)
            # Blocks may fill the caller's caches in calls without grad, as in generation. In calls with grad, blocks
            # are recomputed and would fill the caches twice.
            ledger = dataclasses.replace(
                ledger, keeps_logits=keeps_logits, fills_caches=not torch.is_grad_enabled() and placed.plan.has_caches
            )
        else:
            state, ledger = args[0]
        point = ledger.placed.points.get(self.layer_id)
        if point is None:
            return state, ledger
        return self._replay(point, state, ledger)

    def _replay(self, point: int, state: State, ledger: Ledger) -> Any:
        device = _device_of(state)
        tree = self.trees[ledger.placed.trees[self.layer_id]]
        assert isinstance(tree, StubTree)
        tree.fill_in(device)
        replay = Replay(ledger, point, state, device)
        # If the code got a marker or placeholder before it failed, it may depend on values that the plan assumes to be
        # unused. The call then needs another plan. In all other cases the model itself raised the exception.
        try:
            with _drawing(ledger.plan):
                returned = replay.run(tree.root)
        except (CallOrderChanged, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not replay.has_guessed:
                raise
            raise CallOrderChanged(f"its code failed on the placeholders for outputs of blocks: {error!r}") from error
        if point == ledger.plan.num_calls:
            return _with_filled_caches(returned, ledger) if ledger.fills_caches else returned
        state, ledger = replay.handed_on()
        return without_dead(state, ledger, point - 0.5), ledger


class BlockLayer(nn.Module):
    """Runs one block of the model."""

    def __init__(self, layer_id: int, block: nn.Module) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.block = block

    @property
    def part_to_compile(self) -> nn.Module:
        return self.block

    def forward(self, travelling: tuple[State, Ledger]) -> tuple[State, Ledger]:
        state, ledger = travelling
        k = ledger.placed.calls.get(self.layer_id)
        if k is None:
            return travelling
        record = ledger.calls[k]
        args, kwargs = filled_in(record.arguments, state)
        # In generation blocks fill the caller's caches. In training each block gets a copy: a recomputation must not
        # find in the cache what the forward pass wrote.
        caches = caches_in(args, kwargs) if record.has_caches and ledger.fills_caches else []
        for cache in caches:
            move_cache(cache, _device_of(state))
        # A block must not change its saved input in place: its recomputation starts from the same tensors.
        if ledger.plan.outlines[k].changes_arguments:
            args, kwargs = map_leaves(_cloned, (args, kwargs))
        if record.has_caches and not caches:
            args, kwargs = own_caches(args, kwargs)
        value, captured = self._run(k, record, args, kwargs, ledger.plan)
        state = dict(state)
        outlines = _kept(value, state, ("out", k))
        caught = {kind: _kept(found, state, ("cap", k, kind)) for kind, found in captured.items()}
        ledger = ledger.with_output(k, (outlines, caught))
        return without_dead(state, ledger, k), ledger

    def _run(
        self, k: int, record: CallRecord, args: Any, kwargs: Any, plan: SplitPlan
    ) -> tuple[dict[str, Any], Captured]:
        # The common case needs none of the four contexts below, and entering them takes time.
        if record.with_grad and not (record.is_long or plan.draws_globally or plan.outlines[k].routes):
            return call_block(self.block, args, kwargs, record.captures, has_containers=record.has_containers)
        routes = KeptRoutes() if plan.outlines[k].routes and torch.is_grad_enabled() else None
        tiles = tiled(self.block, plan.tokenwise.get(plan.calls[k], ())) if record.is_long else _NOTHING_TO_ENTER
        grad_mode = _NOTHING_TO_ENTER if record.with_grad else torch.no_grad()
        with _drawing(plan), tiles, grad_mode, _NOTHING_TO_ENTER if routes is None else routes:
            done = call_block(self.block, args, kwargs, record.captures, has_containers=record.has_containers)
        if routes is not None:
            routes.save()
        return done


def _with_filled_caches(returned: Any, ledger: Ledger) -> Any:
    """Return the model's outputs with the caches that the blocks filled.

    Each replay runs the code that creates a cache, so the epilogue returns a new, empty cache. The blocks filled the
    cache that the prologue created and passed to them. It replaces the empty cache of the same type.
    """
    given = [
        leaf for k in (0, len(ledger.calls) - 1) for leaf in leaves_of(ledger.calls[k].arguments) if is_cache(leaf)
    ]
    by_type = {type(cache): cache for cache in given}
    return map_leaves(lambda leaf: by_type.get(type(leaf), leaf), returned)


def _drawing(plan: SplitPlan) -> AbstractContextManager[None]:
    """Give the thread exclusive use of the global random generators if the model draws from them."""
    return own_generators() if plan.draws_globally else _NOTHING_TO_ENTER


def _kept(value: Any, state: State, key: tuple[Any, ...]) -> Any:
    """Store the tensors of `value` in `state`; returns `value` with an Outline in place of each tensor.

    key: the first part of the keys under which the tensors are stored; the last part is the position of the leaf.
    """
    # A fast path for the common case: the block returned one tensor and has no side effects.
    if type(value) is dict and type(value.get("ret")) is torch.Tensor and value.get("side") == {}:
        state[(*key, 0)] = value["ret"]
        return {"ret": Outline.of(value["ret"]), "side": {}}
    position = -1

    def keep(leaf: Any) -> Any:
        nonlocal position
        position += 1
        if not isinstance(leaf, torch.Tensor):
            return leaf
        state[(*key, position)] = leaf
        return Outline.of(leaf)

    return map_leaves(keep, value)


def _device_of(state: State) -> torch.device:
    return next((tensor.device for tensor in state.values()), torch.device("cpu"))


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


@dataclasses.dataclass(frozen=True)
class Element:
    """A point or a call of a plan."""

    path: str  # the path of the called block; GLUE if the element is a point
    number: int  # the number of the call, or of the point's segment


def elements_of(plan: SplitPlan) -> list[Element]:
    """Return the points and calls of a plan in the order in which they run."""
    row = []
    for k, path in enumerate(plan.calls):
        if k in plan.points:
            row.append(Element(GLUE, k))
        row.append(Element(path, k))
    return [*row, Element(GLUE, plan.num_calls)]


class LayerArrangement:
    """The layers of a split model, and which of them each plan uses. See [Note: arrangement]."""

    def __init__(self, model: nn.Module, finder: PlanFinder) -> None:
        self._model, self._finder = model, finder
        self._ghosts = Ghosts(model)
        self._paths: list[str] = []  # one entry per layer: the path of the layer's block, or GLUE
        self._plans: list[SplitPlan] = []
        self.placed: list[PlacedPlan] = []
        self.layers: list[nn.Module] = []

    def add(self, plan: SplitPlan) -> bool:
        """Assign a plan to layers and append it to `placed`.

        Returns whether layers were added or the parameters of existing layers changed.
        """
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
        """Create all layers anew and assign every plan to them."""
        self._paths = paths = self._needed_paths()
        by_path = dict(self._model.named_modules())
        self.layers = [
            BlockLayer(i, by_path[path]) if path else GlueLayer(i, self._finder) for i, path in enumerate(paths)
        ]
        self.placed = [self._place(plan) for plan in self._plans]
        self.layers[-1].rest = self._rest()

    def _needed_paths(self) -> list[str]:
        """Return one path per layer for the layers that all plans together need: the path of a block, or GLUE.

        Blocks that no plan calls also get layers, because their parameters belong to the model. These layers follow the
        first layer.
        """
        row: list[str] = []
        for plan in self._plans:
            row = _merged(row, [element.path for element in elements_of(plan)[1:-1]])
        blocks = block_paths(self._model)
        unused = [path for path, _ in self._model.named_modules() if path in blocks and not _is_among(path, row)]
        return [GLUE, *unused, *row, GLUE]

    def _rest(self) -> nn.Module:
        """Return a module with all parameters of the model, and all ghosts, that belong to no layer."""
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
        """Return the name of a stub tree in the layer that can replay the plan's point; creates the tree if needed."""
        layer = self.layers[layer_id]
        assert isinstance(layer, GlueLayer)
        for name, tree in layer.trees.items():
            assert isinstance(tree, StubTree)
            serves = tree.needs >= plan.needs[point] and tree.present >= plan.taps_of(point)
            if tree.stubs == plan.stub_paths and serves:
                return name
        tree = element_tree(self._model, plan, point, plan.needs[point], self._ghosts)
        name = str(len(layer.trees))
        layer.trees[name] = tree
        return name


def element_tree(model: nn.Module, plan: SplitPlan, point: int, needs: Any, ghosts: Ghosts) -> StubTree:
    """Return the stub tree of a layer that replays `point`.

    The tree includes the taps that the point runs and the modules that have a parameter in `needs`.
    needs: the names of the parameters that the point needs.
    """
    owned = {id(param) for name, param in model.named_parameters() if name in needs}
    own_taps = plan.taps_of(point)
    paths = {id(module): path for path, module in model.named_modules()}

    def is_real(module: nn.Module) -> bool:
        path = paths[id(module)]
        if path in plan.blocks:
            return False
        params = list(module.parameters())
        if any(id(param) in owned for param in params):
            return True
        # A tap without weights may have buffers. They must belong to one layer, so only the point that runs the tap
        # includes it.
        return path in own_taps if path in plan.stub_paths else not params

    return StubTree(model, plan.stub_paths, is_real, owned, ghosts)


def _is_among(path: str, row: list[str]) -> bool:
    """Whether the module at `path` is one of the blocks in `row`, is inside such a block, or contains one."""
    return any(f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.") for other in row if other)


def _merged(old: list[str], new: list[str]) -> list[str]:
    """Return the shortest row that contains both rows as subsequences."""
    # rest[i][j]: the length of the shortest row that contains old[i:] and new[j:].
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
