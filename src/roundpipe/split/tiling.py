"""Modules that treat each token by itself, run a tile of the sequence at a time, so that long sequences fit.

Used by the layers of a split model. Norms and feed-forward parts keep several times the size of their input for
backward; of a tile it is little, and the tile is computed again when its gradient comes. That costs time, so it is done
for long microbatches only. Which modules are of this kind is found out by running them on parts of their input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe.split.determinism import ChoicesSeen, other_forwards, succeeds

LONG_TOKENS = 32 * 1024  # more than that in a microbatch, and it is tiled
TILE_TOKENS = 8 * 1024
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]  # a module, its arguments and what it returned


class TokenwiseSearch:
    """Watches modules while they run, and tries afterwards which of them are tokenwise."""

    def __init__(self) -> None:
        self._seen: dict[str, list[_Call]] = {}

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        handles = [
            inner.register_forward_hook(self._watch(path), with_kwargs=True)
            for path, inner in module.named_modules()
            if not type(inner).__module__.startswith("torch.nn")  # those keep no more than they need
        ]
        self._seen = {}
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, path: str) -> Callable[..., None]:
        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._seen.setdefault(path, []).append((module, args, kwargs, output))

        return watch

    def found(self) -> tuple[str, ...]:
        """Paths of the outermost tokenwise modules."""
        paths: list[str] = []
        for path in sorted(self._seen, key=len):
            inside = any(outer == "" or path.startswith(f"{outer}.") for outer in paths)
            if not inside and succeeds(
                f"{path or 'the module'} is tokenwise", partial(_are_tokenwise, self._seen[path])
            ):
                paths.append(path)
        self._seen = {}
        return tuple(paths)


def _are_tokenwise(calls: Iterable[_Call]) -> bool:
    return all(_is_tokenwise(*call) for call in calls)


def _is_tokenwise(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or not isinstance(output, torch.Tensor):
        return False
    given = args[0]
    if given.dim() < 3 or not given.is_floating_point() or given.shape[:2] != output.shape[:2] or given.shape[1] < 2:
        return False
    if any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules()):
        return False  # whoever hooked it expects to see it once
    half = given.shape[1] // 2
    with torch.no_grad(), ChoicesSeen() as top_k:
        parts = [module(part.contiguous()) for part in (given[:, :half], given[:, half:])]
    if top_k.seen or not all(isinstance(part, torch.Tensor) and part.dim() == output.dim() for part in parts):
        return False
    if sum(part.shape[1] for part in parts) != output.shape[1] or parts[0].shape[2:] != output.shape[2:]:
        return False
    difference = (torch.cat(parts, dim=1).double() - output.detach().double()).abs().max()
    return bool(difference <= _CLOSE.get(output.dtype, 0.0) * output.detach().double().abs().max())


def is_long(values: Iterable[Any]) -> bool:
    """Whether among arguments there is a hidden state of so many tokens that they are tiled."""
    return any(
        isinstance(value, torch.Tensor)
        and value.dim() >= 3
        and value.shape[0] * value.shape[1] > LONG_TOKENS
        and value.is_floating_point()
        for value in values
    )


@contextlib.contextmanager
def tiled(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Inside it the modules at `paths` run tile by tile. The module must be the caller's alone."""
    with other_forwards((module.get_submodule(path), _TiledForward) for path in paths):
        yield


class _TiledForward:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, given: torch.Tensor) -> Any:
        length = max(TILE_TOKENS // given.shape[0], 1)
        tiles = [tile.contiguous() for tile in given.split(length, dim=1)]
        if torch.is_grad_enabled():
            parts = [checkpoint(self._forward, t, use_reentrant=False, preserve_rng_state=False) for t in tiles]
        else:
            parts = [self._forward(tile) for tile in tiles]
        return torch.cat(parts, dim=1)
