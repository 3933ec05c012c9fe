"""The devices of a process that models share, their threads, and the round in which tasks are dealt to them.

One pool per set of devices. It opens at first use and closes when the last model that uses it is gone, or at exit.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

from roundpipe.devices import Device, DeviceSpec, open_devices
from roundpipe.plan import deal
from roundpipe.runtime.landing import LandingThread
from roundpipe.runtime.run import Run
from roundpipe.runtime.worker import Worker
from roundpipe.waiting import Monitor, end_threads, follow_forks, has_started, process_lock, start_thread

_JOIN_S = 3.0
_pools: weakref.WeakValueDictionary[tuple[int, tuple[DeviceSpec, ...]], DevicePool] = weakref.WeakValueDictionary()
_pools_lock = process_lock()


class DevicePool:
    """Use `shared_pool`; a pool made directly is one's own."""

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

    def submit(self, run: Run) -> None:
        """Deal the run's tasks: task i to device (g0 + i) mod N, in one go, so that runs never interleave badly.

        [Note: no deadlock] Every queue holds tasks in the order they were dealt, and a task only ever waits for tasks
        dealt before it. So the oldest unfinished task can always run.
        """
        opened = self._opened()
        with self._lock:
            run.workers = deal(run.tasks, self._next_device, self.num_devices)
            self._next_device = (self._next_device + len(run.tasks)) % self.num_devices
            for task, worker in zip(run.tasks, run.workers, strict=True):
                opened.workers[worker].submit(run, task)

    def release_unused(self) -> None:
        """Let devices give memory back that they keep for later tasks."""
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
        """Opens the devices; no thread runs before `start`."""
        self._landing = LandingThread(pool.monitor)
        self.workers = [Worker(device, self._landing) for device in open_devices(pool.specs)]
        self.is_running = False
        # At exit too, before the interpreter takes the threads' ground away.
        self.finalizer = weakref.finalize(pool, _stop, os.getpid(), pool.monitor, self._landing, self.workers)
        self.finalizer.atexit = True

    def start(self) -> None:
        """Can be repeated if it was interrupted."""
        for thread in [self._landing.thread, *(worker.thread for worker in self.workers)]:
            if not has_started(thread):
                start_thread(thread)
        self.is_running = True


def _stop(pid: int, monitor: Monitor, landing: LandingThread, workers: list[Worker]) -> None:
    if os.getpid() != pid:  # the threads are the parent's, and so may be the locks
        return
    for worker in workers:
        worker.stop()
        if not has_started(worker.thread):
            worker.device.close()  # as its thread does
    landing.stop()
    if monitor.is_held():  # a finalizer may come at any point of any thread, and the others need the monitor to end
        return
    end_threads([*(worker.thread for worker in workers), landing.thread], _JOIN_S)


def shared_pool(specs: Sequence[DeviceSpec]) -> DevicePool:
    """The pool of these devices: the same one for every model of this process that names the same devices.

    A forked child has none of its parent's threads, so it gets pools of its own.
    """
    follow_forks()
    key = (os.getpid(), tuple(specs))
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = DevicePool(specs)
        return pool
