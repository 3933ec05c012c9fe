"""While models are split, garbage is collected rarely, and afterwards as before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from roundpipe.split.splitter import rare_collections


@pytest.fixture(autouse=True)
def _thresholds_of_the_session() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 10, 10), (10**6, 3, 4)])
def test_collections_are_as_they_were(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)
    within = []

    def fails_inside() -> None:
        with rare_collections():
            with rare_collections():
                within.append(gc.get_threshold()[0])
            within.append(gc.get_threshold()[0])
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert gc.get_threshold() == thresholds
    assert within == 2 * [0 if thresholds[0] == 0 else max(thresholds[0], 200_000)]


def test_two_threads_that_split_models_leave_collections_as_they_were() -> None:
    """The second one begins before the first one ends, and ends after it."""
    gc.set_threshold(700, 10, 10)
    first_is_inside, second_is_inside, first_has_ended = threading.Event(), threading.Event(), threading.Event()
    while_one_is_inside = []

    def second() -> None:
        assert first_is_inside.wait(50)
        with rare_collections():
            second_is_inside.set()
            assert first_has_ended.wait(50)
            while_one_is_inside.append(gc.get_threshold()[0])

    thread = threading.Thread(target=second)
    thread.start()
    with rare_collections():
        first_is_inside.set()
        assert second_is_inside.wait(50)
    first_has_ended.set()
    thread.join(50)
    assert while_one_is_inside == [200_000]
    assert gc.get_threshold() == (700, 10, 10)
