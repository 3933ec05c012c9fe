"""Runs one block apart from the model around it, and says everything it did: returned, wrote, captured.

Used by calibration and by block layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from roundpipe.models.library_state import Captured, call_capturing
from roundpipe.models.values import containers_in, content_of, fill, is_changed


def call_block(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captures: Mapping[str, int],
    *,
    has_containers: bool = True,
) -> tuple[dict[str, Any], Captured]:
    """{"ret": what it returned, "side": by position the new content of dicts and lists it changed}, and captures."""
    if not has_containers and not captures:  # as most
        return {"ret": block(*args, **kwargs), "side": {}}, {}
    containers = _containers(args, kwargs) if has_containers else []
    before = [content_of(container) for container in containers]
    returned, captured = call_capturing(lambda: block(*args, **kwargs), captures)
    after = zip(containers, before, strict=True)
    side = {i: content_of(container) for i, (container, old) in enumerate(after) if is_changed(container, old)}
    return {"ret": returned, "side": side}, captured


def repeat_side_effects(side: Mapping[int, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the caller's containers be what the block made of them."""
    if side:
        containers = _containers(args, kwargs)
        for position, content in side.items():
            fill(containers[position], content)


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [container for value in (*args, *kwargs.values()) for container in containers_in(value)]
