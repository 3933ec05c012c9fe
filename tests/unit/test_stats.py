"""The figures of a step: sums and shares from made-up times, and model.stats() against values computed by hand."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from roundpipe import AutoRoundPipe, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, host_facts, optim
from roundpipe.errors import ClosedError
from roundpipe.host_facts import available_host_bytes, resident_bytes
from roundpipe.stats import CallFigures, DeviceMemory, StepLog, StepTime
from roundpipe.timeline import Span, Timeline

FLOAT_BYTES = 4
# Adds up the figures of two calls of one step on two devices. Device "b" idles between its spans.
FIRST = CallFigures(
    generation=0,
    is_call=True,
    started_s=10.0,
    timeline=Timeline((Span("a", "F0", 0, 11.0, 12.0), Span("b", "FB1", 0, 12.0, 14.0))),
    rows=2,
    tokens=20,
    loss=0.5,
    weights_up_bytes=100,
    activations_up_bytes=10,
    activations_down_bytes=20,
    gradients_down_bytes=50,
)
SECOND = dataclasses.replace(
    FIRST,
    timeline=Timeline((Span("a", "F0", 0, 13.0, 16.0), Span("b", "FB1", 0, 17.0, 18.0))),
    loss=0.25,
    started_s=12.5,
)
LATER = dataclasses.replace(
    FIRST, generation=1, timeline=Timeline((Span("a", "FB0", 0, 17.0, 20.0),)), loss=0.125, started_s=16.5
)
NO_MEMORY = {"a": DeviceMemory(None, None), "b": DeviceMemory(None, None)}


def log_of(*calls: CallFigures) -> StepLog:
    log = StepLog()
    for call in calls:
        log.add(call)
    return log


def test_the_calls_of_a_step_add_up() -> None:
    stats = log_of(FIRST, SECOND, LATER).stats([StepTime(1, 18.5, 19.0, False)], ["a", "b"], NO_MEMORY)
    assert (stats.step, stats.calls, stats.rows, stats.tokens) == (1, 2, 4, 40)
    assert (stats.weights_up_bytes, stats.activations_up_bytes) == (200, 20)
    assert (stats.activations_down_bytes, stats.gradients_down_bytes) == (40, 100)
    assert (stats.bytes_up, stats.bytes_down) == (220, 140)
    assert (stats.loss, stats.optimizer_wait_s, stats.seconds) == (0.25, 0.5, 9.0)
    assert stats.tokens_per_s == 40 / 9
    assert stats.device_share == {"a": 4 / 6, "b": 3 / 8}  # of the time from the first call, at 10 s, to the last work


def test_a_later_step_begins_with_the_end_of_the_step_before() -> None:
    done = [StepTime(1, 18.5, 19.0, False), StepTime(2, 20.5, 23.0, False)]
    stats = log_of(FIRST, SECOND, LATER).stats(done, ["a", "b"], NO_MEMORY)
    assert (stats.step, stats.calls, stats.seconds, stats.loss) == (2, 1, 4.0, 0.125)
    assert stats.device_share == {"a": 3 / 4, "b": 0.0}  # "a" ended its work for the first step at 16 s


def test_an_asynchronous_step_ends_when_it_is_issued() -> None:
    done = [StepTime(1, 18.5, 19.0, True), StepTime(2, 20.5, 23.0, True)]
    stats = log_of(FIRST, LATER).stats(done, ["a"], NO_MEMORY)
    assert (stats.seconds, stats.optimizer_wait_s) == (2.0, 0.0)


def test_without_a_step_all_calls_count() -> None:
    stats = log_of(FIRST, SECOND).stats([], ["a", "b"], NO_MEMORY)
    assert (stats.step, stats.calls, stats.seconds, stats.loss) == (0, 2, 8.0, 0.25)


def test_unknown_tokens_make_the_sum_unknown() -> None:
    stats = log_of(FIRST, dataclasses.replace(SECOND, tokens=None, rows=None)).stats([], [], {})
    assert (stats.rows, stats.tokens, stats.tokens_per_s) == (None, None, None)


def test_a_backward_pass_adds_bytes_but_no_call() -> None:
    backward = dataclasses.replace(SECOND, is_call=False, rows=None, tokens=None, loss=None)
    stats = log_of(FIRST, backward).stats([], [], {})
    assert (stats.calls, stats.rows, stats.tokens, stats.loss, stats.bytes_up) == (1, 2, 20, 0.5, 220)


def test_nothing_ran_yet() -> None:
    stats = StepLog().stats([], [], {})
    assert (stats.step, stats.calls, stats.rows, stats.seconds, stats.loss) == (0, 0, None, 0.0, None)


def test_host_memory_is_read_from_proc() -> None:
    rss_bytes, available_bytes = resident_bytes(), available_host_bytes()
    assert rss_bytes is not None
    assert available_bytes is not None
    assert 10**7 < rss_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_memory_that_is_left_respects_the_limit_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cached = "inactive_file 40\nactive_file 2\n"
    files = {"memory.max": "5000000\n", "memory.current": "3000000\n", "memory.stat": cached}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_facts, "_CGROUP", tmp_path)
    assert StepLog().stats([], [], {}).host_available_bytes == 2_000_042


# model.stats() on virtual devices.

WIDTHS = (128, 64, 192)  # every parameter fills a multiple of 256 bytes, to which images are aligned
WEIGHT_BYTES = [(inputs * outputs + outputs) * FLOAT_BYTES for inputs, outputs in itertools.pairwise(WIDTHS)]
BATCH, MICROBATCHES = 4, 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Linear(WIDTHS[1], WIDTHS[2]))


def wrapped(num_devices: int = 2) -> RoundPipe:
    """F0 on the first device, FB1 on the second, B2 on the first again (or all on one)."""
    plan = ModelExecutePlan(fwd_plan=[range(0, 1)], bwd_plan=[range(1, 2), range(0, 1)])
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    return RoundPipe(network(), model_run_config=config, devices=["cpu"] * num_devices)


def train(model: RoundPipe, *, calls: int = 1) -> list[float]:
    x, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(WIDTHS[2], (BATCH,))
    loss_fn = nn.functional.cross_entropy
    return [float(model.forward_backward((x,), label=y, loss_fn=loss_fn)) for _ in range(calls)]


def step(model: RoundPipe | AutoRoundPipe, optimizer: torch.optim.Optimizer, *, is_async: bool = False) -> None:
    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.step(step_fn, is_async)


def test_stats_of_a_step_equal_values_computed_by_hand() -> None:
    with wrapped() as model:
        optimizer = optim.AdamW(model.optim_parameters())
        before_s = time.perf_counter()
        losses = train(model, calls=3)
        step(model, optimizer)
        after_s = time.perf_counter()
        stats = model.stats()
    assert (stats.step, stats.calls, stats.rows, stats.tokens) == (1, 3, 3 * BATCH, None)
    assert stats.loss == losses[-1]
    assert 0 < stats.optimizer_wait_s < stats.seconds <= after_s - before_s
    # F0 and B2 upload the first layer, FB1 the second one.
    assert stats.weights_up_bytes == 3 * (2 * WEIGHT_BYTES[0] + WEIGHT_BYTES[1])
    assert stats.gradients_down_bytes == 3 * sum(WEIGHT_BYTES)
    inputs, hidden, labels = BATCH * WIDTHS[0] * FLOAT_BYTES, BATCH * WIDTHS[1] * FLOAT_BYTES, BATCH * 8
    losses_bytes = MICROBATCHES * FLOAT_BYTES
    # Up: inputs for F0 and again for B2, hidden values and labels for FB1, gradients of hidden values for B2.
    assert stats.activations_up_bytes == 3 * (2 * inputs + hidden + labels + hidden)
    # Down: saved inputs and hidden values of F0, losses and gradients of FB1.
    assert stats.activations_down_bytes == 3 * (inputs + hidden + losses_bytes + hidden)
    assert list(stats.device_share) == ["cpu:0", "cpu:1"]
    assert all(0 < share < 1 for share in stats.device_share.values())
    assert stats.device_memory == {"cpu:0": DeviceMemory(None, None), "cpu:1": DeviceMemory(None, None)}


def test_values_that_stay_on_a_device_are_not_counted() -> None:
    with wrapped(num_devices=1) as model:
        train(model)
        model.synchronize()
        stats = model.stats()
    inputs, labels = BATCH * WIDTHS[0] * FLOAT_BYTES, BATCH * 8
    assert (stats.step, stats.activations_up_bytes) == (0, 2 * inputs + labels)
    assert stats.activations_down_bytes == inputs + MICROBATCHES * FLOAT_BYTES


def test_the_share_is_that_of_the_timeline() -> None:
    with wrapped() as model:
        train(model)
        timeline, stats = model.timeline(), model.stats()
    for device in ("cpu:0", "cpu:1"):
        end_s = max(span.end_s for span in timeline.spans if span.device == device)
        # The time of a device begins with the call, a little before the first span.
        assert 0 < stats.device_share[device] < timeline.busy_s(device) / (end_s - timeline.start_s)
    assert stats.seconds > timeline.duration_s


def test_stats_are_those_of_the_last_step() -> None:
    with wrapped() as model:
        optimizer = optim.AdamW(model.optim_parameters())
        train(model, calls=5)
        step(model, optimizer)
        losses = train(model, calls=2)
        step(model, optimizer)
        train(model)  # belongs to the next step
        stats = model.stats()
        assert (stats.step, stats.calls, stats.loss) == (2, 2, losses[-1])
        again = model.stats()
        assert (again.step, again.calls, again.seconds) == (2, 2, stats.seconds)


def test_many_calls_of_one_step_are_all_counted() -> None:
    with wrapped() as model:
        optimizer = optim.AdamW(model.optim_parameters())
        train(model, calls=40)
        step(model, optimizer)
        stats = model.stats()
    assert (stats.calls, stats.rows) == (40, 40 * BATCH)
    assert stats.gradients_down_bytes == 40 * sum(WEIGHT_BYTES)


def test_stats_do_not_wait_for_an_asynchronous_step() -> None:
    with wrapped() as model:
        optimizer = optim.AdamW(model.optim_parameters())
        train(model, calls=3)
        step(model, optimizer)
        train(model)
        may_end = threading.Event()
        model.step(may_end.wait, True)
        assert (model.stats().step, model.stats().calls) == (1, 3)
        may_end.set()
        model.synchronize()
        assert (model.stats().step, model.stats().calls) == (2, 1)


def test_the_plain_loop_has_steps_too() -> None:
    with RoundPipe(network(), devices=["cpu"] * 2) as model:
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
        for _ in range(2):
            x = torch.randn(BATCH, WIDTHS[0])
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = model.stats()
    assert (stats.step, stats.calls, stats.rows, stats.loss) == (2, 1, BATCH, None)
    assert stats.gradients_down_bytes == sum(WEIGHT_BYTES)
    assert stats.optimizer_wait_s > 0


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.embedding(input_ids))
        return scores


def test_tokens_are_the_elements_of_input_ids() -> None:
    with RoundPipe(TokenModel(), devices=["cpu"] * 2) as model:
        ids = torch.randint(11, (6, 5))
        model.forward_backward((), {"input_ids": ids}, loss_fn=lambda scores, _: scores.sum())
        with torch.no_grad():
            model(input_ids=ids[:2])
        model.synchronize()
        stats = model.stats()
    assert (stats.calls, stats.rows, stats.tokens) == (2, 8, 40)
    assert stats.tokens_per_s == 40 / stats.seconds


def test_a_model_of_parts_adds_them_up() -> None:
    first = RoundPipe(network()[0], devices=["cpu"] * 2)
    second = RoundPipe(network()[1], devices=["cpu"] * 2)
    with AutoRoundPipe(nn.Sequential(first, nn.Tanh(), second)) as model:
        optimizer = optim.AdamW(model.optim_parameters())
        model(torch.randn(BATCH, WIDTHS[0])).sum().backward()
        step(model, optimizer)
        stats = model.stats()
        assert first.stats().calls == stats.calls
    assert (stats.step, stats.calls, stats.rows, stats.tokens) == (1, 2, None, None)
    assert stats.gradients_down_bytes == sum(WEIGHT_BYTES)
    assert list(stats.device_share) == ["cpu:0", "cpu:1"]


def test_a_failed_call_counts_nothing() -> None:
    with wrapped() as model:
        optimizer = optim.AdamW(model.optim_parameters())
        with pytest.raises(RuntimeError, match="shapes"):
            model.forward_backward((torch.randn(BATCH, 1),), loss_fn=lambda out, _: out.sum())
        train(model)
        step(model, optimizer)
        stats = model.stats()
    assert (stats.calls, stats.rows, stats.gradients_down_bytes) == (1, BATCH, sum(WEIGHT_BYTES))


def test_stats_before_any_call_and_after_close() -> None:
    model = wrapped()
    stats = model.stats()
    assert (stats.step, stats.calls, stats.device_share, stats.device_memory) == (0, 0, {}, {})
    model.close()
    with pytest.raises(ClosedError):
        model.stats()
