"""Checks a list of layer ranges: form first, then order and coverage. The first fault becomes a PlanError.

Called by plan.execute_plan. Knows lists of ranges, never run types or whole plans.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NoReturn

from roundpipe.errors import PlanError


class Order(enum.Enum):
    """The way in which successive ranges walk over the layers (inside a range layers always ascend)."""

    ASCENDING = "ascending"
    DESCENDING = "descending"


def check_form(name: str, ranges: object, num_layers: int) -> None:
    """Every entry is a non-empty range of step 1 within the model."""
    if not isinstance(ranges, list | tuple):
        raise PlanError(f"{name} must be a list of ranges, not {type(ranges).__name__} ({ranges!r})")
    for position, layers in enumerate(ranges):
        where = f"{name}[{position}]"
        if not isinstance(layers, range):
            raise PlanError(
                f"{where} must be a range, not {type(layers).__name__} ({layers!r}); write e.g. range(0, {num_layers})"
            )
        if layers.step != 1:
            raise PlanError(f"{where} = {layers} has step {layers.step}; ranges ascend by 1")
        if not layers:
            raise PlanError(f"{where} = {layers} is empty; remove it or give it a layer")
        if layers.start < 0 or layers.stop > num_layers:
            raise PlanError(f"{where} = {layers} is out of bounds; the model has layers 0 to {num_layers - 1}")


def check_cover(name: str, ranges: Sequence[range], layers: range, order: Order) -> None:
    """Every layer of ``layers`` exactly once, in the given order. Expects a good form, and ranges that stay within.

    ``edge`` is the boundary that the walk has reached: all layers on its near side are covered, none beyond.
    """
    ascending = order is Order.ASCENDING
    edge = layers.start if ascending else layers.stop
    for position, found in enumerate(ranges):
        beyond = found.start - edge if ascending else edge - found.stop
        if beyond > 0:
            _raise_gap(name, ranges, position, edge if ascending else edge - 1, order)
        if beyond < 0:
            _raise_overlap(name, ranges, position)
        edge = found.stop if ascending else found.start
    _check_end(name, edge, layers, order)


def _raise_gap(name: str, ranges: Sequence[range], position: int, expected: int, order: Order) -> NoReturn:
    where = f"{name}[{position}] = {ranges[position]}"
    if any(expected in later for later in ranges[position + 1 :]):
        raise PlanError(
            f"{where} is in the wrong order: layer {expected} comes after it; "
            f"{name} must be {order.value}, {_hint(order)}"
        )
    raise PlanError(f"{where} leaves a hole: layer {expected} is in no range before it; every layer must appear once")


def _raise_overlap(name: str, ranges: Sequence[range], position: int) -> NoReturn:
    found = ranges[position]
    earlier = next(place for place in range(position) if set(found) & set(ranges[place]))
    twice = min(set(found) & set(ranges[earlier]))
    raise PlanError(
        f"{name}[{position}] = {found} overlaps {name}[{earlier}] = {ranges[earlier]}: layer {twice} appears twice; "
        "every layer must appear once"
    )


def _check_end(name: str, edge: int, layers: range, order: Order) -> None:
    end = layers.stop if order is Order.ASCENDING else layers.start
    if edge == end:
        return
    missing = range(edge, end) if order is Order.ASCENDING else range(end, edge)
    raise PlanError(
        f"{name} ends too early: layers {missing.start} to {missing.stop - 1} are in no range; add {missing} at its end"
    )


def _hint(order: Order) -> str:
    if order is Order.ASCENDING:
        return "from the first layers to the last"
    return "from the last layers to the first"
