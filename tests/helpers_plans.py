"""Every legal execute plan of a small model, for tests that must hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from roundpipe.plan import ModelExecutePlan, RunType


def compositions(num_layers: int) -> Iterator[list[range]]:
    """Every way to cut layers 0 to num_layers - 1 into ascending ranges; one empty list for no layers."""
    if num_layers == 0:
        yield []
    for start in range(num_layers):
        for before in compositions(start):
            yield [*before, range(start, num_layers)]


def legal_plans(num_layers: int, run_type: str | RunType) -> Iterator[ModelExecutePlan]:
    """Every plan that ``check_valid(num_layers, run_type)`` must accept (``infer``: without a backward list)."""
    match RunType(run_type):
        case RunType.INFER:
            yield from (ModelExecutePlan(fwd) for fwd in compositions(num_layers))
        case RunType.TRAIN:
            for fwd in compositions(num_layers):
                for bwd in compositions(num_layers):
                    yield ModelExecutePlan(fwd, reversed(bwd))
        case RunType.FUSED:
            for start in range(num_layers):
                for fwd in compositions(start):
                    for bwd in compositions(start):
                        yield ModelExecutePlan(fwd, [range(start, num_layers), *reversed(bwd)])
