"""Faults of the network and frozen machines: all other machines raise in time, and the job resumes exactly.

Three machines in network namespaces with links that a test cuts or slows.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import network_training
import pytest
from network_training import last_complete, train
from virtual_network import PORT, Network, Outcome, Processes, unavailable

from helpers_machines import PRELOAD

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

SIZE = 3
NUM_STEPS = 5
TIMEOUT_S = 3.0  # of the process group
MARGIN_S = 5.0  # a store that has been lost is asked for 2 s, and the machine that runs the tests may be busy
RUN_S = 40.0
FAULTY_STEP = 3
_ports = itertools.count(PORT)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(SIZE) as made:
        yield made


@pytest.fixture(autouse=True)
def _whole_links(request: pytest.FixtureRequest) -> Iterator[None]:
    """Repair all links after a test."""
    yield
    network: Network = request.getfixturevalue("network")
    for rank in range(SIZE):
        network.join(rank)
        network.limit(rank, None)


def store_of(network: Network) -> str:
    """The address of the store of a new process group, on rank 0."""
    return f"tcp://{network.places[0].address}:{next(_ports)}"


def run(network: Network, folder: Path, *, timeout_s: float = 30.0, is_async: bool = False) -> dict[str, Any]:
    """Train to the end without a fault; returns what all machines have returned."""
    with Processes(network.places, PRELOAD) as processes:
        args = (store_of(network), folder, NUM_STEPS, timeout_s, is_async)
        first, *others = processes.call(train, *args, limit_s=RUN_S)
    assert all(other == first for other in others)
    return first


@pytest.fixture(scope="module")
def undisturbed(network: Network, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """A training without faults, by is_async."""
    return {mode: run(network, tmp_path_factory.mktemp("undisturbed"), is_async=mode) for mode in (False, True)}


def check_resumed(network: Network, folder: Path, expected: dict[str, Any], is_async: bool = False) -> None:
    """Start all machines again; the training goes on from the last complete state with the same bits."""
    done = last_complete(folder, SIZE)
    resumed = run(network, folder, is_async=is_async)
    assert resumed["resumed from"] == done
    assert resumed["weights"] == expected["weights"]
    assert resumed["losses"] == {step: loss for step, loss in expected["losses"].items() if step > done}


def check_others(outcomes: dict[int, Outcome], victim: int, seconds: float) -> None:
    """All other machines have raised an error that names the victim, in time."""
    for rank, outcome in outcomes.items():
        assert outcome.error == "MachineError", f"rank {rank}: {outcome}"
        assert outcome.lost_rank == victim, f"rank {rank}: {outcome.message}"
        assert f"MachineError: rank {victim}" in outcome.message
    assert seconds < TIMEOUT_S + MARGIN_S


def after_a_fault(
    network: Network,
    folder: Path,
    victim: int,
    place: str,
    fault: Callable[[Processes], object],
    *,
    step: int = FAULTY_STEP,
    is_async: bool = False,
    repair: Callable[[Processes], object] = lambda processes: None,
) -> Outcome:
    """Train; let `fault` happen when the victim is at `place` of a step. Returns the outcome of the victim.

    Checks what the other machines raise, and that all processes end. `repair`: after the others have raised.
    """
    others = [rank for rank in range(SIZE) if rank != victim]
    with Processes(network.places, PRELOAD) as processes:
        pauses = {victim: (step, place)}
        processes.start(train, store_of(network), folder, NUM_STEPS, TIMEOUT_S, is_async, pauses)
        processes.wait_for_pause(victim, place, RUN_S)
        start = time.monotonic()
        fault(processes)
        processes.resume(victim)
        outcomes = dict(zip(others, processes.finish(RUN_S, others), strict=True))
        check_others(outcomes, victim, time.monotonic() - start)
        repair(processes)
        (of_victim,) = processes.finish(RUN_S, [victim])
        assert processes.leave(RUN_S) == [0] * SIZE, "all processes end"
    assert last_complete(folder, SIZE) == step - 1
    return of_victim


@pytest.mark.parametrize(
    ("victim", "place", "is_async"),
    [
        (2, "call", False),
        pytest.param(1, "exchange", False, marks=pytest.mark.slow),
        pytest.param(0, "forward", False, marks=pytest.mark.slow),
        pytest.param(2, "exchange", True, marks=pytest.mark.slow),
        pytest.param(0, "call", True, marks=pytest.mark.slow),
        pytest.param(0, "exchange", False, marks=pytest.mark.slow),
        pytest.param(1, "forward", True, marks=pytest.mark.slow),
    ],
)
def test_a_cut_link(
    network: Network, undisturbed: dict[bool, dict[str, Any]], tmp_path: Path, victim: int, place: str, is_async: bool
) -> None:
    """Between calls ("call"), during a call ("forward") and during a step ("exchange")."""
    of_victim = after_a_fault(
        network, tmp_path, victim, place, lambda processes: network.cut(victim), is_async=is_async
    )
    assert of_victim.error == "MachineError", of_victim
    network.join(victim)
    check_resumed(network, tmp_path, undisturbed[is_async], is_async)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_link_cut_before_the_first_call(network: Network, tmp_path: Path, victim: int) -> None:
    """The machines connect for a model in its first call, over the store on rank 0."""
    of_victim = after_a_fault(network, tmp_path, victim, "call", lambda processes: network.cut(victim), step=1)
    assert of_victim.error == "MachineError", of_victim


@pytest.mark.slow
def test_a_link_of_1_mbit_per_s(network: Network, undisturbed: dict[bool, dict[str, Any]], tmp_path: Path) -> None:
    of_victim = after_a_fault(network, tmp_path, 2, "exchange", lambda processes: network.limit(2, 1e6))
    assert of_victim.error == "MachineError", of_victim
    network.limit(2, None)
    check_resumed(network, tmp_path, undisturbed[False])


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (1, "exchange"),
        pytest.param(0, "call", marks=pytest.mark.slow),
        pytest.param(2, "forward", marks=pytest.mark.slow),
        pytest.param(0, "exchange", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_machine(
    network: Network, undisturbed: dict[bool, dict[str, Any]], tmp_path: Path, victim: int, place: str
) -> None:
    of_victim = after_a_fault(
        network,
        tmp_path,
        victim,
        place,
        lambda processes: processes.signal(victim, signal.SIGSTOP),
        repair=lambda processes: processes.signal(victim, signal.SIGCONT),
    )
    assert of_victim.error == "MachineError", of_victim
    check_resumed(network, tmp_path, undisturbed[False])


@pytest.mark.slow
def test_a_slow_link_changes_no_bit(network: Network, undisturbed: dict[bool, dict[str, Any]], tmp_path: Path) -> None:
    network.limit(1, 5e7)
    assert run(network, tmp_path) == undisturbed[False]


@pytest.mark.slow
def test_scripts_end_after_a_cut_link(network: Network, tmp_path: Path) -> None:
    """Whole interpreters, started and ended as by a user."""
    store = store_of(network)
    scripts = []
    for rank, place in enumerate(network.places):
        args = (rank, SIZE, place.address, store, place.namespace, tmp_path, TIMEOUT_S)
        command = [sys.executable, network_training.__file__, *map(str, args)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        scripts.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        deadline = time.monotonic() + RUN_S
        while not last_complete(tmp_path, SIZE):
            assert time.monotonic() < deadline
            assert all(script.poll() is None for script in scripts)
            time.sleep(0.05)
        network.cut(2)
        for rank, script in enumerate(scripts):
            message = script.communicate(timeout=RUN_S)[1]
            assert script.returncode == 1, message
            # The machine that was cut off cannot know whether it or the others are lost.
            assert ("MachineError: rank " if rank == 2 else "MachineError: rank 2 ") in message, message
    finally:
        for script in scripts:
            script.kill()
            script.wait()
