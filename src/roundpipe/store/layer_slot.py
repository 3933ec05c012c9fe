"""The gate between devices and optimizer for one layer, as a state machine without threads.

LayerStore drives it under the monitor's lock. Every method is either a question or an event; an event that does not
fit the state is a bug of ours and asserts.

[Note: versions and generations]
Optimizer steps are numbered from 1. Weights of version v are those after update v (0: as wrapped). A call reads one
version. Gradients of generation g come from calls issued after g steps; step g + 1 consumes them. So, layer by layer:

    event                       allowed when
    upload for version v        weights are of version v
    publish version v           no upload of an older version is due, and those issued have run
    land for generation g       generation g - 1 is consumed, and earlier calls of generation g have landed
    consume generation g        no landing of generation g is due
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from roundpipe.devices import Event


class LayerSlot:
    def __init__(self) -> None:
        self.weights_version = 0
        self.open_generation = 0  # the generation whose gradients the host buffer takes
        self._uploads_due: Counter[tuple[Hashable, int]] = Counter()
        self._landings_due: Counter[tuple[Hashable, int]] = Counter()
        self._upload_events: list[Event] = []

    # Weights.

    def expect_uploads(self, call: Hashable, version: int, count: int) -> None:
        assert version >= self.weights_version, f"version {version} is gone, the slot has {self.weights_version}"
        if count:
            self._uploads_due[call, version] += count

    def can_upload(self, version: int) -> bool:
        return self.weights_version == version

    def upload_issued(self, call: Hashable, version: int, event: Event) -> None:
        """Also of a cancelled call: what it computes is thrown away, but its copy does run."""
        if (call, version) in self._uploads_due:
            assert self.can_upload(version)
            self._decrease(self._uploads_due, (call, version))
        self._upload_events.append(event)

    def can_publish(self, version: int) -> bool:
        return all(due >= version for _, due in self._uploads_due)

    def take_upload_events(self) -> list[Event]:
        """Events that must have passed before the weights may be overwritten."""
        events, self._upload_events = self._upload_events, []
        return events

    def published(self, version: int) -> None:
        assert self.can_publish(version)
        assert version >= self.weights_version
        self.weights_version = version

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
