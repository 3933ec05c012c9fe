"""Settings of the calling thread that decide what its kernels compute, carried over to the workers.

Captured once per call, entered around every layer and loss function.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

_NOTHING_TO_ENTER = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Ambient:
    autocasts: tuple[_Autocast, ...]
    cache_enabled: bool
    num_threads: int

    @classmethod
    def capture(cls) -> Ambient:
        autocasts = tuple(
            _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )
        return cls(autocasts, torch.is_autocast_cache_enabled(), torch.get_num_threads())

    def entered(self) -> AbstractContextManager[None]:
        # Threads beside the caller's have a thread count of their own, and sums on the CPU depend on it.
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        return self._casting() if any(cast.enabled for cast in self.autocasts) else _NOTHING_TO_ENTER

    @contextlib.contextmanager
    def _casting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for cast in self.autocasts:
                if cast.enabled:
                    stack.enter_context(
                        torch.autocast(cast.device_type, dtype=cast.dtype, cache_enabled=self.cache_enabled)
                    )
            yield
