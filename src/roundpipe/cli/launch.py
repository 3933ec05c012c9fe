"""The processes of one run: how torchrun has started them, and what they tell each other outside of the training.

Every machine runs one process of `roundpipe train`. Rank 0 speaks for all: it writes the files of the run and prints.
Knows no model and no data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from roundpipe.errors import ConfigError

T = TypeVar("T")


def is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    return _number("WORLD_SIZE", 1) == 1 or _number("RANK", 0) == 0


def is_restart() -> bool:
    """Whether torchrun has started the processes of this run again after a failure."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _store(rank: int, size: int) -> Any:
    """The store through which the processes of the run find each other: that of torchrun, or one that rank 0 makes.

    A store of torch listens on all interfaces. One that rank 0 makes listens only on the address that the others use,
    as far as that is known. Connections are neither authenticated nor encrypted.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = _listener(host, port) if rank == 0 and not is_of_torchrun else None
    if listener is None:
        return next(rendezvous("env://"))[0]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        size,
        is_master=True,
        timeout=dist.distributed_c10d.default_pg_timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # that of torch 2.6 and 2.7 cannot take over a socket
    )


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the address of `host` alone; None if others may know this machine by another address.

    The name of a machine often means a loopback address on the machine itself, and another one elsewhere.
    """
    with contextlib.suppress(OSError):  # the name is unknown, or the address is none of this machine's
        found = {info[4][0]: info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        addresses = [str(address) for address in found if host != "localhost" or found[address] == socket.AF_INET]
        if len(addresses) == 1:
            is_loopback = ipaddress.ip_address(addresses[0]).is_loopback
            if not is_loopback or host in ("localhost", addresses[0]):
                return socket.create_server((addresses[0], port), family=found[addresses[0]], backlog=2048)
    return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @classmethod
    @contextlib.contextmanager
    def joined(cls) -> Iterator[Launch]:
        """Connect to the other processes of the run inside the block, if torchrun has started several."""
        size = _number("WORLD_SIZE", 1)
        if size == 1:
            yield cls()
            return
        if dist.is_initialized():
            yield cls(dist.get_rank(), dist.get_world_size())
            return
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; start the run with torchrun, or unset "
                "WORLD_SIZE."
            )
        try:
            rank = int(os.environ["RANK"])
            store = _store(rank, size)
            # torchrun keeps the store when it starts the processes again: without a prefix of their own, they would
            # find the addresses of those that have ended.
            own = dist.distributed_c10d.PrefixStore(
                f"roundpipe/start-{_number('TORCHELASTIC_RESTART_COUNT', 0)}", store
            )
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the {size} machines of the run could not connect through {os.environ['MASTER_ADDR']}:"
                f"{os.environ['MASTER_PORT']}: {' '.join(str(error).split())[:300]}. Check the address, the firewall, "
                "and GLOO_SOCKET_IFNAME, the network interface that gloo uses."
            ) from error
        try:
            yield cls(dist.get_rank(), size)
        finally:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """The values, which JSON can hold, of all processes, by rank."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([text.numel()]))
        room = int(max(lengths))
        texts = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.cat([text, torch.zeros(room - text.numel(), dtype=torch.uint8)]))
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(bytes(each[: int(length)].tolist())) for each, length in pairs]

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Return `work()`. If it raises in one process, all others raise ConfigError with its rank and reason."""
        if self.size == 1:
            return work()
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        reasons = self.gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise ConfigError(f"{what} failed on rank {rank}: {reason}")
        return result  # type: ignore[return-value]

    def of_first(self, value: Any) -> Any:
        """The value that rank 0 gives."""
        return self.gathered(value if self.is_first else None)[0]

    def require_equal(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError in all processes if one has other values than rank 0."""
        every = self.gathered({name: str(value) for name, value in values.items()})
        for rank, found in enumerate(every):
            names = sorted(name for name in found.keys() | every[0].keys() if found.get(name) != every[0].get(name))
            if names:
                shown = "; ".join(f"{name}: {found.get(name)} instead of {every[0].get(name)}" for name in names)
                raise ConfigError(
                    f"rank {rank} of the run has other settings than rank 0: {shown}. Start all machines with the same "
                    "command, the same data and the same model."
                )
