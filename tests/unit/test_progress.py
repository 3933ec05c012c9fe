"""What is told of the phases before the first step: lines in the log, to watchers, and the present phase."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import nn

from helpers_parity import batch, mse
from roundpipe import RoundPipe, RoundPipeRunConfig, progress
from roundpipe.devices.interface import MemoryUse
from roundpipe.devices.virtual import VirtualDevice
from roundpipe.progress import phase, present_phase, watched_by


def test_the_innermost_phase_is_the_present_one_and_long_phases_tell_their_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(clock)))
    caplog.set_level(logging.INFO, "roundpipe")
    seen: list[str] = []
    assert present_phase() is None
    with watched_by(seen.append), phase("outer"):
        with phase("inner"):
            now = present_phase()
            assert now is not None
            assert now.what == "inner"
            assert now.seconds == 2.0
        assert present_phase() == ("outer", 0.0)
    assert present_phase() is None
    assert seen == caplog.messages == ["outer", "inner", "inner: done in 4.0 s", "outer: done in 8.0 s"]
    with phase("unwatched"):
        pass
    assert len(seen) == 4


def test_a_phase_that_fails_ends() -> None:
    with pytest.raises(KeyError), phase("fails"):
        raise KeyError
    assert present_phase() is None


def test_a_watcher_that_cannot_write_fails_no_training() -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    with watched_by(closed), phase("goes on"):
        pass


def test_phases_of_wrapping_and_of_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualDevice, "memory_limit_bytes", lambda self: 10**9)
    monkeypatch.setattr(VirtualDevice, "memory_use", lambda self: MemoryUse(0, 0))
    seen: list[str] = []
    config, x = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean"), batch(4, 8)
    net, compiled = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"backend": "aot_eager"}
    with (
        watched_by(seen.append),
        RoundPipe(net, name="net", devices=["cpu"], model_run_config=config, compile=compiled) as model,
    ):
        for _ in range(2):
            model.forward_backward((x,), label=x, loss_fn=mse)
    assert [line for line in seen if "done in" not in line] == [
        "moving 5.76e-07 GB of weights into the host memory of 2 layers",
        "net: compiling its layers for microbatches of new sizes or settings",
        "net: measuring the device memory that its layers take, in a forward pass",
    ]


def test_phases_of_splitting_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "models"))
    from small_models import small, wrapped

    seen: list[str] = []
    with watched_by(seen.append), wrapped(small("llama")):
        pass
    assert [line for line in seen if "done in" not in line][:2] == [
        "LlamaForCausalLM: finding its layers in trial runs on the CPU",
        "LlamaForCausalLM: comparing its layers with the model",
    ]


def test_the_live_view_shows_the_present_phase() -> None:
    pytest.importorskip("rich")
    from roundpipe.report.live_view import RunState, render_text

    assert "net: compiling" not in render_text(RunState())
    with phase("net: compiling"):
        assert "net: compiling" in render_text(RunState())
