"""The settings under which layers compute: seeds, random streams on the host, autocast and thread count.

Random streams belong to (call, layer, microbatch), never to a device, so that a call draws the same numbers on any
number of devices and a recomputation draws what the forward drew. Knows no layers.

[Note: random numbers on the host]
Torch's CPU generator, `random` and `numpy.random` each have one generator for the whole process. A layer must not use
it: its numbers would depend on other threads, a recomputation could not repeat them, and the user's own sequence would
change. Saving, seeding and restoring the shared generator around a layer does not work, because layers run on several
threads at the same time and the user's thread may draw meanwhile. It can also freeze the process: `get_state()` of
torch's generator holds the generator's mutex while it makes a Python object, and the garbage collection that this may
start releases the interpreter lock; a second thread then takes that lock and waits for the mutex. Instead:

- A `RandomStream` has a separate generator of each kind. It is current on the thread that has entered it. A backward
  pass on a GPU runs on a thread of autograd, to which torch passes its own thread-local state on; see _BackwardStream.
- `TorchDraws` passes the stream's generator to every random CPU operation of torch.
- `route_shared_generators` replaces the functions of torch that read and set the state of its generator, and the
  functions of `random` and `numpy.random`, once, by functions that use the current stream. Outside of a stream these
  call the original.

[Note: checkpoints inside layers]
torch.utils.checkpoint reads the state of the generator in the forward and sets it before it recomputes. Both act on
streams: the recomputation, which runs inside a backward, sets the stream of that backward to a state of the stream of
the forward. So the layer's dropout masks are repeated, and the shared generator is not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.devices import Device, DeviceRandomStream
from roundpipe.errors import UsageError
from roundpipe.monitor import process_rlock

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def draw_call_seed() -> int:
    """Draw the seed of a call from torch's default generator, so that `torch.manual_seed` makes calls repeatable."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


class Phase(enum.IntEnum):
    """The phases of a layer that draw different numbers. A recomputation repeats the numbers of FORWARD."""

    FORWARD = 0
    NEW_FORWARD = 1  # a recomputation that must not repeat them
    BACKWARD = 2


def stream_seed(call_seed: int, layer_id: int, microbatch: int, phase: Phase) -> int:
    """Return the seed (63 bits) of one layer and microbatch. It depends on every bit of the arguments (splitmix64)."""
    state = call_seed & _MASK
    for part in (layer_id, microbatch, phase):
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


class TorchDraws(TorchDispatchMode):
    """While entered, torch's random CPU operations on this thread draw from the generator of `stream`."""

    def __init__(self, stream: RandomStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _on_cpu(args, kwargs) or _never_draws(func, args):
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a random operation with the stream's generator, in the first way that the operation allows."""
        names = [argument.name for argument in func._schema.arguments]
        if "generator" in names:
            position = names.index("generator")
            given = args[position] if position < len(args) else kwargs.get("generator")
            # torch.default_generator is what an operation without a generator draws from. Each access to a generator
            # makes another Python object, so their addresses are compared.
            if given is not None and given._cdata != torch.default_generator._cdata:  # type: ignore[attr-defined]
                return func(*args, **kwargs)
            generator, args = self._stream.drawn_from(), args[:position]  # it is the last one by position
            return func(*args, **{**kwargs, "generator": generator})
        replacement = _REPLACEMENTS.get(func.overloadpacket)
        if replacement is None:
            raise UsageError(
                f"a layer calls the operation {func}, which draws random numbers on the CPU from the generator that "
                "all threads share; a recomputation could not repeat them. Give the operation a `generator` argument, "
                "or draw the numbers with torch.rand() and pass them to it."
            )
        return replacement(self._stream.drawn_from(), func, args, kwargs)


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


def _factory(generator: torch.Generator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the overload of a factory such as torch.rand that takes a generator: for `low_out`, `low_generator_out`."""
    words = func._overloadname.split("_")
    kept = [word for word in words if word not in ("default", "out")]
    overload = "_".join([*kept, "generator", *(["out"] if words[-1] == "out" else [])])
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


_local = threading.local()  # `stream`: the stream that a thread has entered


class RandomStream:
    """The random numbers of one layer, or of the loss, in one microbatch.

    While entered, functions of torch, `random` and `numpy.random` on this thread use generators of this stream. A class
    and not a generator function, which would be slower: a stream is entered for every layer and microbatch.
    """

    def __init__(
        self,
        seed: int,
        on_device: DeviceRandomStream | None = None,
        task: TaskRandom | None = None,
        *,
        is_observed: bool = False,
        is_watched: bool = False,
    ) -> None:
        """`on_device`: the stream of the device, entered together with this one; torch.manual_seed() also seeds it.

        task: is told on exit what code has done inside the stream.
        is_observed: enter TorchDraws, too. Without it, operations on the CPU draw from the shared generator.
        is_watched: raise a UsageError on exit if a shared generator was used without the replaced functions.
        """
        self._seed = seed
        self._on_device, self._task = on_device, task
        self.draws = TorchDraws(self) if is_observed else None
        self._is_watched = is_watched
        self._generators: dict[str, Any] = {}
        self.drew = False  # whether an observed operation has drawn
        self.state_was_used = False  # whether code has read or set the state of torch's generator

    def __enter__(self) -> RandomStream:
        if self._on_device is not None:
            self._on_device.__enter__()
        self._outer = getattr(_local, "stream", None)
        _local.stream = self
        if self.draws is not None:
            self.draws.__enter__()
        self._before = _use_of_shared_generators() if self._is_watched else None
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self.draws is not None:
            self.draws.__exit__(*exc_info)
        _local.stream = self._outer
        if self._on_device is not None:
            self._on_device.__exit__(*exc_info)
        if self._task is not None:
            self._task.uses_state |= self.state_was_used
            self._task.draws_on_host |= self.drew
        if self._before is not None and exc_info[0] is None:  # an exception of the layer is not replaced by this check
            _refuse_unrouted_use(*self._before)

    @property
    def drew_on_host(self) -> bool | None:
        """Whether an operation has drawn on the CPU; None if operations were not observed."""
        return None if self.draws is None else self.drew

    def drawn_from(self) -> torch.Generator:
        """Return the generator for an operation of torch that draws."""
        self.drew = True
        return self._torch_generator()

    def _torch_generator(self) -> torch.Generator:
        if "torch" not in self._generators:
            self._generators["torch"] = torch.Generator("cpu").manual_seed(self._seed)
        generator: torch.Generator = self._generators["torch"]
        return generator

    def generator(self, module: str) -> Any:
        """Return this stream's generator for `module`: "random" or "numpy.random"."""
        _refuse_inside_checkpoint(module)
        if module not in self._generators:
            # numpy takes seeds as 32-bit words. The third word makes its numbers differ from those of `random`.
            seed = self._seed if module == "random" else (self._seed & 0xFFFFFFFF, self._seed >> 32, 1)
            self._generators[module] = _kind_of_generator(sys.modules[module])(seed)
        return self._generators[module]

    # The functions of torch with these names.

    def get_rng_state(self) -> torch.Tensor:
        self.state_was_used = True
        return self._torch_generator().get_state()

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        self.state_was_used = True
        self._torch_generator().set_state(new_state)

    def manual_seed(self, seed: Any) -> torch.Generator:
        self.state_was_used = True
        if self._on_device is not None:
            self._on_device.manual_seed(int(seed))
        return self._torch_generator().manual_seed(int(seed))

    def seed(self) -> int:
        """Seed with a number from this stream instead of an unpredictable one: a recomputation draws it, too."""
        number = int(torch.empty((), dtype=torch.int64).random_(generator=self._torch_generator()))
        self.manual_seed(number)
        return number

    def initial_seed(self) -> int:
        return self._torch_generator().initial_seed()


_KEY = "roundpipe_random_stream"  # of the stream of a backward pass in torch's thread-local state
# Older releases of torch cannot remove a key.
_forget_stream = getattr(torch._C, "_remove_obj_from_tls", lambda key: torch._C._stash_obj_in_tls(key, None))


class _BackwardStream(RandomStream):
    """The random numbers of a backward pass. Each layer that it reaches has its own, whatever the stage.

    With a device's stream, it is also in torch's thread-local state, so that autograd's thread for the device finds it.
    It must not stay there: a thread that ends with Python objects in this state can abort the process at its exit.
    """

    def __init__(
        self, task: TaskRandom, microbatch: int, on_device: DeviceRandomStream | None, is_observed: bool
    ) -> None:
        super().__init__(0, on_device, task, is_observed=is_observed)
        self._of_task, self._microbatch = task, microbatch
        self._layer_id: int | None = None  # the layer that the generators belong to

    def __enter__(self) -> RandomStream:
        super().__enter__()
        if self._on_device is not None:
            torch._C._stash_obj_in_tls(_KEY, self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._on_device is not None:
            _forget_stream(_KEY)
        super().__exit__(*exc_info)

    def _follow(self) -> None:
        if self._layer_id != self._of_task.layer_in_backward:
            self._layer_id = self._of_task.layer_in_backward
            self._seed = self._of_task.backward_seed(self._layer_id, self._microbatch)
            self._generators.clear()

    def _torch_generator(self) -> torch.Generator:
        self._follow()
        return super()._torch_generator()

    def generator(self, module: str) -> Any:
        self._follow()
        return super().generator(module)


def _current_stream() -> RandomStream | None:
    """The stream that the calling thread has entered, or that the backward pass on this autograd thread began in."""
    stream: RandomStream | None = getattr(_local, "stream", None)
    if stream is None and torch._C._is_key_in_tls(_KEY):
        stream = torch._C._get_obj_in_tls(_KEY)
    return stream


def drawing_mode() -> TorchDraws | None:
    """The mode through which operations on this thread draw from a stream; None if they are not observed."""
    stream: RandomStream | None = getattr(_local, "stream", None)
    return None if stream is None else stream.draws


def _refuse_inside_checkpoint(module: str) -> None:
    """Raise a UsageError if code inside torch.utils.checkpoint draws from `random` or `numpy.random`.

    When checkpoint recomputes, it restores torch's generators alone, so the numbers would silently differ.
    """
    checkpoints = sys.modules.get("torch.utils.checkpoint")
    frame = None if checkpoints is None else sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(checkpoints):
            raise UsageError(
                f"a layer draws random numbers inside torch.utils.checkpoint from the functions of {module}, which it "
                "cannot replay; RoundPipe already recomputes layers, so switch the layer's own checkpointing off."
            )
        frame = frame.f_back


class Drawing(Protocol):
    """What is known of the random numbers that a layer draws on the host."""

    is_known: bool  # whether a forward of the layer was observed
    draws_on_host: bool
    draws_in_backward: bool | None  # None: no backward was observed


class TaskRandom:
    """The random streams of the layers of one task, which runs on one device. The loss counts as one more layer.

    Operations on the CPU are observed, which costs time, only where they may draw.
    """

    def __init__(self, device: Device, call_seed: int, first_microbatch: int) -> None:
        """`first_microbatch`: the number of microbatch 0 in the whole batch."""
        self._device, self._call_seed, self._first_microbatch = device, call_seed, first_microbatch
        self.uses_state = False  # whether code has used the state of generators, as torch.utils.checkpoint does
        self.draws_on_host = device.draws_on_host  # whether code may have drawn numbers on the host
        self.layer_in_backward = 0  # the layer that the present backward has reached

    def forward(
        self, layer_id: int, microbatch: int, layer: Drawing | None = None, *, is_new: bool = False
    ) -> RandomStream:
        """The stream of a layer's forward. `is_new`: a recomputation that must draw anew."""
        phase = Phase.NEW_FORWARD if is_new else Phase.FORWARD
        seed = stream_seed(self._call_seed, layer_id, self._first_microbatch + microbatch, phase)
        draws_on_host = self._device.draws_on_host
        return RandomStream(
            seed,
            None if draws_on_host else self._device.random_stream(seed),
            self,
            is_observed=draws_on_host or (layer is not None and layer.draws_on_host),
            is_watched=layer is not None and not layer.is_known,
        )

    @contextlib.contextmanager
    def backward(self, layer_id: int, microbatch: int, layers: Sequence[Drawing] = ()) -> Iterator[None]:
        """Enter the stream of a backward through `layers` that begins with a layer or with the loss.

        The device's stream locks the device's generator. It is needed if a forward has used the state of generators:
        then the backward may set this state, to run a part of the forward again.
        """
        self.layer_in_backward = layer_id
        may_draw = any(layer.draws_in_backward is not False for layer in layers)
        is_observed = may_draw or (self.uses_state and self.draws_on_host)
        locks_device = self.uses_state and not self._device.draws_on_host
        on_device = self._device.random_stream(self.backward_seed(layer_id, microbatch)) if locks_device else None
        with _BackwardStream(self, microbatch, on_device, is_observed) as stream:
            yield
        if is_observed:
            for layer in layers:
                layer.draws_in_backward = stream.drew or bool(layer.draws_in_backward)

    def backward_seed(self, layer_id: int, microbatch: int) -> int:
        """The seed of a layer's backward in a microbatch."""
        return stream_seed(self._call_seed, layer_id, self._first_microbatch + microbatch, Phase.BACKWARD)


_TORCH_FUNCTIONS = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")
_shared: dict[str, Any] = {}  # the shared generator of each module whose functions were replaced
_outside = [0]  # increases with every use of a shared generator through its functions


_routing = process_rlock()
_replaced: dict[Callable[..., Any], Callable[..., Any]] = {}  # functions of torch, by the functions in their places


def route_shared_generators() -> None:
    """Replace functions of torch and `random`, and of `numpy.random` if numpy is imported; see the module docstring.

    Also replaces them in modules that have imported them by name (`from random import random`). Repeated calls return
    at once.
    """
    if "random" in _shared and ("numpy.random" in _shared or "numpy" not in sys.modules):
        return
    with _routing:
        if "random" not in _shared:
            _route_torch()
            _route(random)
        if "numpy.random" not in _shared and "numpy" in sys.modules:
            _route(importlib.import_module("numpy.random"))  # numpy imports it lazily


def _route_torch() -> None:
    """Replace the functions that read or set the state of torch's CPU generator."""
    # torch.compile replaces torch.manual_seed by a function that calls torch.random.manual_seed.
    found = [(name, getattr(module, name)) for name in _TORCH_FUNCTIONS for module in (torch, torch.random)]
    _replace_everywhere(
        {id(function): _routed_torch(_replaced.get(function, function), name) for name, function in found}
    )


@functools.cache  # a function has one wrapper, also if a Ctrl-C ends its replacement and a later call repeats it
def _routed_torch(shared_function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls the method `name` of the current stream, or `shared_function` if there is none."""

    @functools.wraps(shared_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        stream = _current_stream()
        return shared_function(*args, **kwargs) if stream is None else getattr(stream, name)(*args, **kwargs)

    _replaced[call] = shared_function
    return call


def _route(module: types.ModuleType) -> None:
    """Replace the functions of one module, in all modules that have imported them."""
    kind = _kind_of_generator(module)
    # A Ctrl-C may have come between two replacements of an earlier call; `__wrapped__` is the original function.
    functions = {name: getattr(value, "__wrapped__", value) for name, value in list(vars(module).items())}
    owners = (getattr(function, "__self__", None) for function in functions.values())
    shared = next(owner for owner in owners if isinstance(owner, kind))
    aliases = _NUMPY_ALIASES if module.__name__ == "numpy.random" else {}
    routed: dict[int, Callable[..., Any]] = {}
    for name, function in functions.items():
        if name in aliases or getattr(function, "__self__", None) is shared:
            routed[id(function)] = _routed(function, module.__name__, name, aliases.get(name, name))
    _replace_everywhere(routed)
    _shared[module.__name__] = shared  # set last: it makes `route_shared_generators` return early


def _replace_everywhere(routed: Mapping[int, Callable[..., Any]]) -> None:
    """Replace functions, given by the id() of each, in all modules: `from random import random` makes copies."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in routed:
                    vars(module)[name] = routed[id(value)]


def _kind_of_generator(module: types.ModuleType) -> Any:
    """Return the class of the module's generators."""
    return module.Random if module.__name__ == "random" else module.RandomState


@functools.cache
def _routed(shared_function: Callable[..., Any], module: str, name: str, method: str) -> Callable[..., Any]:
    """Return a function that calls `method` of the thread's stream, or `shared_function` outside of a stream."""

    @functools.wraps(shared_function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        stream = _current_stream()
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
