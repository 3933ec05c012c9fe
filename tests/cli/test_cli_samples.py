"""`roundpipe train --samples`: prompts as files, answers by method, the page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model

from roundpipe.__main__ import main
from roundpipe.cli.samples import read_prompts
from roundpipe.errors import ConfigError
from roundpipe.report import read_metrics, write_report

pytestmark = pytest.mark.filterwarnings("ignore")
REWARDS = "def brevity(completions, **columns):\n    return [-0.1 * len(text) for text in completions]\n"


def chat(n: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"add {n}"}, {"role": "assistant", "content": f"{2 * n}"}]
    return {"messages": turns}


def pair(n: int) -> dict[str, Any]:
    return {"prompt": f"add {n} ", "chosen": f"{2 * n}", "rejected": f"no {n}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    save_model(folder / "model")
    for name, row in (("chats", chat), ("pairs", pair), ("prompts", lambda n: {"prompt": f"add {n} "})):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(8)))
    (folder / "ask.txt").write_text("add 1\n\n add <2> \n")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def words(folder: Path, out: Path, data: str, *more: str) -> list[str]:
    needed = ["--model", str(folder / "model"), "--data", str(folder / data), "--out", str(out)]
    usual = ["--batch", "4", "--lr", "1e-2", "--seq-len", "64", "--steps", "4", "--no-view", "--devices", "cpu*2"]
    return ["train", *needed, *usual, *more]


def asking(folder: Path, *more: str) -> list[str]:
    return ["--samples", str(folder / "ask.txt"), "--sample-tokens", "4", *more]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl") if row["type"] == "train"]


def weights(out: Path) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(out.glob("*.safetensors"))]
    assert found
    return found


def samples(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


GRPO = ["--method", "grpo", "--num-generations", "2", "--max-completion-length", "4"]
JOBS = {
    "sft, packed": ("chats.jsonl", ["--lora", "4", "--lora-dropout", "0.1", "--frozen-weights", "nf4"]),
    "dpo": ("pairs.jsonl", ["--method", "dpo", "--stale"]),
    "grpo": ("prompts.jsonl", GRPO),
}


@pytest.mark.parametrize("job", [pytest.param(job, marks=pytest.mark.slow) if job == "dpo" else job for job in JOBS])
def test_answers_change_no_loss(job: str, folder: Path, tmp_path: Path) -> None:
    data, more = JOBS[job]
    more = [*more, "--eval-split", "2", "--eval-every", "2"]
    more += ["--reward", f"{folder}/rewards.py:brevity"] if job == "grpo" else []
    assert main(words(folder, tmp_path / "plain", data, *more)) == 0
    assert main(words(folder, tmp_path / "out", data, *more, *asking(folder))) == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "plain")
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")
    found = samples(tmp_path / "out")
    assert [(row["step"], row["number"]) for row in found] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert all(0 < row["tokens"] <= 4 or row["is_complete"] for row in found)
    # Data of messages make messages of lines.
    asked = [{"role": "user", "content": "add 1"}] if data == "chats.jsonl" else "add 1"
    assert found[0]["prompt"] == asked


def test_the_page_shows_the_answers_beside_each_other(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(words(folder, out, "chats.jsonl", "--save-every", "1", *asking(folder))) == 0
    found = samples(out)
    assert [row["step"] for row in found] == [1, 1, 2, 2, 3, 3, 4, 4]
    section = write_report(out).read_text().partition("<h2>Samples</h2>")[2].partition("</section>")[0]
    assert section.count('<h3 class="prompt">') == 2
    assert "add &lt;2&gt;" in section
    assert [section.count(f"<span>step {step}</span>") for step in (1, 2, 3, 4)] == [2, 2, 2, 2]
    kept = (out / "train.yaml").read_text()
    assert f"samples: {folder / 'ask.txt'}" in kept
    assert "sample-tokens: 4" in kept


def test_prompts_of_both_kinds_of_files(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps({"prompt": turns}) + "\n")
    assert read_prompts(tmp_path / "a.jsonl", are_chats=False) == ["one", turns]
    assert read_prompts(tmp_path / "a.jsonl", are_chats=True) == [[{"role": "user", "content": "one"}], turns]
    (tmp_path / "a.txt").write_text(" one \n\n\ntwo\n")
    assert read_prompts(tmp_path / "a.txt", are_chats=False) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.md", "one", "must be a .txt file with a prompt per line, or a .jsonl file"),
        ("a.txt", "\n \n", "has 0 prompts; give 1 to 64"),
        ("a.txt", "one\n" * 65, "has 65 prompts; give 1 to 64"),
        ("a.jsonl", '{"prompt": "one"}\n{"prompt"\n', "a.jsonl, line 2: the line is no JSON"),
        ("a.jsonl", '{"text": "one"}\n', 'a.jsonl, line 1: a line needs "prompt"'),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}\n', 'a.jsonl, line 1: a line needs "prompt"'),
        ("none.txt", None, "cannot read"),
    ],
)
def test_files_that_are_refused(name: str, content: str | None, part: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_prompts(tmp_path / name, are_chats=False)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--method", "reward", "--samples", "a.txt"], "--method reward trains one number per sequence"),
        (["--method", "classify", "--samples", "a.txt"], "--method classify trains a class per sequence"),
        (["--sample-tokens", "4"], "--sample-tokens needs --samples FILE"),
        (["--samples", "a.txt", "--sample-tokens", "0"], "--sample-tokens must be greater than 0"),
        (["--samples", "out/samples.jsonl"], "is the place of --samples"),
        (["--sample-prompts", "a.txt"], "give --samples prompts.txt"),
    ],
)
def test_mistakes(
    more: list[str], part: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words(folder, Path("out"), "chats.jsonl", *more)) == 2
    assert part in capsys.readouterr().err
