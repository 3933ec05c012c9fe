"""A mode in which products with large half-precision matrices are computed in float32, a part of the matrix at a time.

Used by verification around backward passes on the host. Many CPUs have no instructions for half precision, and torch
then takes a hundred times as long for the product of a gradient and a weight as for that of an input and a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PART = 2**24  # numbers of the matrix at a time
_HALF = (torch.bfloat16, torch.float16)


class FloatProducts(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and args[0].dtype in _HALF and args[0].device.type == "cpu":
            return _product(*args)
        return func(*args, **(kwargs or {}))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Summed over parts of the inner dimension."""
    length = max(_PART // max(right.shape[1], 1), 1)
    total = torch.zeros(left.shape[0], right.shape[1])
    for rows, columns in zip(right.split(length), left.split(length, dim=1), strict=True):
        total.addmm_(columns.float(), rows.float())
    return total.to(left.dtype)
