"""RandomStream: separate generators per thread for `random`, `numpy.random` and torch's CPU state."""

from __future__ import annotations

import inspect
import operator
import pickle
import random
import threading
from random import random as imported_random
from typing import Any

import numpy as np
import pytest
import torch

from roundpipe.runtime import rng as process_random
from roundpipe.runtime.rng import RandomStream, route_shared_generators


@pytest.fixture(autouse=True)
def routed() -> None:
    route_shared_generators()


def draw() -> list[float]:
    return [random.random(), imported_random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]


def test_a_stream_depends_on_its_seed_alone() -> None:
    found = []
    for seed in (2**62 + 1, 2**62 + 1, 2**62 + 2, 1):
        random.seed(len(found))
        with RandomStream(seed):
            found.append((draw(), draw()))
    assert found[0] == found[1]
    numbers = {number for pair in (found[0], found[2], found[3]) for part in pair for number in part}
    assert len(numbers) == 30


def test_a_stream_leaves_the_shared_generators_unchanged() -> None:
    random.seed(1)
    np.random.seed(2)
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(2)
    found = [draw()]
    with RandomStream(3):
        draw()
        random.seed(4)
        np.random.seed(5)
    assert [*found, draw()] == expected


def test_other_threads_draw_from_the_shared_generators() -> None:
    random.seed(1)
    expected = [random.random(), random.random()]
    random.seed(1)
    found: list[float] = []
    with RandomStream(3):
        for _ in range(2):
            random.random()
            thread = threading.Thread(target=lambda: found.append(random.random()))
            thread.start()
            thread.join()
    assert found == expected


def test_streams_nest_and_end_with_an_error() -> None:
    with RandomStream(3):
        expected = draw(), draw()
    with RandomStream(3):
        first = draw()
        with pytest.raises(ZeroDivisionError), RandomStream(4):
            _ = draw()[0] / 0
        assert (first, draw()) == expected


def test_a_watched_stream_accepts_draws_of_other_threads() -> None:
    with RandomStream(3, is_watched=True):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        draw()


def test_functions_keep_their_names_and_pickle() -> None:
    for function in (random.random, random.randint, np.random.rand, np.random.seed, torch.get_rng_state):
        assert pickle.loads(pickle.dumps(function)) is function
    assert random.randint.__name__ == "randint"
    assert list(inspect.signature(random.randint).parameters) == ["a", "b"]


def functions() -> list[Any]:
    return [torch.get_rng_state, torch.random.get_rng_state, random.random, imported_random, np.random.rand]


def test_functions_are_replaced_once_whatever_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread is held in the middle, and the second one gets all the time that it needs."""
    before, real, begun, goes_on = functions(), process_random._replace_everywhere, threading.Event(), threading.Event()
    replaced: list[int] = []

    def replace(routed: Any) -> None:
        replaced.append(threading.get_ident())
        begun.set()
        assert goes_on.wait(50)
        real(routed)

    monkeypatch.setattr(process_random, "_shared", {})
    monkeypatch.setattr(process_random, "_replace_everywhere", replace)
    first = threading.Thread(target=route_shared_generators)
    first.start()
    assert begun.wait(50)
    second = threading.Thread(target=route_shared_generators)
    second.start()
    second.join(0.3)
    goes_on.set()
    first.join(50)
    second.join(50)
    assert len(replaced) == 3  # torch, random, numpy.random
    assert len(set(replaced)) == 1
    assert all(map(operator.is_, functions(), before))


def test_an_interrupted_replacement_is_completed_with_the_same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = functions()
    monkeypatch.setattr(torch.random, "get_rng_state", torch.random.get_rng_state.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(process_random, "_shared", {})
    route_shared_generators()
    assert all(map(operator.is_, functions(), before))
    with RandomStream(3):
        expected = draw()
    with RandomStream(3, is_watched=True):
        assert draw() == expected


# The state of torch's generator.


@pytest.fixture
def shared_state() -> torch.Tensor:
    """The state of the shared generator, which must stay."""
    torch.manual_seed(5)
    return torch.get_rng_state()


def test_state_functions_of_torch_act_on_the_stream(shared_state: torch.Tensor) -> None:
    with RandomStream(3):
        start = torch.get_rng_state()
        assert torch.equal(start, torch.Generator().manual_seed(3).get_state())
        assert (torch.initial_seed(), torch.random.initial_seed()) == (3, 3)
        with torch.random.fork_rng(devices=[]):
            assert torch.manual_seed(-1).initial_seed() == 2**64 - 1
            assert not torch.equal(torch.get_rng_state(), start)
        assert torch.equal(torch.get_rng_state(), start)
        seeds = [torch.seed()]
        assert torch.initial_seed() == seeds[0]
    with RandomStream(3):
        seeds.append(torch.seed())
    assert seeds[0] == seeds[1]
    assert torch.equal(torch.get_rng_state(), shared_state)
    assert torch.initial_seed() == 5


def test_a_backward_pass_acts_on_the_stream_it_began_in(shared_state: torch.Tensor) -> None:
    """On a GPU autograd runs it on another thread, to which it passes torch's thread-local state on."""
    seen = []

    def note(gradient: torch.Tensor) -> None:
        seen.append((torch.initial_seed(), random.random()))

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(note)
    with RandomStream(3):
        expected = random.random()
    with RandomStream(3):
        y.sum().backward()
    assert seen == [(3, expected)]
