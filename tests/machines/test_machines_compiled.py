"""Compiled layers on several machines, each of which compiles for the sizes of its own part of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_training import train

from helpers_machines import MachinePool, values
from helpers_parity import assert_same

pytestmark = pytest.mark.timeout(120)


def test_machines_compile_for_their_own_sizes_and_resume_with_them(pool: MachinePool, tmp_path: Path) -> None:
    eager = values(pool.run(2, train, "", str(tmp_path / "eager"), 0, 4))
    compiled = values(pool.run(2, train, "eager", str(tmp_path / "a"), 0, 4))
    for one, other in zip(compiled, eager, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert one["graphs"] > 0
    assert_same(compiled[1]["weights"], compiled[0]["weights"])
    values(pool.run(2, train, "eager", str(tmp_path / "b"), 0, 2))
    resumed = values(pool.run(2, train, "eager", str(tmp_path / "b"), 2, 2))
    for one, other in zip(resumed, compiled, strict=True):
        assert one["losses"] == other["losses"][2:]
        assert_same(one["weights"], other["weights"])
        assert one["sizes"] == other["sizes"]
    assert resumed[0]["sizes"] != resumed[1]["sizes"]
