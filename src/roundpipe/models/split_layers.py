"""The layers of a split model: blocks, and glue that replays the model's own code between them.

They become the children of an nn.Sequential. Every layer but the first takes and returns (state, ledger) of
models.travel; the last returns what the model returns. Which plan a call follows is in its ledger, so one layer serves
all plans; a layer that has no part in a plan hands on what it got.
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
from roundpipe.models.block_call import call_block
from roundpipe.models.global_random import own_generators
from roundpipe.models.library_state import Captured, caches_in, is_cache, move_cache, own_caches
from roundpipe.models.replay import CallOrderChanged, Replay, device_of, handed_on
from roundpipe.models.routing import KeptRoutes
from roundpipe.models.split_plan import SplitPlan
from roundpipe.models.stub_tree import StubTree
from roundpipe.models.tiling import tiled
from roundpipe.models.travel import CallRecord, KeepLogits, Ledger, State, without_dead
from roundpipe.models.values import Outline, filled_in, leaves_of, map_leaves

# A keyword argument for the first layer, not for the model: a KeepLogits.
KEEPS_LOGITS = "roundpipe_keeps_logits"

_NOT_APART = (
    "the layers that a model was split into (wrapper.model) cannot be copied or pickled; copy or save the network "
    "itself, wrapper.original_model, after synchronize()."
)


@dataclasses.dataclass(frozen=True)
class PlacedPlan:
    """A plan and the layers that carry it out: by layer its point or call, and the name of its tree."""

    plan: SplitPlan
    points: Mapping[int, int]
    calls: Mapping[int, int]
    trees: Mapping[int, str]


_NOTHING_TO_ENTER = contextlib.nullcontext()


class PlanBook(Protocol):
    """Knows the plan for a call."""

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> PlacedPlan: ...


class GlueLayer(nn.Module):
    trees: nn.ModuleDict

    def __init__(self, layer_id: int, book: PlanBook) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.book = book
        self.trees = nn.ModuleDict()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(_NOT_APART)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(_NOT_APART)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.layer_id == 0:
            keeps_logits = kwargs.pop(KEEPS_LOGITS, KeepLogits.ALWAYS)
            placed = self.book.find(args, kwargs, self.training)
            state, ledger = Ledger.begin(placed.plan, placed, args, kwargs)
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
        device = device_of(state)
        tree = self.trees[ledger.placed.trees[self.layer_id]]
        assert isinstance(tree, StubTree)
        tree.fill_in(device)
        replay = Replay(ledger, point, state, device)
        try:
            with drawing(ledger.plan):
                returned = replay.run(tree.root)
        except (CallOrderChanged, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not replay.has_guessed:
                raise
            raise CallOrderChanged(f"its code failed on what the plan put in place of blocks: {error!r}") from error
        if point == ledger.plan.num_calls:
            return _with_filled_caches(returned, ledger) if ledger.fills_caches else returned
        state, ledger = handed_on(replay, ledger, state)
        return without_dead(state, ledger, point - 0.5), ledger


class BlockLayer(nn.Module):
    def __init__(self, layer_id: int, block: nn.Module) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.block = block

    def forward(self, travelling: tuple[State, Ledger]) -> tuple[State, Ledger]:
        state, ledger = travelling
        k = ledger.placed.calls.get(self.layer_id)
        if k is None:
            return travelling
        record = ledger.calls[k]
        args, kwargs = filled_in(record.arguments, state)
        caches = caches_in(args, kwargs) if record.has_caches and ledger.fills_caches else []
        for cache in caches:
            move_cache(cache, device_of(state))
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
        if record.with_grad and not (record.is_long or plan.draws_globally or plan.outlines[k].routes):  # as most
            return call_block(self.block, args, kwargs, record.captures, has_containers=record.has_containers)
        routes = KeptRoutes() if plan.outlines[k].routes and torch.is_grad_enabled() else None
        tiles = tiled(self.block, plan.tokenwise.get(plan.calls[k], ())) if record.is_long else _NOTHING_TO_ENTER
        grad_mode = _NOTHING_TO_ENTER if record.with_grad else torch.no_grad()
        with drawing(plan), tiles, grad_mode, _NOTHING_TO_ENTER if routes is None else routes:
            done = call_block(self.block, args, kwargs, record.captures, has_containers=record.has_containers)
        if routes is not None:
            routes.save()
        return done


def _with_filled_caches(returned: Any, ledger: Ledger) -> Any:
    """A cache that the epilogue's run made anew is the one the blocks were given, which they have filled."""
    given = [
        leaf for k in (0, len(ledger.calls) - 1) for leaf in leaves_of(ledger.calls[k].arguments) if is_cache(leaf)
    ]
    by_type = {type(cache): cache for cache in given}
    return map_leaves(lambda leaf: by_type.get(type(leaf), leaf), returned)


def drawing(plan: SplitPlan) -> AbstractContextManager[None]:
    return own_generators() if plan.draws_globally else _NOTHING_TO_ENTER


def _kept(value: Any, state: State, key: tuple[Any, ...]) -> Any:
    """Put the tensors of a value into the state; returns its outline."""
    if type(value) is dict and type(value.get("ret")) is torch.Tensor and value.get("side") == {}:  # as most blocks
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


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
