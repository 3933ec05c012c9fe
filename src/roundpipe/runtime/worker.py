"""A thread that runs one device's tasks in the order they were dealt.

Owned by runtime.pool. A task that fails fails its run and nothing else: the worker goes on with the next task.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from roundpipe.devices import Device
from roundpipe.errors import ClosedError, add_note
from roundpipe.plan import StageTask
from roundpipe.runtime.images import LayerImages
from roundpipe.runtime.landing import LandingThread
from roundpipe.runtime.place import Place
from roundpipe.runtime.run import Run, RunCancelled
from roundpipe.runtime.stage import StageRunner
from roundpipe.waiting import THREAD_PREFIX, Monitor

_Job = tuple[Run, StageTask]


class Worker:
    def __init__(self, device: Device, landing: LandingThread) -> None:
        self.device = device
        self._jobs: deque[_Job] = deque()
        self._current: Run | None = None
        self._stopping = False
        self._is_to_release = False
        self._queue = Monitor()
        self._images = LayerImages(device)
        self._runner = StageRunner(device, landing, self._images, self._prefetch_next)
        self.thread = threading.Thread(target=self._loop, name=f"{THREAD_PREFIX}{device.name}", daemon=True)

    def submit(self, run: Run, task: StageTask) -> None:
        with self._queue:
            self._jobs.append((run, task))
            self._queue.changed()

    def release_unused(self) -> None:
        """Before the next task."""
        self._is_to_release = True

    def stop(self) -> None:
        """End after the present layer; what was still to be done fails."""
        with self._queue:
            self._stopping = True
            runs = [run for run, _ in self._jobs] + ([self._current] if self._current is not None else [])
            self._queue.changed()
        for run in runs:
            run.fail(ClosedError("the device pool was closed while this call was running"))

    def _next(self) -> _Job | None:
        with self._queue:
            self._current = None  # an idle worker keeps no run, and so no model, alive
            self._queue.idle_until(lambda: bool(self._jobs) or self._stopping)
            if self._stopping:
                return None
            self._current = self._jobs[0][0]
            return self._jobs.popleft()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            self._carry_out(*job)
            del job
        self.device.close()

    def _carry_out(self, run: Run, task: StageTask) -> None:
        try:
            if self._is_to_release:
                self._is_to_release = False
                self._runner.release_unused()
            if not run.failed:
                self._runner.run(run, task)
        except RunCancelled:
            pass
        except BaseException as error:
            add_note(error, self._runner.place.note())
            run.fail(error)
        finally:
            self._tidy_up(run, task)

    def _tidy_up(self, run: Run, task: StageTask) -> None:
        try:
            self._images.finish(run, task)
        except BaseException as error:  # a device in a bad state must not take the worker down with it
            add_note(error, f"while freeing what {task} of {run!r} used on {self.device.name}")
            run.fail(error)
        finally:
            run.task_done()

    def _prefetch_next(self, within_room: bool) -> None:
        """What goes wrong here concerns the next task; the present one goes on."""
        with self._queue:
            job = self._jobs[0] if self._jobs else None
        if job is None:
            return
        place = Place()
        place.enter(*job, self.device.name)
        try:
            self._images.prefetch(*job, place, within_room=within_room)
        except torch.OutOfMemoryError:
            pass  # then its upload waits for its turn
        except BaseException as error:
            add_note(error, place.note())
            job[0].fail(error)
