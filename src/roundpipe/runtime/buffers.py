"""The buffers of layers while a stage runs them.

Used by runtime.stage, one per task. Forward sees what earlier microbatches wrote, the host gets what the last one
leaves, and recomputation sees what forward saw and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundpipe.context import LayerPhase
from roundpipe.errors import UsageError
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.run import HostValues, Run
from roundpipe.runtime.transfer import Transfer

_Tensors = list[torch.Tensor | None]


class StageBuffers:
    def __init__(self, run: Run, transfer: Transfer) -> None:
        self._run = run
        self._recall = run.recall
        self._transfer = transfer
        self._as_call_began: dict[int, _Tensors] = {}
        self._before: list[tuple[torch.Tensor | None, int]] = []

    def upload(self, replica: Replica) -> None:
        layer_id = replica.record.layer_id
        values = self._up(self._recall.frozen_buffers.get(layer_id, []), None)
        self._as_call_began[layer_id] = values
        replica.set_buffers(values)

    def before_forward(self, replica: Replica, microbatch: int, phase: LayerPhase) -> None:
        if not replica.record.buffers:
            return
        layer_id = replica.record.layer_id
        if layer_id in self._recall.writes_buffers:
            if phase is LayerPhase.RECOMPUTE:
                replica.set_buffers(self._as_forward_saw_them(layer_id, microbatch))
            elif phase is LayerPhase.FORWARD:
                present = [None if b is None else b.clone() for b in replica.get_buffers()]
                self._recall.buffers_before[layer_id, microbatch] = self._down(present)
        self._before = [(b, -1 if b is None else b._version) for b in replica.get_buffers()]

    def after_forward(self, replica: Replica, microbatch: int, phase: LayerPhase) -> None:
        if not replica.record.buffers or phase is LayerPhase.RECOMPUTE:
            return
        layer_id = replica.record.layer_id
        after = replica.get_buffers()
        changed = [
            new is not old or (new is not None and new._version != version)
            for (old, version), new in zip(self._before, after, strict=True)
        ]
        replica.behaviour.writes_buffers = bool(replica.behaviour.writes_buffers) or any(changed)
        if any(changed):
            _refuse_shared_writes(replica, changed)
            self._recall.writes_buffers.add(layer_id)
            after = [None if b is None else b.detach() for b in after]
            replica.set_buffers(after)
        if layer_id in self._recall.writes_buffers and microbatch == self._run.num_microbatch - 1:
            self._run.note_result(self._run.buffer_results, layer_id, self._down(after))

    def _as_forward_saw_them(self, layer_id: int, microbatch: int) -> _Tensors:
        saved = self._recall.buffers_before.pop((layer_id, microbatch), None)
        if saved is None:  # nobody had written yet
            return [None if b is None else b.clone() for b in self._as_call_began[layer_id]]
        return self._up(saved.tensors, saved)

    def _up(self, values: Sequence[torch.Tensor | None], source: HostValues | None) -> _Tensors:
        after = () if source is None else (source.event,)
        arrived = iter(self._transfer.up([value for value in values if value is not None], after))
        return [None if value is None else next(arrived) for value in values]

    def _down(self, values: Sequence[torch.Tensor | None]) -> HostValues:
        copies, event = self._transfer.down([value for value in values if value is not None])
        arrived = iter(copies)
        return HostValues([None if value is None else next(arrived) for value in values], event)


def _refuse_shared_writes(replica: Replica, changed: Sequence[bool]) -> None:
    for record, was_changed in zip(replica.record.buffers, changed, strict=True):
        if was_changed and record.shared_between_layers:
            raise UsageError(
                f"buffer {record.name!r} belongs to several layers and layer {replica.record.layer_id} wrote to it; "
                "a pipeline cannot keep such writes in order. Give each layer a buffer of its own."
            )
