"""A machine that fails, ends, is silent or does something else: all machines raise with rank and reason, none hangs."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from machine_faults import (
    BAD_RANK,
    differing_calls,
    end_between_calls,
    fail_once,
    interrupt,
    interrupt_often,
    train_until_killed,
    wait_for_a_sleeper,
    wait_under_the_watchdog,
)

from helpers_machines import MachinePool, Outcome, values

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 40.0
# Number of kills; `make test-machines-kills` sets it.
NUM_KILLS = int(os.environ.get("ROUNDPIPE_MACHINE_KILLS", "3"))
NUM_SEEDS = int(os.environ.get("ROUNDPIPE_MACHINE_INTERRUPTS", "1"))

# Places where a machine fails, and whether the failure can come after the update of exact steps.
PLACES = {
    "forward": False,
    "loss_fn": False,
    "backward": False,
    "step_fn": False,
    "exchange": False,
    "4 exchange": True,
    "kernel": True,
    "1 kernel": True,
    "step_fn after the update": True,
}


def check_failure(outcomes: list[Outcome], place: str) -> list[dict[str, object]]:
    """Check that all machines have raised, have equal weights and go on together."""
    results = values(outcomes)
    for rank, result in enumerate(results):
        ((kind, message, named, _),) = result["seen"]
        if rank == BAD_RANK:
            assert kind == "Boom"
        else:
            assert (kind, named) == ("MachineError", BAD_RANK)
            assert f"rank {BAD_RANK}" in message
            assert "Boom" in message
        for when in ("before", "failed", "after"):
            assert torch.equal(result[when], results[0][when]), f"the weights differ {when}"
    assert not torch.equal(results[0]["after"], results[0]["failed"]), "training goes on"
    return results


@pytest.mark.parametrize(
    ("is_async", "warm_up"),
    [(False, 0), (True, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 2), (True, 0)))],
)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_machine_is_raised_on_all(
    pool: MachinePool, place: str, is_async: bool, warm_up: int
) -> None:
    results = check_failure(pool.run(3, fail_once, place, is_async, warm_up, limit_s=LIMIT_S), place)
    if is_async or not PLACES[place]:  # exact steps write new weights over the old ones
        assert torch.equal(results[0]["before"], results[0]["failed"]), "nothing is updated"


@pytest.mark.parametrize("place", ["forward", "backward", "exchange", "kernel"])
def test_an_exception_in_the_plain_loop(pool: MachinePool, place: str) -> None:
    check_failure(pool.run(3, fail_once, place, False, 1, True, limit_s=LIMIT_S), place)


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_beside_a_step_that_publishes_by_layer(pool: MachinePool, place: str) -> None:
    check_failure(pool.run(3, fail_once, place, False, 3, False, True, True, limit_s=LIMIT_S), place)


@pytest.mark.parametrize("place", ["5 exchange", "kernel"])
def test_an_exception_in_a_step_that_clips(pool: MachinePool, place: str) -> None:
    check_failure(pool.run(3, fail_once, place, True, 1, False, True, limit_s=LIMIT_S), place)


@pytest.mark.parametrize("kind", ["kinds of calls", "kinds of steps", "gradients", "writes", "versions", "closing"])
def test_differing_calls_raise_on_all_machines(pool: MachinePool, kind: str) -> None:
    results = values(pool.run(3, differing_calls, kind, limit_s=LIMIT_S))
    for rank, (error, message, named) in enumerate(results):
        if kind == "closing" and rank == BAD_RANK:
            assert error == "nothing"
            continue
        assert error == "MachineError", (rank, results)
        assert named == BAD_RANK, (rank, results)
        assert f"rank {BAD_RANK}" in message


def test_an_exception_between_calls_ends_the_others(pool: MachinePool) -> None:
    outcomes = pool.run(3, end_between_calls, "between calls", limit_s=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == ["MachineError", "Boom", "MachineError"]
    assert {outcome.lost_rank for outcome in outcomes} == {BAD_RANK, None}
    assert "it has ended (its process closed the model)" in outcomes[0].message


def test_ctrl_c_on_one_machine_ends_the_step_on_all(pool: MachinePool) -> None:
    results = values(pool.run(3, interrupt, limit_s=LIMIT_S))
    (first, _, _), (second, _, _), (third, _, _) = (error for error, _, _ in results)
    assert (first, second, third) == ("MachineError", "KeyboardInterrupt", "MachineError")
    assert "KeyboardInterrupt" in results[0][0][1]
    assert all(torch.equal(after, results[0][2]) for _, _, after in results)


@pytest.mark.parametrize(
    "kind", ["by layer", *(pytest.param(k, marks=pytest.mark.slow) for k in ("stale", "exact", "plain"))]
)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_ctrl_c_at_random_moments_leaves_the_machines_in_order(pool: MachinePool, seed: int, kind: str) -> None:
    results = values(pool.run(3, interrupt_often, kind, seed, 1.5, limit_s=LIMIT_S, timeout_s=20.0))
    assert sum(result["interrupts"] for result in results) > 0
    assert results[0]["others"] > 0
    for result in results:
        assert torch.equal(result["weights"], results[0]["weights"])
        assert torch.equal(result["sums"][0], result["sums"][1]), "no part of an earlier call is left"


def test_a_silent_machine_is_named_after_the_timeout(pool: MachinePool) -> None:
    outcomes = pool.run(3, wait_for_a_sleeper, limit_s=LIMIT_S, timeout_s=2.5)
    for rank in (0, 2):
        assert outcomes[rank].error == "MachineError"
        assert outcomes[rank].lost_rank == BAD_RANK
        assert "did not answer" in outcomes[rank].message
        assert outcomes[rank].seconds < 7


def test_the_watchdog_names_the_rank_that_is_waited_for(pool: MachinePool) -> None:
    results = values(pool.run(3, wait_under_the_watchdog, limit_s=LIMIT_S))
    for rank in (0, 2):
        assert any(f"waits for rank {BAD_RANK}: its part of forward_backward() of net" in r for r in results[rank])


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_killed_machine_is_named_by_the_others(pool: MachinePool, tmp_path: Path, number: int) -> None:
    chosen = random.Random(number)
    size, is_async = chosen.choice((2, 3, 4)), chosen.random() < 0.5
    victim, delay_s = chosen.randrange(size), chosen.uniform(0.0, 0.5)
    marker, is_early = str(tmp_path / "training"), number % 5 == 4
    if is_early:  # while the machines connect
        delay_s /= 5
    outcomes = pool.run(
        size,
        train_until_killed,
        is_async,
        marker,
        is_early,
        limit_s=LIMIT_S,
        timeout_s=8.0,
        kill=(victim, delay_s),
        marker=marker,
    )
    assert outcomes[victim].died
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert (outcome.error, outcome.lost_rank) == ("MachineError", victim), (victim, outcomes)
            assert outcome.seconds < 25
