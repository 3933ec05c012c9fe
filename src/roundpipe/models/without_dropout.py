"""A mode in which dropout does nothing: calibration compares runs of a model that is in training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    (
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"),
        *("alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    )
)


class WithoutDropout(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "uniform_":  # noise of a router, say
            low, high = (*args[1:3], *(kwargs[key] for key in ("from", "to") if key in kwargs), 0.0, 1.0)[:2]
            return args[0].fill_((low + high) / 2)
        if name == "scaled_dot_product_attention":
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)
