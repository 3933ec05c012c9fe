"""What tests of the runtime share: the log of device operations, and models that are closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from recorded_runs import Recorder, logged_model

from roundpipe import RoundPipe


class MakeModel(Protocol):
    def __call__(self, **options: Any) -> RoundPipe: ...


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture
def make_model(recorder: Recorder) -> Iterator[MakeModel]:
    """Makes models of three logged layers; `num_devices`, `grain` and `plan` as in `logged_model`."""
    made: list[RoundPipe] = []

    def make(**options: Any) -> RoundPipe:
        made.append(logged_model(recorder.note, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
