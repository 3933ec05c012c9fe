"""The figures of one optimizer step: time, share of time the devices compute, bytes over the link, memory.

StepStats is what `model.stats()` returns. StepLog adds up the figures of calls by step. Knows numbers and seconds.
Knows no runs, devices or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from roundpipe.host_facts import available_host_bytes, resident_bytes
from roundpipe.timeline import Timeline


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device; None if the device does not count them.

    peak_bytes: the most that tensors of this process have occupied at a time since the process began.
    limit_bytes: what a plan may use now.
    """

    peak_bytes: int | None
    limit_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """Bytes that were copied between host and devices.

    Activations include inputs, labels, losses, buffers and the gradients of activations.
    weights_kept_bytes: not copied, because the weights were still on the device that needed them.
    """

    weights_up_bytes: int = 0
    activations_up_bytes: int = 0
    activations_down_bytes: int = 0
    gradients_down_bytes: int = 0
    weights_kept_bytes: int = 0

    @property
    def bytes_up(self) -> int:
        """All bytes that were copied from the host to devices."""
        return self.weights_up_bytes + self.activations_up_bytes

    @property
    def bytes_down(self) -> int:
        """All bytes that were copied from devices to the host."""
        return self.activations_down_bytes + self.gradients_down_bytes

    def counts(self) -> dict[str, int]:
        """The counts by name."""
        return {each.name: getattr(self, each.name) for each in fields(LinkBytes)}

    def plus(self, other: LinkBytes) -> LinkBytes:
        """The sums of both."""
        counts = other.counts()
        return LinkBytes(**{name: count + counts[name] for name, count in self.counts().items()})


@dataclass(frozen=True, kw_only=True)
class StepStats(LinkBytes):
    """The figures of one optimizer step and of all calls between it and the step before, with the bytes of LinkBytes.

    step: number of the step, 1 for the first one. 0 if no step is done: the figures are those of all finished calls.
    calls: number of calls of forward() and forward_backward().
    rows, tokens: sizes of the batches. tokens counts the elements of `input_ids`. None if unknown.
    seconds: time from the end of the step before (from the first call, if there is none) to the end of this step. A
        synchronous step ends when it is done, an asynchronous one when it was issued.
    device_share: by device, the share of the time, from 0 to 1, in which the device computed. The time of a device
        begins with the end of its work for the step before.
    device_memory: by device.
    host_rss_bytes: memory that this process occupies; None if the system does not report it.
    host_available_bytes: memory that this process can still allocate, within the limit of its control group; None if
        the system does not report it.
    optimizer_wait_s: time for which the caller waited for a synchronous step.
    loss: what the last call of forward_backward() returned; None if unknown.
    compiled_graphs, compile_s: graphs that this process has compiled for layers so far, and the time that took.
    """

    step: int
    calls: int
    rows: int | None
    tokens: int | None
    seconds: float
    device_share: Mapping[str, float]
    device_memory: Mapping[str, DeviceMemory]
    host_rss_bytes: int | None
    host_available_bytes: int | None
    optimizer_wait_s: float
    loss: float | None
    compiled_graphs: int = 0
    compile_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tokens is None or not self.seconds else self.tokens / self.seconds


class StepTime(NamedTuple):
    """When a step was issued and when the optimizer thread finished it, on the clock of time.perf_counter()."""

    step: int
    issued_s: float
    done_s: float
    is_async: bool

    @property
    def end_s(self) -> float:
        """When the caller could go on."""
        return self.issued_s if self.is_async else self.done_s


@dataclass(frozen=True, kw_only=True)
class CallFigures(LinkBytes):
    """The figures of one run, with the bytes of LinkBytes. `generation`: number of steps issued before it.

    is_call: False for a probe, and for the backward pass of a call that was counted with its forward pass.
    """

    generation: int
    is_call: bool
    started_s: float
    timeline: Timeline
    rows: int | None = None
    tokens: int | None = None
    loss: float | None = None


@dataclass
class _Tally:
    """The sums of one generation. busy_s and end_s: by device, time of its work and the end of its last work."""

    started_s: float = float("inf")
    busy_s: dict[str, float] = field(default_factory=dict)
    end_s: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    rows: int | None = 0
    tokens: int | None = 0
    loss: float | None = None
    link: LinkBytes = LinkBytes()

    def add(self, call: CallFigures) -> None:
        self.started_s = min(self.started_s, call.started_s)
        for device in call.timeline.devices():
            self.busy_s[device] = self.busy_s.get(device, 0.0) + call.timeline.busy_s(device)
            ends = [span.end_s for span in call.timeline.spans if span.device == device]
            self.end_s[device] = max(self.end_s.get(device, 0.0), *ends)
        if call.is_call:
            self.calls += 1
            self.rows = None if self.rows is None or call.rows is None else self.rows + call.rows
            self.tokens = None if self.tokens is None or call.tokens is None else self.tokens + call.tokens
        self.loss = self.loss if call.loss is None else call.loss
        self.link = self.link.plus(call)


class StepLog:
    """Adds up the figures of calls. Keeps the sums of the latest generations only."""

    def __init__(self) -> None:
        self._tallies: dict[int, _Tally] = {}

    def add(self, call: CallFigures) -> None:
        self._tallies.setdefault(call.generation, _Tally()).add(call)

    def stats(
        self, done: Sequence[StepTime], devices: Sequence[str], device_memory: Mapping[str, DeviceMemory]
    ) -> StepStats:
        """Return the figures of the last step in `done`, which are the latest finished steps in their order."""
        last = done[-1] if done else StepTime(0, 0.0, 0.0, False)
        generation = max(last.step - 1, 0)
        for old in [number for number in self._tallies if number < generation - 1]:
            del self._tallies[old]
        tally, before = self._tallies.get(generation, _Tally()), self._tallies.get(generation - 1, _Tally())
        start_s = done[-2].end_s if len(done) > 1 else tally.started_s
        end_s = last.end_s if last.step else max(tally.end_s.values(), default=start_s)
        return StepStats(
            step=last.step,
            calls=tally.calls,
            rows=tally.rows if tally.calls else None,
            tokens=tally.tokens if tally.calls else None,
            seconds=max(end_s - start_s, 0.0) if tally.calls or len(done) > 1 else 0.0,
            device_share={name: _share(name, tally, before.end_s.get(name, start_s)) for name in devices},
            **tally.link.counts(),
            device_memory=device_memory,
            host_rss_bytes=resident_bytes(),
            host_available_bytes=available_host_bytes(),
            optimizer_wait_s=0.0 if last.is_async else last.done_s - last.issued_s,
            loss=tally.loss,
        )


def _share(device: str, tally: _Tally, start_s: float) -> float:
    if device not in tally.busy_s or tally.end_s[device] <= start_s:
        return 0.0
    return tally.busy_s[device] / (tally.end_s[device] - start_s)
