"""What became of every case with one release of transformers, as lines of JSON.

Written by test_all_models, read by table. Several processes may write one file; of what was tried more than once, the
last line counts.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from sweep import Holds, Outcome, RoadVerdict, Verdict
from tiny_cases import Case

PATH_VARIABLE = "ROUNDPIPE_MODELS_RESULTS"


@dataclasses.dataclass(frozen=True)
class Result:
    release: str  # of transformers
    key: str  # of the case
    num_devices: int
    num_microbatch: int
    verdict: Verdict | None  # None: not tested
    missing: tuple[str, ...] = ()  # packages it was not tested for


@dataclasses.dataclass(frozen=True)
class RoadResult:
    """The result of a case, or of a variant of one, that was trained the way of users."""

    release: str
    key: str
    num_microbatch: int
    holds: Holds
    detail: str

    @property
    def is_variant(self) -> bool:
        return "[" in self.key


def write(
    case: Case, num_devices: int, num_microbatch: int, verdict: Verdict | None, missing: tuple[str, ...] = ()
) -> None:
    """Add a result to the file that the environment names, if it names one."""
    _append(Result(_release(), case.key, num_devices, num_microbatch, verdict, missing))


def write_road(case: Case, num_microbatch: int, verdict: RoadVerdict) -> None:
    """Add the result of training the way of users."""
    _append(RoadResult(_release(), case.key, num_microbatch, verdict.holds, verdict.detail))


def _release() -> str:
    return importlib.metadata.version("transformers")


def _append(result: Result | RoadResult) -> None:
    path = os.environ.get(PATH_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:  # one write: lines of other processes go before or behind it
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read(path: Path) -> list[Result | RoadResult]:
    return [_decoded(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _decoded(fields: dict[str, Any]) -> Result | RoadResult:
    if "holds" in fields:
        return RoadResult(**fields | {"holds": Holds(fields["holds"])})
    if fields["verdict"]:
        fields["verdict"]["outcome"] = Outcome(fields["verdict"]["outcome"])
        fields["verdict"] = Verdict(**fields["verdict"])
    return Result(**fields | {"missing": tuple(fields["missing"])})
