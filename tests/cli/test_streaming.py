"""roundpipe train --streaming: rows as they are needed, in which order, and resumed runs to the bit."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import IterableDataset
from test_data_formats import TEMPLATE, as_openai, openai, pair, text, tokens, write
from test_mixture import history
from tiny_models import new_tokenizer, save_model
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from helpers_trainers import no_report  # noqa: F401
from roundpipe.__main__ import main
from roundpipe.cli.arguments import parse
from roundpipe.cli.stream import Stream, StreamRow
from roundpipe.cli.stream_sources import stream_sources
from roundpipe.errors import ConfigError

NUM_ROWS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming") / "model"
    return save_model(folder, chat_template=TEMPLATE, max_position_embeddings=512)


def names(found: Sequence[StreamRow]) -> list[dict[str, Any]]:
    """A sequence for each row that says which one it is."""
    return [{"place": row.place, "row": row.row} for row in found]


def stream_of(*paths: Path, weights: Sequence[float] | None = None, buffer: int = 7, seed: int = 3) -> Stream:
    entries = [stream_sources(path, "--data", "line") for path in paths]
    return Stream(entries, names, weights=weights, buffer=buffer, seed=seed)


def places(stream: Stream, number: int) -> list[str]:
    return [row["place"].rpartition("/")[2] for row in islice(stream, number)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows with lines of several kinds of ends, cells over several lines, and a mark of the byte order."""
    for name in ("a.jsonl", "b.parquet", "c.csv", "d.arrow"):
        write(tmp_path / name, [pair(n) for n in range(NUM_ROWS)])
    (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "c.csv").read_bytes())
    lines = (tmp_path / "a.jsonl").read_text().replace("\n", "\r\n\n")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (tmp_path / "e.txt").write_text("".join(f"line {n}\n" for n in range(NUM_ROWS)))
    write(tmp_path / "kept", [pair(n) for n in range(NUM_ROWS)])
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "g.csv.zst").write_bytes(pyarrow.compress((tmp_path / "c.csv").read_bytes(), "zstd", asbytes=True))
    return tmp_path


def hub(name: str, config: Any, split: str, streaming: bool) -> IterableDataset:
    rows = [pair(n) for n in range(NUM_ROWS)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "b.parquet", "c.csv", "d.arrow", "e.txt", "f.jsonl.gz", "g.csv.zst", "kept", "me/set"]
)
@pytest.mark.parametrize("buffer", [0, 7])
def test_a_stream_goes_on_from_any_row_of_any_pass(
    name: str, buffer: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", hub)
    path = Path(name) if "/" in name else folder / name
    whole = list(islice(stream_of(path, buffer=buffer), 3 * NUM_ROWS))
    for begin in range(0, 3 * NUM_ROWS, NUM_ROWS):
        rows = {row["place"]: row["row"] for row in whole[begin : begin + NUM_ROWS]}
        assert len(rows) == NUM_ROWS, "each row comes once in a pass"
        if name != "e.txt":
            assert sorted(row["prompt"] for row in rows.values()) == sorted(pair(n)["prompt"] for n in range(NUM_ROWS))
    for stop in range(2 * NUM_ROWS):
        first = stream_of(path, buffer=buffer)
        rows = iter(first)
        read = list(islice(rows, stop + 3))  # a loader reads ahead
        position = json.loads(json.dumps(first.position_at(stop)))
        resumed = stream_of(path, buffer=buffer)
        resumed.go_to(position)
        assert [*read[:stop], *islice(resumed, 3 * NUM_ROWS - stop)] == whole
        assert resumed.position_at(stop) == position


def test_files_of_a_folder_and_rows_of_a_buffer_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / f"{number}.jsonl", [text(n) for n in range(NUM_ROWS)])
    in_order = [f"{number}.jsonl, line {line}" for number in range(4) for line in range(1, NUM_ROWS + 1)]
    assert places(stream_of(tmp_path, buffer=0), 160) == in_order * 2
    found = places(stream_of(tmp_path), 160)
    assert sorted(found[:80]) == sorted(found[80:]) == sorted(in_order)
    orders = {tuple(dict.fromkeys(place.partition(",")[0] for place in part)) for part in (found[:80], found[80:])}
    assert len(orders) == 2, "each pass has another order of files"
    assert found[:7] != sorted(found[:7])
    assert places(stream_of(tmp_path), 160) == found
    assert places(stream_of(tmp_path, seed=4), 160) != found


def test_sources_take_turns_or_come_by_weight(tmp_path: Path) -> None:
    short, long = write(tmp_path / "a.jsonl", [text(1)] * 5), write(tmp_path / "b.jsonl", [text(2)] * 30)
    found = places(stream_of(short, long, buffer=0), 70)
    assert found[:4] == ["a.jsonl, line 1", "b.jsonl, line 1", "a.jsonl, line 2", "b.jsonl, line 2"]
    assert found[10] == "b.jsonl, line 6"
    assert Counter(found[:35]) == Counter(found[35:])
    assert set(Counter(found[:35]).values()) == {1}

    counts = Counter(place[0] for place in places(stream_of(short, long, weights=[3, 1]), 4000))
    assert 2850 < counts["a"] < 3150
    first = stream_of(short, long, weights=[3, 1])
    whole = places(first, 100)
    resumed = stream_of(short, long, weights=[3, 1])
    resumed.go_to(first.position_at(33))
    assert places(resumed, 67) == whole[33:]


def test_rows_are_not_all_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with file.open("w") as stream:
        for number in range(4000):
            stream.write(json.dumps({"text": f"{number:5000}"}) + "\n")
    tracemalloc.start()
    try:
        for _ in islice(stream_of(file, buffer=100), 4000):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < file.stat().st_size / 5


def long_text(n: int) -> dict[str, Any]:
    return text(n + 20)


def command(model: Path, out: Path, *more: str) -> list[str]:
    usual = ["--model", str(model), "--out", str(out), "--devices", "cpu*2", "--batch", "4", "--lr", "1e-2"]
    return ["train", *usual, "--seq-len", "96", "--streaming", "--no-view", *more]


@pytest.mark.parametrize(
    ("name", "given", "wanted", "more"),
    [
        ("a.jsonl", openai, as_openai, []),
        ("a.parquet", pair, pair, ["--truncate"]),
        ("a.csv", tokens, tokens, []),
        ("a.arrow", long_text, long_text, ["--packing"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_streamed_run_trains_as_in_trl(
    model: Path, tmp_path: Path, name: str, given: Any, wanted: Any, more: list[str]
) -> None:
    """Losses are those of SFTTrainer over an iterable dataset of the rows in TRL's columns."""
    path, out = write(tmp_path / name, [given(n) for n in range(NUM_ROWS)]), tmp_path / "out"
    assert main(command(model, out, "--data", str(path), "--steps", "4", "--shuffle-buffer", "0", *more)) == 0
    rows = [wanted(n) for n in range(NUM_ROWS)]
    config = SFTConfig(
        output_dir=str(tmp_path / "plain"), use_cpu=True, bf16=False, report_to="none", max_steps=4, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=0.03, per_device_train_batch_size=4, logging_steps=1, seed=42,
        max_length=96, save_strategy="no", gradient_checkpointing=False, assistant_only_loss="messages" in rows[0],
        disable_tqdm=True, packing="--packing" in more, packing_strategy="wrapped",
    )  # fmt: skip

    def numbered() -> Iterator[Any]:
        yield from rows

    dataset = IterableDataset.from_generator(numbered)
    plain = SFTTrainer(str(model), config, train_dataset=dataset, processing_class=new_tokenizer(TEMPLATE))
    plain.train()
    expected = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert len(expected) == 4
    assert history(out, "loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "more",
    [pytest.param([], marks=pytest.mark.slow), ["--packing", "--gradient-accumulation-steps", "2"]],
    ids=["rows", "packed"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_trains_the_rows_that_come_next(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, more: list[str]
) -> None:
    """Sources of two forms by weight, in blocks of which one is begun when the checkpoint is written."""
    one = write(tmp_path / "a.jsonl", [text(n) for n in range(NUM_ROWS)])
    other = write(tmp_path / "b.parquet", [as_openai(n) for n in range(NUM_ROWS)])
    evaluated, out = write(tmp_path / "e.json", [text(n) for n in range(3)]), tmp_path / "out"
    data = ["--data", f"{one}=0.6", f"{other}=0.4", "--eval-data", str(evaluated), "--eval-every", "3"]
    options = ["--shuffle-buffer", "13", "--truncate", "--steps", "7", "--save-every", "4", "--lora", "2"]
    options = [each for each in options if each != "--truncate" or not more]
    run = command(model, out, *data, *options, "--lora-dropout", "0.2", *more)
    assert main(run) == 0
    assert f"--data {one}: rows of text, read as they are needed" in capsys.readouterr().out
    whole = {key: history(out, key) for key in ("loss", "eval_loss", "grad_norm", "epoch")}
    assert len(whole["loss"]) == len(set(whole["loss"])) == 7
    again = ["train", "--config", str(out / "train.yaml"), "--resume", str(out / "checkpoint-4"), "--devices", "cpu"]
    assert main(again) == 0
    assert {key: history(out, key) for key in whole} == whole
    assert "other" not in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_a_bad_row_ends_the_run_with_its_line_and_a_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [pair(n % 7) | {"id": n} for n in range(NUM_ROWS)]
    file, out = write(tmp_path / "a.jsonl", rows), tmp_path / "out"
    run = ["--data", str(file), "--steps", "5", "--shuffle-buffer", "4"]
    assert main(command(model, tmp_path / "whole", *run)) == 0
    good = file.read_text()
    file.write_text(good.replace(json.dumps(rows[13]), '{"txt": 1}'))
    bad_line = next(n for n, line in enumerate(file.read_text().splitlines(), 1) if "txt" in line)
    capsys.readouterr()
    assert main(command(model, out, *run)) == 2
    message = capsys.readouterr().err
    assert f"{file}, line {bad_line}: a row needs " in message
    assert "the newest checkpoint is" in message
    steps = len(history(out, "loss"))
    assert 0 < steps < 5
    file.write_text(good)
    assert main(["train", "--config", str(out / "train.yaml"), "--resume"]) == 0
    assert history(out, "loss") == history(tmp_path / "whole", "loss")


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    array = write(tmp_path / "a.json", [text(1)])
    usual = ["--model", "m", "--out", "o", "--data", str(array), "--streaming", "--steps", "3"]
    for more, reason in (
        (["--method", "dpo"], "only --method sft reads rows so"),
        (["--eval-split", "0.1"], "give --eval-data FILE_OR_DIR"),
        (["--dataloader-num-workers", "1"], "one process reads the rows"),
    ):
        with pytest.raises(ConfigError, match=reason):
            parse([*usual, *more])
    with pytest.raises(ConfigError, match="--streaming needs --steps N"):
        parse(usual[:-2])
    with pytest.raises(ConfigError, match="--shuffle-buffer needs --streaming"):
        parse([*usual[:6], "--shuffle-buffer", "5"])
    with pytest.raises(ConfigError, match="has one JSON array, which cannot be streamed"):
        stream_sources(array, "--data", "line")
    lines = tmp_path / "b.txt"
    lines.write_text("a\n\nb\n")
    with pytest.raises(ConfigError, match="rows must be lines"):
        stream_sources(lines, "--data", "paragraph")
