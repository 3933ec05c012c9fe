"""Every example runs as a script, on two virtual devices, within its time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Examples that run one after the other in one process, which imports torch and transformers once.
PROCESSES = {name: [path for path in EXAMPLES if path.stem.startswith("finetune") == (name == "finetune")]
             for name in ("finetune", "others")}  # fmt: skip
RUN_ALL = """
import runpy, sys
import torch
for path in sys.argv[1:]:
    sys.argv = [path]
    torch.manual_seed(0)  # a random model may reply with nothing
    print("== example", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.parametrize("name", PROCESSES)
def test_examples_run(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ROUNDPIPE_DEVICES": "cpu*2", "PYTHONPATH": str(ROOT / "src")}
    examples = [str(path) for path in PROCESSES[name]]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *examples],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = done.stdout.split("== example ")[1:]
    assert [output.split("\n")[0] for output in outputs] == examples
    silent = [output for output in outputs if not output.partition("\n")[2].strip()]
    assert not silent, f"an example shows what it did: {silent}"


def test_every_example_is_run() -> None:
    assert sorted(path for paths in PROCESSES.values() for path in paths) == EXAMPLES


def test_the_documented_examples_are_there() -> None:
    assert {path.name for path in EXAMPLES} >= {
        *("train_sequential.py", "finetune_bf16.py", "evaluate.py"),
        *("finetune_lora.py", "chat.py"),
    }
