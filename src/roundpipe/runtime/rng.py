"""The settings under which layers compute: random seeds, autocast and thread count.

Random streams belong to (call, layer, microbatch), never to a device, so that a call draws the same numbers on any
number of devices and a recomputation draws what the forward drew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AbstractContextManager

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def draw_call_seed() -> int:
    """Draw one number from torch's default generator on the calling thread: `torch.manual_seed` repeats a call."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def stream_seed(call_seed: int, layer_id: int, microbatch: int, is_new: bool) -> int:
    """Return the seed (63 bits) of one layer and microbatch, which depends on every bit of the arguments (splitmix64).

    is_new: gives a recomputation that must not repeat the forward's numbers a different seed.
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
    """Settings of the thread that made a call which decide what its kernels compute; workers take them over."""

    autocasts: tuple[_Autocast, ...]
    cache_enabled: bool
    num_threads: int

    @classmethod
    def capture(cls) -> Ambient:
        autocasts = tuple(
            _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )
        return cls(autocasts, torch.is_autocast_cache_enabled(), torch.get_num_threads())

    def set_threads(self) -> None:
        """Use the caller's number of threads on this thread: sums on the CPU depend on it."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context manager, to be entered around each layer by itself: leaving it clears the cache of casts.

        The same object may be entered again after it was left.
        """
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
