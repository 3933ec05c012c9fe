"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel


def pytest_collection_finish() -> None:
    """Exempt what is imported by now from garbage collection: many tests collect, and scanning it takes seconds."""
    gc.collect()
    gc.freeze()


def _set_threads_per_kernel() -> None:
    """One, unless OMP_NUM_THREADS is set: the models are tiny, and more threads only cost time."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True, scope="session")
def _threads_of_shared_fixtures() -> None:
    """Fixtures of modules run before those of tests, and tests compare with their results bit for bit."""
    _set_threads_per_kernel()


@pytest.fixture(autouse=True)
def _threads_per_kernel() -> Iterator[None]:
    """Also after a test that has changed the number."""
    yield
    _set_threads_per_kernel()


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A shell starts background jobs with SIGINT ignored, which is inherited: Ctrl-C tests would test nothing."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelParameter]]:
    """The parameters that the optimizer's kernel was given: a test that never reaches the kernel proves nothing."""
    seen: list[KernelParameter] = []
    real = OnePassKernel.update

    def update(self: OnePassKernel, parameters: list[KernelParameter]) -> None:
        seen.extend(parameters)
        real(self, parameters)

    monkeypatch.setattr(OnePassKernel, "update", update)
    yield seen
    seen.clear()
