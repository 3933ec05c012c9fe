"""Keeps the choices of a router: a block that is recomputed sends each token to the experts its forward sent it to.

Used by block layers. Sums on a GPU need not come out the same twice, and where two experts are nearly equal the last
bit decides. So the indices of every top-k inside a block are saved in its forward and used again in its recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roundpipe.context import doing_recompute, get_recompute_data, save_for_recompute

_TOP_K = (torch.topk, torch.Tensor.topk)


class KeptRoutes(TorchFunctionMode):
    """Around one run of a block inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._recalled = iter(get_recompute_data()) if doing_recompute() else None
        self._chosen: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _TOP_K:
            return func(*args, **(kwargs or {}))
        return self._top_k(func, *args, **(kwargs or {}))

    def _top_k(
        self, func: Callable[..., Any], input: torch.Tensor, k: int, dim: int = -1, *rest: Any, **more: Any
    ) -> Any:
        if self._recalled is None:
            found = func(input, k, dim, *rest, **more)
            self._chosen.append(found.indices.detach())
            return found
        indices = next(self._recalled)
        return torch.return_types.topk((input.gather(dim, indices), indices))

    def save(self) -> None:
        """Once the block has run."""
        if self._recalled is None:
            save_for_recompute(*self._chosen)


class TopKSeen(TorchFunctionMode):
    """Notes whether anything inside it chose by top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or func in _TOP_K
        return func(*args, **(kwargs or {}))
