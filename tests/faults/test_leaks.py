"""Failures cost nothing in the long run: no thread, no run, no tensor stays behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
import torch

from helpers_faults import Bench, Boom, batch, bench, our_threads, raised_by
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.runtime.run import Run

NUM_FAILURES = 60
NUM_STEPS = 25
NUM_FORWARDS = 16
# Late prefetches may take another set of weight buffers; what each failure leaves would be more than that.
SPARE_TENSORS = 8
SETTLE_S = 5.0
POINTS = [("forward", 0), ("forward", 3), ("backward", 0), ("backward", 3), ("loss_fn", None), ("recompute", 1)]


def fail_often(made: Bench, count: int) -> None:
    for number in range(count):
        point, where = POINTS[number % len(POINTS)]
        error = Boom(number)
        assert raised_by(made.failing(point, where, number % 3, error), made.model.synchronize) is error


def alive(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())


def settles_at(kind: type, limit: int) -> bool:
    """Whether no more than `limit` stay alive. A worker that has just reported may hold its run a moment longer."""
    deadline = time.monotonic() + SETTLE_S
    while alive(kind) > limit:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_no_thread_and_no_memory_after_many_failures() -> None:
    before = alive(Run)
    with bench(2) as made:
        made.train_right(1)
        fail_often(made, len(POINTS))
        made.train_right(2)
        threads, num_threads = our_threads(), threading.active_count()
        assert settles_at(Run, before + 1)  # the last one is kept for timeline()
        tensors = alive(torch.Tensor)
        fail_often(made, NUM_FAILURES)
        made.train_right(3)
        assert (
            our_threads()
            == threads
            == ["roundpipe-cpu:0", "roundpipe-cpu:1", "roundpipe-landing", "roundpipe-optimizer"]
        )
        assert threading.active_count() == num_threads
        assert settles_at(Run, before + 1)
        assert settles_at(torch.Tensor, tensors + SPARE_TENSORS)  # fewer than failures at each point


def test_step_failures_leave_no_thread_and_no_memory() -> None:
    before = alive(Run)
    with bench(2) as made:
        made.train_right(1)
        for number in range(5 + NUM_STEPS):
            error = Boom(number)
            made.call(2)
            made.traps.arm("step_fn", None, 0, error)
            assert raised_by(lambda: made.step(is_async=False)) is error
            del error
            if number == 4:
                made.model.synchronize()
                assert settles_at(Run, before + 1)
                tensors, num_threads = alive(torch.Tensor), threading.active_count()
        made.model.synchronize()
        assert settles_at(Run, before + 1)
        assert settles_at(torch.Tensor, tensors + SPARE_TENSORS)
        assert threading.active_count() == num_threads


def refuse(outputs: object) -> object:
    raise Boom(outputs)


@pytest.mark.parametrize("merge_output", [False, None, refuse])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forwards_without_a_backward_leave_no_run_and_no_memory(merge_output: object, requires_grad: bool) -> None:
    before = alive(Run)
    with bench(2) as made:
        plan = ModelExecutePlan([range(0, 4)], [range(0, 4)])
        config = RoundPipeRunConfig(
            requires_grad=requires_grad, num_microbatch=2, merge_output=merge_output, execute_plan=plan
        )
        for number in range(2 + NUM_FORWARDS):
            with contextlib.suppress(Boom):
                made.model(batch(number)[0], roundpipe_run_config=config)
            if number == 1:
                made.model.synchronize()
                assert settles_at(Run, before + 1)
                tensors = alive(torch.Tensor)
        made.model.synchronize()
        assert settles_at(Run, before + 1)
        assert settles_at(torch.Tensor, tensors + SPARE_TENSORS)
