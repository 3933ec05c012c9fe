"""The gate between devices and optimizer for one layer, as a state machine without threads.

LayerStore drives it under the monitor's lock. Every method is either a question or an event; an event that does not
fit the state is a bug of ours and asserts.

[Note: versions and generations]
Optimizer steps are numbered from 1. Weights of version v are those after update v (0: as wrapped). A call reads one
version. Gradients of generation g come from calls issued after g steps; step g + 1 consumes them. Weights lie in one
buffer, or in two when a call may read one version while the next is written. A buffer holds a range of versions: those
between which this layer did not change. So, layer by layer:

    event                       allowed when
    upload for version v        a buffer holds version v
    write version v             every upload that is due finds its version in the other buffer, or is of v or later,
    into a buffer               and the uploads issued from this buffer have run
    move versions between       no upload is due, and the uploads issued from both buffers have run
    buffers
    land for generation g       generation g - 1 is consumed, and earlier calls of generation g have landed
    consume generation g        no landing of generation g is due
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable

from roundpipe.devices import Event

_NOTHING = range(0)


class WeightBuffer(enum.IntEnum):
    FRONT = 0  # what the user's parameters are
    BACK = 1

    @property
    def other(self) -> WeightBuffer:
        return WeightBuffer(1 - self)


class LayerSlot:
    def __init__(self, front: range = range(0, 1), back: range = _NOTHING, generation: int = 0) -> None:
        self.open_generation = generation  # the generation whose gradients the host buffer takes
        self._held = [front, back]  # versions, by buffer
        self._uploads_due: Counter[tuple[Hashable, int]] = Counter()
        self._landings_due: Counter[tuple[Hashable, int]] = Counter()
        self._upload_events: list[list[Event]] = [[], []]

    # Weights.

    @property
    def newest_version(self) -> int:
        """The last one that is complete; of none while the only buffer is written."""
        return max(held.stop for held in self._held) - 1

    def buffer_of(self, version: int) -> WeightBuffer | None:
        return next((buffer for buffer in WeightBuffer if version in self._held[buffer]), None)

    def expect_uploads(self, call: Hashable, version: int, count: int) -> None:
        assert version > self.newest_version or self.can_upload(version), f"version {version} is gone: {self._held}"
        if count:
            self._uploads_due[call, version] += count

    def can_upload(self, version: int) -> bool:
        return self.buffer_of(version) is not None

    def upload_issued(self, call: Hashable, version: int, event: Event) -> None:
        """Also of a cancelled call: what it computes is thrown away, but its copy does run."""
        buffer = self.buffer_of(version)
        if (call, version) in self._uploads_due:
            assert buffer is not None
            self._decrease(self._uploads_due, (call, version))
        self._upload_events[buffer or WeightBuffer.FRONT].append(event)

    def can_write(self, version: int, buffer: WeightBuffer) -> bool:
        elsewhere = self._held[buffer.other]
        return all(due >= version or due in elsewhere for _, due in self._uploads_due)

    def take_upload_events(self, buffer: WeightBuffer) -> list[Event]:
        """Events that must have passed before the buffer may be overwritten."""
        events, self._upload_events[buffer] = self._upload_events[buffer], []
        return events

    def write_begun(self, version: int, buffer: WeightBuffer) -> None:
        assert self.can_write(version, buffer)
        self._held[buffer] = _NOTHING

    def written(self, version: int, buffer: WeightBuffer) -> None:
        assert self.can_write(version, buffer)
        assert version > self._held[buffer.other].stop - 1
        self._held[buffer] = range(version, version + 1)

    def write_revoked(self, version: int, buffer: WeightBuffer) -> None:
        """What was written into a buffer of its own is void: version `version` is what the one before was."""
        assert version - 1 in self._held[buffer.other]
        self._held[buffer] = _NOTHING
        self.unchanged(version)

    def unchanged(self, version: int) -> None:
        """Update `version` did not touch this layer: what was the newest stays it."""
        newest = max(WeightBuffer, key=lambda buffer: self._held[buffer].stop)
        held = self._held[newest]
        assert version == held.stop
        self._held[newest] = range(held.start, version + 1)

    def can_move(self) -> bool:
        """Whether versions may move between the buffers.

        An upload that is due may have chosen its source already: it is counted until its event is known.
        """
        return not self._uploads_due

    def moved_to_front(self) -> None:
        """The newest version has been copied over the older ones in the front buffer, which nobody needs any more."""
        assert self._held[WeightBuffer.BACK].stop - 1 == self.newest_version
        assert self.can_move()
        self._held = [self._held[WeightBuffer.BACK], _NOTHING]

    def swapped(self) -> None:
        """The contents of the two buffers have changed places."""
        assert self.can_move()
        self._held.reverse()
        self._upload_events.reverse()

    # Gradients.

    def expect_landings(self, call: Hashable, generation: int, count: int) -> None:
        assert generation >= self.open_generation
        if count:
            self._landings_due[call, generation] += count

    def can_land(self, call: Hashable, generation: int) -> bool:
        if self.open_generation != generation:
            return False
        # A Counter keeps the order in which calls were announced: sums do not depend on who is faster.
        return next((due for due, of in self._landings_due if of == generation), call) == call

    def landed(self, call: Hashable, generation: int) -> None:
        """Also of a cancelled call: then it was dropped, and nobody waits for it."""
        if (call, generation) in self._landings_due:
            assert self.can_land(call, generation)
            self._decrease(self._landings_due, (call, generation))

    def can_consume(self, generation: int) -> bool:
        return self.open_generation == generation and all(due != generation for _, due in self._landings_due)

    def consumed(self, generation: int) -> None:
        assert self.can_consume(generation)
        self.open_generation = generation + 1

    # Failure.

    def cancel(self, call: Hashable) -> None:
        """The call will upload and land nothing more. What it has issued still runs and is still waited for."""
        for due in (self._uploads_due, self._landings_due):
            for key in [key for key in due if key[0] == call]:
                del due[key]

    def is_idle(self) -> bool:
        return not self._uploads_due and not self._landings_due

    @staticmethod
    def _decrease(due: Counter[tuple[Hashable, int]], key: tuple[Hashable, int]) -> None:
        due[key] -= 1
        if not due[key]:
            del due[key]
