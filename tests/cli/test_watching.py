"""What a run shows beside its training: early stopping, title and cost in the report, services of --report-to."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_model
from transformers import TrainerCallback, TrainerState

import roundpipe.cli.train as train_module
from roundpipe.__main__ import main
from roundpipe.cli.arguments import parse
from roundpipe.cli.console import plain_output
from roundpipe.cli.watching import about, how_it_stopped, what_next
from roundpipe.report import write_report
from roundpipe.report.metrics import RunRecord, read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows to train, and rows whose loss only gets worse by that."""
    folder = tmp_path_factory.mktemp("watching")
    save_model(folder / "model")
    for name, token in (("rows", 70), ("eval", 90)):
        text = "".join(json.dumps({"input_ids": [token] * (n % 5 + 3)}) + "\n" for n in range(20))
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def words(folder: Path, out: Path, *more: str) -> list[str]:
    needed = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--out", str(out)]
    usual = ["--devices", "cpu", "--batch", "4", "--lr", "1e-2", "--schedule", "constant", "--steps", "8", "--no-view"]
    return ["train", *needed, *usual, *more]


def stopping(folder: Path) -> list[str]:
    return ["--eval-data", str(folder / "eval.jsonl"), "--eval-every", "1", "--early-stopping", "2"]


def eval_losses(out: Path) -> list[float]:
    return [row["eval_loss"] for row in read_metrics(out / "metrics.jsonl") if row["type"] == "eval"]


@pytest.fixture(scope="module")
def stopped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "out"
    assert main(words(folder, out, *stopping(folder), "--price-per-hour", "3600")) == 0
    return out


def test_a_run_that_gets_no_better_ends_with_its_best_model(stopped: Path) -> None:
    losses = eval_losses(stopped)
    assert len(losses) == 4
    assert losses[1] == min(losses)
    best, final = (load_file(folder / "model.safetensors") for folder in (stopped / "checkpoint-2", stopped))
    newest = load_file(stopped / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(best[name], value) for name, value in final.items())
    assert not all(torch.equal(newest[name], value) for name, value in final.items())


def test_the_model_card_names_the_folders(folder: Path, stopped: Path) -> None:
    card = (stopped / "README.md").read_text(encoding="utf-8")
    assert f"a fine-tuned version of `{folder / 'model'}`" in card
    assert f'model="{stopped}"' in card
    assert "None" not in card


def test_the_end_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(folder, tmp_path / "out", *stopping(folder))) == 0
    said = capsys.readouterr().out
    assert "stopped early after step 4 of 8: the last 2 evaluations were not better than that of step 2" in said


def test_the_commands_for_the_result_are_said() -> None:
    needed = ["--model", "m", "--data", "d", "--out", "my run"]
    assert what_next(parse(needed)) == "talk with it: roundpipe chat 'my run'"
    said = what_next(parse([*needed, "--lora", "2"]))
    assert said is not None
    assert "merge it into its model: roundpipe merge 'my run' --out MERGED" in said
    assert what_next(parse([*needed, "--method", "classify"])) is None


def test_a_complete_run_with_early_stopping_says_which_weights_it_kept() -> None:
    state = TrainerState(global_step=8, max_steps=8, best_global_step=6, best_metric=0.25)
    needed = ["--model", "m", "--data", "d", "--out", "o"]
    said = how_it_stopped(parse([*needed, "--eval-split", "0.1", "--early-stopping", "2"]), state)
    assert said == "the final model has the weights of step 6 (eval_loss 0.25)"
    assert how_it_stopped(parse(needed), state) is None


def test_the_table_of_weights_that_a_folder_lacks_is_not_shown() -> None:
    found: list[str] = []
    logger = logging.getLogger("transformers.modeling_utils")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with plain_output():
            assert logger.level == logging.NOTSET  # with another one transformers says what it does not shard
            logger.error("Model LOAD REPORT from: m")
            logger.error("something else")
        logger.error("Model LOAD REPORT from: n")
    finally:
        logger.removeHandler(handler)
    assert found == ["something else", "Model LOAD REPORT from: n"]


def test_a_killed_run_counts_on(folder: Path, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations before the end of the process count, so the resumed run ends at the same step."""
    new_trainer: Callable[..., Any] = train_module._new_trainer

    class Killer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:  # after one evaluation that was not better
                os.kill(os.getpid(), signal.SIGTERM)

    def killed(*args: Any) -> Any:
        trainer = new_trainer(*args)
        trainer.add_callback(Killer())
        return trainer

    out = tmp_path / "out"
    monkeypatch.setattr(train_module, "_new_trainer", killed)
    assert main(words(folder, out, *stopping(folder))) == 143
    monkeypatch.setattr(train_module, "_new_trainer", new_trainer)
    assert main(["train", "--config", str(out / "train.yaml"), "--resume"]) == 0
    assert eval_losses(out) == eval_losses(stopped)
    final, wanted = (load_file(folder / "model.safetensors") for folder in (out, stopped))
    assert all(torch.equal(final[name], value) for name, value in wanted.items())


def test_the_report_says_what_was_trained_and_what_it_cost(stopped: Path, folder: Path) -> None:
    shown = RunRecord.read(stopped).settings["run"]
    assert shown == {
        "name": "out",
        "base model": "model",
        "method": f"{parse(words(folder, stopped)[1:]).method.title}, all weights",
        "data": "rows.jsonl",
        "price per hour": 3600.0,
    }
    page = write_report(stopped).read_text()
    assert "<title>out · model · " in page
    for name in ("tokens per day", "cost"):
        assert f"<span>{name}</span>" in page


@pytest.mark.parametrize(
    ("more", "method"),
    [(["--lora", "4"], "LoRA, rank 4"), (["--adapter", "runs/first"], "LoRA adapter first, trained further")],
)
def test_the_method_of_adapters_is_named(folder: Path, more: list[str], method: str) -> None:
    shown = about(parse([*words(folder, Path("out"))[1:], *more, "--run-name", "mine"]))
    assert shown["method"].endswith(f", {method}")
    assert shown["name"] == "mine"


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--early-stopping", "2"], "--early-stopping needs evaluations; give --eval-data"),
        (["--early-stopping", "0"], "--early-stopping must be greater than 0"),
        (["--early-stopping", "2", "--save-every", "5"], "--save-every and --early-stopping exclude each other"),
        (["--early-stopping-threshold", "1"], "give --early-stopping N alone"),
        (["--price-per-hour", "-1"], "--price-per-hour must be greater than 0"),
    ],
)
def test_mistakes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], part: str) -> None:
    assert main(words(folder, tmp_path / "out", *more)) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio", "comet_ml"])
def test_a_missing_package_of_report_to_is_named_with_the_command_that_installs_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = "transformers.integrations.integration_utils.get_available_reporting_integrations"
    monkeypatch.setattr(module, lambda: ["codecarbon"])
    assert main(words(folder, tmp_path / "out", "--report-to", name)) == 2
    message = capsys.readouterr().err
    package = name.replace("_", "-")
    assert f"--report-to {name}: its package is not installed here; run: pip install {package}." in message
    assert "use one that is installed: codecarbon" in message
