"""Samples in a report: which rows belong to the run, and how many steps are beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_report import START_S, Page, row, start, written

from roundpipe.report import RunRecord
from roundpipe.report.page import write_report
from roundpipe.report.samples import of_this_run, prompt_text, samples_html


def sample(step: int, time_s: float, **changes: Any) -> dict[str, Any]:
    made = {"step": step, "number": 1, "prompt": "<a>", "answer": f"answer {step}", "tokens": 3, "is_complete": True}
    return {**made, "time": START_S + time_s, **changes}


def test_rows_of_other_runs_and_of_steps_taken_again_are_left_out() -> None:
    starts = [start(0, START_S), start(3, START_S + 100)]
    rows = [sample(2, -50), sample(2, 20), sample(3, 30), sample(4, 40), sample(4, 140), {"step": 5}]
    assert [one["time"] - START_S for one in of_this_run(rows, starts)] == [20, 30, 140]


def test_few_steps_are_beside_each_other_the_first_and_the_last_among_them() -> None:
    page = samples_html([sample(step, step) for step in range(1, 101)])
    steps = [text for text in Page(page).texts if text.startswith("step ")]
    assert len(steps) == 5
    assert (steps[0], steps[-1]) == ("step 1", "step 100")
    assert "5 of 100 steps" in page
    assert "&lt;a&gt;" in page
    assert samples_html([]) == ""


def test_prompts_as_text() -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert [prompt_text(one) for one in ("a", turns[1:], turns)] == ["a", "u", "system: s\nuser: u"]


def test_damaged_samples_do_not_cost_the_report(tmp_path: Path) -> None:
    assert "Samples" not in written(tmp_path, [row(1)], RunRecord({}, [start(0, START_S)]))
    lines = [json.dumps(sample(1, 5, is_complete=False)), "<damage>", json.dumps(sample(2, 6))]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    texts = Page(write_report(tmp_path).read_text()).texts
    assert {"Samples", "answer 1", "answer 2", "3 tokens, cut", "3 tokens"} <= set(texts)
