"""`roundpipe train` on two machines: against one machine, resuming, signals, settings that differ, torchrun itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_runs import command

from helpers_machines import MachinePool, values
from helpers_tiny_hf import chat_rows, save_tiny_model
from roundpipe.checkpoint import latest
from roundpipe.report.metrics import METRICS_FILE, read_metrics

pytest.importorskip("trl")
pytestmark = pytest.mark.timeout(110)
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("machines")
    save_tiny_model(folder / "model")
    for name, count in (("train", 19), ("eval", 7)):
        lines = [json.dumps(row) + "\n" for row in chat_rows(count, seed=len(name))]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def words(folder: Path, out: Path, *more: str, size: int = 1) -> list[str]:
    """A command line whose batches and microbatches do not depend on the number of machines."""
    needed = ["--model", str(folder / "model"), "--data", str(folder / "train.jsonl"), "--out", str(out)]
    sizes = ["--batch", str(4 // size), "--num-microbatch", str(4 // size), "--steps", str(STEPS)]
    return ["train", *needed, *sizes, "--devices", "cpu", "--lr", "1e-2", "--seq-len", "64", "--no-view", *more]


def run(pool: MachinePool, size: int, line: list[str], **more: Any) -> list[dict[str, Any]]:
    return values(pool.run(size, command, line, *more.values()))


def weights(out: Path, file: str = "model") -> dict[str, torch.Tensor]:
    return load_file(out / f"{file}.safetensors")


def assert_close(found: Path, expected: Path, file: str = "model") -> None:
    for name, weight in weights(expected, file).items():
        assert float((weights(found, file)[name] - weight).abs().max()) < 1e-5, name


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_two_machines_train_like_one_with_the_same_batches(
    pool: MachinePool, folder: Path, tmp_path: Path, kind: str
) -> None:
    more = ["--eval-data", str(folder / "eval.jsonl"), "--eval-steps", "2", *(["--lora", "4"] * (kind == "lora"))]
    (alone,) = run(pool, 1, words(folder, tmp_path / "one", *more))
    both = run(pool, 2, words(folder, tmp_path / "two", *more, size=2))
    assert [each["code"] for each in (alone, *both)] == [0, 0, 0], [each["err"] for each in (alone, *both)]
    assert both[0]["losses"] == both[1]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert_close(tmp_path / "two", tmp_path / "one", "model" if kind == "full" else "adapter_model")
    rows, expected = read_metrics(tmp_path / "two" / METRICS_FILE), read_metrics(tmp_path / "one" / METRICS_FILE)
    for name in ("loss", "eval_loss"):
        found = [row[name] for row in rows if name in row]
        assert found == pytest.approx([row[name] for row in expected if name in row], abs=1e-5)
        assert len(found) == (STEPS if name == "loss" else 2)
    assert "the final model is in" in both[0]["out"]
    assert both[1]["out"] == ""  # rank 0 speaks for all


@pytest.mark.slow
def test_a_signal_on_one_machine_stops_all_after_the_step_and_the_run_goes_on(
    pool: MachinePool, folder: Path, tmp_path: Path
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run(pool, 2, words(folder, whole, size=2))
    stopped = run(pool, 2, words(folder, parted, size=2), more=(), variables=None, stop=(1, 2, int(signal.SIGTERM)))
    assert [each["code"] for each in stopped] == [128 + signal.SIGTERM] * 2
    assert "stopped by SIGTERM after step 2" in stopped[0]["out"]
    assert latest(parted) == parted / "checkpoint-2"
    # On one machine with the same batches: from the same state, and the same to rounding.
    one = tmp_path / "one"
    (alone,) = run(pool, 1, words(folder, one, "--resume", str(parted / "checkpoint-2")))
    assert alone["code"] == 0, alone["err"]
    assert_close(one, whole)
    resumed = run(pool, 2, words(folder, parted, "--resume", size=2))
    assert [each["code"] for each in resumed] == [0, 0], resumed[0]["err"]
    assert all(torch.equal(weights(parted)[name], value) for name, value in weights(whole).items())
    assert [row["step"] for row in read_metrics(parted / METRICS_FILE) if row["type"] == "train"] == [1, 2, 3, 4]


def test_a_machine_that_dies_ends_the_run_on_all_and_a_restart_goes_on_from_the_checkpoint(
    pool: MachinePool, folder: Path, tmp_path: Path
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    line = ["--save-steps", "1", "--keep", "10"]
    run(pool, 2, words(folder, whole, *line, size=2))
    outcomes = pool.run(
        2, command, words(folder, parted, *line, size=2), (), None, (1, 3, int(signal.SIGKILL)), timeout_s=20
    )
    assert outcomes[1].died
    assert outcomes[0].error is None, outcomes[0].notes
    assert outcomes[0].value["code"] == 1
    assert re.search("is lost|has ended", outcomes[0].value["err"]), outcomes[0].value["err"]
    assert latest(parted) in (parted / "checkpoint-1", parted / "checkpoint-2")
    again = run(pool, 2, words(folder, parted, *line, size=2), more=(), variables={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert [each["code"] for each in again] == [0, 0], again[0]["err"]
    assert all(torch.equal(weights(parted)[name], value) for name, value in weights(whole).items())


@pytest.mark.slow
def test_a_restarted_run_goes_on_by_itself(pool: MachinePool, folder: Path, tmp_path: Path) -> None:
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    line = words(folder, tmp_path / "out", "--steps", "2", "--save-steps", "1", size=2)
    first = run(pool, 2, line, more=(), variables=restarted)  # nothing was saved before the failure
    assert [each["code"] for each in first] == [0, 0], first[0]["err"]
    refused = run(pool, 2, line)
    assert [each["code"] for each in refused] == [2, 2]
    assert "has the checkpoints of an earlier run" in refused[0]["err"]
    assert "looking for checkpoints failed on rank 0" in refused[1]["err"]
    again = run(pool, 2, line, more=(), variables=restarted)
    assert "the run was complete at step 2 already" in again[0]["out"]
    auto = run(pool, 2, [*line, "--resume", "auto"])
    assert "the run was complete at step 2 already" in auto[0]["out"]


def test_mistakes_on_one_machine_are_reported_on_all(pool: MachinePool, folder: Path, tmp_path: Path) -> None:
    line = words(folder, tmp_path / "out", size=2)
    other = run(pool, 2, line, more=([], ["--lr", "2e-2", "--weight-decay", "0.1"]))
    for each in other:
        assert each["code"] == 2
        assert "rank 1 of the run has other settings than rank 0" in each["err"]
        assert "--lr: 0.02 instead of 0.01" in each["err"]
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join((folder / "train.jsonl").read_text().splitlines(keepends=True)[:12]))
    for each in run(pool, 2, line, more=([], ["--data", str(shorter)])):
        assert each["code"] == 2
        assert "the tokens of --data" in each["err"]
    absent = run(pool, 2, line, more=([], ["--data", str(tmp_path / "absent.jsonl")]))
    assert [each["code"] for each in absent] == [2, 2]
    assert "preparing the run failed on rank 1" in absent[0]["err"]
    assert "absent.jsonl" in absent[0]["err"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_torchrun_starts_the_command(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "roundpipe"]
    line = words(folder, out, "--steps", "1", size=2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*launch, *line], capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert f"the final model is in {out}" in done.stdout
    assert (out / "model.safetensors").exists()
    manifest = json.loads((out / "latest" / "manifest.json").read_text())
    assert manifest["machines"] == 2
    assert done.stderr.count("ranks 0, 1 run on the same host") == 1
