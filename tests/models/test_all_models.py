"""Every tiny case trains as the plain model does. `make test-models` runs these, `make test` does not.

ROUNDPIPE_MODELS_RESULTS may name a file for the results, from which table makes docs/models.md.
"""

from __future__ import annotations

import pytest
import sweep_results
from default_road import check_default_road
from sweep import RUNS, Holds, Outcome, RoadVerdict, Verdict, check_case, demanded_outcome, missing_packages
from tiny_cases import Case, load_cases
from variants import variants_of

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


@pytest.mark.models
@pytest.mark.parametrize("num_microbatch", [2, 3])
@pytest.mark.parametrize("case", load_cases(), ids=str)
def test_the_way_of_users(case: Case, num_microbatch: int) -> None:
    """Labels, no loss_fn, several microbatches: the loss and gradients of the whole batch."""
    if missing := missing_packages(case):
        pytest.skip(f"needs {', '.join(missing)}")
    verdict = tried(case, num_microbatch)
    assert verdict.holds is not Holds.WRONG, verdict.detail


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", load_cases(), ids=str)
def test_variants(case: Case) -> None:
    """Every variant of a case, the way of users, in two microbatches."""
    if missing := missing_packages(case):
        pytest.skip(f"needs {', '.join(missing)}")
    verdicts = {variant.key: tried(variant, 2) for variant in variants_of(case)}
    wrong = [f"{key}: {verdict.detail}" for key, verdict in verdicts.items() if verdict.holds is Holds.WRONG]
    assert not wrong, "\n".join(wrong)


def tried(case: Case, num_microbatch: int) -> RoadVerdict:
    """The verdict, which is also written to the results. An exception that is not ours is wrong."""
    try:
        verdict = check_default_road(case, num_microbatch)
    except Exception as error:
        verdict = RoadVerdict(Holds.WRONG, f"{type(error).__name__}: {error}")
    sweep_results.write_road(case, num_microbatch, verdict)
    return verdict
