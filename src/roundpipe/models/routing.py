"""Keeps the choices of a router: a block that is recomputed sends each token to the experts its forward sent it to.

Used by block layers. Sums on a GPU need not come out the same twice, and where two experts are nearly equal the last
bit decides. So the indices of every top-k and of every largest value along a dimension are saved in a block's forward
and used again in its recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roundpipe.context import doing_recompute, get_recompute_data, save_for_recompute

_TOP_K = (torch.topk, torch.Tensor.topk)
_ARGMAX = (torch.argmax, torch.Tensor.argmax)
_MAX = (torch.max, torch.Tensor.max)


def _chooses(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call returns indices of what it has found to be large."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return func in _TOP_K or func in _ARGMAX or (func in _MAX and isinstance(dim, int))


class KeptRoutes(TorchFunctionMode):
    """Around one run of a block inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._recalled = iter(get_recompute_data()) if doing_recompute() else None
        self._chosen: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _chooses(func, args, kwargs):
            return func(*args, **kwargs)
        if self._recalled is None:
            found = func(*args, **kwargs)
            self._chosen.append((found if func in _ARGMAX else found.indices).detach())
            return found
        indices = next(self._recalled)
        if func in _ARGMAX:
            return indices
        return _top_k(indices, *args, **kwargs) if func in _TOP_K else _max(indices, *args, **kwargs)

    def save(self) -> None:
        """Once the block has run."""
        if self._recalled is None:
            save_for_recompute(*self._chosen)


def _top_k(indices: torch.Tensor, input: torch.Tensor, k: int, dim: int = -1, *rest: Any, **more: Any) -> Any:
    return torch.return_types.topk((input.gather(dim, indices), indices))


def _max(indices: torch.Tensor, input: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    if keepdim:
        return torch.return_types.max((input.gather(dim, indices), indices))
    return torch.return_types.max((input.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices))


class ChoicesSeen(TorchFunctionMode):
    """Notes whether anything inside it chose so."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or _chooses(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
