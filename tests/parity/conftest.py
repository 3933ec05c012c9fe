"""What parity tests share: a wrapper that closes its models, and the device counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_parity import DEVICE_COUNTS, Models

# One device, and several that deal the tasks of a call in turn. The other counts are slow, except in the tests of
# fused and plain calls that name DEVICE_COUNTS themselves.
FAST_DEVICE_COUNTS = (1, 3)


@pytest.fixture
def models() -> Iterator[Models]:
    models = Models()
    yield models
    models.close()


def _count(count: int) -> object:
    marks = () if count in FAST_DEVICE_COUNTS else pytest.mark.slow
    return pytest.param(count, id=f"{count}dev", marks=marks)


@pytest.fixture(params=map(_count, DEVICE_COUNTS))
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)
