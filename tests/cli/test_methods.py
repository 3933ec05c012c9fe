"""`roundpipe train --method`: each method trains as the plain trainer of TRL does on the same rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny_models import new_tokenizer, save_model
from transformers import AutoModelForSequenceClassification, set_seed

import roundpipe.cli.train as train_module
from helpers_trainers import no_report  # noqa: F401
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest
from roundpipe.cli.methods import METHODS, Head
from roundpipe.cli.rows import read_rows
from roundpipe.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_ROWS = 7


def pair(n: int) -> dict[str, Any]:
    return {"prompt": f"add {n} ", "chosen": f"{2 * n}" * (n % 3 + 1), "rejected": f"no {n}"}


def single(n: int) -> dict[str, Any]:
    return {"prompt": f"add {n} ", "completion": f"{2 * n}" * (n % 3 + 1), "label": n % 3 > 0}


ROWS = {"dpo": pair, "kto": single, "orpo": pair, "reward": pair}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("methods") / "model")


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(model: Path, data: Path, out: Path, method: str, *more: str) -> list[str]:
    needed = ["--model", str(model), "--data", str(data), "--out", str(out), "--method", method]
    usual = ["--batch", "4", "--lr", "1e-2", "--seq-len", "64", "--steps", "3", "--no-view"]
    return ["train", *needed, *usual, *([] if "--devices" in more else ["--devices", "cpu"]), *more]


def history(out: Path, key: str = "loss") -> list[float]:
    newest = latest(out)
    assert newest is not None
    entries = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in entries if key in entry]


def plain_history(method: str, model: Path, rows: list[Any], out: Path, *, lora: bool, **changes: Any) -> list[Any]:
    """What the plain trainer logs."""
    chosen = METHODS[method]
    config = chosen.config_class()(
        output_dir=str(out), use_cpu=True, bf16=False, report_to="none", max_steps=3, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=0.03, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        logging_steps=1, seed=42, max_length=64, save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
        **changes,
    )  # fmt: skip
    adapter = None
    if lora:
        task = "CAUSAL_LM" if chosen.head is Head.TOKENS else "SEQ_CLS"
        adapter = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules="all-linear", task_type=task)
    plain_class = next(each for each in chosen.trainer_class().__mro__ if each.__module__.startswith("trl."))
    dataset = Dataset.from_list(rows)
    if chosen.head is Head.TOKENS:
        given: Any = str(model)
    else:  # the trainer draws the adapter after the seed, and a model's new head before it
        set_seed(42)
        given = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    trainer = plain_class(
        given,
        args=config,
        train_dataset=dataset,
        eval_dataset=dataset if "eval_strategy" in changes else None,
        processing_class=new_tokenizer(),
        peft_config=adapter,
    )
    trainer.train()
    found: list[Any] = trainer.state.log_history
    return found


def values(log: list[Any], key: str = "loss") -> list[float]:
    return [entry[key] for entry in log if key in entry]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "lora", "devices"),
    [
        ("dpo", False, "cpu*3"),
        ("dpo", True, "cpu"),
        ("kto", True, "cpu*3"),
        ("orpo", False, "cpu*3"),
        ("reward", False, "cpu"),
        ("reward", True, "cpu*3"),
        *(
            pytest.param(method, lora, devices, marks=slow)
            for method, lora, devices in [
                ("dpo", False, "cpu"),
                ("dpo", True, "cpu*3"),
                ("kto", True, "cpu"),
                ("kto", False, "cpu"),
                ("kto", False, "cpu*3"),
                ("orpo", False, "cpu"),
                ("orpo", True, "cpu"),
                ("orpo", True, "cpu*3"),
                ("reward", False, "cpu*3"),
                ("reward", True, "cpu"),
            ]
        ),
    ],
)
def test_a_method_trains_as_in_trl(model: Path, tmp_path: Path, method: str, lora: bool, devices: str) -> None:
    rows = [ROWS[method](n) for n in range(NUM_ROWS)]
    data, out = jsonl(tmp_path / "d.jsonl", rows), tmp_path / "out"
    assert main(words(model, data, out, method, "--devices", devices, *(["--lora", "2"] if lora else []))) == 0
    log = plain_history(method, model, rows, tmp_path / "plain", lora=lora)
    assert history(out) == pytest.approx(values(log), rel=1e-5)
    if method != "orpo":  # whose trainer logs margins under another key
        assert history(out, "rewards/margins") == pytest.approx(values(log, "rewards/margins"), rel=1e-4, abs=1e-6)


def test_pairs_without_a_prompt_train_as_in_trl(model: Path, tmp_path: Path) -> None:
    """The prompt is what both answers begin with; also in messages."""
    for form in ("text", "messages"):
        rows: list[Any] = []
        for n in range(NUM_ROWS):
            prompt, chosen, rejected = pair(n).values()
            asked = {"role": "user", "content": prompt}
            whole = [[asked, {"role": "assistant", "content": each}] for each in (chosen, rejected)]
            both = [prompt + chosen, prompt + rejected] if form == "text" else whole
            rows.append(dict(zip(("chosen", "rejected"), both, strict=True)))
        data, out = jsonl(tmp_path / f"{form}.jsonl", rows), tmp_path / form
        assert main(words(model, data, out, "dpo")) == 0
        log = plain_history("dpo", model, rows, tmp_path / "plain", lora=False)
        assert history(out) == pytest.approx(values(log), rel=1e-5)


@pytest.mark.parametrize("method", ["dpo", *(pytest.param(each, marks=slow) for each in ("kto", "orpo", "reward"))])
def test_a_resumed_run_of_a_method_goes_on_exactly(model: Path, tmp_path: Path, method: str) -> None:
    """With its reference, which has the weights of the start."""
    data, out = jsonl(tmp_path / "d.jsonl", [ROWS[method](n) for n in range(NUM_ROWS)]), tmp_path / "out"
    assert main(words(model, data, out, method, "--save-every", "1", "--keep", "5")) == 0
    whole = history(out)
    assert main(["train", "--config", str(out / "train.yaml"), "--resume", str(out / "checkpoint-1")]) == 0
    assert history(out) == whole


def test_options_and_evaluation_of_a_method(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields of the method's config class are options, also in a config file that names the method."""
    rows = [pair(n) for n in range(NUM_ROWS)]
    data, out = jsonl(tmp_path / "d.jsonl", rows), tmp_path / "out"
    (tmp_path / "c.yaml").write_text("method: dpo\nbeta: 0.5\nloss-type: [ipo]\n")
    command = words(model, data, out, "dpo", "--config", str(tmp_path / "c.yaml"), "--eval-data", str(data))
    command.remove("--method")
    command.remove("dpo")
    assert main([*command, "--eval-every", "3", "--num-microbatch", "1"]) == 0
    log = plain_history(
        "dpo",
        model,
        rows,
        tmp_path / "plain",
        lora=False,
        beta=0.5,
        loss_type=["ipo"],
        eval_strategy="steps",
        eval_steps=3,
    )
    for key in ("loss", "eval_loss", "eval_rewards/margins"):
        assert history(out, key) == pytest.approx(values(log, key), rel=1e-4)
    capsys.readouterr()
    assert main(words(model, data, tmp_path / "other", "reward", "--beta", "0.5")) == 2
    assert "there is no option --beta: it belongs to --method dpo, kto or orpo" in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_of_a_method_counts_its_tokens_and_its_reference(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"prompt": "x" * 80, "chosen": "a", "rejected": "b"}
    data = jsonl(tmp_path / "d.jsonl", [pair(1), pair(2), long])
    assert main(words(model, data, tmp_path / "out", "dpo", "--dry-run")) == 2
    message = capsys.readouterr().err
    assert "d.jsonl, line 3: the row has 82 tokens with its prompt, more than --seq-len 64; 1 of 3 rows" in message

    assert main(words(model, data, tmp_path / "out", "dpo", "--dry-run", "--truncate")) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    answers = [
        len(f"add {n} ") + len(answer) + 1 for n in (1, 2) for answer in (pair(n)["chosen"], pair(n)["rejected"])
    ]
    for line in ("method direct preference optimization", "rows 2", "dropped 1", f"tokens {sum(answers)}"):
        assert line in lines
    assert any(line.startswith("weights of the reference model") for line in lines)

    assert main(words(model, data, tmp_path / "out", "dpo", "--dry-run", "--truncate", "--lora", "2")) == 0
    assert "reference model" not in capsys.readouterr().out
    assert main(words(model, data, tmp_path / "out", "kto", "--dry-run", "--truncate")) == 0
    assert "rows 4" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(train_module, "_load_model", load)


# Rows.


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = say("user", "q"), say("assistant", "good"), say("assistant", "bad")
PREFERENCE = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}


@pytest.mark.parametrize(
    ("row", "converted"),
    [
        (PREFERENCE, PREFERENCE),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}),
        ({"chosen": "q good", "rejected": "q bad"}, {"chosen": "q good", "rejected": "q bad"}),
        ({"prompt": "q", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score": 1}, PREFERENCE),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, PREFERENCE),
        ({"prompt": [ASKED], "chosen": "good", "rejected": "bad"}, PREFERENCE),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            PREFERENCE,
        ),
        (
            {"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"},
            {"prompt": "a\n\nb", "chosen": "c", "rejected": "d"},
        ),
    ],
)
def test_preference_pairs_of_many_forms(tmp_path: Path, row: Any, converted: Any) -> None:
    path = jsonl(tmp_path / "d.jsonl", [row])
    assert read_rows(path, "--data", "line", method=METHODS["dpo"]).dataset[0] == converted


@pytest.mark.parametrize("label", [True, 1, "true", "1"])
def test_single_preferences(tmp_path: Path, label: Any) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b", "label": label}])
    rows = read_rows(path, "--data", "line", method=METHODS["kto"])
    assert rows.dataset[0] == {"prompt": "a", "completion": "b", "label": True}


@pytest.mark.parametrize(
    ("method", "row", "reason"),
    [
        ("dpo", {"text": "a"}, "a row needs `chosen` and `rejected`; it has 'text'"),
        ("kto", {"prompt": "a", "completion": "b"}, "`completion` and `label`, or `chosen` and `rejected`; it has"),
        ("kto", {"prompt": "a", "completion": "b", "label": "maybe"}, "`label` must be true or false, got 'maybe'"),
        (
            "dpo",
            {"prompt": "q", "chosen": [say("user", "x"), GOOD], "rejected": [say("user", "x"), BAD]},
            "`prompt` is",
        ),
        ("dpo", {"prompt": "q", "chosen": "a", "rejected": " "}, "`rejected` is empty"),
        ("dpo", {"prompt": "q", "chosen": "a", "rejected": 5}, "`rejected` must be a string, got int"),
        ("dpo", {"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "`rejected` has no message with the role assistant"),
        ("reward", {"chosen": "a", "rejected": "b", "margin": "x"}, "`margin` must be a number, got str"),
    ],
)
def test_a_row_that_a_method_cannot_train_is_named(tmp_path: Path, method: str, row: Any, reason: str) -> None:
    path = jsonl(tmp_path / "d.jsonl", [row])
    with pytest.raises(ConfigError) as caught:
        read_rows(path, "--data", "line", method=METHODS[method])
    assert str(caught.value).startswith(f"{path}, line 1: ")
    assert reason in str(caught.value)


def test_a_form_of_another_method_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [pair(1), {"chosen": "a", "rejected": "b"}])
    with pytest.raises(ConfigError, match=r"--format text cannot be trained by --method dpo; it takes `chosen` and"):
        read_rows(path, "--data", "line", method=METHODS["dpo"], form="text")
    with pytest.raises(ConfigError, match="line 2: some rows have `prompt`, others have none"):
        read_rows(path, "--data", "line", method=METHODS["dpo"])
