"""What every parity test uses: a wrapper that closes its models, and every device count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers_parity import DEVICE_COUNTS, Models


@pytest.fixture(autouse=True)
def _one_thread_per_kernel() -> Iterator[None]:
    """The models are tiny; more threads only cost time. test_calling_context has one test with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def models() -> Iterator[Models]:
    models = Models()
    yield models
    models.close()


@pytest.fixture(params=DEVICE_COUNTS, ids=lambda count: f"{count}dev")
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)
