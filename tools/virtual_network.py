"""Several machines on this one: processes in network namespaces, joined by a virtual switch with limited rates.

A Network has one namespace per machine, with one interface, and one namespace with a bridge to which all interfaces
are connected. The namespace of the host is not changed, and all addresses exist inside the namespaces only. Making
them needs root and the `ip` and `tc` programs of iproute2.

Processes is a set of processes, each in the namespace of its machine. They end with the process that has started
them, however that ends. Names of namespaces contain the process id of their maker; a new Network removes those whose
maker does not exist any more.

Knows nothing of torch and of models.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing as mp
import os
import pickle
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

_PREFIX = "roundpipe"
_FOLDER = Path("/var/run/netns")
_SUBNET = "10.213.7"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_COMMAND_S = 10.0
_JOIN_S = 5.0
INTERFACE = "link0"
PORT = 29500
_BURST_BYTES = 128 << 10  # at least one segment of 64 KiB, or tbf would cut every segment into packets


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process runs. `namespace` None: in the network of the host, with the address of loopback."""

    address: str
    interface: str
    namespace: str | None = None

    def enter(self) -> None:
        """Move the calling thread, and threads that it starts, into the namespace. Call before any other thread."""
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        if self.namespace is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open(_FOLDER / self.namespace) as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns into {self.namespace} failed")

    def sent_bytes(self) -> int:
        """Bytes that the interface has sent so far, with Ethernet, IP and TCP headers. Call inside the namespace."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == self.interface:
                return int(counts.split()[8])
        raise LookupError(f"/proc/net/dev has no interface {self.interface}")


def loopback() -> Place:
    return Place("127.0.0.1", "lo")


def run(*command: str) -> str:
    """Run a command; returns its output, raises OSError with its message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Machines 0 to `size` - 1, each with one link to a switch."""

    def __init__(self, size: int) -> None:
        remove_abandoned()
        self._switch = f"{_PREFIX}-{os.getpid()}-switch"
        self.places = [
            Place(f"{_SUBNET}.{rank + 1}", INTERFACE, f"{_PREFIX}-{os.getpid()}-{rank}") for rank in range(size)
        ]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        run("ip", "netns", "add", self._switch)
        on_switch = ("ip", "-n", self._switch)
        run(*on_switch, "link", "add", "switch", "type", "bridge")
        run(*on_switch, "link", "set", "switch", "up")
        for rank, place in enumerate(self.places):
            assert place.namespace is not None
            there = ("ip", "-n", place.namespace)
            run("ip", "netns", "add", place.namespace)
            peer = ("peer", "name", INTERFACE, "netns", place.namespace)
            run(*on_switch, "link", "add", f"port{rank}", "type", "veth", *peer)
            run(*on_switch, "link", "set", f"port{rank}", "master", "switch", "up")
            run(*there, "address", "add", f"{place.address}/24", "dev", INTERFACE)
            run(*there, "link", "set", INTERFACE, "up")
            run(*there, "link", "set", "lo", "up")

    def limit(self, rank: int, bits_per_s: float | None, delay_s: float = 0.0) -> None:
        """Limit the link of a machine to a rate in each direction, and delay what it sends. None: no limit."""
        for namespace, interface in ((self.places[rank].namespace, INTERFACE), (self._switch, f"port{rank}")):
            assert namespace is not None
            on_link = ("tc", "-n", namespace, "qdisc", "replace", "dev", interface)
            with contextlib.suppress(OSError):  # there may be none
                run("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root")
            parent: tuple[str, ...] = ("root",)
            if delay_s and namespace != self._switch:
                run(*on_link, *parent, "handle", "1:", "netem", "delay", f"{delay_s * 1e6:.0f}us", "limit", "100000")
                parent = ("parent", "1:1")
            if bits_per_s is not None:
                limit_bytes = max(8 << 20, int(bits_per_s / 8 / 100))
                shape = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(_BURST_BYTES), "limit", str(limit_bytes))
                run(*on_link, *parent, *shape)

    @functools.cached_property
    def no_delay(self) -> str | None:
        """Why links cannot be delayed; None if they can."""
        try:
            self.limit(0, None, 1e-3)
        except OSError as error:
            return str(error)
        self.limit(0, None)
        return None

    def cut(self, rank: int) -> None:
        """Cut the link of a machine at the switch."""
        run("ip", "-n", self._switch, "link", "set", f"port{rank}", "down")

    def join(self, rank: int) -> None:
        """Repair the link of a machine."""
        run("ip", "-n", self._switch, "link", "set", f"port{rank}", "up")

    def close(self) -> None:
        """Remove all namespaces and links. End the processes in them before."""
        for name in [self._switch, *(place.namespace for place in self.places)]:
            if (_FOLDER / str(name)).exists():
                run("ip", "netns", "delete", str(name))

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def remove_abandoned() -> None:
    """Remove namespaces whose maker has ended without removing them."""
    for path in _FOLDER.glob(f"{_PREFIX}-*-*") if _FOLDER.exists() else ():
        found = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(OSError):
                run("ip", "netns", "delete", path.name)


@functools.cache
def unavailable() -> str | None:
    """Why networks cannot be made on this machine; None if they can."""
    try:
        with Network(1) as network:
            network.limit(0, 1e9)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {error}"
    return None


# Processes.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a function has done in a process.

    error: name of the exception's class; None if it has returned. `lost_rank`: attribute `rank` of the exception.
    died: whether the process has ended without an answer. `seconds`: from the start of the function to its end.
    """

    value: Any = None
    error: str | None = None
    message: str = ""
    lost_rank: int | None = None
    died: bool = False
    seconds: float = 0.0


class Processes:
    """One process in each place. All of them end when the set is closed, or with the process that has made it."""

    def __init__(self, places: Sequence[Place], preload: Sequence[str] = ()) -> None:
        """`preload`: modules that processes have imported when they start."""
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self.pids: list[int] = []
        self._members: list[tuple[Any, Connection]] = []
        try:
            for place in places:
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, place), daemon=True)
                process.start()
                there.close()
                self._members.append((process, here))
                self.pids.append(process.pid)
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float, size: int | None = None) -> list[Any]:
        """`function(rank, size, *args)` of the first `size` processes; raises the first error of any."""
        size = len(self._members) if size is None else size
        self.start(function, *args, ranks=range(size))
        return values(self.finish(limit_s, ranks=range(size)))

    def start(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> None:
        """Begin to run a function in processes."""
        ranks = range(len(self._members)) if ranks is None else ranks
        for rank in ranks:
            self._members[rank][1].send_bytes(pickle.dumps((function, (rank, len(ranks), *args))))

    def wait_for_pause(self, rank: int, name: str, limit_s: float) -> None:
        """Wait until a process is in `pause(name)`."""
        connection = self._members[rank][1]
        if not connection.poll(limit_s):
            raise AssertionError(f"rank {rank} did not come to {name!r} within {limit_s} s")
        message = pickle.loads(connection.recv_bytes())
        if message != ("pause", name):
            raise AssertionError(f"rank {rank} should come to {name!r}, but: {message}")

    def resume(self, rank: int) -> None:
        """Let a process go on that is in `pause`."""
        self._members[rank][1].send_bytes(b"go")

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def finish(self, limit_s: float, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """The outcomes of the functions of processes; raises AssertionError after `limit_s`."""
        ranks = range(len(self._members)) if ranks is None else ranks
        waiting = {self._members[rank][1]: rank for rank in ranks}
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting.values())} have not ended in time; the others: {outcomes}")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[index, arg-type]
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    outcomes[rank] = Outcome(died=True)
        return [outcomes[rank] for rank in ranks]

    def leave(self, limit_s: float) -> list[int | None]:
        """Let the processes end by themselves; returns exit codes, None for those that have not ended in time."""
        deadline = time.monotonic() + limit_s
        for _, connection in self._members:
            connection.close()
        for process, _ in self._members:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process, _ in self._members]

    def close(self) -> None:
        """End all processes, also stopped ones."""
        for process, connection in self._members:
            process.kill()
            process.join(_JOIN_S)
            connection.close()
        self._members = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the functions have returned; raises with the first error if one has failed."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.died:
            raise RuntimeError(f"rank {rank}: {outcome.error or 'the process has ended'}: {outcome.message}")
    return [outcome.value for outcome in outcomes]


_connections: list[Connection] = []  # inside a process of Processes: its end of the pipe


def pause(name: str) -> None:
    """Tell the maker of this process that it is at `name`, and wait until it may go on."""
    _connections[0].send_bytes(pickle.dumps(("pause", name)))
    _connections[0].recv_bytes()


def _serve(connection: Connection, place: Place) -> None:
    """Run functions until the pipe is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C belongs to the maker, which ends this process
    place.enter()
    _connections.append(connection)
    for function, args in _requests(connection):
        start = time.monotonic()
        try:
            outcome = Outcome(function(*args))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            outcome = Outcome(None, type(error).__name__, text, getattr(error, "rank", None))
        outcome = dataclasses.replace(outcome, seconds=time.monotonic() - start)
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(pickle.dumps(outcome))


def _requests(connection: Connection) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield pickle.loads(connection.recv_bytes())
