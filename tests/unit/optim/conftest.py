"""Fixtures of the tests of the kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roundpipe.optim.native import library

PROCESSORS = {"any": 0, "avx2": 1, "avx512": 2}


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    loaded = library.load()
    assert loaded is not None, "the tests need a C compiler"
    try:
        if loaded.roundpipe_use_processor(PROCESSORS[request.param]) != PROCESSORS[request.param]:
            pytest.skip(f"this processor has no {request.param}")
        yield request.param
    finally:
        loaded.roundpipe_use_processor(max(PROCESSORS.values()))
