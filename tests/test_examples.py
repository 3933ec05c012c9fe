"""Every example runs as a script, on two virtual devices, within its time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "ROUNDPIPE_DEVICES": "cpu*2", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example shows what it did"


def test_the_documented_examples_are_there() -> None:
    assert {path.name for path in EXAMPLES} >= {
        *("train_sequential.py", "finetune_bf16.py", "evaluate.py"),
        *("finetune_lora.py", "chat.py"),
    }
