"""`make demo`, cut short: it trains, agrees with plain PyTorch, and leaves a report and a picture."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

ROOT = Path(__file__).parents[1]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@functools.cache
def quick_demo() -> tuple[str, bytes]:
    """The report and the picture of one short demo on four virtual devices."""
    environment = {name: value for name, value in os.environ.items() if name != "ROUNDPIPE_DEVICES"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [sys.executable, "-m", "demo.train_demo", "--quick", "--devices", "cpu*4", "--output", output],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return (Path(output) / "report.txt").read_text(encoding="utf-8"), (
            Path(output) / "roundpipe-demo.png"
        ).read_bytes()


def test_demo_reports_all_three_runs() -> None:
    report, _ = quick_demo()
    for text in ("plain PyTorch", "RoundPipe exact", "RoundPipe async", "peak host memory", "4 x cpu"):
        assert text in report


def test_demo_equals_plain_pytorch_bit_for_bit() -> None:
    report, _ = quick_demo()
    assert "equals plain PyTorch bit for bit" in report


def test_demo_async_run_equals_a_plain_loop_on_weights_one_update_old() -> None:
    report, _ = quick_demo()
    assert "weights are one update old: largest difference of the first 4 losses 0." in report


def test_demo_shows_generated_text() -> None:
    report, _ = quick_demo()
    assert "    Day 12." in report


def test_demo_draws_a_picture() -> None:
    _, picture = quick_demo()
    assert picture.startswith(PNG_SIGNATURE)
    assert len(picture) > 10_000


class Nap(nn.Module):
    """A layer whose time is known."""

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return stream * 1.0


def test_the_timeline_drawn_shows_work_and_not_waiting() -> None:
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


def test_corpus_is_plain_text_of_the_promised_size() -> None:
    text = (ROOT / "demo" / "corpus.txt").read_bytes()
    assert text.isascii()
    assert 60_000 <= len(text) <= 150_000
