"""report.html and report.png: the numbers of the metrics, nothing from outside, and odd runs."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from roundpipe.report import Curve, RunRecord, Section, write_report
from roundpipe.report.charts import chart_svg, charts_of, timeline_svg
from roundpipe.report.page import Headline, headlines
from roundpipe.timeline import Span, Timeline

START_S = 1_700_000_000.0
LOSSES = [4 / 3, 1.25, 0.1 + 0.2, 0.7, 0.6, 2 / 3]
VOID_TAGS = {"meta", "path", "use", "rect", "image"}


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "type": "train",
        "step": step,
        "epoch": step / 6,
        "loss": LOSSES[(step - 1) % 6],
        "grad_norm": 1 / step,
        "lr": 1e-3 / step,
        "tokens": 100 * step,
        "tokens_per_s": 1000.0 * step,
        "step_s": 0.1 * step,
        "device_share": {"cpu:0": 0.5, "cpu:1": 0.25},
        "bytes_up": 3_000_000,
        "bytes_down": 2_000_000,
        "host_rss_bytes": 2_000_000_000 + step,
        "device_peak_bytes": {"cpu:0": 5_000_000_000 + step, "cpu:1": None},
        "time": START_S + step,
        **changes,
    }


def evaluation(step: int, loss: float | None) -> dict[str, Any]:
    return {"type": "eval", "step": step, "eval_loss": loss, "eval_runtime": 7.0, "time": START_S + step}


def start(step: int, time_s: float, *devices: str) -> dict[str, Any]:
    return {"step": step, "time": time_s, "devices": list(devices)}


def two_tasks(num_device: int = 2) -> Timeline:
    spans = []
    for device in range(num_device):
        spans += [Span(f"cpu:{device}", f"F{device}", m, 0.1 * m, 0.1 * m + 0.09) for m in range(3)]
        spans += [Span(f"cpu:{device}", f"B{device + 2}", m, 0.5 + 0.1 * m, 0.6 + 0.1 * m) for m in range(3)]
    return Timeline(tuple(spans))


def written(folder: Path, rows: Sequence[dict[str, Any]], record: RunRecord | None = None, **options: Any) -> str:
    """The page of a run with these rows."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (record or RunRecord()).write(folder)
    path = write_report(folder, **options)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags with their attributes, texts, and the cells of each row of each table. Fails if tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_TAGS:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def titles(self) -> list[str | None]:
        return [attributes["title"] for _, attributes in self.tags if "title" in attributes]


def six_rows() -> list[dict[str, Any]]:
    return [*(row(step) for step in range(1, 7)), evaluation(3, 0.75), evaluation(6, 0.5)]


def test_the_headlines_are_those_of_the_metrics() -> None:
    starts = [start(0, START_S - 2, "cpu:0"), start(3, START_S + 3.5, "cpu:0", "cpu:1")]
    assert headlines(six_rows(), starts, price_per_hour=720.0) == [
        Headline("final loss", "0.6667", "0.6666666666666666 at step 6"),
        Headline("best eval loss", "0.5", "0.5 at step 6"),
        Headline("steps", "6"),
        Headline("tokens", "2,100"),
        Headline("tokens/s, median", "3,500"),
        Headline("wall time", "0:00:08", "all processes, without the pauses between them"),  # (3 + 2) + (6 - 3.5)
        Headline("tokens per day", "24.2 million", "evaluations included"),
        Headline("cost", "1.50", "720 per hour"),
        Headline("devices computing", "38%", "share of the time, mean of all devices"),
        Headline("peak host memory", "2.00 GB", "2,000,000,006 bytes"),
        Headline("peak device memory", "5.00 GB", "5,000,000,006 bytes"),
        Headline("restarts", "1"),
    ]


def test_the_title_says_what_was_trained_how_and_on_what(tmp_path: Path) -> None:
    about = {"name": "first", "base model": "Qwen3-8B", "method": "SFT, LoRA, rank 16", "data": "<chats>.jsonl"}
    settings = {"run": about | {"price per hour": 720.0}, "model": {"class": "Qwen3ForCausalLM"}}
    record = RunRecord(settings, [start(0, START_S, "cpu:0")])
    text = written(tmp_path, six_rows(), record)
    page = Page(text)
    assert "<title>first · Qwen3-8B · SFT, LoRA, rank 16 · &lt;chats&gt;.jsonl</title>" in text
    assert "Qwen3-8B · SFT, LoRA, rank 16 · <chats>.jsonl" in page.texts
    assert page.texts.count("first") == 2  # the heading, and the section of the settings
    assert "1.20" in page.texts  # six seconds


def test_the_share_of_computing_is_weighted_by_time() -> None:
    rows = [row(1, step_s=3.0, device_share={"a": 1.0}), row(2, step_s=1.0, device_share={"a": 0.2, "b": None})]
    assert [one.text for one in headlines(rows, []) if one.name == "devices computing"] == ["80%"]


def test_the_page_has_each_headline_and_each_step_with_all_digits(tmp_path: Path) -> None:
    rows = six_rows()
    page = Page(written(tmp_path, rows))
    for one in headlines(rows, []):
        assert one.text in page.texts
        assert one.name in page.texts
    exact = [repr(value) for step in range(1, 7) for value in (LOSSES[step - 1], 1 / step, 1e-3 / step)]
    assert page.titles()[-18:] == exact
    assert ["6", "0.6667", "0.1667", "0.0001667", "6,000", "0.6", "38%", "3.00 MB", "2.00 MB", "2.00 GB"] in page.rows


def test_curves_are_the_metrics_exactly() -> None:
    charts = {chart.title: chart for chart in charts_of(six_rows())}
    loss, evals = charts["Loss"].lines
    assert (loss.name, list(loss.points)) == ("training loss", list(enumerate(LOSSES, start=1)))
    assert (evals.name, list(evals.points)) == ("eval_loss", [(3, 0.75), (6, 0.5)])
    peaks = charts["Device memory (peak)"].lines  # cpu:1 does not count its memory
    assert [(line.name, list(line.points)) for line in peaks] == [
        ("cpu:0", [(step, 5_000_000_000 + step) for step in range(1, 7)])
    ]
    assert [line.name for line in charts["Share of time the devices compute"].lines] == ["cpu:0", "cpu:1"]
    assert list(charts["Throughput (tokens/s)"].lines[0].points) == [(step, 1000.0 * step) for step in range(1, 7)]
    assert list(charts["Host memory"].lines[0].points) == [(step, 2_000_000_000 + step) for step in range(1, 7)]


def test_values_that_were_not_measured_have_no_chart() -> None:
    unknown = {name: None for name in row(1) if name not in ("type", "step", "time", "step_s")}
    assert [chart.title for chart in charts_of([row(1, **unknown)])] == ["Time per step (s)"]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = written(tmp_path, six_rows(), RunRecord({"model": {"class": "Tiny"}}, [], {2: two_tasks()}))
    page = Page(text)
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "img")
        for name, value in attributes.items():
            if name in ("href", "xlink:href", "src"):
                assert value is not None
                assert value.startswith("#")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(|xlink:href=")#([^")]+)', text))
    assert used <= set(ids)
    assert used


def test_settings_are_escaped_folded_and_cut(tmp_path: Path) -> None:
    hostile = "</td><script>alert('x')</script>&amp;"
    settings = {
        "model": {"class": hostile, "nested": {"a": [1, "<b>"]}, "none": None},
        "arguments": {f"option {at}": "v" * at for at in range(5000, 5013)} | {"run_name": hostile},
    }
    text = written(tmp_path, [row(1)], RunRecord(settings))
    page = Page(text)
    assert "script" not in [tag for tag, _ in page.tags]
    assert ["class", hostile] in page.rows
    assert ["nested", '{"a": [1, "<b>"]}'] in page.rows
    assert ["none", "-"] in page.rows
    assert ["option 5001", "v" * 4000 + "… (5,001 characters)"] in page.rows
    assert page.texts.count(hostile) == 4  # the title of the page, its heading and both settings
    folds = [attributes for tag, attributes in page.tags if tag == "details"]
    assert ["open" in attributes for attributes in folds] == [False, True, False]  # steps, model, arguments


def test_the_picture_is_a_png_of_the_expected_size(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    written(tmp_path, six_rows(), RunRecord({}, [], {2: two_tasks(), 6: two_tasks(3)}))
    data = (tmp_path / "report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    # 8 charts in 4 rows of 3.3 inches, a head of 0.95, and timelines of 2.36 and 2.84; 120 pixels per inch.
    assert struct.unpack(">II", data[16:24]) == (1488, 2322)
    pixels = image.imread(tmp_path / "report.png")
    for colour in ("#2f7fb8", "#e07b39", "#5fa8d3", "#ef8354"):  # two curves, forward and backward
        target = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        assert (abs(pixels[:, :, :3] - target).max(axis=2) < 1e-6).sum() > 50, colour


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1)], "0:00:00"),
        ([row(step, loss=None, tokens=None, tokens_per_s=None) for step in (1, 2)], "Time per step (s)"),
        ([row(1, loss=math.nan), row(2, loss=math.inf), row(3), row(4, loss=1e308)], "not finite (3)"),
        ([row(step, loss=math.nan, grad_norm=-math.inf) for step in (1, 2)], "not finite (2)"),
        ([row(1), evaluation(1, math.nan), evaluation(2, None)], "not finite (1)"),
        ([evaluation(4, 0.25)], "best eval loss"),
        ([{"type": "train", "step": 1}], "1 of 1 steps"),
        ([row(1, loss=0.0), row(2, loss=-1.0)], "-1"),
        ([row(step, loss=10.0**-step) for step in range(1, 9)], "1e-08"),
        ([row(7, device_share={}, device_peak_bytes={"cpu:0": None})], "7"),
    ],
)
@pytest.mark.slow
def test_odd_runs_have_a_report(tmp_path: Path, rows: list[dict[str, Any]], expected: str) -> None:
    page = Page(written(tmp_path, rows))
    assert expected in page.texts
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_a_folder_without_rows_has_no_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist or has no complete row"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_shows_its_processes(tmp_path: Path) -> None:
    starts = [
        start(0, START_S, "cpu:0", "cpu:1"),
        start(3, START_S + 100),
        start(3, START_S + 200, "cpu:0", "cpu:1", "cpu:2"),
    ]
    rows = [row(step, time=START_S + step + (200 if step > 3 else 0)) for step in range(1, 7)]
    page = Page(written(tmp_path, rows, RunRecord({}, starts)))
    assert page.rows[:4] == [
        ["process", "started", "steps", "devices", "names"],
        ["1", "2023-11-14 22:13:20 UTC", "1 to 3", "2", "cpu:0, cpu:1"],
        ["2", "2023-11-14 22:15:00 UTC", "none kept", "-", "-"],
        ["3", "2023-11-14 22:16:40 UTC", "4 to 6", "3", "cpu:0, cpu:1, cpu:2"],
    ]
    assert page.texts.count("restart") == len(charts_of(rows))
    assert "0:00:09" in page.texts  # 3 s and 6 s


def test_a_restart_is_marked_between_two_steps() -> None:
    chart = charts_of(six_rows())[0]
    axis, marked = chart_svg(chart, []), chart_svg(chart, [3])
    dashed = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL \1 [\d.]+ \n" clip-path="[^"]+" style="[^"]*dasharray', marked)
    assert "dasharray" not in axis
    ticks = {
        int(label): float(x)
        for x, label in re.findall(r'<text style="[^"]*" x="([\d.]+)"[^>]*>([1-6])</text>', marked)
        if marked.index(f">{label}</text>") < marked.index(">step</text>")
    }
    assert [float(x) for x in dashed] == [pytest.approx((ticks[3] + ticks[4]) / 2, abs=1e-3)]


def test_without_matplotlib_the_page_has_tables_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    timeline = two_tasks()
    with caplog.at_level(logging.WARNING, "roundpipe"):
        page = Page(written(tmp_path, six_rows(), RunRecord({}, [start(0, START_S, "cpu:0")], {2: timeline})))
    assert [record.getMessage() for record in caplog.records] == [
        f"matplotlib is not installed, so {tmp_path / 'report.html'} has no curves and report.png is not written; "
        "pip install 'roundpipe[train]'."
    ]
    assert timeline.to_text(100) in page.texts
    assert "0.6667" in page.texts
    assert "svg" not in [tag for tag, _ in page.tags]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html", "run.json"]


class Killed(BaseException):
    """Ends a write as a kill does: no handler of Exception runs."""


@pytest.mark.parametrize("files_replaced", [0, 1])
@pytest.mark.parametrize("moment", ["while writing", "before replacing"])
def test_a_killed_process_leaves_old_or_new_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_replaced: int, moment: str
) -> None:
    small = [{"type": "train", "step": step, "loss": 1.0} for step in (1, 2)]
    written(tmp_path, small)
    names = ("report.png", "report.html")
    old = {name: (tmp_path / name).read_bytes() for name in names}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**small[0], "step": 3}) + "\n")
    write_bytes, replace, count = Path.write_bytes, os.replace, 0

    def killed_write(path: Path, content: bytes) -> int:
        if moment == "while writing" and count == files_replaced:
            write_bytes(path, content[: len(content) // 2])
            raise Killed
        return write_bytes(path, content)

    def killed_replace(source: Path, target: Path) -> None:
        nonlocal count
        if moment == "before replacing" and count == files_replaced:
            raise Killed
        replace(source, target)
        count += 1

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", killed_write)
        patch.setattr(os, "replace", killed_replace)
        with pytest.raises(Killed):
            write_report(tmp_path)
    found = {name: (tmp_path / name).read_bytes() for name in names}
    write_report(tmp_path)
    new = {name: (tmp_path / name).read_bytes() for name in names}
    assert old != new
    assert found == {name: (new if at < files_replaced else old)[name] for at, name in enumerate(names)}
    assert not list(tmp_path.glob(".*"))  # the next report replaces what was left


def test_long_runs_are_thinned_and_keep_their_extremes() -> None:
    rows = [row(step, loss=2 + math.sin(step), grad_norm=None) for step in range(1, 100_001)]
    rows[12_345]["loss"] = 50.0
    rows[67_890]["loss"] = 0.001
    rows[70_000]["loss"] = math.nan
    charts = charts_of(rows)
    for chart in charts:
        assert all(len(line.points) <= 1000 for line in chart.lines)
    pale, mean = charts[0].lines
    assert max(pale.points, key=lambda point: point[1]) == (12_346, 50.0)
    assert min(pale.points, key=lambda point: point[1]) == (67_891, 0.001)
    assert list(charts[0].odd_steps) == [70_001]
    assert mean.name == "mean of 1,999"
    first = [rows[at]["loss"] for at in range(1999)]
    assert mean.points[0] == (1000, sum(first) / 1999)
    assert sum(len(chart_svg(chart, range(0, 100_000, 1000))) for chart in charts) < 1_000_000


def test_many_boxes_are_drawn_as_pixels() -> None:
    spans = [
        Span(f"cuda:{d}", f"F{t}", m, t + m / 8, t + m / 8 + 0.1) for d in range(8) for t in range(60) for m in range(8)
    ]
    svg = timeline_svg(Timeline(tuple(spans)), "late")
    assert svg.count("<image") >= 1
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in re.findall(r'href="([^"]*)"', svg))
    assert len(svg) < 1_000_000


def test_a_timeline_shows_tasks_devices_and_shares(tmp_path: Path) -> None:
    timeline = two_tasks()
    page = Page(written(tmp_path, [row(1)], RunRecord({}, [], {2: timeline, 1234: Timeline(())})))
    share = f"{1 - timeline.idle_share('cpu:0'):.0%}"
    for text in ("F0", "F1", "B2", "B3", f"cpu:0  {share}", f"cpu:1  {share}", "Step 2: 800 ms", "ms"):
        assert text in page.texts
    assert "forward" in page.texts
    assert "forward + loss + backward" not in page.texts  # no such task
    assert not [text for text in page.texts if "1,234" in text]  # an empty timeline is not shown


def test_many_devices_are_summarised() -> None:
    shares = {f"cuda:{at}": at / 20 for at in range(12)}
    chart = charts_of([row(1, device_share=shares), row(2, device_share={})])[4]
    assert [(line.name, list(line.points)) for line in chart.lines] == [
        ("lowest of 12", [(1, 0.0)]),
        ("mean of 12", [(1, sum(shares.values()) / 12)]),
        ("highest of 12", [(1, 11 / 20)]),
    ]


@pytest.mark.parametrize("count", range(1, 9))
def test_a_legend_does_not_squeeze_its_chart(count: int) -> None:
    names = ["plain PyTorch", "with --stale", *(f"run {number}" for number in range(6))][:count]
    loss = charts_of([row(1), row(2), evaluation(2, 1.0)], [Curve(name, [1, 2], [1.0, 2.0]) for name in names])[0]
    svg = chart_svg(loss, [1])
    width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', svg)[0])
    lines = re.findall(r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+) [\d.]+ \n"', svg)  # the grid and the axis of the steps
    assert max(abs(float(one) - float(other)) for one, other in lines) > 0.75 * width


def test_sections_add_tables_verdicts_and_losses(tmp_path: Path) -> None:
    plain = Curve("--><script>plain", [1, 2, 3], [1.5, None, 0.1 + 0.2])
    sections = [
        Section(
            "Against <plain> PyTorch", "Equal & exact.", "One.\n\nTwo.", [["run", "loss"], ["plain", 0.5]], [plain]
        ),
        Section("Names", table={"largest difference": 0.0, "same bits": True}),
    ]
    text = written(tmp_path, six_rows(), sections=sections)
    page = Page(text)
    assert [
        one for one in page.texts if one in ("Against <plain> PyTorch", "Equal & exact.", "One.", "Two.", "Names")
    ] == [
        "Against <plain> PyTorch",
        "Equal & exact.",
        "One.",
        "Two.",
        "Names",
    ]
    assert page.rows[:4] == [["run", "loss"], ["plain", "0.5"], ["largest difference", "0.0"], ["same bits", "true"]]
    assert "--><script>plain" in page.texts  # in the legend of the losses
    line = charts_of(six_rows(), [plain])[0].lines[-1]
    assert list(line.points) == [(1, 1.5), (3, 0.1 + 0.2)]


def test_the_same_run_gives_the_same_page_whatever_the_settings_of_matplotlib(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    record = RunRecord({"model": {"class": "costs $a_b$ $"}}, [], {2: two_tasks()})
    expected = written(tmp_path, six_rows(), record)
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True, "lines.linewidth": 9, "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        assert written(tmp_path, six_rows(), record) == expected
        assert dict(matplotlib.rcParams) == before
