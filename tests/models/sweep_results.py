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

from sweep import Outcome, Verdict
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


def write(
    case: Case, num_devices: int, num_microbatch: int, verdict: Verdict | None, missing: tuple[str, ...] = ()
) -> None:
    """Add a result to the file that the environment names, if it names one."""
    path = os.environ.get(PATH_VARIABLE)
    if path:
        release = importlib.metadata.version("transformers")
        result = Result(release, case.key, num_devices, num_microbatch, verdict, missing)
        with open(path, "a", encoding="utf-8") as file:  # one write: lines of other processes go before or behind it
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read(path: Path) -> list[Result]:
    return [_decoded(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _decoded(line: str) -> Result:
    fields = json.loads(line)
    if fields["verdict"]:
        fields["verdict"]["outcome"] = Outcome(fields["verdict"]["outcome"])
        fields["verdict"] = Verdict(**fields["verdict"])
    return Result(**fields | {"missing": tuple(fields["missing"])})
