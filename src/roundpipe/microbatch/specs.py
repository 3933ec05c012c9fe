"""Split and merge specs, and the nested values that they describe.

A spec is a tree whose leaves are `Chunk`, `Replicate`, `Reducer` or None. The three classes are those of
torch.distributed.pipelining under public names, so users may import them from either place. Importing torch's module
takes seconds and sets environment variables. It is therefore imported only when one of the three names is first used.
Before that, no spec can contain an instance of the classes.

`open_node` returns the children of a nested value (tuple, list, dict, node registered with torch's pytree), one level
at a time. So a value can be walked together with its spec, and messages can name each place. A RoundPipePackedData is a
leaf, although it is a list.

Packed data is a leaf that is cut already: one value per microbatch, some of them still in transfer. A call with
`merge_output=False` returns packed data, and a model that receives it uses the elements as microbatches. Knows no
devices: an event is any object with a `wait()`.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeGuard

import torch
from torch.utils import _pytree as pytree

from roundpipe.errors import ArgumentTypeError, ConfigError, MergeError, SplitError, add_note

if TYPE_CHECKING:
    from torch.distributed.pipelining.microbatch import TensorChunkSpec as Chunk
    from torch.distributed.pipelining.microbatch import _CustomReducer as Reducer
    from torch.distributed.pipelining.microbatch import _Replicate as Replicate


@dataclass(frozen=True)
class Node:
    """An inner node of a nested value. `names` says how to reach each child: `[0]`, `['mask']` or `.loss`."""

    value: Any
    children: tuple[Any, ...]
    names: tuple[str, ...]
    structure: pytree.TreeSpec

    def rebuild(self, children: Sequence[Any]) -> Any:
        """Return a node of the same kind with the given children."""
        return pytree.tree_unflatten(list(children), self.structure)


def open_node(value: Any) -> Node | None:
    """Return the node of `value` with its direct children, or None if `value` is a leaf."""
    if isinstance(value, RoundPipePackedData):
        return None
    # is_leaf makes every child of `value` a leaf, so pytree flattens one level only.
    children, structure = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if len(children) == 1 and children[0] is value:
        return None
    # Mappings such as ModelOutput may be registered with pytree without names; then their keys serve as names.
    if isinstance(value, Mapping) and len(value) == len(children):
        names = [f"[{key!r}]" for key in value]
    else:
        try:
            keyed, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
            names = [pytree.keystr(path) for path, _ in keyed]
        except ValueError:  # the node's type is registered without names for its children
            names = [f"[{index}]" for index in range(len(children))]
    return Node(value, tuple(children), tuple(names), structure)


def leaves_with_path(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf of `value` in pytree's order; paths begin with `path`."""
    node = open_node(value)
    if node is None:
        yield path, value
        return
    for name, child in zip(node.names, node.children, strict=True):
        yield from leaves_with_path(child, path + name)


def children_as_spec(node: Node, spec: Any) -> tuple[Any, ...] | None:
    """Return the parts of `spec` in the order of the node's children, or None if the structures differ.

    A tuple or list matches every tuple or list of that length, including named tuples. A mapping matches every mapping
    with the same keys. Any other node matches a spec of the same type. pytree may leave out fields of a dataclass that
    are None; the spec of a field that is left out is None.
    """
    spec_node = open_node(spec)
    if spec_node is None:
        return None
    if isinstance(node.value, Mapping) and isinstance(spec, Mapping):
        return _children_by_name(node, spec_node)
    if isinstance(node.value, tuple | list) and isinstance(spec, tuple | list):
        return spec_node.children if len(spec_node.children) == len(node.children) else None
    return _children_by_field(node, spec_node) if type(node.value) is type(spec) else None


def children_if_alike(node: Node, other: Any) -> tuple[Any, ...] | None:
    """Return the children of `other` in the order of the node's children, or None if the structures differ.

    Mappings with the same keys are alike, in any order of keys.
    """
    other_node = open_node(other)
    if other_node is None or type(node.value) is not type(other):
        return None
    if isinstance(node.value, Mapping):
        return _children_by_name(node, other_node)
    return other_node.children if node.structure == other_node.structure else None


def _children_by_name(node: Node, other: Node) -> tuple[Any, ...] | None:
    """Return the children of `other` in the order of the node's names, or None if the names differ."""
    by_name = dict(zip(other.names, other.children, strict=True))
    if by_name.keys() != set(node.names):
        return None
    return tuple(by_name[name] for name in node.names)


def _children_by_field(node: Node, spec: Node) -> tuple[Any, ...] | None:
    """Return what `_children_by_name` returns, with None for fields (named `.field`) that the spec lacks.

    pytree leaves out such a field if it is None in the spec.
    """
    by_name = dict(zip(spec.names, spec.children, strict=True))
    hidden = set(node.names) - by_name.keys()  # names of fields that the value has and that are None in the spec
    if not by_name.keys() <= set(node.names) or not all(name.startswith(".") for name in hidden):
        return None
    return tuple(by_name.get(name) for name in node.names)


def outline(value: Any) -> str:
    """Return the structure of a value for messages, in one line: `(Tensor[4, 3], {'mask': bool})`."""
    node = open_node(value)
    if node is None:
        return _outline_leaf(value)
    parts = [outline(child) for child in node.children]
    if isinstance(value, Mapping):
        inner = ", ".join(f"{name[1:-1]}: {part}" for name, part in zip(node.names, parts, strict=True))
        return "{" + inner + "}"
    if type(value) is tuple:
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"
    if type(value) is list:
        return "[" + ", ".join(parts) + "]"
    inner = ", ".join(f"{name.lstrip('.')}={part}" for name, part in zip(node.names, parts, strict=True))
    return f"{type(value).__name__}({inner})"


def _outline_leaf(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, RoundPipePackedData):
        return f"RoundPipePackedData of {len(value)}"
    return type(value).__name__


def shown(value: Any) -> str:
    """Return the repr of a value for messages, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


__all__ = [
    "Chunk",
    "Reducer",
    "Replicate",
    "check_merge_output",
    "check_split_input",
    "check_split_label",
    "is_chunk",
    "is_custom_function",
    "is_leaf_spec",
    "is_reducer",
    "is_replicate",
    "noting_function",
]

_HOME = "torch.distributed.pipelining.microbatch"
# By public name: the name of the class in torch's module. Two of the classes have no public name there.
_TORCH_NAMES = {"Chunk": "TensorChunkSpec", "Replicate": "_Replicate", "Reducer": "_CustomReducer"}


def __getattr__(name: str) -> Any:
    """Import torch's class at the first use of `Chunk`, `Replicate` or `Reducer`."""
    if name in _TORCH_NAMES:
        return getattr(importlib.import_module(_HOME), _TORCH_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_chunk(spec: Any) -> TypeGuard[Chunk]:
    return _is_instance_of(spec, "Chunk")


def is_reducer(spec: Any) -> TypeGuard[Reducer]:
    return _is_instance_of(spec, "Reducer")


def is_replicate(spec: Any) -> bool:
    """Return whether `spec` is Replicate, written as the class or as an instance of it."""
    return _is_instance_of(spec, "Replicate") or _is_class_of(spec, "Replicate")


def is_leaf_spec(spec: Any) -> bool:
    """Return whether `spec` is a leaf of a spec tree: Chunk, Reducer or Replicate."""
    return is_chunk(spec) or is_reducer(spec) or is_replicate(spec)


def is_custom_function(spec: Any) -> bool:
    """Return whether `spec` is a function of the user. The spec classes are callable but are not such functions."""
    if not callable(spec):
        return False
    return not (is_leaf_spec(spec) or _is_class_of(spec, "Chunk") or _is_class_of(spec, "Reducer"))


@contextmanager
def noting_function(place: str, function: Any) -> Iterator[None]:
    """Add a note that names the user's function to any exception it raises; the exception keeps its type."""
    try:
        yield
    except Exception as error:
        add_note(error, f"in {place} function {getattr(function, '__qualname__', repr(function))}")
        raise


def check_split_input(split_input: Any) -> None:
    """Raise unless `split_input` is None, a function or a pair (args_spec, kwargs_spec)."""
    if split_input is None or is_custom_function(split_input):
        return
    if not isinstance(split_input, tuple | list):
        raise ArgumentTypeError(
            f"split_input must be None, a function (args, kwargs, num_microbatch), or a pair (args_spec, kwargs_spec), "
            f"not {_typed(split_input)}"
        )
    if len(split_input) != 2:
        raise SplitError(
            f"split_input must be a pair (args_spec, kwargs_spec), got {len(split_input)} entries; for one argument "
            "write ((Chunk(0),), None)"
        )
    # A likely mistake is a single Chunk in place of the tuple of args, so each of the two parts has its own message.
    args_spec, kwargs_spec = split_input
    if args_spec is not None and not isinstance(args_spec, tuple | list):
        raise SplitError(
            f"split_input[0] must be None or a tuple with one spec per positional argument, not {_typed(args_spec)}; "
            "for one argument write ((Chunk(0),), None)"
        )
    if kwargs_spec is not None and not isinstance(kwargs_spec, Mapping):
        raise SplitError(
            f"split_input[1] must be None or a dict with one spec per keyword argument, not {_typed(kwargs_spec)}"
        )
    _check_leaf_specs(args_spec, "split_input[0]", SplitError)
    _check_leaf_specs(kwargs_spec, "split_input[1]", SplitError)


def check_split_label(split_label: Any) -> None:
    """Raise unless `split_label` is None, a function or a spec tree."""
    if split_label is not None and not is_custom_function(split_label):
        _check_leaf_specs(split_label, "split_label", SplitError)


def check_merge_output(merge_output: Any) -> None:
    """Raise unless `merge_output` is None, a bool, a function or a spec tree."""
    if merge_output is not None and not isinstance(merge_output, bool) and not is_custom_function(merge_output):
        _check_leaf_specs(merge_output, "merge_output", MergeError)


def _check_leaf_specs(spec: Any, root: str, error: type[ConfigError]) -> None:
    """Raise `error` or ArgumentTypeError unless every leaf of `spec` is a valid leaf spec or None.

    A Reducer is valid for merging only. root: the name of `spec` in messages.
    """
    for path, leaf in leaves_with_path(spec, root):
        if leaf is None or is_replicate(leaf):
            continue
        if is_chunk(leaf):
            if isinstance(leaf.split_dim, bool) or not isinstance(leaf.split_dim, int):
                raise ArgumentTypeError(
                    f"{path} is Chunk({leaf.split_dim!r}); the dimension must be an int, such as Chunk(0)"
                )
        # Replicate may be written as a class, so users may also write Chunk or Reducer as a class.
        elif _is_class_of(leaf, "Chunk"):
            raise error(f"{path} is the class {leaf.__name__}; say along which dimension: Chunk(0)")
        elif _is_class_of(leaf, "Reducer"):
            raise error(f"{path} is the class {leaf.__name__}; give it a start and a function: Reducer(init_value, fn)")
        elif not is_reducer(leaf):
            raise ArgumentTypeError(
                f"{path} is {_typed(leaf)}, which is not a split or merge spec; use Chunk(dim), Replicate, "
                "Reducer(init_value, fn) (merging only), or None for automatic"
            )
        elif error is SplitError:
            raise error(f"{path} is a Reducer, which only merges; to split use Chunk(dim), Replicate or None")


def _is_instance_of(spec: Any, name: str) -> bool:
    """Return whether `spec` is an instance of the spec class `name`, without importing torch's module."""
    # If the module was never imported, no instance of its classes exists.
    return _HOME in sys.modules and isinstance(spec, __getattr__(name))


def _is_class_of(spec: Any, name: str) -> TypeGuard[type[Any]]:
    """Return whether `spec` is the spec class `name` itself, without importing torch's module."""
    return _HOME in sys.modules and isinstance(spec, type) and issubclass(spec, __getattr__(name))


def _typed(spec: Any) -> str:
    """Return the type and the value of an invalid spec for messages."""
    return f"{type(spec).__name__} {shown(spec)}"


# Packed data.


class ArrivalEvent(Protocol):
    """The end of one value's transfer."""

    def wait(self) -> None:
        """Block the host until the value may be read."""


@dataclass(frozen=True)
class Arriving:
    """A leaf of one microbatch's inputs or label that may still be in transfer.

    `split_call` replaces each element of packed data that has an event by an `Arriving`. A reader waits for `event`
    before it uses `value`. The class is not registered with pytree, so an `Arriving` is a single leaf even if `value`
    is a container.
    """

    value: Any
    event: ArrivalEvent | None


class RoundPipePackedData(list[Any]):
    """A list with one value per microbatch. Call `synchronize()` before reading the values.

    If it is passed to a RoundPipe, its elements become the call's microbatches, and the host does not wait for them.
    `packed[a:b]`, `packed.copy()` and `packed + other` are plain lists without events, as for any list subclass. Call
    `packed.synchronize()` before making one. `copy.copy`, `copy.deepcopy` and pickling synchronize automatically.
    """

    def __init__(self, values: Iterable[Any] = (), events: Sequence[ArrivalEvent | None] = ()) -> None:
        super().__init__(values)
        if events and len(events) != len(self):
            raise ConfigError(
                f"RoundPipePackedData got {len(self)} values but {len(events)} events; give one event (or None) per "
                "value, or no events when every value has arrived"
            )
        self._pending: list[ArrivalEvent | None] = list(events)
        # [Note: events belong to values] `_awaited` is a copy of the list at its construction. If the user changes the
        # list (append, reverse, ...), its elements no longer match the events by index. A changed list must therefore
        # be synchronized before its elements are used.
        self._awaited: list[Any] = list(self) if self._pending else []

    @property
    def events(self) -> list[ArrivalEvent | None]:
        """One event per value; None for a value that has arrived.

        Synchronizes first if the list was changed, see [Note: events belong to values].
        """
        is_unchanged = len(self) == len(self._awaited) and all(map(operator.is_, self, self._awaited))
        if self._pending and not is_unchanged:
            self.synchronize()
        return list(self._pending) or [None] * len(self)

    def as_microbatches(self) -> list[Any]:
        """Return one leaf per microbatch: an `Arriving` if the value has an event, else the value."""
        events = self.events  # waits here if the list was changed
        return [value if event is None else Arriving(value, event) for value, event in zip(self, events, strict=True)]

    def synchronize(self) -> None:
        """Block until every value has arrived. Later calls return at once; after a failed wait they retry."""
        for event in self._pending:
            if event is not None:
                event.wait()
        # Events are dropped only after all waits. If a wait raises, all events stay for the next call.
        self._pending, self._awaited = [], []

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Copy or pickle the values. The events are left out, because they are valid in this process only."""
        self.synchronize()
        return (type(self), (list(self),))
