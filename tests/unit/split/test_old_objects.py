"""While a model is split, garbage collection leaves old objects out, and afterwards it is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from roundpipe.split.splitter import old_objects_aside


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """The test session has its own objects frozen."""
    was_frozen, thresholds = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.unfreeze()
    yield
    gc.set_threshold(*thresholds)
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 10, 10), (10**6, 3, 4)])
def test_collections_are_as_they_were(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)
    within = []

    def fails_inside() -> None:
        with old_objects_aside():
            with old_objects_aside():
                within.append(gc.get_threshold()[0])
            assert gc.get_freeze_count() > 0
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
    assert within == [0 if thresholds[0] == 0 else max(thresholds[0], 200_000)]


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_that_the_user_froze_stay_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with old_objects_aside():
        assert gc.get_threshold()[0] < 200_000
    assert gc.get_freeze_count() == count
