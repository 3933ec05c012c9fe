"""The words of split and merge specs, and the checks that a spec is made of them.

`Chunk`, `Replicate` and `Reducer` are torch's own marker classes under public names, so specs written with either
work. Importing torch's module takes seconds and sets environment variables, so it is left to whoever names a marker:
as long as nobody has imported it, no spec can contain one. Knows specs, never inputs.
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
    "is_marker",
    "is_reducer",
    "is_replicate",
    "noting_function",
]

_HOME = "torch.distributed.pipelining.microbatch"
_TORCH_NAMES = {"Chunk": "TensorChunkSpec", "Replicate": "_Replicate", "Reducer": "_CustomReducer"}


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        return getattr(importlib.import_module(_HOME), _TORCH_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_chunk(spec: Any) -> TypeGuard[Chunk]:
    return _is_instance_of(spec, "Chunk")


def is_reducer(spec: Any) -> TypeGuard[Reducer]:
    return _is_instance_of(spec, "Reducer")


def is_replicate(spec: Any) -> bool:
    """Replicate may be written as the class or as an instance of it."""
    return _is_instance_of(spec, "Replicate") or _is_class_of(spec, "Replicate")


def is_marker(spec: Any) -> bool:
    """Whether `spec` is one word of a spec tree."""
    return is_chunk(spec) or is_reducer(spec) or is_replicate(spec)


def is_custom_function(spec: Any) -> bool:
    """Whether `spec` is the user's own function. Marker classes can be called too but never are."""
    is_class = _is_class_of(spec, "Chunk") or _is_class_of(spec, "Reducer")
    return callable(spec) and not is_marker(spec) and not is_class


@contextmanager
def noting_function(place: str, function: Any) -> Iterator[None]:
    """Let what the user's function raises pass with its own type, and note which function it was."""
    try:
        yield
    except Exception as error:
        add_note(error, f"in {place} function {getattr(function, '__qualname__', repr(function))}")
        raise


def check_split_input(split_input: Any) -> None:
    """Refuse what is neither None, a function nor a pair (args_spec, kwargs_spec)."""
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
    _check_words(args_spec, "split_input[0]", SplitError)
    _check_words(kwargs_spec, "split_input[1]", SplitError)


def check_split_label(split_label: Any) -> None:
    """Refuse what is neither None, a function nor a spec tree."""
    if not is_custom_function(split_label):
        _check_words(split_label, "split_label", SplitError)


def check_merge_output(merge_output: Any) -> None:
    """Refuse what is neither None, a bool, a function nor a spec tree."""
    if not isinstance(merge_output, bool) and not is_custom_function(merge_output):
        _check_words(merge_output, "merge_output", MergeError)


def _check_words(spec: Any, root: str, error: type[ConfigError]) -> None:
    for path, word in leaves_with_path(spec, root):
        if word is None or is_replicate(word):
            continue
        if is_chunk(word):
            _check_dim(word, path)
        elif _is_class_of(word, "Chunk"):
            raise error(f"{path} is the class {word.__name__}; say along which dimension: Chunk(0)")
        elif _is_class_of(word, "Reducer"):
            raise error(f"{path} is the class {word.__name__}; give it a start and a function: Reducer(init_value, fn)")
        elif not is_reducer(word):
            raise ArgumentTypeError(
                f"{path} is {_typed(word)}, which is no split or merge marker; use Chunk(dim), Replicate, "
                "Reducer(init_value, fn) (merging only), or None for automatic"
            )
        elif error is SplitError:
            raise error(f"{path} is a Reducer, which only merges; to split use Chunk(dim), Replicate or None")


def _check_dim(chunk: Chunk, path: str) -> None:
    if isinstance(chunk.split_dim, bool) or not isinstance(chunk.split_dim, int):
        raise ArgumentTypeError(f"{path} is Chunk({chunk.split_dim!r}); the dimension must be an int, such as Chunk(0)")


def _is_instance_of(spec: Any, marker: str) -> bool:
    return _HOME in sys.modules and isinstance(spec, __getattr__(marker))


def _is_class_of(spec: Any, marker: str) -> TypeGuard[type[Any]]:
    return _HOME in sys.modules and isinstance(spec, type) and issubclass(spec, __getattr__(marker))


def _typed(spec: Any) -> str:
    return f"{type(spec).__name__} {shown(spec)}"
