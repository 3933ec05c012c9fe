"""RunViewCallback in Trainers: a row for every step with the exact loss, and what is known without a wrapped model."""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, optim
from roundpipe.report import RunRecord, read_metrics

transformers = pytest.importorskip("transformers")
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

from roundpipe.integrations import run_view  # noqa: E402
from roundpipe.integrations.run_view import RunViewCallback  # noqa: E402
from roundpipe.report.charts import charts_of  # noqa: E402
from roundpipe.report.live_view import plain_line, render_text  # noqa: E402
from roundpipe.report.refresh import Refresh  # noqa: E402

MODEL_FIELDS = {"device_share", "bytes_up", "bytes_down", "weights_up_bytes", "device_peak_bytes", "optimizer_wait_s"}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.linear(x)[:, 0], labels)}


class Noting(Trainer):
    """Passes the losses on, as the Trainers of this package do."""

    view: RunViewCallback

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        self.view.note_loss(loss, inputs["x"].numel())
        return loss


def dataset(count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"x": torch.randn(3, generator=generator), "labels": torch.randn((), generator=generator)} for _ in range(count)
    ]


def trained(folder: Path, cls: type[Trainer], **options: Any) -> tuple[Trainer, RunViewCallback]:
    view = RunViewCallback(show=False)
    defaults = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "learning_rate": 0.25,
        "disable_tqdm": True,
    }
    args = TrainingArguments(**(defaults | options))
    trainer = cls(Regression(), args, train_dataset=dataset(), eval_dataset=dataset(4), callbacks=[view])
    trainer.view = view
    return trainer, view


def test_every_step_has_a_row_with_the_exact_loss(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, Noting)
    trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    pairs = zip(trainer.losses[::2], trainer.losses[1::2], strict=True)
    assert [row["loss"] for row in rows] == [first + second for first, second in pairs]
    assert [row["tokens"] for row in rows] == [12] * 6
    for row in rows:
        assert row["tokens_per_s"] == row["tokens"] / row["step_s"]
        assert row["host_rss_bytes"] > 0
        assert all(row[name] is None for name in MODEL_FIELDS)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [rows[3]["lr"]] == rates
    assert rows[0]["lr"] == 0.25
    assert rows[3]["grad_norm"] == trainer.state.log_history[0]["grad_norm"]
    assert rows[0]["time"] < rows[5]["time"]


def test_a_plain_trainer_gives_the_losses_that_it_logs(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, Trainer, logging_steps=1, eval_strategy="steps", eval_steps=3)
    trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    logged = trainer.state.log_history
    steps = [row for row in rows if row["type"] == "train"]
    assert [row["loss"] for row in steps] == [entry["loss"] for entry in logged if "loss" in entry]
    assert [row["grad_norm"] for row in steps] == [entry["grad_norm"] for entry in logged if "grad_norm" in entry]
    evaluations = [row for row in rows if row["type"] == "eval"]
    assert [(row["step"], row["eval_loss"]) for row in evaluations] == [
        (entry["step"], entry["eval_loss"]) for entry in logged if "eval_loss" in entry
    ]


def test_a_mean_of_several_steps_is_no_loss_of_a_step(tmp_path: Path) -> None:
    trained(tmp_path, Trainer)[0].train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [None] * 6
    assert [row["grad_norm"] is None for row in rows] == [True, True, True, False, True, True]


class DiesWhileSaving(Noting):
    """Ends after a checkpoint is complete, before callbacks hear of it, as a kill can."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        raise KeyboardInterrupt


def test_rows_and_the_report_have_what_the_method_logs(tmp_path: Path) -> None:
    class Rewarding(Noting):
        def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                logs |= {"reward": self.state.global_step / 2, "rewards/right/mean": 0.25, "note": "text"}
            super().log(logs, *args, **kwargs)

    trainer, view = trained(tmp_path, Rewarding, logging_steps=1)
    trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["reward"] for row in rows] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert [row["rewards/right/mean"] for row in rows] == [0.25] * 6
    assert "learning_rate" not in rows[0]
    assert "note" not in rows[0]
    chart = next(chart for chart in charts_of(rows) if chart.title == "Reward")
    assert [line.name for line in chart.lines] == ["reward", "right"]
    assert "final reward" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "reward 3 " in plain_line(view.run_state)
    assert re.search(r"method +reward 3", render_text(view.run_state))


def test_a_plain_run_has_no_figure_of_a_method(tmp_path: Path) -> None:
    trainer, view = trained(tmp_path, Noting, logging_steps=1)
    trainer.train()
    assert "reward" not in plain_line(view.run_state)
    assert "method" not in render_text(view.run_state)
    assert "Reward" not in [chart.title for chart in charts_of(read_metrics(tmp_path / "metrics.jsonl"))]


def test_resuming_continues_the_file(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    trained(tmp_path / "whole", Noting, **options)[0].train()
    whole = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    first, view = trained(tmp_path / "parts", DiesWhileSaving, **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    view.close()
    path = tmp_path / "parts" / "metrics.jsonl"
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]  # written before the checkpoint of step 3
    with path.open("a") as file:
        file.write('{"type": "train", "step": 4, "loss": 17.0}\n{"type": "tr')
    trained(tmp_path / "parts", Noting, **options)[0].train(resume_from_checkpoint=True)
    resumed = read_metrics(path)
    assert [(row["step"], row["loss"], row["lr"]) for row in resumed] == [
        (row["step"], row["loss"], row["lr"]) for row in whole
    ]
    assert [start["step"] for start in RunRecord.read(tmp_path / "parts").starts] == [0, 3]


def test_an_error_leaves_complete_files(tmp_path: Path) -> None:
    class Fails(Noting):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 2:
                raise RuntimeError("broken")
            return super().training_step(*args, **kwargs)

    trainer, view = trained(tmp_path, Fails)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    view.close()
    view.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert RunRecord.read(tmp_path).settings["model"]["class"] == "Regression"


def hand_made_run(
    folder: Path, model: RoundPipe, *, is_async: bool, steps: int = 5, ends: bool = True
) -> RunViewCallback:
    """The events that a Trainer sends, for a loop over a wrapped model."""
    args = TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, run_name="hand made")
    state, control = TrainerState(max_steps=steps), TrainerControl()
    optimizer = optim.AdamW(model.optim_parameters(), lr=0.5)
    view = RunViewCallback(show=False)
    view.on_train_begin(args, state, control, model=model)
    for step in range(1, steps + 1):
        for _ in range(2):
            loss = model.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.square().mean())
            view.note_loss(loss, 48)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
        view.on_optimizer_step(args, state, control, optimizer=optimizer)
        view.note_grad_norm(torch.tensor(float(step)))
        state.global_step, state.epoch = step, step / steps
        view.on_step_end(args, state, control, model=model)
    if ends:
        view.on_train_end(args, state, control, model=model)
    return view


def wrapped() -> RoundPipe:
    torch.manual_seed(3)
    return RoundPipe(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), devices=["cpu"] * 2)


def test_a_wrapped_model_fills_every_field(tmp_path: Path) -> None:
    with wrapped() as model:
        hand_made_run(tmp_path, model, is_async=False)
        last = model.stats()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["grad_norm"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert rows[-1]["device_share"] == last.device_share
    assert (rows[-1]["bytes_up"], rows[-1]["bytes_down"]) == (last.bytes_up, last.bytes_down)
    assert rows[-1]["optimizer_wait_s"] == last.optimizer_wait_s
    assert rows[-1]["tokens"] == 96
    assert rows[-1]["lr"] == 0.5
    record = RunRecord.read(tmp_path)
    assert record.starts[0]["devices"] == ["cpu:0", "cpu:1"]
    assert list(record.timelines) == [2, 5]
    assert record.timelines[2].devices() != ()
    assert record.settings["model"]["layers"] == 3
    assert record.settings["versions"]["torch"] == torch.__version__


def test_a_killed_run_leaves_its_devices_and_an_early_timeline(tmp_path: Path) -> None:
    with wrapped() as model:
        view = hand_made_run(tmp_path, model, is_async=False, steps=3, ends=False)
        record = RunRecord.read(tmp_path)  # what a process killed now would leave
        view.close()
    assert record.starts[0]["devices"] == ["cpu:0", "cpu:1"]
    assert list(record.timelines) == [2, 3]


def test_a_note_needs_a_live_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    begin = (TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True), TrainerState(), TrainerControl())
    shown, hidden, terminal = RunViewCallback(), RunViewCallback(show=False), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert not shown.show_note("too early")
    for view in (shown, hidden):
        view.on_train_begin(*begin)
    assert shown.show_note("stopping after this step")
    assert not hidden.show_note("stopping after this step")
    shown.close()
    hidden.close()
    assert "stopping after this step" in terminal.getvalue()
    assert "too early" not in terminal.getvalue()


def test_asynchronous_steps_have_rows_at_once(tmp_path: Path) -> None:
    with wrapped() as model:
        hand_made_run(tmp_path, model, is_async=True)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert None not in [row["loss"] for row in rows]


def test_a_run_ends_with_a_report(tmp_path: Path) -> None:
    with wrapped() as model:
        hand_made_run(tmp_path, model, is_async=False)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    page = (tmp_path / "report.html").read_text()
    assert "<h1>hand made</h1>" in page
    assert f'title="{rows[-1]["loss"]!r} at step 5"' in page
    assert f'title="{rows[0]["loss"]!r}"' in page
    assert "<td>cpu:0, cpu:1</td>" in page
    assert re.findall(r"Step (\d+): [\d.]+ ms", page) == ["2", "5"]
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_a_report_that_cannot_be_written_does_not_fail_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "report.html").mkdir()
    trainer, _ = trained(tmp_path, Noting)
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].startswith(f"The report of the run in {tmp_path} could not be written: IsADirectoryError: ")


def test_a_run_without_a_step_has_no_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("broken")

    trainer, view = trained(tmp_path, Fails)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    view.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_it_imports_without_the_other_packages() -> None:
    probe = """
import sys
for name in ("trl", "datasets", "rich", "matplotlib"):
    sys.modules[name] = None
import roundpipe.integrations.run_view, roundpipe.report
"""
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=100, env=environment)


def test_a_running_run_has_a_page_which_the_end_makes_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "Refresh", functools.partial(Refresh, every_s=0.0))
    with wrapped() as model:
        view = hand_made_run(tmp_path, model, is_async=False, steps=3, ends=False)
        view._refresh.close()
        left = (tmp_path / "report.html").read_text()  # what a process killed now would leave
        view.close()
    assert re.search(r"Running: step [123] of 3", left)
    assert 'http-equiv="refresh" content="30"' in left
    final = (tmp_path / "report.html").read_text()
    assert "Running" not in final
    assert 'http-equiv="refresh"' not in final
    record = RunRecord.read(tmp_path)
    assert record.max_steps == 3
    assert record.ended is not None


def test_a_resumed_run_has_not_ended(tmp_path: Path) -> None:
    RunRecord({}, [{"step": 0, "time": 1.0}], max_steps=3, ended=2.0).write(tmp_path)
    record = RunRecord.resumed(tmp_path, 2)
    assert (record.max_steps, record.ended) == (None, None)


def test_a_page_that_cannot_be_refreshed_does_not_fail_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "Refresh", functools.partial(Refresh, every_s=0.0))
    (tmp_path / "report.html").mkdir()
    trainer, _ = trained(tmp_path, Noting)
    trainer.train()
    assert trainer.state.global_step == 6
    warnings = [record.getMessage() for record in caplog.records if "could not be refreshed" in record.getMessage()]
    assert len(warnings) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6
