"""Timeline: times, shares, the text chart, and what a model measures."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.timeline import Span, Timeline

TWO_DEVICES = Timeline(
    (
        Span("b", "F0", 0, 1.0, 2.0),
        Span("b", "F0", 1, 2.0, 3.0),
        Span("a", "FB1", 0, 2.0, 4.0),
        Span("a", "FB1", 1, 4.0, 6.0),
        Span("b", "B2", 0, 5.0, 7.0),
    )
)


def test_a_timeline_starts_with_its_first_span_and_ends_with_its_last():
    assert (TWO_DEVICES.start_s, TWO_DEVICES.end_s, TWO_DEVICES.duration_s) == (1.0, 7.0, 6.0)


def test_devices_come_in_the_order_in_which_they_appear():
    assert TWO_DEVICES.devices() == ("b", "a")


def test_busy_and_idle_are_shares_of_the_whole_timeline():
    assert (TWO_DEVICES.busy_s("a"), TWO_DEVICES.busy_s("b")) == (4.0, 4.0)
    assert TWO_DEVICES.idle_share("a") == pytest.approx(1 / 3)


def test_overlapping_spans_count_once():
    timeline = Timeline((Span("a", "F0", 0, 0.0, 4.0), Span("a", "F0", 1, 1.0, 2.0), Span("a", "F0", 2, 3.0, 5.0)))
    assert timeline.busy_s("a") == 5.0
    assert timeline.idle_share("a") == 0.0


def test_a_device_that_never_ran_is_idle():
    assert TWO_DEVICES.busy_s("c") == 0.0
    assert TWO_DEVICES.idle_share("c") == 1.0


def test_the_empty_timeline_has_no_time_no_devices_and_no_text():
    empty = Timeline(())
    assert (empty.start_s, empty.end_s, empty.duration_s, empty.devices()) == (0.0, 0.0, 0.0, ())
    assert (empty.busy_s("a"), empty.idle_share("a"), empty.to_text()) == (0.0, 0.0, "")


def test_text_has_one_row_per_device_with_labels_where_tasks_start():
    assert TWO_DEVICES.to_text(columns=24) == "\n".join(
        [
            "b |F0------........B2------|",
            "a |....FB1-------------....|",
        ]
    )


def test_text_cuts_labels_that_do_not_fit_and_pads_device_names():
    timeline = Timeline((Span("cuda:0", "FB10", 0, 0.0, 1.0), Span("cpu", "B11", 0, 1.0, 2.0)))
    assert timeline.to_text(columns=4) == "cuda:0 |FB..|\ncpu    |..B1|"


def test_text_of_spans_without_duration_is_idle():
    assert Timeline((Span("a", "F0", 0, 3.0, 3.0),)).to_text(columns=4) == "a |....|"


class Nap(nn.Module):
    """A layer whose time is known."""

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return stream * 1.0


def test_spans_are_work_and_not_waiting() -> None:
    network = nn.Sequential(nn.Linear(2, 2), *[Nap() for _ in range(5)])
    plan = ModelExecutePlan([range(0, 2), range(2, 4)], [range(4, 6), range(2, 4), range(0, 2)])
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    with RoundPipe(network, devices=["cpu"] * 4) as model:
        model.forward_backward((torch.randn(6, 2),), loss_fn=lambda out, _: out.sum(), run_config=config)
        model.synchronize()
        spans = {(span.label, span.microbatch): span for span in model.timeline().spans}
    order = sorted({label for label, _ in spans}, key=lambda label: int(label.lstrip("FB")))
    # Microbatch j of a task needs microbatch j of the task before, so it cannot be at work until that one is done.
    early = [
        f"{later}, microbatch {microbatch}: {1e3 * (before.end_s - spans[later, microbatch].start_s):.0f} ms too early"
        for earlier, later in pairwise(order)
        for microbatch in range(3)
        if spans[later, microbatch].start_s < (before := spans[earlier, microbatch]).end_s - 0.01
    ]
    assert not early, f"spans begin before their input can be there: {early}"
