"""Shallow copies of module trees: the same code, hooks and settings over other parameters, buffers or submodules.

A copy shares every attribute with its original except the modules, parameters and buffers that were exchanged. A
`ModulePair` keeps the attributes of a copied module equal to those of its original. Knows nn.Module and tensors: no
devices and no models.

[Note: attributes of a copy]
From original to copy: `sync` copies every attribute that changed on the original (a dropout rate, a hook).
From copy to original: a forward pass may set attributes on the copy. If they are plain values (a counter, a flag),
`write_back` copies them to the original, and `drop_changes` reverts them. After a recomputation, for example, a counter
must be reverted, because the forward pass has counted already. Attributes with other values (a cache of device tensors)
stay on the copy; neither method touches them.

[Note: functions that hold modules]
A forward that was replaced on the instance (`model.forward = patched`) usually calls the forward that it replaced, a
method bound to the original, or other modules of the tree. It holds them as its bound object, in its closure or in a
functools.partial. The copy gets a function that holds the copy's modules instead. What a function holds elsewhere (in a
global variable, a list, an object) cannot be exchanged: such a function runs the original's modules.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Attributes that are never copied. nn.Module manages the first three. The last one is compiled code, which is bound to
# the original's tensors.
_OWN = frozenset(("_parameters", "_buffers", "_modules", "_compiled_call_impl"))
# The dicts of a module's hooks.
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)
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
    own_hooks: bool = False,
) -> tuple[nn.Module, list[ModulePair]]:
    """Copy the tree; returns the root of the copy and a pair (original, copy) for each copied module.

    stand_in: returns the module to use in place of a module and everything below it, or None to copy the module.
    parameter: returns the parameter to use in place of a given parameter, or None to leave the parameter out.
    buffer: returns the tensor to use in place of a buffer.
    unwrap: given a wrapper module, returns the module inside, which is copied without the wrapper. Returns any other
        module unchanged.
    not_followed: names of attributes that are not copied, neither now nor by `ModulePair.sync`.
    own_hooks: copies get copies of the dicts of hooks, which do not follow the original's. Otherwise they share the
        dicts: a hook that is registered on a copy is one of the original.
    A module, parameter or buffer that occurs several times in the tree is also a single object in the copy.
    """
    if own_hooks:
        not_followed = not_followed.union(_HOOKS)
    exchanged: dict[int, Any] = {}  # by id of an original module or parameter: what the copy uses instead
    buffers: dict[int, torch.Tensor] = {}  # by id of an original buffer: the tensor that the copy uses instead
    pairs: list[ModulePair] = []

    def copied(module: nn.Module) -> nn.Module:
        module = unwrap(module)
        if id(module) not in exchanged:
            instead = stand_in(module)
            # Compare with None, because an empty ModuleList is a valid stand-in although its truth value is False.
            exchanged[id(module)] = copy(module) if instead is None else instead
        found: nn.Module = exchanged[id(module)]
        return found

    def copy(module: nn.Module) -> nn.Module:
        cls = _without_finalizer(module.__class__)  # type: ignore[arg-type]
        new = cls.__new__(cls)
        exchanged[id(module)] = new  # set before the children are copied, because they may refer back to this module
        new.__dict__["_parameters"] = _exchanged_parameters(module, parameter, exchanged)
        new.__dict__["_buffers"] = {
            name: None if held is None else buffers.setdefault(id(held), buffer(held))
            for name, held in module._buffers.items()
        }
        children = module._modules.items()
        new.__dict__["_modules"] = {name: None if child is None else copied(child) for name, child in children}
        if own_hooks:
            set_hooks(new, module_hooks(module))
        pairs.append(ModulePair(module, new, exchanged, not_followed))
        return new

    result = copied(root)
    # Attributes may refer to any module of the tree, so they are copied last, when all modules exist.
    for pair in pairs:
        pair.sync()
    return result, pairs


@functools.cache
def _without_finalizer(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose instances are like those of `cls` but run no `__del__`.

    A finalizer releases what the original still uses, such as hooks; the end of a copy must not run it.
    """
    if not hasattr(cls, "__del__"):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "__del__": lambda self: None})


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


Hooks = Mapping[str, Mapping[int, Any]]  # the dicts of a module's hooks by name


def module_hooks(module: nn.Module) -> Hooks | None:
    """Return copies of the dicts of a module's hooks; None if it has no hooks."""
    own = module.__dict__
    return {name: own[name].copy() for name in _HOOKS} if any(own[name] for name in _HOOKS) else None


def set_hooks(module: nn.Module, hooks: Hooks | None) -> None:
    """Give a copied module its own dicts of hooks, with these hooks."""
    module.__dict__.update({name: OrderedDict({} if hooks is None else hooks[name]) for name in _HOOKS})


def num_hooks(module: nn.Module) -> int:
    """Return the number of hooks that run around the forwards of a module and its submodules."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


class ModulePair:
    """A module and its copy: moves changed attributes between them. See [Note: attributes of a copy]."""

    def __init__(
        self, original: nn.Module, copy: nn.Module, exchanged: Mapping[int, Any], not_followed: frozenset[str]
    ) -> None:
        """Create a pair; copies no attribute yet.

        exchanged: by id of an original module or parameter, what the copy uses instead.
        not_followed: names of attributes that are never copied.
        """
        self.original, self.copy = original, copy
        self._exchanged = exchanged
        self._not_followed = _OWN | not_followed
        self._synced: dict[str, Any] = {}  # the original's attributes, as they were when last copied
        self._given: dict[str, Any] = {}  # the same attributes with the values that the copy got, see `translated`
        # Holds references to the parameters and submodules, so that their ids in `exchanged` are not reused.
        self._parts = _parts_of(original)
        self._parts_seen = _Snapshot(self._parts)
        # Snapshots of the original's attributes after the last sync, and of the copy's when it last had no changes.
        # While one matches, there is nothing to do. `sync` renews the original's and drops the copy's. `write_back`
        # drops both: otherwise, if a forward sets a flag on the copy and the user resets it on the original after the
        # write-back, the original would match its old snapshot, and `sync` would leave the flag set on the copy.
        self._original_seen = self._copy_seen = _NEVER_SEEN

    def sync(self) -> bool:
        """Copy the attributes that changed on the original since the last sync to the copy.

        Returns whether anything changed. An attribute deleted on the original is deleted on the copy.
        """
        source, target = self.original.__dict__, self.copy.__dict__
        if self._original_seen.matches(source):
            return False
        for name, value in source.items():
            if name not in self._not_followed and self._synced.get(name, _MISSING) is not value:
                self._synced[name] = value
                target[name] = self._given[name] = translated(value, self._exchanged)
        for name in self._synced.keys() - source.keys():
            del self._synced[name], self._given[name]
            target.pop(name, None)
        self._original_seen, self._copy_seen = _Snapshot(source), _NEVER_SEEN
        return True

    def write_back(self) -> None:
        """Copy the plain values that a forward pass set on the copy to the original."""
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
        """Return the names of the original's parameters and submodules that changed since the copy was made.

        A change is an addition, a replacement, a removal, or another order.
        """
        parts = _parts_of(self.original)
        if self._parts_seen.matches(parts):
            return []
        names = self._parts.keys() | parts.keys()
        changed = [name for name in names if parts.get(name, _MISSING) is not self._parts.get(name, _MISSING)]
        return sorted(changed) or ["the order of its parts"]

    def _changes(self) -> dict[str, Any]:
        """Return the plain values that were set on the copy since the last sync or write_back, by attribute name."""
        own, given = self.copy.__dict__, self._given
        if self._copy_seen.matches(own):
            return {}
        changes = {
            name: value
            for name, value in own.items()
            if given.get(name, _MISSING) is not value and name not in self._not_followed and isinstance(value, _PLAIN)
        }
        if not changes:
            # A snapshot must not keep device tensors alive after a forward pass has replaced them. So it contains only
            # plain values and values that are referenced elsewhere, and _MISSING for others. A module with other values
            # never matches its snapshot and is compared in full each time.
            own = {
                name: value
                if isinstance(value, _PLAIN) or name in self._not_followed or given.get(name, _MISSING) is value
                else _MISSING
                for name, value in own.items()
            }
            self._copy_seen = _Snapshot(own)
        return changes


class _Snapshot:
    """The keys and values of a dict at one moment. Comparing the attributes of a module takes one or two microseconds.

    A snapshot holds references to the values, so a new object cannot have the id of an old one.
    """

    __slots__ = ("_names", "_values")

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._names, self._values = tuple(content), tuple(content.values())

    def matches(self, content: Mapping[str, Any]) -> bool:
        return tuple(content) == self._names and all(map(operator.is_, content.values(), self._values))


_NEVER_SEEN = _Snapshot({})  # matches no module, because a module always has attributes


def _parts_of(module: nn.Module) -> dict[str, Any]:
    return {**module._parameters, **module._modules}


def translated(value: Any, exchanged: Mapping[int, Any]) -> Any:
    """Return the value of an attribute for the copy: exchanged modules and parameters replace those of the original.

    Looks into lists, tuples and dicts, one level deep, and into functions: see [Note: functions that hold modules].
    """
    if isinstance(value, nn.Module | nn.Parameter):
        return exchanged.get(id(value), value)
    if isinstance(value, _FUNCTIONS):
        return _rebound(value, exchanged, frozenset())
    if type(value) in (list, tuple) and any(isinstance(item, nn.Module | nn.Parameter) for item in value):
        return type(value)(exchanged.get(id(item), item) for item in value)
    if type(value) is dict and any(isinstance(item, nn.Module | nn.Parameter) for item in value.values()):
        return {key: exchanged.get(id(item), item) for key, item in value.items()}
    return value


_FUNCTIONS = (types.MethodType, types.FunctionType, functools.partial)


def _rebound(value: Any, exchanged: Mapping[int, Any], outer: frozenset[int]) -> Any:
    """Return a function that holds exchanged modules and parameters; the same function if it holds none.

    outer: ids of the functions that hold this one, because a closure can contain its own function.
    """
    if isinstance(value, nn.Module | nn.Parameter):
        return exchanged.get(id(value), value)
    if not isinstance(value, _FUNCTIONS) or id(value) in outer:
        return value
    outer |= {id(value)}

    def rebound(held: Any) -> Any:
        return _rebound(held, exchanged, outer)

    if isinstance(value, types.MethodType):
        function, owner = rebound(value.__func__), rebound(value.__self__)
        is_same = function is value.__func__ and owner is value.__self__
        return value if is_same else types.MethodType(function, owner)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        function, *given = map(rebound, parts)
        if all(map(operator.is_, (function, *given), parts)):
            return value
        positional = given[: len(value.args)]
        by_name = dict(zip(value.keywords, given[len(positional) :], strict=True))
        return functools.partial(function, *positional, **by_name)
    return _rebound_function(value, rebound)


def _rebound_function(function: types.FunctionType, rebound: Callable[[Any], Any]) -> types.FunctionType:
    cells = function.__closure__ or ()
    held = [_content(cell) for cell in cells]
    new = [rebound(value) for value in held]
    if all(map(operator.is_, new, held)):
        return function
    itself = types.CellType()  # a function that calls itself has itself in its closure
    # Cells whose content stays are shared with the original: the function may assign to them.
    closure = tuple(
        itself if old is function else cell if value is old else types.CellType(value)
        for cell, old, value in zip(cells, held, new, strict=True)
    )
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    itself.cell_contents = copy
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(copy, name, getattr(function, name))
    return copy


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _MISSING
