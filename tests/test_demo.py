"""`make demo`, cut short: it trains, is killed, resumes exactly, and leaves a report; its comparisons can fail."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from demo.__main__ import conclude  # noqa: E402
from demo.chats import new_tokenizer, read_chats, training_and_held_out_pairs, write_chats  # noqa: E402
from demo.comparison import Finding, compare_with_undisturbed  # noqa: E402
from demo.plain_loop import IGNORED, tokens_and_labels  # noqa: E402

from roundpipe.report import Section  # noqa: E402

LOSSES = {1: 3.5, 2: 3.25, 3: 3.125}


@functools.cache
def quick_demo() -> tuple[str, str, bytes]:
    """The terminal output, the page and the picture of one short demo on virtual devices."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [sys.executable, "-m", "demo", "--quick", "--output", output],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        folder = Path(output)
        return done.stdout, (folder / "report.html").read_text(), (folder / "report.png").read_bytes()


def test_the_demo_loses_steps_to_a_kill_and_repeats_them_exactly() -> None:
    terminal, page, _ = quick_demo()
    killed = re.search(r"killed at step (\d+); the newest complete checkpoint is \S+checkpoint-(\d+)", terminal)
    assert killed is not None
    assert int(killed[1]) >= int(killed[2]) + 2
    assert f"\nstep {int(killed[2]) + 1}/12  loss" in terminal  # the resumed run begins after the checkpoint
    verdict = f"Killed at step {killed[1]} with 2 devices and resumed with 3 devices, the run has the 12 losses"
    assert f"[ok] {verdict}" in terminal
    assert verdict in page


def test_the_demo_agrees_with_plain_pytorch() -> None:
    terminal, page, _ = quick_demo()
    assert "[ok] The losses are those of plain PyTorch" in terminal
    assert "plain PyTorch" in re.findall(r"<text[^>]*>([^<]*)</text>", page)  # the curve


def test_the_demo_leaves_a_picture() -> None:
    _, _, picture = quick_demo()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")


# Its comparisons.


def write_run(folder: Path, losses: dict[int, float], weight: torch.Tensor) -> Path:
    """The files of a run that the demo compares."""
    folder.mkdir()
    rows = [{"type": "train", "step": step, "loss": loss} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = [{"step": 0, "time": 0, "devices": ["cpu:0"]}, {"step": 1, "time": 1, "devices": ["cpu:0", "cpu:1"]}]
    (folder / "run.json").write_text(json.dumps({"settings": {}, "starts": starts, "timelines": {}}))
    save_file({"weight": weight}, folder / "model.safetensors")
    return folder


def test_equal_runs_hold(tmp_path: Path) -> None:
    resumed = write_run(tmp_path / "resumed", LOSSES, torch.zeros(2))
    finding = compare_with_undisturbed(resumed, write_run(tmp_path / "other", LOSSES, torch.zeros(2)), {2: 3.25})
    assert finding.holds
    assert finding.section.verdict.startswith("Killed at step 2 with 1 device and resumed with 2 devices")


@pytest.mark.parametrize(
    ("losses", "weight", "lost", "named"),
    [
        (LOSSES | {3: 3.1250000000000004}, torch.zeros(2), {2: 3.25}, "losses of steps [3]"),
        ({1: 3.5, 2: 3.25}, torch.zeros(2), {2: 3.25}, "losses of steps [3]"),
        (LOSSES | {4: 3.0}, torch.zeros(2), {2: 3.25}, "losses of steps [4]"),
        (LOSSES, torch.tensor([0.0, -0.0]), {2: 3.25}, "weights ['weight']"),
        (LOSSES, torch.zeros(3), {2: 3.25}, "weights ['weight']"),
        (LOSSES, torch.zeros(2), {2: 3.26}, "lost steps [2]"),
    ],
)
def test_the_smallest_difference_is_found(
    tmp_path: Path, losses: dict[int, float], weight: torch.Tensor, lost: dict[int, float], named: str
) -> None:
    resumed = write_run(tmp_path / "resumed", losses, weight)
    finding = compare_with_undisturbed(resumed, write_run(tmp_path / "other", LOSSES, torch.zeros(2)), lost)
    assert not finding.holds
    assert named in finding.section.verdict


def test_a_broken_promise_is_in_the_report_and_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", LOSSES, torch.zeros(2))
    broken, held = Finding(False, Section("One", "It DIFFERS.")), Finding(True, Section("Two", "It is equal."))
    assert conclude([held, broken], run, tmp_path, 1.0) == 1
    terminal = capsys.readouterr().out
    assert "[BROKEN] It DIFFERS." in terminal
    assert "[ok] It is equal." in terminal
    assert "It DIFFERS." in (tmp_path / "report.html").read_text()
    assert conclude([held], run, tmp_path, 1.0) == 0


# Its data.


def test_no_held_out_question_is_trained(tmp_path: Path) -> None:
    training, held_out = training_and_held_out_pairs()
    write_chats(tmp_path / "chats.jsonl", training, 200)
    trained = {message["content"] for chat in read_chats(tmp_path / "chats.jsonl") for message in chat}
    assert trained.isdisjoint({question["content"] for question, _ in held_out})
    assert {answer["content"] for _, answer in held_out} <= trained


def test_the_plain_loop_trains_the_answers_alone() -> None:
    training, _ = training_and_held_out_pairs()
    tokenizer = new_tokenizer(training)
    tokens, labels = tokens_and_labels(tokenizer, training[0])
    assert (
        tokenizer.decode(tokens)
        == "<|user|>What does Marrow do on the ship?<|end|><|assistant|>Marrow is the captain.<|end|>"
    )
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == "Marrow is the captain.<|end|>"
