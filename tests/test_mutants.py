"""Every deliberate fault of tests/mutants can still be put into the source, and names tests that exist.

`make test-mutants` runs them; here only the texts are checked, so that a changed line is noticed at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "mutants"))

from mutants import MUTANTS, Mutant  # noqa: E402


def test_there_are_at_least_40_and_each_has_its_own_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    mutant.applied(mutant.place(ROOT / "src" / "roundpipe"))


@pytest.mark.parametrize("test", sorted({test for mutant in MUTANTS for test in mutant.tests}))
def test_the_tests_of_mutants_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8")
