"""Runs a function on several machines: processes on this machine, joined by gloo over loopback and a file store.

The processes live as long as the tests need them, and every run makes a new process group of as many as it asks for. A
run that takes longer than its limit fails, and no process survives the pool. Ranges begin at multiples of few elements,
so that the small networks of tests are divided between all machines; `block` sets another number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import io
import logging
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed as dist

from roundpipe.store import values as store_values

# What processes have imported when they start. The first step of an optimizer imports torch._dynamo.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "roundpipe", "helpers_machines"]
RUN_S = 100.0  # limit of one run
GROUP_TIMEOUT_S = 60.0  # timeout of the process groups
SMALL_BLOCK = 16  # a weight of 12 x 12 has nine blocks; a vector of 12 one, so that most machines have nothing of it


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a function has done on one machine.

    error: the name of the exception's class; None if it has returned. `lost_rank`: `rank` of a MachineError.
    died: whether the process has ended.
    """

    value: Any = None
    error: str | None = None
    message: str = ""
    notes: str = ""
    lost_rank: int | None = None
    died: bool = False
    seconds: float = 0.0

    @classmethod
    def of_error(cls, error: BaseException) -> Outcome:
        """The outcome of a function that has raised."""
        notes = "\n".join([*getattr(error, "__notes__", ()), *traceback.format_exception(error)])
        return cls(None, type(error).__name__, str(error), notes, getattr(error, "rank", None))


class MachinePool:
    """Processes that run functions as the machines of process groups."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")  # a fork of a process that has imported torch starts at once
        self._context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="machines-")
        self._workers: list[tuple[Any, Connection]] = []
        self._num_runs = 0

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        limit_s: float = RUN_S,
        timeout_s: float = GROUP_TIMEOUT_S,
        kill: tuple[int, float] | None = None,
        marker: str = "",
        block: int = SMALL_BLOCK,
    ) -> list[Outcome]:
        """Run `function(rank, size, *args)` on `size` machines; returns an outcome for each.

        timeout_s: of the process group. `kill`: (rank, seconds): SIGKILL for this rank so long after the start, or
        after the file `marker` exists. `block`: ranges of parameters begin at multiples of so many elements.
        """
        while len(self._workers) < size:
            self._workers.append(self._started())
        self._num_runs += 1
        path = os.path.join(self._folder.name, f"store-{self._num_runs}")
        data = _packed((function, args, size, path, timeout_s, limit_s, block))
        used = self._workers[:size]
        for rank, (_, connection) in enumerate(used):
            connection.send_bytes(_packed((rank, data)))
        try:
            return self._collected(used, time.monotonic() + limit_s, kill, marker)
        except BaseException:
            self.close()
            raise

    def _collected(
        self, used: Sequence[tuple[Any, Connection]], deadline: float, kill: tuple[int, float] | None, marker: str
    ) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(used)
        while marker and not os.path.exists(marker) and time.monotonic() < deadline:
            time.sleep(0.01)
        killed_at = None if kill is None else time.monotonic() + kill[1]
        while None in outcomes:
            now = time.monotonic()
            if killed_at is not None and kill is not None and now >= killed_at:
                os.kill(used[kill[0]][0].pid, signal.SIGKILL)
                killed_at = None
            left = [connection for (_, connection), outcome in zip(used, outcomes, strict=True) if outcome is None]
            ready = wait(left, min(deadline, killed_at or deadline) - now)
            if not ready and time.monotonic() >= deadline:
                late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
                raise AssertionError(f"ranks {late} have not ended in time; the others: {outcomes}")
            for rank, (process, connection) in enumerate(used):
                if connection in ready:
                    try:
                        outcomes[rank] = _unpacked(connection.recv_bytes())
                    except EOFError:
                        process.join(5)
                        outcomes[rank] = Outcome(died=True)
        self._workers = [worker for worker in self._workers if worker[0].is_alive()]
        return [outcome for outcome in outcomes if outcome is not None]

    def _started(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        return process, here

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []


def _serve(connection: Connection) -> None:
    """Carry out runs until the pool is gone."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("roundpipe").setLevel(logging.ERROR)
    with contextlib.suppress(EOFError):
        while True:
            rank, data = _unpacked(connection.recv_bytes())
            function, args, size, path, timeout_s, limit_s, store_values.BLOCK = _unpacked(data)
            faulthandler.dump_traceback_later(limit_s - 3, file=sys.__stderr__)
            start = time.monotonic()
            try:
                outcome = Outcome(_in_group(function, args, rank, size, path, timeout_s))
            except BaseException as error:
                outcome = Outcome.of_error(error)
            faulthandler.cancel_dump_traceback_later()
            outcome = dataclasses.replace(outcome, seconds=time.monotonic() - start)
            connection.send_bytes(_packed(outcome))


def _in_group(
    function: Callable[..., Any], args: Sequence[Any], rank: int, size: int, path: str, timeout_s: float
) -> Any:
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timeout)
    try:
        return function(rank, size, *args)
    finally:
        dist.destroy_process_group()


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the function has returned on each machine; fails with the first error if it has raised on any."""
    for rank, outcome in sorted(enumerate(outcomes), key=lambda pair: pair[1].error == "MachineError"):
        assert outcome.error is None, f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.notes}"
        assert not outcome.died, f"rank {rank} died"
    return [outcome.value for outcome in outcomes]
