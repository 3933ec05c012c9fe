"""What tests of trainers have in common."""

from __future__ import annotations

import pytest

import roundpipe.integrations.run_view as run_view


@pytest.fixture
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers write no report at the end of a run: drawing it takes longer than the runs of these tests."""
    monkeypatch.setattr(run_view, "write_report", lambda folder: folder)
