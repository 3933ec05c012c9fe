"""`roundpipe train --method grpo`: steps of TRL's trainer on the same prompts, resumed exactly; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny_models import new_tokenizer, save_model
from trl import GRPOConfig, GRPOTrainer

import roundpipe.cli.train as train_module
from helpers_trainers import no_report  # noqa: F401
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest
from roundpipe.cli.rewards import load_rewards

pytestmark = pytest.mark.filterwarnings("ignore")
REWARDS = """
def matches(completions, answer, **columns):
    return [len(set(text)) + text.count(expected[0]) for text, expected in zip(completions, answer)]

def brevity(completions, **columns):
    return [-0.1 * len(text) for text in completions]
"""
USUAL = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "reward_weights": [1.0, 0.5]}


def row(n: int) -> dict[str, Any]:
    return {"prompt": f"add {n} ", "answer": f"{2 * n}"}


ROWS = [row(n) for n in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("grpo")
    save_model(made / "model")
    (made / "rewards.py").write_text(REWARDS)
    (made / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    return made


def words(folder: Path, out: Path, *more: str) -> list[str]:
    needed = ["--model", str(folder / "model"), "--data", str(folder / "prompts.jsonl"), "--out", str(out)]
    rewards = ["--method", "grpo", "--reward", f"{folder}/rewards.py:matches", f"{folder}/rewards.py:brevity"]
    usual = ["--batch", "4", "--lr", "1e-2", "--seq-len", "32", "--no-view", "--devices", "cpu*2"]
    options = [
        "--num-generations",
        "2",
        "--max-completion-length",
        "6",
        "--beta",
        "0.1",
        "--reward-weights",
        "1",
        "0.5",
    ]
    return ["train", *needed, *rewards, *usual, *options, *more]


def log_of(out: Path) -> list[dict[str, Any]]:
    newest = latest(out)
    assert newest is not None
    history: list[dict[str, Any]] = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
def test_first_step_is_that_of_trl(is_lora: bool, folder: Path, tmp_path: Path) -> None:
    """Later completions differ, because RoundPipe draws one number per call with gradients."""
    out = tmp_path / "out"
    assert main(words(folder, out, "--steps", "1", *(["--lora", "2"] if is_lora else []))) == 0
    config = GRPOConfig(
        output_dir=str(tmp_path / "plain"), use_cpu=True, bf16=False, report_to="none", max_steps=1,
        learning_rate=1e-2, per_device_train_batch_size=4, logging_steps=1, seed=42, save_strategy="no",
        gradient_checkpointing=False, disable_tqdm=True, **USUAL,
    )  # fmt: skip
    adapter = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        str(folder / "model"),
        reward_funcs=load_rewards([f"{folder}/rewards.py:matches", f"{folder}/rewards.py:brevity"]),
        args=config,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=new_tokenizer(),
        peft_config=adapter if is_lora else None,
    )
    trainer.train()
    (plain,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    (found,) = log_of(out)
    assert plain["grad_norm"] > 0
    for key in ("loss", "grad_norm", "reward", "rewards/matches/mean", "rewards/brevity/mean", "kl", "entropy"):
        assert found[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-5), key


def test_resumed_run_goes_on_exactly(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder: paths of rewards are kept whole. An epoch has as many steps as prompts fill."""
    out = tmp_path / "out"
    monkeypatch.chdir(folder)
    assert main([*words(Path(), out, "--save-every", "2", "--lora", "2")]) == 0
    whole = [(entry["loss"], entry["reward"]) for entry in log_of(out)]
    assert len(whole) == len(ROWS) * 2 // 4
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(out / "train.yaml"), "--resume", str(out / "checkpoint-2")]) == 0
    assert [(entry["loss"], entry["reward"]) for entry in log_of(out)] == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--reward": None}, "--method grpo needs functions that reward answers; give --reward FILE.py:FUNCTION."),
        ({"--reward": ["rewards.py:nothing"]}, "has no function nothing; its functions are brevity, matches"),
        ({"--method": ["sft"]}, "--reward has no meaning for --method sft; give --method grpo."),
        (
            {"--batch": ["3"]},
            "generation_batch_size (3) must be divisible by num_generations (2). Give a --batch that is a",
        ),
        (
            {"--data": ["bare.jsonl"]},
            "rewards.py:matches needs answer, and rows have no such key; their keys are prompt",
        ),
        ({"--seq-len": ["8"]}, "prompts.jsonl, line 1: the row has 12 tokens with its prompt, more than --seq-len 8"),
        ({"--init": []}, "--beta needs trained weights, which the reference has; --init makes random ones."),
        ({"--data": ["other.jsonl"]}, "line 2: it has the keys prompt, the first row has prompt, answer; rewards get"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    change: dict[str, Any],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train_module, "_load_model", load)
    monkeypatch.chdir(folder)
    Path("bare.jsonl").write_text('{"prompt": "a"}\n')
    Path("other.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    given = words(Path(), tmp_path / "out")
    for name, values in change.items():
        if name in given:
            start = given.index(name)
            stop = next((n for n in range(start + 1, len(given)) if given[n].startswith("--")), len(given))
            del given[start:stop]
        given += [] if values is None else [name, *values]
    if change.get("--method") == ["sft"]:
        for name in ("--num-generations", "--max-completion-length", "--beta", "--reward-weights"):
            start = given.index(name)
            del given[start : start + (3 if name == "--reward-weights" else 2)]
    assert main(given) == 2
    assert message in capsys.readouterr().err


def test_dry_run_counts_prompts_with_their_answers_and_the_reference(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(folder, tmp_path / "out", "--dry-run", "--truncate")) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("method group relative policy optimization", "rows 8", "longest 12", "steps 4"):
        assert line in lines
    assert any(line.startswith("weights of the reference model") for line in lines)


def test_prompts_may_be_messages(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": each["prompt"]}], "answer": each["answer"]}) + "\n"
            for each in ROWS
        )
    )
    (tmp_path / "chat_rewards.py").write_text(
        "def length(completions, **columns):\n    return [float(len(each[0]['content'])) for each in completions]\n"
    )
    command = words(folder, tmp_path / "out", "--steps", "1", "--seq-len", "64")
    start = command.index("--reward")
    command[start : start + 3] = ["--reward", f"{tmp_path}/chat_rewards.py:length"]
    weights = command.index("--reward-weights")
    del command[weights : weights + 3]
    command[command.index("--data") + 1] = str(data)
    assert main(command) == 0
    assert "rewards/length/mean" in log_of(tmp_path / "out")[0]


def test_prompts_are_shown_as_the_model_sees_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(folder / "model"), "--method", "grpo", "--max-completion-length", "6", "--rows", "1"]
    assert main(["data", str(folder / "prompts.jsonl"), *options, "--reward", f"{folder}/rewards.py:matches"]) == 0
    printed = capsys.readouterr().out
    assert "prompts.jsonl, line 1, prompt: 6 tokens, 0 with a loss\nadd 0 \n" in printed
