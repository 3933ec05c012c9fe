"""`make demo`, cut short: it trains, agrees with plain PyTorch, and leaves a report and a picture."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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


def test_demo_shows_generated_text() -> None:
    report, _ = quick_demo()
    assert "    Day 12." in report


def test_demo_draws_a_picture() -> None:
    _, picture = quick_demo()
    assert picture.startswith(PNG_SIGNATURE)
    assert len(picture) > 10_000


def test_corpus_is_plain_text_of_the_promised_size() -> None:
    text = (ROOT / "demo" / "corpus.txt").read_bytes()
    assert text.isascii()
    assert 60_000 <= len(text) <= 150_000
