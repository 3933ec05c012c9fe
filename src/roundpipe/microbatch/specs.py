"""Split and merge specs: trees whose leaves are `Chunk`, `Replicate`, `Reducer` or None, and their validation.

The three classes are those of torch.distributed.pipelining under public names, so users may import them from either
place. Importing torch's module takes seconds and sets environment variables. It is therefore imported at the first use
of one of the names; before that, no spec can contain one. Knows no inputs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

from roundpipe.errors import ArgumentTypeError, ConfigError, MergeError, SplitError, add_note
from roundpipe.microbatch.tree import leaves_with_path, shown

if TYPE_CHECKING:
    from torch.distributed.pipelining.microbatch import TensorChunkSpec as Chunk
    from torch.distributed.pipelining.microbatch import _CustomReducer as Reducer
    from torch.distributed.pipelining.microbatch import _Replicate as Replicate

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
# torch has no public names for two of the classes.
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
    """Return whether `spec` is a function of the user. The spec classes are callable, too, but do not count."""
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
    # A single Chunk in place of a tuple of args is a likely mistake, so the two parts have their own messages.
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
    """Raise `error` or ArgumentTypeError unless every leaf is a valid leaf spec or None. Splitting takes no Reducer."""
    for path, leaf in leaves_with_path(spec, root):
        if leaf is None or is_replicate(leaf):
            continue
        if is_chunk(leaf):
            if isinstance(leaf.split_dim, bool) or not isinstance(leaf.split_dim, int):
                raise ArgumentTypeError(
                    f"{path} is Chunk({leaf.split_dim!r}); the dimension must be an int, such as Chunk(0)"
                )
        # Replicate may be written as a class, so users try it with the other two as well.
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
