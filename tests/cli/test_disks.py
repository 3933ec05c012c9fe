"""`roundpipe train --state-folder`: what is refused, warned of and shown before the model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import roundpipe.cli.train as train_module
from helpers_tiny_hf import chat_rows, save_tiny_model
from roundpipe import host_facts
from roundpipe.__main__ import main
from roundpipe.cli import disks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("disks")
    save_tiny_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(8)))
    return folder


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train_module, "_load_model", load)


def words(folder: Path, *more: str) -> list[str]:
    needed = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--out", str(folder / "out")]
    return ["train", *needed, "--devices", "cpu*2", "--batch", "4", "--seq-len", "64", "--no-view", *more]


def refusal(capsys: pytest.CaptureFixture[str], line: list[str]) -> str:
    capsys.readouterr()
    assert main(line) == 2
    return " ".join(capsys.readouterr().err.split())


def test_folders_that_cannot_have_the_state_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, message in (
        ("file", "file is a file, not a folder"),
        ("file/below", "file is a file, not a folder"),
        ("link", "nowhere, which does not exist; make that folder"),
    ):
        found = refusal(capsys, words(folder, "--state-folder", str(tmp_path / name)))
        assert f"--state-folder {tmp_path / name}" in found
        assert message in found
    assert "--state-folder has an empty name" in refusal(capsys, words(folder, "--state-folder", ""))


def test_an_optimizer_whose_state_lies_in_memory_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words(folder, "--state-folder", str(tmp_path / "new"), "--optim", "rmsprop")
    assert 'state_folder is for optim="adamw_torch"' in refusal(capsys, line)
    assert not (tmp_path / "new").exists()


def shown(capsys: pytest.CaptureFixture[str], line: list[str]) -> dict[str, str]:
    """What a dry run prints in rows: name and value."""
    capsys.readouterr()
    assert main([*line, "--dry-run"]) == 0
    pairs = [line.strip().partition("  ") for line in capsys.readouterr().out.splitlines()]
    return {name: value.strip() for name, _, value in pairs}


def test_a_dry_run_counts_the_state_on_its_disk_and_makes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "new" / "state"
    rows: list[dict[str, int]] = []
    monkeypatch.setattr("roundpipe.cli.preparation.memory_table", lambda each: rows.append(dict(each)) or "")
    assert shown(capsys, words(folder))["optimizer's state"] == "in host memory"
    host, _, disk = rows
    rows.clear()
    assert shown(capsys, words(folder, "--state-folder", str(state)))["optimizer's state"] == str(state)
    name = "optimizer state (Adam)"
    assert name not in rows[0]
    assert rows[0]["needed in all"] == host["needed in all"] - host[name]
    assert rows[2][name] == host[name] > 0, "one table: both folders are on one disk"
    assert rows[2]["needed in all"] == disk["needed in all"] + host[name]
    assert not state.parent.exists()


@pytest.mark.parametrize("is_one_disk", [True, False])
def test_too_little_space_for_the_state(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_one_disk: bool,
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    full = lambda path: is_one_disk or path == state  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 if full(path) else 10**12))
    if not is_one_disk:
        monkeypatch.setattr(disks, "_disk_number", lambda path: str(path == state))
    found = refusal(capsys, words(folder, "--state-folder", str(state)))
    both = f"--out {folder / 'out'} and " if is_one_disk else ""
    assert f"too little disk space for {both}--state-folder {state}:" in found
    assert "--moments 8bit" in found


def test_a_folder_in_memory_saves_nothing(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"28 27 0:23 / {tmp_path}/in\\040memory rw - tmpfs none rw\n"
        f"29 27 0:24 / {tmp_path}/hidden rw - tmpfs none rw\n"
        f"30 29 0:25 / {tmp_path}/hidden rw,relatime shared:1 - xfs /dev/vdb rw\n"
    )
    monkeypatch.setattr(host_facts, "_MOUNTS", mounts)
    place = tmp_path / "in memory" / "state"
    place.mkdir(parents=True)
    (tmp_path / "hidden").mkdir()
    assert host_facts.file_system(place / "new" / "folder") == "tmpfs"
    assert host_facts.file_system(tmp_path / "hidden") == "xfs"
    assert host_facts.file_system(tmp_path) == "ext4"
    rows: list[dict[str, int]] = []
    monkeypatch.setattr("roundpipe.cli.preparation.memory_table", lambda each: rows.append(dict(each)) or "")
    shown(capsys, words(folder, "--state-folder", str(place)))
    assert f"--state-folder {place} saves no memory: its files (tmpfs) lie in host memory" in caplog.text
    assert rows[0]["optimizer state (Adam)"] > 0
