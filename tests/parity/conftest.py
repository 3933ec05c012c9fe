"""What every parity test uses: a wrapper that closes its models, and every device count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_parity import DEVICE_COUNTS, Models


@pytest.fixture
def models() -> Iterator[Models]:
    models = Models()
    yield models
    models.close()


@pytest.fixture(params=DEVICE_COUNTS, ids=lambda count: f"{count}dev")
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)
