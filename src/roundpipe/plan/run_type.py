"""The three ways a model is run; they decide what an execute plan must cover.

Used by everything in plan and by the api. Knows no plans and no models.
"""

from __future__ import annotations

import enum

from roundpipe.errors import ArgumentTypeError, PlanError


class RunType(enum.Enum):
    """``INFER``: forward only. ``TRAIN``: forward, later backward. ``FUSED``: forward, loss, backward in one call."""

    INFER = "infer"
    TRAIN = "train"
    FUSED = "fused"


def as_run_type(value: object) -> RunType:
    """The run type that a user named by string or enum."""
    if isinstance(value, RunType):
        return value
    if not isinstance(value, str):
        raise ArgumentTypeError(f"run_type must be a str or RunType, not {type(value).__name__} ({value!r})")
    try:
        return RunType(value)
    except ValueError:
        known = ", ".join(repr(run_type.value) for run_type in RunType)
        raise PlanError(f"unknown run type {value!r}; use one of {known}") from None
