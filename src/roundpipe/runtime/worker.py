"""A thread that runs one device's tasks in the order they were dealt.

Owned by runtime.pool. A task that fails fails its run and nothing else: the worker goes on with the next task.
"""

from __future__ import annotations

import threading
from collections import deque

from roundpipe.devices import Device
from roundpipe.plan import StageTask
from roundpipe.runtime.images import LayerImages
from roundpipe.runtime.landing import LandingThread
from roundpipe.runtime.run import Run, RunCancelled
from roundpipe.runtime.stage import StageRunner
from roundpipe.waiting import THREAD_PREFIX

_Job = tuple[Run, StageTask]


class Worker:
    def __init__(self, device: Device, landing: LandingThread) -> None:
        self.device = device
        self._jobs: deque[_Job | None] = deque()
        self._ready = threading.Condition()
        self._images = LayerImages(device)
        self._runner = StageRunner(device, landing, self._images, self._prefetch_next)
        self._thread = threading.Thread(target=self._loop, name=f"{THREAD_PREFIX}{device.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, run: Run, task: StageTask) -> None:
        self._put((run, task))

    def stop(self) -> None:
        self._put(None)

    def join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _put(self, job: _Job | None) -> None:
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()

    def _next(self) -> _Job | None:
        with self._ready:
            self._ready.wait_for(lambda: self._jobs)
            return self._jobs.popleft()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            self._carry_out(*job)
            del job  # an idle worker keeps no run, and so no model, alive

    def _carry_out(self, run: Run, task: StageTask) -> None:
        try:
            if not run.failed:
                self._runner.run(run, task)
        except RunCancelled:
            pass
        except BaseException as error:
            error.add_note(self._runner.place.note())
            run.fail(error)
        finally:
            self._images.finish(run, task)
            run.task_done()

    def _prefetch_next(self) -> None:
        with self._ready:
            job = self._jobs[0] if self._jobs else None
        if job is not None:
            self._images.prefetch(*job)
