"""Failures cost nothing in the long run: no thread, no run, no tensor stays behind."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch

from helpers_faults import Bench, Boom, batch, bench, our_threads, raised_by
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.runtime.run import Run

NUM_FAILURES = 100
POINTS = [("forward", 0), ("forward", 3), ("backward", 0), ("backward", 3), ("loss_fn", None), ("recompute", 1)]


def fail_often(made: Bench, count: int) -> None:
    for number in range(count):
        point, where = POINTS[number % len(POINTS)]
        error = Boom(number)
        assert raised_by(made.failing(point, where, number % 3, error), made.model.synchronize) is error


def alive(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())


def test_no_thread_and_no_memory_after_many_failures() -> None:
    before = alive(Run)
    with bench(2) as made:
        made.train_right(1)
        fail_often(made, len(POINTS))
        made.train_right(2)
        threads, num_threads = our_threads(), threading.active_count()
        runs, tensors = alive(Run), alive(torch.Tensor)
        fail_often(made, NUM_FAILURES)
        made.train_right(3)
        assert (
            our_threads()
            == threads
            == ["roundpipe-cpu:0", "roundpipe-cpu:1", "roundpipe-landing", "roundpipe-optimizer"]
        )
        assert threading.active_count() == num_threads
        assert alive(Run) <= runs <= before + 1  # the last one is kept for timeline()
        assert alive(torch.Tensor) <= tensors


def test_step_failures_leave_nothing_either() -> None:
    with bench(2) as made:
        made.train_right(1)
        counts = []
        for number in range(40):
            error = Boom(number)
            made.call(2)
            made.traps.arm("step_fn", None, 0, error)
            assert raised_by(lambda: made.step(is_async=False)) is error
            del error
            if number in (4, 39):
                made.model.synchronize()
                counts.append((alive(Run), alive(torch.Tensor), threading.active_count()))
        assert counts[0] == counts[1]


def refuse(outputs: object) -> object:
    raise Boom(outputs)


@pytest.mark.parametrize("merge_output", [False, None, refuse])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_outputs_nobody_goes_back_from_leave_nothing(merge_output: object, requires_grad: bool) -> None:
    with bench(2) as made:
        plan = ModelExecutePlan([range(0, 4)], [range(0, 4)])
        config = RoundPipeRunConfig(
            requires_grad=requires_grad, num_microbatch=2, merge_output=merge_output, execute_plan=plan
        )
        counts = []
        for number in range(6):
            with contextlib.suppress(Boom):
                made.model(batch(number)[0], roundpipe_run_config=config)
            if number in (1, 5):
                counts.append((alive(Run), alive(torch.Tensor)))
        assert counts[0] == counts[1]
