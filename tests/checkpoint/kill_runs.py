"""Trains in child processes that are killed with SIGKILL again and again, and resumes from the latest checkpoint.

    python tests/checkpoint/kill_runs.py [NUMBER_OF_KILLS [NUMBER_OF_STEPS]]

Each run is killed at the moment that its seed chooses: at a random call into the file system of a save, a random short
time after a save has begun, or a random time after the start. Runs are forked from this process, which has imported
torch and has no threads. The losses of all runs together must equal those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

import torch

from helpers_checkpoint import Training
from helpers_files import watched_files
from roundpipe import checkpoint

SAVE_EVERY, KEEP = 2, 2
_RECORD = struct.Struct("<cqd")  # what happened, the step, the loss
_BEGUN, _SAVES, _LOSS = b"b", b"s", b"l"
_LONGEST_S = 60.0


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a run is killed. One of the three is set."""

    file_call: int | None = None  # by itself, before the n-th change of a file since its start
    after_save_s: float | None = None  # by its parent, seconds after a save has begun
    after_start_s: float | None = None  # by its parent, seconds after training has begun


@dataclasses.dataclass
class Killed:
    """What many runs that were killed have shown."""

    losses: list[float]
    num_kills: int = 0
    num_in_saves: int = 0
    num_resumed: int = 0  # runs that began from a checkpoint
    seconds: float = 0.0


def train(
    folder: Path, num_steps: int, num_devices: int, is_async: bool, report: Callable[[bytes, int, float], None]
) -> None:
    """Train from the latest checkpoint, if there is one, to step `num_steps`."""
    torch.set_num_threads(1)
    training = Training(num_devices=num_devices, is_async=is_async)
    found = checkpoint.latest(folder)
    if found is not None:
        training.load(found)
    report(_BEGUN, training.step, 0.0)
    while training.step < num_steps:
        step = training.step
        report(_LOSS, step, training.train(1)[0])
        if training.step % SAVE_EVERY == 0:
            report(_SAVES, training.step, 0.0)
            pending = training.save(folder / f"step-{training.step}", keep=KEEP)
            if training.step % (4 * SAVE_EVERY) == 0:  # most saves go on beside the next step
                pending.wait()
    training.close()


def start(folder: Path, num_steps: int, num_devices: int, is_async: bool, kill_at_call: int | None) -> tuple[int, int]:
    """Fork a run. Returns its process and a pipe with its records."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    status = 1
    try:
        os.close(read)

        def report(kind: bytes, step: int, loss: float) -> None:
            os.write(write, _RECORD.pack(kind, step, loss))

        def before(number: int, what: str) -> None:
            if number == kill_at_call:
                os.kill(os.getpid(), signal.SIGKILL)

        with watched_files(folder, before):
            train(folder, num_steps, num_devices, is_async, report)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class _Run:
    """One run, as its parent sees it."""

    def __init__(self, folder: Path, num_steps: int, num_devices: int, is_async: bool, moment: Moment) -> None:
        self._moment = moment
        self._child, self._pipe = start(folder, num_steps, num_devices, is_async, moment.file_call)
        self.losses: dict[int, float] = {}
        self.first_step = 0
        os.set_blocking(self._pipe, False)

    def follow(self) -> int:
        """Read its records and kill it at its moment. Returns its exit status, negative if it was killed."""
        kill_at, deadline = None, time.monotonic() + _LONGEST_S
        while True:
            for kind in self._records():
                if kind == _BEGUN and self._moment.after_start_s is not None:
                    kill_at = time.monotonic() + self._moment.after_start_s
                if kind == _SAVES and self._moment.after_save_s is not None and kill_at is None:
                    kill_at = time.monotonic() + self._moment.after_save_s
            if kill_at is not None and time.monotonic() >= kill_at:
                os.kill(self._child, signal.SIGKILL)
                kill_at = None
            child, status = os.waitpid(self._child, os.WNOHANG)
            if child:
                list(self._records())
                os.close(self._pipe)
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "a run is stuck"
            time.sleep(2e-4)

    def _records(self) -> list[bytes]:
        try:
            content = os.read(self._pipe, 1 << 20)
        except BlockingIOError:
            return []
        kinds = []
        for kind, step, loss in _RECORD.iter_unpack(content):  # a record is written at once, so none is cut
            kinds.append(kind)
            if kind == _LOSS:
                self.losses[step] = loss
            elif kind == _BEGUN:
                self.first_step = step
        return kinds


def moment_of(generator: random.Random) -> Moment:
    """Two of three kills are meant to fall into saves."""
    kind = generator.randrange(3)
    if kind == 0:
        return Moment(file_call=generator.randrange(180))
    if kind == 1:
        return Moment(after_save_s=generator.random() ** 2 * 0.05)
    return Moment(after_start_s=generator.random() * 0.15)


def killed_runs(num_kills: int, num_steps: int, is_async: bool, seed: int) -> Killed:
    """Kill runs until `num_kills` are dead, then let one finish. Checks every loss that is computed twice."""
    generator, begin = random.Random(seed), time.monotonic()
    folder = Path(tempfile.mkdtemp())
    known: dict[int, float] = {}
    result, first_step, hidden = Killed([]), 0, set[str]()
    try:
        while True:
            is_last = result.num_kills == num_kills
            moment = Moment() if is_last else moment_of(generator)
            run = _Run(folder, num_steps, generator.randint(1, 3), is_async, moment)
            status = run.follow()
            for step, loss in run.losses.items():
                assert known.setdefault(step, loss) == loss, f"step {step}: {loss!r}, before {known[step]!r}"
            result.num_resumed += run.first_step > 0
            if status == 0:
                if is_last:
                    break
                shutil.rmtree(folder)  # the run was done before its moment: begin another one
                folder.mkdir()
                first_step, hidden = 0, set()
                continue
            assert status == -signal.SIGKILL, f"a run ended with status {status}"
            result.num_kills += 1
            left = _hidden(folder)
            result.num_in_saves += moment.file_call is not None or bool(left - hidden)
            # A complete checkpoint is never lost: a run begins where the one before it had saved, or later.
            step = _step_of(checkpoint.latest(folder))
            assert step >= first_step, f"step {first_step} was saved, {step} is the latest after a kill"
            first_step, hidden = step, left
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.losses = [known[step] for step in range(num_steps)]
    result.seconds = time.monotonic() - begin
    return result


def _hidden(folder: Path) -> set[str]:
    """The hidden names that saves give to folders and links for a moment."""
    return {path.name for path in folder.glob(".*")}


def _step_of(folder: Path | None) -> int:
    return 0 if folder is None else int(folder.name.removeprefix("step-"))


def undisturbed_losses(num_steps: int, is_async: bool) -> list[float]:
    """The losses of a run on one device that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(Path(folder), num_steps, 1, is_async, Moment())
        assert run.follow() == 0
    return [run.losses[step] for step in range(num_steps)]


def main() -> None:
    num_kills, num_steps = (*map(int, sys.argv[1:]), *(100, 200)[len(sys.argv) - 1 :])
    results = []
    for is_async, count in ((False, num_kills // 2), (True, num_kills - num_kills // 2)):
        expected = undisturbed_losses(num_steps, is_async)
        found = killed_runs(count, num_steps, is_async, seed=count)
        assert found.losses == expected, "the losses differ from those of the undisturbed run"
        results.append(found)
        sys.stdout.write(
            f"{'stale' if is_async else 'exact'} steps: {found.num_kills} kills, {found.num_in_saves} of them during a "
            f"save, {found.num_resumed} runs resumed, {num_steps} losses equal, {found.seconds:.0f} s\n"
        )
        sys.stdout.flush()
    in_saves = sum(one.num_in_saves for one in results)
    sys.stdout.write(f"{num_kills} kills, {in_saves} of them during a save: all losses equal the undisturbed run's\n")


if __name__ == "__main__":
    main()
