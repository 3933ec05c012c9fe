"""Marks parameters of tests as slow: `make test` leaves them out, `make test-slow` runs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters; those that are not in `fast` are slow. A tuple is one value for each argument."""
    values = list(values)
    unknown = [value for value in fast if value not in values]
    assert not unknown, f"not among the values: {unknown}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in fast else pytest.mark.slow
        )
        for value in values
    ]
