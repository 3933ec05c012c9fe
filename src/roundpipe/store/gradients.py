"""The host's sums of gradients, from the first landing after a step until the next step takes them.

The landing thread adds, the optimizer thread takes, callers read and drop. One lock makes each operation atomic;
LayerStore decides the order of the operations. Knows no device and no call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from roundpipe.store.records import HostGradient, ParameterRecord


class HostGradients:
    """The sums of all parameters of one model, kept in `ParameterRecord.gathered`.

    Also the GradientSource of optimizer copies outside steps: a copy then shows the sum of its parameter.
    """

    def __init__(self, parameters: Sequence[ParameterRecord]) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()
        self.num_additions = 0  # grows with every addition: an unchanged number means that no sum has changed

    def add(self, gradients: list[HostGradient], cancelled: Callable[[], bool]) -> None:
        """Add each gradient to the sum of its parameter. Does nothing if the run was cancelled.

        Removes from the list what it has added; the caller still owns the rest. The first gradient of a parameter
        becomes the sum without a copy, as in autograd.
        """
        with self._lock, torch.no_grad():
            # Asked under the lock: after a failure `drop` must not miss a late addition.
            if cancelled():
                return
            self.num_additions += len(gradients)
            while gradients:
                gradient = gradients[-1]  # leaves the list once it was added, so that an error cannot lose it
                total = gradient.record.gathered
                if total is None:
                    gradient.record.gathered = gradients.pop()
                else:
                    total.tensor.add_(gradient.tensor)
                    gradients.pop().release()

    def has_any(self) -> bool:
        """Whether any gradient has landed since the last step."""
        return any(record.gathered is not None for record in self._parameters)

    def take(self, records: Sequence[ParameterRecord]) -> dict[ParameterRecord, HostGradient]:
        """Hand the sums of `records` to the caller, who releases them; the next gradient starts a new sum."""
        with self._lock:
            taken = {}
            for record in records:
                if record.exposed:
                    _conceal(record)
                if record.gathered is not None:
                    taken[record], record.gathered = record.gathered, None
            return taken

    def drop(self) -> None:
        """Forget all sums, and clear `.grad` of every parameter, also where the user has set it."""
        with self._lock:
            for record in self._parameters:
                record.exposed, record.param.grad = False, None
                _forget(record)

    # Shown as `.grad` of the user's parameters.

    def expose(self) -> None:
        """Set `.grad` of every parameter to its sum."""
        with self._lock:
            for record in self._parameters:
                if record.gathered is not None and not record.exposed:
                    # Landing buffers use their views again: what the user does to this tensor object must not stay.
                    record.gathered.tensor = record.gathered.tensor.detach()
                record.param.grad = None if record.gathered is None else record.gathered.tensor
                record.exposed = record.gathered is not None

    def conceal(self) -> None:
        """Clear `.grad` where it shows a sum: a step will take the sum, and later additions belong to the next step."""
        with self._lock:
            for record in self._parameters:
                _conceal(record)

    def touched_by_user(self) -> list[ParameterRecord]:
        """Parameters whose `.grad` the user has set, replaced or cleared since it was exposed or concealed."""
        return [
            record
            for record in self._parameters
            if record.param.grad is not (record.gathered.tensor if record.exposed and record.gathered else None)
        ]

    def adopt_touched(self, records: Sequence[ParameterRecord]) -> None:
        """Follow the user's changes of `.grad`: drop a sum that was cleared, take one that was replaced, add a new one.

        Each sum changes by one assignment, so an interrupt neither loses a gradient nor counts it twice.
        """
        with self._lock, torch.no_grad():
            for record in records:
                users, old = record.param.grad, record.gathered
                new = None if record.exposed else old
                if users is not None:
                    own = torch.empty_like(record.weights, memory_format=torch.preserve_format).copy_(users)
                    new = HostGradient(record, own if new is None else new.tensor + own)
                record.gathered, record.param.grad, record.exposed = new, None, False
                if old is not None and new is not old:
                    old.release()

    # Shown as `.grad` of optimizer copies outside steps; see GradientSource.

    def is_usable(self) -> bool:
        """Any thread may read a sum outside steps."""
        return True

    def gradient_of(self, record: ParameterRecord) -> torch.Tensor | None:
        """The sum of one parameter. Does not wait: a view begins when all gradients have landed."""
        return None if record.gathered is None else record.gathered.tensor

    def release(self, record: ParameterRecord) -> None:
        """Drop the sum of one parameter: its optimizer copy has a gradient tensor or none instead."""
        with self._lock:
            _conceal(record)
            _forget(record)


def _forget(record: ParameterRecord) -> None:
    if record.gathered is not None:
        record.gathered.release()
        record.gathered = None


def _conceal(record: ParameterRecord) -> None:
    if record.exposed:
        record.param.grad, record.exposed = None, False
