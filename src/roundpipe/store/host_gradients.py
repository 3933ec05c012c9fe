"""Gradients gathered in host memory since the optimizer last took them.

The landing thread adds, the optimizer thread takes, callers look and drop. One lock makes each of these whole; their
order is LayerStore's business. Knows no device and no call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from roundpipe.store.records import ParameterRecord


class HostGradients:
    def __init__(self, parameters: Sequence[ParameterRecord]) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()

    def add(self, parts: Sequence[tuple[ParameterRecord, torch.Tensor]], cancelled: Callable[[], bool]) -> None:
        """Put each part onto the sum so far; the first part is taken as it is, as autograd does."""
        with self._lock, torch.no_grad():
            if cancelled():
                return
            for record, part in parts:
                self._add_one(record, part)

    def drop(self) -> bool:
        """Forget everything gathered, here and in `param.grad`. Returns whether there was anything."""
        with self._lock:
            had_any = any(record.has_grad for record in self._parameters)
            for record in self._parameters:
                record.has_grad = record.exposed = False
                record.param.grad = None
            return had_any

    def take(self, records: Sequence[ParameterRecord]) -> dict[ParameterRecord, torch.Tensor]:
        """What is gathered, with its memory; sums start anew."""
        with self._lock:
            taken = {}
            for record in records:
                self._conceal(record)
                if record.has_grad:
                    assert record.host_grad is not None
                    taken[record] = record.host_grad
                    record.has_grad, record.host_grad = False, None
            return taken

    def give_back(self, record: ParameterRecord, memory: torch.Tensor) -> None:
        """Memory that was taken may be used for the next gradient."""
        with self._lock:
            if record.host_grad is None:
                record.host_grad = memory

    def expose(self) -> None:
        """Let `param.grad` of every parameter show what is gathered."""
        with self._lock:
            for record in self._parameters:
                record.param.grad = record.host_grad if record.has_grad else None
                record.exposed = record.has_grad

    def conceal(self) -> None:
        """Take `param.grad` back: what is gathered now belongs to a step, what the user adds later to the next one."""
        with self._lock:
            for record in self._parameters:
                self._conceal(record)

    def touched_by_user(self) -> list[ParameterRecord]:
        """Parameters whose `.grad` is not what we showed last: set, replaced or cleared by the user."""
        return [r for r in self._parameters if r.param.grad is not (r.host_grad if r.exposed else None)]

    def adopt_touched(self, records: Sequence[ParameterRecord]) -> None:
        """Follow the user: a cleared gradient is dropped, a replaced one taken, a new one added."""
        with self._lock, torch.no_grad():
            for record in records:
                users = record.param.grad
                if record.exposed:
                    record.has_grad = False
                if users is not None:
                    self._add_one(record, users)
                record.param.grad, record.exposed = None, False

    def _add_one(self, record: ParameterRecord, part: torch.Tensor) -> None:
        if record.has_grad:
            assert record.host_grad is not None
            record.host_grad.add_(part)
            return
        if record.host_grad is None:
            record.host_grad = torch.empty_like(record.weights, memory_format=torch.preserve_format)
        record.host_grad.copy_(part)
        record.has_grad = True

    @staticmethod
    def _conceal(record: ParameterRecord) -> None:
        if record.exposed:
            record.param.grad, record.exposed = None, False
