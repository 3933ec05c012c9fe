"""`roundpipe train --method classify` trains as transformers' Trainer does; classes come from the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from peft import LoraConfig, get_peft_model
from tiny_models import new_tokenizer, save_model
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, set_seed

from helpers_trainers import no_report  # noqa: F401
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest
from roundpipe.cli.classes import accuracy, classes_of, tokenized_classes
from roundpipe.cli.methods import METHODS
from roundpipe.cli.rows import Rows, read_rows
from roundpipe.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("sad", "glad", "bad")  # sorted: bad, glad, sad


def texts(num_rows: int) -> list[dict[str, str]]:
    return [{"text": f"I am {n} " * (n % 4 + 1), "label": NAMES[n % 3]} for n in range(num_rows)]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        features = Features({"text": Value("string"), "label": ClassLabel(names=list(NAMES))})
        Dataset.from_list(rows, features=features).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("classify") / "model")


def words(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    needed = ["--model", str(model), "--data", str(data), "--out", str(out), "--method", "classify", "--no-view"]
    return ["train", *needed, "--batch", "4", "--lr", "1e-2", "--seq-len", "64", "--steps", "3", *more]


def history(out: Path, key: str) -> list[float]:
    newest = latest(out)
    assert newest is not None
    entries = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in entries if key in entry]


@pytest.mark.parametrize(
    ("lora", "devices", "ending"),
    [
        (False, "cpu*3", "jsonl"),
        (True, "cpu", "parquet"),
        pytest.param(False, "cpu", "jsonl", marks=pytest.mark.slow),
        pytest.param(True, "cpu*3", "jsonl", marks=pytest.mark.slow),
    ],
)
def test_a_classifier_trains_as_in_transformers(
    model: Path, tmp_path: Path, lora: bool, devices: str, ending: str
) -> None:
    """Losses of training and evaluation, accuracy, the names of the classes in the saved model."""
    names = NAMES if ending == "parquet" else sorted(NAMES)  # a dataset may have an order of its own
    rows = texts(7)
    data, out = write(tmp_path / f"d.{ending}", rows), tmp_path / "out"
    more = ["--eval-data", str(data), "--eval-every", "3", "--devices", devices]
    assert main(words(model, data, out, *more, *(["--lora", "2"] if lora else []))) == 0

    set_seed(42)
    tokenizer = new_tokenizer()
    plain = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3, pad_token_id=0)
    if lora:
        adapter = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules="all-linear", task_type="SEQ_CLS")
        plain = get_peft_model(plain, adapter)
    dataset = Dataset.from_list([{**tokenizer(row["text"]), "label": list(names).index(row["label"])} for row in rows])
    config = TrainingArguments(
        output_dir=str(tmp_path / "plain"), use_cpu=True, report_to="none", max_steps=3, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=0.03, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        logging_steps=1, seed=42, save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer = Trainer(
        plain, config, train_dataset=dataset, eval_dataset=dataset, processing_class=tokenizer, compute_metrics=accuracy
    )
    trainer.train()
    for key in ("loss", "eval_loss", "eval_accuracy"):
        expected = [entry[key] for entry in trainer.state.log_history if key in entry]
        assert history(out, key) == pytest.approx(expected, rel=1e-5)
    if not lora:
        saved = AutoModelForSequenceClassification.from_pretrained(out)
        assert saved.config.id2label == dict(enumerate(names))
        assert saved.config.pad_token_id == 0


def read(path: Path) -> Rows:
    return read_rows(path, "--data", "line", method=METHODS["classify"])


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([10, 9, -1], ["-1", "9", "10"]),
        (["10", "9"], ["9", "10"]),
        ([True, False], ["False", "True"]),
    ],
)
def test_classes_are_sorted_names(tmp_path: Path, labels: list[Any], classes: list[str]) -> None:
    rows = read(write(tmp_path / "d.jsonl", [{"text": "a", "label": label} for label in labels]))
    assert classes_of([rows]) == classes
    tokens = tokenized_classes(rows, new_tokenizer(), classes, 9, truncates=False)
    assert [classes[number] for number in tokens.dataset["label"]] == [str(label) for label in labels]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a", "label": 0.5}, "line 2: `label` must be a name, a whole number, or true or false, got 0.5"),
        ({"text": "a", "label": 1}, "line 2: `label` is int here and str in the first row"),
        ({"text": " ", "label": "b"}, "line 2: `text` is empty"),
        ({"text": "a"}, "line 2: a row needs `text` and `label`; it has 'text'"),
    ],
)
def test_a_row_that_has_no_class_is_named(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write(tmp_path / "d.jsonl", [{"text": "a", "label": "a"}, row]))
    assert reason in str(caught.value)


def test_mistakes_of_classes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one.jsonl", [{"text": "a", "label": "a"}] * 3)
    assert main(words(model, one, tmp_path / "out")) == 2
    assert "have 1 different values of `label`" in capsys.readouterr().err
    data = write(tmp_path / "d.jsonl", texts(6))
    other = write(tmp_path / "e.jsonl", [{"text": "a", "label": "mad"}])
    assert main(words(model, data, tmp_path / "out", "--eval-data", str(other))) == 2
    assert "e.jsonl, line 1: no row that is trained has the label 'mad'" in capsys.readouterr().err
    long = write(tmp_path / "long.jsonl", [*texts(3), {"text": "a" * 70, "label": "bad"}])
    assert main(words(model, long, tmp_path / "out", "--dry-run")) == 2
    assert "long.jsonl, line 4: the row has 70 tokens, more than --seq-len 64; 1 of 4 rows" in capsys.readouterr().err
    assert main(words(model, long, tmp_path / "out", "--dry-run", "--truncate")) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("3 classes: bad, glad, sad", "truncated 1", "longest 64", "rows 4"):
        assert line in lines


def test_a_classifier_keeps_the_order_of_its_classes(model: Path, tmp_path: Path) -> None:
    """It is trained further; a run that is resumed goes on exactly."""
    first = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=3, id2label=dict(enumerate(NAMES)), label2id={name: n for n, name in enumerate(NAMES)}
    )
    first.save_pretrained(tmp_path / "classifier")
    new_tokenizer().save_pretrained(tmp_path / "classifier")
    data, out = write(tmp_path / "d.jsonl", texts(7)), tmp_path / "out"
    command = words(tmp_path / "classifier", data, out, "--devices", "cpu", "--save-every", "1", "--keep", "5")
    assert main(command) == 0
    assert AutoModelForSequenceClassification.from_pretrained(out).config.id2label == dict(enumerate(NAMES))
    whole = history(out, "loss")
    assert main(["train", "--config", str(out / "train.yaml"), "--resume", str(out / "checkpoint-1")]) == 0
    assert history(out, "loss") == whole
