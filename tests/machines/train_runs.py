"""Runs of `roundpipe train` in the processes of a pool: with the environment of torchrun, in the group of the pool."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Sequence
from typing import Any

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def command(
    rank: int,
    size: int,
    words: Sequence[str],
    more: Sequence[Sequence[str]] = (),
    variables: dict[str, str] | None = None,
    stop: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """Run a command line; returns its exit code, what it has printed, and the losses of the trainer.

    more: further words for each rank. `stop`: (rank, step, signal): sends the signal in the middle of the step.
    """
    from accelerate.state import AcceleratorState

    from roundpipe.__main__ import main
    from roundpipe.integrations import run_view

    run_view.write_report = lambda folder: None  # type: ignore[assignment]
    values = (rank, size, rank, size, "127.0.0.1", 29500, 1)
    os.environ.update({name: str(value) for name, value in zip(NAMES, values, strict=True)} if size > 1 else {})
    os.environ.update(variables or {})
    out, err, seen = io.StringIO(), io.StringIO(), _Seen(rank, stop)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), seen:
            code = main([*words, *(more[rank] if more else ())])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in (*NAMES, *(variables or {})):
            os.environ.pop(name, None)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "losses": seen.losses}


class _Seen(contextlib.AbstractContextManager["_Seen"]):
    """Notes the losses of training steps, and sends a signal in one of them."""

    def __init__(self, rank: int, stop: tuple[int, int, int] | None) -> None:
        self.losses: list[float] = []
        self._rank, self._stop = rank, stop

    def __enter__(self) -> _Seen:
        from roundpipe.integrations.trainer import RoundPipeMixin

        self._original = original = RoundPipeMixin.training_step

        def training_step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            loss = original(trainer, *args, **kwargs)
            self.losses.append(float(loss))
            if self._stop is not None and (self._rank, len(self.losses)) == self._stop[:2]:
                signal.raise_signal(self._stop[2])
            return loss

        RoundPipeMixin.training_step = training_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        from roundpipe.integrations.trainer import RoundPipeMixin

        RoundPipeMixin.training_step = self._original  # type: ignore[method-assign]
