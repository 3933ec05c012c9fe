"""The processes of one run: how torchrun has started them, and what they tell each other outside of the training.

Every machine runs one process of `roundpipe train`. Rank 0 speaks for all: it writes the files of the run and prints.
Knows no model and no data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
            store, rank, _ = next(rendezvous("env://"))
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
