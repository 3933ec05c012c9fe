"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_per_kernel() -> Iterator[None]:
    """The models are tiny; more threads only cost time. test_calling_context has one test with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A shell starts background jobs with SIGINT ignored, which is inherited: Ctrl-C tests would test nothing."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
