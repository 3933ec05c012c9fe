"""Small fingerprints of tensors, by which the results of two computations are compared without keeping both.

Knows tensors, no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

# Accepted relative differences, by dtype: the same numbers, added in another order.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# Accepted differences of gradients relative to the largest one, by dtype: a small gradient may consist of rounding
# errors only.
NOISE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
_NUM_CHUNKS, _NUM_SAMPLES = 64, 1024  # numbers of chunk means and of samples in a fingerprint


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Means of chunks and samples of a tensor's values, in float64 on its device."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
    length = flat.numel() // _NUM_CHUNKS
    chunks, rest = flat[: length * _NUM_CHUNKS], flat[length * _NUM_CHUNKS :]
    means = chunks.view(_NUM_CHUNKS, length).sum(1, dtype=torch.float32) / max(1, length)
    samples = flat[:: max(1, flat.numel() // _NUM_SAMPLES)]
    return torch.cat([means, rest.float(), samples.float()]).double()


def differing(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> str | None:
    """The name of the first fingerprint that differs by more than rounding, or that only one side has; else None.

    Fingerprints of `expected` that are not finite are not compared.
    """
    if expected.keys() != got.keys():
        return min(expected.keys() ^ got.keys())
    norms = {name: float(found.norm()) for name, found in expected.items()}
    largest = max((norm for norm in norms.values() if math.isfinite(norm)), default=0.0)
    for name, norm in norms.items():
        tolerance = TOLERANCE.get(dtypes[name], 1e-1) * norm + NOISE.get(dtypes[name], 1e-2) * largest
        if math.isfinite(norm) and not float((expected[name] - got[name]).norm()) <= tolerance:
            return name
    return None
