"""Fixtures for tests of split models: a wrapper that closes its models, and several device counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_split import SplitModels


@pytest.fixture
def models() -> Iterator[SplitModels]:
    models = SplitModels()
    yield models
    models.close()


@pytest.fixture(params=(1, pytest.param(2, marks=pytest.mark.slow), 3), ids=lambda count: f"{count}dev")
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)
