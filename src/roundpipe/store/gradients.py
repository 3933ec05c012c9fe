"""Gradients gathered in host memory since the optimizer last took them.

The landing thread adds, the optimizer thread takes, callers look and drop. One lock makes each of these whole; their
order is LayerStore's business. Knows no device and no call.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import torch

from roundpipe.store.host_memory import LandingBuffer
from roundpipe.store.records import Gathered, ParameterRecord


@dataclasses.dataclass(frozen=True)
class GradientPart:
    """What one call adds to a parameter's gradient: memory of a landing buffer, or the part's own."""

    record: ParameterRecord
    tensor: torch.Tensor
    buffer: LandingBuffer | None = None


class HostGradients:
    def __init__(self, parameters: Sequence[ParameterRecord]) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()
        self.num_additions = 0  # only ever grows: tells whether anything came since one looked

    def add(self, parts: Sequence[GradientPart], cancelled: Callable[[], bool]) -> None:
        """Put each part onto the sum so far; the first part is the sum, as with autograd, and stays where it is."""
        with self._lock, torch.no_grad():
            if cancelled():
                return
            for part in parts:
                self._add_one(part)

    def has_any(self) -> bool:
        return any(record.gathered is not None for record in self._parameters)

    def drop(self) -> None:
        """Forget everything gathered, here and in `param.grad`."""
        with self._lock:
            for record in self._parameters:
                record.exposed, record.param.grad = False, None
                self._forget(record)

    def take(self, records: Sequence[ParameterRecord]) -> dict[ParameterRecord, Gathered]:
        """What is gathered is the caller's now, to be let go; sums start anew."""
        with self._lock:
            taken = {}
            for record in records:
                self._conceal(record)
                if record.gathered is not None:
                    taken[record], record.gathered = record.gathered, None
            return taken

    def drop_one(self, record: ParameterRecord) -> None:
        """Forget what is gathered for one parameter, here and in `param.grad`."""
        with self._lock:
            self._conceal(record)
            self._forget(record)

    def expose(self) -> None:
        """Let `param.grad` of every parameter show what is gathered."""
        with self._lock:
            for record in self._parameters:
                record.param.grad = None if record.gathered is None else record.gathered.tensor
                record.exposed = record.gathered is not None

    def conceal(self) -> None:
        """Take `param.grad` back: what is gathered now belongs to a step, what the user adds later to the next one."""
        with self._lock:
            for record in self._parameters:
                self._conceal(record)

    def touched_by_user(self) -> list[ParameterRecord]:
        """Parameters whose `.grad` is not what we showed last: set, replaced or cleared by the user."""
        return [record for record in self._parameters if record.param.grad is not _shown(record)]

    def adopt_touched(self, records: Sequence[ParameterRecord]) -> None:
        """Follow the user: a cleared gradient is dropped, a replaced one taken, a new one added.

        One assignment makes each of them the host's: after an interrupt none is lost or counted twice.
        """
        with self._lock, torch.no_grad():
            for record in records:
                users, old = record.param.grad, record.gathered
                new = None if record.exposed else old
                if users is not None:
                    own = torch.empty_like(record.weights, memory_format=torch.preserve_format).copy_(users)
                    new = Gathered(own if new is None else new.tensor + own)
                record.gathered, record.param.grad, record.exposed = new, None, False
                if old is not None and new is not old:
                    old.let_go()

    def _add_one(self, part: GradientPart) -> None:
        record = part.record
        self.num_additions += 1
        if record.gathered is not None:
            record.gathered.tensor.add_(part.tensor)
            return
        record.gathered = Gathered(part.tensor, part.buffer)
        if part.buffer is not None:
            part.buffer.hold()

    @staticmethod
    def _forget(record: ParameterRecord) -> None:
        if record.gathered is not None:
            record.gathered.let_go()
            record.gathered = None

    @staticmethod
    def _conceal(record: ParameterRecord) -> None:
        if record.exposed:
            record.param.grad, record.exposed = None, False


class GatheredGradient:
    """What is gathered for one parameter, seen from its optimizer's copy outside a step; a GradientSource."""

    def __init__(self, gradients: HostGradients, record: ParameterRecord) -> None:
        self._gradients, self._record = gradients, record

    def is_usable(self) -> bool:
        return True

    def get(self) -> torch.Tensor | None:
        return None if self._record.gathered is None else self._record.gathered.tensor

    def release(self) -> None:
        """The copy has another gradient now, or none: what was gathered for it is not to be stepped with."""
        self._gradients.drop_one(self._record)


def _shown(record: ParameterRecord) -> torch.Tensor | None:
    return record.gathered.tensor if record.exposed and record.gathered is not None else None
