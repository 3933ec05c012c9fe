"""The machines of a process group, as one group of models sees them: opening, agreeing on calls, failures, closing.

Machines is made with the model and opens its lines at the first call, because an AutoRoundPipe and its parts become one
group only after wrapping. Knows payloads and weights in host memory; never layers, schedules or optimizers.

[Note: equal weights] When the lines open, all machines compare the model's parameters and buffers by checksum. Where a
machine differs from rank 0, it gets the values of rank 0. Afterwards all machines make the same updates, so nothing is
compared again.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from roundpipe.distributed.exchange import Exchange
from roundpipe.distributed.line import STORE_S, Line, Payload, Ticket, described, within
from roundpipe.distributed.settings import Settings
from roundpipe.errors import ArgumentTypeError, ConfigError, MachineError
from roundpipe.monitor import THREAD_PREFIX, Monitor, start_thread
from roundpipe.store import Share
from roundpipe.store.values import flat

logger = logging.getLogger("roundpipe")
T = TypeVar("T")
Values = Sequence[tuple[str, torch.Tensor]]  # tensors with their names

_CONNECT = datetime.timedelta(seconds=30)  # machines that are all there connect within this time
_ALIVE = datetime.timedelta(seconds=5)  # if they do not, all that are alive notice it within this time
_POLL_S = 0.01
_TELL_S = 1.0  # a failed call waits at most this long until the other machines know of the failure
_CHUNK = 1 << 20  # elements of a checksum that are multiplied at a time
_numbers = itertools.count(1)
_has_said_alone: list[None] = []  # one entry once the log says that a model trains alone
_has_said_shared: list[None] = []  # one entry once the log says that several ranks share this host


class Machines:
    """The machines that train one group of models together. The lines are None until `open`."""

    def __init__(self, process_group: dist.ProcessGroup, name: str, monitor: Monitor) -> None:
        self.number = next(_numbers)  # machines make the same models in the same order
        self.process_group = process_group
        self.share = Share(dist.get_rank(process_group), dist.get_world_size(process_group))
        self.calls: Line | None = None
        self.steps: Line | None = None
        self.saves: Line | None = None  # of checkpoints that are written in the background
        self.exchange: Exchange | None = None
        self.is_told = False  # whether all machines know of the failure of the present call
        self._name, self._monitor = name, monitor
        self._closing = ""  # the reason, once `close` was called
        self._opening: Ticket[None] | None = None

    @classmethod
    def of(cls, process_group: Any, name: str, monitor: Monitor) -> Machines | None:
        """The machines of a process group; None if this machine trains alone: without a group, or in a group of one."""
        is_initialised = dist.is_available() and dist.is_initialized()
        if process_group is None:
            if is_initialised and dist.get_world_size() > 1 and not _has_said_alone:
                _has_said_alone.append(None)
                logger.info(
                    "%s trains alone: torch.distributed has %d processes, but process_group is None. Pass "
                    "process_group=torch.distributed.group.WORLD to train one model on all of them.",
                    name,
                    dist.get_world_size(),
                )
            return None
        if not isinstance(process_group, dist.ProcessGroup):
            raise ArgumentTypeError(
                "process_group must be a group of torch.distributed, such as torch.distributed.group.WORLD after "
                f"init_process_group(), or None, got {type(process_group).__name__}."
            )
        if not is_initialised or dist.get_rank(process_group) < 0:
            raise ConfigError("process_group does not contain this process; pass None, or a group of which it is part.")
        return cls(process_group, name, monitor) if dist.get_world_size(process_group) > 1 else None

    # Opening and closing.

    def open(self, structure: Settings, values: Callable[[], Values], replaced: Callable[[set[str]], None]) -> None:
        """Connect to all machines and make the weights equal. Does nothing if that is done.

        structure: describes the model; it must be equal on all machines.
        values: returns all parameters and buffers. `replaced`: called with the names of those that were overwritten.
        """
        if self.exchange is not None:
            return
        if self._opening is None:
            what = f"the other {self.share.size - 1} machines to wrap {self._name} and call it"
            self._opening = Ticket(self._monitor, lambda: self._open(structure, values, replaced), what)
            _start(self._opening, "machines-open")
        opening = self._opening
        opening.wait_until_done()  # after a Ctrl-C here, the next call waits on
        self._opening = None
        opening.wait()

    def _open(self, structure: Settings, values: Callable[[], Values], replaced: Callable[[set[str]], None]) -> None:
        """Open the lines, on a thread that no signal handler interrupts: so all machines do it, or none."""
        if self.calls is None:
            self._connect()
        calls, steps = self.calls, self.steps
        assert calls is not None
        assert steps is not None

        def compare() -> None:
            names = make_equal(calls, f"the first call of {self._name}", structure, values())
            if names:
                replaced(names)

        calls.call(compare, f"the other machines to compare the weights of {self._name}")
        self.exchange = Exchange(steps, self.share, outside=Exchange(calls, self.share))

    def _connect(self) -> None:
        """Make the lines. Waits until all machines are here first, because gloo would not tell which one is missing."""
        ranks = dist.get_process_group_ranks(self.process_group)
        timeout = _timeout_of(self.process_group)
        lines: list[Line] = []
        # One store for the losses of all lines: a machine may lose one on a line while others wait for it on another.
        losses: Any = None
        for name in ("calls", "steps", "saves"):
            group_name = dist.distributed_c10d._process_group_name(ranks, use_hashed_name=True)
            default = dist.distributed_c10d._get_default_store()
            store = dist.distributed_c10d.PrefixStore(f"roundpipe/{group_name}", default)
            losses = losses or store
            self._wait_for_keys(store, "here", timeout, f"has not wrapped and called {self._name}")
            limit = min(timeout, _CONNECT)
            ticket = Ticket(
                self._monitor,
                lambda limit=limit: dist.new_group(  # type: ignore[misc]
                    ranks, timeout=limit, backend="gloo", use_local_synchronization=True
                ),
                f"the connections of {self._name}",
            )
            _start(ticket, "machines-connect")
            ticket.wait_briefly(limit.total_seconds())  # if a machine ends meanwhile, gloo may wait much longer
            if not ticket.has_succeeded:
                self._wait_for_keys(store, "alive", _ALIVE, f"has ended while {self._name} connected: no answer")
                raise MachineError(None, f"the machines cannot connect for {self._name} within {limit}.")
            group = ticket.wait()
            lines.append(Line(group, losses, f"machines-{name}", self._monitor, timeout))
        self.calls, self.steps, self.saves = lines

    def _wait_for_keys(self, store: Any, key: str, timeout: datetime.timedelta, complaint: str) -> None:
        """Set this machine's key and wait for those of all machines. Raises MachineError if one is missing."""
        limit_s = timeout.total_seconds()
        try:
            missing = within(limit_s + STORE_S, lambda: self._missing(store, key, limit_s, complaint))
        except TimeoutError as error:
            raise MachineError(
                0, f"rank 0, which has the store, is lost while {self._name} connects: {error}"
            ) from None
        if missing is not None:
            raise MachineError(
                missing,
                f"rank {missing} {complaint} within {limit_s:.0f} s. All machines of the process group must wrap the "
                "same models in the same order, and make the same calls.",
            )

    def _missing(self, store: Any, key: str, limit_s: float, complaint: str) -> int | None:
        """Set this machine's key; return the first rank whose key is missing after `limit_s`, or None."""
        store.set(f"{key}/{self.share.rank}", "1")
        deadline = time.monotonic() + limit_s
        for rank in range(self.share.size):
            with self._monitor.announced(f"rank {rank}, which {complaint}"):
                while not store.check([f"{key}/{rank}"]):
                    if time.monotonic() > deadline or self._closing:
                        return rank
                    time.sleep(_POLL_S)
        return None

    def close(self, reason: str) -> None:
        """End the lines. The other machines raise an error if they go on using the model."""
        self._closing = reason
        for line in (self.calls, self.steps, self.saves):
            if line is not None:
                line.close(reason)

    # Calls.

    def agree(self, what: str, payload: Payload | None = None, settings: Settings | None = None) -> list[Payload]:
        """Wait until all machines are at `what`; return the payloads of all machines, by rank.

        Raises MachineError on all machines if one has other settings.
        """
        return self.together(what, payload, lambda answers: answers, settings)

    def together(
        self,
        what: str,
        payload: Payload | None,
        then: Callable[[list[Payload]], T],
        settings: Settings | None = None,
    ) -> T:
        """As `agree`, and return `then(payloads)`, which runs on another thread: no signal handler can interrupt it.

        So either all machines do it, or none.
        """
        line = self.calls
        assert line is not None

        def work() -> T:
            try:
                answers = line.agree(what, payload, settings)
            except MachineError:
                self.is_told = True
                raise
            return then(answers)

        return line.call(work, f"the other machines ({what})")

    def tell(self, error: BaseException) -> None:
        """Tell all machines that this one has failed, unless they know. Waits only briefly for them."""
        if not self.is_told and self.calls is not None:
            self.is_told = True
            line = self.calls
            line.submit(lambda: line.fail(described(error)), "the other machines to learn of a failure").wait_briefly(
                _TELL_S
            )

    # What was sent.

    @property
    def sent_bytes(self) -> int:
        """Bytes that this machine has sent so far, headers included."""
        return sum(line.sent_bytes for line in (self.calls, self.steps, self.saves) if line is not None)

    @property
    def received_bytes(self) -> int:
        """Bytes that this machine has received so far, headers included."""
        return sum(line.received_bytes for line in (self.calls, self.steps, self.saves) if line is not None)


def _start(ticket: Ticket[Any], name: str) -> None:
    """Do the work of a ticket on a new thread."""
    start_thread(threading.Thread(target=ticket.carry_out, name=THREAD_PREFIX + name, daemon=True))


def _timeout_of(process_group: dist.ProcessGroup) -> datetime.timedelta:
    """The timeout of the user's group; the default of torch if the group does not tell."""
    try:
        timeout: datetime.timedelta = process_group._get_backend(torch.device("cpu")).options._timeout
        return timeout
    except (RuntimeError, AttributeError):  # a group of NCCL alone
        return dist.distributed_c10d.default_pg_timeout


# Making weights equal.


def make_equal(line: Line, what: str, structure: Settings, values: Values) -> set[str]:
    """Compare the tensors of all machines, and copy those of rank 0 where any differs. See [Note: equal weights].

    Returns the names of the tensors that were overwritten on this machine. Runs on the line's thread.
    """
    _warn_of_shared_hosts([answer["host"] for answer in line.agree(what, {"host": _host()}, structure)], line.rank)
    sums = [checksum(tensor) for _, tensor in values]
    of_ranks = [payload["sums"] for payload in line.agree(f"{what}: checksums", {"sums": sums})]
    different = [at for at in range(len(values)) if any(sums_[at] != of_ranks[0][at] for sums_ in of_ranks)]
    replaced: set[str] = set()
    for at in different:
        name, tensor = values[at]
        memory = tensor.detach().contiguous() if line.rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype)
        whole = flat(memory).view(torch.uint8)
        with line.committed():
            if line.rank == 0:
                line.trade(dict.fromkeys(line.others, whole), {}, f"its copy of {name}")
            else:
                line.trade({}, {0: whole}, f"the values of {name}")
        if sums[at] != of_ranks[0][at]:
            with torch.no_grad():
                tensor.detach().copy_(memory)
            replaced.add(name)
    if different and line.rank == 0:
        logger.warning(
            "%d tensors, %s among them, differed between the machines; all have the values of rank 0 now.",
            len(different),
            values[different[0]][0],
        )
    return replaced


def _host() -> str:
    """The name of this host, and what tells it from another one of the same name."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {boot}"


def _warn_of_shared_hosts(hosts: Sequence[str], rank: int) -> None:
    """Log once if this is the first of several ranks on one host. `hosts`: of all ranks."""
    sharing = [at for at, host in enumerate(hosts) if host == hosts[rank]]
    if len(sharing) > 1 and rank == sharing[0] and not _has_said_shared:
        _has_said_shared.append(None)
        logger.warning(
            "ranks %s run on the same host %s as separate machines: each holds all weights in its memory, and they "
            "exchange gradients over the network. Start one process per host (torchrun --nproc-per-node 1): it drives "
            "all GPUs of the host.",
            ", ".join(map(str, sharing)),
            hosts[rank].partition(" ")[0],
        )


def checksum(tensor: torch.Tensor) -> int:
    """A number that depends on every bit of a tensor and on its place. Equal tensors have equal numbers."""
    data = flat(tensor.detach().contiguous()).view(torch.uint8)
    words, rest = data[: data.numel() // 8 * 8].view(torch.int64), data[data.numel() // 8 * 8 :]
    # Sums of products with odd multipliers, modulo 2**64: a single changed word always changes the sum.
    multipliers = torch.arange(1, 2 * min(_CHUNK, max(words.numel(), 1)), 2, dtype=torch.int64) * 0x9E3779B97F4A7C1
    total = zlib.crc32(bytes(rest.tolist()))
    for start in range(0, words.numel(), _CHUNK):
        piece = words[start : start + _CHUNK]
        part = int((piece * multipliers[: piece.numel()]).sum())
        total = (total * 0x100000001B3 + part) % 2**63
    return total
