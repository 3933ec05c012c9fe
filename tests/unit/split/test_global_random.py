"""own_generators gives a thread exclusive use of Python's and numpy's generators, seeded from torch's generator."""

from __future__ import annotations

import random
import sys
import threading
import time

import numpy as np
import pytest
import torch

from roundpipe.split.determinism import fresh_generators, own_generators, state_of_generators


def draw() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_the_same_torch_seed_gives_the_same_numbers() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with own_generators():
            found.append((draw(), draw()))
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[0][0] != found[0][1]


def test_the_generators_state_is_restored_afterwards() -> None:
    random.seed(5)
    np.random.seed(6)
    expected = [draw(), draw()]
    random.seed(5)
    np.random.seed(6)
    assert draw() == expected[0]
    with own_generators():
        draw()
    assert draw() == expected[1]


def test_the_generators_state_is_restored_after_an_error() -> None:
    before = state_of_generators()

    def fail() -> None:
        draw()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), own_generators():
        fail()
    assert state_of_generators() == before


def test_own_generators_can_be_nested() -> None:
    torch.manual_seed(1)
    with own_generators():
        first = draw()
        with own_generators():
            draw()
        second = draw()
    torch.manual_seed(1)
    with own_generators():
        assert (draw(), draw()) == (first, second)


def test_the_state_shows_whether_a_number_was_drawn() -> None:
    for way in (random.random, np.random.rand, lambda: random.gauss(0, 1), np.random.randn):
        before = state_of_generators()
        assert state_of_generators() == before
        way()
        assert state_of_generators() != before


def test_fresh_generators_are_in_a_new_state_each_time() -> None:
    with own_generators():
        first = fresh_generators()
        assert state_of_generators() == first
        assert fresh_generators() != first


def test_threads_do_not_draw_from_each_others_numbers() -> None:
    """Each thread gets the numbers of its own seed, although another thread wants to draw meanwhile."""
    expected = {}
    for seed in range(6):
        torch.manual_seed(seed)
        with own_generators():
            expected[seed] = [draw() for _ in range(4)]
    found: dict[int, list[tuple[float, float]]] = {}
    seeding = threading.Lock()

    def run(seed: int) -> None:
        with seeding:  # torch's generator is shared; what comes after it is not
            torch.manual_seed(seed)
            context = own_generators()
            context.__enter__()
        numbers = []
        for _ in range(4):
            numbers.append(draw())
            time.sleep(0.001)
        found[seed] = numbers
        context.__exit__(None, None, None)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_without_numpy_pythons_generator_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    before = state_of_generators()
    assert before[1] is None
    torch.manual_seed(1)
    with own_generators():
        fresh_generators()
        random.random()
    assert state_of_generators() == before
