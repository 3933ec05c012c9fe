"""SIGKILL at random moments, also during saves: the resumed runs have the losses of an undisturbed one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("kill_runs.py")


def test_killed_runs_resume_exactly() -> None:
    """A few kills; `make test-kills` makes 100."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "5", "10"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^5 kills, (\d+) of them during a save", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert int(found.group(1)) >= 1
