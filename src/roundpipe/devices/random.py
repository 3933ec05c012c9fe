"""Gives the random numbers a layer draws from Python's and numpy's shared generators a stream of their own.

`random` and `numpy.random` each have one generator for the whole process, and their module-level functions are its
bound methods. The runtime replaces these functions once by functions that look at the calling thread: inside a
`ProcessRandomStream` they draw from that stream, everywhere else from the shared generator, as before. So a layer's
numbers do not depend on other threads, a recomputation repeats them, and the user's own sequences stay untouched.

Saving, seeding and restoring the shared generator around a layer would not do: layers run at the same time on several
threads, and the user's thread may draw while a backward still runs.
Knows no layer.

Gives the random numbers a layer draws on the CPU a stream of their own.

Torch has one CPU generator for all threads. Seeding it for a layer would race with other workers and with the user's
own thread, so on worker threads every random CPU operation is handed an explicit generator instead.
Entered by the runtime around a layer's forward. Knows no layer.
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

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.errors import UsageError
from roundpipe.monitor import process_lock

_aten = torch.ops.aten
_default_generator_lock = process_lock()


class HostRandomStream(TorchDispatchMode):
    """While entered, random CPU operations of this thread draw from a generator seeded with `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generator: torch.Generator | None = None

    @property
    def drew(self) -> bool:
        return self._generator is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _on_cpu(args, kwargs) or _never_draws(func, args):
            return func(*args, **kwargs)
        refuse_inside_checkpoint("on a CPU device")
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generator = self._stream()
        if any(argument.name == "generator" for argument in func._schema.arguments):
            if kwargs.get("generator") is not None:  # the layer brought a generator of its own
                return func(*args, **kwargs)
            return func(*args, **{**kwargs, "generator": generator})
        replacement = _REPLACEMENTS.get(func.overloadpacket)
        if replacement is not None:
            return replacement(generator, func, args, kwargs)
        return _draw_with_swapped_default(generator, func, args, kwargs)

    def _stream(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator("cpu")
            self._generator.manual_seed(self._seed)
        return self._generator


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu"
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _never_draws(func: Any, args: tuple[Any, ...]) -> bool:
    # Fused attention carries the tag for its dropout, which the CPU kernel does not have.
    return bool(func is getattr(_aten._scaled_dot_product_flash_attention_for_cpu, "default", None))


def refuse_inside_checkpoint(how: str) -> None:
    """torch.utils.checkpoint would replay the process-wide generator, not this stream: wrong masks, silently."""
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top_hooks(False) if top_hooks is not None else None
    if hooks and "checkpoint" in str(getattr(hooks[0], "__module__", "")):
        raise UsageError(
            f"a layer draws random numbers inside torch.utils.checkpoint {how}, which cannot replay them; "
            "RoundPipe already recomputes layers, so switch the layer's own checkpointing off."
        )


def _factory(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    overload = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return getattr(func.overloadpacket, overload)(*args, **kwargs, generator=generator)


def _like(fill: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def draw(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fill(_aten.empty_like(args[0], **kwargs), *args[1:], generator=generator)

    return draw


def _random_between(tensor: torch.Tensor, *bounds: Any, generator: torch.Generator) -> torch.Tensor:
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    return tensor.random_(int(low), int(high), generator=generator)


def _dropout(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, probability, train = (*args, True)[:3]
    if train is False or probability == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - probability, generator=generator)
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    return tensor.mul(mask).mul_(scale), mask


def _draw_with_swapped_default(
    generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Last resort for operations that take no generator: lend our state to the default one for this operation."""
    with _default_generator_lock:
        users_state = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(users_state)


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    _aten.rand: _factory,
    _aten.randn: _factory,
    _aten.randint: _factory,
    _aten.randperm: _factory,
    _aten.rand_like: _like(torch.Tensor.uniform_),
    _aten.randn_like: _like(torch.Tensor.normal_),
    _aten.randint_like: _like(_random_between),
    _aten.native_dropout: _dropout,
}


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
