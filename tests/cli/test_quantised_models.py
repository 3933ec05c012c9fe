"""The command on models that come quantised: trained, resumed and merged as the plain model with the same values."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers_quantised import quantised_copy
from helpers_tiny_hf import chat_rows, save_tiny_model
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A quantised model and the plain one with the same values."""
    save_tiny_model(tmp_path / "plain", "llama")
    quantised_copy(tmp_path / "plain", tmp_path / "quantised", tmp_path / "rounded", "nf4")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(16)))
    return tmp_path / "quantised", tmp_path / "rounded"


def words(model: Path, out: Path, *more: str) -> list[str]:
    needed = ["train", "--model", str(model), "--data", str(model.parent / "rows.jsonl"), "--out", str(out)]
    usual = ["--devices", "cpu*2", "--batch", "4", "--lr", "1e-2", "--seq-len", "64", "--no-view"]
    return [*needed, *usual, *more]


def losses(out: Path) -> list[float]:
    newest = latest(out)
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_a_run_is_that_of_the_plain_model_also_resumed_and_merged(folders: tuple[Path, Path], tmp_path: Path) -> None:
    quantised, rounded = folders
    lora = ("--lora", "2", "--save-steps", "2", "--steps")
    assert main(words(rounded, tmp_path / "a", *lora, "4")) == 0
    assert main(words(quantised, tmp_path / "b", *lora, "4")) == 0
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    (tmp_path / "b" / "checkpoint-4").rename(tmp_path / "whole")
    assert main(words(quantised, tmp_path / "b", *lora, "4", "--resume")) == 0
    for folder in (tmp_path / "whole", tmp_path / "b" / "checkpoint-4"):
        found, expected = (
            load_file(each / "adapter_model.safetensors") for each in (folder, tmp_path / "a" / "checkpoint-4")
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for base, name in ((quantised, "of quantised"), (rounded, "of rounded")):
        assert main(["merge", str(tmp_path / "b"), "--base", str(base), "--out", str(tmp_path / name)]) == 0
    found, expected = (load_file(tmp_path / f"of {name}" / "model.safetensors") for name in ("quantised", "rounded"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "of quantised" / "config.json").read_text())


@pytest.mark.parametrize("goes_on", [False, True], ids=["new adapter", "given adapter"])
def test_a_dry_run_counts_the_bytes_that_come(
    goes_on: bool, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 128, "num_layers": 8}
    plain = save_tiny_model(tmp_path / "large", "llama", **sizes)
    quantised = tmp_path / "large quantised"
    quantised_copy(plain, quantised, tmp_path / "large rounded", "int8")
    more = ["--lora", "2"]
    if goes_on:
        assert main(words(quantised, tmp_path / "adapter", "--lora", "2", "--steps", "1")) == 0
        more = ["--adapter", str(tmp_path / "adapter")]
    shown = []
    for model in (plain, quantised):
        capsys.readouterr()
        assert main(words(model, tmp_path / "out", *more, "--dry-run")) == 0
        lines = capsys.readouterr().out.splitlines()
        weights = next(float(line.split()[1]) for line in lines if line.split()[:1] == ["weights"] and "GB" in line)
        count, packing = (next(line for line in lines if word in line) for word in ("parameters", "frozen weights"))
        shown.append((weights, count, packing))
    assert 0.24 * shown[0][0] < shown[1][0] < 0.35 * shown[0][0]  # float32 against 8 bits; embeddings are plain
    assert shown[0][1] == shown[1][1]
    assert "as they come (bitsandbytes)" in shown[1][2]


def test_an_estimate_counts_the_bytes_that_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_tiny_model(tmp_path / "plain", "llama", hidden_size=256, intermediate_size=1024, num_layers=8)
    quantised_copy(plain, tmp_path / "quantised", tmp_path / "rounded", "nf4")
    machine = ["--devices", "1x24GB", "--ram", "64", "--batch", "2", "--seq-len", "32", "--lora", "2", "--json"]
    weights, parameters = [], []
    for model in (plain, tmp_path / "quantised"):
        capsys.readouterr()
        assert main(["estimate", str(model), *machine]) == 0
        found = json.loads(capsys.readouterr().out)
        weights.append(found["host_bytes"]["weights"])
        parameters.append(found["parameters"])
    assert 0.25 * weights[0] < weights[1] < 0.4 * weights[0]  # bfloat16 against 4.5 bits; embeddings are plain
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "which do not train; add --lora R or --adapter DIR"),
        (("--lora", "2", "--method", "classify"), "cannot give a new head"),
        (("--lora", "2", "--model-init-kwargs", '{"attn_implementation": "eager"}'), "are for from_pretrained"),
    ],
)
def test_what_does_not_go_with_quantised_weights_is_refused(
    given: tuple[str, ...], message: str, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(folders[0], tmp_path / "out", *given)) != 0
    shown = capsys.readouterr().err
    assert message in shown
    assert "quantised as bitsandbytes" in shown
    assert "Traceback" not in shown


def test_chat_answers_as_the_plain_model(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for model in folders:
        monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2 w3\n"))
        capsys.readouterr()
        assert main(["chat", str(model), "--devices", "cpu"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert len(answers[0].split()) > 3
