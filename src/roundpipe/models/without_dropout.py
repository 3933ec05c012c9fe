"""A mode in which dropout does nothing: calibration compares runs of a model that is in training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

_ON_BY_DEFAULT = frozenset(("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"))
_DROPOUTS = _ON_BY_DEFAULT | {"alpha_dropout", "feature_alpha_dropout"}
_ATTENTION = "scaled_dot_product_attention"
_NOISE = "uniform_"  # of a router, say


class WithoutDropout(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.was_needed = False  # whether anything would have been dropped

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        is_random = drops(func, args, kwargs)
        self.was_needed = self.was_needed or is_random
        if name in _DROPOUTS:
            given = args[0] if args else kwargs["input"]
            # A tensor of its own wherever dropout would return one: which is which matters to the plan.
            return given.clone() if is_random and not _is_in_place(name, args, kwargs) else given
        if name == _NOISE:
            low, high = (*args[1:3], *(kwargs[key] for key in ("from", "to") if key in kwargs), 0.0, 1.0)[:2]
            return args[0].fill_((low + high) / 2)
        if name == _ATTENTION:
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)


def drops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call would draw random numbers if it were not for `WithoutDropout`."""
    name = getattr(func, "__name__", "")
    if name == _ATTENTION:
        return bool(_argument(args, kwargs, 4, 0.0, "dropout_p") > 0.0)
    if name in _DROPOUTS:
        is_on = _argument(args, kwargs, 2, name in _ON_BY_DEFAULT, "training", "train")
        return bool(is_on and _argument(args, kwargs, 1, 0.5, "p") > 0.0)
    return name == _NOISE


def _is_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return name.endswith("_") or bool(_argument(args, kwargs, 3, False, "inplace"))


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: Any, *names: str) -> Any:
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)
