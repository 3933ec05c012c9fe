"""metrics.jsonl and run.json: exact values, whole lines, and what a resumed run keeps."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from roundpipe.report import MetricsWriter, RunRecord, read_metrics
from roundpipe.timeline import Span, Timeline


def rows(*steps: int) -> list[dict[str, object]]:
    return [{"type": "train", "step": step, "loss": 1 / (3 + step)} for step in steps]


def written(path: Path, *steps: int, resumed_step: int = 0) -> None:
    writer = MetricsWriter(path, resumed_step=resumed_step)
    for row in rows(*steps):
        writer.write(row)
    writer.close()


def test_rows_read_back_exactly(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 0.1 + 0.2, "grad_norm": 1e-310, "lr": None, "device_share": {"cpu:0": 2 / 3}}
    writer = MetricsWriter(tmp_path / "new" / "metrics.jsonl")
    writer.write(row)
    writer.write({"step": 2, "loss": math.nan, "grad_norm": math.inf})
    found = read_metrics(tmp_path / "new" / "metrics.jsonl")  # rows are in the file before it is closed
    writer.close()
    assert found[0] == row
    assert math.isnan(found[1]["loss"])
    assert found[1]["grad_norm"] == math.inf


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2, 3, 4, 5)
    written(path, 4, 5, 6, resumed_step=3)
    assert read_metrics(path) == rows(1, 2, 3, 4, 5, 6)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2)
    written(path, 1)
    assert read_metrics(path) == rows(1)


@pytest.mark.parametrize("torn", ['{"type": "train", "st', '{"type": "train", "step": 4, "loss": 0.5}', "{"])
def test_a_torn_last_line_is_ignored_and_dropped_on_resume(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2, 3)
    with path.open("a") as file:
        file.write(torn)
    assert read_metrics(path) == rows(1, 2, 3)
    written(path, 4, resumed_step=3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows(1, 2, 3, 4)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2"):
        read_metrics(path)


@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_goes_on_with_damaged_files(tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """Whatever the damage: the rows that can be read stay, and the damaged file is kept beside the new one."""
    rng = random.Random(seed)
    starts = [{"step": 0, "time": 1.5, "devices": ["cpu:0"]}]
    for number in range(30):
        folder = tmp_path / str(number)
        written(folder / "metrics.jsonl", 1, 2, 3)
        RunRecord({"model": {"class": "Tiny"}}, list(starts), {2: timeline(0.1)}).write(folder)
        caplog.clear()
        for name in ("metrics.jsonl", "run.json"):
            content = bytearray((folder / name).read_bytes())
            for _ in range(rng.randrange(1, 5)):
                content[rng.randrange(len(content))] = rng.choice(b'{}[]",:9n\xff\x00\n')
            (folder / name).write_bytes(content)
            aside = folder / f"{name}.damaged"
            if name == "run.json":
                record = RunRecord.resumed(folder, 3)
                record.starts.append({"step": 3, "time": 2.5, "devices": []})
                record.write(folder)
                assert RunRecord.read(folder).starts[-1]["step"] == 3
            else:
                written(folder / name, 4, resumed_step=3)
                assert read_metrics(folder / name)[-1] == rows(4)[0]
            assert aside.exists() is (name in caplog.text)
            if aside.exists():
                assert aside.read_bytes() == content


def test_each_row_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []

    class Noting(io.FileIO):
        def write(self, data: Any) -> int:
            pieces.append(data)
            return super().write(data)

    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(writer, "_file", Noting(tmp_path / "metrics.jsonl", "ab"))
    writer.write({"step": 1, "text": "ä" * 100_000})
    assert len(pieces) == 1
    assert pieces[0].endswith(b"\n")
    assert pieces[0].count(b"\n") == 1


def timeline(at_s: float) -> Timeline:
    return Timeline((Span("cpu:0", "F0", 0, at_s, at_s + 1 / 3), Span("cpu:1", "FB1", 0, at_s + 0.5, at_s + 0.7)))


def test_a_row_that_does_not_fit_leaves_the_rows_before_it(tmp_path: Path) -> None:
    class NearlyFull(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:5])

    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1})
    usual, writer._file = writer._file, NearlyFull(tmp_path / "m.jsonl", "ab")
    with pytest.raises(OSError, match="No space left"):
        writer.write({"step": 2})
    writer._file.close()
    writer._file = usual
    writer.write({"step": 3})
    writer.close()
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 3]


def test_a_record_reads_back(tmp_path: Path) -> None:
    record = RunRecord(
        {"model": {"class": "Tiny"}}, [{"step": 0, "time": 1.5, "devices": ["cpu:0"]}], {2: timeline(0.1)}
    )
    record.write(tmp_path)
    assert RunRecord.read(tmp_path) == record
    assert RunRecord.read(tmp_path / "nothing") == RunRecord()


def test_a_record_keeps_the_first_and_the_last_timeline() -> None:
    record = RunRecord()
    for step in (2, 5, 9):
        record.keep_timeline(step, timeline(step))
    assert record.timelines == {2: timeline(2), 9: timeline(9)}


def test_a_resumed_record_forgets_later_steps(tmp_path: Path) -> None:
    starts = [{"step": 0, "devices": []}, {"step": 4, "devices": []}, {"step": 8, "devices": []}]
    RunRecord({}, starts, {2: timeline(2), 6: timeline(6)}).write(tmp_path)
    record = RunRecord.resumed(tmp_path, 5)
    assert (record.starts, record.timelines) == (starts[:2], {2: timeline(2)})
    assert RunRecord.resumed(tmp_path, 0) == RunRecord()
