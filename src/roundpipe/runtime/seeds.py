"""Random streams belong to (call, layer, microbatch), never to a device: this is where their seeds come from."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def draw_call_seed() -> int:
    """One number from torch's default generator, in the calling thread: `torch.manual_seed` repeats a run."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def stream_seed(call_seed: int, layer_id: int, microbatch: int, drawn_anew: bool) -> int:
    """A seed of 63 bits; `drawn_anew` gives a recomputation that shall not repeat forward a stream of its own."""
    state = call_seed & _MASK
    for part in (layer_id, microbatch, int(drawn_anew)):
        state = _mix((state + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK)
    return state >> 1


def _mix(value: int) -> int:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
