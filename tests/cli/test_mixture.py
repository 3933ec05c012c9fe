"""Sources mixed by weight, and rows split off for evaluation: which rows, and the losses of plain training on them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tiny_models import new_tokenizer, save_model
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from helpers_trainers import no_report  # noqa: F401
from roundpipe.__main__ import main
from roundpipe.checkpoint import latest
from roundpipe.cli.mixture import rows_by_weight, split_off
from roundpipe.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ([10, 10], [1, 1], [10, 10]),
        ([10, 10], [0.7, 0.3], [23, 10]),  # the second is the larger one for its weight
        ([100, 4], [0.5, 0.5], [100, 100]),
        ([7], [3.0], [7]),
        ([1, 3, 2], [2, 1, 1], [6, 3, 3]),
    ],
)
def test_sources_have_shares_by_weight_and_no_row_is_left_out(
    sizes: list[int], weights: list[float], counts: list[int]
) -> None:
    chosen = rows_by_weight(sizes, weights, seed=3)
    assert [len(rows) for rows in chosen] == counts
    for size, rows in zip(sizes, chosen, strict=True):
        times = Counter(rows)
        assert sorted(times) == list(range(size))
        assert max(times.values()) - min(times.values()) <= 1
    assert rows_by_weight(sizes, weights, seed=3) == chosen


def test_the_rows_that_come_once_more_depend_on_the_seed() -> None:
    drawn = {tuple(rows_by_weight([10, 10], [0.7, 0.3], seed)[0][20:]) for seed in range(5)}
    assert len(drawn) > 1


@pytest.mark.parametrize(("share", "count"), [(0.02, 2), (0.5, 50), (7, 7)])
def test_every_row_is_trained_or_evaluated(share: float, count: int) -> None:
    trained, evaluated = split_off([60, 0, 40], share, seed=1)
    assert sum(map(len, evaluated)) == count
    for size, some, others in zip([60, 0, 40], trained, evaluated, strict=True):
        assert sorted([*some, *others]) == list(range(size))
    assert split_off([60, 0, 40], share, seed=1) == (trained, evaluated)
    assert split_off([60, 0, 40], share, seed=2) != (trained, evaluated)


@pytest.mark.parametrize("share", [0.01, 0.99, 10, 11])
def test_a_split_without_rows_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"--eval-split .* leaves -?\d+ rows to train and \d+ to evaluate, of 10"):
        split_off([4, 6], share, seed=1)


def history(out: Path, key: str) -> list[float]:
    newest = latest(out)
    assert newest is not None
    entries = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in entries if key in entry]


@pytest.mark.filterwarnings("ignore")
def test_a_weighted_run_with_a_split_trains_as_in_trl_and_goes_on_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Losses and losses of evaluation are those of SFTTrainer with the chosen rows."""
    model = save_model(tmp_path / "model")
    rows: dict[str, list[dict[str, Any]]] = {
        "a.jsonl": [{"text": f"a{n} " * (n + 1)} for n in range(8)],
        "b.json": [{"prompt": f"b{n} ", "completion": "xy" * (n + 1)} for n in range(12)],
    }
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows["a.jsonl"]))
    (tmp_path / "b.json").write_text(json.dumps(rows["b.json"]))
    data = [f"{tmp_path}/a.jsonl=0.6", f"{tmp_path}/b.json=0.4"]
    out = tmp_path / "out"
    command = ["train", "--model", str(model), "--data", *data, "--out", str(out), "--eval-split", "0.2", "--devices"]
    usual = ["cpu*2", "--batch", "4", "--lr", "1e-2", "--seq-len", "64", "--eval-every", "2", "--no-view"]
    assert main([*command, *usual, "--steps", "4", "--save-every", "2"]) == 0
    said, bars = capsys.readouterr()
    assert "examples/s" not in bars, "a log file gets lines, no bars of datasets"

    trained, evaluated = split_off([8, 12], 0.2, seed=42)
    chosen = rows_by_weight([len(each) for each in trained], [0.6, 0.4], seed=42)
    share = len(chosen[0]) / sum(map(len, chosen))
    assert (
        f"a.jsonl: {share:.1%} of the data; each row {len(chosen[0]) / len(trained[0]):.3g} times in an epoch" in said
    )
    config = SFTConfig(
        output_dir=str(tmp_path / "plain"), use_cpu=True, bf16=False, report_to="none", max_steps=4, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=0.03, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        logging_steps=1, seed=42, max_length=64, save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    tokenizer = new_tokenizer()

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        """Tokenized by hand: TRL takes no rows of two forms."""
        before, text = (row["prompt"], row["completion"]) if "prompt" in row else ("", row["text"])
        ids = tokenizer(before + text + tokenizer.eos_token)["input_ids"]
        skipped = len(tokenizer(before)["input_ids"])
        return {"input_ids": ids, "labels": [-100] * skipped + ids[skipped:]}

    def dataset(picked: list[list[int]]) -> Dataset:
        return Dataset.from_list(
            [tokens(rows[name][row]) for name, numbers in zip(rows, picked, strict=True) for row in numbers]
        )

    of_chosen = [[some[row] for row in picked] for some, picked in zip(trained, chosen, strict=True)]
    plain = SFTTrainer(
        str(model),
        config,
        train_dataset=dataset(of_chosen),
        eval_dataset=dataset(evaluated),
        processing_class=tokenizer,
    )
    plain.train()
    for key in ("loss", "eval_loss"):
        expected = [entry[key] for entry in plain.state.log_history if key in entry]
        assert history(out, key) == pytest.approx(expected, rel=1e-5)

    whole = history(out, "loss")
    assert main(["train", "--config", str(out / "train.yaml"), "--resume", str(out / "checkpoint-2")]) == 0
    assert history(out, "loss") == whole
    assert "other" not in caplog.text
