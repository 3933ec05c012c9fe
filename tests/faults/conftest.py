"""Every fault test starts and ends without a thread of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_faults import wait_for_no_threads


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    """Also gives each test new devices: a pool lives as long as a model uses it."""
    wait_for_no_threads()
    yield
    wait_for_no_threads()
