"""Every tiny case trains with compile=True as the plain model does, to rounding: `make test-models-compiled`.

The backend aot_eager traces forward and backward as inductor does, which decides what compiles, and generates no code,
which would take most of a day. ROUNDPIPE_MODELS_SAMPLE may say how many cases to run, chosen by a seed, and
ROUNDPIPE_COMPILED_RESULTS may name a file for the results, from which compiled_table makes a table.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from compiled_table import CompiledResult
from sweep import Outcome, check_case, demanded_outcome, missing_packages
from tiny_cases import Case, load_cases

from roundpipe.compiled import compilations

pytest.importorskip("transformers")
NUM_DEVICES, NUM_MICROBATCH = 3, 2
EAGER = " runs eagerly, because it cannot be compiled: "


def sample() -> list[Case]:
    cases, size = load_cases(), os.environ.get("ROUNDPIPE_MODELS_SAMPLE")
    return cases if size is None else random.Random(0).sample(cases, int(size))


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Error detected in")  # torch says where code that it cannot compile comes from
@pytest.mark.parametrize("case", sample(), ids=str)
def test_trains_compiled_as_the_plain_model(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    if missing := missing_packages(case):
        pytest.skip(f"needs {', '.join(missing)}")
    torch._dynamo.reset()  # the code of earlier cases
    before = compilations().graphs
    try:
        verdict = check_case(case, NUM_DEVICES, NUM_MICROBATCH, compile={"backend": "aot_eager"})
    except Exception as error:
        CompiledResult(case.key, Outcome.CRASH, 0, {}, f"{type(error).__name__}: {error}").write()
        raise
    lines = [record.getMessage() for record in caplog.records if EAGER in record.getMessage()]
    reasons = dict(line.split(EAGER, 1) for line in lines)
    detail = verdict.reason or verdict.detail
    CompiledResult(case.key, verdict.outcome, compilations().graphs - before, reasons, detail).write()
    # Compiled code adds in another order, so that what is bitwise becomes exact.
    demanded = min(demanded_outcome(case, NUM_MICROBATCH), Outcome.EXACT, key=lambda outcome: outcome.rank)
    assert verdict.is_enough_for(demanded), f"{case} is to be {demanded}, or better: {verdict}"
