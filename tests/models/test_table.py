"""The page on models says what the results say, and names every case."""

from __future__ import annotations

from pathlib import Path

import pytest
import sweep_results
from sweep import Outcome, Verdict
from sweep_results import PATH_VARIABLE, Result
from table import PAGE, page
from tiny_cases import case_named, load_cases

BERT, LLAMA = case_named("bert:BertForMaskedLM"), case_named("llama:LlamaForCausalLM")


def result(verdict: Verdict | None, num_microbatch: int = 1, release: str = "5.0", key: str = LLAMA.key) -> Result:
    return Result(release, key, 1, num_microbatch, verdict, () if verdict else ("timm",))


def state_of_llama(*results: Result) -> str:
    row = next(line for line in page([LLAMA], results).splitlines() if LLAMA.class_name in line)
    return row.split(" | ")[-1].removesuffix(" |")


@pytest.mark.parametrize(
    ("one_microbatch", "two_microbatches", "state"),
    [
        (Outcome.BITWISE, Outcome.BITWISE, "bit for bit"),
        (Outcome.BITWISE, Outcome.BITWISE_UNLESS_SHARED, "bit for bit"),
        (Outcome.BITWISE_UNLESS_SHARED, Outcome.BITWISE_UNLESS_SHARED, "to rounding"),
        (Outcome.BITWISE, Outcome.EXACT, "to rounding"),
        (Outcome.BITWISE, Outcome.REFUSED, "refused: why"),
        (Outcome.CRASH, Outcome.EXACT, "fails: why"),
        (Outcome.BITWISE, Outcome.WRONG, "wrong: what"),
    ],
)
def test_the_state_is_the_worse_of_two_runs(one_microbatch: Outcome, two_microbatches: Outcome, state: str) -> None:
    verdicts = [Verdict(outcome, "what", "why") for outcome in (one_microbatch, two_microbatches)]
    assert state_of_llama(*(result(verdict, 1 + index) for index, verdict in enumerate(verdicts))) == state


def test_a_case_that_was_not_tested_names_the_missing_package() -> None:
    assert state_of_llama(result(None), result(None, 2)) == "not tested: needs timm"


def test_the_last_result_of_a_case_counts() -> None:
    assert (
        state_of_llama(result(Verdict(Outcome.CRASH, reason="why")), result(Verdict(Outcome.BITWISE))) == "bit for bit"
    )


def test_every_release_has_a_column_and_counts() -> None:
    results = [
        result(Verdict(Outcome.BITWISE)),
        result(Verdict(Outcome.EXACT), release="5.1"),
        result(Verdict(Outcome.REFUSED, reason="a | b\nc"), release="5.1", key=BERT.key),
    ]
    lines = page([LLAMA, BERT], results).splitlines()
    assert "| model type | class | 5.0 | 5.1 |" in lines
    assert "| `bert` | `BertForMaskedLM` | not run | refused: a \\| b c |" in lines
    assert "| `llama` | `LlamaForCausalLM` | bit for bit | to rounding |" in lines
    assert "| bit for bit | 1 | 0 |" in lines
    assert "| refused | 0 | 1 |" in lines


def test_results_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    monkeypatch.setenv(PATH_VARIABLE, str(path))
    verdict = Verdict(Outcome.REFUSED, "what", "why")
    sweep_results.write(LLAMA, 3, 2, verdict)
    sweep_results.write(BERT, 1, 1, None, ("timm",))
    one, other = sweep_results.read(path)
    assert (one.key, one.num_devices, one.num_microbatch, one.verdict) == (LLAMA.key, 3, 2, verdict)
    assert one.verdict is not None
    assert one.verdict.outcome is Outcome.REFUSED  # not only equal to it, as its name would be
    assert (other.verdict, other.missing) == (None, ("timm",))


def test_the_page_has_a_row_for_every_case() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == len(load_cases())
    for case in load_cases():
        assert any(row.startswith(f"| `{case.model_type}` | `{case.class_name}`") for row in rows), case.key
