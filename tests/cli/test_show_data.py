"""`roundpipe data` and the rows of a dry run: what is shown is what is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import BEGIN, END, save_model

import roundpipe.cli.train as train_module
from roundpipe.__main__ import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("show") / "model")


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train_module, "_load_model", load)


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def alpaca(n: int) -> dict[str, str]:
    return {"instruction": "q" * n, "output": "yes"}


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[str]:
    capsys.readouterr()
    assert main(list(words)) == code
    return capsys.readouterr().out.splitlines()


def test_rows_are_shown_as_the_model_sees_them(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.json", *(alpaca(n) for n in (1, 2, 30, 30)))
    usual = ["--model", str(model), "--devices", "cpu", "--rows", "2"]
    lines = shown(capsys, "data", str(path), *usual)
    assert lines[:6] == [
        f"--data {path}: 4 rows of Alpaca's columns, as messages",
        "the first rows; tokens with a loss stand between [[ and ]]",
        f"-- {path}, line 1: 23 tokens, 4 with a loss",
        f"{BEGIN}user:q{END}{BEGIN}assistant:[[yes{END}]]",
        f"-- {path}, line 2: 24 tokens, 4 with a loss",
        f"{BEGIN}user:qq{END}{BEGIN}assistant:[[yes{END}]]",
    ]
    table = [" ".join(line.split()) for line in lines[6:]]
    bars = [line for line in table if line.endswith("#" * 40)]
    assert bars == [f"23 to 25 2 {'#' * 40}", f"50 to 52 2 {'#' * 40}"]
    assert [int(line.split()[3]) for line in table if " to " in line] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    for line in ("rows 4", "longest 52", "truncated 0", "dropped 0"):
        assert line in table
    assert not (tmp_path / "out").exists()


def test_rows_that_are_cut_or_too_long(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", *(alpaca(n) for n in (1, 60, 21)))
    usual = [str(path), "--model", str(model), "--devices", "cpu", "--seq-len", "45"]
    lines = shown(capsys, "data", *usual, code=2)  # refused as a run would be, after the rows
    assert any(line.endswith("more than --seq-len") for line in lines)
    table = [" ".join(line.split()) for line in shown(capsys, "data", *usual, "--truncate")]
    for line in ("rows 2", "truncated 1", "dropped 1", "longest 45"):
        assert line in table
    assert any("line 2: 82 tokens, cut to 45, 4 with a loss" in line for line in table)


def test_answers_are_shown_with_their_prompt(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "q ", "chosen": "good", "rejected": "no"})
    lines = shown(capsys, "data", str(path), "--model", str(model), "--devices", "cpu", "--method", "dpo")
    assert lines[2:6] == [
        f"-- {path}, line 1, chosen: 7 tokens, 5 with a loss",
        "q [[good<eos>]]",
        f"-- {path}, line 1, rejected: 5 tokens, 3 with a loss",
        "q [[no<eos>]]",
    ]


def test_a_terminal_shows_colours(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "q ", "completion": "good"})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    usual = ["data", str(path), "--model", str(model), "--devices", "cpu"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[2mq \033[0m\033[1;32mgood<eos>\033[0m" in shown(capsys, *usual)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "q [[good<eos>]]" in shown(capsys, *usual)


def test_a_dry_run_shows_rows(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "p.jsonl", *({"text": "a" * n} for n in (3, 4, 5)))
    command = ["train", "--model", str(model), "--data", str(path), "--out", str(tmp_path / "out"), "--devices", "cpu"]
    lines = shown(capsys, *command, "--dry-run")
    assert "[[aaa<eos>]]" in lines
    assert "[[aaaa<eos>]]" in lines
    assert "[[aaaaa<eos>]]" not in lines
    assert lines[-1] == "dry run: all checks passed; nothing was trained"


def test_help_and_mistakes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "data", "--help")[0].startswith("usage: roundpipe data FILES...")
    shown(capsys, "data", code=2)
    shown(capsys, "data", str(tmp_path / "no.json"), "--model", str(model), "--devices", "cpu", code=2)
    assert main(["data", "x.json", "--model", str(model), "--rows", "many"]) == 2
    assert "--rows must be a whole number, got 'many'" in capsys.readouterr().err
