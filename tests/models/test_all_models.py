"""Every tiny case trains as the plain model does. `make test-models` runs these, `make test` does not.

ROUNDPIPE_MODELS_RESULTS may name a file for the results, from which table makes docs/models.md.
"""

from __future__ import annotations

import pytest
import sweep_results
from sweep import RUNS, Outcome, Verdict, check_case, demanded_outcome, missing_packages
from tiny_cases import Case, load_cases

pytest.importorskip("transformers")


@pytest.mark.models
@pytest.mark.parametrize(("num_devices", "num_microbatch"), RUNS)
@pytest.mark.parametrize("case", load_cases(), ids=str)
def test_trains_as_the_plain_model(case: Case, num_devices: int, num_microbatch: int) -> None:
    if missing := missing_packages(case):
        sweep_results.write(case, num_devices, num_microbatch, None, tuple(missing))
        pytest.skip(f"needs {', '.join(missing)}")
    try:
        verdict = check_case(case, num_devices, num_microbatch)
    except Exception as error:
        crash = Verdict(Outcome.CRASH, reason=f"{type(error).__name__}: {error}")
        sweep_results.write(case, num_devices, num_microbatch, crash)
        raise
    sweep_results.write(case, num_devices, num_microbatch, verdict)
    demanded = demanded_outcome(case, num_microbatch)
    assert verdict.is_enough_for(demanded), f"{case} is to be {demanded}, or better: {verdict}"
