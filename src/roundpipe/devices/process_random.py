"""Gives the random numbers a layer draws from Python's and numpy's shared generators a stream of their own.

`random` and `numpy.random` each have one generator for the whole process, and their module-level functions are its
bound methods. The runtime replaces these functions once by functions that look at the calling thread: inside a
`ProcessRandomStream` they draw from that stream, everywhere else from the shared generator, as before. So a layer's
numbers do not depend on other threads, a recomputation repeats them, and the user's own sequences stay untouched.

Saving, seeding and restoring the shared generator around a layer would not do: layers run at the same time on several
threads, and the user's thread may draw while a backward still runs.
Knows no layer.
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from roundpipe.devices.host_random import refuse_inside_checkpoint
from roundpipe.errors import UsageError

# numpy functions that are not bound methods of the shared generator but call one.
_NUMPY_ALIASES = {"seed": "seed", "ranf": "random_sample", "sample": "random_sample"}


class ProcessRandomStream:
    """While entered, `random` and `numpy.random` draw on this thread from generators seeded with `seed`."""

    def __init__(self, seed: int, *, is_watched: bool = False) -> None:
        """`is_watched`: raise UsageError on exit if the shared generators were used past the routed functions."""
        self._seed = seed
        self._is_watched = is_watched
        self._generators: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._token = _stream.set(self)
        self._before = _use_of_shared_generators() if self._is_watched else None

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        _stream.reset(self._token)
        if self._before is not None and kind is None:
            _refuse_unrouted_use(*self._before)

    def generator(self, module: str) -> Any:
        """This stream's generator in place of the shared one of `random` or `numpy.random`."""
        refuse_inside_checkpoint(f"from the functions of {module}")
        if module not in self._generators:
            # numpy takes words of 32 bits. Without the third both generators would give the same numbers.
            seed = self._seed if module == "random" else (self._seed & 0xFFFFFFFF, self._seed >> 32, 1)
            self._generators[module] = _kind_of_generator(sys.modules[module])(seed)
        return self._generators[module]


_stream: ContextVar[ProcessRandomStream | None] = ContextVar("roundpipe_process_random_stream", default=None)
_shared: dict[str, Any] = {}  # the shared generator of each module whose functions were replaced
_outside = [0]  # grows with every use of a shared generator through its functions


def route_shared_generators() -> None:
    """Let the functions of `random`, and of `numpy.random` where torch has imported numpy, obey `ProcessRandomStream`.

    Names that modules have imported from them (`from random import random`) are replaced, too. Calling this again is
    cheap. Two threads may do it at the same time, without a lock: the functions of both do the same.
    """
    if "random" not in _shared:
        _route(random)
    if "numpy.random" not in _shared and "numpy" in sys.modules:
        _route(importlib.import_module("numpy.random"))  # numpy itself imports it at its first use


def _route(module: types.ModuleType) -> None:
    kind = _kind_of_generator(module)
    # Another thread may have replaced some of the functions by now; `__wrapped__` is the original.
    functions = {name: getattr(value, "__wrapped__", value) for name, value in list(vars(module).items())}
    owners = (getattr(function, "__self__", None) for function in functions.values())
    shared = next(owner for owner in owners if isinstance(owner, kind))
    aliases = _NUMPY_ALIASES if module.__name__ == "numpy.random" else {}
    routed: dict[int, Callable[..., Any]] = {}
    for name, function in functions.items():
        if name in aliases or getattr(function, "__self__", None) is shared:
            routed[id(function)] = _routed(function, module.__name__, name, aliases.get(name, name))
            setattr(module, name, routed[id(function)])
    for other in list(sys.modules.values()):
        if isinstance(other, types.ModuleType):
            for name, value in list(vars(other).items()):
                if id(value) in routed:
                    vars(other)[name] = routed[id(value)]
    _shared[module.__name__] = shared


def _kind_of_generator(module: types.ModuleType) -> Any:
    return module.Random if module.__name__ == "random" else module.RandomState


def _routed(shared_function: Callable[..., Any], module: str, name: str, method: str) -> Callable[..., Any]:
    @functools.wraps(shared_function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        stream = _stream.get()
        if stream is not None:
            return getattr(stream.generator(module), method)(*args, **kwargs)
        _outside[0] += 1  # before and after: a watch that ends in between must notice, too
        try:
            return shared_function(*args, **kwargs)
        finally:
            _outside[0] += 1

    draw.__module__, draw.__name__, draw.__qualname__ = module, name, name  # pickled by name, as before
    return draw


def _use_of_shared_generators() -> tuple[int, dict[str, tuple[Any, ...]]]:
    """How often they were used through their functions outside of streams, and their states."""
    states: dict[str, tuple[Any, ...]] = {}
    for module, shared in _shared.items():
        if module == "random":
            states[module] = shared.getstate()
        else:
            name, keys, *rest = shared.get_state()
            states[module] = name, keys.tobytes(), *rest
    return _outside[0], states


def _refuse_unrouted_use(draws_before: int, states_before: dict[str, tuple[Any, ...]]) -> None:
    draws, states = _use_of_shared_generators()
    used = [name for name, state in states.items() if state != states_before.get(name, state)]
    if used and draws == draws_before:
        raise UsageError(
            f"a layer drew from the shared generator of {used[0]} through a function that was stored in an attribute, "
            "a default argument or a local variable before the first call; RoundPipe cannot give it the same numbers "
            f"when it recomputes the layer. Write {used[0]}.<function>() in the layer, or draw with torch.rand()."
        )
