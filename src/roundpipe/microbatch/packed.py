"""Packed data: the values of one output leaf, one per microbatch, some of them still in transfer.

A call with `merge_output=False` returns packed data. A model that receives packed data uses the elements as
microbatches. Knows no devices: an event is any object with a `wait()`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

from roundpipe.errors import ConfigError


class ArrivalEvent(Protocol):
    """The end of one value's transfer."""

    def wait(self) -> None:
        """Block the host until the value may be read."""


@dataclass(frozen=True)
class Arriving:
    """A leaf of one microbatch's inputs or label that may still be in transfer.

    `split_call` replaces each element of packed data that has an event by an `Arriving`. A reader waits for `event`
    before it uses `value`. The class is not registered with pytree, so an `Arriving` is a single leaf even if `value`
    is a container.
    """

    value: Any
    event: ArrivalEvent | None


class RoundPipePackedData(list[Any]):
    """A list with one value per microbatch. Call `synchronize()` before reading the values.

    If it is passed to a RoundPipe, its elements become the call's microbatches, and the host does not wait for them.
    `packed[a:b]`, `packed.copy()` and `packed + other` are plain lists without events, as for any list subclass. Call
    `packed.synchronize()` before making one. `copy.copy`, `copy.deepcopy` and pickling synchronize automatically.
    """

    def __init__(self, values: Iterable[Any] = (), events: Sequence[ArrivalEvent | None] = ()) -> None:
        super().__init__(values)
        if events and len(events) != len(self):
            raise ConfigError(
                f"RoundPipePackedData got {len(self)} values but {len(events)} events; give one event (or None) per "
                "value, or no events when every value has arrived"
            )
        self._pending: list[ArrivalEvent | None] = list(events)
        # [Note: events belong to values] `_awaited` is a copy of the list at its construction. If the user changes the
        # list (append, reverse, ...), its elements no longer match the events by index. A changed list must therefore
        # be synchronized before its elements are used.
        self._awaited: list[Any] = list(self) if self._pending else []

    @property
    def events(self) -> list[ArrivalEvent | None]:
        """One event per value; None for a value that has arrived.

        Synchronizes first if the list was changed, see [Note: events belong to values].
        """
        is_unchanged = len(self) == len(self._awaited) and all(map(operator.is_, self, self._awaited))
        if self._pending and not is_unchanged:
            self.synchronize()
        return list(self._pending) or [None] * len(self)

    def as_microbatches(self) -> list[Any]:
        """Return one leaf per microbatch: an `Arriving` if the value has an event, else the value."""
        events = self.events  # waits here if the list was changed
        return [value if event is None else Arriving(value, event) for value, event in zip(self, events, strict=True)]

    def synchronize(self) -> None:
        """Block until every value has arrived. Later calls return at once; after a failed wait they retry."""
        for event in self._pending:
            if event is not None:
                event.wait()
        # Events are dropped only after all waits. If a wait raises, all events stay for the next call.
        self._pending, self._awaited = [], []

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Copy or pickle the values. The events are left out, because they are valid in this process only."""
        self.synchronize()
        return (type(self), (list(self),))
