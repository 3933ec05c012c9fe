"""One pool of processes for all tests of machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers_machines import MachinePool


@pytest.fixture(scope="session")
def pool() -> Iterator[MachinePool]:
    """Processes that stay alive between tests."""
    made = MachinePool()
    yield made
    made.close()
