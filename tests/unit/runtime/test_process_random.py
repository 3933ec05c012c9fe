"""ProcessRandomStream: a separate stream per thread for `random` and `numpy.random`."""

from __future__ import annotations

import inspect
import pickle
import random
import threading
from random import random as imported_random

import numpy as np
import pytest

from roundpipe.runtime import rng as process_random
from roundpipe.runtime.rng import ProcessRandomStream, route_shared_generators


@pytest.fixture(autouse=True)
def routed() -> None:
    route_shared_generators()


def draw() -> list[float]:
    return [random.random(), imported_random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]


def test_a_stream_depends_on_its_seed_alone() -> None:
    found = []
    for seed in (2**62 + 1, 2**62 + 1, 2**62 + 2, 1):
        random.seed(len(found))
        with ProcessRandomStream(seed):
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
    with ProcessRandomStream(3):
        draw()
        random.seed(4)
        np.random.seed(5)
    assert [*found, draw()] == expected


def test_other_threads_draw_from_the_shared_generators() -> None:
    random.seed(1)
    expected = [random.random(), random.random()]
    random.seed(1)
    found: list[float] = []
    with ProcessRandomStream(3):
        for _ in range(2):
            random.random()
            thread = threading.Thread(target=lambda: found.append(random.random()))
            thread.start()
            thread.join()
    assert found == expected


def test_streams_nest_and_end_with_an_error() -> None:
    with ProcessRandomStream(3):
        expected = draw(), draw()
    with ProcessRandomStream(3):
        first = draw()
        with pytest.raises(ZeroDivisionError), ProcessRandomStream(4):
            _ = draw()[0] / 0
        assert (first, draw()) == expected


def test_a_watched_stream_accepts_draws_of_other_threads() -> None:
    with ProcessRandomStream(3, is_watched=True):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        draw()


def test_functions_keep_their_names_and_pickle() -> None:
    for function in (random.random, random.randint, np.random.rand, np.random.seed):
        assert pickle.loads(pickle.dumps(function)) is function
    assert random.randint.__name__ == "randint"
    assert list(inspect.signature(random.randint).parameters) == ["a", "b"]


def test_threads_may_replace_the_functions_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_random, "_shared", {})
    for _ in range(2):
        process_random._shared.clear()
        route_shared_generators()
    with ProcessRandomStream(3):
        expected = draw()
    with ProcessRandomStream(3, is_watched=True):
        assert draw() == expected
