"""A line: messages between one machine and all others, sent and received by one thread in one agreed order.

[Note: slots] Every exchange on a line begins with a header that each machine sends to every other one. The headers with
the same number form a slot. A header names the operation, or says that its machine has failed and why. So all machines
see in the same slot that they agree, that one has failed, or that they do different things, and all of them leave the
operation there: no data follows, and the next exchange uses the next slot. A machine that has failed sends its failure
in its next slot, whatever the others do there. So no machine waits for one that has given up.

[Note: direct messages] Collectives of gloo say that some connection is closed, not which. So a line sends and receives
directly: one message to and one from each machine. The bytes are those of an all-to-all and an all-gather, and a wait
and an error always belong to one rank. If a process ends, its sockets close, and every other machine learns it at once.

Knows bytes, ranks and checksums of settings; never models, weights or steps.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import distributed as dist

from roundpipe.distributed.settings import Settings, difference
from roundpipe.errors import MachineError
from roundpipe.monitor import THREAD_PREFIX, Monitor, end_threads, start_thread

T = TypeVar("T")
Payload = dict[str, Any]

HEADER_BYTES = 512  # size of the first part of every header; a longer header has a second part
_LENGTH_BYTES = 8
_LONGEST_REASON = 2000  # characters
_JOIN_S = 2.0
_KEY_OF_LOSS = "lost"
_EXPLAIN_S = 1.0  # a machine that has closed its connections has so long to say why
_BLAME_S = 0.5  # a machine that is said to be silent has so long to say that it waits for another one
_POLL_S = 0.02
STORE_S = 2.0  # limit of a request to the store
_TAG, _TAG_OF_NOTHING = 0, 1  # of all messages, and of a message that no machine sends


class Ticket(Generic[T]):
    """Work that was given to the thread of a line, and its result."""

    def __init__(self, monitor: Monitor, work: Callable[[], T], what: str) -> None:
        self.what = what
        self.is_done = False
        self._monitor = monitor
        self._work: Callable[[], T] | None = work
        self._result: T | None = None
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Do the work. Called on the line's thread."""
        assert self._work is not None
        result, error = None, None
        try:
            result = self._work()
        except BaseException as raised:
            error = raised
        with self._monitor:
            self._result, self._error, self._work = result, error, None
            self.is_done = True
            self._monitor.changed()

    def wait_until_done(self) -> None:
        """Block until the work is done. Raises no error of the work."""
        with self._monitor:
            self._monitor.wait_until(lambda: self.is_done, self.what)

    def wait(self) -> T:
        """Block until the work is done; return its result or raise its error."""
        self.wait_until_done()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    @property
    def has_succeeded(self) -> bool:
        """Whether the work is done and has raised no error. Does not wait."""
        return self.is_done and self._error is None

    def wait_briefly(self, timeout_s: float) -> None:
        """Block until the work is done, at most for `timeout_s`. Raises no error of the work."""
        with self._monitor:
            self._monitor.wait_until(lambda: self.is_done, self.what, timeout_s)


class Line:
    """One machine's end of a line. `rank` and `size` are those of the process group of the user."""

    def __init__(
        self, group: dist.ProcessGroup, store: Any, name: str, monitor: Monitor, timeout: datetime.timedelta
    ) -> None:
        """`group`: a gloo group that nothing else uses. `store`: shared by all machines, for reasons of failures.

        timeout: a machine that does not answer for so long is lost.
        """
        self.rank, self.size = group.rank(), group.size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.sent_bytes = self.received_bytes = 0
        self._group, self._store = group, store
        self._monitor, self._timeout = monitor, timeout
        self._tickets: deque[Ticket[Any]] = deque()
        self._slot = 0
        self._store_is_silent = False
        self._dead: str | None = None  # why the line cannot be used any more
        self._lost_rank: int | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name=f"{THREAD_PREFIX}{name}", daemon=True)
        start_thread(self._thread)

    # Called on any thread.

    def submit(self, work: Callable[[], T], what: str) -> Ticket[T]:
        """Give work to the line's thread, behind all work that it has. `what`: describes waits for the work."""
        ticket = Ticket(self._monitor, work, what)
        with self._monitor:
            self._tickets.append(ticket)
            self._monitor.changed()
        return ticket

    def call(self, work: Callable[[], T], what: str) -> T:
        """Do the work on the line's thread and return its result."""
        return self.submit(work, what).wait()

    def close(self, reason: str) -> None:
        """End the line. Machines that use it afterwards raise an error with this machine's rank and `reason`."""
        with self._monitor:
            if self._is_closing:
                return
            self._is_closing = True
            self._monitor.changed()
        if self._dead is None:
            self._dead = f"this machine has closed the model ({reason})"
            self._break_off(reason)  # also wakes the thread if it waits for another machine
        if not self._monitor.is_held():
            end_threads([self._thread], _JOIN_S)

    # Called on the line's thread.

    def _loop(self) -> None:
        while (ticket := self._next()) is not None:
            ticket.carry_out()
            del ticket

    def _next(self) -> Ticket[Any] | None:
        with self._monitor:
            self._monitor.idle_until(lambda: bool(self._tickets) or self._is_closing)
            return self._tickets.popleft() if self._tickets else None

    def agree(self, operation: str, payload: Payload | None = None, settings: Settings | None = None) -> list[Payload]:
        """Tell all machines what this one does now; return the payloads of all machines, by rank.

        Raises MachineError on all machines if one has failed, does something else, or has other settings.
        """
        digest = "" if settings is None else settings.digest
        headers = self._swap({"does": operation, "by": digest, "with": payload or {}})
        failed = [(rank, header) for rank, header in enumerate(headers) if "failed" in header]
        if failed:
            rank, header = failed[0]
            raise MachineError(rank, f"rank {rank} has failed: {header['failed']}")
        different = {header["does"]: rank for rank, header in reversed(list(enumerate(headers)))}
        if len(different) > 1:
            rank = next(rank for rank in different.values() if rank)
            shown = ", ".join(f"rank {at} is in {header['does']}" for at, header in enumerate(headers))
            raise MachineError(
                rank, f"the machines do different things at the same time: {shown}. Make the same calls on all of them."
            )
        if settings is not None and any(header["by"] != digest for header in headers):
            of_ranks = self.agree(f"{operation}: the settings", dict(settings.values()))
            other, differing = difference(of_ranks)
            raise MachineError(
                other,
                f"{operation}: the machines have different settings: {differing}. Give all machines the same model, "
                "optimizer and options.",
            )
        return [header["with"] for header in headers]

    def fail(self, reason: str) -> None:
        """Tell all machines in this slot that this machine has failed."""
        if self._dead is None:
            self._swap({"failed": reason[:_LONGEST_REASON]})

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Contains the messages that follow a header. If this machine fails here, the others lose it: the line ends."""
        try:
            yield
        except MachineError:
            raise
        except BaseException as error:
            self._dead = f"this machine has failed while it exchanged data: {described(error)}"
            self._break_off(described(error))
            raise

    def _break_off(self, reason: str) -> None:
        """Close all connections. The other machines then raise an error with this machine's rank and `reason`."""
        self._ask_store(lambda: self._store.set(_closing_key(self.rank), reason))
        self._close_connections()

    def _close_connections(self) -> None:
        """Close the connections to all machines: each then notices at once that this one has left."""
        # gloo closes all connections of a group when a wait on one of them times out; `abort` leaves them open.
        for rank in self.others:
            with contextlib.suppress(Exception):
                nothing = self._group.recv([torch.empty(1)], rank, _TAG_OF_NOTHING)
                nothing.wait(datetime.timedelta(milliseconds=1))

    def trade(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], what: str) -> None:
        """Send a tensor to each of some machines, and fill a tensor with what each of some machines sends.

        All tensors are flat, dense and not empty. Returns when all of them were sent and filled.
        """
        if self._dead is not None:
            raise MachineError(self._lost_rank, self._dead)
        pending = []
        for rank, tensor in receives.items():
            pending.append((rank, self._started(rank, lambda r=rank, t=tensor: self._group.recv([t], r, _TAG))))  # type: ignore[misc]
        for rank, tensor in sends.items():
            pending.append((rank, self._started(rank, lambda r=rank, t=tensor: self._group.send([t], r, _TAG))))  # type: ignore[misc]
        for rank, work in pending:
            with self._monitor.announced(f"rank {rank}: {what}"):
                try:
                    work.wait(self._timeout)
                except RuntimeError as error:
                    raise self._lost(rank, str(error)) from None
        self.sent_bytes += sum(tensor.nbytes for tensor in sends.values())
        self.received_bytes += sum(tensor.nbytes for tensor in receives.values())

    def _started(self, rank: int, start: Callable[[], Any]) -> Any:
        try:
            return start()
        except RuntimeError as error:
            raise self._lost(rank, str(error)) from None

    def _swap(self, header: Payload) -> list[Payload]:
        """Send a header to all machines and return those of all machines, by rank. See [Note: slots]."""
        slot, self._slot = self._slot, self._slot + 1
        text = json.dumps({"slot": slot, **header}).encode()
        room = HEADER_BYTES - _LENGTH_BYTES
        first = len(text).to_bytes(_LENGTH_BYTES, "little") + text[:room].ljust(room)
        arrived = {rank: bytearray(HEADER_BYTES) for rank in self.others}
        what = f"its part of {header.get('does', 'a failure')}"
        self._trade_bytes(first, arrived, what)
        lengths = {rank: int.from_bytes(part[:_LENGTH_BYTES], "little") for rank, part in arrived.items()}
        rests = {rank: bytearray(length - room) for rank, length in lengths.items() if length > room}
        if rests or len(text) > room:
            self._trade_bytes(text[room:], rests, what)
        headers: list[Payload] = []
        for rank in range(self.size):
            if rank == self.rank:
                headers.append({"slot": slot, **header})
                continue
            headers.append(json.loads(arrived[rank][_LENGTH_BYTES:][: lengths[rank]] + rests.get(rank, b"")))
        assert all(one["slot"] == slot for one in headers), headers
        return headers

    def _trade_bytes(self, text: bytes, receives: Mapping[int, bytearray], what: str) -> None:
        """Send `text`, unless it is empty, to all machines; fill `receives`."""
        sends = dict.fromkeys(self.others, torch.frombuffer(bytearray(text), dtype=torch.uint8)) if text else {}
        into = {rank: torch.frombuffer(memory, dtype=torch.uint8) for rank, memory in receives.items()}
        self.trade(sends, into, what)

    def _lost(self, rank: int, error: str) -> MachineError:
        """The error for a machine that does not answer any more. Ends the line.

        If one machine ends, another may notice that first and end, too. So the first machine that notices a loss stores
        the rank, and all others report the same rank. A machine that others have lost reports the one that it has lost.
        A machine may be silent because it waits for the lost one; both waits then time out in any order.
        """
        reason = _reason_of_loss(error)

        def agreed() -> tuple[int, str]:
            lost, own = rank, reason
            if self._store.check([_closing_key(rank)]):
                own = f"it has ended ({self._store.get(_closing_key(rank)).decode()})"
            elif _has_timed_out(error):
                lost = self._silent_one(rank)
            else:
                # The machine may have lost another one: gloo closes its connections before it can store that.
                self._await_key(_KEY_OF_LOSS, _EXPLAIN_S)
            known = json.loads(self._store.compare_set(_KEY_OF_LOSS, "", json.dumps([lost, own])).decode())
            return (lost, own) if known[0] == self.rank else (known[0], known[1])

        rank, reason = self._ask_store(agreed) or (rank, reason)
        self._dead = (
            f"rank {rank} is lost: {reason}. The model cannot be used any more in this process: end it, start all "
            "machines again and resume from the last checkpoint."
        )
        self._lost_rank = rank
        self._close_connections()
        return MachineError(rank, self._dead)

    def _silent_one(self, rank: int) -> int:
        """The machine that `rank`, which has not answered in time, waits for itself; `rank` if it waits for none.

        A machine whose wait times out stores for whom it has waited. Two that wait for each other name each other.
        """
        self._store.set(_waiting_key(self.rank), str(rank))
        chain = [self.rank, rank]
        while self._await_key(_waiting_key(chain[-1]), _BLAME_S):
            following = int(self._store.get(_waiting_key(chain[-1])))
            if following in chain:
                return rank
            chain.append(following)
        return chain[-1]

    def _await_key(self, key: str, limit_s: float) -> bool:
        """Whether some machine stores `key` within the limit."""
        deadline_s = time.monotonic() + limit_s
        while not (is_stored := self._store.check([key])) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return bool(is_stored)

    def _ask_store(self, request: Callable[[], T]) -> T | None:
        """`request()`, which uses the store; None if it fails, or if the store does not answer soon.

        Requests to a store have no timeout: if its machine is lost, they block for minutes, until the system gives up.
        Once a request has failed, no further one is made.
        """
        if not self._store_is_silent:
            with contextlib.suppress(Exception):
                return within(STORE_S, request)
            self._store_is_silent = True
        return None


def within(limit_s: float, request: Callable[[], T]) -> T:
    """`request()`, which uses a store, on another thread; raises TimeoutError if it takes longer than `limit_s`."""
    results: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            results.append(request())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name=f"{THREAD_PREFIX}machines-store", daemon=True)
    start_thread(thread)
    thread.join(limit_s)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"the store of the process group has not answered within {limit_s:.1f} s")
    return results[0]


def _closing_key(rank: int) -> str:
    return f"closing/{rank}"


def _waiting_key(rank: int) -> str:
    return f"waits/{rank}"


def _has_timed_out(error: str) -> bool:
    return "imed out" in error


def _reason_of_loss(error: str) -> str:
    text = error.partition("] ")[2] or error  # gloo puts a file name in front
    if _has_timed_out(error):
        return f"it did not answer within the timeout of the process group ({text.strip()})"
    return f"its process has ended, or the connection to it has ({text.partition('. ')[0].strip()})"


def described(error: BaseException) -> str:
    """An exception in one line, for the other machines."""
    notes: Sequence[str] = getattr(error, "__notes__", ())
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return "; ".join([text, *notes[:2]])[:_LONGEST_REASON]
