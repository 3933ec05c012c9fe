"""Tiling: runs tokenwise modules on one part of the sequence at a time, so that long sequences fit into memory.

A tokenwise module computes each token from that token alone, for example a norm or a feed-forward part. Such modules
save activations of several times the size of their input for backward. A part of the sequence is called a tile. Each
tile is checkpointed: backward recomputes one tile at a time. This costs time, so only long microbatches are tiled.
`TokenwiseSearch` finds the tokenwise modules by running them on parts of their input.
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

LONG_TOKENS = 32 * 1024  # microbatches with more tokens are tiled
TILE_TOKENS = 8 * 1024  # number of tokens in one tile, summed over the batch
# Accepted difference relative to the largest output, by dtype: kernels may sum in another order for another number of
# tokens.
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]  # a module, its args and kwargs, its output


class TokenwiseSearch:
    """Records the calls of modules while a model runs, then tests which of the modules are tokenwise."""

    def __init__(self) -> None:
        self._seen: dict[str, list[_Call]] = {}

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record calls of `module` and the modules inside it."""
        handles = [
            inner.register_forward_hook(self._watch(path), with_kwargs=True)
            for path, inner in module.named_modules()
            if not type(inner).__module__.startswith(
                "torch.nn"
            )  # modules of torch.nn are single operations, which save little for backward
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
        """Return the paths of the outermost tokenwise modules, and forget the recorded calls."""
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
        return False  # a hook expects one call with the whole sequence, not one per tile
    # The test: two halves of the sequence, run one after the other, give the same output as the whole.
    half = given.shape[1] // 2
    with torch.no_grad(), ChoicesSeen() as top_k:
        parts = [module(part.contiguous()) for part in (given[:, :half], given[:, half:])]
    # A module that calls top-k must run on the whole sequence: `KeptRoutes` saves the choices of a whole block.
    if top_k.seen or not all(isinstance(part, torch.Tensor) and part.dim() == output.dim() for part in parts):
        return False
    if sum(part.shape[1] for part in parts) != output.shape[1] or parts[0].shape[2:] != output.shape[2:]:
        return False
    difference = (torch.cat(parts, dim=1).double() - output.detach().double()).abs().max()
    return bool(difference <= _CLOSE.get(output.dtype, 0.0) * output.detach().double().abs().max())


def is_long(values: Iterable[Any]) -> bool:
    """Whether one of a call's arguments is a hidden state [batch, sequence, ...] with more than LONG_TOKENS tokens."""
    return any(
        isinstance(value, torch.Tensor)
        and value.dim() >= 3
        and value.shape[0] * value.shape[1] > LONG_TOKENS
        and value.is_floating_point()
        for value in values
    )


@contextlib.contextmanager
def tiled(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """While entered, the submodules at `paths` run tile by tile.

    Replaces the forwards of these submodules, so no other thread may use `module` meanwhile.
    """
    with other_forwards((module.get_submodule(path), _TiledForward) for path in paths):
        yield


class _TiledForward:
    """Runs a forward on tiles of the second dimension and concatenates the results."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, given: torch.Tensor) -> Any:
        length = max(TILE_TOKENS // given.shape[0], 1)
        tiles = [tile.contiguous() for tile in given.split(length, dim=1)]
        if torch.is_grad_enabled():
            # No RNG state is saved: the search runs with dropout on, so no tokenwise module draws random numbers.
            parts = [checkpoint(self._forward, t, use_reentrant=False, preserve_rng_state=False) for t in tiles]
        else:
            parts = [self._forward(tile) for tile in tiles]
        return torch.cat(parts, dim=1)
