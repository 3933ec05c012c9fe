"""The values of one output leaf, one per microbatch, that may still be on their way.

Made by merge.pack_outputs for `merge_output=False`; taken apart again by split when such data enters a model. Users
see it as a list. Knows nothing of devices: an arrival is anything with a `wait()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

from roundpipe.errors import ConfigError


class ArrivalEvent(Protocol):
    """Says when one value has arrived where it was sent."""

    def wait(self) -> None:
        """Block the host until the value may be read."""


@dataclass(frozen=True)
class Arriving:
    """A leaf of one microbatch's inputs or label that may still be on its way.

    Split puts it in place of a packed element that has an event; whoever reads the leaf orders itself after `event`
    and then uses `value`. It is never registered with pytree, so it stays one leaf whatever `value` is.
    """

    value: Any
    event: ArrivalEvent | None


class RoundPipePackedData(list[Any]):
    """A list of per-microbatch values; call `synchronize()` before reading them.

    Given to a RoundPipe unsynchronized, its elements become that call's microbatches and nobody waits on the host.
    `packed[a:b]`, `packed.copy()` and `packed + other` are plain lists, as for any list subclass, and carry no events:
    synchronize first. Copying with `copy`/`deepcopy` and pickling synchronize on their own.
    """

    def __init__(self, values: Iterable[Any] = (), events: Sequence[ArrivalEvent | None] = ()) -> None:
        super().__init__(values)
        if events and len(events) != len(self):
            raise ConfigError(
                f"RoundPipePackedData got {len(self)} values but {len(events)} events; give one event (or None) per "
                "value, or no events when every value has arrived"
            )
        self._pending: list[ArrivalEvent | None] = list(events)
        # [Note: events belong to values] The values as they were when the events were given. A list that was changed
        # since (append, reverse, ...) no longer lines up with its events and may only be used after waiting for them.
        self._awaited: list[Any] = list(self) if self._pending else []

    @property
    def events(self) -> list[ArrivalEvent | None]:
        """One per value; None for what has arrived. Waits if the list was changed, see [events belong to values]."""
        if not self._pending:
            return [None] * len(self)
        if not self._lines_up():
            self.synchronize()
            return [None] * len(self)
        return list(self._pending)

    def as_microbatches(self) -> list[Any]:
        """The values as leaves of their microbatches: `Arriving` where there is an event, else bare. Does not wait."""
        events = self.events
        return [value if event is None else Arriving(value, event) for value, event in zip(self, events, strict=True)]

    def synchronize(self) -> None:
        """Block until every value has arrived. Later calls return at once; a wait that failed is waited for again."""
        for event in self._pending:
            if event is not None:
                event.wait()
        self._pending, self._awaited = [], []

    def _lines_up(self) -> bool:
        return len(self) == len(self._awaited) and all(a is b for a, b in zip(self, self._awaited, strict=True))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Copy and pickle as values that have arrived: an event means nothing elsewhere."""
        self.synchronize()
        return (type(self), (list(self),))
