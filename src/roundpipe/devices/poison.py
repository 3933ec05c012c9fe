"""Makes memory show that it was read before its time.

Used by virtual devices always, and by CUDA devices under stress.
"""

from __future__ import annotations

import torch


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in every float, and in integers a value no index or length has."""
    with torch.no_grad():
        if tensor.dtype is torch.uint8:
            tensor.fill_(0xFF)  # as bytes of float16, bfloat16, float32 and float64: NaN
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor
