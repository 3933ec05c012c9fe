"""Where a worker is, kept up to date so that an exception can say so."""

from __future__ import annotations

from roundpipe.plan import StageTask
from roundpipe.runtime.run import Run


class Place:
    def __init__(self) -> None:
        self.microbatch: int | None = None
        self._task, self._layer_id, self._phase, self._device = "", None, "", ""  # type: tuple[str, int | None, str, str]

    def enter(self, run: Run, task: StageTask, device: str) -> None:
        self._task, self._device = f"{task} of {run!r}", device
        self._layer_id, self._phase, self.microbatch = None, "set-up", None

    def at(self, layer_id: int | None, phase: str) -> None:
        self._layer_id, self._phase = layer_id, phase

    def note(self) -> str:
        layer = "" if self._layer_id is None else f"layer {self._layer_id}, "
        microbatch = "" if self.microbatch is None else f"microbatch {self.microbatch}, "
        return f"while running {self._task}: {layer}{microbatch}{self._phase} on {self._device}"
