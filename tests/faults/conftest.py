"""Every fault test starts and ends without a thread of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers_faults import wait_for_no_threads


@pytest.fixture(autouse=True)
def _one_thread_per_kernel() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    """Also gives each test devices of its own: a pool lives for as long as a model uses it."""
    wait_for_no_threads()
    yield
    wait_for_no_threads()
