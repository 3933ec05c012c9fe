"""Lets modules run another forward for a while. They must be the caller's alone: copies, or a layer's on its device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextlib.contextmanager
def other_forwards(others: Iterable[tuple[nn.Module, Callable[[Forward], Forward]]]) -> Iterator[None]:
    """For each module what makes its other forward of its own."""
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for module, other in others:
            own = module.__dict__
            before.append((own, own.get("forward")))
            own["forward"] = other(module.forward)
        yield
    finally:
        for own, forward in reversed(before):
            if forward is None:
                del own["forward"]
            else:
                own["forward"] = forward
