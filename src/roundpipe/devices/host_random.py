"""Gives the random numbers a layer draws on the CPU a stream of their own.

Torch has one CPU generator for all threads. Seeding it for a layer would race with other workers and with the user's
own thread, so on worker threads every random CPU operation is handed an explicit generator instead.
Entered by the runtime around a layer's forward. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.errors import UsageError
from roundpipe.waiting import process_lock

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
