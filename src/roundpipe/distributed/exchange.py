"""The exchange of gradients and new weights between machines in optimizer steps.

One Exchange serves one group of models. The optimizer thread asks for exchanges, the thread of a line carries them out
one after the other. Every exchange begins with a header: see [Note: slots] in line. Knows records and their memory,
never optimizers.

[Note: failed steps] Once a machine has told its failure, or has learnt of one, all further exchanges of the step raise
without sending anything. `failed` then makes the weights equal on all machines again: if some machines have updated
their range of a layer, all machines complete this layer's weights. So a layer is updated on all machines or on none.

[Note: outside of steps] Code outside of a step may read gradients, too. These exchanges use the line of calls: a
machine that calls the model instead then finds the difference. On another line, both would wait for each other.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from roundpipe.distributed.line import Line, Ticket, described
from roundpipe.distributed.settings import Settings
from roundpipe.errors import MachineError
from roundpipe.store import HostGradient, LayerUpdate, ParameterRecord, Share
from roundpipe.store.host_memory import HostBuffer, dense_stride
from roundpipe.store.values import flat

logger = logging.getLogger("roundpipe")
T = TypeVar("T")
_Gradients = Mapping[ParameterRecord, HostGradient]
_Sources = dict[ParameterRecord, list[torch.Tensor]]


class _Scratch:
    """Memory that is used again by every exchange; it grows to the largest one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._memory = HostBuffer(num_bytes, None).tensor
        return self._memory[:num_bytes]


class Exchange:
    """The exchanges of optimizer steps on one line. Implements StepExchange of the store."""

    def __init__(self, line: Line, share: Share, outside: Exchange | None = None) -> None:
        """`outside`: carries out exchanges while no step runs, see [Note: outside of steps]; None: this one does."""
        self.share = share
        self._line = line
        self._outside = outside
        self._is_in_step = False
        self._sent, self._received = _Scratch(), _Scratch()
        self._step = 0
        self._failure: BaseException | None = None  # why the exchanges of this step raise

    # One step.

    def begin(self, step: int) -> None:
        """Begin step number `step`. All exchanges of the step before are over."""
        self._step, self._failure, self._is_in_step = step, None, True

    def end(self) -> None:
        """End the step: exchanges from now on are outside of steps."""
        self._is_in_step = False

    def meet(self, what: str) -> None:
        """Wait until all machines are at the same place of the step; raises MachineError if one has failed."""
        self._submit(what, lambda name: self._line.agree(name)).wait()

    def failed(self, reason: str, updates: Sequence[LayerUpdate]) -> None:
        """End a step that has failed on this or on another machine: see [Note: failed steps].

        updates: all layers, in the same order on all machines.
        """

        def settle() -> None:
            if self._failure is None:
                self._line.fail(reason)
            self._failure = None
            # Headers hold text, so the keys of a payload are strings.
            unfinished = {str(at): update.unfinished() for at, update in enumerate(updates) if update.updated}
            name = f"the end of the failed step {self._step}"
            found = self._line.agree(name, {key: value for key, value in unfinished.items() if value})
            for at, update in enumerate(updates):
                positions = sorted({position for each in found for position in each.get(str(at), ())})
                if positions:
                    self._gather(f"{name}, layer {at}", update.settled(positions))

        ticket = self._line.submit(settle, "the other machines to end a failed step")
        try:
            ticket.wait()
        except BaseException as error:
            # The step is failing already, and its error is the one to raise. After this one, the machines may differ.
            self._failure = error
            level = logging.INFO if isinstance(error, MachineError) else logging.ERROR  # the next call raises the first
            logger.log(level, "the machines could not end the failed step %d together: %r", self._step, error)

    # Exchanges.

    def fetch(
        self,
        what: str,
        records: Sequence[ParameterRecord],
        landed: Callable[[], _Gradients],
        *,
        may_overwrite: bool,
    ) -> Ticket[_Sources]:
        """Begin to exchange gradients; see StepExchange."""
        if self._outside is not None and not self._is_in_step:
            return self._outside.fetch(what, records, landed, may_overwrite=may_overwrite)
        return self._submit(_named(what, records), lambda name: self._fetch(name, records, landed(), may_overwrite))

    def gather(self, what: str, records: Sequence[ParameterRecord], memories: Sequence[torch.Tensor]) -> Ticket[None]:
        """Begin to complete tensors with the ranges of the other machines; see StepExchange."""
        if self._outside is not None and not self._is_in_step:
            return self._outside.gather(what, records, memories)
        return self._submit(_named(what, records), lambda name: self._gather(name, memories))

    def numbers(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all machines, by rank."""
        if self._outside is not None and not self._is_in_step:
            return self._outside.numbers(what, values)
        ticket = self._submit(what, lambda name: self._line.agree(name, {"numbers": list(values)}))
        return [payload["numbers"] for payload in ticket.wait()]

    def require_equal(self, what: str, values: Mapping[str, object], params: Sequence[str]) -> None:
        """Raise MachineError on all machines if one has other values or parameters; see StepExchange."""
        self.compare(what, Settings.of(values, params))

    def compare(self, what: str, settings: Settings) -> None:
        """Raise MachineError on all machines if one has other settings: see [Note: equal settings] in settings."""
        if self._outside is not None and not self._is_in_step:
            self._outside.compare(what, settings)
            return
        self._submit(what, lambda name: self._line.agree(name, None, settings)).wait()

    def _submit(self, what: str, work: Callable[[str], T]) -> Ticket[T]:
        name = what if self._outside is None else f"optimizer step {self._step}: {what}"

        def carry_out() -> T:
            if self._failure is not None and self._outside is not None:
                raise self._failure
            try:
                return work(name)
            except BaseException as error:
                self._failure = error
                if not isinstance(error, MachineError):  # the other machines do not know of it yet
                    self._line.fail(described(error))
                raise

        return self._line.submit(carry_out, f"the other machines ({name})")

    def _fetch(
        self, name: str, records: Sequence[ParameterRecord], gradients: _Gradients, may_overwrite: bool
    ) -> _Sources:
        """Send each machine its range of this machine's gradients; receive this machine's range of theirs."""
        line, share = self._line, self.share
        here = [record for record in records if record in gradients]
        flats = [_flat_like(record, gradients[record].tensor) for record in here]
        ranges = [[each[share.range_of(each.numel(), rank)] for each in flats] for rank in range(share.size)]
        messages = _packed(self._sent, ranges)
        payload = {"has": "".join("1" if record in gradients else "0" for record in records)}
        answers = line.agree(name, payload)
        with line.committed():
            present = [[r for r, flag in zip(records, a["has"], strict=True) if flag == "1"] for a in answers]
            sizes = [sum(_own_bytes(record, share) for record in of_rank) for of_rank in present]
            memory = None
            if may_overwrite and all(len(of_rank) == len(here) for of_rank in present):
                memory = _one_memory([gradients[record] for record in here], sum(sizes))
            if memory is None:
                memory = torch.empty(sum(sizes), dtype=torch.uint8)
            pieces = list(memory[: sum(sizes)].split(sizes))
            line.trade(*_without_empty(share.rank, messages, pieces), name)
            pieces[share.rank].copy_(messages[share.rank])
        sources: _Sources = {}
        for of_rank, piece in zip(present, pieces, strict=True):  # in the order of ranks
            parts = piece.split([_own_bytes(record, share) for record in of_rank])
            for record, part in zip(of_rank, parts, strict=True):
                sources.setdefault(record, []).append(_typed(part, record.weights.dtype))
        return sources

    def _gather(self, name: str, memories: Sequence[torch.Tensor]) -> None:
        """Send this machine's range of dense tensors to all machines, and receive theirs."""
        line, share = self._line, self.share
        flats = [flat(memory) for memory in memories]
        ranges = [[each[share.range_of(each.numel(), rank)] for each in flats] for rank in range(share.size)]
        (message,) = _packed(self._sent, [ranges[share.rank]])
        line.agree(name)
        with line.committed():
            sizes = [sum(part.nbytes for part in of_rank) for of_rank in ranges]
            sizes[share.rank] = 0
            pieces = list(self._received.take(sum(sizes)).split(sizes))
            line.trade(*_without_empty(share.rank, [message] * share.size, pieces), name)
            for of_rank, piece in zip(ranges, pieces, strict=True):
                if piece.numel():
                    for part, sent in zip(of_rank, piece.split([part.nbytes for part in of_rank]), strict=True):
                        part.view(torch.uint8).copy_(sent)


def _named(what: str, records: Sequence[ParameterRecord]) -> str:
    """The name of an exchange with a checksum of its parameters, so that machines with other ones do not exchange."""
    names = "\n".join(record.name for record in records)
    return f"{what} (parameters {zlib.crc32(names.encode()):08x})"


def _own_bytes(record: ParameterRecord, share: Share) -> int:
    return share.count_of(record.weights.numel()) * record.weights.itemsize


def _flat_like(record: ParameterRecord, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a flat tensor, with its elements in the order of the weight's memory."""
    weights = record.weights
    stride = dense_stride(weights)
    if tuple(gradient.stride()) != stride or gradient.dtype is not weights.dtype:
        ordered = torch.empty_strided(weights.shape, stride, dtype=weights.dtype)
        gradient = ordered.copy_(gradient)
    return flat(gradient)


def _packed(scratch: _Scratch, ranges: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Copy the tensors of each list one after the other into one message; all messages lie in `scratch`."""
    sizes = [sum(part.nbytes for part in parts) for parts in ranges]
    messages = list(scratch.take(sum(sizes)).split(sizes))
    for message, parts in zip(messages, ranges, strict=True):
        for place, part in zip(message.split([part.nbytes for part in parts]), parts, strict=True):
            place.copy_(part.view(torch.uint8))
    return messages


def _without_empty(
    own_rank: int, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """The messages to and from other machines, by rank, without empty ones."""
    return (
        {rank: message for rank, message in enumerate(sends) if rank != own_rank and message.numel()},
        {rank: message for rank, message in enumerate(receives) if rank != own_rank and message.numel()},
    )


def _one_memory(gradients: Sequence[HostGradient], num_bytes: int) -> torch.Tensor | None:
    """The landing buffer of all `gradients`, if they lie in one with at least `num_bytes`; else None."""
    buffer = gradients[0].buffer if gradients else None
    if buffer is None or any(gradient.buffer is not buffer for gradient in gradients):
        return None
    return buffer.memory if buffer.memory.numel() >= num_bytes else None


def _typed(part: torch.Tensor, dtype: torch.dtype) -> Any:
    """A piece of a message as a flat tensor of `dtype`. Copies it if it is not aligned to elements."""
    is_aligned = part.storage_offset() % dtype.itemsize == 0 and part.data_ptr() % dtype.itemsize == 0
    return (part if is_aligned else part.clone()).view(dtype)
