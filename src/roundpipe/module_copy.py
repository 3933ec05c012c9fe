"""Shallow copies of module trees: the same code, hooks and settings over other parameters, buffers or submodules.

A copy shares every attribute with its original except the modules and parameters that were exchanged. A `ModulePair`
keeps the attributes of a copied module equal to its original's. Knows nn.Module and tensors: no devices and no models.

[Note: attributes of a copy]
Original to copy: `sync` copies every attribute that changed on the original (a dropout rate, a hook).
Copy to original: a forward pass may set attributes on the copy. Plain values (a counter, a flag) are copied to the
original by `write_back`, or reverted by `drop_changes`, for example after a recomputation, which must not count twice.
Other values (a cache of device tensors) stay on the copy and survive both.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Never copied as attributes. nn.Module manages the first three, and compiled code is bound to the original's tensors.
_OWN = frozenset(("_parameters", "_buffers", "_modules", "_compiled_call_impl"))
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MISSING = object()


def copy_tree(
    root: nn.Module,
    stand_in: Callable[[nn.Module], nn.Module | None] = lambda module: None,
    parameter: Callable[[nn.Parameter], nn.Parameter | None] = lambda param: param,
    buffer: Callable[[torch.Tensor], torch.Tensor] = lambda buffer: buffer,
    *,
    unwrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    not_followed: frozenset[str] = frozenset(),
) -> tuple[nn.Module, list[ModulePair]]:
    """Copy the tree; returns the root of the copy and a pair (original, copy) for each copied module.

    stand_in: returns the module to use in place of a module and everything below it, or None to copy the module.
    parameter: returns the parameter to use in place of one, or None to leave it out.
    buffer: returns the tensor to use in place of a buffer.
    unwrap: returns the module to copy in place of a wrapper around it; the wrapper is left out of the copy.
    not_followed: names of attributes that copies neither get nor follow.
    A module, parameter or buffer that occurs several times in the tree is one object in the copy, too.
    """
    exchanged: dict[int, Any] = {}  # by id of a module or parameter
    buffers: dict[int, torch.Tensor] = {}  # by id of a buffer
    pairs: list[ModulePair] = []

    def copied(module: nn.Module) -> nn.Module:
        module = unwrap(module)
        if id(module) not in exchanged:
            instead = stand_in(module)
            # Not `instead or ...`: an empty ModuleList is a valid stand-in, and false.
            exchanged[id(module)] = copy(module) if instead is None else instead
        found: nn.Module = exchanged[id(module)]
        return found

    def copy(module: nn.Module) -> nn.Module:
        new = module.__class__.__new__(module.__class__)
        exchanged[id(module)] = new  # before the children, which may refer back to their parent
        new.__dict__["_parameters"] = _exchanged_parameters(module, parameter, exchanged)
        new.__dict__["_buffers"] = {
            name: None if held is None else buffers.setdefault(id(held), buffer(held))
            for name, held in module._buffers.items()
        }
        children = module._modules.items()
        new.__dict__["_modules"] = {name: None if child is None else copied(child) for name, child in children}
        pairs.append(ModulePair(module, new, exchanged, not_followed))
        return new

    result = copied(root)
    # Attributes may refer to any module of the tree, so they are copied when all modules exist.
    for pair in pairs:
        pair.sync()
    return result, pairs


def _exchanged_parameters(
    module: nn.Module, parameter: Callable[[nn.Parameter], nn.Parameter | None], exchanged: dict[int, Any]
) -> dict[str, nn.Parameter | None]:
    chosen: dict[str, nn.Parameter | None] = {}
    for name, param in module._parameters.items():
        if param is None:
            chosen[name] = None
            continue
        if id(param) not in exchanged:
            exchanged[id(param)] = parameter(param)
        if exchanged[id(param)] is not None:
            chosen[name] = exchanged[id(param)]
    return chosen


class ModulePair:
    """A module and its copy: moves changed attributes between them. See [Note: attributes of a copy]."""

    def __init__(
        self, original: nn.Module, copy: nn.Module, exchanged: Mapping[int, Any], not_followed: frozenset[str]
    ) -> None:
        """exchanged: by id of a module or parameter, what the copy uses in its place."""
        self.original, self.copy = original, copy
        self._exchanged = exchanged
        self._not_followed = _OWN | not_followed
        self._synced: dict[str, Any] = {}  # attributes of the original when they were last copied
        self._given: dict[str, Any] = {}  # the same as the copy got them
        # Holds references to the parameters and submodules, so that their ids in `exchanged` are not reused.
        self._parts = _parts_of(original)
        self._parts_seen = _Snapshot(self._parts)
        # The attributes of the original after the last sync, and those of the copy when it last had no changes. Dropped
        # when `_synced` or `_given` change: a flag that is set, written back and reset would match an old snapshot.
        self._original_seen = self._copy_seen = _NEVER_SEEN

    def sync(self) -> bool:
        """Original to copy: copy the attributes that changed on the original since the last time.

        Returns whether anything changed. An attribute deleted on the original is deleted on the copy.
        """
        source, target = self.original.__dict__, self.copy.__dict__
        if self._original_seen.matches(source):
            return False
        for name, value in source.items():
            if name not in self._not_followed and self._synced.get(name, _MISSING) is not value:
                self._synced[name] = value
                target[name] = self._given[name] = translated(value, self.original, self.copy, self._exchanged)
        for name in self._synced.keys() - source.keys():
            del self._synced[name], self._given[name]
            target.pop(name, None)
        self._original_seen, self._copy_seen = _Snapshot(source), _NEVER_SEEN
        return True

    def write_back(self) -> None:
        """Copy to original: write the plain values that a forward pass set on the copy to the original."""
        changes = self._changes()
        if changes:
            for content in (self._synced, self._given, self.original.__dict__):
                content.update(changes)
            self._original_seen = self._copy_seen = _NEVER_SEEN

    def drop_changes(self) -> None:
        """Revert plain values that a forward pass set on the copy since the last sync or write_back."""
        for name in self._changes():
            if name in self._given:
                self.copy.__dict__[name] = self._given[name]
            else:
                del self.copy.__dict__[name]

    def changed_parts(self) -> list[str]:
        """Names of parameters and submodules of the original that were added, replaced or removed since the copy."""
        parts = _parts_of(self.original)
        if self._parts_seen.matches(parts):
            return []
        names = self._parts.keys() | parts.keys()
        changed = [name for name in names if parts.get(name, _MISSING) is not self._parts.get(name, _MISSING)]
        return sorted(changed) or ["the order of its parts"]

    def _changes(self) -> dict[str, Any]:
        """Plain values on the copy that are not those of the last sync or write_back."""
        own, given = self.copy.__dict__, self._given
        if self._copy_seen.matches(own):
            return {}
        changes = {
            name: value
            for name, value in own.items()
            if given.get(name, _MISSING) is not value and name not in self._not_followed and isinstance(value, _PLAIN)
        }
        if not changes:
            # A snapshot must not keep device tensors alive that a forward pass replaces, so it holds plain values and
            # values that `given` holds anyway. A module with other values is compared in full each time.
            own = {
                name: value
                if isinstance(value, _PLAIN) or name in self._not_followed or given.get(name, _MISSING) is value
                else _MISSING
                for name, value in own.items()
            }
            self._copy_seen = _Snapshot(own)
        return changes


class _Snapshot:
    """The names and objects of a dict at one moment. Comparing takes one or two microseconds for a module.

    Holds references, so that a new object cannot have the id of an old one.
    """

    __slots__ = ("_names", "_values")

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._names, self._values = tuple(content), tuple(content.values())

    def matches(self, content: Mapping[str, Any]) -> bool:
        return tuple(content) == self._names and all(map(operator.is_, content.values(), self._values))


_NEVER_SEEN = _Snapshot({})  # a module's attributes are never empty


def _parts_of(module: nn.Module) -> dict[str, Any]:
    return {**module._parameters, **module._modules}


def translated(value: Any, original: nn.Module, copy: nn.Module, exchanged: Mapping[int, Any]) -> Any:
    """Return an attribute for the copy: the copy's modules and parameters take the place of the original's.

    Looks into lists, tuples and dicts, one level deep. A method bound to the original is bound to the copy.
    """
    if isinstance(value, types.MethodType) and value.__self__ is original:
        return types.MethodType(value.__func__, copy)
    if isinstance(value, nn.Module | nn.Parameter):
        return exchanged.get(id(value), value)
    if type(value) in (list, tuple) and any(isinstance(item, nn.Module | nn.Parameter) for item in value):
        return type(value)(exchanged.get(id(item), item) for item in value)
    if type(value) is dict and any(isinstance(item, nn.Module | nn.Parameter) for item in value.values()):
        return {key: exchanged.get(id(item), item) for key, item in value.items()}
    return value
