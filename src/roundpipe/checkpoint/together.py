"""Several machines that save or load one checkpoint together: each step of it succeeds on all of them or fails on all.

Knows what machines tell each other, never files or tensors.

[Note: saving together] `save` runs in phases on the thread of the caller. In each phase every machine does its part and
tells all others whether that worked; if one has failed, all raise. Then every machine writes its files in the
background, and `Progress` tells all machines at least once a second how far each is. When all machines
have flushed their files to the disk, rank 0 writes the manifest and names the folder. So a machine that fails or ends
is known to all of them within a second, however long the files take, and the folder never gets its name without the
files of all machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from roundpipe.distributed.line import Line, Payload, described
from roundpipe.distributed.machines import Machines
from roundpipe.errors import MachineError
from roundpipe.monitor import THREAD_PREFIX, Monitor, start_thread

_BEAT_S = (0.02, 1.0)  # time between two reports: after a change, and after a long time without one
_FAILED, _WRITING, _WRITTEN, _COMPLETE = "failed", "writing", "written", "complete"


def together(
    machines: Machines,
    what: str,
    work: Callable[[], Payload],
    then: Callable[[list[Payload]], object] | None = None,
) -> list[Payload]:
    """Do this machine's part of `what`; return what `work` gives on all machines, by rank.

    If it fails on one machine, that one raises its exception and all others MachineError. Otherwise `then` runs on all
    machines, on a thread that no signal handler can interrupt.
    """
    failure: Exception | None = None
    answer: Payload
    try:
        answer = {"gives": work()}
    except Exception as error:
        failure, answer = error, {_FAILED: described(error)}

    def proceed(answers: list[Payload]) -> list[Payload]:
        if then is not None and not any(_FAILED in each for each in answers):
            then([each["gives"] for each in answers])
        return answers

    answers = machines.together(what, answer, proceed)
    if failure is not None:
        raise failure
    for rank, each in enumerate(answers):
        if _FAILED in each:
            raise MachineError(rank, f"{what}: rank {rank} has failed: {each[_FAILED]}")
    return [each["gives"] for each in answers]


def require_same(answers: Sequence[Payload], key: str, call: str) -> None:
    """Raise MachineError, on all machines, if one has passed another argument `key` to `call` than rank 0."""
    for rank, answer in enumerate(answers):
        if answer[key] != answers[0][key]:
            raise MachineError(
                rank,
                f"{call} got {key}={answer[key]} on rank {rank} and {key}={answers[0][key]} on rank 0. Pass the same "
                "arguments on all machines.",
            )


def outcome_of(work: Callable[[], Any]) -> Callable[[], Any]:
    """Call `work` and return a function that returns its result, or raises its exception.

    Gradients that were gathered are dropped on all machines if a call of the model raises. A checkpoint that cannot be
    saved or loaded changes no gradient, so the exception is raised after the call.
    """
    try:
        result = work()
    except Exception as error:
        failure = error

        def fail() -> Any:
            raise failure

        return fail
    return lambda: result


class Progress:
    """How far all machines are with the files of one checkpoint: see [Note: saving together]."""

    def __init__(self, line: Line, monitor: Monitor, name: str) -> None:
        """`name`: of the checkpoint, the same on all machines."""
        self.failure: MachineError | None = None  # of another machine
        self.parts: list[Payload] | None = None  # what each machine has written, once all have
        self._line, self._monitor, self._name = line, monitor, name
        self._own: Payload = {"is": _WRITING}
        self._parts: dict[int, Payload] = {}
        self._beat_s, self._seen = _BEAT_S[0], list[str]()
        self._has_ended = False

    def start(self) -> None:
        """Begin to exchange reports with the other machines."""
        name = f"{THREAD_PREFIX}save-progress"
        start_thread(threading.Thread(target=self._run, name=name, daemon=False))

    # Called by the thread that saves.

    def written(self, part: Payload) -> list[Payload]:
        """Report that this machine's files are on the disk. Waits for all machines; returns their parts, by rank."""
        self._report({"is": _WRITTEN, "part": part})
        with self._monitor:
            self._monitor.wait_until(
                lambda: self.parts is not None or self._has_ended, f"the other machines to write {self._name}"
            )
        if self.parts is None:
            assert self.failure is not None
            raise self.failure
        return self.parts

    def complete(self) -> None:
        """Report on rank 0 that the checkpoint is complete; on the others wait for that report."""
        if self._line.rank == 0:
            self._report({"is": _COMPLETE})
        self._wait_for_end()
        if self.failure is not None:
            raise self.failure

    def failed(self, error: BaseException) -> None:
        """Report a failure of this machine, unless another one has failed before it."""
        self.report_failure(described(error))
        self._wait_for_end()

    def report_failure(self, reason: str) -> None:
        """As `failed`, without waiting."""
        self._report({"is": _FAILED, "why": reason})

    def _wait_for_end(self) -> None:
        with self._monitor:
            self._monitor.wait_until(lambda: self._has_ended, f"the other machines to complete {self._name}")

    def _report(self, own: Payload) -> None:
        with self._monitor:
            self._own = own
            self._monitor.changed()

    # On the thread of the reports.

    def _run(self) -> None:
        try:
            while not self._exchange():
                pass
        except MachineError as error:
            self.failure = error
        except BaseException as error:  # such as StallError: this machine cannot go on
            self.failure = MachineError(None, f"{self._name} could not be completed: {described(error)}")
        with self._monitor:
            self._has_ended = True
            self._monitor.changed()

    def _exchange(self) -> bool:
        """Exchange reports once; returns whether the checkpoint is complete or has failed. Equal on all machines."""
        own = self._own
        what = f"the files of {self._name}"
        answers = self._line.call(lambda: self._line.agree(what, own), f"the other machines ({what})")
        if "part" in own:
            with self._monitor:
                if self._own is own:
                    own = self._own = {"is": own["is"]}  # sent once
        for rank, answer in enumerate(answers):
            if "part" in answer:
                self._parts[rank] = answer["part"]
        failed = [(rank, answer["why"]) for rank, answer in enumerate(answers) if answer["is"] == _FAILED]
        if failed:
            rank, reason = failed[0]
            self.failure = MachineError(rank, f"the checkpoint {self._name} failed on rank {rank}: {reason}")
            return True
        if answers[0]["is"] == _COMPLETE:
            return True
        seen = [answer["is"] for answer in answers]
        self._beat_s = min(1.5 * self._beat_s, _BEAT_S[1]) if seen == self._seen else _BEAT_S[0]
        self._seen = seen
        with self._monitor:
            if self.parts is None and len(self._parts) == len(answers):
                self.parts = [part for _, part in sorted(self._parts.items())]
                self._monitor.changed()
            self._monitor.wait_until(lambda: self._own is not own, f"{self._name} to be written", self._beat_s)
        return False
