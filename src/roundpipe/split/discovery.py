"""Finds the blocks of a model and the modules between them, by watching one run of its forward.

Called by calibration on a copy of the model that nobody else sees.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from roundpipe.errors import ModelSplitError
from roundpipe.split.determinism import Forward, other_forwards
from roundpipe.split.plan import TapCall

_SMALLEST_SHARE = 0.05  # a list with fewer parameters, beside the largest, is not worth cutting at
_LARGEST_IN_ONE = 4 * 2**30  # bytes of weights: more of them had better not be on a device at once
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclasses.dataclass(frozen=True)
class Event:
    path: str
    enters: bool


@dataclasses.dataclass(frozen=True)
class Discovery:
    calls: tuple[str, ...]
    taps: tuple[TapCall, ...]


def observe(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Event], Any]:
    """Every entry into and exit from a forward, calls of `forward` itself included, and what `run` returns."""
    events: list[Event] = []

    def watched(path: str, forward: Forward) -> Forward:
        def watch(*args: Any, **kwargs: Any) -> Any:
            events.append(Event(path, True))
            value = forward(*args, **kwargs)
            events.append(Event(path, False))
            return value

        return watch

    modules = list(model.named_modules())
    with other_forwards((module, functools.partial(watched, path)) for path, module in modules):
        value = run()
    return events, value


def discover(model: nn.Module, events: Sequence[Event], *, in_one: bool = False) -> Discovery:
    """`in_one`: the modules that call the elements of repeated lists are the blocks, not the elements."""
    num_calls = Counter(event.path for event in events if event.enters)
    blocks = block_paths(model, num_calls)
    if not blocks:
        raise ModelSplitError("it has no repeated list of modules that its forward calls")
    if in_one:
        blocks = _callers(model, events, blocks)
    calls, ancestors = _calls(events, blocks)
    called = frozenset(calls)
    inside = _children_of(model)
    while True:
        taps = _taps(events, called, ancestors)
        tapped = {tap.path for tap in taps} | called
        # A module that is called as a whole and from inside as well is opened: its parts are the taps.
        opened = {path for path in tapped - called if inside[path] & tapped}
        if not opened:
            return Discovery(tuple(calls), tuple(taps))
        ancestors |= opened


def block_paths(model: nn.Module, num_calls: Counter[str] | None = None) -> set[str]:
    """The elements of the outermost repeated lists; with `num_calls` only those that were called."""
    paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    found: list[tuple[nn.Module, list[nn.Module], int]] = []
    for _, module in model.named_modules():
        if not isinstance(module, _LISTS):
            continue
        called = [c for c in module.children() if num_calls is None or num_calls[paths[id(c)]]]
        size = sum(param.numel() for param in {id(p): p for c in called for p in c.parameters()}.values())
        is_mixed = isinstance(module, nn.Sequential) and len({type(child) for child in called}) > 1
        if size and not is_mixed and not any(map(_is_mere_operator, called)):
            found.append((module, called, size))
    inner = {id(module) for _, called, _ in found for child in called for module in child.modules()}
    outermost = [entry for entry in found if id(entry[0]) not in inner]
    largest = max((size for _, _, size in outermost), default=0)
    return {paths[id(child)] for _, called, size in outermost if size >= _SMALLEST_SHARE * largest for child in called}


def _is_mere_operator(module: nn.Module) -> bool:
    """A module without submodules, such as a Linear, is no block; a recurrent layer does as much as one."""
    return next(module.children(), None) is None and not isinstance(module, nn.RNNBase)


def _children_of(model: nn.Module) -> dict[str, set[str]]:
    """By path, the paths of all modules inside."""
    canonical = {id(module): path for path, module in model.named_modules()}
    return {
        path: {canonical[id(inner)] for inner in module.modules() if inner is not module}
        for path, module in model.named_modules()
    }


def _calls(events: Sequence[Event], blocks: set[str]) -> tuple[list[str], set[str]]:
    """The calls of blocks that are not inside another block, and all modules whose forward called one."""
    calls: list[str] = []
    ancestors: set[str] = set()
    stack: list[str] = []
    depth: int | None = None
    for event in events:
        if event.enters:
            if depth is None and event.path in blocks:
                ancestors.update(stack)
                calls.append(event.path)
                depth = len(stack)
            stack.append(event.path)
        else:
            stack.pop()
            if depth is not None and len(stack) == depth:
                depth = None
    return calls, ancestors


def _callers(model: nn.Module, events: Sequence[Event], blocks: set[str]) -> set[str]:
    """The modules whose forwards call blocks, where none is the model itself or too large to be one layer."""
    callers: set[str] = set()
    stack: list[str] = []
    for event in events:
        if not event.enters:
            stack.pop()
            continue
        if event.path in blocks and blocks.isdisjoint(stack):
            callers.add(stack[-1])
        stack.append(event.path)
    for path in callers:
        size = sum(param.nbytes for param in model.get_submodule(path).parameters())
        if not path or size > _LARGEST_IN_ONE:
            raise ModelSplitError(f"{path or 'the model'} cannot be one layer: its weights take {size / 1e9:.1f} GB")
    return callers


def _taps(events: Sequence[Event], blocks: frozenset[str], ancestors: set[str]) -> list[TapCall]:
    taps: list[TapCall] = []
    segment = 0
    stack: list[str] = []
    depth: int | None = None
    in_block = False
    for event in events:
        if event.enters:
            if depth is None and (event.path in blocks or event.path not in ancestors):
                depth, in_block = len(stack), event.path in blocks
                if not in_block:
                    taps.append(TapCall(event.path, segment))
            stack.append(event.path)
        else:
            stack.pop()
            if depth == len(stack):
                depth = None
                segment += in_block
    return taps
