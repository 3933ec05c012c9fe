"""Seeds of random streams, and the calling thread's settings that decide what kernels compute.

A random stream belongs to (call, layer, microbatch), never to a device. A call captures autocast and thread count once;
workers enter them around every layer and loss function. Knows no device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

_MASK = (1 << 64) - 1


def draw_call_seed() -> int:
    """Draw the seed of one call from torch's default generator, so that `torch.manual_seed` repeats a run."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def stream_seed(call_seed: int, layer_id: int, microbatch: int, drawn_anew: bool) -> int:
    """Seed (63 bits) for one layer and microbatch. `drawn_anew`: for a recomputation that must not repeat forward."""
    # splitmix64: add a multiple of its increment, then mix, for each part.
    state = call_seed & _MASK
    for part in (layer_id, microbatch, int(drawn_anew)):
        state = _mix((state + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK)
    return state >> 1  # never negative as a signed 64-bit integer


def _mix(value: int) -> int:
    """The splitmix64 finaliser: every output bit depends on every input bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_NOTHING_TO_ENTER = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Ambient:
    """Autocast settings and thread count of the thread that made a call."""

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
        """Apply the settings on the current thread; autocast inside the block only."""
        # torch counts threads per calling thread, and sums on the CPU depend on the count.
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
