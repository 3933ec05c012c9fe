"""Trainers on several machines against one machine with the same batches and microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import metrics_of, rows_of, train

from helpers_machines import MachinePool, values
from roundpipe.checkpoint import latest

pytest.importorskip("trl")
pytestmark = pytest.mark.timeout(110)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, norms and weights are equal up to the rounding of float32."""
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5, rel=0)
    known = [at for at, norm in enumerate(expected["norms"]) if norm is not None]  # stale steps know them later
    assert [found["norms"][at] for at in known] == pytest.approx([expected["norms"][at] for at in known], rel=1e-4)
    assert len(known) >= 4
    if expected["evaluated"] is not None:
        assert found["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-5, rel=0)
    for name, weight in expected["weights"].items():
        assert float((found["weights"][name] - weight).abs().max()) < 1e-5, name


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of rank 0. All machines have the same one."""
    first, *others = results
    for other in others:
        assert other["losses"] == first["losses"]
        assert other["evaluated"] == first["evaluated"]
        assert (other["steps"], other["best"]) == (first["steps"], first["best"])
        assert all(torch.equal(other["weights"][name], value) for name, value in first["weights"].items())
    return first


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("full", {}),
        pytest.param("full", {"is_async": True}, marks=pytest.mark.slow),
        pytest.param("full", {"label_smoothing_factor": 0.1}, marks=pytest.mark.slow),
        pytest.param("lora", {}, marks=pytest.mark.slow),
        pytest.param("sft", {}, marks=pytest.mark.slow),
        pytest.param("dpo", {"rows": 24}, marks=pytest.mark.slow),
    ],
    ids=["full", "stale", "smoothed labels", "lora", "sft", "dpo"],
)
def test_losses_norms_and_weights_are_those_of_one_machine(
    pool: MachinePool, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    alone = values(pool.run(1, train, kind, str(tmp_path / "one"), None, changes))[0]
    assert len(alone["losses"]) == 6
    for size in (2, 3) if kind == "full" and not changes else (2,):
        folder = str(tmp_path / str(size))
        found = together(values(pool.run(size, train, kind, folder, None, changes)))
        assert_close(found, alone)
        rows = [row for row in metrics_of(folder) if row["type"] == "train"]
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        one = [row for row in metrics_of(str(tmp_path / "one")) if row["type"] == "train"]
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in one], abs=1e-5)
        if kind == "full":  # rows of one length: padding does not depend on how a batch is divided
            assert [row["tokens"] for row in rows] == [row["tokens"] for row in one]


@pytest.mark.parametrize("rows", [24, 22, 19])
def test_a_batch_of_all_machines_has_the_rows_of_the_batch_of_one(pool: MachinePool, tmp_path: Path, rows: int) -> None:
    (alone,) = values(pool.run(1, rows_of, str(tmp_path / "one"), rows))
    parts = values(pool.run(3, rows_of, str(tmp_path / "three"), rows))
    for epoch, batches in enumerate(alone):
        assert [len(part[epoch]) for part in parts] == [len(batches)] * 3
        for at, batch in enumerate(batches):
            joined = [row for part in parts for row in part[epoch][at]]
            assert joined == (batch if len(batch) >= 3 else [*batch, *batch, *batch][:3])


def test_a_run_goes_on_bit_for_bit_on_as_many_machines_and_to_rounding_on_one(
    pool: MachinePool, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    expected = together(values(pool.run(2, train, "full", str(tmp_path / "whole"), None, saving)))
    middle = str(tmp_path / "whole" / "checkpoint-3")
    assert latest(tmp_path / "whole") == tmp_path / "whole" / "checkpoint-6"
    resumed = together(values(pool.run(2, train, "full", str(tmp_path / "two"), middle, saving)))
    assert resumed["losses"] == expected["losses"]
    assert all(torch.equal(resumed["weights"][name], value) for name, value in expected["weights"].items())
    on_one = values(pool.run(1, train, "full", str(tmp_path / "one"), middle, saving))[0]
    assert_close(on_one, expected)


@pytest.mark.slow
def test_evaluation_early_stopping_and_the_best_model(pool: MachinePool, tmp_path: Path) -> None:
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.5,  # losses rise again
        "patience": 2,
        "max_steps": 12,
    }
    alone = values(pool.run(1, train, "full", str(tmp_path / "one"), None, changes))[0]
    found = together(values(pool.run(2, train, "full", str(tmp_path / "two"), None, changes)))
    assert (found["steps"], found["best"]) == (alone["steps"], alone["best"])
    assert alone["steps"] < 12
    assert found["eval losses"][:2] == pytest.approx(alone["eval losses"][:2], abs=1e-4)
    assert found["evaluated"] == pytest.approx(min(found["eval losses"]), abs=1e-6)
