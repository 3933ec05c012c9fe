"""The devices of a process, one worker thread for each, and the round-robin order in which tasks are dealt to them.

Models that name the same devices share one pool. It opens at first use and closes when the last model that uses it is
gone, or at exit. A worker runs its device's tasks in the order they were dealt. A task that fails makes its run fail;
the worker goes on with the next task.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from roundpipe.devices import Device, DeviceSpec, open_devices
from roundpipe.errors import ClosedError, add_note
from roundpipe.monitor import THREAD_PREFIX, Monitor, end_threads, follow_forks, has_started, process_lock, start_thread
from roundpipe.plan import StageTask, deal
from roundpipe.runtime.gradients import LandingThread
from roundpipe.runtime.replica import LayerImages
from roundpipe.runtime.run import Place, Run, RunCancelled
from roundpipe.runtime.stage import StageRunner

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
        """Return unused device memory before the next task."""
        self._is_to_release = True

    def stop(self) -> None:
        """End the thread soon, and make the runs of its unfinished tasks fail."""
        with self._queue:
            self._stopping = True
            runs = [run for run, _ in self._jobs] + ([self._current] if self._current is not None else [])
            self._queue.changed()
        for run in runs:
            run.fail(ClosedError("the device pool was closed while this call was running"))

    def _next(self) -> _Job | None:
        with self._queue:
            self._current = None  # an idle worker must not keep a run, and so a model, alive
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
                self._read_ahead()
                self._runner.run(run, task)
        except RunCancelled:
            pass
        except BaseException as error:
            if self._runner.place is not None:
                add_note(error, self._runner.place.note())
            run.fail(error)
        finally:
            self._runner.place = None  # the place holds the run
            self._tidy_up(run, task)

    def _tidy_up(self, run: Run, task: StageTask) -> None:
        try:
            self._images.finish(run, task)
        except BaseException as error:  # even if the device fails, the worker must go on
            add_note(error, f"while freeing what {task} of {run!r} used on {self.device.name}")
            run.fail(error)
        finally:
            run.task_done()

    def _read_ahead(self) -> None:
        """Begin to read what the next two tasks upload first, if it lies in mapped files.

        This task starts the uploads of the next one; what follows is read while they run.
        """
        with self._queue:
            jobs = list(itertools.islice(self._jobs, 2))
        for run, task in jobs:
            if run.store.has_mapped_weights:
                self._images.read_ahead(run, task)

    def _prefetch_next(self, within_room: bool) -> None:
        """Start uploads for the next task; see LayerImages.prefetch. A failure fails the next task's run only."""
        with self._queue:
            job = self._jobs[0] if self._jobs else None
        if job is None:
            return
        place = Place(*job, self.device.name)
        try:
            self._images.prefetch(*job, place, within_room=within_room)
        except torch.OutOfMemoryError:
            pass  # the next task uploads its weights when it begins
        except BaseException as error:
            add_note(error, place.note())
            job[0].fail(error)


_JOIN_S = 3.0
_pools: weakref.WeakValueDictionary[tuple[int, tuple[DeviceSpec, ...]], DevicePool] = weakref.WeakValueDictionary()
_pools_lock = process_lock()


class DevicePool:
    """Devices and their workers. `shared_pool` returns the pool that all models with the same devices use."""

    def __init__(self, specs: Sequence[DeviceSpec]) -> None:
        self.specs = tuple(specs)
        self.monitor = Monitor()
        self._lock = threading.Lock()
        self._next_device = 0
        self._open: _OpenPool | None = None

    @property
    def num_devices(self) -> int:
        return len(self.specs)

    def devices(self) -> list[Device]:
        return [worker.device for worker in self._opened().workers]

    def devices_while_open(self) -> Callable[[], Sequence[Device]]:
        """A function that returns the devices until the pool is closed, and does not keep it open."""
        reference = weakref.ref(self)

        def devices() -> Sequence[Device]:
            pool = reference()
            return () if pool is None or pool._open is None else pool.devices()

        return devices

    def submit(self, run: Run) -> None:
        """Deal the run's tasks round-robin, starting after the device of the previous run's last task, under one lock.

        Runs between which weights stay start on the first device, so that each finds the images of the one before.

        [Note: no deadlock] Every queue holds tasks in the order they were dealt, and a task only waits for tasks dealt
        before it. So the oldest unfinished task can always run.
        """
        opened = self._opened()
        with self._lock:
            first_device = self._next_device if run.residence.scope is None else 0
            run.workers = deal(run.tasks, first_device, self.num_devices)
            self._next_device = (first_device + len(run.tasks)) % self.num_devices
            for task, worker in zip(run.tasks, run.workers, strict=True):
                opened.workers[worker].submit(run, task)

    def release_unused(self) -> None:
        """Return device memory that is kept for later tasks."""
        for worker in self._opened().workers:
            worker.release_unused()

    def close(self) -> None:
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            opened.finalizer()

    def _opened(self) -> _OpenPool:
        with self._lock:
            if self._open is None:
                self._open = _OpenPool(self)
            opened = self._open
            if not opened.is_running:
                try:
                    opened.start()
                except BaseException:
                    self._open = None
                    opened.finalizer()
                    raise
            return opened


class _OpenPool:
    def __init__(self, pool: DevicePool) -> None:
        """Open the devices. `start` starts their threads."""
        self._landing = LandingThread(pool.monitor)
        self.workers = [Worker(device, self._landing) for device in open_devices(pool.specs)]
        self.is_running = False
        # The finalizer also runs at exit: a daemon thread must not run while the interpreter is torn down.
        self.finalizer = weakref.finalize(pool, _stop, os.getpid(), pool.monitor, self._landing, self.workers)
        self.finalizer.atexit = True

    def start(self) -> None:
        """Start the threads. A start that was interrupted can be repeated."""
        for thread in [self._landing.thread, *(worker.thread for worker in self.workers)]:
            if not has_started(thread):
                start_thread(thread)
        self.is_running = True


def _stop(pid: int, monitor: Monitor, landing: LandingThread, workers: list[Worker]) -> None:
    if os.getpid() != pid:  # the threads exist in the parent process only, and they may hold the locks
        return
    for worker in workers:
        worker.stop()
        if not has_started(worker.thread):
            worker.device.close()  # a thread that was started does this at its end
    landing.stop()
    # A finalizer may run while its thread holds the monitor. The workers need the monitor to end: do not wait for them.
    if monitor.is_held():
        return
    end_threads([*(worker.thread for worker in workers), landing.thread], _JOIN_S)


def shared_pool(specs: Sequence[DeviceSpec]) -> DevicePool:
    """Return the pool of these devices, the same one for every model of this process that names them.

    A forked child does not have its parent's threads, so it gets new pools.
    """
    follow_forks()
    key = (os.getpid(), tuple(specs))
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = DevicePool(specs)
        return pool
