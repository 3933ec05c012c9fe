"""Fixtures: a model in training, and the check that a refused input has not changed it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from bad_input_scene import Scene, assert_same, undisturbed


@pytest.fixture(scope="package", autouse=True)
def one_thread_per_worker() -> Iterator[None]:
    """One thread per operator: these models are so small that more threads only slow them down."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@contextlib.contextmanager
def unharmed() -> Iterator[Scene]:
    expected_present, expected_future = undisturbed()
    made = Scene()
    try:
        yield made
        assert_same(made.present(), expected_present)
        assert_same(made.future(), expected_future)
    finally:
        made.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with unharmed() as made:
        yield made


@pytest.fixture(scope="module")
def bystander() -> Iterator[Scene]:
    """The scene for tests that wrap other models on the same devices: the wrapping is refused."""
    with unharmed() as made:
        yield made
