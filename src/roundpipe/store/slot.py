"""The gate between devices and optimizer for one layer, as a state machine without threads.

The caller holds the monitor. Every method is either a question or an event; an event that does not fit the state is a
bug in RoundPipe and fails an assertion.

[Note: versions and generations]
Optimizer steps are numbered from 1. Version v is the weights after step v; version 0 is the weights as wrapped. A call
reads one version. Gradients of generation g come from calls issued after g steps; step g + 1 consumes them. Weights lie
in one buffer, or in two if a call may read one version while the next is written. A buffer holds a range of versions,
because a step may leave the layer unchanged. So, for each layer:

    event                       allowed when
    upload version v            a buffer holds version v
    write version v             every upload that is due is of version v or later, or of a version in the other buffer,
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
    """The two places in host memory where a layer's weights can lie."""

    FRONT = 0  # the memory of the user's parameters
    BACK = 1  # exists only once an asynchronous step was made

    @property
    def other(self) -> WeightBuffer:
        return WeightBuffer(1 - self)


class LayerSlot:
    """Which versions of a layer exist, and which uploads and landings are still due."""

    def __init__(self, front: range = range(0, 1), back: range = _NOTHING, generation: int = 0) -> None:
        self.open_generation = generation  # the generation whose gradients may land now
        self._held = [front, back]  # versions by buffer
        self._uploads_due: Counter[tuple[Hashable, int]] = Counter()
        self._landings_due: Counter[tuple[Hashable, int]] = Counter()
        self._upload_events: list[list[Event]] = [[], []]

    # Weights.

    @property
    def newest_version(self) -> int:
        """The newest complete version; -1 while the only buffer is written."""
        return max(held.stop for held in self._held) - 1

    def buffer_of(self, version: int) -> WeightBuffer | None:
        """The buffer that holds a version; None if it is not written yet or was overwritten."""
        return next((buffer for buffer in WeightBuffer if version in self._held[buffer]), None)

    def expect_uploads(self, call: Hashable, version: int, count: int) -> None:
        """A call will upload `version` so many times."""
        assert version > self.newest_version or self.can_upload(version), (
            f"version {version} was overwritten: {self._held}"
        )
        if count:
            self._uploads_due[call, version] += count

    def can_upload(self, version: int) -> bool:
        return self.buffer_of(version) is not None

    def upload_issued(self, call: Hashable, version: int, event: Event) -> None:
        """An upload was queued; `event` passes when it has run. Cancelled calls too have copies that still run."""
        buffer = self.buffer_of(version)
        if (call, version) in self._uploads_due:
            assert buffer is not None
            self._decrease(self._uploads_due, (call, version))
        self._upload_events[buffer or WeightBuffer.FRONT].append(event)

    def can_write(self, version: int, buffer: WeightBuffer) -> bool:
        """Whether no upload that is due needs what the buffer holds."""
        elsewhere = self._held[buffer.other]
        return all(due >= version or due in elsewhere for _, due in self._uploads_due)

    def take_upload_events(self, buffer: WeightBuffer) -> list[Event]:
        """The events that must pass before the buffer may be overwritten; they are returned only once."""
        events, self._upload_events[buffer] = self._upload_events[buffer], []
        return events

    def write_begun(self, version: int, buffer: WeightBuffer) -> None:
        """The buffer is being overwritten and holds no version."""
        assert self.can_write(version, buffer)
        self._held[buffer] = _NOTHING

    def written(self, version: int, buffer: WeightBuffer) -> None:
        """The buffer holds the new version, which is complete."""
        assert self.can_write(version, buffer)
        assert version > self._held[buffer.other].stop - 1
        self._held[buffer] = range(version, version + 1)

    def write_revoked(self, version: int, buffer: WeightBuffer) -> None:
        """What was written into the buffer is discarded: `version` has the weights of the version before."""
        assert version - 1 in self._held[buffer.other]
        self._held[buffer] = _NOTHING
        self.unchanged(version)

    def unchanged(self, version: int) -> None:
        """Step `version` did not change the layer: the newest weights are also those of `version`."""
        newest = max(WeightBuffer, key=lambda buffer: self._held[buffer].stop)
        held = self._held[newest]
        assert version == held.stop
        self._held[newest] = range(held.start, version + 1)

    def can_move(self) -> bool:
        """Whether versions may move between the buffers.

        An upload that is due may already have chosen its source, because it is due until its event is known.
        """
        return not self._uploads_due

    def moved_to_front(self) -> None:
        """The newest version was copied to the front buffer, over versions that no call needs any more."""
        assert self._held[WeightBuffer.BACK].stop - 1 == self.newest_version
        assert self.can_move()
        self._held = [self._held[WeightBuffer.BACK], _NOTHING]

    def swapped(self) -> None:
        """The contents of the two buffers were exchanged."""
        assert self.can_move()
        self._held.reverse()
        self._upload_events.reverse()

    # Gradients.

    def expect_landings(self, call: Hashable, generation: int, count: int) -> None:
        """A call will land gradients of this layer so many times."""
        assert generation >= self.open_generation
        if count:
            self._landings_due[call, generation] += count

    def can_land(self, call: Hashable, generation: int) -> bool:
        """Whether it is this call's turn to land."""
        if self.open_generation != generation:
            return False
        # A Counter keeps the order in which calls were announced, so sums do not depend on which call is faster.
        return next((due for due, of in self._landings_due if of == generation), call) == call

    def landed(self, call: Hashable, generation: int) -> None:
        """Gradients of the call were added. Those of a cancelled call were dropped and are not due."""
        if (call, generation) in self._landings_due:
            assert self.can_land(call, generation)
            self._decrease(self._landings_due, (call, generation))

    def can_consume(self, generation: int) -> bool:
        """Whether all gradients of the generation have landed and no step has taken them."""
        return self.open_generation == generation and all(due != generation for _, due in self._landings_due)

    def consumed(self, generation: int) -> None:
        """A step has taken the gradients: those of the next generation may land."""
        assert self.can_consume(generation)
        self.open_generation = generation + 1

    # Failure.

    def cancel(self, call: Hashable) -> None:
        """The call will upload and land nothing more. Uploads that it has issued still run and are waited for."""
        for due in (self._uploads_due, self._landings_due):
            for key in [key for key in due if key[0] == call]:
                del due[key]

    def is_idle(self) -> bool:
        """Whether no upload and no landing is due."""
        return not self._uploads_due and not self._landings_due

    @staticmethod
    def _decrease(due: Counter[tuple[Hashable, int]], key: tuple[Hashable, int]) -> None:
        due[key] -= 1
        if not due[key]:
            del due[key]
