"""What holds for every test."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from hashlib import sha256

import pytest
import torch

from roundpipe.optim.native.kernel import KernelParameter, OnePassKernel


def pytest_collection_finish() -> None:
    """Exempt what is imported by now from garbage collection: many tests collect, and scanning it takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark combinations of parameters as further ones if each of their values also occurs in one that is not marked.

    `make test` leaves them out, and `make test-slow` runs them. The choice depends on the names of the tests alone.
    """
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "models", "gpu"))):
            tests[item.nodeid.partition("[")[0]].append(item)
    for combinations in tests.values():
        values = [[_key(*given) for given in item.callspec.params.items()] for item in combinations]
        left = Counter(itertools.chain.from_iterable(values))
        by_hash = sorted(
            zip(combinations, values, strict=True), key=lambda each: sha256(each[0].name.encode()).digest()
        )
        for item, own in by_hash:
            if all(left[value] > 1 for value in own):
                left.subtract(own)
                item.add_marker("further")


def _key(name: str, value: object) -> tuple[str, type, object]:
    """A parameter as a key of a dict; values that cannot be compared are different ones."""
    try:
        hash(value)
    except TypeError:
        value = id(value)
    return name, type(value), value


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
