"""Finds the blocks and taps of a model from its module tree and a record of one forward pass.

A block is an element of a repeated list of modules (a decoder layer). A tap is a call of a module that runs between
blocks (an embedding, a norm, a head). Knows module paths and the order of calls, but no values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import nn

from roundpipe.errors import ModelSplitError
from roundpipe.split.determinism import Forward, other_forwards
from roundpipe.split.plan import TapCall

# A list whose number of parameters, relative to that of the largest list, is below this share gives no blocks.
_SMALLEST_SHARE = 0.05
_LARGEST_IN_ONE = 4 * 2**30  # upper limit, in bytes, of the weights of a layer that contains several blocks
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclasses.dataclass(frozen=True)
class ModuleEvent:
    """The start or the end of a module's forward."""

    path: str
    enters: bool


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The paths of the called blocks, one per call, and the taps, both in the order of the forward pass."""

    calls: tuple[str, ...]
    taps: tuple[TapCall, ...]


def record_events(model: nn.Module, run: Callable[[], Any]) -> tuple[list[ModuleEvent], Any]:
    """Call `run`; returns the start and end of each forward of the model's modules, and the result of `run`.

    Replaces the modules' forwards during the run, so that direct calls of `module.forward` are recorded. Hooks would
    miss such calls.
    """
    events: list[ModuleEvent] = []

    def watched(path: str, forward: Forward) -> Forward:
        def watch(*args: Any, **kwargs: Any) -> Any:
            events.append(ModuleEvent(path, True))
            value = forward(*args, **kwargs)
            events.append(ModuleEvent(path, False))
            return value

        return watch

    modules = list(model.named_modules())
    with other_forwards((module, functools.partial(watched, path)) for path, module in modules):
        value = run()
    return events, value


def discover(model: nn.Module, events: Sequence[ModuleEvent], *, in_one: bool = False) -> Discovery:
    """Return the blocks' calls and the taps of a recorded forward pass.

    in_one: use the modules that call the elements of repeated lists as blocks, instead of the elements themselves.
    Raises ModelSplitError if the model has no blocks.
    """
    num_calls = Counter(event.path for event in events if event.enters)
    blocks = block_paths(model, num_calls)
    if not blocks:
        replaced = next((module for module in model.modules() if "forward" in vars(module)), None)
        if replaced is not None and block_paths(model):
            raise ModelSplitError(
                f"the forward of its {type(replaced).__name__} was replaced on the instance by a function that calls "
                "modules which it holds in a global variable or a container; a copy of the model cannot run it. Define "
                "the forward in a subclass, with `self`"
            )
        raise ModelSplitError("it has no repeated list of modules that its forward calls")
    if in_one:
        blocks = _callers(model, events, blocks)
    calls, ancestors = _calls(events, blocks)
    called = frozenset(calls)
    places = {id(module): path for path, module in model.named_modules()}
    while True:
        taps = _taps(events, called, ancestors)
        tapped = {tap.path for tap in taps} | called
        # The code may call a module as a whole and also call a submodule of it directly. Stubs cannot be nested, so
        # such a module is opened: its submodules become taps instead of the module.
        opened = {path for path in tapped - called if _contains(model.get_submodule(path), tapped - {path}, places)}
        if not opened:
            return Discovery(tuple(calls), tuple(taps))
        ancestors |= opened


def block_paths(model: nn.Module, num_calls: Counter[str] | None = None) -> set[str]:
    """Return the paths of the elements of the outermost repeated lists.

    num_calls: by path, how often a module was called; elements that were not called are left out.
    """
    paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    found: list[tuple[nn.Module, list[nn.Module], int]] = []
    inner: set[int] = set()  # ids of the modules inside of elements
    for _, module in model.named_modules():
        if not isinstance(module, _LISTS) or id(module) in inner:
            continue
        called = [c for c in module.children() if num_calls is None or num_calls[paths[id(c)]]]
        size = sum(param.numel() for param in {id(p): p for c in called for p in c.parameters()}.values())
        # An nn.Sequential of modules of different classes (conv, norm, activation) is not a repetition.
        is_mixed = isinstance(module, nn.Sequential) and len({type(child) for child in called}) > 1
        if size and not is_mixed and not any(map(_is_mere_operator, called)):
            found.append((module, called, size))
            inner.update(id(part) for child in called for part in child.modules())
    outermost = [entry for entry in found if id(entry[0]) not in inner]
    largest = max((size for _, _, size in outermost), default=0)
    return {paths[id(child)] for _, called, size in outermost if size >= _SMALLEST_SHARE * largest for child in called}


def _is_mere_operator(module: nn.Module) -> bool:
    """Whether a module is too simple to be a block: it has no submodules (a Linear) and is not recurrent."""
    return next(module.children(), None) is None and not isinstance(module, nn.RNNBase)


def _contains(module: nn.Module, paths: Set[str], places: Mapping[int, str]) -> bool:
    """Whether one of the modules at `paths` is inside of a module. places: the path of each module, by id."""
    return any(places[id(inner)] in paths for inner in module.modules())


def _calls(events: Sequence[ModuleEvent], blocks: set[str]) -> tuple[list[str], set[str]]:
    """Return the calls of blocks outside of other blocks, and the paths of all modules whose forwards called one."""
    calls: list[str] = []
    ancestors: set[str] = set()
    stack: list[str] = []
    depth: int | None = None  # the depth of the stack where the current block was called; None outside of blocks
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


def _callers(model: nn.Module, events: Sequence[ModuleEvent], blocks: set[str]) -> set[str]:
    """Return the paths of the modules whose forwards call blocks.

    Raises ModelSplitError if one of them is the whole model or too large to be one layer.
    """
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


def _taps(events: Sequence[ModuleEvent], blocks: frozenset[str], ancestors: set[str]) -> list[TapCall]:
    """Return the outermost calls between blocks of modules that call no block (are not among `ancestors`)."""
    taps: list[TapCall] = []
    segment = 0
    stack: list[str] = []
    depth: int | None = None  # the depth of the stack where the current block or tap was called; None outside of both
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
