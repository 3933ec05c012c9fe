"""The settings under which layers compute: seeds, random streams on the host, autocast and thread count.

Random streams belong to (call, layer, microbatch), never to a device, so that a call draws the same numbers on any
number of devices and a recomputation draws what the forward drew. Knows no layers.

[Note: random numbers on the host]
Torch's CPU generator, `random` and `numpy.random` each have one generator for the whole process. A layer must not draw
from it: its numbers would depend on other threads, a recomputation could not repeat them, and the user's own sequence
would change. Saving, seeding and restoring the shared generator around a layer does not work, because layers run on
several threads at the same time and the user's thread may draw meanwhile. Instead:

- `HostRandomStream` passes an explicit generator to every random CPU operation of torch on its thread.
- `ProcessRandomStream` does the same for `random` and `numpy.random`. Their module-level functions are bound methods of
  the shared generator. `route_shared_generators` replaces them once by functions that draw from the calling thread's
  stream, or from the shared generator outside of a stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import random
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.errors import UsageError
from roundpipe.monitor import process_lock

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def draw_call_seed() -> int:
    """Draw the seed of a call from torch's default generator, so that `torch.manual_seed` makes calls repeatable."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def stream_seed(call_seed: int, layer_id: int, microbatch: int, is_new: bool) -> int:
    """Return the seed (63 bits) of one layer and microbatch, which depends on every bit of the arguments (splitmix64).

    is_new: True for a recomputation that must not repeat the forward's numbers; it gets a different seed.
    """
    state = call_seed & _MASK
    for part in (layer_id, microbatch, int(is_new)):
        state = (state + _GOLDEN * (part + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclasses.dataclass(frozen=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Ambient:
    """Settings of the calling thread that affect the results of kernels. Workers compute with the same settings."""

    autocasts: tuple[_Autocast, ...]
    cache_enabled: bool
    num_threads: int

    @classmethod
    def capture(cls) -> Ambient:
        autocasts = tuple(
            _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )
        return cls(autocasts, torch.is_autocast_cache_enabled(), torch.get_num_threads())

    def take_over(self) -> AbstractContextManager[object]:
        """Use the caller's number of threads on this thread, and return a context manager with the caller's autocast.

        Sums on the CPU depend on the number of threads. The context manager is to be entered around each layer by
        itself, because leaving it clears the cache of casts. It may be entered again after it was left.
        """
        route_shared_generators()
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        enabled = [cast for cast in self.autocasts if cast.enabled]
        return _Casting(enabled, self.cache_enabled) if enabled else contextlib.nullcontext()


class _Casting(AbstractContextManager[None]):
    def __init__(self, casts: list[_Autocast], cache_enabled: bool) -> None:
        self._casts, self._cache_enabled = casts, cache_enabled

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for cast in self._casts:
                stack.enter_context(torch.autocast(cast.device_type, cast.dtype, cache_enabled=self._cache_enabled))
            self._entered = stack.pop_all()

    def __exit__(self, *exc_info: object) -> None:
        self._entered.close()


_aten = torch.ops.aten
_default_generator_lock = process_lock()


class HostRandomStream(TorchDispatchMode):
    """While entered, torch's random CPU operations on this thread draw from a generator seeded with `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generator: torch.Generator | None = None
        self.drew = False  # whether any operation has drawn from this stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _on_cpu(args, kwargs) or _never_draws(func, args):
            return func(*args, **kwargs)
        refuse_inside_checkpoint("on a CPU device")
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a random operation with this stream's generator, in the first way that the operation allows."""
        if self._generator is None:
            self._generator = torch.Generator("cpu")
            self._generator.manual_seed(self._seed)
            self.drew = True
        generator = self._generator
        if any(argument.name == "generator" for argument in func._schema.arguments):
            if kwargs.get("generator") is not None:  # the layer passes its own generator
                return func(*args, **kwargs)
            return func(*args, **{**kwargs, "generator": generator})
        replacement = _REPLACEMENTS.get(func.overloadpacket)
        if replacement is not None:
            return replacement(generator, func, args, kwargs)
        return _draw_with_swapped_default(generator, func, args, kwargs)


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation runs on the CPU: by its first tensor, else by its `device` argument."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu"
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _never_draws(func: Any, args: tuple[Any, ...]) -> bool:
    # Fused attention is tagged as random because of its dropout, which the CPU kernel does not implement.
    return bool(func is getattr(_aten._scaled_dot_product_flash_attention_for_cpu, "default", None))


def refuse_inside_checkpoint(how: str) -> None:
    """Raise a UsageError if code inside torch.utils.checkpoint draws from the stream of a layer.

    When checkpoint recomputes, it restores the shared generator but not the stream, so dropout masks would silently
    differ. `how` describes the draw in the message.
    """
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    # The saved-tensor hooks of torch.utils.checkpoint are the only visible sign that code runs inside it.
    hooks = top_hooks(False) if top_hooks is not None else None
    if hooks and "checkpoint" in str(getattr(hooks[0], "__module__", "")):
        raise UsageError(
            f"a layer draws random numbers inside torch.utils.checkpoint {how}, which cannot replay them; "
            "RoundPipe already recomputes layers, so switch the layer's own checkpointing off."
        )


def _factory(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the overload of a factory such as torch.rand that takes a generator."""
    overload = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return getattr(func.overloadpacket, overload)(*args, **kwargs, generator=generator)


def _like(fill: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a replacement for an operation such as torch.rand_like: an empty tensor filled by `fill`."""

    def draw(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fill(_aten.empty_like(args[0], **kwargs), *args[1:], generator=generator)

    return draw


def _random_between(tensor: torch.Tensor, *bounds: Any, generator: torch.Generator) -> torch.Tensor:
    """Fill a tensor as torch.randint_like does; `bounds` are (high,) or (low, high)."""
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    return tensor.random_(int(low), int(high), generator=generator)


def _dropout(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the output and the mask of aten.native_dropout."""
    tensor, probability, train = (*args, True)[:3]
    # The result does not depend on random numbers, so none are drawn.
    if train is False or probability == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - probability, generator=generator)
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    return tensor.mul(mask).mul_(scale), mask


def _draw_with_swapped_default(
    generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation that takes no generator while the default generator has this stream's state."""
    with _default_generator_lock:  # two threads must not swap the state at the same time
        users_state = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(users_state)


# Operations whose called overload takes no generator, each with a replacement that does.
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


# Functions of numpy.random that are not bound methods of the shared generator, with the method that they call.
_NUMPY_ALIASES = {"seed": "seed", "ranf": "random_sample", "sample": "random_sample"}


class ProcessRandomStream:
    """While entered, `random` and `numpy.random` draw on this thread from generators seeded with `seed`."""

    def __init__(self, seed: int, *, is_watched: bool = False) -> None:
        """`is_watched`: raise a UsageError on exit if a shared generator was used without the replaced functions."""
        self._seed = seed
        self._is_watched = is_watched
        self._generators: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._token = _stream.set(self)
        self._before = _use_of_shared_generators() if self._is_watched else None

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        _stream.reset(self._token)
        if self._before is not None and kind is None:  # an exception of the layer is not replaced by this check
            _refuse_unrouted_use(*self._before)

    def generator(self, module: str) -> Any:
        """Return this stream's generator for `module`: "random" or "numpy.random"."""
        refuse_inside_checkpoint(f"from the functions of {module}")
        if module not in self._generators:
            # numpy takes seeds as 32-bit words. The third word makes its numbers differ from those of `random`.
            seed = self._seed if module == "random" else (self._seed & 0xFFFFFFFF, self._seed >> 32, 1)
            self._generators[module] = _kind_of_generator(sys.modules[module])(seed)
        return self._generators[module]


_stream: ContextVar[ProcessRandomStream | None] = ContextVar("roundpipe_process_random_stream", default=None)
_shared: dict[str, Any] = {}  # the shared generator of each module whose functions were replaced
_outside = [0]  # increases with every use of a shared generator through its functions


def route_shared_generators() -> None:
    """Replace the functions of `random`, and of `numpy.random` if numpy is imported; see the module docstring.

    Also replaces them in modules that have imported them by name (`from random import random`). Repeated calls return
    at once. Two threads may call this at the same time without a lock, because both install equivalent functions.
    """
    if "random" not in _shared:
        _route(random)
    if "numpy.random" not in _shared and "numpy" in sys.modules:
        _route(importlib.import_module("numpy.random"))  # numpy imports it lazily


def _route(module: types.ModuleType) -> None:
    """Replace the functions of one module, in all modules that have imported them."""
    kind = _kind_of_generator(module)
    # A different thread may have replaced some functions already; `__wrapped__` is the original function.
    functions = {name: getattr(value, "__wrapped__", value) for name, value in list(vars(module).items())}
    owners = (getattr(function, "__self__", None) for function in functions.values())
    shared = next(owner for owner in owners if isinstance(owner, kind))
    aliases = _NUMPY_ALIASES if module.__name__ == "numpy.random" else {}
    routed: dict[int, Callable[..., Any]] = {}
    for name, function in functions.items():
        if name in aliases or getattr(function, "__self__", None) is shared:
            routed[id(function)] = _routed(function, module.__name__, name, aliases.get(name, name))
            setattr(module, name, routed[id(function)])
    # Modules that ran `from random import random` hold the original function.
    for other in list(sys.modules.values()):
        if isinstance(other, types.ModuleType):
            for name, value in list(vars(other).items()):
                if id(value) in routed:
                    vars(other)[name] = routed[id(value)]
    _shared[module.__name__] = shared  # set last: it makes `route_shared_generators` return early


def _kind_of_generator(module: types.ModuleType) -> Any:
    """Return the class of the module's generators."""
    return module.Random if module.__name__ == "random" else module.RandomState


def _routed(shared_function: Callable[..., Any], module: str, name: str, method: str) -> Callable[..., Any]:
    """Return a function that calls `method` of the thread's stream, or `shared_function` outside of a stream."""

    @functools.wraps(shared_function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        stream = _stream.get()
        if stream is not None:
            return getattr(stream.generator(module), method)(*args, **kwargs)
        _outside[0] += 1  # counted before and after the draw: a watched stream may exit in between
        try:
            return shared_function(*args, **kwargs)
        finally:
            _outside[0] += 1

    draw.__module__, draw.__name__, draw.__qualname__ = module, name, name  # pickle finds functions by name
    return draw


def _use_of_shared_generators() -> tuple[int, dict[str, tuple[Any, ...]]]:
    """Return how often the shared generators were used through their functions, and their states."""
    states: dict[str, tuple[Any, ...]] = {}
    for module, shared in _shared.items():
        if module == "random":
            states[module] = shared.getstate()
        else:
            name, keys, *rest = shared.get_state()
            states[module] = name, keys.tobytes(), *rest
    return _outside[0], states


def _refuse_unrouted_use(draws_before: int, states_before: dict[str, tuple[Any, ...]]) -> None:
    """Raise a UsageError if a shared generator's state changed although none of its functions was called."""
    draws, states = _use_of_shared_generators()
    used = [name for name, state in states.items() if state != states_before.get(name, state)]
    # If other threads drew through the functions meanwhile, the change of state may be theirs.
    if used and draws == draws_before:
        raise UsageError(
            f"a layer drew from the shared generator of {used[0]} through a function that was stored in an attribute, "
            "a default argument or a local variable before the first call; RoundPipe cannot give it the same numbers "
            f"when it recomputes the layer. Write {used[0]}.<function>() in the layer, or draw with torch.rand()."
        )
