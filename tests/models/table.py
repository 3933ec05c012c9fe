"""Writes docs/models.md: the result of every tiny case with two releases of transformers.

`make models-table` runs it with the two result files as arguments. Knows results, not how they are produced.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import assert_never

import sweep_results
from sweep import Holds, Outcome
from sweep_results import Result, RoadResult
from tiny_cases import Case, load_cases

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROUTER = "+router"  # at the end of a case's key
NOT_RUN = "not run"
KINDS = ("bit for bit", "to rounding", "refused", "not tested", "fails", "wrong", NOT_RUN)  # of states

HEADER = """\
# Tested models of transformers

Classes of transformers that RoundPipe splits into layers, and how the training of a tiny wrapped model of each class
compares with the plain model. `make models-table` generates this page from the results of `make test-models` and
`make test-models-newest`; do not edit it.

The test compares the loss and all gradients of a call with those of the plain model over the same microbatches, in
float32 on virtual CPU devices, without dropout, for a batch of another shape than the one used for the split. Every
model runs with one microbatch on one device and with two on three devices. A few models with BatchNorm, which needs
more than one sample, run with one microbatch on three devices instead.

A result is that of the tiny model of the test, a release, and the forms of call below. Another one can run other code
of the model, about which the tables say nothing.

* **bit for bit**: loss and gradients of the tiny model are equal. With two microbatches, gradients of parameters that
  several layers share may differ by rounding.
* **to rounding**: gradients differ by at most 1e-5 of the model's largest gradient.
* **refused**: the model is not split; the table gives the reason, as does a `ModelSplitError` or a warning.
* **not tested**: the class needs a package that was not installed.
"""

ROADS = """\
## The way users train

Every class is also trained without `loss_fn`, with labels of which another number is ignored in each row, in 2 and in 3
microbatches, with `forward_backward(...)` and with `model(**batch).loss.backward()`, and compared with the plain model
on the whole batch. A **variant** is a class with one option of its configuration changed: a flag flipped, a depth one
more or less, features of another layer; it runs in 2 microbatches.

Losses that are no sum over rows, such as contrastive ones, and BatchNorm are compared with the plain model on the
microbatches; the test then requires that RoundPipe has logged its warning.

Loss and gradients may differ by 2e-5 of the loss and of the model's largest gradient. Where they differ by more and the
plain model on the microbatches does so, too, the comparison is repeated in float64 and decided there, to 1e-12.
"""

CLASSES = """\
## Every class
"""


def main(paths: Sequence[str]) -> None:
    results = [result for path in paths for result in sweep_results.read(Path(path))]
    PAGE.write_text(page(load_cases(), results), encoding="utf-8")


def page(cases: Sequence[Case], everything: Sequence[Result | RoadResult]) -> str:
    results = [result for result in everything if isinstance(result, Result)]
    releases = list(dict.fromkeys(result.release for result in results))
    roads = [result for result in everything if isinstance(result, RoadResult)]
    states = {release: states_by_key([r for r in results if r.release == release]) for release in releases}
    rows = [
        (f"`{case.model_type}`", _class_cell(case), *(states[release].get(case.key, NOT_RUN) for release in releases))
        for case in sorted(cases, key=lambda case: (case.model_type.lower(), case.key))
    ]
    counts = [Counter(row[2 + column].partition(":")[0] for row in rows) for column in range(len(releases))]
    summary = [
        (kind, *(str(count[kind]) for count in counts)) for kind in KINDS if any(count[kind] for count in counts)
    ]
    classes = _table(("model type", "class", *releases), rows)
    ways = [*_way_of_users("classes", [r for r in roads if not r.is_variant], releases), ""]
    ways += _way_of_users("variants", [r for r in roads if r.is_variant], releases)
    return "\n".join([HEADER, *_table(("classes", *releases), summary), "", ROADS, *ways, "", CLASSES, *classes, ""])


def _way_of_users(name: str, results: Sequence[RoadResult], releases: Sequence[str]) -> list[str]:
    """A table of how many classes or variants hold with each release. Of several microbatches the worst counts."""
    worst: dict[tuple[str, str], Holds] = {}
    order = list(Holds)
    for (release, key, _), holds in {(r.release, r.key, r.num_microbatch): r.holds for r in results}.items():
        worst[release, key] = max(worst.get((release, key), holds), holds, key=order.index)
    counts = {release: Counter(holds for (of, _), holds in worst.items() if of == release) for release in releases}

    def row(text: str, kinds: Sequence[Holds]) -> tuple[str, ...]:
        return text, *(str(sum(counts[of][kind] for kind in kinds)) if counts[of] else NOT_RUN for of in releases)

    tried = [holds for holds in order if holds.is_tried]
    left_out = [holds for holds in order if not holds.is_tried]
    rows = [row("**tried**", tried), *(row(str(holds), [holds]) for holds in (*tried, *left_out))]
    return _table((name, *releases), rows)


def states_by_key(results: Sequence[Result]) -> dict[str, str]:
    """The page's text for each case of one release, by the key of the case."""
    latest = {(result.key, result.num_microbatch): result for result in results}
    runs: dict[str, list[Result]] = {}
    for result in latest.values():
        runs.setdefault(result.key, []).append(result)
    return {key: _state({result.num_microbatch: result for result in run}) for key, run in runs.items()}


def _state(runs: Mapping[int, Result]) -> str:
    """The text for the worst run; with several microbatches, shared parameters may differ by rounding."""
    results = [runs[num_microbatch] for num_microbatch in sorted(runs)]
    verdicts = [result.verdict for result in results if result.verdict is not None]
    if len(verdicts) < len(results):
        return f"not tested: needs {', '.join(results[0].missing)}"
    first, worst = verdicts[0], min(verdicts, key=lambda verdict: verdict.outcome.rank)
    match worst.outcome:
        case Outcome.BITWISE:
            return "bit for bit"
        case Outcome.BITWISE_UNLESS_SHARED:
            return "bit for bit" if first.outcome is Outcome.BITWISE else "to rounding"
        case Outcome.EXACT:
            return "to rounding"
        case Outcome.REFUSED:
            return f"refused: {worst.reason}"
        case Outcome.CRASH:
            return f"fails: {worst.reason}"
        case Outcome.WRONG:
            return f"wrong: {worst.detail}"
    assert_never(worst.outcome)


def _class_cell(case: Case) -> str:
    return f"`{case.class_name}`" + (" with router loss" if case.key.endswith(ROUTER) else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    main(sys.argv[1:])
