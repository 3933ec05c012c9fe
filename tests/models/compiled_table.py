"""The results of training every tiny case with compile=True, and a table of them for docs/compile.md.

`make test-models-compiled` writes the results and prints the table: how many classes compile, and why others do not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from sweep import Outcome

PATH_VARIABLE = "ROUNDPIPE_COMPILED_RESULTS"
_MOST_WORDS = 90  # characters of a reason in the table


@dataclasses.dataclass(frozen=True)
class CompiledResult:
    """num_graphs: compiled for the case. reasons: by class of layer, why it runs eagerly."""

    key: str
    outcome: Outcome
    num_graphs: int
    reasons: dict[str, str]
    detail: str

    def write(self) -> None:
        """Add the result to the file that the environment names, if it names one."""
        if path := os.environ.get(PATH_VARIABLE):
            with open(path, "a", encoding="utf-8") as file:  # one write: lines of other processes do not mix with it
                file.write(json.dumps(dataclasses.asdict(self)) + "\n")

    @property
    def state(self) -> str:
        match self.outcome:
            case Outcome.REFUSED:
                return "not split into layers, as without `compile`"
            case Outcome.WRONG | Outcome.CRASH:
                return "fails"
        if not self.reasons:
            return "all blocks compiled" if self.num_graphs else "nothing to compile"
        return "some kinds of blocks compiled, others run eagerly" if self.num_graphs else "all blocks run eagerly"


def read(path: Path) -> list[CompiledResult]:
    """The last result of each case."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    results = [CompiledResult(**line | {"outcome": Outcome(line["outcome"])}) for line in lines]
    return list({result.key: result for result in results}.values())


def table(results: list[CompiledResult]) -> Iterable[str]:
    yield "| result | classes |"
    yield "|---|---|"
    for state, count in Counter(result.state for result in results).most_common():
        yield f"| {state} | {count} |"
    yield ""
    yield "| reason | kinds of blocks |"
    yield "|---|---|"
    reasons = Counter(_short(reason) for result in results for reason in result.reasons.values())
    for reason, count in reasons.most_common():
        yield f"| {reason} | {count} |"


def _short(reason: str) -> str:
    """The reason without what differs from class to class."""
    text = re.sub(r"0x[0-9a-f]+|\bu\d+\b|\d+(\.\d+)?(e-?\d+)?", "N", reason.split("\n")[0])
    return text.replace("|", "/")[:_MOST_WORDS]


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table(read(Path(sys.argv[1]))))
