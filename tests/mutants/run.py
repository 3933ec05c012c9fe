"""Puts one deliberate fault at a time into a copy of the source and runs tests that must notice it.

    python tests/mutants/run.py [--jobs N] [name ...]

Prints a table. The exit status is 1 if a mutant survives, if its text is not in the source exactly once, or if tests
fail without any mutant. A name selects all mutants whose names contain it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0  # of all tests of a mutant
TEST_TIMEOUT_S = 40  # of one test: a fault may make it wait for ever
PASSED, FAILED = 0, 1  # exit statuses of pytest; others mean that no test ran


def apply(mutant: Mutant, source: Path) -> str | None:
    """Write the mutant into `source`. Returns what is wrong if its text is not there exactly once."""
    path = source / "roundpipe" / mutant.file
    if not path.exists():
        return f"{mutant.file} does not exist"
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"text occurs {text.count(mutant.old)} times in {mutant.file}"
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, str(path), "exec")  # a mutant that is no Python would be caught by any test
    path.write_text(changed, encoding="utf-8")
    return None


def run_tests(source: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """The exit status of pytest (None: it took too long) and the last lines of its output."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"--timeout={TEST_TIMEOUT_S}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-o", f"pythonpath={source} {ROOT / 'tests'}", *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT / 'tests'}", "ROUNDPIPE_COPY_ORDERS": "3"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-25:])


def check(mutant: Mutant | None, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether all is as it should be, and what happened. Without a mutant the tests must pass."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="roundpipe-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        problem = None if mutant is None else apply(mutant, source)
        if problem is not None:
            return False, f"does not apply: {problem}"
        status, tail = run_tests(source, tests)
    seconds = f"{time.monotonic() - began:.0f} s"
    if mutant is None:
        return status == PASSED, f"passed in {seconds}" if status == PASSED else f"failed without a mutant\n{tail}"
    match status:
        case None:
            return True, f"caught in {seconds}: the tests never end"
        case _ if status == FAILED:
            return True, f"caught in {seconds}"
        case _ if status == PASSED:
            return False, f"SURVIVED {seconds}"
        case _:
            return False, f"no test ran (pytest returned {status})\n{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; without any, all mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--apply", action="store_true", help="only check that every text is in the source once")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.names or any(name in m.name for name in options.names)]
    if options.apply:
        return report_texts(chosen)
    every_test = sorted({test for mutant in chosen for test in mutant.tests})
    jobs: list[tuple[Mutant | None, Sequence[str]]] = [(None, every_test), *((m, m.tests) for m in chosen)]
    failures = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for (mutant, _), (is_right, what) in zip(jobs, pool.map(lambda job: check(*job), jobs), strict=True):
            failures += not is_right
            name = "(no mutant)" if mutant is None else mutant.name
            print(f"{'ok  ' if is_right else 'FAIL'}  {name:70}  {what}", flush=True)  # noqa: T201
    print(f"{len(chosen)} mutants, {failures} failures")  # noqa: T201
    return bool(failures)


def report_texts(chosen: Sequence[Mutant]) -> int:
    failures = 0
    for mutant in chosen:
        path = ROOT / "src" / "roundpipe" / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
        if count != 1:
            failures += 1
            print(f"{mutant.name}: text occurs {count} times in {mutant.file}")  # noqa: T201
    print(f"{len(chosen)} mutants, {failures} do not apply")  # noqa: T201
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
